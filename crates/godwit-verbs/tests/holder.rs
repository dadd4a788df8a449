//! A holder (`godwit-verbs hold`) as a node starts it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use godwit_verbs::control::{Answer, Request, ask};
use serde_json::json;

/// Returns true if libibverbs is installed. Without libibverbs, neither a holder nor this test does anything.
fn libibverbs_is_there() -> bool {
    // SAFETY: a constant name; libibverbs' constructors are those that applications run.
    !unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) }.is_null()
}

#[test]
fn a_holder_says_what_is_not_there_and_ends_with_who_started_it() {
    if !libibverbs_is_there() {
        eprintln!("libibverbs.so.1 is not there: nothing was tested");
        return;
    }
    let mut holder = Command::new(env!("CARGO_BIN_EXE_godwit-verbs"))
        .arg("hold")
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let pid = holder.id();
    while ask(pid, &Request::Status).is_err() {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "it does not answer"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    let plan = json!({"name": 1, "objects": [{"id": 1, "call": {"kind": "context"}, "cookie": 0, "details": {"device": "none"}}]});
    let request = Request::Hold {
        plan: serde_json::from_value(plan).unwrap(),
    };
    match ask(pid, &request).unwrap() {
        Answer::Error(error) => assert!(error.contains("no RDMA device"), "{error}"),
        answer => panic!("{answer:?}"),
    }
    match ask(pid, &Request::HandOver).unwrap() {
        Answer::Error(error) => assert!(error.contains("holds nothing"), "{error}"),
        answer => panic!("{answer:?}"),
    }
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
}
