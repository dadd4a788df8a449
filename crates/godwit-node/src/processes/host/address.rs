//! An IP address of a process's own: it moves with the process, so that its TCP connections live on.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::criu::{must, run};

/// How long a command about addresses may take.
const LIMIT: Duration = Duration::from_secs(20);

/// An address with the interface that it is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnAddress {
    pub(crate) address: IpAddr,
    /// Bits of its network.
    pub(crate) prefix: u8,
    /// The interface's name, the same at both hosts.
    pub(crate) interface: String,
}

impl OwnAddress {
    /// Whether it can be one: what comes from another node is given to commands.
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

    /// The address as it is on this host; nothing if it is not.
    ///
    /// # Errors
    /// One sentence if the host cannot be asked.
    pub(crate) async fn find(address: IpAddr) -> Result<Option<Self>, String> {
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

    /// What keeps it from coming to this host.
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
        // Whether it could be, by the very rule.
        let rule = self.rule("godwit-check", Direction::In);
        if let Err(error) = must("nft", &["-c", &rule], LIMIT).await {
            found.push(format!(
                "the destination cannot guard the address {address} while it comes: {error}"
            ));
        }
        found
    }

    /// Puts it on its interface; that it is there already does not matter.
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

    /// Takes it off its interface; that it is gone already does not matter.
    ///
    /// # Errors
    /// One sentence: it is there still, or that cannot be seen.
    pub(crate) async fn remove(&self) -> Result<(), String> {
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

    /// Tells the network that it is here now. Who does not hear it asks when what he knows is too old.
    pub(crate) fn announce(&self) {
        let Self {
            address, interface, ..
        } = self.clone();
        tokio::spawn(async move {
            let address = address.to_string();
            let arguments = ["-q", "-U", "-c", "2", "-I", &interface, &address];
            if let Err(error) = must("arping", &arguments, LIMIT).await {
                tracing::warn!(address, error, "an address that came is not announced");
            }
        });
    }

    /// Drops what comes for the address, or leaves from it, until [`Self::unguard`].
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

    /// Ends a guard.
    pub(crate) async fn unguard(table: &str) {
        let removed = run("nft", &["delete", "table", "inet", table], LIMIT).await;
        if let Ok((false, said)) = removed {
            tracing::debug!(table, said, "a guard was not removed");
        }
    }
}

/// Which way packets go that a guard drops.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Direction {
    In,
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
