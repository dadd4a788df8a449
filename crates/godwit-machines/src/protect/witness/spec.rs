//! The choice of a witness, as a text: `node:NAME`, `etcd://HOST:PORT,HOST:PORT/PREFIX` or `fence`.

use std::fmt;
use std::str::FromStr;

use godwit_peers::names;
use serde::{Deserialize, Serialize};

/// Longest text of a witness in bytes.
const LONGEST: usize = 4096;
/// Most endpoints of an etcd.
const MOST_ENDPOINTS: usize = 16;
/// The forms of a witness, for errors.
const FORMS: &str = "write node:NAME, etcd://HOST:PORT,HOST:PORT/PREFIX or fence";

/// A witness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum WitnessSpec {
    /// A third node: a peer of both nodes.
    Node(String),
    /// An etcd.
    Etcd {
        /// The members, as `HOST:PORT`.
        endpoints: Vec<String>,
        /// The beginning of the keys, without slashes at either end.
        prefix: String,
    },
    /// Each node's own command that fences the other host. No peer and no client names the command.
    Fence,
}

impl FromStr for WitnessSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > LONGEST {
            let bytes = text.len();
            return Err(format!(
                "a witness of {bytes} bytes is longer than {LONGEST}"
            ));
        }
        if let Some(name) = text.strip_prefix("node:") {
            names::check("node", name).map_err(|error| {
                let hint = error.hint.unwrap_or_default();
                format!("{}: {hint}, as in node:c", error.message)
            })?;
            return Ok(Self::Node(name.to_owned()));
        }
        if let Some(rest) = text.strip_prefix("etcd://") {
            return etcd(rest);
        }
        if text == "fence" {
            return Ok(Self::Fence);
        }
        if text.starts_with("fence:") {
            return Err(String::from(
                "each node has its own command that fences: start both nodes with --fence-with 'COMMAND', and write fence",
            ));
        }
        Err(format!("{:?} names no witness: {FORMS}", cut(text)))
    }
}

fn etcd(rest: &str) -> Result<WitnessSpec, String> {
    let (members, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_matches('/');
    if prefix.is_empty() {
        return Err(String::from(
            "the etcd has no prefix for its keys: write etcd://HOST:PORT/PREFIX, as in etcd://192.0.2.9:2379/godwit",
        ));
    }
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    if let Some(bad) = prefix.chars().find(|&c| !is_plain(c)) {
        return Err(format!(
            "the prefix {:?} contains {bad:?}: use letters, digits, '.', '_', '-' and '/'",
            cut(prefix)
        ));
    }
    let endpoints: Vec<String> = members.split(',').map(str::to_owned).collect();
    if endpoints.len() > MOST_ENDPOINTS {
        return Err(format!(
            "the etcd has {} members, more than {MOST_ENDPOINTS}: name some of them",
            endpoints.len()
        ));
    }
    match endpoints.iter().find(|member| host_of(member).is_none()) {
        Some(wrong) if wrong.contains('@') => Err(String::from(
            "a password does not belong into the witness: put user and password into the file of --etcd-options",
        )),
        Some(wrong) => Err(format!(
            "{:?} is not HOST:PORT, like 192.0.2.9:2379 or [2001:db8::9]:2379",
            cut(wrong)
        )),
        None => Ok(WitnessSpec::Etcd {
            endpoints,
            prefix: prefix.to_owned(),
        }),
    }
}

/// Returns the host of an endpoint, or `None` if the endpoint is not `HOST:PORT`.
pub(super) fn host_of(endpoint: &str) -> Option<&str> {
    let (host, port) = endpoint.rsplit_once(':')?;
    let number = port.parse::<u16>().ok().filter(|&number| number > 0);
    let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    let fits = match bare {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')),
    };
    (number.is_some() && !host.is_empty() && fits).then_some(bare.unwrap_or(host))
}

/// Returns the beginning of a text, for an error.
fn cut(text: &str) -> String {
    text.chars().take(64).collect()
}

impl fmt::Display for WitnessSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "node:{name}"),
            Self::Etcd { endpoints, prefix } => {
                write!(f, "etcd://{}/{prefix}", endpoints.join(","))
            }
            Self::Fence => f.write_str("fence"),
        }
    }
}

impl TryFrom<String> for WitnessSpec {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<WitnessSpec> for String {
    fn from(spec: WitnessSpec) -> Self {
        spec.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn witnesses_are_read_and_written() {
        let etcd = |endpoints: &[&str], prefix: &str| WitnessSpec::Etcd {
            endpoints: endpoints.iter().map(|&it| it.to_owned()).collect(),
            prefix: prefix.to_owned(),
        };
        for (text, spec, written) in [
            ("node:c-1", WitnessSpec::Node("c-1".into()), "node:c-1"),
            (
                "etcd://h:2379,[::1]:1/a/b/",
                etcd(&["h:2379", "[::1]:1"], "a/b"),
                "etcd://h:2379,[::1]:1/a/b",
            ),
            ("fence", WitnessSpec::Fence, "fence"),
        ] {
            assert_eq!(text.parse(), Ok(spec.clone()), "{text}");
            let json = serde_json::to_string(&spec).expect("writes");
            assert_eq!(json, format!("{written:?}"));
            assert_eq!(
                serde_json::from_str::<WitnessSpec>(&json).expect("reads"),
                spec
            );
        }
    }

    #[test]
    fn a_wrong_witness_is_told_with_the_right_form() {
        let long = format!("node:{}", "x".repeat(LONGEST));
        let crowd = format!("etcd://{}/p", ["h:1"; 17].join(","));
        for (text, words) in [
            ("", "names no witness: write node:NAME"),
            ("c", "names no witness"),
            ("http://h:1/p", "names no witness"),
            ("node:", "it is empty"),
            ("node:a/b", "contains '/'"),
            ("etcd://h:2379", "has no prefix"),
            ("etcd://h:2379//", "has no prefix"),
            ("etcd://h/p", "\"h\" is not HOST:PORT"),
            ("etcd://h:1,/p", "\"\" is not HOST:PORT"),
            ("etcd://h:0/p", "is not HOST:PORT"),
            ("etcd://::1:1/p", "is not HOST:PORT"),
            ("etcd://u:p@h:1/p", "--etcd-options"),
            ("etcd://h:1/p?q", "contains '?'"),
            (&crowd, "17 members"),
            ("fence:fence_x", "each node has its own command"),
            (&long, "is longer than"),
        ] {
            let error = text.parse::<WitnessSpec>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
