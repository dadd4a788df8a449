//! Ctrl-C while the node has not answered yet.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command};
use std::time::Duration;

use godwit_node::api::MigrationPhase;
use godwit_testkit::process::wait_for;

use super::fake::{FakeApi, Ran, ok};
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
fn what_begins_after_ctrl_c_is_cancelled_even_if_it_was_to_be_left_alone() {
    let cancel = format!("POST /v1/migrations/{ID}/cancel");
    let api = FakeApi::start_slow(&[
        (
            "POST /v1/migrations",
            vec![ok(migration(MigrationPhase::Offering, 0))],
        ),
        (
            &get_migration(),
            vec![ok(migration(MigrationPhase::Aborted, 0))],
        ),
        (&cancel, vec![ok(migration(MigrationPhase::Aborted, 0))]),
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
