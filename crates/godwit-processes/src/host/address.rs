//! An IP address of a process's own, which moves with the process and keeps its TCP connections alive.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::criu::{must, run};

/// Longest run of a command about addresses.
const LIMIT: Duration = Duration::from_secs(20);

/// An address with the interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnAddress {
    /// The address itself.
    pub address: IpAddr,
    /// Length of the network prefix in bits.
    pub(crate) prefix: u8,
    /// The interface's name, the same on both hosts.
    pub(crate) interface: String,
}

impl OwnAddress {
    /// Returns true if the address is plausible: a value from another node becomes a command's argument.
    pub(crate) fn is_sound(&self) -> bool {
        let longest = if self.address.is_ipv4() { 32 } else { 128 };
        let name = &self.interface;
        self.prefix <= longest
            && !self.address.is_loopback()
            && !self.address.is_unspecified()
            && !self.address.is_multicast()
            && (1..=15).contains(&name.len())
            && !name.starts_with(['-', '.'])
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    }

    /// Returns the address as configured on this host, or `None` if absent.
    ///
    /// # Errors
    /// One sentence if the host cannot be asked.
    pub async fn find(address: IpAddr) -> Result<Option<Self>, String> {
        let said = must(
            "ip",
            &["-j", "address", "show", "to", &address.to_string()],
            LIMIT,
        )
        .await?;
        let links: Vec<Link> = serde_json::from_str(&said)
            .map_err(|error| format!("`ip -j address show` printed no list: {error}"))?;
        let found = links.into_iter().find_map(|link| {
            let of = link
                .addr_info
                .iter()
                .find(|one| one.local == Some(address))?;
            Some(Self {
                address,
                prefix: of.prefixlen,
                interface: link.ifname?,
            })
        });
        Ok(found.filter(Self::is_sound))
    }

    /// Returns the obstacles to a move of the address to this host.
    pub(crate) async fn reasons(&self) -> Vec<String> {
        let Self {
            address, interface, ..
        } = self;
        if !self.is_sound() {
            return vec!["the address of the process makes no sense".to_owned()];
        }
        let mut found = Vec::new();
        if !Path::new("/sys/class/net").join(interface).exists() {
            found.push(format!(
                "the destination has no network interface {interface}, where the address {address} would go"
            ));
        }
        match Self::find(*address).await {
            Ok(None) => {}
            Ok(Some(there)) => found.push(format!(
                "the destination has the address {address} already, on {}",
                there.interface
            )),
            Err(error) => found.push(format!("addresses of the destination: {error}")),
        }
        // `nft` checks the very rule without a change.
        let rule = self.rule("godwit-check", Direction::In);
        if let Err(error) = must("nft", &["-c", &rule], LIMIT).await {
            found.push(format!(
                "the destination cannot guard the address {address} while it comes: {error}"
            ));
        }
        found
    }

    /// Adds the address to the interface, if absent.
    pub(crate) async fn add(&self) -> Result<(), String> {
        let text = format!("{}/{}", self.address, self.prefix);
        must(
            "ip",
            &["address", "replace", &text, "dev", &self.interface],
            LIMIT,
        )
        .await
        .map(drop)
    }

    /// Removes the address from the interface, if present.
    ///
    /// # Errors
    /// One sentence: the address is still there, or its state is unreadable.
    pub async fn remove(&self) -> Result<(), String> {
        let text = format!("{}/{}", self.address, self.prefix);
        let removed = run(
            "ip",
            &["address", "del", &text, "dev", &self.interface],
            LIMIT,
        )
        .await;
        if matches!(removed, Ok((true, _))) || Self::find(self.address).await?.is_none() {
            return Ok(());
        }
        let why = removed.map_or_else(|error| error, |(_, said)| said.trim().to_owned());
        Err(format!("the address {text} cannot be removed: {why}"))
    }

    /// Announces the address to the network. A host without the announcement asks again once the old entry expires.
    pub(crate) fn announce(&self) {
        let Self {
            address, interface, ..
        } = self.clone();
        godwit_context::spawn(async move {
            let address = address.to_string();
            let arguments = ["-q", "-U", "-c", "2", "-I", &interface, &address];
            if let Err(error) = must("arping", &arguments, LIMIT).await {
                tracing::warn!(address, error, "an address that came is not announced");
            }
        });
    }

    /// Drops packets to the address, or from the address, until [`Self::unguard`].
    pub(crate) async fn guard(&self, table: &str, direction: Direction) -> Result<(), String> {
        let rule = self.rule(table, direction);
        must("nft", &[&rule], LIMIT).await.map(drop)
    }

    fn rule(&self, table: &str, direction: Direction) -> String {
        let family = if self.address.is_ipv4() { "ip" } else { "ip6" };
        let (hook, end) = match direction {
            Direction::In => ("input", "daddr"),
            Direction::Out => ("output", "saddr"),
        };
        format!(
            "table inet {table} {{ chain guard {{ type filter hook {hook} priority -300; {family} {end} {} drop; }}; }}",
            self.address
        )
    }

    pub(crate) async fn unguard(table: &str) {
        let removed = run("nft", &["delete", "table", "inet", table], LIMIT).await;
        if let Ok((false, said)) = removed {
            tracing::debug!(table, said, "a guard was not removed");
        }
    }
}

/// The direction of the packets that a guard drops.
#[derive(Clone, Copy, Debug)]
pub enum Direction {
    /// Traffic that arrives.
    In,
    /// Traffic that leaves.
    Out,
}

#[derive(Deserialize)]
struct Link {
    ifname: Option<String>,
    #[serde(default)]
    addr_info: Vec<LinkAddress>,
}

#[derive(Deserialize)]
struct LinkAddress {
    local: Option<IpAddr>,
    #[serde(default)]
    prefixlen: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_to_commands_is_an_address_and_a_name() {
        let of = |address: &str, prefix, interface: &str| OwnAddress {
            address: address.parse().expect("an address"),
            prefix,
            interface: interface.to_owned(),
        };
        assert!(of("10.0.0.100", 24, "eth0").is_sound());
        assert!(of("fd00::1", 64, "bond0.7").is_sound());
        for wrong in [
            of("10.0.0.100", 33, "eth0"),
            of("127.0.0.1", 8, "lo"),
            of("0.0.0.0", 0, "eth0"),
            of("224.0.0.1", 4, "eth0"),
            of("10.0.0.100", 24, ""),
            of("10.0.0.100", 24, "../eth0"),
            of("10.0.0.100", 24, "-c"),
            of("10.0.0.100", 24, "eth0; reboot"),
            of("10.0.0.100", 24, "sixteen-letters-"),
        ] {
            assert!(!wrong.is_sound(), "{wrong:?}");
        }
    }
}
