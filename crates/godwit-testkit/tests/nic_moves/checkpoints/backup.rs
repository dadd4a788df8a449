//! Backups that are slow, stopped, full, or started again while a machine is protected.

use std::fs::File;
use std::io;
use std::time::Duration;

use godwit_testkit::cluster::StandsStill;
use godwit_testkit::process::{self, wait_for};
use godwit_testkit::small_fs::SmallFileSystem;
use godwit_testkit::vm::VM;

use super::super::load;
use super::{CONTINUE, PATIENCE, Served, WATCHED, comes_to, goes_on, problem, stands_still};

const TIMEOUT: Duration = Duration::from_secs(4);
/// Longer than a node waits for an answer of QEMU.
const LONG: Duration = Duration::from_secs(25);

/// Returns the checkpoints captured within [`WATCHED`].
fn captured(served: &Served) -> u64 {
    let number = || {
        let shown = served.node("a").vm(VM);
        shown["protection"]["checkpoints"]["captured"].as_u64()
    };
    let before = number();
    std::thread::sleep(2 * WATCHED);
    number().unwrap_or(0) - before.unwrap_or(0)
}

/// Runs `tc` on the switch for its port to host `b`.
fn port(served: &Served, words: &str) -> io::Result<()> {
    let mut command = served.lan.switch().command();
    let at = ["tc", "qdisc"].into_iter().chain(words.split(' '));
    process::run(command.args(at)).map(drop)
}

/// Returns how often a node says this in its log.
fn said(served: &Served, node: &str, words: &str) -> usize {
    served.node(node).log().matches(words).count()
}

#[test]
#[ignore = "slow: a backup is away for a while"]
fn a_slow_a_stopped_and_a_restarted_backup_cost_the_client_nothing() -> io::Result<()> {
    let Some(mut served) = Served::with(&["a", "b"])? else {
        return Ok(());
    };
    let timeout = format!("{}s", TIMEOUT.as_secs());
    served.protect(&[&CONTINUE[..], &["--heartbeat-timeout", &timeout]].concat())?;

    let before = captured(&served);
    port(
        &served,
        "add dev port2 root tbf rate 100mbit burst 128k latency 100ms",
    )?;
    std::thread::sleep(WATCHED);
    let narrow = captured(&served);
    port(&served, "del dev port2 root")?;
    println!("{before} checkpoints by the wide link, {narrow} by the narrow one");
    assert!(narrow > 0 && narrow < before, "{before}, {narrow}");
    goes_on(&served.talk)?;

    // Shorter than the timeout: nobody counts as lost.
    let stopped = StandsStill::new(served.node("b"));
    std::thread::sleep(WATCHED);
    drop(stopped);
    goes_on(&served.talk)?;
    assert_eq!(said(&served, "a", "the backup is lost"), 0);
    comes_to(served.node("a"), "protected")?;

    // Longer: the primary goes on alone, and the backup does not take a machine that runs.
    let stopped = StandsStill::new(served.node("b"));
    stands_still(&served.talk)?;
    comes_to(served.node("a"), "alone")?;
    goes_on(&served.talk)?;
    drop(stopped);
    comes_to(served.node("a"), "protected")?;
    assert_eq!(said(&served, "b", "takes the VM over"), 0);
    goes_on(&served.talk)?;

    served.cluster.restart("b", &[]);
    goes_on(&served.talk)?;
    comes_to(served.node("a"), "protected")?;
    served.finish("a")
}

/// A backup that is silent for longer than QEMU may take to answer: QEMU stops for a checkpoint all the while, because its
/// disk waits for the backup.
#[test]
#[ignore = "slow: a backup is away for long"]
fn a_machine_that_waited_long_for_its_backup_goes_on() -> io::Result<()> {
    let Some(mut served) = Served::with(&["a", "b"])? else {
        return Ok(());
    };
    let before_stop = "checkpoint::before-stop";
    let points = [(before_stop, "60*off->1*sleep(2000)->off")];
    served.cluster.restart("a", &points);
    goes_on(&served.talk)?;
    served.protect(&["--when-alone", "stop"])?;
    served.node("a").reaches(before_stop);
    let stopped = StandsStill::new(served.node("b"));
    comes_to(served.node("a"), "severed")?;
    std::thread::sleep(LONG);
    drop(stopped);
    goes_on(&served.talk)?;
    comes_to(served.node("a"), "protected")?;
    served.finish("a")
}

#[test]
fn a_backup_without_room_is_refused_and_one_that_fills_is_left_until_there_is_room()
-> io::Result<()> {
    let small = SmallFileSystem::new(512 << 20)?;
    let records = small.path().join("b");
    let started = Served::start(&["a", "b"], 2, &load("tap=tap0"), |_, cluster| {
        std::fs::create_dir(&records)?;
        cluster.node_mut("b").spec_mut().dir = records;
        Ok(())
    })?;
    let Some(served) = started else {
        return Ok(());
    };
    let filler = small.fill()?;
    // Enough for the image, and not for the writes that wait for their checkpoint.
    let taken = filler.metadata()?.len() - (24 << 20);
    File::options().write(true).open(&filler)?.set_len(taken)?;
    let protect = ["vm", "protect", VM, "--to", "b", "--when-alone", "continue"];
    println!(
        "{}",
        served.node("a").refuses(
            &protect,
            &["has no space for disk disk0", "nothing was changed"]
        )
    );
    std::fs::remove_file(filler)?;
    served.protect(&CONTINUE)?;
    let filler = small.fill()?;
    comes_to(served.node("a"), "alone")?;
    let full = || problem(served.node("a")).contains("space").then_some(());
    wait_for(PATIENCE, full).unwrap_or_else(|| panic!("{}", problem(served.node("a"))));
    goes_on(&served.talk)?;
    std::fs::remove_file(filler)?;
    comes_to(served.node("a"), "protected")?;
    served.finish("a")
}
