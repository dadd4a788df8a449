//! Environment variables, as in a service's settings file.

use std::process::Command;

use super::fake::Ran;

/// Tries to start a node with this variable. The start fails for lack of certificates at the latest.
fn node_with(variable: &str, value: &str, more: &[&str]) -> Ran {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
    command.args(["node", "--data-dir"]).arg(directory.path());
    command
        .env("GODWIT_NAME", "a")
        .env(variable, value)
        .args(more);
    for other in ["CERT", "KEY", "CA"] {
        command.env_remove(format!("GODWIT_{other}"));
    }
    Ran::from(command.output().unwrap())
}

#[test]
fn an_empty_variable_is_one_that_is_not_set() {
    let settings = [
        "PEERS",
        "POOLS",
        "NBD_LISTEN",
        "API_LISTEN",
        "LISTEN",
        "LOG_FORMAT",
        "MAX_INCOMING",
        "UNENCRYPTED_DATA",
    ];
    for setting in settings {
        let ran = node_with(&format!("GODWIT_{setting}"), "", &[]);
        ran.tells("a node needs a certificate");
    }
}

#[test]
fn a_switch_takes_every_usual_yes_and_no() {
    for value in ["yes", "no", "1", "0", "true", "false"] {
        let ran = node_with("GODWIT_NO_COMPRESSION", value, &[]);
        ran.tells("a node needs a certificate");
    }
}

#[test]
fn an_error_names_the_variable_it_is_about() {
    for (variable, value) in [
        ("GODWIT_PEERS", "b"),
        ("GODWIT_NAME", ""),
        ("GODWIT_NO_COMPRESSION", "perhaps"),
    ] {
        let ran = node_with(variable, value, &[]);
        assert!(ran.stderr.contains(variable), "{}", ran.stderr);
        assert_eq!(ran.code, 2, "{}", ran.stderr);
    }
    let ran = node_with("GODWIT_PEERS", "b=h:1", &["--peer", "c"]);
    assert!(!ran.stderr.contains("GODWIT_PEERS"), "{}", ran.stderr);
}
