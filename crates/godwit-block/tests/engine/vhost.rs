//! A virtual machine's side of the disk, driven without one.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use godwit_block::vhost_user::{VhostUserServer, serve};
use godwit_core::authority::AuthorityRecord;
use godwit_testkit::vhost_client::{Client, Options, Status};

use crate::support::{Random, TestEngine};

const SIZE: u64 = 16 << 20;

/// A disk and the server of its socket.
struct Served {
    engine: TestEngine,
    _server: VhostUserServer,
    path: PathBuf,
}

fn served(name: &str) -> Served {
    let engine = TestEngine::new(name, SIZE, AuthorityRecord::created());
    serve_engine(engine, name)
}

fn serve_engine(engine: TestEngine, name: &str) -> Served {
    let path = engine.image_path().with_file_name("vhost.sock");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).expect("a socket");
    let handle = engine.handle.clone();
    let server = serve(listener, name.into(), "serial-of-disk".into(), handle).expect("a server");
    Served {
        engine,
        _server: server,
        path,
    }
}

fn connected(served: &Served, options: Options) -> Client {
    let mut client = Client::connect(&served.path, options).expect("a front end");
    client.start().expect("queues");
    client
}

#[test]
fn a_guest_reads_what_it_wrote() {
    let served = served("plain");
    for (event_index, indirect) in [(true, true), (true, false), (false, true), (false, false)] {
        let options = Options {
            event_index,
            indirect,
            ..Options::default()
        };
        let mut client = connected(&served, options);
        let mut random = Random(7 + u64::from(event_index) * 2 + u64::from(indirect));
        for length in [512, 4096, 513 * 512, 1 << 20] {
            let sector = random.below(SIZE / 512 - length as u64 / 512);
            let bytes = random.bytes(length);
            assert_eq!(client.write(0, sector, &bytes), Status::OK);
            assert_eq!(client.read(0, sector, length), Ok(bytes), "{length}");
        }
        assert_eq!(client.flush(0), Status::OK);
    }
}
