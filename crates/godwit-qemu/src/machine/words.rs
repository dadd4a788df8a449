//! The parts of a command line: words, with gaps for the parts that differ from node to node.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One word of a command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Word {
    /// A word that is the same on every node.
    Plain(String),
    /// A word with the socket of a disk between two parts.
    Disk {
        /// Text before the socket's path.
        before: String,
        /// Name of the disk.
        disk: String,
        /// Text after the path.
        after: String,
    },
    /// A word with the socket of one of the machine's NICs between two parts.
    Nic {
        /// Text before the socket's path.
        before: String,
        /// Number of the NIC, from 0.
        nic: usize,
        /// Text after the path.
        after: String,
    },
    /// A word with the path of the guest's memory between two given parts: a file of a memory pool, or a folder for
    /// local memory.
    MemoryFile {
        /// Text before the path.
        before_memory: String,
        /// Text after the path.
        after_memory: String,
    },
    /// The description of the guest's memory: a file of a memory pool, or local memory.
    Memory {
        /// Bytes of the memory.
        memory_bytes: u64,
    },
}

/// The host's end of a NIC served by the node, with the same meaning on every node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NicUplink {
    /// An existing tap, by name.
    Tap(String),
    /// A tap made by the node and plugged into this bridge.
    Bridge(String),
}

/// A NIC served by the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineNic {
    /// MAC address, as six pairs of hexadecimal digits.
    pub mac: String,
    /// Uplink of the NIC's packets.
    pub uplink: NicUplink,
    /// Pairs of queues, at least 1.
    #[serde(default = "one")]
    pub queues: u16,
    /// Untagged VLAN of the NIC in a bridge that separates VLANs.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// Tagged VLANs in such a bridge, as the first and the last of each range.
    #[serde(default)]
    pub trunk: Vec<(u16, u16)>,
}

/// Returns the default number of queue pairs.
const fn one() -> u16 {
    1
}

/// Returns the position and the value of a key in an option such as `socket,id=a,path=/x,,y`.
pub fn field(option: &str, key: &str) -> Option<((usize, usize), String)> {
    let bytes = option.as_bytes();
    let mut start = 0;
    while start < bytes.len() {
        let mut end = start;
        while end < bytes.len() {
            if bytes[end] == b',' {
                if bytes.get(end + 1) != Some(&b',') {
                    break;
                }
                end += 1;
            }
            end += 1;
        }
        let end = end.min(bytes.len());
        if let Some(value) = option[start..end]
            .strip_prefix(key)
            .and_then(|rest| rest.strip_prefix('='))
        {
            return Some(((end - value.len(), end), value.replace(",,", ",")));
        }
        start = end + 1;
    }
    None
}

/// Returns true if a word sets this option to anything but one of QEMU's words for no. An option without a value is on.
pub fn is_set(word: &str, option: &str) -> bool {
    word.split(',').any(|part| {
        let (name, value) = part.split_once('=').unwrap_or((part, "on"));
        name == option && !matches!(value, "off" | "no" | "false" | "n")
    })
}

/// Returns the value of a key in an option in QEMU's own notation, or of a text in JSON.
pub(crate) fn property(option: &str, key: &str) -> Option<String> {
    if option.starts_with('{') {
        let object: Value = serde_json::from_str(option).ok()?;
        return object.get(key)?.as_str().map(str::to_owned);
    }
    field(option, key).map(|(_, value)| value)
}
