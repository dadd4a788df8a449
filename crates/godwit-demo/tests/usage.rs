//! The demo's command line.

use std::process::{Command, Output};

fn demo(words: &[&str]) -> Output {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_godwit-demo"));
    demo.args(words).output().expect("the demo starts")
}

#[test]
fn an_unknown_scene_is_refused() {
    let refused = demo(&["disc"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("unrecognized subcommand 'disc'"), "{said}");
}

#[test]
fn every_scene_is_listed() {
    let help = demo(&["--help"]);
    let said = String::from_utf8_lossy(&help.stdout);
    for scene in ["disk", "leave", "vm", "net", "memory", "rdma"] {
        assert!(said.contains(&format!("  {scene} ")), "{scene}: {said}");
    }
}
