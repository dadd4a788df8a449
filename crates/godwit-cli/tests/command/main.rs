//! The `godwit` command against an API with scripted answers.

mod environment;
mod fake;
mod interrupts;
mod terminal;
mod vm_moves;

use std::path::PathBuf;
use std::process::Command;

use godwit_node::api::{
    Direction, ErrorBody, ErrorCode, Migration, MigrationPhase, MigrationProgress, Peer,
};
use serde_json::Value;

use fake::{FakeApi, Ran, ok, refused, seen, wait_until};

const ID: &str = "00112233445566778899aabbccddeeff";

fn migration(phase: MigrationPhase, done: u64) -> Migration {
    Migration {
        id: ID.to_owned(),
        disk: "d".to_owned(),
        from: "a".to_owned(),
        to: "b".to_owned(),
        direction: Direction::Outgoing,
        phase,
        options: None,
        progress: MigrationProgress {
            bytes_total: 1 << 30,
            bytes_done: done,
            bytes_copied: done,
            ..MigrationProgress::default()
        },
        promise: None,
        rate_bytes_per_second: None,
        eta_seconds: None,
        guest: None,
        started_at: "2026-01-01T00:00:00Z".to_owned(),
        ended_at: None,
        lm_seconds: Some(2.0),
        error: None,
        verified: phase == MigrationPhase::Completed,
        source_needed: false,
        missing_bytes: None,
        warnings: Vec::new(),
    }
}

fn get_migration() -> String {
    format!("GET /v1/migrations/{ID}")
}

/// Starts an API with a migration that begins, and then shows itself like this.
fn followed(answers: Vec<(u16, Value)>) -> FakeApi {
    let begins = vec![ok(migration(MigrationPhase::Offering, 0))];
    FakeApi::start(&[("POST /v1/migrations", begins), (&get_migration(), answers)])
}

#[test]
fn migrate_follows_to_the_end_and_sums_up() {
    let api = followed(vec![
        seen(migration(MigrationPhase::Copying, 1 << 29)),
        seen(migration(MigrationPhase::Draining, 1 << 30)),
        seen(migration(MigrationPhase::Completed, 1 << 30)),
    ]);
    let bounds = ["--verify", "--max-bandwidth", "100M/s", "--chunk", "64K"];
    let ran = api.succeeds(&[&["migrate", "d", "--to", "b"], &bounds[..]].concat());
    ran.says("moved from 'a' to 'b'");
    ran.says("verified: identical");
    ran.tells("copying to b, 512 MiB of 1.00 GiB left");
    ran.tells("finishing the guest's requests");
    let asked = &api.asked("POST /v1/migrations")[0];
    assert_eq!(asked["max_bandwidth"], 100 << 20);
    assert_eq!(asked["chunk_bytes"], 64 << 10);
    assert!(asked["policy"].is_null(), "the node chooses: {asked}");
    assert_eq!(asked["verify"], true);
}

#[test]
fn migrate_asks_for_a_promise_and_passes_on_what_the_node_warns_of() {
    let mut started = migration(MigrationPhase::Offering, 0);
    started.warnings = vec!["disk d: the target is short".to_owned()];
    let api = FakeApi::start(&[("POST /v1/migrations", vec![ok(&started)])]);
    let start = ["migrate", "d", "--to", "b", "--detach"];
    let plain = api.succeeds(&start);
    assert_eq!(plain.stdout.trim(), ID);
    assert_eq!(plain.stderr, "warning: disk d: the target is short\n");
    let promise = ["--sla", "p99.99<2ms", "--delayed-writes", "off"];
    let bounds = ["--deadline", "1h30m", "--interface", "eth0"];
    let budget = ["--interface-budget", "1G/s"];
    let options = [&start[..], &promise, &bounds, &budget].concat();
    api.succeeds(&options);
    let asked = api.asked("POST /v1/migrations");
    assert_eq!(asked[0]["sla"], "auto");
    assert_eq!(asked[0]["delayed_writes"], true);
    assert_eq!(asked[0]["deadline_seconds"], Value::Null);
    assert_eq!(asked[1]["sla"], "p99.99<2ms");
    assert_eq!(asked[1]["delayed_writes"], false);
    assert_eq!(asked[1]["deadline_seconds"], 5400);
    assert_eq!(asked[1]["interface"], "eth0");
    assert_eq!(asked[1]["interface_budget"], 1 << 30);
}

#[test]
fn migrate_with_json_prints_the_ended_migration_as_the_api_spells_it() {
    let done = migration(MigrationPhase::Completed, 1 << 30);
    let api = followed(vec![seen(done.clone())]);
    let ran = api.succeeds(&["migrate", "d", "--to", "b", "--json"]);
    assert_eq!(
        serde_json::from_str::<Migration>(&ran.stdout).unwrap(),
        done
    );
}

#[test]
fn migrate_detached_prints_the_id_alone() {
    let api = FakeApi::start(&[(
        "POST /v1/migrations",
        vec![ok(migration(MigrationPhase::Offering, 0))],
    )]);
    let ran = api.run(&["migrate", "d", "--to", "b", "--detach"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (0, format!("{ID}\n").as_str())
    );
    assert!(api.asked(&get_migration()).is_empty());
}

#[test]
fn an_aborted_migration_fails_with_its_reason() {
    let mut aborted = migration(MigrationPhase::Aborted, 1 << 20);
    aborted.error = Some(ErrorBody::new(
        ErrorCode::NoSpace,
        "no space is left on 'b'",
    ));
    let api = followed(vec![seen(aborted)]);
    let ran = api.run(&["migrate", "d", "--to", "b"]);
    assert_eq!(ran.code, 4);
    ran.tells("stays on 'a': no space is left on 'b'");
    ran.tells("\nhint: ");
}

#[test]
fn a_program_that_asked_for_json_finds_the_error_alone() {
    let mut aborted = migration(MigrationPhase::Aborted, 1 << 20);
    let body = ErrorBody::new(ErrorCode::NoSpace, "no space is left on 'b'").hint("free some");
    aborted.error = Some(body);
    aborted.warnings = vec!["the target is short".to_owned()];
    let api = followed(vec![seen(aborted)]);
    let ran = api.run(&["migrate", "d", "--to", "b", "--json"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (4, ""));
    let told: ErrorBody = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!(told.code, ErrorCode::NoSpace);
    assert!(told.message.ends_with("no space is left on 'b'"), "{told}");
}

#[test]
fn ctrl_c_asks_the_node_to_cancel_and_waits_for_the_outcome() {
    let mut answers = vec![seen(migration(MigrationPhase::Copying, 1 << 20)); 12];
    answers.push(seen(migration(MigrationPhase::Aborted, 1 << 20)));
    let cancel = format!("POST /v1/migrations/{ID}/cancel");
    let api = FakeApi::start(&[
        (
            "POST /v1/migrations",
            vec![ok(migration(MigrationPhase::Copying, 0))],
        ),
        (&get_migration(), answers),
        (
            &cancel,
            vec![seen(migration(MigrationPhase::Copying, 1 << 20))],
        ),
    ]);
    let child = api.command(&["migrate", "d", "--to", "b"]).spawn().unwrap();
    wait_until("it follows", || !api.asked(&get_migration()).is_empty());
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(api.asked(&cancel).len(), 1);
    assert_eq!(ran.code, 130);
    ran.tells("error: cancelled: disk 'd' stays on 'a'");
}

#[test]
fn watch_with_json_prints_a_line_per_phase() {
    let api = FakeApi::start(&[(
        &get_migration(),
        vec![
            seen(migration(MigrationPhase::Copying, 0)),
            seen(migration(MigrationPhase::Copying, 1)),
            seen(migration(MigrationPhase::Completed, 2)),
        ],
    )]);
    let ran = api.succeeds(&["migration", "watch", ID, "--json"]);
    let phases: Vec<MigrationPhase> = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Migration>(line).unwrap().phase)
        .collect();
    assert_eq!(phases, [MigrationPhase::Copying, MigrationPhase::Completed]);
}

#[test]
fn errors_of_the_api_keep_their_hint_and_come_as_json_when_asked() {
    let body = ErrorBody::new(ErrorCode::UnknownPeer, "no peer 'x'").hint("known are: b");
    let api = FakeApi::start(&[("POST /v1/migrations", vec![refused(422, body.clone())])]);
    let ran = api.run(&["migrate", "d", "--to", "x"]);
    assert_eq!(ran.code, 1);
    assert_eq!(ran.stderr, "error: no peer 'x'\nhint: known are: b\n");
    let ran = api.run(&["migrate", "d", "--to", "x", "--json"]);
    assert_eq!(
        serde_json::from_str::<ErrorBody>(&ran.stderr).unwrap(),
        body
    );
    assert!(ran.stdout.is_empty());
}

#[test]
fn a_node_that_is_not_there_is_told_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("none.sock");
    let output = Command::new(env!("CARGO_BIN_EXE_godwit"))
        .args(["disk", "list", "--socket", socket.to_str().unwrap()])
        .output()
        .unwrap();
    let ran = Ran::from(output);
    assert_eq!(ran.code, 3);
    assert!(
        ran.stderr
            .starts_with("error: cannot connect to the node at"),
        "{}",
        ran.stderr
    );
    ran.tells("hint: is the node running?");
}

#[test]
fn a_wrong_command_line_exits_with_2_before_anything_is_asked() {
    let api = FakeApi::start(&[]);
    for args in [
        &["disk", "create", "d", "--size", "10X"][..],
        &["disk", "create", "d"],
        &["migrate", "d"],
        &["migrate", "d", "--to", "b", "--policy", "magic"],
        &["migrate", "d", "--to", "b", "--memory", "hybrid"],
        &["migrate", "vm/v", "--to", "b", "--with-guest"],
        &["migrate", "d", "--to", "b", "--file", "/f"],
        &["migrate", "process/7", "--to", "b", "--verify"],
        &["migrate", "container/job", "--to", "b", "--pre-setup"],
        &["migrate", "process/job", "--to", "b"],
        &["migrate", "pod/job", "--to", "b"],
        &["node", "--name", "a", "--data-dir", "/nonexistent"],
        &["--api", "http://h:1", "disk", "list"],
    ] {
        let ran = api.run(args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        assert!(
            ran.stderr.starts_with("error: "),
            "{args:?}: {}",
            ran.stderr
        );
    }
    assert!(api.asked_nothing());
}

#[test]
fn a_wrong_command_line_is_told_as_json_when_asked() {
    let api = FakeApi::start(&[]);
    for (args, why) in [
        (&["migrate", "d", "--json"][..], "--to <NODE>"),
        (
            &["disk", "create", "d", "--size", "10X", "--json"],
            "is not a unit",
        ),
        (&["--json", "disk", "lst"], "unrecognized subcommand 'lst'"),
        (
            &["--json", "migrate", "d", "--to", "b", "--memory", "hybrid"],
            "--memory is for a virtual machine, and d is a disk; for a virtual machine give vm/NAME",
        ),
        (
            &["--json", "migrate", "vm/m", "--to", "b", "--into", "/x"],
            "--into is for a disk, and vm/m is a virtual machine; give --pool NAME",
        ),
        (
            &["--json", "process", "migrate", "7", "--to", "b"],
            "there is 'godwit migrate process/PID --to NODE'",
        ),
        (
            &["process", "--json", "cancel", "aa"],
            "there is 'godwit migration cancel ID'",
        ),
    ] {
        let ran = api.run(args);
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.stderr);
        let body: ErrorBody = serde_json::from_str(&ran.stderr).unwrap();
        assert_eq!(body.code, ErrorCode::Invalid);
        assert!(body.message.contains(why), "{args:?}: {}", body.message);
    }
    let ran = api.run(&["disk", "lst", "--", "--json"]);
    assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
}

#[test]
fn peers_are_listed_with_what_is_wrong() {
    let peer = |name: &str, error: Option<ErrorBody>| Peer {
        name: name.to_owned(),
        address: format!("{name}:7001"),
        reachable: error.is_none(),
        protocol_version: error.is_none().then_some(1),
        data_encrypted: error.is_none().then_some(true),
        compression: error.is_none().then_some(true),
        error,
    };
    let expired = ErrorBody::new(ErrorCode::PeerIdentity, "its certificate expired");
    let trusted = Peer {
        data_encrypted: Some(false),
        compression: Some(false),
        ..peer("d", None)
    };
    let peers = [peer("b", None), peer("c", Some(expired)), trusted];
    let api = FakeApi::start(&[("GET /v1/peers", vec![ok(&peers[..])])]);
    let ran = api.run(&["peer", "list"]);
    assert_eq!(
        ran.stdout,
        "NAME  ADDRESS  STATUS\n\
         b     b:7001   answers, protocol 1\n\
         c     c:7001   its certificate expired\n\
         d     d:7001   answers, protocol 1, data unencrypted, nothing compressed\n"
    );
}

#[test]
fn certificates_are_made_without_a_node() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_str().unwrap();
    let godwit = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        Ran::from(
            command
                .arg("certs")
                .args(args)
                .args(["--dir", dir])
                .output()
                .unwrap(),
        )
    };
    let early = godwit(&["issue", "a"]);
    assert_eq!(early.code, 1);
    early.tells("hint: make one first: godwit certs init");
    assert_eq!(godwit(&["init"]).code, 0);
    let issued = godwit(&["issue", "a", "--ip", "127.0.0.1", "--json"]);
    let files: Value = serde_json::from_str(&issued.stdout).unwrap();
    for file in ["ca", "certificate", "key"] {
        assert!(
            PathBuf::from(files[file].as_str().unwrap()).is_file(),
            "{file}"
        );
    }
    let again = godwit(&["issue", "a"]);
    again.tells("repeat with --force");
    assert_eq!(godwit(&["issue", "a", "--force"]).code, 0);
    assert_eq!(
        godwit(&["issue", "vm", "--nbd-client", "--days", "0"]).code,
        2
    );
}
