//! What a command line is made of: words, with gaps for what differs from node to node.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One word of a command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Word {
    /// The same on every node.
    Plain(String),
    /// The socket of a disk stands between two parts.
    Disk {
        /// What comes before the socket's path.
        before: String,
        /// Whose socket it is.
        disk: String,
        /// What comes after.
        after: String,
    },
    /// The socket of one of the machine's NICs stands between two parts.
    Nic {
        /// What comes before the socket's path.
        before: String,
        /// Which NIC, from 0.
        nic: usize,
        /// What comes after.
        after: String,
    },
    /// The path of the guest's memory stands between two parts of what somebody else said about it: a file of a memory
    /// pool, or a folder for local memory.
    MemoryFile {
        /// What comes before the path.
        before_memory: String,
        /// What comes after.
        after_memory: String,
    },
    /// The description of the guest's memory: a file of a memory pool, or local memory.
    Memory {
        /// Bytes of the memory.
        memory_bytes: u64,
    },
}

/// Where a NIC that the node serves is plugged in on the host. The same is meant on every node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NicUplink {
    /// A tap that somebody made, by its name.
    Tap(String),
    /// A tap that the node makes and plugs into this bridge.
    Bridge(String),
}

/// A NIC that the node serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineNic {
    /// Its MAC address, as six pairs of hexadecimal digits.
    pub mac: String,
    /// Where its packets go.
    pub uplink: NicUplink,
    /// Pairs of queues, at least 1.
    #[serde(default = "one")]
    pub queues: u16,
    /// In a bridge that keeps VLANs apart: the one that it is in without a tag.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// In such a bridge: those that it is in with their tags, as the first and the last of each range.
    #[serde(default)]
    pub trunk: Vec<(u16, u16)>,
}

/// What NICs have of which nobody said how many pairs of queues they have.
const fn one() -> u16 {
    1
}

/// Where the value of a key stands in an option such as `socket,id=a,path=/x,,y`, and the value.
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

/// Whether a word has this option with anything but one of QEMU's words for no: an option without a value is on.
pub fn is_set(word: &str, option: &str) -> bool {
    word.split(',').any(|part| {
        let (name, value) = part.split_once('=').unwrap_or((part, "on"));
        name == option && !matches!(value, "off" | "no" | "false" | "n")
    })
}

/// The value of a key in an option in QEMU's own notation, or of text in one that is JSON.
pub(crate) fn property(option: &str, key: &str) -> Option<String> {
    if option.starts_with('{') {
        let object: Value = serde_json::from_str(option).ok()?;
        return object.get(key)?.as_str().map(str::to_owned);
    }
    field(option, key).map(|(_, value)| value)
}
