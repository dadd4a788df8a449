//! The verifying client against correct servers, and against planted faults, each of which must be found.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use godwit_testkit::client::{End, Initial, RawImage};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::{Process, scratch_dir, wait_for_listener};
use godwit_testkit::{Model, NbdTarget, SECTOR, VerifyingClient, Workload};

const SIZE: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// `nbdkit file` on a fresh image with the pattern of version 0.
struct Server {
    process: Process,
    target: NbdTarget,
    image: std::path::PathBuf,
    _dir: tempfile::TempDir,
}

fn serve(model: &Model) -> Server {
    let dir = scratch_dir().unwrap();
    let (socket, image) = (dir.path().join("s"), dir.path().join("image"));
    model.write_image(&image).unwrap();
    let process = nbdkit(&socket, &image);
    Server {
        process,
        target: NbdTarget::unix(socket, ""),
        image,
        _dir: dir,
    }
}

fn nbdkit(socket: &Path, image: &Path) -> Process {
    let mut command = Command::new("nbdkit");
    // Requests in sequence: a read of the page cache during a write may return one part of a sector from before the
    // write and the rest from after it. No disk does so, and the client rightly reports an error.
    command
        .args(["-f", "--filter", "noparallel", "-U"])
        .arg(socket)
        .arg("file")
        .arg(image);
    let process = Process::spawn(&mut command).unwrap();
    assert!(wait_for_listener(socket, PATIENCE));
    process
}

fn run_load(server: &Server, model: Model, requests: u64) -> Model {
    let workload = Workload::new(7).rate(None);
    let client = VerifyingClient::start(&server.target, &workload, model).unwrap();
    assert!(client.progress(requests, PATIENCE));
    assert!(client.pause(PATIENCE));
    let before = client.stats();
    assert!(before.reads > 0 && before.writes > 0);
    client.resume();
    assert!(client.progress(10, PATIENCE));
    let outcome = client.stop(PATIENCE);
    assert_eq!(outcome.end, End::Stopped);
    outcome.clean().unwrap()
}

#[test]
fn a_right_server_passes_and_planted_faults_are_found() {
    let model = Model::new(11, SIZE, Initial::Pattern);
    let server = serve(&model);
    let mut model = run_load(&server, model, 3000);
    let mut connection = NbdConnection::connect(&server.target).unwrap();
    let verified = model.verify_all(&mut connection).unwrap();
    assert_eq!(verified.sectors, SIZE / SECTOR as u64);
    assert!(verified.written > 1000);
    connection.flush().unwrap();
    let mut raw = RawImage::open(&server.image).unwrap();
    model.verify_all(&mut raw).unwrap();

    let file = File::options()
        .read(true)
        .write(true)
        .open(&server.image)
        .unwrap();
    let at = SIZE / 2 + 77;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let found = model.verify_all(&mut connection).unwrap_err();
    assert!(
        found.contains(&format!("sector {}", at / SECTOR as u64)),
        "{found}"
    );
    file.write_all_at(&byte, at).unwrap();
    model.verify_all(&mut connection).unwrap();
}

#[test]
fn a_reverted_acknowledged_write_is_found() {
    let model = Model::new(12, SIZE, Initial::Pattern);
    let server = serve(&model);
    let before = server.image.with_extension("before");
    let mut model = run_load(&server, model, 500);
    std::fs::copy(&server.image, &before).unwrap();
    model = run_load(&server, model, 500);
    model
        .verify_all(&mut RawImage::open(&server.image).unwrap())
        .unwrap();

    // The first sector changed by the later load gets the old content back.
    let (old, new) = (
        std::fs::read(&before).unwrap(),
        std::fs::read(&server.image).unwrap(),
    );
    let changed = (0..SIZE as usize)
        .step_by(SECTOR)
        .find(|&at| old[at..at + SECTOR] != new[at..at + SECTOR])
        .unwrap();
    let file = File::options().write(true).open(&server.image).unwrap();
    file.write_all_at(&old[changed..changed + SECTOR], changed as u64)
        .unwrap();
    let found = model
        .verify_all(&mut RawImage::open(&server.image).unwrap())
        .unwrap_err();
    assert!(
        found.contains(&format!("sector {}", changed / SECTOR)),
        "{found}"
    );
}

#[test]
fn a_killed_server_leaves_a_model_that_the_restarted_one_satisfies() {
    let model = Model::new(13, SIZE, Initial::Pattern);
    let mut server = serve(&model);
    let workload = Workload::new(8).rate(None).depth(32);
    let client = VerifyingClient::start(&server.target, &workload, model).unwrap();
    assert!(client.progress(500, PATIENCE));
    server.process.kill();
    assert!(client.wait_disconnected(PATIENCE));
    let outcome = client.stop(PATIENCE);
    assert!(matches!(outcome.end, End::Disconnected(_)));
    let mut model = outcome.clean().unwrap();

    let NbdTarget::Unix { socket, .. } = &server.target else {
        unreachable!()
    };
    std::fs::remove_file(socket).unwrap();
    server.process = nbdkit(socket, &server.image);
    model
        .verify_all(&mut NbdConnection::connect(&server.target).unwrap())
        .unwrap();
    let mut model = run_load(&server, model, 500);
    model
        .verify_all(&mut NbdConnection::connect(&server.target).unwrap())
        .unwrap();
}

#[test]
fn a_server_that_loses_one_write_is_found_while_the_load_runs() {
    let dir = scratch_dir().unwrap();
    let socket = dir.path().join("s");
    let mut command = Command::new("nbdkit");
    // Every write to the first hot spot is acknowledged and dropped.
    command.args(["-f", "-U"]).arg(&socket).args([
        "eval",
        "get_size=echo 67108864",
        "pread=dd if=/dev/zero count=$3 iflag=count_bytes status=none",
        "pwrite=cat >/dev/null",
        "flush=true",
    ]);
    let _server = Process::spawn(&mut command).unwrap();
    assert!(wait_for_listener(&socket, PATIENCE));
    let workload = Workload {
        zeroes: false,
        ..Workload::new(9)
    };
    let model = Model::new(14, SIZE, Initial::Zero);
    let client = VerifyingClient::start(&NbdTarget::unix(socket, ""), &workload, model).unwrap();
    assert!(client.progress(300, PATIENCE));
    let outcome = client.stop(PATIENCE);
    assert!(outcome.stats.violations > 0);
    assert!(outcome.clean().unwrap_err().contains("may hold only"));
}
