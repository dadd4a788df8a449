//! The same at two S3 servers.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use godwit_image::{Keys, Location, Repository, RepositoryError};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;

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

/// An S3 server in this process that keeps a bucket named `images` in the folder; where it answers.
async fn start_s3s(folder: &std::path::Path) -> String {
    std::fs::create_dir(folder.join("images")).expect("a bucket");
    let files = s3s_fs::FileSystem::new(folder).expect("a folder");
    let mut service = S3ServiceBuilder::new(files);
    service.set_auth(SimpleAuth::from_single("godwit", "secret"));
    let service = service.build();
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

/// Moto's server in a process of its own, which ends with this.
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
            "GODWIT_TEST_MOTO names moto's server: run 'make test-s3', which installs it and sets this",
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
#[ignore = "needs moto's server: make test-s3"]
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
    // Moto lets anybody make a bucket.
    let made = Command::new("curl")
        .args(["-sS", "-f", "-o", "/dev/null", "-X", "PUT"])
        .arg(format!("{}/images", moto.endpoint))
        .status();
    assert!(made.expect("curl runs").success(), "a bucket is made");
    does_its_work(&repository).await;
}
