//! Ctrl-C before the node's answer.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command};
use std::time::Duration;

use godwit_node::api::{Job, JobKind, JobState, MigrationPhase};
use godwit_testkit::process::wait_for;
use serde_json::Value;

use super::fake::{FakeApi, Ran, ok, seen};
use super::{ID, get_migration, migration};

const LIMIT: Duration = Duration::from_secs(10);

fn interrupt(child: &Child) {
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
}

#[test]
fn a_second_ctrl_c_does_not_wait_for_a_node_that_says_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("godwit.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let api = FakeApi::start(&[]);
    let mut command = api.command(&["migrate", "d", "--to", "b"]);
    let errors = directory.path().join("errors");
    command.stderr(std::fs::File::create(&errors).unwrap());
    let mut child = command.env("GODWIT_SOCKET", &socket).spawn().unwrap();
    let (silent, _) = listener.accept().unwrap();
    let mut request = String::new();
    BufReader::new(&silent).read_line(&mut request).unwrap();
    assert!(request.starts_with("POST /v1/migrations"), "{request}");
    let told = |what: &str| std::fs::read_to_string(&errors).unwrap().contains(what);
    let mut ended = None;
    for expected in ["press Ctrl-C again", "may have begun"] {
        interrupt(&child);
        let heard = wait_for(LIMIT, || told(expected).then_some(()));
        if heard.is_none() {
            child.kill().unwrap();
            panic!("Ctrl-C is not answered with {expected:?}");
        }
        ended = wait_for(LIMIT / 10, || child.try_wait().unwrap());
    }
    assert_eq!(ended.expect("it ends").code(), Some(130));
}

#[test]
fn a_copy_that_is_left_alone_goes_on_and_the_command_says_so() {
    let job = |state| Job {
        id: "1".to_owned(),
        kind: JobKind::Import,
        disk: "d".to_owned(),
        path: "/x".to_owned(),
        state,
        bytes_total: 4 << 20,
        bytes_done: 1 << 20,
        error: None,
    };
    let api = FakeApi::start(&[
        ("POST /v1/disks/import", vec![ok(job(JobState::Running))]),
        ("GET /v1/jobs/1", vec![ok(job(JobState::Running))]),
    ]);
    let child = api.command(&["disk", "import", "d", "/x"]).spawn().unwrap();
    super::fake::wait_until("it follows", || !api.asked("GET /v1/jobs/1").is_empty());
    interrupt(&child);
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    ran.tells("import of disk 'd'; it goes on\nhint: ");
}

#[test]
fn a_node_that_falls_silent_is_not_taken_to_go_on() {
    let api = FakeApi::start(&[
        (
            "POST /v1/migrations",
            vec![ok(migration(MigrationPhase::Copying, 0))],
        ),
        (
            &get_migration(),
            vec![
                seen(migration(MigrationPhase::Copying, 1 << 29)),
                (200, Value::Null),
                (200, Value::Null),
                (200, Value::Null),
                seen(migration(MigrationPhase::Completed, 1 << 30)),
            ],
        ),
    ]);
    let ran = api.succeeds(&["migrate", "d", "--to", "b"]);
    let (_, silent) = ran.stderr.split_once("trying again").expect(&ran.stderr);
    assert!(!silent.contains("copying"), "{}", ran.stderr);
}

#[test]
fn what_begins_after_ctrl_c_is_cancelled_even_if_it_was_to_be_left_alone() {
    let cancel = format!("POST /v1/migrations/{ID}/cancel");
    let api = FakeApi::start_slow(&[
        (
            "POST /v1/migrations",
            vec![ok(migration(MigrationPhase::Offering, 0))],
        ),
        (
            &get_migration(),
            vec![seen(migration(MigrationPhase::Aborted, 0))],
        ),
        (&cancel, vec![seen(migration(MigrationPhase::Aborted, 0))]),
    ]);
    let command = &["migrate", "d", "--to", "b", "--detach"];
    let child = api.command(command).spawn().unwrap();
    super::fake::wait_until("it asks", || !api.asked("POST /v1/migrations").is_empty());
    interrupt(&child);
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(api.asked(&cancel).len(), 1, "{}", ran.stderr);
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    assert!(ran.stdout.is_empty(), "{}", ran.stdout);
}
