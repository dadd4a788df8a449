//! An S3 server that can be taken away and brought back.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use godwit_image::{Keys, Location, Progress, PushOptions, Repository};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

const ID: &str = "godwit";
const SECRET: &str = "secret";

/// A server with a bucket named `images`.
pub(crate) struct S3 {
    folder: PathBuf,
    address: SocketAddr,
    /// Runtime of the server; `None` while away.
    runtime: Option<Runtime>,
}

impl S3 {
    /// Starts a server with the objects in this folder.
    pub(crate) fn start(folder: &Path) -> Self {
        std::fs::create_dir_all(folder.join("images")).unwrap();
        let mut server = Self {
            folder: folder.to_owned(),
            address: "127.0.0.1:0".parse().unwrap(),
            runtime: None,
        };
        server.is_there(true);
        server
    }

    /// Takes the server away, or brings it back at the same address.
    pub(crate) fn is_there(&mut self, there: bool) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        if !there {
            return;
        }
        let runtime = Runtime::new().unwrap();
        let files = s3s_fs::FileSystem::new(&self.folder).unwrap();
        let mut service = S3ServiceBuilder::new(files);
        service.set_auth(SimpleAuth::from_single(ID, SECRET));
        let service = service.build();
        let listener = runtime.block_on(TcpListener::bind(self.address)).unwrap();
        self.address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let server = Builder::new(TokioExecutor::new());
                    // A client that hangs up is no failure.
                    let _ = server.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        self.runtime = Some(runtime);
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the options for a node to use the server.
    pub(crate) fn options(&self) -> Vec<String> {
        let mut options = ["--repository", "s3://images", "--repository-endpoint"]
            .map(str::to_owned)
            .to_vec();
        options.push(self.endpoint());
        options
    }

    /// Returns the environment of such a node.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        [
            ("AWS_ACCESS_KEY_ID", ID),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_REGION", "us-east-1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec()
    }

    /// Returns the repository for this process.
    pub(crate) fn repository(&self) -> Repository {
        let location: Location = "s3://images".parse().unwrap();
        let keys = Keys {
            id: ID.to_owned(),
            secret: SECRET.to_owned(),
        };
        Repository::open_with(&location.at(self.endpoint()).unwrap(), Some(&keys)).unwrap()
    }

    /// Pushes a raw image.
    pub(crate) fn push(&self, image: &str, path: &Path) {
        let (image, progress) = (image.parse().unwrap(), Progress::default());
        let repository = self.repository();
        let never = std::future::pending();
        let push = repository.push(&image, path, PushOptions::default(), &progress, never);
        self.runtime.as_ref().unwrap().block_on(push).unwrap();
    }

    /// Returns the disks fetching from an image, as `NODE/DISK`.
    pub(crate) fn users(&self, image: &str) -> Vec<String> {
        let image = image.parse().unwrap();
        let repository = self.repository();
        let shown = self
            .runtime
            .as_ref()
            .unwrap()
            .block_on(repository.image(&image));
        shown.unwrap().1
    }
}
