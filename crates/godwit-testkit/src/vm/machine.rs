//! QEMU's command line for the guest.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::Process;
use crate::vm::GuestImage;

/// The network of a guest that a node runs, and whose NIC the node serves.
#[derive(Clone, Debug, Default)]
pub struct GuestNetwork {
    /// Argument of `godwit vm run --nic`, such as `tap=tap0`; empty for no NIC of the node.
    pub nic: String,
    /// Arguments for a card that QEMU itself serves, apart by spaces.
    pub own_card: String,
    /// The guest's address with the prefix length, such as `10.80.0.10/24`.
    pub address: String,
    /// TCP port of the guest's echo service.
    pub echo_port: u16,
    /// UDP port at which the guest echoes datagrams to the group 239.80.0.1; 0 for none.
    pub group_port: u16,
    /// Shell script of the guest, run before the load, once the card has the address.
    pub script: String,
}

/// A random pointer chase in the guest; none by default.
#[derive(Clone, Copy, Debug)]
pub struct PointerChase {
    /// MiB of memory.
    pub mib: u64,
    /// Share of the time, in per cent. A chase that never rests leaves no other program the processor.
    pub percent: u64,
}

impl Default for PointerChase {
    fn default() -> Self {
        Self {
            mib: 0,
            percent: 100,
        }
    }
}

/// A page writer in the guest; none by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct DirtyPages {
    /// MiB of memory.
    pub mib: u64,
    /// MiB of pages a second; 0 for no limit.
    pub rate_mib: u64,
}

/// The load of the guest. The default suits an emulated CPU.
#[derive(Clone, Debug)]
pub struct GuestLoad {
    /// Writes of 4 KiB a second on each disk; 0 for no limit.
    pub rate: u64,
    /// Unchecked random writes in flight on each disk beside these; 0 for none.
    pub writers: u64,
    /// The file written on each disk, in MiB.
    pub file_mb: u64,
    /// Memory that is rewritten and checked, in MiB; 0 for none.
    pub memory_mb: u64,
    /// MiB of this memory rewritten a second.
    pub memory_rate_mb: u64,
    /// Memory through which pointers are chased.
    pub pointer_chase: PointerChase,
    /// Memory of which each page is written in turn.
    pub dirty_pages: DirtyPages,
    /// MiB of memory scanned in sequence and compared; 0 for none.
    pub linear_scan_mib: u64,
    /// MiB of memory of which single words are read and written at random; 0 for none.
    pub random_access_mib: u64,
    /// MiB of memory written once and compared in the end; 0 for none.
    pub cold_mib: u64,
    /// Milliseconds between two beats of the guest ([`GuestConsole::beat_gap`](super::GuestConsole::beat_gap)); 0 for
    /// none.
    pub beat_ms: u64,
    /// True if the load goes on after a reboot, and checks that no acknowledged write is missing
    /// ([`GuestConsole::lost_writes`](super::GuestConsole::lost_writes)).
    pub reboots: bool,
    /// Seed of all written data and offsets.
    pub seed: u64,
    /// The guest's network, if any.
    pub network: Option<GuestNetwork>,
}

impl GuestLoad {
    /// Returns the default load with this seed.
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed,
            ..Self::default()
        }
    }
}

impl Default for GuestLoad {
    fn default() -> Self {
        Self {
            rate: 200,
            writers: 0,
            file_mb: 32,
            memory_mb: 32,
            memory_rate_mb: 32,
            pointer_chase: PointerChase::default(),
            dirty_pages: DirtyPages::default(),
            linear_scan_mib: 0,
            random_access_mib: 0,
            cold_mib: 0,
            beat_ms: 0,
            reboots: false,
            seed: 1,
            network: None,
        }
    }
}

impl GuestLoad {
    /// Returns the kernel's command line, for `-append`, on a machine with `disks` disks.
    pub fn kernel_arguments(&self, disks: usize) -> String {
        let network = self.network.as_ref().map_or_else(String::new, |network| {
            let GuestNetwork {
                address,
                echo_port,
                group_port,
                script,
                ..
            } = network;
            let script = STANDARD.encode(script);
            format!(
                " network.address={address} network.script={script} godwit.echo_port={echo_port} \
                 godwit.group_port={group_port}"
            )
        });
        let PointerChase { mib, percent } = self.pointer_chase;
        let chase = format!("godwit.pointer_chase_mb={mib} godwit.pointer_chase_percent={percent}");
        let DirtyPages { mib, rate_mib } = self.dirty_pages;
        let dirty = format!("godwit.dirty_pages_mb={mib} godwit.dirty_pages_rate_mb={rate_mib}");
        let scan = format!(
            "godwit.linear_scan_mb={} godwit.random_access_mb={} godwit.cold_mb={}",
            self.linear_scan_mib, self.random_access_mib, self.cold_mib
        );
        format!(
            "console=ttyS0 loglevel=4 panic=-1 godwit.disks={disks} godwit.rate={} godwit.writers={} \
             godwit.file_mb={} godwit.memory_mb={} godwit.memory_rate_mb={} godwit.seed={} godwit.beat_ms={} godwit.reboots={} {chase} {dirty} {scan}{network}",
            self.rate,
            self.writers,
            self.file_mb,
            self.memory_mb,
            self.memory_rate_mb,
            self.seed,
            self.beat_ms,
            u8::from(self.reboots)
        )
    }
}

/// The unix socket of the machine's serial console.
#[derive(Clone, Debug)]
pub enum ConsoleSocket {
    /// QEMU connects to the listener there, again and again.
    Connect(PathBuf),
    /// QEMU listens there.
    Listen(PathBuf),
}

#[derive(Clone, Debug)]
pub enum MachineDisk {
    /// A vhost-user-blk server at this socket.
    VhostUser(PathBuf),
    /// A raw image read and written by QEMU itself, with direct I/O, as block node `diskN` in a thread of its own. In
    /// QEMU's main loop a block job would delay the timers of an emulated processor.
    Image(PathBuf),
}

/// A machine: the guest, the disks, and the console.
#[derive(Clone, Debug)]
pub struct GuestMachine {
    /// The boot files.
    pub guest: GuestImage,
    /// The disks, in the guest's order.
    pub disks: Vec<MachineDisk>,
    pub console: ConsoleSocket,
    /// Memory in MiB: at least 160 for the guest, and the checked memory.
    pub memory_mb: u64,
    pub cpus: u32,
    pub load: GuestLoad,
    /// The file of the memory; `None` for an unnamed file.
    pub memory_file: Option<PathBuf>,
}

impl GuestMachine {
    /// Creates a machine of 192 MiB with one CPU and the default load.
    pub fn new(guest: GuestImage, disks: Vec<MachineDisk>, console: ConsoleSocket) -> Self {
        Self {
            guest,
            disks,
            console,
            memory_mb: 192,
            cpus: 1,
            load: GuestLoad::default(),
            memory_file: None,
        }
    }

    /// Returns QEMU's arguments. The memory is shared with the disks' back ends. Both ends of a live migration get the
    /// same arguments, apart from their sockets.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut all = Arguments(Vec::new());
        all.add("-nodefaults", "");
        all.add("-no-reboot", "");
        all.add("-display", "none");
        all.add("-accel", "tcg");
        all.add("-machine", "q35,memory-backend=mem");
        all.add("-smp", &self.cpus.to_string());
        all.add("-m", &self.memory_mb.to_string());
        let memory = |kind| format!("{kind},id=mem,size={}M,share=on", self.memory_mb);
        match &self.memory_file {
            None => all.add("-object", &memory("memory-backend-memfd")),
            Some(file) => {
                let before = memory("memory-backend-file") + ",mem-path=";
                all.add_path("-object", &before, file);
            }
        }
        all.add_path("-kernel", "", &self.guest.kernel());
        all.add_path("-initrd", "", &self.guest.initramfs());
        all.add("-append", &self.load.kernel_arguments(self.disks.len()));
        match &self.console {
            ConsoleSocket::Connect(path) => {
                all.add_path("-chardev", "socket,id=console,reconnect-ms=100,path=", path);
            }
            ConsoleSocket::Listen(path) => {
                all.add_path(
                    "-chardev",
                    "socket,id=console,server=on,wait=off,path=",
                    path,
                );
            }
        }
        all.add("-serial", "chardev:console");
        for (index, disk) in self.disks.iter().enumerate() {
            all.add_disk(index, disk, self.cpus);
        }
        all.0
    }

    /// Starts QEMU with these and further arguments. QEMU's messages go to standard error.
    pub fn spawn(&self, further: &[OsString]) -> io::Result<Process> {
        Process::spawn(
            Command::new("qemu-system-x86_64")
                .args(self.arguments())
                .args(further)
                .stdin(Stdio::null()),
        )
    }
}

struct Arguments(Vec<OsString>);

impl Arguments {
    fn add(&mut self, option: &str, value: &str) {
        self.0.push(option.into());
        if !value.is_empty() {
            self.0.push(value.into());
        }
    }

    fn add_disk(&mut self, index: usize, disk: &MachineDisk, cpus: u32) {
        match disk {
            MachineDisk::VhostUser(socket) => {
                self.add_path(
                    "-chardev",
                    &format!("socket,id=disk{index},reconnect-ms=100,path="),
                    socket,
                );
                self.add(
                    "-device",
                    &format!("vhost-user-blk-pci,id=vhost{index},chardev=disk{index}"),
                );
            }
            MachineDisk::Image(image) => {
                let node = format!("disk{index}");
                self.0.extend(block_nodes(&node, image).map(OsString::from));
                self.add("-object", &format!("iothread,id=thread{index}"));
                let device =
                    format!("virtio-blk-pci,drive={node},num-queues={cpus},iothread=thread{index}");
                self.add("-device", &device);
            }
        }
    }

    fn add_path(&mut self, option: &str, before: &str, path: &Path) {
        let mut value = OsString::from(before);
        value.push(path);
        self.0.extend([option.into(), value]);
    }
}

/// Returns the arguments with which QEMU or a `qemu-storage-daemon` opens an image in the fastest way, on a block node
/// of this name.
pub fn block_nodes(name: &str, image: &Path) -> [String; 4] {
    let image = image.display();
    let option = || String::from("--blockdev");
    [
        option(),
        format!(
            "driver=file,node-name={name}-file,filename={image},cache.direct=on,aio=io_uring,discard=unmap"
        ),
        option(),
        format!("driver=raw,node-name={name},file={name}-file,cache.direct=on,discard=unmap"),
    ]
}
