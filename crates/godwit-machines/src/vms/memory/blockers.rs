//! Blockers of a VM's memory on the way out of the memory pool and back while the guest runs.

use godwit_qemu::machine::{Machine, field, is_set};

use crate::vms::memory::pooled;
use godwit_context::config::NodeConfig;

/// Returns the blockers of moving a VM's memory out of the memory pool and back at all, a sentence each.
pub fn of(config: &NodeConfig, pool: &str, machine: &Machine) -> Vec<String> {
    let mut blockers = devices(&machine.plain_words(), &machine.disk_backends());
    blockers.extend(pooled::immovable(config, pool));
    blockers
}

/// Names the files with memory of the VM outside the memory pool, a sentence each: QEMU does not send memory in a
/// shared file when the VM moves without the memory.
pub(crate) fn unsent(machine: &Machine) -> Vec<String> {
    let files = machine.memory_files().into_iter();
    let shared = files.filter(|file| file.is_shared);
    let sentences = shared.map(|file| {
        format!(
            "it has memory in {} as well, which would not be sent: start it without that, or use another way of moving \
             memory",
            file.path.display()
        )
    });
    sentences.collect()
}

/// Returns the blockers among the words of QEMU's command line: devices and options with a hold on pages of the memory.
/// The node's disks, with the back ends in `disks`, do not block.
fn devices(words: &[String], disks: &[String]) -> Vec<String> {
    words
        .iter()
        .filter_map(|word| device(word, disks))
        .collect()
}

fn device(word: &str, disks: &[String]) -> Option<String> {
    // Each pins pages, or lets a device reach pages: accesses to moved pages are lost.
    const PINNED: [&str; 7] = [
        "vfio-",
        "vhostf",
        "vhost-scsi",
        "vhost-vdpa",
        "vhost-vsock",
        "scsi-generic",
        "scsi-block",
    ];
    let name = word.split(',').next().unwrap_or_default();
    let has = |part: &&str| word.contains(*part);
    let what = if let Some(nic) = Machine::nic_of(word) {
        format!(
            "NIC {nic} uses the memory through a mapping that does not follow it: remove the NIC"
        )
    } else if word.starts_with("vhost-user-blk")
        && field(word, "chardev").is_some_and(|(_, id)| disks.contains(&id))
    {
        return None;
    } else if has(&"vhost-user") {
        format!(
            "device {name} is served by a process that maps the memory itself and cannot follow it: remove the device"
        )
    } else if PINNED.iter().any(has) || is_set(word, "vhost") {
        format!(
            "device {name} uses pages of the memory directly and cannot follow it: remove the device"
        )
    } else if ["mem-lock", "mlock"].iter().any(|name| is_set(word, name)) {
        format!(
            "its QEMU locks its memory ({word}), and memory that is locked would be there twice: start it without that"
        )
    } else {
        return None;
    };
    Some(format!(
        "{what}, or leave the memory in its pool with --stay-in-pool"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_qemu::machine::{MachineNic, NicUplink, Parts};

    #[test]
    fn devices_that_keep_pages_are_refused_by_name() {
        let words = [
            "vhost-user-blk-pci,chardev=godwit-disk0,num-queues=1",
            "vhost-user-blk-pci-non-transitional,id=d,chardev=mine",
            "tap,id=n,vhost=off",
            "virtio-blk-pci,drive=d",
            "vhost-user-fs-pci,chardev=c",
            "vhost-user-blk-pci,chardev=foreign",
            "vhost-vdpa,vhostdev=/dev/vhost-vdpa-0",
            "vhost-scsi-pci,wwpn=naa.5",
            "tap,id=m,vhost=on",
            "vfio-pci,host=01:00.0",
            "scsi-generic,drive=d",
            "mem-lock=off",
            "cpu-pm=on,mem-lock=no",
            "mem-lock=on",
        ];
        let disks = ["godwit-disk0", "mine"].map(str::to_owned);
        let refused = devices(&words.map(str::to_owned), &disks);
        let names = ["vhost-user-fs-pci", "vhost-user-blk-pci", "vhost-vdpa"];
        for (refused, name) in refused.iter().zip(names) {
            assert!(refused.contains(name), "{refused}");
        }
        assert_eq!(refused.len(), 8, "{refused:?}");
        assert!(refused[7].contains("(mem-lock=on)"), "{refused:?}");
    }

    #[test]
    fn what_is_on_by_any_of_its_words_is_refused_and_what_is_off_is_not() {
        for option in ["mem-lock", "mlock", "vhost"] {
            for no in ["off", "no", "false", "n"] {
                let word = format!("first=1,{option}={no},last=on");
                assert_eq!(device(&word, &[]), None, "{word}");
            }
            for yes in ["", "=on", "=yes", "=true", "=y", "=on-fault"] {
                let word = format!("first=1,{option}{yes},last=off");
                assert!(device(&word, &[]).is_some(), "{word}");
            }
        }
        assert_eq!(device("tap,id=vhost,ifname=mem-lock", &[]), None);
    }

    #[test]
    fn shared_memory_that_is_not_in_the_pool_is_named() {
        let words = [
            "q",
            "-object",
            "memory-backend-file,id=m,mem-path=/pool/v.memory,size=1G,share=on",
            "-object",
            r#"{"qom-type":"memory-backend-file","id":"n","mem-path":"/n","size":4096,"share":true}"#,
            "-object",
            "memory-backend-file,id=p,mem-path=/private,size=4096",
        ];
        let mut machine = Machine::adopt(&words.map(str::to_owned), |_| None).expect("a machine");
        let pooled = machine.memory_files().swap_remove(0);
        machine.take_memory_file(&pooled);
        let unsent = unsent(&machine);
        let [only] = unsent.as_slice() else {
            panic!("{unsent:?}")
        };
        assert!(
            only.contains("memory in /n as well, which would not be sent"),
            "{only}"
        );
    }

    #[test]
    fn a_nic_of_this_node_is_refused_once_by_its_number() {
        let nic = |number: u8| MachineNic {
            mac: format!("52:54:00:00:00:0{number}"),
            uplink: NicUplink::Tap(format!("tap{number}")),
            queues: 1,
            vlan: None,
            trunk: Vec::new(),
        };
        let machine = Machine::build(
            "qemu-system-x86_64",
            &Parts {
                name: "web",
                machine: None,
                accelerator: "tcg",
                memory: 64 << 20,
                cpus: 1,
                disks: &[String::from("root")],
                nics: &[nic(0), nic(1)],
                poolable: true,
                arguments: &[],
            },
        );
        let refused = devices(&machine.plain_words(), &machine.disk_backends());
        let [first, second] = refused.as_slice() else {
            panic!("{refused:?}")
        };
        assert!(first.starts_with("NIC 0 ") && second.starts_with("NIC 1 "));
    }
}
