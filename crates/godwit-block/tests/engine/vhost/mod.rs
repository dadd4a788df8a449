//! A virtual machine's side of the disk, driven without a machine.

mod given_back;
mod hostile;
mod io;
mod lives;
mod migrate;
mod no_space;
mod post_copy;
mod slots;
mod written;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::Duration;

use godwit_block::engine::BlockDevice;
use godwit_core::authority::AuthorityRecord;
use godwit_testkit::vhost_client::{Client, Options};
use godwit_vhost::{VhostUserServer, serve};

use crate::support::TestEngine;

const SIZE: u64 = 16 << 20;

/// Long enough for something that must not happen to happen.
const MOMENT: Duration = Duration::from_millis(300);

/// A disk and the server of its socket.
struct Served {
    engine: TestEngine,
    server: Option<VhostUserServer>,
    path: PathBuf,
}

impl Served {
    fn new(name: &str) -> Self {
        Self::over(TestEngine::new(name, SIZE, AuthorityRecord::created()))
    }

    fn over(engine: TestEngine) -> Self {
        let path = engine.image_path().with_file_name("vhost.sock");
        let mut served = Self {
            engine,
            server: None,
            path,
        };
        served.serve();
        served
    }

    /// Starts or restarts the server.
    fn serve(&mut self) {
        self.server = None;
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).expect("a socket");
        let handle = self.engine.handle.clone();
        let server = serve(listener, BlockDevice::new(handle));
        self.server = Some(server.expect("a server"));
    }

    /// Connects a front end and starts its queues.
    fn connect(&self, options: Options) -> Client {
        let mut client = Client::connect(&self.path, options).expect("a front end");
        client.start().expect("queues");
        client
    }
}
