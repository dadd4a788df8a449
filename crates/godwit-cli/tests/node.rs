//! The `godwit` command with a real node, on its socket and over mutual TLS.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use godwit_testkit::cluster::free_port;
use serde_json::Value;

struct Node {
    directory: tempfile::TempDir,
    api: String,
    process: Child,
}

impl Node {
    /// Starts a node with certificates, and an API that also listens on loopback.
    fn start() -> Self {
        Self::start_within("true")
    }

    /// Starts such a node in a shell that has run `limits`.
    fn start_within(limits: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        succeed(godwit(at).args(["certs", "init"]));
        succeed(godwit(at).args(["certs", "issue", "a", "--ip", "127.0.0.1"]));
        succeed(godwit(at).args(["certs", "issue", "alice", "--role", "operator"]));
        let [api, listen] = [(); 2].map(|()| free_port().unwrap().to_string());
        let log = at.join("node.log");
        let started = format!("{limits} && exec {} \"$@\"", env!("CARGO_BIN_EXE_godwit"));
        let process = in_test("sh", at)
            .args(["-c", &started, "sh"])
            .args([
                "node",
                "--name",
                "a",
                "--data-dir",
                "data",
                "--listen",
                &listen,
            ])
            .args(["--api-listen", &api])
            .args(identity("a"))
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut node = Self {
            directory,
            api: format!("https://{api}"),
            process,
        };
        let start = Instant::now();
        while !node.local(&["disk", "list"]).status.success() {
            let ended = node.process.try_wait().unwrap();
            assert!(
                ended.is_none() && start.elapsed() < Duration::from_secs(20),
                "the node does not answer ({ended:?}): {}",
                std::fs::read_to_string(&log).unwrap()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn local(&self, args: &[&str]) -> Output {
        let mut command = godwit(self.directory.path());
        command.arg("--socket").arg(self.path("data/godwit.sock"));
        command.args(args).output().unwrap()
    }

    fn remote(&self, identity: &[String], args: &[&str]) -> Output {
        let mut command = godwit(self.directory.path());
        command.args(["--api", &self.api]).args(identity);
        command.args(args).output().unwrap()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The test is over in any case.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn godwit(directory: &Path) -> Command {
    in_test(env!("CARGO_BIN_EXE_godwit"), directory)
}

fn in_test(program: &str, directory: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory).stdin(Stdio::null());
    for variable in ["SOCKET", "API", "CERT", "KEY", "CA"] {
        command.env_remove(format!("GODWIT_{variable}"));
    }
    command
}

fn identity(name: &str) -> Vec<String> {
    identity_from("godwit-certs", name, "godwit-certs")
}

fn identity_from(directory: &str, name: &str, authority: &str) -> Vec<String> {
    vec![
        format!("--cert={directory}/{name}.pem"),
        format!("--key={directory}/{name}.key"),
        format!("--ca={authority}/ca.pem"),
    ]
}

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn disks_are_managed_on_the_socket_and_over_the_network() {
    let node = Node::start();
    let alice = identity("alice");
    let made = json(&node.local(&["disk", "create", "d", "--size", "8M", "--json"]));
    assert_eq!(made["size_bytes"], 8 << 20);
    assert_eq!(made["state"], "serving");

    std::fs::write(node.path("image"), [7; 1024]).unwrap();
    let imported = json(&node.local(&["disk", "import", "i", "image", "--json"]));
    assert_eq!(imported["size_bytes"], 1024);
    let relative = node.remote(&alice, &["disk", "export", "i", "copy"]);
    assert_eq!(
        relative.status.code(),
        Some(2),
        "whose working directory would it be?"
    );
    assert!(
        node.local(&["disk", "export", "i", "copy"])
            .status
            .success()
    );
    assert_eq!(std::fs::read(node.path("copy")).unwrap(), [7; 1024]);

    let disks = json(&node.remote(&alice, &["disk", "list", "--json"]));
    let names: Vec<&str> = disks
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|d| d["name"].as_str())
        .collect();
    assert_eq!(names, ["d", "i"]);
    let uri = text(&node.local(&["disk", "attach", "d"]).stdout);
    assert!(uri.starts_with("nbd+unix:///d?socket="), "{uri}");

    assert!(node.remote(&alice, &["disk", "rm", "i"]).status.success());
    let gone = node.local(&["disk", "show", "i"]);
    assert_eq!(gone.status.code(), Some(1));
    assert!(
        text(&gone.stderr).contains("\nhint: "),
        "{}",
        text(&gone.stderr)
    );
    let claim = text(&node.local(&["disk", "claim", "d", "--force"]).stderr);
    assert!(claim.contains("not in doubt"), "{claim}");
}

#[test]
fn the_network_needs_certificates_of_the_same_authority_on_both_sides() {
    let node = Node::start();
    let at = node.directory.path();
    succeed(godwit(at).args(["certs", "init", "--dir", "other"]));
    succeed(godwit(at).args(["certs", "issue", "mallory", "--dir", "other"]));
    succeed(godwit(at).args(["certs", "issue", "late", "--expired"]));
    succeed(godwit(at).args(["certs", "issue", "vm", "--nbd-client"]));
    let nbd = [
        "cert=godwit-certs/vm/client-cert.pem",
        "key=godwit-certs/vm/client-key.pem",
    ];
    let mut nbd: Vec<String> = nbd.iter().map(|option| format!("--{option}")).collect();
    nbd.push("--ca=godwit-certs/ca.pem".to_owned());
    for (who, identity) in [
        ("an NBD client", nbd),
        (
            "a client of another authority",
            identity_from("other", "mallory", "godwit-certs"),
        ),
        (
            "a client that trusts another authority",
            identity_from("godwit-certs", "alice", "other"),
        ),
        ("a client whose certificate has ended", identity("late")),
    ] {
        let output = node.remote(&identity, &["disk", "list"]);
        let told = text(&output.stderr);
        let no_answer = if who == "an NBD client" { 1 } else { 3 };
        assert_eq!(output.status.code(), Some(no_answer), "{who}: {told}");
        assert!(told.to_lowercase().contains("certificate"), "{who}: {told}");
        assert!(told.contains("\nhint: "), "{who}: {told}");
    }
    assert!(
        node.remote(&identity("alice"), &["disk", "list"])
            .status
            .success()
    );
}

#[test]
fn the_log_tells_when_a_certificate_ends_soon_has_ended_or_cannot_be_read() {
    let node = Node::start();
    let at = node.directory.path();
    let log = || std::fs::read_to_string(node.path("node.log")).unwrap();
    assert!(!log().contains("the node's certificate"), "{}", log());
    let reload_and_wait_for = |told: &str| {
        let hang_up = format!("kill -HUP {}", node.process.id());
        succeed(Command::new("sh").args(["-c", &hang_up]));
        for _ in 0..200 {
            if log().contains(told) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("{told:?} is not told:\n{}", log());
    };
    let issue = |more: &[&str]| {
        let again = ["certs", "issue", "a", "--force", "--ip", "127.0.0.1"];
        succeed(godwit(at).args(again).args(more));
    };
    issue(&["--days", "10"]);
    reload_and_wait_for("the node's certificate ends in ");
    std::fs::write(node.path("godwit-certs/a.pem"), "nothing").unwrap();
    reload_and_wait_for("the new certificates are not used");
    let alice = identity("alice");
    json(&node.remote(&alice, &["disk", "list", "--json"]));
    issue(&["--expired"]);
    reload_and_wait_for("the node's certificate ended at");
}

#[test]
fn a_node_takes_as_many_open_files_as_it_may_and_says_when_they_are_used_up() {
    let many = |node: &Node| {
        let create =
            |number| node.local(&["disk", "create", &format!("d{number}"), "--size", "1M"]);
        (0..20).map(create).find(|made| !made.status.success())
    };
    let node = Node::start_within("ulimit -Sn 64 && ulimit -Hn 4096");
    if let Some(refused) = many(&node) {
        panic!("64 files are not the most: {}", text(&refused.stderr));
    }
    drop(node);
    let node = Node::start_within("ulimit -n 64");
    let refused = text(&many(&node).expect("20 disks with 64 files").stderr);
    assert!(refused.contains("Too many open files"), "{refused}");
    assert!(
        refused.contains("\nhint: the node may open no more files: raise LimitNOFILE"),
        "{refused}"
    );
    assert!(!refused.contains("check the device"), "{refused}");
    let log = std::fs::read_to_string(node.path("node.log")).unwrap();
    assert!(
        log.contains("LimitNOFILE") || !log.contains("cannot take"),
        "{log}"
    );
}
