use super::*;

const QEMU: Version = Version([10, 0, 2]);

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn places() -> Places {
    Places {
        folder: PathBuf::from("/n/vms/v"),
    }
}

fn built(arguments: &[&str]) -> String {
    built_with(&[], arguments)
}

fn built_with(nics: &[MachineNic], arguments: &[&str]) -> String {
    let disks = strings(&["root", "data"]);
    let arguments = strings(arguments);
    let parts = Parts {
        name: "v",
        disks: &disks,
        nics,
        memory: 512 << 20,
        poolable: false,
        cpus: 2,
        machine: Some("q35"),
        accelerator: "tcg",
        arguments: &arguments,
    };
    Machine::build("qemu-system-x86_64", &parts)
        .command_line(
            QEMU,
            &places(),
            |disk| PathBuf::from(format!("/n/{disk}")),
            None,
            None,
        )
        .join(" ")
}

#[test]
fn a_new_vm_has_shared_memory_disks_a_monitor_and_a_console() {
    assert_eq!(
        built(&["-nic", "none"]),
        "-name v -machine q35 -accel tcg -m 536870912B -smp 2 \
         -object memory-backend-memfd,id=godwit-memory,size=536870912B,share=on \
         -machine memory-backend=godwit-memory -display none \
         -chardev socket,id=godwit-disk0,path=/n/root,reconnect-ms=100 \
         -device vhost-user-blk-pci,chardev=godwit-disk0,num-queues=2 \
         -chardev socket,id=godwit-disk1,path=/n/data,reconnect-ms=100 \
         -device vhost-user-blk-pci,chardev=godwit-disk1,num-queues=2 -nic none -cpu max \
         -chardev socket,id=godwit-console,path=/n/vms/v/console.sock,server=on,wait=off \
         -serial chardev:godwit-console \
         -chardev socket,id=godwit-qmp,path=/n/vms/v/qmp.sock,server=on,wait=off \
         -mon chardev=godwit-qmp,mode=control -monitor none"
    );
}

#[test]
fn a_nic_of_the_nodes_has_a_socket_and_its_address() {
    let nic = MachineNic {
        mac: String::from("52:54:00:00:00:07"),
        uplink: NicUplink::Tap(String::from("tap0")),
        queues: 1,
        vlan: None,
        trunk: Vec::new(),
    };
    let line = built_with(std::slice::from_ref(&nic), &[]);
    let wanted = "-chardev socket,id=godwit-nic0,path=/n/vms/v/nic0.vhost,reconnect-ms=100 \
                  -netdev vhost-user,id=godwit-net0,chardev=godwit-nic0 \
                  -device virtio-net-pci,netdev=godwit-net0,mac=52:54:00:00:00:07,romfile=,ctrl_guest_offloads=off";
    assert!(line.contains(wanted) && !line.contains("mq=on"), "{line}");
    let line = built_with(&[MachineNic { queues: 4, ..nic }], &[]);
    let back_end = "vhost-user,id=godwit-net0,chardev=godwit-nic0,queues=4 ";
    let device = ",mac=52:54:00:00:00:07,romfile=,ctrl_guest_offloads=off,mq=on,vectors=10";
    assert!(line.contains(back_end) && line.contains(device), "{line}");
}

#[test]
fn a_processor_model_is_named_unless_the_arguments_do() {
    for (arguments, model) in [
        (&[][..], Some("-cpu max")),
        (&["-accel", "kvm"], Some("-cpu host")),
        (&["-machine", "accel=kvm"], Some("-cpu host")),
        (&["-accel", "xen"], None),
        (&["--cpu", "Nehalem"], Some("--cpu Nehalem")),
    ] {
        let line = built(arguments);
        let at: Vec<_> = line.match_indices("-cpu ").collect();
        assert_eq!(at.len(), usize::from(model.is_some()), "{line}");
        assert!(model.is_none_or(|model| line.contains(model)), "{line}");
    }
}

#[test]
fn what_the_arguments_say_is_not_said_twice() {
    let line = built(&[
        "--accel",
        "kvm",
        "-m",
        "1G",
        "-smp",
        "4",
        "-nographic",
        "-machine",
        "memory-backend=own",
        "-serial",
        "file:/x",
    ]);
    for absent in [
        "tcg",
        "536870912",
        "godwit-memory",
        "-display",
        "console",
        "-smp 2",
    ] {
        assert!(!line.contains(absent), "{absent}: {line}");
    }
}

#[test]
fn an_adopted_command_line_keeps_what_is_the_machines_own() {
    let command = strings(&[
        "/usr/bin/qemu-system-x86_64",
        "-machine",
        "pc,memory-backend=m",
        "-S",
        "-daemonize",
        "-pidfile",
        "/p",
        "-qmp",
        "unix:/q,server",
        "-chardev",
        "socket,path=/m,id=mon0",
        "-mon",
        "chardev=mon0,mode=control",
        "-nographic",
        "-chardev",
        "socket,id=c,path=/a,,b.vhost,reconnect-ms=5",
        "-device",
        "vhost-user-blk-pci,chardev=c",
        "-incoming",
        "defer",
    ]);
    let root = || Served::Disk(String::from("root"));
    let disk_of = |path: &Path| (path == Path::new("/a,b.vhost")).then(root);
    let machine = Machine::adopt(&command, disk_of).expect("a machine");
    assert_eq!(machine.disks, ["root"]);
    assert!(machine.bound_here.is_empty(), "{machine:?}");
    let line = machine.command_line(
        QEMU,
        &places(),
        |disk| PathBuf::from(format!("/other,{disk}")),
        Some("pc-i440fx-9.0"),
        None,
    );
    assert_eq!(
        line.join(" "),
        "-machine pc,memory-backend=m -display none \
         -chardev socket,id=c,path=/other,,root,reconnect-ms=5 \
         -device vhost-user-blk-pci,chardev=c -machine type=pc-i440fx-9.0 \
         -chardev socket,id=godwit-console,path=/n/vms/v/console.sock,server=on,wait=off \
         -serial chardev:godwit-console \
         -chardev socket,id=godwit-qmp,path=/n/vms/v/qmp.sock,server=on,wait=off \
         -mon chardev=godwit-qmp,mode=control -monitor none"
    );
}

#[test]
fn what_cannot_be_repeated_elsewhere_is_noted() {
    let command = strings(&["q", "-netdev", "tap,fd=22,id=n", "-add-fd", "set=1,fd=3"]);
    let machine = Machine::adopt(&command, |_| None).expect("a machine");
    assert!(machine.bound_here.len() >= 2, "{:?}", machine.bound_here);
}

#[test]
fn fields_are_found_whatever_stands_around_them() {
    for (option, key, value) in [
        ("socket,id=a,path=/x", "path", Some("/x")),
        ("path=/x,,y,id=a", "path", Some("/x,y")),
        ("path=/x,,", "path", Some("/x,")),
        ("socket,mypath=/x", "path", None),
        ("path=", "path", Some("")),
        (",,,", "path", None),
        ("", "path", None),
        ("a=1,fd=2", "fd", Some("2")),
    ] {
        let found = field(option, key).map(|(_, value)| value);
        assert_eq!(found.as_deref(), value, "{option}");
    }
}

#[test]
fn a_machine_survives_the_store() {
    let command = strings(&["q", "-chardev", "socket,path=/a,id=c", "-m", "1G"]);
    let machine =
        Machine::adopt(&command, |_| Some(Served::Disk(String::from("root")))).expect("a machine");
    let stored = serde_json::to_vec(&machine).expect("writes");
    let read: Machine = serde_json::from_slice(&stored).expect("reads");
    assert_eq!(read, machine);
    assert_eq!(read.last_value(&["m"]), Some("1G"));
}

#[test]
fn memory_that_somebody_else_put_into_a_file_is_elsewhere_at_another_node() {
    let given = "memory-backend-file,id=m,mem-path=/pool/a,,b.memory,size=1G,share=on";
    let command = strings(&["q", "-object", given, "-machine", "q35,memory-backend=m"]);
    let mut machine = Machine::adopt(&command, |_| None).expect("a machine");
    assert!(!machine.is_poolable(), "nobody said that it is in a pool");
    let path = PathBuf::from("/pool/a,b.memory");
    let files = machine.memory_files();
    assert_eq!((&files[0].path, files[0].told.as_str()), (&path, given));
    machine.take_memory_file(&files[0]);
    assert!(machine.is_poolable() && machine.memory_files().is_empty());
    let stored = serde_json::to_vec(&machine).expect("writes");
    assert_eq!(
        serde_json::from_slice::<Machine>(&stored).expect("reads"),
        machine
    );
    let line = |memory: Option<&PoolMemory>| {
        let line = machine.command_line(QEMU, &places(), |_| PathBuf::new(), None, memory);
        line[1].clone()
    };
    let memory = PoolMemory {
        path: PathBuf::from("/other,/c.memory"),
        part: None,
    };
    assert_eq!(
        line(Some(&memory)),
        "memory-backend-file,id=m,mem-path=/other,,/c.memory,size=1G,share=on"
    );
    assert_eq!(
        line(None),
        "memory-backend-file,id=m,mem-path=/dev/shm,size=1G,share=on"
    );
    for other in [
        "memory-backend-ram,id=m,size=1G",
        "memory-backend-file,id=m,size=1G",
    ] {
        let command = strings(&["q", "-object", other]);
        let machine = Machine::adopt(&command, |_| None).expect("a machine");
        assert_eq!(machine.memory_files(), [], "{other}");
    }
}

#[test]
fn memory_in_a_part_of_a_device_is_mapped_from_there_and_local_memory_from_its_start() {
    let machine = Machine::build(
        "q",
        &Parts {
            name: "v",
            disks: &[],
            nics: &[],
            memory: 1 << 30,
            poolable: true,
            cpus: 1,
            machine: None,
            accelerator: "tcg",
            arguments: &[],
        },
    );
    let line = |memory: Option<&PoolMemory>| {
        let line = machine.command_line(QEMU, &places(), |_| PathBuf::new(), None, memory);
        let words = line
            .iter()
            .filter(|word| word.starts_with("memory-backend-file"));
        words.cloned().collect::<String>()
    };
    let memory = PoolMemory {
        path: PathBuf::from("/dev/dax0.0"),
        part: Some(MemoryPart {
            offset: 2 << 20,
            align: 2 << 20,
        }),
    };
    let before = "memory-backend-file,id=godwit-memory,size=1073741824B,share=on,mem-path=";
    assert_eq!(
        line(Some(&memory)),
        format!("{before}/dev/dax0.0,offset=2097152B,align=2097152B")
    );
    assert_eq!(line(None), format!("{before}/dev/shm"));
}

#[test]
fn a_file_with_memory_is_found_however_qemu_was_told_of_it() {
    let file = "memory-backend-file";
    for (word, is_shared, is_replaceable) in [
        (format!("{file},id=m,mem-path=/x,share=on"), true, true),
        (format!("{file},mem-path=/x,share,id=m"), true, true),
        (format!("{file},mem-path=/x,share=n,id=m"), false, true),
        (format!("{file},mem-path=/x,id=m"), false, true),
        (
            format!("id=m,qom-type={file},mem-path=/x,share=true"),
            true,
            true,
        ),
        (
            format!(r#"{{"qom-type":"{file}","id":"m","mem-path":"/x","share":true}}"#),
            true,
            false,
        ),
        (
            format!("{{'qom-type':'{file}','id':'m','mem-path':'/x','share':true}}"),
            true,
            false,
        ),
        (
            format!(r#"{{"qom-type":"{file}","id":"m","mem-path":"/x","share":false}}"#),
            false,
            false,
        ),
    ] {
        let other = "memory-backend-file,id=n,size=1M,mem-path=/y";
        let command = strings(&["q", "-object", other, "-object", &word]);
        let mut machine = Machine::adopt(&command, |_| None).expect("a machine");
        let files = machine.memory_files();
        let [_, found] = files.as_slice() else {
            panic!("{word}: {files:?}")
        };
        assert_eq!(found.path, Path::new("/x"), "{word}");
        assert_eq!(found.is_shared, is_shared, "{word}");
        assert_eq!(found.is_replaceable(), is_replaceable, "{word}");
        machine.take_memory_file(found);
        let left = machine.memory_files().len();
        assert_eq!(left, if is_replaceable { 1 } else { 2 }, "{word}");
    }
}

#[test]
fn an_adopted_machine_brings_the_nics_whose_sockets_it_uses() {
    let nic = MachineNic {
        mac: String::from("52:54:00:00:00:01"),
        uplink: NicUplink::Tap(String::from("tap0")),
        queues: 2,
        vlan: None,
        trunk: Vec::new(),
    };
    let at =
        |path: &Path| (path == Path::new("/a/nics/web.vhost")).then(|| Served::Nic(nic.clone()));
    let adopt = |netdev: &str, device: &str| {
        let command = strings(&[
            "qemu-system-x86_64",
            "-chardev",
            "socket,path=/a/nics/web.vhost,reconnect-ms=100,id=c",
            "-netdev",
            netdev,
            "-device",
            device,
        ]);
        Machine::adopt(&command, at).expect("a machine")
    };
    let fits = [
        (
            "vhost-user,id=n,chardev=c,queues=2",
            "virtio-net-pci,netdev=n,mac=52:54:00:00:00:01",
        ),
        (
            r#"{"type":"vhost-user","chardev":"c","id":"n"}"#,
            r#"{"driver":"virtio-net-pci","netdev":"n","mac":"52:54:00:00:00:01"}"#,
        ),
    ];
    for (netdev, device) in fits {
        let machine = adopt(netdev, device);
        assert_eq!(machine.nics, std::slice::from_ref(&nic));
        assert_eq!(machine.nic_backends(), [(String::from("n"), 0)]);
        assert_eq!(machine.nic_mismatch(0), None);
        let line = machine.command_line(QEMU, &places(), |_| unreachable!(), None, None);
        let socket = "socket,path=/n/vms/v/nic0.vhost,reconnect-ms=100,id=c";
        assert!(line.contains(&socket.to_owned()), "{line:?}");
    }
    for (netdev, device, why) in [
        ("vhost-user,id=n,chardev=d", fits[0].1, "no -netdev"),
        (fits[0].0, "virtio-net-pci,netdev=m", "no -device"),
        (fits[0].0, "virtio-net-pci,netdev=n", "was given no MAC"),
        (
            fits[0].0,
            "virtio-net-pci,netdev=n,mac=52:54:00:00:00:02",
            "52:54:00:00:00:02",
        ),
    ] {
        let said = adopt(netdev, device).nic_mismatch(0).expect(why);
        assert!(said.contains(why), "{said}");
    }
}
