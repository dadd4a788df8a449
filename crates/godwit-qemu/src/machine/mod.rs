//! The start of a VM's QEMU: the words of its command line, with gaps for the parts that differ from node to node.

mod adopted;
mod memory_files;
mod reconnect;
mod words;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::adopted::Served;
pub use self::memory_files::{MemoryFile, MemoryPart, PoolMemory};
pub(crate) use self::words::property;
pub use self::words::{MachineNic, NicUplink, Word, field, is_set};
use crate::version::Version;

/// Id of the shared memory that the node adds.
const MEMORY_ID: &str = "godwit-memory";

/// Folder in which QEMU makes an unnamed file for local memory.
const LOCAL_MEMORY: &str = "/dev/shm";

/// QEMU's longest wait before reconnecting to a disk's socket, in milliseconds.
const RECONNECT_MS: u32 = 100;

/// Prefix of the network back ends of the node's NICs; a number follows.
const NETDEV: &str = "godwit-net";

/// A VM in a form that every node can start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// QEMU program: a name to look up, or a path.
    pub program: String,
    /// Command line without the node's additions.
    pub words: Vec<Word>,
    /// Disks in the order of the command line.
    pub disks: Vec<String>,
    /// True if the first serial port is the node's console socket.
    pub console: bool,
    /// NICs served by the node, in the order of the command line.
    #[serde(default)]
    pub nics: Vec<MachineNic>,
    /// Resources that cannot be repeated on another node.
    #[serde(default)]
    pub bound_here: Vec<String>,
}

/// The parts of a new VM.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    /// Name of the VM.
    pub name: &'a str,
    /// Disks of the VM.
    pub disks: &'a [String],
    /// NICs that the node serves.
    pub nics: &'a [MachineNic],
    /// Bytes of memory.
    pub memory: u64,
    /// True if the memory may be in a memory pool, now or later.
    pub poolable: bool,
    /// Virtual processors.
    pub cpus: u32,
    /// Machine type, unless named in QEMU's own arguments.
    pub machine: Option<&'a str>,
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
    /// Further arguments for QEMU.
    pub arguments: &'a [String],
}

/// The places of a VM's files on a node.
#[derive(Clone, Debug)]
pub struct Places {
    /// Folder of the VM.
    pub folder: PathBuf,
}

impl Places {
    /// Returns the socket of QEMU's monitor.
    pub fn qmp(&self) -> PathBuf {
        self.folder.join("qmp.sock")
    }

    /// Returns the monitor's word of QEMU's command line, which no other process has.
    pub fn monitor_word(&self) -> String {
        server("godwit-qmp", &self.qmp())
    }

    /// Returns the socket of the first serial port.
    pub fn console(&self) -> PathBuf {
        self.folder.join("console.sock")
    }

    /// Returns the socket of a NIC that the node serves.
    pub fn nic(&self, index: usize) -> PathBuf {
        self.folder.join(format!("nic{index}.vhost"))
    }

    /// Returns the file of QEMU's messages.
    pub fn log(&self) -> PathBuf {
        self.folder.join("qemu.log")
    }

    /// Returns the socket at which an incoming VM's memory arrives.
    pub fn incoming(&self) -> PathBuf {
        self.folder.join("incoming.sock")
    }

    /// Returns the socket at which the memory continues to arrive after a broken connection.
    pub fn recovering(&self) -> PathBuf {
        self.folder.join("recovering.sock")
    }

    /// Returns the common prefix of the pipes of QEMU's spare monitor.
    pub fn spare(&self) -> PathBuf {
        self.folder.join("spare")
    }

    /// Returns the pipe of QEMU's input.
    pub fn spare_input(&self) -> PathBuf {
        self.folder.join("spare.in")
    }

    /// Returns the pipe of QEMU's output.
    pub fn spare_output(&self) -> PathBuf {
        self.folder.join("spare.out")
    }

    /// Returns the socket to which QEMU sends the memory of a departing VM.
    pub fn outgoing(&self) -> PathBuf {
        self.folder.join("outgoing.sock")
    }

    /// Returns the socket of the memory agent inside QEMU.
    pub fn agent(&self) -> PathBuf {
        self.folder.join("memory.sock")
    }

    /// Returns the library of the memory agent.
    pub fn agent_library(&self) -> PathBuf {
        self.folder.join("memory-agent.so")
    }

    /// Returns the pipe through which QEMU saves the state of its devices.
    pub fn device_state(&self) -> PathBuf {
        self.folder.join("device-state")
    }

    /// Returns the socket of QEMU's debugger stub while in use.
    pub fn debugger(&self) -> PathBuf {
        self.folder.join("gdb.sock")
    }
}

/// Returns the name of an option with one or two dashes, as QEMU takes both.
fn option(word: &str) -> Option<&str> {
    let name = word.strip_prefix("--").or_else(|| word.strip_prefix('-'))?;
    (!name.is_empty()).then_some(name)
}

fn has(arguments: &[String], names: &[&str]) -> bool {
    arguments
        .iter()
        .filter_map(|word| option(word))
        .any(|name| names.contains(&name))
}

/// Returns true if arguments for QEMU name an accelerator.
pub fn names_accelerator(arguments: &[String]) -> bool {
    let property = |word: &String| word.contains("accel=");
    has(arguments, &["accel", "enable-kvm"]) || arguments.iter().any(property)
}

impl Machine {
    /// Returns the command line of a new VM. Options in QEMU's own arguments are not repeated.
    pub fn build(program: &str, parts: &Parts<'_>) -> Self {
        let given = parts.arguments;
        let mut words = Vec::new();
        let mut push = |pair: [&str; 2]| words.extend(pair.map(|w| Word::Plain(w.to_owned())));
        let shares_memory = given.iter().any(|word| word.contains("memory-backend="));
        if !has(given, &["name"]) {
            push(["-name", parts.name]);
        }
        if let Some(machine) = parts.machine {
            push(["-machine", machine]);
        }
        if !names_accelerator(given) {
            push(["-accel", parts.accelerator]);
        }
        if !has(given, &["m"]) {
            push(["-m", &format!("{}B", parts.memory)]);
        }
        if !has(given, &["smp"]) {
            push(["-smp", &parts.cpus.to_string()]);
        }
        if !shares_memory {
            let backend = match parts.poolable {
                true => Word::Memory {
                    memory_bytes: parts.memory,
                },
                false => Word::Plain(format!(
                    "memory-backend-memfd,id={MEMORY_ID},size={}B,share=on",
                    parts.memory
                )),
            };
            words.extend([Word::Plain(String::from("-object")), backend]);
            let machine = format!("memory-backend={MEMORY_ID}");
            words.extend(["-machine", &machine].map(|w| Word::Plain(w.to_owned())));
        }
        let mut push = |pair: [&str; 2]| words.extend(pair.map(|w| Word::Plain(w.to_owned())));
        if !has(given, &["display", "nographic", "vnc", "spice"]) {
            push(["-display", "none"]);
        }
        for (number, disk) in parts.disks.iter().enumerate() {
            let id = format!("godwit-disk{number}");
            words.push(Word::Plain(String::from("-chardev")));
            words.push(Word::Disk {
                before: format!("socket,id={id},path="),
                disk: disk.clone(),
                after: format!(",reconnect-ms={RECONNECT_MS}"),
            });
            let device = format!("vhost-user-blk-pci,chardev={id},num-queues={}", parts.cpus);
            words.extend(["-device", &device].map(|w| Word::Plain(w.to_owned())));
        }
        for (number, nic) in parts.nics.iter().enumerate() {
            let chardev = format!("godwit-nic{number}");
            let netdev = format!("{NETDEV}{number}");
            words.push(Word::Plain(String::from("-chardev")));
            words.push(Word::Nic {
                before: format!("socket,id={chardev},path="),
                nic: number,
                after: format!(",reconnect-ms={RECONNECT_MS}"),
            });
            let mut back_end = format!("vhost-user,id={netdev},chardev={chardev}");
            // No boot ROM, whose size may differ from host to host, and must not in a move. No control of guest
            // offloads: QEMU would answer the guest's setting and tell no other process, and a guest with XDP would get
            // unfit packets.
            let mut device = format!(
                "virtio-net-pci,netdev={netdev},mac={},romfile=,ctrl_guest_offloads=off",
                nic.mac
            );
            if nic.queues > 1 {
                back_end.push_str(&format!(",queues={}", nic.queues));
                // Interrupts for each queue, for the control queue, and for changes of the configuration.
                device.push_str(&format!(",mq=on,vectors={}", 2 * nic.queues + 2));
            }
            let pairs = ["-netdev", &back_end, "-device", &device];
            words.extend(pairs.map(|w| Word::Plain(w.to_owned())));
        }
        words.extend(given.iter().cloned().map(Word::Plain));
        let mut machine = Self {
            program: program.to_owned(),
            words,
            disks: parts.disks.to_vec(),
            nics: parts.nics.to_vec(),
            console: !has(given, &["serial", "nographic"]),
            bound_here: Vec::new(),
        };
        if let Some(model) = machine.usual_processor() {
            machine
                .words
                .extend(["-cpu", model].map(|w| Word::Plain(w.to_owned())));
        }
        machine
    }

    /// Returns the processor model for a machine without a named one: the accelerator's full model. QEMU's own default
    /// (qemu64) is older than the target of today's guests (x86-64-v2).
    fn usual_processor(&self) -> Option<&'static str> {
        let program = Path::new(&self.program).file_name()?.to_str()?;
        let has_max = matches!(
            program.strip_prefix("qemu-system-")?,
            "x86_64" | "i386" | "aarch64" | "s390x"
        );
        let named = self.last_value(&["cpu"]).is_some();
        match self.accelerator() {
            Some("kvm") if has_max && !named => Some("host"),
            Some("tcg") if has_max && !named => Some("max"),
            _ => None,
        }
    }

    /// Returns the words of the command line that are the same on every node.
    pub fn plain_words(&self) -> Vec<String> {
        let words = self.words.iter().filter_map(|word| match word {
            Word::Plain(word) => Some(word.clone()),
            Word::Disk { .. }
            | Word::Nic { .. }
            | Word::Memory { .. }
            | Word::MemoryFile { .. } => None,
        });
        words.collect()
    }

    /// Returns the ids of the character devices connected to the node's disks.
    pub fn disk_backends(&self) -> Vec<String> {
        let ids = self.words.iter().filter_map(|word| match word {
            Word::Disk { before, after, .. } => {
                let id = field(before, "id").or_else(|| field(after, "id"));
                id.map(|(_, id)| id)
            }
            _ => None,
        });
        ids.collect()
    }

    /// Returns the number of the node's NIC connected to QEMU by a word of the command line.
    pub fn nic_of(word: &str) -> Option<usize> {
        let id = word.strip_prefix("vhost-user,id=")?.split(',').next()?;
        id.strip_prefix(NETDEV)?.parse().ok()
    }

    /// Returns the network back ends of the node's NICs, each as an id and the NIC's number.
    pub fn nic_backends(&self) -> Vec<(String, usize)> {
        let sockets = self.words.iter().filter_map(|word| match word {
            Word::Nic { before, nic, after } => {
                let (_, id) = field(&format!("{before}{after}"), "id")?;
                Some((id, *nic))
            }
            _ => None,
        });
        let sockets: Vec<(String, usize)> = sockets.collect();
        let backends = self.values("netdev").filter_map(|value| {
            let chardev = property(value, "chardev")?;
            let (_, nic) = sockets.iter().find(|(id, _)| *id == chardev)?;
            Some((property(value, "id")?, *nic))
        });
        backends.collect()
    }

    /// Returns true if the guest's memory may be in a memory pool.
    pub fn is_poolable(&self) -> bool {
        self.words
            .iter()
            .any(|word| matches!(word, Word::Memory { .. } | Word::MemoryFile { .. }))
    }

    /// Returns the words with which this node starts the VM, without the program, for a QEMU of this version.
    /// `machine_type` is the meaning of an alias such as `q35` at the VM's first start. `memory` is the guest's memory
    /// in a pool; `None` means local memory.
    pub fn command_line(
        &self,
        qemu: Version,
        places: &Places,
        disk_socket: impl Fn(&str) -> PathBuf,
        machine_type: Option<&str>,
        memory: Option<&PoolMemory>,
    ) -> Vec<String> {
        let socket = |before: &str, path: &Path, after: &str| {
            let [before, after] = [before, after].map(|part| reconnect::for_version(part, qemu));
            format!("{before}{}{after}", escaped(path))
        };
        let mut line: Vec<String> = self
            .words
            .iter()
            .map(|word| match word {
                Word::Plain(word) => word.clone(),
                Word::Disk {
                    before,
                    disk,
                    after,
                } => socket(before, &disk_socket(disk), after),
                Word::Nic { before, nic, after } => socket(before, &places.nic(*nic), after),
                Word::Memory { memory_bytes } => memory_backend(*memory_bytes, memory),
                Word::MemoryFile {
                    before_memory,
                    after_memory,
                } => {
                    let file = memory.map(|memory| memory.path.as_path());
                    memory_files::in_place(before_memory, file, after_memory)
                }
            })
            .collect();
        let mut push = |pair: [&str; 2]| line.extend(pair.map(str::to_owned));
        if let Some(machine_type) = machine_type {
            push(["-machine", &format!("type={machine_type}")]);
        }
        if self.console {
            push(["-chardev", &server("godwit-console", &places.console())]);
            push(["-serial", "chardev:godwit-console"]);
        }
        push(["-chardev", &places.monitor_word()]);
        push(["-mon", "chardev=godwit-qmp,mode=control"]);
        // Prevents QEMU's own monitor on standard input.
        push(["-monitor", "none"]);
        line
    }

    /// Returns the accelerator; `None` if neither KVM nor TCG.
    pub fn accelerator(&self) -> Option<&'static str> {
        let plain = |name: &str| {
            self.words
                .iter()
                .any(|word| matches!(word, Word::Plain(word) if option(word) == Some(name)))
        };
        let named = self.last_value(&["accel"]).map(str::to_owned);
        let property = self.words.iter().find_map(|word| match word {
            Word::Plain(word) => field(word, "accel").map(|(_, value)| value),
            _ => None,
        });
        let named = named.or(property).unwrap_or_default();
        if plain("enable-kvm") || named.starts_with("kvm") {
            Some("kvm")
        } else if named.starts_with("tcg") || named.is_empty() {
            // QEMU's own default.
            Some("tcg")
        } else {
            None
        }
    }

    /// Returns the value of the last option of one of these names.
    pub fn last_value(&self, names: &[&str]) -> Option<&str> {
        self.pairs()
            .filter_map(|(name, value)| names.contains(&name).then_some(value))
            .last()
    }

    /// Returns the values of all options of this name.
    pub fn values(&self, wanted: &str) -> impl Iterator<Item = &str> {
        self.pairs()
            .filter_map(move |(name, value)| (name == wanted).then_some(value))
    }

    /// Returns each option with the following word, the value if the option takes one.
    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.words.windows(2).filter_map(|pair| match pair {
            [Word::Plain(word), Word::Plain(value)] => Some((option(word)?, value.as_str())),
            _ => None,
        })
    }
}

/// Returns the memory backend of a file. QEMU sends no memory of a named file to another QEMU that maps the same file,
/// but would send a memfd.
fn memory_backend(bytes: u64, memory: Option<&PoolMemory>) -> String {
    let before = format!("memory-backend-file,id={MEMORY_ID},size={bytes}B,share=on,mem-path=");
    let part = memory.and_then(|memory| memory.part);
    // QEMU refuses a device with a larger alignment than this.
    let part = part.map(|part| format!(",offset={}B,align={}B", part.offset, part.align));
    let file = memory.map(|memory| memory.path.as_path());
    memory_files::in_place(&before, file, &part.unwrap_or_default())
}

/// Returns a character device that listens at a socket.
fn server(id: &str, path: &Path) -> String {
    format!("socket,id={id},path={},server=on,wait=off", escaped(path))
}

/// Escapes a path for QEMU's options, where a comma ends a value unless doubled.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests;
