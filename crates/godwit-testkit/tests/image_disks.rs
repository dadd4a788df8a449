//! Disks that are created from images: usable at once, fetched as they are read, whoever dies meanwhile and whether
//! or not the repository is there.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use godwit_testkit::client::{Initial, Model};
use godwit_testkit::cluster::{ClusterOptions, Failure};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, finish, load, migrate, verify};
use godwit_testkit::small_fs::SmallFileSystem;
use godwit_testkit::vm::{GuestLoad, NodeGuest, check_disk, format_image};
use godwit_testkit::{Cluster, Node};
use serde_json::Value;

const DISK: &str = "d";
const SIZE: u64 = 64 << 20;
const MIB: u64 = 1 << 20;

/// Nodes, and a repository in a directory that they share.
struct Fixture {
    cluster: Cluster,
    repository: PathBuf,
}

impl Fixture {
    fn start(names: &[&str], options: &[&str]) -> Self {
        Self::start_in(names, options, None)
    }

    /// The same with node a's files in this folder.
    fn start_in(names: &[&str], options: &[&str], folder: Option<PathBuf>) -> Self {
        let mut cluster = Cluster::prepare(names, ClusterOptions::secure().unwrap()).unwrap();
        let repository = cluster.dir().join("repository");
        fs::create_dir(&repository).unwrap();
        for name in names {
            let words = &mut cluster.node_mut(name).spec_mut().options;
            words.extend(["--repository".to_owned(), repository.display().to_string()]);
            words.extend(options.iter().map(|word| (*word).to_owned()));
        }
        if let Some(folder) = folder {
            cluster.node_mut("a").spec_mut().dir = folder;
        }
        cluster.start_all().unwrap();
        Self {
            cluster,
            repository,
        }
    }

    fn a(&self) -> &Node {
        self.cluster.node("a")
    }

    /// `godwit image …` with the repository.
    fn image(&self, words: &[&str]) -> Result<String, Failure> {
        let repository = self.repository.display().to_string();
        let words = [&["image", "--repository", &repository], words].concat();
        self.a().godwit(&words).text()
    }

    /// Pushes an image with the pattern of this seed in every sector.
    fn push_pattern(&self, seed: u64) -> Model {
        let model = Model::new(seed, SIZE, Initial::Pattern);
        let path = self.cluster.dir().join("pattern");
        model.write_image(&path).unwrap();
        self.image(&["push", "base", path.to_str().unwrap()])
            .unwrap();
        model
    }

    /// The files of the chunks that are in the repository.
    fn chunks(&self) -> Vec<PathBuf> {
        fs::read_dir(self.repository.join("chunks"))
            .unwrap()
            .flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap())
            .map(|entry| entry.unwrap().path())
            .collect()
    }

    fn create(&self, words: &[&str]) -> Value {
        let words = [&["disk", "create", DISK, "--image", "base"], words].concat();
        self.a().godwit(&words).json().unwrap()
    }

    /// Takes the repository away, or brings it back.
    fn is_there(&self, there: bool) {
        let away = self.repository.with_extension("away");
        let (from, to) = match there {
            true => (&away, &self.repository),
            false => (&self.repository, &away),
        };
        fs::rename(from, to).unwrap();
    }

    fn disk(&self) -> Value {
        self.a().disk(DISK).unwrap()
    }

    fn missing(&self) -> u64 {
        self.disk()["missing_bytes"].as_u64().unwrap_or(0)
    }

    fn becomes_whole(&self) {
        let whole = || {
            let disk = self.a().disk(DISK).ok()?;
            (disk["image"]["fetching"] == false).then_some(())
        };
        assert!(wait_for(PATIENCE, whole).is_some(), "{}", self.disk());
    }

    fn connect(&self) -> NbdConnection {
        NbdConnection::connect(&self.a().nbd(DISK)).unwrap()
    }
}

#[test]
fn a_disk_is_an_image_at_once_and_fetches_what_is_read() {
    let turn = Scenario::begin("image_disks", "a_disk_is_an_image_at_once");
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    let made = fixture.create(&["--prefetch", "off"]);
    assert_eq!(made["missing_bytes"], SIZE, "{made}");
    assert_eq!(
        (&made["serves"], &made["state"]),
        (&true.into(), &"serving".into())
    );
    let status = made["status"].as_str().unwrap();
    assert!(
        status.contains("64 MiB of it still in image 'base'"),
        "{status}"
    );

    let mut client = fixture.connect();
    let mut sector = [0; 512];
    client.read_at(20 * MIB, &mut sector).unwrap();
    let read = wait_for(PATIENCE, || {
        Some(fixture.missing()).filter(|left| *left < SIZE)
    });
    let read = read.unwrap();
    assert!(read >= SIZE - 256 * 1024, "{read} bytes are missing");
    drop(client);
    let stored = fixture.disk()["allocated_bytes"].as_u64().unwrap();
    assert!(stored <= MIB, "{stored} bytes are stored");

    // As long as something is missing the disk stays, and so does the image.
    let text = fixture.image(&["rm", "base"]).unwrap_err().to_string();
    assert!(
        text.contains("image 'base' is in use: disk a/d still fetches from it"),
        "{text}"
    );
    let text = migrate(fixture.a(), DISK, "b", &["--verify"])
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("cannot be moved like that: a part of it is still in image 'base'"),
        "{text}"
    );

    // To read all of it is to have all of it.
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
    let released = || fixture.image(&["rm", "base"]).ok();
    assert!(wait_for(PATIENCE, released).is_some());
    let moved = migrate(fixture.a(), DISK, "b", &["--verify"]).unwrap();
    assert_eq!(moved["verified"], true, "{moved}");
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn what_is_written_and_fetched_stays_whoever_dies_and_wherever_the_repository_is() {
    let turn = Scenario::begin("image_disks", "what_is_written_and_fetched_stays");
    let mut fixture = Fixture::start(&["a"], &[]);
    // Without a pause all of it would be there before anything can happen.
    let slow = ("image::chunk", "sleep(15)");
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    a.start(&[slow]).unwrap();
    let model = fixture.push_pattern(turn.seed);
    fixture.create(&[]);
    let mut model = Some(model);
    let mut kills = 0;
    while fixture.disk()["image"]["fetching"] == true {
        let client = load(fixture.a(), DISK, turn.seed, model.take().unwrap()).unwrap();
        assert!(client.progress(100, PATIENCE), "{:?}", client.stats());
        if kills < 3 {
            // The clients' requests without an answer may have happened or not.
            fixture.cluster.node_mut("a").kill();
            let lost = client.stop(PATIENCE).clean().unwrap();
            fixture.cluster.node_mut("a").start(&[slow]).unwrap();
            model = Some(lost);
            kills += 1;
        } else {
            fixture.becomes_whole();
            assert!(client.progress(100, PATIENCE), "{:?}", client.stats());
            model = Some(finish(client).unwrap());
        }
    }
    assert!(kills > 0, "it was whole too soon");
    fixture.is_there(false);
    verify(fixture.a(), DISK, &mut model.unwrap()).unwrap();
}

#[test]
fn reads_wait_for_a_repository_that_is_away_and_what_is_here_is_served() {
    let turn = Scenario::begin("image_disks", "reads_wait_for_a_repository_that_is_away");
    let mut fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    let mut client = fixture.connect();
    let mut here = vec![0; 64 << 10];
    client.read_at(0, &mut here).unwrap();
    // Whole blocks need nothing of the image; what was discarded does not come back from it.
    let ticket = model.begin_write(32 * 2048..33 * 2048, true);
    client.write_at(32 * MIB, &vec![0; MIB as usize]).unwrap();
    client.flush().unwrap();
    model.end_write(&ticket);

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
    let told = wait_for(PATIENCE, || {
        let disk = fixture.disk();
        let trouble = disk["image"]["trouble"].as_str()?;
        Some((trouble.to_owned(), disk["status"].as_str()?.to_owned()))
    });
    let (trouble, status) = told.unwrap();
    assert!(
        trouble.contains(&fixture.repository.display().to_string()),
        "{trouble}"
    );
    assert!(status.contains("reads of that wait:"), "{status}");
    std::thread::sleep(Duration::from_millis(500));
    assert!(!reader.is_finished());
    fixture.is_there(true);
    let waited = reader.join().unwrap();
    assert!(waited >= Duration::from_millis(500), "{waited:?}");
    let well = || fixture.disk()["image"]["trouble"].is_null().then_some(());
    assert!(wait_for(PATIENCE, well).is_some(), "{}", fixture.disk());

    fixture.is_there(false);
    let a = fixture.cluster.node_mut("a");
    a.kill();
    a.start(&[]).unwrap();
    let mut client = fixture.connect();
    client.read_at(0, &mut again).unwrap();
    assert!(here == again);
    fixture.is_there(true);
    verify(fixture.a(), DISK, &mut model).unwrap();
}

#[test]
fn reads_fail_after_as_long_as_they_were_told_to_wait() {
    let turn = Scenario::begin("image_disks", "reads_fail_after_as_long");
    let fixture = Fixture::start(&["a"], &["--read-wait", "1s"]);
    let mut model = fixture.push_pattern(turn.seed);
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
    let turn = Scenario::begin("image_disks", "a_damaged_chunk_is_never_shown");
    let fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
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
    let told = wait_for(PATIENCE, || {
        let disk = fixture.disk();
        Some(disk["image"]["trouble"].as_str()?.to_owned())
    });
    let trouble = told.unwrap();
    assert!(trouble.contains("is damaged"), "{trouble}");
    assert_eq!(fixture.missing(), SIZE);
    for (path, bytes) in whole {
        fs::write(path, bytes).unwrap();
    }
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}

#[test]
fn one_damaged_chunk_keeps_nobody_from_the_others() {
    let turn = Scenario::begin("image_disks", "one_damaged_chunk_keeps_nobody");
    let fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    let chunk = fixture.chunks().pop().unwrap();
    let mut damaged = fs::read(&chunk).unwrap();
    damaged[77] ^= 1;
    fs::write(&chunk, damaged).unwrap();
    fixture.create(&[]);
    // Somebody waits for every part, the damaged one too.
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
    let turn = Scenario::begin("image_disks", "what_the_image_consists_of_is_read_again");
    let mut fixture = Fixture::start(&["a"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    let kept = fixture.a().spec().dir.join("images/manifests");
    let kept = fs::read_dir(kept).unwrap().next().unwrap().unwrap().path();
    fixture.is_there(false);
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    fs::write(kept, b"damaged").unwrap();
    a.start(&[]).unwrap();
    let told = wait_for(PATIENCE, || {
        let disk = fixture.disk();
        Some(disk["image"]["trouble"].as_str()?.to_owned())
    });
    let trouble = told.unwrap();
    assert!(
        trouble.contains("what image 'base' consists of"),
        "{trouble}"
    );
    fixture.is_there(true);
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
}

#[test]
fn a_full_host_lets_reads_wait_and_what_was_fetched_stays_right() {
    let turn = Scenario::begin("image_disks", "a_full_host_lets_reads_wait");
    let small = SmallFileSystem::new(2 * SIZE).unwrap();
    let records = small.path().join("a");
    fs::create_dir(&records).unwrap();
    let options = ["--read-wait", "4s"];
    let fixture = Fixture::start_in(&["a"], &options, Some(records));
    let mut model = fixture.push_pattern(turn.seed);
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
fn a_disk_moves_without_its_image_and_only_what_was_written_is_sent() {
    let turn = Scenario::begin("image_disks", "a_disk_moves_without_its_image");
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    // Whole blocks and parts of blocks, what was fetched and what was not.
    let mut client = fixture.connect();
    client
        .read_at(10 * MIB, &mut vec![0; 4 * MIB as usize])
        .unwrap();
    let mut written = 0;
    let mut write = |client: &mut NbdConnection, model: &mut Model, start: u64, sectors: u64| {
        let ticket = model.begin_write(start..start + sectors, true);
        client
            .write_at(start * 512, &vec![0; sectors as usize * 512])
            .unwrap();
        model.end_write(&ticket);
        written += sectors * 512;
        written
    };
    write(&mut client, &mut model, 11 * 2048, 2048);
    write(&mut client, &mut model, 12 * 2048 + 3, 1);
    write(&mut client, &mut model, 40 * 2048, 4096);
    write(&mut client, &mut model, 50 * 2048 + 5, 7);
    client.flush().unwrap();
    drop(client);
    let sent = |moved: &Value| {
        let bytes = |what: &str| moved["progress"][what].as_u64().unwrap();
        bytes("bytes_copied").max(bytes("bytes_sent")) + bytes("double_write_bytes")
    };
    let there_and_back = [("a", "b", 40), ("b", "a", 0)];
    for (from, to, more) in there_and_back {
        let source = fixture.cluster.node(from);
        let mut client = NbdConnection::connect(&source.nbd(DISK)).unwrap();
        let written = write(&mut client, &mut model, 60 * 2048 + more, 8);
        drop(client);
        let moved = migrate(source, DISK, to, &[]).unwrap();
        let sent = sent(&moved);
        println!("{from} to {to}: {written} bytes were written and {sent} sent");
        assert_eq!(moved["phase"], "completed", "{moved}");
        assert_eq!(moved["options"]["policy"], "pre-copy", "{moved}");
        assert!(sent <= written + 64 * 1024, "{sent} bytes were sent");
        let here = fixture.cluster.node(to).disk(DISK).unwrap();
        assert_eq!(here["image"]["fetching"], true, "{here}");
        assert!(here["missing_bytes"].as_u64().unwrap() > SIZE / 2, "{here}");
        // The source is not needed, and holds nothing back.
        assert_eq!(source.disk(DISK).unwrap()["owes"], false);
    }
    // It moves on and all of it is right, also when nodes die.
    let moved = migrate(fixture.a(), DISK, "b", &[]).unwrap();
    assert_eq!(moved["phase"], "completed", "{moved}");
    fixture.cluster.node_mut("a").kill();
    let b = fixture.cluster.node_mut("b");
    b.kill();
    b.start(&[]).unwrap();
    let in_use = fixture.cluster.node("b").godwit(&[
        "image",
        "--repository",
        &fixture.repository.display().to_string(),
        "show",
        "base",
    ]);
    let in_use = in_use.text().unwrap();
    assert!(in_use.contains("b/d"), "{in_use}");
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn a_whole_disk_moves_as_a_whole_when_it_is_asked_to_or_its_image_is_gone() {
    let turn = Scenario::begin("image_disks", "a_whole_disk_moves_as_a_whole");
    let fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&[]);
    fixture.becomes_whole();
    let moves = |from: &str, to: &str, words: &[&str]| {
        let moved = migrate(fixture.cluster.node(from), DISK, to, words).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        let here = fixture.cluster.node(to).disk(DISK).unwrap();
        assert_eq!(here["missing_bytes"], Value::Null, "{here}");
        moved["progress"]["bytes_copied"].as_u64().unwrap()
    };
    let all = moves("a", "b", &["--no-delta"]);
    assert!(all > SIZE / 2, "{all} bytes were copied");
    fixture.image(&["rm", "base"]).unwrap();
    fixture.image(&["gc"]).unwrap();
    assert!(fixture.chunks().is_empty());
    moves("b", "a", &[]);
    verify(fixture.a(), DISK, &mut model).unwrap();
}

#[test]
fn a_disk_on_an_image_moves_under_load_while_it_is_fetched() {
    let turn = Scenario::begin("image_disks", "a_disk_on_an_image_moves_under_load");
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    for name in ["a", "b"] {
        let node = fixture.cluster.node_mut(name);
        node.terminate(PATIENCE).unwrap();
        node.start(&[("image::chunk", "sleep(15)")]).unwrap();
    }
    let model = fixture.push_pattern(turn.seed);
    fixture.create(&[]);
    let client = load(fixture.a(), DISK, turn.seed, model).unwrap();
    assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        let (source, here) = (fixture.cluster.node(from), fixture.cluster.node(to));
        let moved = migrate(source, DISK, to, &[]).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        let missing = here.disk(DISK).unwrap()["missing_bytes"].clone();
        println!(
            "{from} to {to}: {missing} bytes are missing, {}",
            moved["progress"]
        );
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    }
    let whole = || {
        let disk = fixture.cluster.node("b").disk(DISK).ok()?;
        (disk["image"]["fetching"] == false).then_some(())
    };
    assert!(wait_for(PATIENCE, whole).is_some());
    let mut model = finish(client).unwrap();
    fixture.is_there(false);
    verify(fixture.cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn what_cannot_be_created_leaves_nothing_behind() {
    let turn = Scenario::begin("image_disks", "what_cannot_be_created_leaves_nothing");
    let fixture = Fixture::start(&["a"], &[]);
    fixture.push_pattern(turn.seed);
    let refused = |words: &[&str]| {
        let words = [&["disk", "create", DISK], words].concat();
        fixture.a().godwit(&words).text().unwrap_err().to_string()
    };
    let text = refused(&["--image", "other"]);
    assert!(text.contains("there is no image 'other'"), "{text}");
    let text = refused(&["--image", "../x"]);
    assert!(text.contains("is no image's name"), "{text}");
    let text = refused(&["--image", "base", "--size", "1M"]);
    assert!(text.contains("image 'base' has 64 MiB"), "{text}");
    fixture.is_there(false);
    let text = refused(&["--image", "base"]);
    assert!(text.contains("repository"), "{text}");
    fixture.is_there(true);
    assert!(fixture.a().disk(DISK).is_err());
    let unused = || fixture.image(&["rm", "base"]).ok();
    assert!(wait_for(PATIENCE, unused).is_some());
}

#[test]
fn a_machine_starts_from_an_image_before_a_tenth_of_it_was_fetched() {
    let turn = Scenario::begin("image_disks", "a_machine_starts_from_an_image");
    let fixture = Fixture::start(&["a"], &[]);
    let size = 256 * MIB;
    let path = fixture.cluster.dir().join("guest");
    // What the file system does not use is data, too, that would have to be fetched.
    godwit_testkit::image::write_random(&path, size, turn.seed).unwrap();
    format_image(&path).unwrap();
    fixture
        .image(&["push", "base", path.to_str().unwrap()])
        .unwrap();
    let made = fixture.create(&["--prefetch", "off"]);
    // What mke2fs wrote zeroes to is no data.
    let data = made["missing_bytes"].as_u64().unwrap();
    assert!(data > size / 10 * 8, "{made}");
    let load = GuestLoad {
        seed: turn.seed,
        file_mb: 8,
        ..GuestLoad::default()
    };
    let guest =
        NodeGuest::boot(&fixture.cluster, fixture.a(), vec![DISK.to_owned()], &load).unwrap();
    let missing = fixture.missing();
    let fetched = data - missing;
    println!("the guest works, and {fetched} of {data} bytes were fetched or written");
    assert!(fetched < data / 10, "{fetched} of {data} bytes");
    let finished = guest.end(fixture.a()).unwrap();
    assert_eq!((finished.errors, finished.mismatches), (0, 0));
    // What the guest left there and the rest of the image fit together.
    let copy = fixture.cluster.dir().join("copy");
    let uri = fixture.a().nbd(DISK).uri();
    let mut whole = std::process::Command::new("qemu-img");
    godwit_testkit::process::run(
        whole
            .args(["convert", "-f", "raw", "-O", "raw", &uri])
            .arg(&copy),
    )
    .unwrap();
    check_disk(&copy).unwrap();
    fixture.becomes_whole();
}
