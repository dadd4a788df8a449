//! Repositories at two S3 servers.

use std::future::poll_fn;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_image::{ChunkId, Keys, Location, Progress, PushOptions, Repository, RepositoryError};
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::support::*;

fn keys(secret: &str) -> Keys {
    Keys {
        id: String::from("godwit"),
        secret: secret.to_owned(),
    }
}

fn open(place: &str, endpoint: &str, keys: &Keys) -> Repository {
    let location: Location = place.parse().expect("a location");
    let location = location.at(endpoint.to_owned()).expect("an endpoint");
    Repository::open_with(&location, Some(keys)).expect("opened")
}

fn service(folder: &std::path::Path) -> S3Service {
    std::fs::create_dir(folder.join("images")).expect("a bucket");
    let files = s3s_fs::FileSystem::new(folder).expect("a folder");
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single("godwit", "secret"));
    service.build()
}

/// Starts an S3 server in this process with a bucket named `images` in the folder; returns the endpoint.
async fn start_s3s(folder: &std::path::Path) -> String {
    let service = service(folder);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let server = Builder::new(TokioExecutor::new());
                // Clients that hang up are no failure.
                let _ = server.serve_connection(TokioIo::new(socket), service).await;
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3s_does_its_work_in_a_folder_and_without() {
    let folder = tempfile::tempdir().expect("a folder");
    let endpoint = start_s3s(folder.path()).await;
    does_its_work(&open("s3://images/some/folder", &endpoint, &keys("secret"))).await;
    does_its_work(&open("s3://images", &endpoint, &keys("secret"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_credentials_are_told_as_such() {
    let folder = tempfile::tempdir().expect("a folder");
    let endpoint = start_s3s(folder.path()).await;
    let error = open("s3://images", &endpoint, &keys("wrong"))
        .images()
        .await
        .unwrap_err();
    assert!(
        matches!(error, RepositoryError::Credentials { .. }),
        "{error:?}"
    );
    let unknown = Keys {
        id: String::from("nobody"),
        secret: String::from("secret"),
    };
    let error = open("s3://images", &endpoint, &unknown)
        .images()
        .await
        .unwrap_err();
    assert!(
        matches!(error, RepositoryError::Credentials { .. }),
        "{error:?}"
    );
    let file = folder.path().join("raw");
    raw_image(&file, 2, &[0], 0);
    let pushed = push(&open("s3://images", &endpoint, &keys("wrong")), "x", &file).await;
    assert!(
        matches!(pushed, Err(RepositoryError::Credentials { .. })),
        "{pushed:?}"
    );
}

/// Starts a server with a certificate of a private authority, both in the folder; returns the endpoint. While `busy` is
/// set, the server accepts no chunk.
async fn start_tls(folder: &std::path::Path, busy: Arc<AtomicBool>) -> String {
    let mut authority_params = CertificateParams::default();
    authority_params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority =
        CertifiedIssuer::self_signed(authority_params, KeyPair::generate().expect("a key"))
            .expect("an authority");
    let key = KeyPair::generate().expect("a key");
    let names = vec![String::from("127.0.0.1")];
    let certificate = CertificateParams::new(names).expect("a name");
    let certificate = certificate.signed_by(&key, &authority).expect("signed");
    std::fs::write(folder.join("ca.pem"), authority.pem()).expect("written");
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .expect("a certificate");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let service = service(folder);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let (service, acceptor) = (service.clone(), acceptor.clone());
            let busy = Arc::clone(&busy);
            tokio::spawn(async move {
                // A client without trust hangs up.
                let Ok(socket) = acceptor.accept(socket).await else {
                    return;
                };
                let answer = service_fn(move |request: Request<Incoming>| {
                    let (service, busy) = (service.clone(), Arc::clone(&busy));
                    async move {
                        let chunk =
                            request.method() == "PUT" && request.uri().path().contains("/chunks/");
                        if chunk && busy.load(Ordering::Relaxed) {
                            let mut body = request.into_body();
                            while poll_fn(|cx| Pin::new(&mut body).poll_frame(cx))
                                .await
                                .is_some()
                            {}
                            let text = "<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>";
                            let mut slow = Response::new(s3s::Body::from(text.to_owned()));
                            *slow.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                            return Ok(slow);
                        }
                        service.call(request.map(s3s::Body::from)).await
                    }
                });
                let server = Builder::new(TokioExecutor::new());
                let _ = server.serve_connection(TokioIo::new(socket), answer).await;
            });
        }
    });
    format!("https://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_of_ones_own_is_trusted_by_its_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let endpoint = start_tls(folder.path(), Arc::default()).await;
    let location: Location = "s3://images".parse().expect("a location");
    let location = location.at(endpoint).expect("an endpoint");
    let strange = Repository::open_with(&location, Some(&keys("secret"))).expect("opened");
    let error = strange.images().await.unwrap_err();
    assert!(
        matches!(error, RepositoryError::Untrusted { .. }),
        "{error:?}"
    );
    assert!(
        !error.is_away()
            && error
                .hint()
                .is_some_and(|hint| hint.contains("--repository-ca"))
    );
    let open = |file| {
        let location = location.clone().trusting(folder.path().join(file));
        Repository::open_with(&location.expect("a store"), Some(&keys("secret")))
    };
    does_its_work(&open("ca.pem").expect("opened")).await;
    std::fs::write(folder.path().join("empty"), "").expect("written");
    for file in ["none", "empty"] {
        let error = open(file).expect_err("refused").to_string();
        assert!(error.contains(file), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_bears_a_store_that_slows_it_down() {
    let folder = tempfile::tempdir().expect("a folder");
    let busy = Arc::new(AtomicBool::new(true));
    let endpoint = start_tls(folder.path(), Arc::clone(&busy)).await;
    let location: Location = "s3://images".parse().expect("a location");
    let location = location.at(endpoint).expect("an endpoint");
    let location = location
        .trusting(folder.path().join("ca.pem"))
        .expect("a store");
    let store = Repository::open_with(&location, Some(&keys("secret"))).expect("opened");
    let file = folder.path().join("raw");
    raw_image(&file, 40, &[0, 1, 7, 39], 1);
    let progress = Progress::default();
    let image = name("x");
    let never = std::future::pending();
    let push = store.push(&image, &file, PushOptions::default(), &progress, never);
    let told = async {
        let told = loop {
            match progress.waits() {
                Some(told) => break told,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        // Longer than the client's own retries.
        tokio::time::sleep(Duration::from_secs(2)).await;
        busy.store(false, Ordering::Relaxed);
        told
    };
    let (pushed, told) = tokio::join!(push, told);
    pushed.expect("pushed");
    assert!(told.contains("SlowDown"), "{told}");
    assert_eq!(progress.waits(), None);
    pull(&store, "x", &folder.path().join("back"))
        .await
        .expect("it is whole");
}

/// Starts a server that answers the first request for a chunk a byte at a time and later requests at once; returns the
/// endpoint.
fn start_trickling(chunk: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for (number, socket) in listener.incoming().enumerate() {
            let (mut socket, chunk) = (socket.expect("a client"), chunk.clone());
            std::thread::spawn(move || {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    socket.read_exact(&mut byte)?;
                    request.extend(byte);
                }
                write!(
                    socket,
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: \"x\"\r\nConnection: close\r\n\
                     Last-Modified: Sun, 01 Nov 2026 10:00:00 GMT\r\n\r\n",
                    chunk.len()
                )?;
                if number > 0 {
                    return socket.write_all(&chunk);
                }
                for byte in chunk.chunks(1) {
                    socket.write_all(byte)?;
                    std::thread::sleep(Duration::from_millis(200));
                }
                Ok(())
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_that_trickles_is_asked_for_once_more() {
    let chunk = vec![7; 4096];
    let id = ChunkId::of(&chunk);
    let store = open(
        "s3://images",
        &start_trickling(chunk.clone()),
        &keys("secret"),
    );
    let begun = Instant::now();
    let whole = tokio::time::timeout(Duration::from_secs(20), store.chunk(id, 4096)).await;
    let whole = whole
        .expect("a second request is quick")
        .expect("the chunk");
    assert!(whole == chunk && begun.elapsed() >= Duration::from_secs(1));
}

/// A process of Moto's server that ends with this value.
struct Moto {
    process: Child,
    endpoint: String,
}

impl Moto {
    fn start() -> Self {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port().to_string();
        drop(free);
        let program = std::env::var("GODWIT_TEST_MOTO").expect(
            "GODWIT_TEST_MOTO names moto's server: run 'make test-slow ONLY=s3', which installs it and sets this",
        );
        let process = Command::new(program)
            .args(["-H", "127.0.0.1", "-p", &port])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("moto's server starts");
        let endpoint = format!("http://127.0.0.1:{port}");
        let until = Instant::now() + Duration::from_secs(30);
        while std::net::TcpStream::connect(format!("127.0.0.1:{port}")).is_err() {
            assert!(Instant::now() < until, "moto's server does not answer");
            std::thread::sleep(Duration::from_millis(100));
        }
        Self { process, endpoint }
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs moto's server: make test-slow ONLY=s3"]
async fn moto_does_its_work() {
    let moto = Moto::start();
    let repository = open("s3://images", &moto.endpoint, &keys("secret"));
    let file = tempfile::NamedTempFile::new().expect("a file");
    raw_image(file.path(), 2, &[0], 0);
    let error = push(&repository, "x", file.path())
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("bucket does not exist"), "{error}");
    // Moto lets any client create a bucket.
    let made = Command::new("curl")
        .args(["-sS", "-f", "-o", "/dev/null", "-X", "PUT"])
        .arg(format!("{}/images", moto.endpoint))
        .status();
    assert!(made.expect("curl runs").success(), "a bucket is made");
    does_its_work(&repository).await;
}
