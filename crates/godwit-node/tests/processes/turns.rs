//! Moves in need of the same process wait for each other. Nodes tell processes where peers are.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use godwit_core::units::MigrationId;
use serde_json::{Value, json};

use super::support::{RunningNode, free_address, peer, receive, says, until, welcome};
use super::{Peer, taking_part};

/// An end of a connection: the number and the address of a queue pair.
type End = (u32, String);

/// Returns the two ends of a connection, unique among all tests, which search all processes of this host for ends.
fn ends() -> (End, End) {
    static DRAWN: AtomicU32 = AtomicU32::new(0);
    let (own, drawn) = (std::process::id(), DRAWN.fetch_add(1, Ordering::Relaxed));
    let address = |end: u32| {
        let bits = (0xfd_u128 << 120)
            | (u128::from(own) << 64)
            | (u128::from(drawn) << 32)
            | u128::from(end);
        Ipv6Addr::from_bits(bits).to_string()
    };
    ((7, address(7)), (9, address(9)))
}

/// Not a test: [`Partner`] runs this in a process of its own. Answers as the library does.
#[test]
#[ignore = "another test runs it in a process of its own"]
fn answers_as_the_library_does() {
    let Ok(status) = std::env::var("GODWIT_TEST_STATUS") else {
        return;
    };
    let status: Value = serde_json::from_str(&status).expect("a status");
    let name = format!("godwit-verbs-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    let listener = UnixListener::bind_addr(&address).expect("nobody has it");
    println!("ready");
    std::thread::spawn(|| {
        // The starter has ended, in whatever way.
        let _ended = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    for stream in listener.incoming() {
        let mut stream = stream.expect("a connection");
        let mut line = String::new();
        let asked = BufReader::new(&stream).read_line(&mut line);
        if let Ok(heard) = std::env::var("GODWIT_TEST_HEARD") {
            let file = OpenOptions::new().append(true).create(true).open(heard);
            file.expect("a file")
                .write_all(line.as_bytes())
                .expect("writes");
        }
        let answer = if line.contains("\"status\"") {
            json!({"status": status})
        } else if line.contains("\"suspend\"") {
            json!({"suspended": status["queue_pairs"]})
        } else if line.contains("\"do\":\"redirects\"") {
            json!({"redirects": [place_of(std::process::id())]})
        } else if line.contains("\"resume\"") && has_datagrams(&status) {
            std::thread::sleep(RESUMING);
            json!("done")
        } else if line.contains("\"drain\"") && std::env::var("GODWIT_TEST_DRAIN").is_ok() {
            std::thread::sleep(Duration::from_secs(2));
            json!({"error": "not today"})
        } else {
            json!("done")
        };
        if asked.is_ok() {
            let _gone = stream.write_all(format!("{answer}\n").as_bytes());
        }
    }
}

/// Time in which a process with datagram queue pairs resumes.
const RESUMING: Duration = Duration::from_secs(2);

fn has_datagrams(status: &Value) -> bool {
    let pairs = status["queue_pairs"].as_array().expect("queue pairs");
    pairs
        .iter()
        .any(|pair| pair["reliable_connection"] == false)
}

/// Returns the new place reported by a process with datagram queue pairs.
fn place_of(pid: u32) -> Value {
    json!({"remote": "fe80::3", "number": pid, "to": "fe80::4", "physical": 22})
}

/// A process with one connection.
struct Partner(Child);

impl Partner {
    /// Starts a process at the end `own` of a connection to `peer`. The process records all requests in `heard`.
    fn start(own: &End, peer: &End, heard: Option<&Path>) -> Self {
        Self::with(&[pair(own, peer)], heard)
    }

    /// Starts a process with these queue pairs.
    fn with(pairs: &[Value], heard: Option<&Path>) -> Self {
        let status = json!({"queue_pairs": pairs, "obstacles": [], "needs": []});
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "turns::answers_as_the_library_does",
                "--ignored",
                "--nocapture",
            ])
            .env("GODWIT_TEST_STATUS", status.to_string())
            .envs(heard.map(|heard| ("GODWIT_TEST_HEARD", heard)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let ready = out
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("ready"));
        assert!(ready);
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _waited = self.0.wait();
    }
}

/// Returns a queue pair as the library describes it.
fn pair((number, local): &End, (peer, remote): &End) -> Value {
    json!({"number": number, "physical": number, "state": 3, "reliable_connection": true, "failed": false,
        "local": local, "remote": remote, "remote_physical": peer, "sent": 0, "received": 0,
        "receives_outstanding": 0, "kept": 0})
}

fn ask_partner(peer: &mut Peer, pid: u32, request: Value) -> Value {
    peer.ask(&json!({"partner": {"pid": pid, "request": request}}))
}

/// Finds the process at the end `here` for a move of the process at the end `there`.
fn find(peer: &mut Peer, pid: u32, (here, there): &(End, End)) {
    let found = peer.ask(&json!({"find": {"ours": [pair(there, here)]}}));
    let all = found["found"].as_array().expect("processes");
    assert!(all.iter().any(|one| one["pid"] == json!(pid)), "{found}");
}

/// Waits until the last move is like this.
async fn last_move(node: &RunningNode, is_so: impl Fn(&Value) -> bool) -> Value {
    let last = async || {
        let moves = node.get("/v1/migrations").await.json();
        let last = moves.as_array()?.last().cloned();
        last.filter(&is_so)
    };
    until("the last move is like that", last).await
}

/// Starts node `b`, whose peer `a` is absent, and a process of the host at the first of two ends.
async fn with_a_partner(dir: &Path) -> (RunningNode, Partner, (End, End)) {
    let mut config = taking_part("b", dir);
    config.peers = vec![peer("a", free_address())];
    let node = RunningNode::start(config).await;
    let ends = ends();
    let process = Partner::start(&ends.0, &ends.1, None);
    (node, process, ends)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_waits_for_the_move_that_it_is_held_for() {
    let dir = tempfile::tempdir().expect("a folder");
    let (node, process, ends) = with_a_partner(dir.path()).await;
    let (pid, config) = (process.pid(), node.config.clone());
    let held = tokio::task::spawn_blocking(move || {
        let mut mover = Peer::connect(&config, 5);
        // A process not found, or not claimed, is not held.
        let claim = json!({"claim": {"pid": pid, "moving": 99}});
        assert!(mover.ask(&claim)["refused"].is_string());
        find(&mut mover, pid, &ends);
        let suspend = json!({"do": "suspend", "only": [7]});
        let said = ask_partner(&mut mover, pid, suspend);
        says(&said["refused"], "not claimed");
        assert_eq!(mover.ask(&claim), json!("done"));
        // Moves of other processes may hold the process at the same time.
        let mut second = Peer::connect(&config, 6);
        find(&mut second, pid, &ends);
        assert_eq!(second.ask(&claim), json!("done"));
        let resume = json!({"do": "resume", "only": [7]});
        assert_eq!(
            ask_partner(&mut second, pid, resume),
            json!({"library": "done"})
        );
        mover
    });
    let mut mover = held.await.expect("it is held");
    let path = format!("/v1/processes/{pid}/migrate");
    for cancels in [true, false] {
        let answer = node.request("POST", &path, r#"{"to":"a"}"#).await;
        assert!(answer.status < 300, "{}", answer.body);
        let seen = last_move(&node, |seen| seen["waits_for"].is_string()).await;
        assert_eq!(seen["phase"], "waiting");
        assert_eq!(seen["waits_for"], "the move of process 99 of node 'a'");
        assert_eq!(seen["kind"], "process");
        assert_eq!(seen["subject"], format!("process/{}", seen["pid"]));
        if cancels {
            let id = seen["id"].as_str().expect("an id");
            let path = format!("/v1/migrations/{id}/cancel");
            let answer = node.request("POST", &path, "{}").await;
            assert_eq!(answer.json()["phase"], "aborted", "{}", answer.body);
            assert!(
                answer
                    .body
                    .contains("with its connections: it was cancelled"),
                "{}",
                answer.body
            );
        }
    }
    // After the end of the other move, this one checks for obstacles.
    let mover = tokio::task::spawn_blocking(move || {
        let resume = json!({"do": "resume", "only": [7]});
        assert_eq!(
            ask_partner(&mut mover, pid, resume),
            json!({"library": "done"})
        );
        mover
    });
    let mover = mover.await.expect("it is let go");
    let seen = last_move(&node, |seen| seen["phase"] == "aborted").await;
    says(&seen["error"]["message"], "cannot move to node 'a'");
    drop(mover);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partner_that_has_ended_keeps_nobody_from_going_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let (node, process, ends) = with_a_partner(dir.path()).await;
    let (pid, config) = (process.pid(), node.config.clone());
    let asked = tokio::task::spawn_blocking(move || {
        let mut mover = Peer::connect(&config, 5);
        find(&mut mover, pid, &ends);
        let claim = json!({"claim": {"pid": pid, "moving": 99}});
        assert_eq!(mover.ask(&claim), json!("done"));
        let suspend = json!({"do": "suspend", "only": [7]});
        assert!(ask_partner(&mut mover, pid, suspend)["library"].is_object());
        drop(process);
        let connect = json!({"do": "connect", "connections": []});
        let said = ask_partner(&mut mover, pid, connect);
        let why = format!("process {pid} has ended");
        assert_eq!(said, json!({"refused": why}));
        // Twice, like a mover after a lost answer.
        for _ in 0..2 {
            let resume = json!({"do": "resume", "only": [7]});
            let said = ask_partner(&mut mover, pid, resume);
            assert_eq!(said, json!({"library": "done"}));
        }
    });
    asked.await.expect("it is as it has to be");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_moves_is_held_for_nobody() {
    let dir = tempfile::tempdir().expect("a folder");
    let ends = ends();
    let process = Partner::start(&ends.0, &ends.1, None);
    let pid = process.pid();
    let mut config = taking_part("b", dir.path());
    config.peers = vec![peer("a", free_address())];
    // A move for the node to resume, as the last version stored it, with a silent destination.
    let id = MigrationId([1; 16]).to_string();
    let place = config.data_dir.join("processes").join(&id);
    std::fs::create_dir_all(&place).expect("a folder");
    let moving = json!({"step": "settle", "why": null, "lost": null, "gone": false, "there": false, "tries": 0});
    let stored = json!({"id": id, "pid": pid, "command": "x", "to": "a", "address": null, "files": [],
        "partners": [], "queue_pairs": 1, "layout": "1 2 3 4 5", "started_at": "2026-01-01T00:00:00Z",
        "moving": moving, "made": null});
    std::fs::write(place.join("outgoing.json"), stored.to_string()).expect("writes");
    let node = RunningNode::start(config).await;
    assert!(!place.join("outgoing.json").exists());
    let config = node.config.clone();
    let checked = tokio::task::spawn_blocking(move || {
        let mut other = Peer::connect(&config, 5);
        find(&mut other, pid, &ends);
        let claim = json!({"claim": {"pid": pid, "moving": 99}});
        let named = format!("the move of process {pid} of node 'b'");
        assert_eq!(other.ask(&claim), json!({"waits": named}));
        let said = ask_partner(&mut other, pid, json!({"do": "suspend", "only": [7]}));
        assert!(said["refused"].is_string(), "{said}");
    });
    checked.await.expect("it is so");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn senders_of_datagrams_are_told_where_a_process_is() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = taking_part("b", dir.path());
    config.peers = vec![peer("a", free_address())];
    let node = RunningNode::start(config).await;
    let heard = dir.path().join("heard");
    let (here, there) = ends();
    let _process = Partner::start(&here, &there, Some(&heard));
    let config = node.config.clone();
    let told = json!([{"remote": "fe80::1", "number": 17, "to": "fe80::2", "physical": 21}]);
    let redirect = json!({"redirect": {"redirects": told}});
    let asked = tokio::task::spawn_blocking(move || Peer::connect(&config, 5).ask(&redirect));
    // Other processes of this host may be told as well.
    asked.await.expect("an answer");
    let said = std::fs::read_to_string(&heard).expect("it was asked");
    // Nodes of other tests also ask for the status.
    let told_of = said.lines().filter(|line| line.contains("redirect"));
    let told_of: Vec<Value> = told_of
        .map(|line| serde_json::from_str(line).expect("a request"))
        .collect();
    assert_eq!(told_of, [json!({"do": "redirect", "redirects": told})]);
    node.stop().await;
}

/// Duration of a redirect at the accepting node.
const TELLING: Duration = Duration::from_secs(3);
/// True once the accepting node was asked to redirect.
static TELLS: AtomicBool = AtomicBool::new(false);

/// A node without processes that accepts any process, on each connection.
fn takes_everything(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || answers(stream));
    }
}

fn answers(mut stream: TcpStream) -> Option<()> {
    receive(&mut stream);
    stream.write_all(&welcome("c").encode()).ok()?;
    loop {
        let mut length = [0; 4];
        stream.read_exact(&mut length).ok()?;
        let mut body = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut body).ok()?;
        let asked: Value = serde_json::from_slice(&body).ok()?;
        let answer = if asked.get("look").is_some() {
            json!({"looked": {"offer": {"devices": [], "criu": null, "taken": []}, "reasons": []}})
        } else if asked.get("find").is_some() {
            json!({"found": []})
        } else if asked.get("redirect").is_some() {
            TELLS.store(true, Ordering::Relaxed);
            std::thread::sleep(TELLING);
            json!("done")
        } else {
            json!({"refused": "not today"})
        };
        let body = answer.to_string();
        stream.write_all(&(body.len() as u32).to_le_bytes()).ok()?;
        stream.write_all(body.as_bytes()).ok()?;
    }
}

/// Starts node `b`, whose peer `c` accepts any process.
async fn beside_one_that_takes_everything(dir: &Path) -> RunningNode {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut config = taking_part("b", dir);
    config.peers = vec![peer("c", listener.local_addr().expect("an address"))];
    std::thread::spawn(move || takes_everything(&listener));
    RunningNode::start(config).await
}

/// Returns the suspend and resume requests of a process, each with true for the whole process and false for a partner.
fn holding(heard: &Path) -> Vec<(String, bool)> {
    let said = std::fs::read_to_string(heard).expect("it was asked");
    let requests = said
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let held = requests.filter_map(|request: Value| {
        let does = request["do"].as_str().expect("what").to_owned();
        let holds = ["suspend", "resume"].contains(&does.as_str());
        holds.then(|| (does, request["only"].is_null()))
    });
    held.collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "another test runs it where CRIU seems to be"]
async fn both_ends_of_a_connection_move() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = beside_one_that_takes_everything(dir.path()).await;
    let heard = ["one", "other"].map(|name| dir.path().join(name));
    let (here, there) = ends();
    let processes = [
        Partner::start(&here, &there, Some(&heard[0])),
        Partner::start(&there, &here, Some(&heard[1])),
    ];
    let paths = processes
        .each_ref()
        .map(|one| format!("/v1/processes/{}/migrate", one.pid()));
    let body = r#"{"to":"c"}"#;
    let (one, other) = tokio::join!(
        node.request("POST", &paths[0], body),
        node.request("POST", &paths[1], body)
    );
    for answer in [&one, &other] {
        assert!(answer.status < 300, "{}", answer.body);
    }
    let mut waited = Vec::new();
    let began = Instant::now();
    let ended = loop {
        let moves = node.get("/v1/migrations").await.json();
        let moves = moves.as_array().expect("moves").clone();
        waited.extend(
            moves
                .iter()
                .filter_map(|seen| seen["waits_for"].as_str().map(str::to_owned)),
        );
        if moves.iter().all(|seen| seen["phase"] == "aborted") {
            break moves;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{moves:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(ended.len(), 2);
    // Each move came to the wait for requests in flight, which the processes of this test refuse.
    for seen in &ended {
        let why = seen["error"]["message"].as_str().expect("a reason");
        assert!(
            why.contains("goes on at node 'b' with its connections") && why.contains("not today"),
            "{why}"
        );
    }
    waited.dedup();
    let names = processes
        .each_ref()
        .map(|one| format!("the move of process {} of node 'b'", one.pid()));
    assert_eq!(waited.len(), 1, "{waited:?}");
    assert!(names.contains(&waited[0]), "{waited:?}");
    // Each move in turn: neither process was held as a partner during its own move.
    for heard in &heard {
        let mut held = None;
        for (does, all) in holding(heard) {
            match (does.as_str(), held) {
                ("suspend", None) => held = Some(all),
                ("resume", Some(as_what)) if as_what == all => held = None,
                // A process claimed and not held is let go as well.
                ("resume", None) => {}
                _ => panic!("{does} of {all} while {held:?} is held"),
            }
        }
        assert_eq!(held, None);
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "another test runs it where CRIU seems to be"]
async fn a_process_with_datagrams_stays() {
    let dir = tempfile::tempdir().expect("a folder");
    let node = beside_one_that_takes_everything(dir.path()).await;
    let heard = dir.path().join("heard");
    let mut datagrams = pair(&ends().0, &ends().1);
    datagrams["reliable_connection"] = json!(false);
    datagrams["remote"] = json!(null);
    // This process moved long ago: another may have the old number by now.
    let older = Partner::with(std::slice::from_ref(&datagrams), None);
    let process = Partner::with(&[datagrams], Some(&heard));
    let mut other = Peer::connect_as("c", &node.config, 5);
    let path = format!("/v1/processes/{}/migrate", process.pid());
    let began = Instant::now();
    let answer = node.request("POST", &path, r#"{"to":"c"}"#).await;
    assert!(answer.status < 300, "{}", answer.body);
    let place =
        |number| json!({"remote": "fe80::5", "number": number, "to": "fe80::6", "physical": 1});
    let (missed, later) = (place(31), place(32));
    // The process stands still.
    last_move(&node, |seen| seen["phase"] == "going_back").await;
    let tell = |place: &Value| json!({"redirect": {"redirects": [place]}});
    let (first, second) = (tell(&missed), tell(&later));
    let others = tokio::task::spawn_blocking(move || {
        other.ask(&first);
        // The process works again, and the move has not ended.
        while !TELLS.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
        other.ask(&second);
    });
    let seen = last_move(&node, |seen| seen["phase"] == "aborted").await;
    let took = began.elapsed();
    others.await.expect("they are told");
    says(&seen["error"]["message"], "not today");
    assert_eq!(seen["warnings"], json!([]), "senders were told");
    let blackout = seen["blackout_ms"].as_f64().expect("it was stopped");
    let blackout = Duration::from_secs_f64(blackout / 1e3);
    assert!(blackout + TELLING <= took, "{blackout:?} of {took:?}");
    let said = std::fs::read_to_string(&heard).expect("it was asked");
    let told = said
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a request"))
        // Nodes of other tests send other redirects.
        .filter(|request| request["do"] == "redirect" && !request.to_string().contains("fe80::1"));
    let told: Vec<Value> = told
        .map(|mut request| request["redirects"].take())
        .collect();
    let own = place_of(process.pid());
    let missed = json!([own, missed, later]);
    assert_eq!(told, [json!([later]), json!([own]), missed]);
    drop(older);
    node.stop().await;
}

/// Runs a test of this file in a process of its own, with a CRIU that does nothing.
fn where_criu_seems_to_be(test: &str) {
    let dir = tempfile::tempdir().expect("a folder");
    let criu = dir.path().join("criu");
    std::fs::write(&criu, "#!/bin/sh\nexit 0\n").expect("writes");
    std::fs::set_permissions(&criu, PermissionsExt::from_mode(0o755)).expect("a program");
    let path = std::env::var("PATH").unwrap_or_default();
    let ran = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("PATH", format!("{}:{path}", dir.path().display()))
        .env("GODWIT_TEST_DRAIN", "refuse")
        .output()
        .expect("it runs");
    let said = [ran.stdout, ran.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn of_two_ends_that_move_at_once_one_waits_for_the_other() {
    where_criu_seems_to_be("turns::both_ends_of_a_connection_move");
}

#[test]
fn a_process_goes_on_before_senders_of_datagrams_are_told() {
    where_criu_seems_to_be("turns::a_process_with_datagrams_stays");
}
