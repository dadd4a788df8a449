//! Failures of a repository, an image or the node's own storage: one sentence each, and nothing is damaged.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::{run, wait_for};
use godwit_testkit::scenario::{PATIENCE, says, verify};
use godwit_testkit::small_fs::SmallFileSystem;

use crate::fixture::{DISK, Fixture, MIB, SIZE, write};

#[test]
fn reads_wait_for_a_repository_that_is_away_and_what_is_here_is_served() {
    let mut fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    let mut client = fixture.connect();
    let mut here = vec![0; 64 << 10];
    client.read_at(0, &mut here).unwrap();
    // Writes of whole blocks need nothing of the image; a discarded block does not come back from the image.
    write(&mut client, &mut model, 32 * 2048, 2048);
    client.flush().unwrap();

    fixture.is_there(false);
    let mut again = vec![1; 64 << 10];
    client.read_at(0, &mut again).unwrap();
    assert!(here == again);
    let reader = std::thread::spawn({
        let mut other = fixture.connect();
        move || {
            let begun = Instant::now();
            let mut data = vec![0; 4096];
            other.read_at(50 * MIB, &mut data).unwrap();
            begun.elapsed()
        }
    });
    let trouble = fixture.trouble();
    says(&trouble, &[&fixture.repository.display().to_string()]);
    let status = fixture.disk()["status"].as_str().unwrap().to_owned();
    says(&status, &["reads of that wait:"]);
    std::thread::sleep(Duration::from_millis(500));
    assert!(!reader.is_finished());
    fixture.is_there(true);
    let waited = reader.join().unwrap();
    assert!(waited >= Duration::from_millis(500), "{waited:?}");
    let well = || fixture.disk()["image"]["trouble"].is_null().then_some(());
    assert!(wait_for(PATIENCE, well).is_some(), "{}", fixture.disk());

    fixture.is_there(false);
    fixture.a_dies();
    let mut client = fixture.connect();
    client.read_at(0, &mut again).unwrap();
    assert!(here == again);
    fixture.is_there(true);
    verify(fixture.a(), DISK, &mut model).unwrap();
}

#[test]
fn reads_fail_after_as_long_as_they_were_told_to_wait() {
    let fixture = Fixture::start(&["a"], &["--read-wait", "1s"]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    fixture.is_there(false);
    let mut client = fixture.connect();
    let begun = Instant::now();
    let failed = client.read_at(0, &mut [0; 4096]);
    assert!(failed.is_err());
    let waited = begun.elapsed();
    assert!(
        (Duration::from_secs(1)..Duration::from_secs(20)).contains(&waited),
        "{waited:?}"
    );
    fixture.is_there(true);
    let read = || {
        let mut client = NbdConnection::connect(&fixture.a().nbd(DISK)).ok()?;
        client.read_at(0, &mut [0; 4096]).ok()
    };
    assert!(wait_for(PATIENCE, read).is_some(), "{}", fixture.disk());
    verify(fixture.a(), DISK, &mut model).unwrap();
}

#[test]
fn a_damaged_chunk_is_never_shown_and_is_read_once_it_is_repaired() {
    let fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern();
    let whole: Vec<(PathBuf, Vec<u8>)> = fixture
        .chunks()
        .into_iter()
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    for (path, bytes) in &whole {
        let mut damaged = bytes.clone();
        damaged[77] ^= 1;
        fs::write(path, damaged).unwrap();
    }
    fixture.create(&[]);
    let trouble = fixture.trouble();
    says(&trouble, &["is damaged"]);
    assert_eq!(fixture.missing(), SIZE);
    for (path, bytes) in whole {
        fs::write(path, bytes).unwrap();
    }
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}

#[test]
fn one_damaged_chunk_keeps_nobody_from_the_others() {
    let fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern();
    let chunk = fixture.chunks().pop().unwrap();
    let mut damaged = fs::read(&chunk).unwrap();
    damaged[77] ^= 1;
    fs::write(&chunk, damaged).unwrap();
    fixture.create(&[]);
    // Each part has a waiting reader, the damaged one too.
    let mut readers = Vec::new();
    for at in (0..SIZE).step_by(4 << 20) {
        let mut client = fixture.connect();
        readers.push(std::thread::spawn(move || {
            client.read_at(at, &mut vec![0; 4 << 20]).unwrap();
        }));
    }
    let most = || Some(fixture.missing()).filter(|left| *left == 256 * 1024);
    assert!(wait_for(PATIENCE, most).is_some(), "{}", fixture.disk());
    let trouble = fixture.disk()["image"]["trouble"].clone();
    assert!(
        trouble.as_str().unwrap().contains("is damaged"),
        "{trouble}"
    );
    let path = fixture.cluster.dir().join("pattern");
    let again = ["push", "base", path.to_str().unwrap(), "--replace"];
    fixture.image(&again).unwrap();
    assert_eq!(fixture.missing(), 256 * 1024, "its length is right");
    fixture.image(&[&again[..], &["--check"]].concat()).unwrap();
    fixture.becomes_whole();
    for reader in readers {
        reader.join().unwrap();
    }
    verify(fixture.a(), DISK, &mut model).unwrap();
}

#[test]
fn what_the_image_consists_of_is_read_again_from_the_repository() {
    let mut fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    let kept = fixture.a().spec().dir.join("images/manifests");
    let kept = fs::read_dir(kept).unwrap().next().unwrap().unwrap().path();
    fixture.is_there(false);
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    fs::write(kept, b"damaged").unwrap();
    a.start(&[]).unwrap();
    let trouble = fixture.trouble();
    says(&trouble, &["what image 'base' consists of"]);
    fixture.is_there(true);
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}

#[test]
fn a_full_host_lets_reads_wait_and_what_was_fetched_stays_right() {
    let small = SmallFileSystem::new(2 * SIZE).unwrap();
    let records = small.path().join("a");
    fs::create_dir(&records).unwrap();
    let options = ["--read-wait", "4s"];
    let fixture = Fixture::start_in(&["a"], &options, Some(records));
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    let mut client = fixture.connect();
    let mut here = vec![0; 64 << 10];
    client.read_at(0, &mut here).unwrap();
    let filler = small.fill().unwrap();
    let begun = Instant::now();
    let failed = client.read_at(SIZE / 2, &mut vec![0; MIB as usize]);
    println!("{failed:?} after {:?}", begun.elapsed());
    assert!(failed.is_err() && begun.elapsed() >= Duration::from_secs(4));
    let mut client = fixture.connect();
    let mut again = vec![1; 64 << 10];
    client.read_at(0, &mut again).unwrap();
    assert!(here == again);
    fs::remove_file(filler).unwrap();
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}

#[test]
fn what_cannot_be_created_leaves_nothing_behind() {
    let fixture = Fixture::start(&["a"], &[]);
    fixture.push_pattern();
    let refused = |words: &[&str]| {
        let words = [&["disk", "create", DISK], words].concat();
        fixture.a().godwit(&words).text().unwrap_err().to_string()
    };
    let text = refused(&["--image", "other"]);
    says(&text, &["there is no image 'other'"]);
    let text = refused(&["--image", "../x"]);
    says(&text, &["is no image's name"]);
    let text = refused(&["--image", "base", "--size", "1M"]);
    says(&text, &["image 'base' has 64 MiB"]);
    fixture.is_there(false);
    let text = refused(&["--image", "base"]);
    says(&text, &["repository"]);
    fixture.is_there(true);
    assert!(fixture.a().disk(DISK).is_err());
    fixture.is_needed_no_more();
}

/// Starts a false store: a server that takes connections and answers every request with `answer`, or not at all.
fn odd_store(answer: Option<&'static str>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            std::thread::spawn(move || {
                let mut connection = connection.unwrap();
                let mut asked = [0; 8192];
                // The node hangs up when it has had enough.
                while connection.read(&mut asked).is_ok_and(|bytes| bytes > 0) {
                    if let Some(answer) = answer {
                        let _ = connection.write_all(answer.as_bytes());
                    }
                }
            });
        }
    });
    format!("http://{address}")
}

/// Creates a disk from a good repository and reads it while the node uses a false one. Returns the node's message, and
/// verifies the disk once the good one is back.
fn is_told_of(store: Option<&'static str>) -> String {
    let mut fixture = Fixture::start(&["a"], &["--read-wait", "5s"]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    let mut here = vec![0; 64 << 10];
    fixture.connect().read_at(0, &mut here).unwrap();
    let good = fixture.a().spec().options.clone();
    let endpoint = odd_store(store);
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    let spec = a.spec_mut();
    spec.options = ["--repository", "s3://images", "--repository-endpoint"]
        .map(str::to_owned)
        .to_vec();
    spec.options.push(endpoint);
    spec.options
        .extend(["--read-wait", "5s"].map(str::to_owned));
    let secret = "no-such-secret";
    spec.environment = [
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "none"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    a.start(&[]).unwrap();
    // Present parts are served; a missing part makes the reader wait as long as configured, and fail.
    let mut again = vec![1; 64 << 10];
    fixture.connect().read_at(0, &mut again).unwrap();
    assert!(here == again);
    let mut client = fixture.connect();
    let begun = Instant::now();
    assert!(client.read_at(SIZE / 2, &mut [0; 4096]).is_err());
    assert!(begun.elapsed() >= Duration::from_secs(5));
    let told = fixture.trouble();
    assert!(!told.contains(secret) && !told.contains('\n'), "{told}");
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    a.spec_mut().options = good;
    a.start(&[]).unwrap();
    verify(fixture.a(), DISK, &mut model).unwrap();
    told
}

#[test]
fn credentials_that_are_refused_are_told_of() {
    let refused = "HTTP/1.1 403 Forbidden\r\nContent-Length: 66\r\n\r\n\
         <Error><Code>InvalidAccessKeyId</Code><Message>x</Message></Error>";
    let told = is_told_of(Some(refused));
    says(&told, &["refuses the credentials"]);
}

#[test]
fn a_repository_that_is_slow_is_told_of() {
    let told = is_told_of(None);
    assert!(
        told.contains("s3://images") && (told.contains("is slow") || told.contains("not answer")),
        "{told}"
    );
}

#[test]
fn an_image_whose_manifest_is_missing_makes_no_disk_and_takes_nothing_from_others() {
    let fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create(&["--prefetch", "off"]);
    let manifests = fixture.repository.join("manifests");
    let manifest = fs::read_dir(&manifests).unwrap().next().unwrap().unwrap();
    fs::remove_file(manifest.path()).unwrap();
    let text = fixture
        .a()
        .refusal(&["disk", "create", "other", "--image", "base"]);
    says(&text, &["is missing in the repository"]);
    assert!(fixture.a().disk("other").is_err());
    // The node has kept the manifest of the disk's image.
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}

/// Returns a qcow2 image of a MiB with this backing file.
fn header_that_names(backing: &Path, at: &Path) -> Vec<u8> {
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
    run(make.arg(backing).arg(at).arg("1M")).unwrap();
    fs::read(at).unwrap()
}

#[test]
fn a_guest_does_not_choose_what_a_push_reads() {
    let fixture = Fixture::start(&["a"], &[]);
    let path = |name: &str| fixture.cluster.dir().join(name).display().to_string();
    let (secret, evil, exported, back) =
        (path("secret"), path("evil"), path("exported"), path("back"));
    fs::write(&secret, [b'S'; 65536]).unwrap();
    let mut header = header_that_names(Path::new(&secret), Path::new(&evil));
    header.resize(header.len().next_multiple_of(512), 0);
    let a = fixture.a();
    a.create_disk(DISK, "1M");
    let mut guest = fixture.connect();
    guest.write_at(0, &header).unwrap();
    guest.flush().unwrap();
    drop(guest);
    let export = || a.godwit(&["disk", "export", DISK, &exported]).text().ok();
    wait_for(PATIENCE, export).expect("no client uses it any more");
    let refused = |words: &[&str], why: &[&str]| {
        let said = fixture.image(words).unwrap_err().to_string();
        assert!(why.iter().all(|part| said.contains(part)), "{said}");
    };
    refused(
        &["push", "x", &exported],
        &["qcow2", "--format raw", "--format qcow2"],
    );
    for file in [&exported, &evil] {
        let words = ["push", "x", file, "--format", "qcow2"];
        refused(
            &words,
            &["has a backing file", "--format raw", "qemu-img convert"],
        );
    }
    // The content is exactly the guest's.
    fixture
        .image(&["push", "x", &exported, "--format", "raw"])
        .unwrap();
    fixture.image(&["pull", "x", &back]).unwrap();
    let (exported, back) = (fs::read(exported).unwrap(), fs::read(back).unwrap());
    assert!(exported.starts_with(&header) && exported == back);
}
