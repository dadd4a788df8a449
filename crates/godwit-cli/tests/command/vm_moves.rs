//! Moves of VMs, beside moves of disks.

use godwit_node::api::{
    ErrorBody, ErrorCode, MemoryMode, MemoryProgress, MigrationPhase, Move, VmMigration,
    VmMigrationPhase,
};
use serde_json::Value;

use super::fake::{FakeApi, ok, refused, seen};
use super::{ID, migration};

const MOVE: &str = "aabbccddeeff00112233445566778899";

fn moving(phase: VmMigrationPhase) -> VmMigration {
    VmMigration {
        id: MOVE.to_owned(),
        vm: "web".to_owned(),
        from: "a".to_owned(),
        to: "b".to_owned(),
        phase,
        memory_mode: MemoryMode::PreCopy,
        memory: MemoryProgress {
            bytes_total: 4 << 30,
            bytes_left: 1 << 30,
            bytes_sent: 3 << 30,
            passes: 1,
        },
        disks: vec![migration(MigrationPhase::Converged, 1 << 30)],
        started_at: "2026-01-02T00:00:00Z".to_owned(),
        ended_at: None,
        total_seconds: Some(9.0),
        blackout_ms: None,
        switchover_ms: None,
        memory_bytes: 3 << 30,
        disk_bytes: 1 << 30,
        error: None,
        warnings: Vec::new(),
    }
}

fn get_move() -> String {
    format!("GET /v1/migrations/{MOVE}")
}

fn cancel_move() -> String {
    format!("POST /v1/migrations/{MOVE}/cancel")
}

/// Starts an API with a move of a VM, and the ended migration of its disk.
fn both(phase: VmMigrationPhase) -> FakeApi {
    let disk = migration(MigrationPhase::Completed, 1 << 30);
    FakeApi::start(&[
        (
            "GET /v1/migrations",
            vec![ok([Move::from(disk), Move::from(moving(phase))])],
        ),
        (
            &cancel_move(),
            vec![seen(moving(VmMigrationPhase::Aborted))],
        ),
    ])
}

#[test]
fn moves_of_virtual_machines_are_listed_beside_those_of_disks() {
    let api = both(VmMigrationPhase::CopyingMemory);
    let ran = api.run(&["migration", "list"]);
    let rows: Vec<Vec<&str>> = ran
        .stdout
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(
        rows[1][..6],
        ["aabbccdd", "vm/web", "a", "b", "copying_memory", "75%"]
    );
    assert_eq!(rows[2][..5], ["00112233", "d", "a", "b", "completed"]);

    let ran = api.run(&["migration", "list", "--json"]);
    let listed: Vec<Value> = serde_json::from_str(&ran.stdout).unwrap();
    let first = Move::from(moving(VmMigrationPhase::CopyingMemory));
    assert_eq!(listed[0], serde_json::to_value(first).unwrap());
    let names = |key: &str| {
        listed
            .iter()
            .map(|one| one[key].as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("kind"), [Some("vm"), Some("disk")]);
    assert_eq!(names("subject"), [Some("vm/web"), Some("d")]);
    assert_eq!(names("vm"), [Some("web"), None]);
    assert_eq!(names("disk"), [None, Some("d")]);
}

#[test]
fn the_first_digits_of_a_move_name_it() {
    let api = both(VmMigrationPhase::CopyingMemory);
    let ran = api.succeeds(&["migration", "show", "AA"]);
    ran.says("vm/web: memory to b, 1.00 GiB of 4.00 GiB left");
    let ran = api.run(&["migration", "cancel", "aab"]);
    assert_eq!(
        ran.stdout, "cancelled: VM 'web' stays on 'a'\n",
        "{}",
        ran.stderr
    );
    assert_eq!(api.asked(&cancel_move()).len(), 1);
    let ran = api.run(&["migration", "show", "bb"]);
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr
            .starts_with("error: there is no migration 'bb'\nhint: "),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_line_that_says_nothing_new_is_not_repeated() {
    let still = moving(VmMigrationPhase::PullingMemory);
    let mut answers = vec![seen(still.clone()); 25];
    answers.push(seen(moving(VmMigrationPhase::Completed)));
    let api = FakeApi::start(&[
        ("POST /v1/vms/web/migrate", vec![ok(still)]),
        (&get_move(), answers),
    ]);
    let ran = api.succeeds(&["migrate", "vm/web", "--to", "b"]);
    let told = ran.stderr.matches("memory follows").count();
    assert_eq!(told, 1, "{}", ran.stderr);
}

#[test]
fn a_move_is_watched_with_its_warnings_to_its_end() {
    let slow = VmMigration {
        warnings: vec!["the move may never end".to_owned()],
        ..moving(VmMigrationPhase::CopyingMemory)
    };
    let done = VmMigration {
        phase: VmMigrationPhase::Completed,
        ..slow.clone()
    };
    let answers = vec![
        seen(moving(VmMigrationPhase::CopyingMemory)),
        seen(slow),
        seen(done),
    ];
    let api = FakeApi::start(&[(&get_move(), answers.clone())]);
    let ran = api.succeeds(&["migration", "watch", MOVE]);
    assert!(
        ran.stdout.starts_with("VM 'web' moved from 'a' to 'b'\n"),
        "{}",
        ran.stdout
    );
    let told = ran
        .stderr
        .matches("warning: the move may never end")
        .count();
    assert_eq!(told, 1, "{}", ran.stderr);

    let api = FakeApi::start(&[(&get_move(), answers)]);
    let ran = api.run(&["migration", "watch", MOVE, "--json"]);
    let phases: Vec<VmMigrationPhase> = ran
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<VmMigration>(line).unwrap().phase)
        .collect();
    let expected = [VmMigrationPhase::CopyingMemory, VmMigrationPhase::Completed];
    assert_eq!(phases, expected);
}

#[test]
fn a_move_that_failed_says_why() {
    let failed = VmMigration {
        error: Some(ErrorBody::new(ErrorCode::Conflict, "QEMU has ended").hint("look there")),
        ..moving(VmMigrationPhase::Aborted)
    };
    let api = FakeApi::start(&[(&get_move(), vec![seen(failed)])]);
    let ran = api.run(&["migration", "watch", MOVE]);
    assert_eq!(ran.code, 4);
    assert_eq!(ran.stderr, "error: QEMU has ended\nhint: look there\n");
}

#[test]
fn a_guest_that_takes_its_time_to_shut_down_is_waited_for_with_a_word() {
    let answers = vec![(204, Value::Null)];
    let slow = FakeApi::start_slow(&[("POST /v1/vms/web/stop", answers.clone())]);
    let ran = slow.succeeds(&["vm", "stop", "web"]);
    assert!(
        ran.stderr.starts_with("waiting for the guest"),
        "{}",
        ran.stderr
    );
    assert_eq!(ran.stdout, "stopped VM 'web'\n");
    let quick = FakeApi::start(&[("POST /v1/vms/web/stop", answers)]);
    let ran = quick.run(&["vm", "stop", "web"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
}

#[test]
fn a_machine_that_is_taken_for_a_disk_is_told_how_to_name_it() {
    let body = ErrorBody::new(ErrorCode::NotFound, "there is no disk \"web\" on this node");
    let vm = serde_json::json!({
        "name": "web", "state": "running", "status": "runs here", "disks": ["root"],
        "origin": "run", "qmp": "/q",
    });
    let told = |body: ErrorBody| {
        let api = FakeApi::start(&[
            ("POST /v1/migrations", vec![refused(404, body)]),
            ("GET /v1/vms/web", vec![ok(&vm)]),
        ]);
        [
            api.run(&["migrate", "web", "--to", "b"]),
            api.run(&["migrate", "other", "--to", "b"]),
        ]
    };
    let [machine, neither] = told(body.hint("see 'godwit disk list'"));
    assert_eq!((machine.code, neither.code), (1, 1));
    assert!(
        machine.stderr.ends_with("give vm/web\n"),
        "{}",
        machine.stderr
    );
    assert!(
        neither.stderr.ends_with("disk list'\n"),
        "{}",
        neither.stderr
    );
}

#[test]
fn an_id_that_nobody_knows_is_told_as_the_node_tells_it() {
    let body = ErrorBody::new(ErrorCode::NotFound, "no such migration").hint("look at the list");
    let path = format!("GET /v1/migrations/{ID}");
    let api = FakeApi::start(&[(&path, vec![refused(404, body)])]);
    let ran = api.run(&["migration", "cancel", ID]);
    assert_eq!(ran.code, 1);
    assert_eq!(
        ran.stderr,
        "error: no such migration\nhint: look at the list\n"
    );
}
