//! Debian's etcd as witness: killed between a request and its answer, one of three members, and with TLS and a password.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use godwit_context::Context;
use godwit_context::config::NodeConfig;
use godwit_context::store::Store;
use godwit_core::units::ProtectionId;
use godwit_core::wire::Features;
use godwit_machines::protect::witness::{Change, Protection, Swap, Witness, WitnessError, connect};
use godwit_peers::certificates::{self, IssueRequest, Validity};
use godwit_peers::dial::Dialer;
use godwit_peers::roles::Role;
use godwit_protect::{Grant, Member, Term};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Returns the path of etcd, which `scripts/install-etcd` unpacks once.
fn program() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install-etcd");
        let made = Command::new(script).output().expect("a script");
        let path = String::from_utf8(made.stdout).expect("a path");
        assert!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        );
        path.trim().to_owned()
    })
}

/// A server of an etcd, which ends with this value.
struct Server {
    arguments: Vec<String>,
    process: Option<Child>,
    port: u16,
}

impl Server {
    fn start(&mut self) {
        let started = Command::new(program())
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.process = Some(started.expect("etcd starts"));
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_ports<const N: usize>() -> [u16; N] {
    let taken = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    taken.map(|it| it.local_addr().expect("an address").port())
}

/// Starts an etcd of `N` members.
fn start<const N: usize>(folder: &Path, scheme: &str, more: &[String]) -> [Server; N] {
    let (clients, peers) = (free_ports::<N>(), free_ports::<N>());
    let all: Vec<String> = peers
        .iter()
        .map(|port| format!("m{port}=http://127.0.0.1:{port}"))
        .collect();
    std::array::from_fn(|at| {
        let (port, peer) = (clients[at], peers[at]);
        let url = format!("{scheme}://127.0.0.1:{port}");
        let mut arguments: Vec<String> = [
            ("name", format!("m{peer}")),
            (
                "data-dir",
                folder.join(format!("m{peer}")).display().to_string(),
            ),
            ("listen-client-urls", url.clone()),
            ("advertise-client-urls", url),
            ("listen-peer-urls", format!("http://127.0.0.1:{peer}")),
            (
                "initial-advertise-peer-urls",
                format!("http://127.0.0.1:{peer}"),
            ),
            ("initial-cluster", all.join(",")),
            ("heartbeat-interval", String::from("50")),
            ("election-timeout", String::from("300")),
        ]
        .map(|(name, value)| format!("--{name}={value}"))
        .into();
        arguments.extend_from_slice(more);
        let mut server = Server {
            arguments,
            process: None,
            port,
        };
        server.start();
        server
    })
}

fn witness(folder: &Path, ports: &[u16], options: Option<PathBuf>) -> Arc<dyn Witness> {
    let members: Vec<String> = ports
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    let spec = format!("etcd://{}/godwit/grants", members.join(","));
    let config = NodeConfig {
        etcd_options: options,
        ..NodeConfig::on_loopback("a", folder.to_owned())
    };
    let store = Store::open(&folder.join("store")).expect("opens");
    let features = Features::default();
    let context = Context::new(
        config,
        store,
        Dialer {
            tls: None,
            features,
        },
    );
    connect(&spec.parse().expect("a witness"), &Arc::new(context)).expect("a witness")
}

fn protection(number: u8) -> Protection {
    Protection {
        id: ProtectionId([number; 16]),
        nodes: ["a", "b"].map(str::to_owned),
    }
}

fn next(before: Grant, owner: Member, paired: bool) -> (Change, Grant) {
    let term = Term(before.term.0 + 1);
    let wanted = Grant {
        term,
        owner,
        paired,
    };
    let change = Change {
        expected: Some(before),
        wanted: Some(wanted),
    };
    (change, wanted)
}

/// Reads until the witness answers.
async fn read(witness: &dyn Witness, of: &Protection) -> Option<Grant> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match witness.grant(of).await {
            Ok(grant) => return grant,
            Err(WitnessError::Unreachable(_)) if Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Forwards connections to a port. While the switch is on, a connection with a transaction ends before the answer:
/// after the transaction at the server if `arrives`, or before.
async fn cut(to: u16, on: Arc<AtomicBool>, arrives: bool) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(forward(client, to, Arc::clone(&on), arrives));
        }
    });
    port
}

async fn forward(mut client: TcpStream, to: u16, on: Arc<AtomicBool>, arrives: bool) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await else {
        return;
    };
    let (mut asked, mut told) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(count @ 1..) = read else { return };
                let bytes = &asked[..count];
                let is_change = bytes.windows(6).any(|part| part == b"kv/txn");
                let cuts = is_change && on.load(Ordering::Relaxed);
                if cuts && !arrives {
                    return;
                }
                server.write_all(bytes).await.expect("it is there");
                if cuts {
                    let _ = server.read(&mut told).await.expect("an answer");
                    return;
                }
            }
            read = server.read(&mut told) => {
                let Ok(count @ 1..) = read else { return };
                client.write_all(&told[..count]).await.expect("it is there");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_etcd_keeps_the_grant_and_a_lost_answer_is_unknown() {
    let folder = tempfile::tempdir().expect("a folder");
    let [mut server] = start::<1>(folder.path(), "http", &[]);
    let on = Arc::new(AtomicBool::new(false));
    let arrives = cut(server.port, Arc::clone(&on), true).await;
    let lost = cut(server.port, Arc::clone(&on), false).await;
    let open = |name: &str, port| {
        let own = folder.path().join(name);
        std::fs::create_dir(&own).expect("a folder");
        witness(&own, &[port], None)
    };
    let (direct, arrives, lost) = (open("1", server.port), open("2", arrives), open("3", lost));
    let of = protection(1);
    assert_eq!(read(&*direct, &of).await, None);
    assert_eq!(direct.swap(&of, Change::BEGIN).await, Ok(Swap::Done));
    assert_eq!(
        direct.swap(&of, Change::BEGIN).await,
        Ok(Swap::Done),
        "it stands"
    );
    let (pair, paired) = next(Grant::FIRST, Member::First, true);
    assert_eq!(arrives.swap(&of, pair).await, Ok(Swap::Done));
    let (stale, _) = next(Grant::FIRST, Member::First, false);
    assert_eq!(lost.swap(&of, stale).await, Ok(Swap::Stands(Some(paired))));
    on.store(true, Ordering::Relaxed);
    let (alone, went) = next(paired, Member::First, false);
    let unknown = |it: &Result<Swap, WitnessError>| matches!(it, Err(WitnessError::Unknown(_)));
    let asked = lost.swap(&of, alone).await;
    assert!(unknown(&asked), "{asked:?}");
    assert_eq!(read(&*direct, &of).await, Some(paired), "it did not arrive");
    let asked = arrives.swap(&of, alone).await;
    assert!(unknown(&asked), "{asked:?}");
    server.kill();
    let asked = direct.swap(&of, alone).await;
    assert!(
        matches!(asked, Err(WitnessError::Unreachable(_))),
        "{asked:?}"
    );
    server.start();
    assert_eq!(read(&*direct, &of).await, Some(went), "it arrived");
    let (take, _) = next(paired, Member::Second, false);
    assert_eq!(direct.swap(&of, take).await, Ok(Swap::Stands(Some(went))));
    assert_eq!(direct.swap(&of, Change::end(went)).await, Ok(Swap::Done));
    assert_eq!(read(&*direct, &of).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_three_members_may_die() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut servers = start::<3>(folder.path(), "http", &[]);
    let ports: Vec<u16> = servers.iter().map(|server| server.port).collect();
    let witness = witness(folder.path(), &ports, None);
    let of = protection(2);
    assert_eq!(read(&*witness, &of).await, None);
    assert_eq!(witness.swap(&of, Change::BEGIN).await, Ok(Swap::Done));
    servers[0].kill();
    let (pair, paired) = next(Grant::FIRST, Member::First, true);
    assert_eq!(read(&*witness, &of).await, Some(Grant::FIRST));
    assert_eq!(witness.swap(&of, pair).await, Ok(Swap::Done));
    // Without a majority nobody answers.
    servers[1].kill();
    let begun = Instant::now();
    let asked = witness.grant(&of).await;
    assert!(
        matches!(asked, Err(WitnessError::Unreachable(_))),
        "{asked:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(11));
    servers[0].start();
    assert_eq!(read(&*witness, &of).await, Some(paired));
}

/// Calls etcd's API over TLS.
fn call(port: u16, certs: &Path, path: &str, body: &str) {
    let asked = Command::new("curl")
        .args(["-sS", "-f", "-o", "/dev/null", "--cacert", "ca.pem"])
        .args(["--cert", "etcd.pem", "--key", "etcd.key", "-d", body])
        .arg(format!("https://127.0.0.1:{port}/v3/auth/{path}"))
        .current_dir(certs)
        .status();
    assert!(asked.expect("curl runs").success(), "{path}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_and_certificates_are_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let certs = folder.path().join("certs");
    certificates::init(&certs, false).expect("an authority");
    certificates::issue(&IssueRequest {
        directory: &certs,
        name: "etcd",
        dns: &[],
        ip: &[IpAddr::V4(Ipv4Addr::LOCALHOST)],
        role: Role::Node,
        disks: &[],
        validity: Validity::Days(3),
        force: false,
    })
    .expect("a certificate");
    let file = |name: &str| certs.join(name).display().to_string();
    let (ca, cert, key) = (file("ca.pem"), file("etcd.pem"), file("etcd.key"));
    let more = [
        format!("--cert-file={cert}"),
        format!("--key-file={key}"),
        format!("--trusted-ca-file={ca}"),
        String::from("--client-cert-auth"),
    ];
    let [mut server] = start::<1>(folder.path(), "https", &more);
    let port = server.port;
    let options = |name: &str, text: String| {
        let own = folder.path().join(name);
        std::fs::create_dir(&own).expect("a folder");
        std::fs::write(own.join("etcd"), text).expect("written");
        witness(&own, &[port], Some(own.join("etcd")))
    };
    let bare = options("1", format!("# etcd\nca = {ca}\n"));
    let known = options("2", format!("ca = {ca}\n\ncert={cert}\nkey = {key}\n"));
    let right = options("3", format!("ca = {ca}\nuser=root\npassword = p=w \n"));
    let wrong = options("4", format!("ca = {ca}\nuser = root\npassword = no\n"));
    let of = protection(3);
    assert_eq!(read(&*known, &of).await, None);
    let refused = bare.grant(&of).await.expect_err("no certificate");
    assert!(matches!(refused, WitnessError::Unreachable(_)), "{refused}");
    call(
        port,
        &certs,
        "user/add",
        r#"{"name":"root","password":"p=w"}"#,
    );
    call(port, &certs, "role/add", r#"{"name":"root"}"#);
    call(
        port,
        &certs,
        "user/grant",
        r#"{"user":"root","role":"root"}"#,
    );
    call(port, &certs, "enable", "{}");
    refuses(&*known, &of, "CommonName of client").await;
    // Without a certificate of the client, and the tokens are void.
    server.kill();
    server.arguments.truncate(server.arguments.len() - 2);
    server.start();
    assert_eq!(read(&*right, &of).await, None);
    refuses(&*bare, &of, "user name is empty").await;
    refuses(&*wrong, &of, "authentication failed").await;
    assert_eq!(right.swap(&of, Change::BEGIN).await, Ok(Swap::Done));
    server.kill();
    server.start();
    assert_eq!(read(&*right, &of).await, Some(Grant::FIRST));
    let (pair, _) = next(Grant::FIRST, Member::First, true);
    assert_eq!(right.swap(&of, pair).await, Ok(Swap::Done));
}

async fn refuses(witness: &dyn Witness, of: &Protection, words: &str) {
    let refused = witness.swap(of, Change::BEGIN).await;
    assert!(
        matches!(&refused, Err(WitnessError::Unusable(why)) if why.contains(words)),
        "{refused:?}"
    );
}
