//! TCP connections of a process. Only connections whose address moves along survive a move.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The state of a working connection in proc_net_tcp(5).
const ESTABLISHED: &str = "01";

/// Returns the TCP connections that keep a process from moving with this address, or without an address.
pub(crate) fn reasons(pid: u32, address: Option<IpAddr>) -> Vec<String> {
    let connections = match connections(pid) {
        Ok(connections) => connections,
        // An ended process has no connections; another check reports the end.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            return vec![format!(
                "the TCP connections of process {pid} cannot be read: {error}"
            )];
        }
    };
    let reason = |left| {
        format!(
            "process {pid} has a TCP connection from {left}, and that address does not move along: give the process an \
             address of its own, and name it with --address"
        )
    };
    staying(&connections, address)
        .into_iter()
        .map(reason)
        .collect()
}

/// Returns the addresses of connections that would break. A connection with both ends in the process survives.
fn staying(
    connections: &BTreeSet<(SocketAddr, SocketAddr)>,
    address: Option<IpAddr>,
) -> BTreeSet<IpAddr> {
    let stays = |(here, there): &&(SocketAddr, SocketAddr)| {
        Some(here.ip()) != address && !connections.contains(&(*there, *here))
    };
    let found = connections.iter().filter(stays);
    found.map(|(here, _)| here.ip()).collect()
}

/// Returns the process's connections as pairs of local and remote end.
fn connections(pid: u32) -> io::Result<BTreeSet<(SocketAddr, SocketAddr)>> {
    let mut own = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        let Ok(target) = std::fs::read_link(entry?.path()) else {
            continue;
        };
        let target = target.to_string_lossy();
        let inode = target.strip_prefix("socket:[");
        own.extend(inode.and_then(|rest| rest.strip_suffix(']')?.parse::<u64>().ok()));
    }
    let mut found = BTreeMap::new();
    for list in ["tcp", "tcp6"] {
        match std::fs::read_to_string(format!("/proc/{pid}/net/{list}")) {
            Ok(text) => found.extend(text.lines().filter_map(established)),
            // A kernel without IPv6 has no such list.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    found.retain(|inode, _| own.contains(inode));
    Ok(found.into_values().collect())
}

/// Parses the inode and both ends of a line, if the connection works.
fn established(line: &str) -> Option<(u64, (SocketAddr, SocketAddr))> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, here, there, ESTABLISHED, _, _, _, _, _, inode, ..] = words[..] else {
        return None;
    };
    Some((inode.parse().ok()?, (end(here)?, end(there)?)))
}

/// Parses an address as printed by the kernel: words in the machine's byte order, each in hexadecimal.
fn end(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::new();
    for word in address.as_bytes().chunks(8) {
        let word = std::str::from_utf8(word)
            .ok()
            .filter(|word| word.len() == 8)?;
        bytes.extend(u32::from_str_radix(word, 16).ok()?.to_ne_bytes());
    }
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).map(Ipv4Addr::from).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).map(Ipv6Addr::from).ok()?),
        _ => return None,
    };
    // An IPv6 socket may have an IPv4 connection.
    Some(SocketAddr::new(address.to_canonical(), port))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_lives_on_with_its_address_or_with_both_ends() {
        let at = |text: &str| -> SocketAddr { text.parse().expect("an address") };
        let (here, there) = (at("10.0.0.1:80"), at("10.0.0.2:4000"));
        let only = |pairs: &[(SocketAddr, SocketAddr)]| pairs.iter().copied().collect();
        let one = only(&[(here, there)]);
        assert_eq!(staying(&one, None), BTreeSet::from([here.ip()]));
        assert_eq!(staying(&one, Some(there.ip())), BTreeSet::from([here.ip()]));
        assert_eq!(staying(&one, Some(here.ip())), BTreeSet::new());
        assert_eq!(
            staying(&only(&[(here, there), (there, here)]), None),
            BTreeSet::new()
        );
    }

    #[test]
    fn what_the_kernel_lists_is_understood() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listens");
        let client = TcpStream::connect(listener.local_addr().expect("an address"));
        let client = client.expect("connects");
        let (server, _) = listener.accept().expect("accepts");
        let found = connections(std::process::id()).expect("reads");
        for stream in [&client, &server] {
            let ends = (
                stream.local_addr().expect("an address"),
                stream.peer_addr().expect("an address"),
            );
            assert!(found.contains(&ends), "{ends:?} is not in {found:?}");
        }
        let mapped = end("0000000000000000FFFF00000100007F:0050");
        if cfg!(target_endian = "little") {
            assert_eq!(mapped, Some("127.0.0.1:80".parse().expect("an address")));
        }
        for wrong in ["", "0100007F", "0100007F:", "01:0050", "zz00007F:0050"] {
            assert_eq!(end(wrong), None, "{wrong}");
        }
    }
}
