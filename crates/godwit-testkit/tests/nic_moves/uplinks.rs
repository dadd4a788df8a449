//! Taps and bridges that come and go, pass nothing yet, keep VLANs apart, or have other names elsewhere.

use godwit_testkit::scenario::until;
use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::cluster::Node;
use godwit_testkit::network::Namespace;
use godwit_testkit::process::{self, wait_for};
use serde_json::Value;

use super::{ip, one_node, run, two_nodes};

const PATIENCE: Duration = Duration::from_secs(30);

/// Returns `ip`'s description of an interface.
fn link(host: &Namespace, name: &str) -> Value {
    let mut command = host.command();
    command.args(["ip", "-json", "link", "show", name]);
    let shown = process::run(&mut command).map(|output| output.stdout);
    let links: Vec<Value> = serde_json::from_slice(&shown.unwrap_or_default()).unwrap_or_default();
    links.into_iter().next().unwrap_or_default()
}

fn nic(node: &Node, name: &str) -> Value {
    node.godwit(&["nic", "show", name])
        .json()
        .unwrap_or_default()
}

/// Waits until a NIC's problem contains `wanted`, or until there is none.
fn problem(node: &Node, name: &str, wanted: Option<&str>) {
    let told = || {
        let nic = nic(node, name);
        let is_so = match (wanted, nic["problem"].as_str()) {
            (Some(wanted), Some(problem)) => problem.contains(wanted),
            (None, None) => !nic.is_null(),
            _ => false,
        };
        is_so.then_some(())
    };
    wait_for(PATIENCE, told).unwrap_or_else(|| panic!("{name}: {wanted:?} in {}", nic(node, name)));
}

#[test]
fn an_uplink_that_is_made_again_is_used_again() -> io::Result<()> {
    let Some((lan, cluster)) = one_node()? else {
        return Ok(());
    };
    let (host, a) = (&lan.hosts()[0], cluster.node("a"));
    ip(host, "link add br7 up type bridge")?;
    for (name, uplink) in [("one", "bridge=br7"), ("two", "tap=tap0")] {
        a.godwit(&["nic", "create", name, uplink]).text()?;
        problem(a, name, None);
    }
    let tap = nic(a, "one")["tap"].as_str().unwrap_or_default().to_owned();
    ip(host, "link del br7")?;
    problem(a, "one", Some("there is no bridge br7 any more"));
    ip(host, "link add br7 up type bridge")?;
    problem(a, "one", None);
    assert_eq!(link(host, &tap)["master"], "br7");
    // The node's own tap, too.
    ip(host, &format!("link del {tap}"))?;
    until("the node makes its tap again", || {
        link(host, &tap)["master"] == "br7"
    });
    ip(host, "link set br7 down")?;
    problem(a, "one", Some("bridge br7 is down"));

    ip(host, "link del tap0")?;
    problem(a, "two", Some("there is no interface tap0"));
    lan.add_taps("tap0")?;
    problem(a, "two", None);
    let opened = |link: &Value| {
        let flags = link["flags"].as_array();
        flags.is_some_and(|flags| flags.iter().any(|flag| flag == "LOWER_UP"))
    };
    assert!(opened(&link(host, "tap0")), "somebody has it open");
    Ok(())
}

#[test]
fn a_move_waits_until_the_destinations_bridge_lets_packets_pass() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    for host in lan.hosts() {
        ip(host, "link add br7 up type bridge")?;
    }
    run(a, "one", "bridge=br7")?;
    ip(&lan.hosts()[1], "link set br7 down")?;
    a.refuses(&["migrate", "vm/one", "--to", "b"], &["bridge br7 is down"]);
    // The bridge listens and learns for two seconds each.
    ip(
        &lan.hosts()[1],
        "link set br7 up type bridge forward_delay 200 stp_state 1",
    )?;
    let began = Instant::now();
    a.godwit(&["migrate", "vm/one", "--to", "b"]).json()?;
    assert!(
        began.elapsed() > Duration::from_secs(4),
        "{:?}",
        began.elapsed()
    );
    problem(b, "one/0", None);
    b.stop_vm("one");
    Ok(())
}

#[test]
fn a_tap_without_a_bridge_at_the_destination_is_told() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    run(a, "one", "tap=tap0")?;
    ip(&lan.hosts()[1], "link set tap0 nomaster")?;
    let moved = a.godwit(&["migrate", "vm/one", "--to", "b"]).json()?;
    let warnings = moved["warnings"].to_string();
    assert!(
        warnings.contains("tap tap0 is in no bridge at node 'b'"),
        "{moved}"
    );
    b.stop_vm("one");
    Ok(())
}

/// Returns the VLANs of a port of a bridge, each with true for untagged packets.
fn vlans(host: &Namespace, port: &str) -> io::Result<Vec<(u64, bool)>> {
    let mut command = host.command();
    command.args(["bridge", "-json", "vlan", "show", "dev", port]);
    let shown: Value = serde_json::from_slice(&process::run(&mut command)?.stdout)?;
    let vlans = shown[0]["vlans"].as_array().cloned().unwrap_or_default();
    let vlans = vlans.iter().flat_map(|vlan| {
        let first = vlan["vlan"].as_u64().unwrap_or_default();
        let last = vlan["vlanEnd"].as_u64().unwrap_or(first);
        let untagged = vlan["flags"].to_string().contains("Egress Untagged");
        (first..=last).map(move |vlan| (vlan, untagged))
    });
    Ok(vlans.collect())
}

#[test]
fn a_nic_goes_to_a_bridge_of_another_name() -> io::Result<()> {
    let Some((lan, cluster)) = two_nodes(&[])? else {
        return Ok(());
    };
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    ip(&lan.hosts()[0], "link add br7 up type bridge")?;
    ip(&lan.hosts()[1], "link add br8 up type bridge")?;
    run(a, "one", "bridge=br7")?;
    let to_b = |uplink| ["migrate", "vm/one", "--to", "b", "--uplink", uplink];
    a.refuses(&to_b("br9=br8"), &["it has no NIC on br9"]);
    a.refuses(&to_b("br7=br9"), &["there is no bridge br9"]);
    a.godwit(&to_b("br7=br8")).json()?;
    assert_eq!(nic(b, "one/0")["bridge"], "br8");
    b.stop_vm("one");
    Ok(())
}

#[test]
fn a_nic_is_in_the_vlans_that_it_is_given() -> io::Result<()> {
    let Some((lan, cluster)) = one_node()? else {
        return Ok(());
    };
    let (host, a) = (&lan.hosts()[0], cluster.node("a"));
    ip(host, "link add br7 up type bridge")?;
    let create = ["nic", "create", "one", "bridge=br7,vlan=7,trunk=5+10-12"];
    a.refuses(&create, &["bridge br7 does not keep VLANs apart"]);
    if let Err(error) = ip(host, "link set br7 type bridge vlan_filtering 1") {
        eprintln!("skipped: the kernel's bridges keep no VLANs apart ({error})");
        return Ok(());
    }
    a.godwit(&create).text()?;
    let tap = nic(a, "one")["tap"].as_str().unwrap_or_default().to_owned();
    let expected = [(5, false), (7, true), (10, false), (11, false), (12, false)];
    assert_eq!(vlans(host, &tap)?, expected);
    Ok(())
}
