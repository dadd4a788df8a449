//! `kill -9` of the source or the destination in every phase of a migration, under a self-checking load: after a
//! restart exactly one node serves, and every acknowledged write is there.
//!
//! A fail point holds the migration in its phase for a few seconds. The killed node is started again without the fail
//! point; the other node goes on by itself.

use std::time::Duration;

use godwit_testkit::client::Initial;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, ends_well, finish, import_pattern, load, migration, moves, one_owner,
    other, start_migration, verify,
};
use godwit_testkit::{Cluster, Model, VerifyingClient};

const DISK: &str = "crash";
const SIZE: u64 = 64 << 20;
/// Long enough to notice the phase and to kill, short enough to go on without help.
const HOLD: &str = "sleep(5000)";
/// Time after which the held node is surely inside the fail point, once the sign was seen.
const SETTLE: Duration = Duration::from_millis(500);

/// A moment at which a node dies.
struct Moment {
    phase: &'static str,
    /// The held node and the fail point; the copy is held by the bandwidth instead.
    hold: Option<(&'static str, &'static str)>,
    /// Sign of the moment: a node, and the state in which it shows the disk.
    sign: Sign,
    /// Required owner of the disk in the end, if only one outcome is right.
    owner: Option<&'static str>,
}

enum Sign {
    /// The disk's state at the destination.
    State(&'static str),
    /// The migration's phase at the source.
    Phase(&'static str),
}

const OFFER: Moment = Moment {
    phase: "offer",
    hold: Some(("b", "offer::received")),
    sign: Sign::State("receiving"),
    owner: Some("a"),
};
const COPYING: Moment = Moment {
    phase: "copying",
    hold: None,
    sign: Sign::Phase("copying"),
    owner: Some("a"),
};
const PREPARING: Moment = Moment {
    phase: "preparing",
    hold: Some(("b", "persist::before::accepted")),
    sign: Sign::Phase("preparing"),
    owner: None,
};
const PREPARED: Moment = Moment {
    phase: "prepared",
    hold: Some(("a", "persist::before::relinquished")),
    sign: Sign::State("accepted"),
    owner: None,
};
const RELINQUISHED: Moment = Moment {
    phase: "relinquished",
    hold: Some(("a", "persist::after::relinquished")),
    sign: Sign::State("accepted"),
    owner: Some("b"),
};
const COMMITTED: Moment = Moment {
    phase: "committed",
    hold: Some(("b", "persist::after::serving")),
    sign: Sign::Phase("committing"),
    owner: Some("b"),
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    Source,
    Destination,
}

/// The origin of a disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Made {
    /// All of the disk is at the source.
    Imported,
    /// The disk was created from an image, has fetched the parts that were read, and moves without the rest.
    OnImage,
}

impl Made {
    /// Starts two nodes; with a repository, if disks are on images.
    fn cluster(self) -> Cluster {
        if self == Self::Imported {
            return Cluster::start(&["a", "b"]).unwrap();
        }
        let mut cluster = Cluster::secure(&["a", "b"]);
        let repository = repository(&cluster);
        std::fs::create_dir(&repository).unwrap();
        for name in ["a", "b"] {
            let options = &mut cluster.node_mut(name).spec_mut().options;
            options.extend(["--repository".to_owned(), repository.clone()]);
        }
        cluster.start_all().unwrap();
        cluster
    }

    fn disk(self, cluster: &Cluster, seed: u64) -> Model {
        let a = cluster.node("a");
        if self == Self::Imported {
            return import_pattern(a, DISK, SIZE, seed).unwrap();
        }
        let model = Model::new(seed, SIZE, Initial::Pattern);
        let raw = cluster.dir().join("raw");
        model.write_image(&raw).unwrap();
        let (raw, repository) = (raw.display().to_string(), repository(cluster));
        let push = ["image", "--repository", &repository, "push", "base", &raw];
        a.text(&push);
        let create = ["disk", "create", DISK, "--image", "base"];
        let fetches = ["--prefetch", "off"];
        a.text(&[&create[..], &fetches].concat());
        model
    }
}

fn repository(cluster: &Cluster) -> String {
    cluster.dir().join("repository").display().to_string()
}

fn kill_and_recover(made: Made, moment: &Moment, victim: Victim) {
    let turn = Scenario::shared();
    let mut cluster = made.cluster();
    if let Some((name, point)) = moment.hold {
        cluster.restart(name, &[(point, HOLD)]);
    }
    let model = made.disk(&cluster, turn.seed);
    let client = load(cluster.node("a"), DISK, turn.seed, model).unwrap();
    assert!(client.progress(500, PATIENCE));

    let slow: &[&str] = if moment.hold.is_none() {
        &["--max-bandwidth", "8MiB"]
    } else {
        &[]
    };
    let id = start_migration(cluster.node("a"), DISK, "b", slow).unwrap();
    let reached = || match moment.sign {
        Sign::State(state) => (cluster.node("b").disk_state(DISK) == state).then_some(()),
        Sign::Phase(phase) => (migration(cluster.node("a"), &id)["phase"] == phase).then_some(()),
    };
    assert!(
        wait_for(PATIENCE, reached).is_some(),
        "phase '{}' was not reached: {}; at b: {}",
        moment.phase,
        migration(cluster.node("a"), &id),
        cluster.node("b").disk_state(DISK)
    );
    std::thread::sleep(SETTLE);
    let name = if victim == Victim::Source { "a" } else { "b" };
    cluster.node_mut(name).kill();

    let survivor = if victim == Victim::Source { "b" } else { "a" };
    println!(
        "{name} killed; {survivor} shows '{}'",
        cluster.node(survivor).disk_state(DISK)
    );
    std::thread::sleep(SETTLE);
    cluster.node_mut(name).start(&[]).unwrap();
    let owner = one_owner(&cluster, DISK).unwrap();
    if let Some(expected) = moment.owner {
        assert_eq!(owner, expected, "in phase '{}'", moment.phase);
    }

    let mut model = end_load(client, victim);
    println!(
        "{owner} serves: {:?}",
        verify(cluster.node(owner), DISK, &mut model).unwrap()
    );

    // Nothing is left behind in the way of the next load and the next migration.
    let other = other(owner);
    let client = load(cluster.node(owner), DISK, turn.seed + 1, model).unwrap();
    assert!(client.progress(200, PATIENCE));
    let words: &[&str] = match made {
        Made::Imported => &["--verify"],
        Made::OnImage => &[],
    };
    moves(cluster.node(owner), DISK, other, words);
    assert!(client.progress(200, PATIENCE));
    ends_well(client, cluster.node(other), DISK);
    assert_eq!(cluster.node(owner).disk_state(DISK), "departed");
}

fn end_load(client: VerifyingClient, victim: Victim) -> Model {
    if victim == Victim::Source {
        assert!(client.wait_disconnected(PATIENCE), "its node was killed");
        return client.stop(PATIENCE).clean().unwrap();
    }
    // The client's own node lives: the death of the other may cause a pause only.
    assert!(
        client.progress(200, PATIENCE),
        "the load goes on: {:?}",
        client.stats()
    );
    println!("longest request: {:?}", client.stats().longest);
    finish(client).unwrap()
}

macro_rules! crash_tests {
    ($($name:ident: $made:expr, $moment:expr, $victim:expr;)*) => {$(
        #[test]
        fn $name() {
            kill_and_recover( $made, &$moment, $victim);
        }
    )*};
}

crash_tests! {
    source_dies_in_offer: Made::Imported, OFFER, Victim::Source;
    source_dies_in_copying: Made::Imported, COPYING, Victim::Source;
    source_dies_in_preparing: Made::Imported, PREPARING, Victim::Source;
    source_dies_in_prepared: Made::Imported, PREPARED, Victim::Source;
    source_dies_in_relinquished: Made::Imported, RELINQUISHED, Victim::Source;
    source_dies_in_committed: Made::Imported, COMMITTED, Victim::Source;
    destination_dies_in_offer: Made::Imported, OFFER, Victim::Destination;
    destination_dies_in_copying: Made::Imported, COPYING, Victim::Destination;
    destination_dies_in_preparing: Made::Imported, PREPARING, Victim::Destination;
    destination_dies_in_prepared: Made::Imported, PREPARED, Victim::Destination;
    destination_dies_in_relinquished: Made::Imported, RELINQUISHED, Victim::Destination;
    destination_dies_in_committed: Made::Imported, COMMITTED, Victim::Destination;
    source_of_a_disk_on_an_image_dies_in_prepared: Made::OnImage, PREPARED, Victim::Source;
    source_of_a_disk_on_an_image_dies_in_relinquished: Made::OnImage, RELINQUISHED, Victim::Source;
    destination_of_a_disk_on_an_image_dies_in_relinquished: Made::OnImage, RELINQUISHED, Victim::Destination;
    destination_of_a_disk_on_an_image_dies_in_committed: Made::OnImage, COMMITTED, Victim::Destination;
}
