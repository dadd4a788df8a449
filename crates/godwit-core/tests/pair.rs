//! Two controllers joined by the real codec, in virtual time, under a random guest load: the disk
//! moves, comes back, is cancelled, loses its links and its processes, and no acknowledged write
//! is ever lost. A failing run prints the seed that repeats it.

mod support {
    pub(crate) mod history;
    pub(crate) mod random;
    pub(crate) mod scenario;
    pub(crate) mod world;
}

use support::scenario::{Faults, Scenario};

fn run(faults: Faults, seeds: std::ops::Range<u64>) {
    let only = std::env::var("GODWIT_SEED")
        .ok()
        .and_then(|seed| seed.parse::<u64>().ok());
    let (mut moved, mut aborted) = (0, 0);
    for seed in only.map_or(seeds, |seed| seed..seed + 1) {
        let outcome = std::panic::catch_unwind(|| Scenario::new(seed, faults).run());
        match outcome {
            Ok(outcome) => {
                moved += outcome.moved;
                aborted += outcome.aborted;
            }
            Err(panic) => {
                eprintln!(
                    "seed {seed} failed; repeat it with\n  GODWIT_SEED={seed} cargo test -p godwit-core --test pair {}",
                    std::thread::current().name().unwrap_or_default()
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{moved} moves, {aborted} aborted");
    if only.is_none() {
        assert!(moved > 0, "no migration came to its end");
        assert_eq!(
            aborted > 0,
            faults != Faults::NONE,
            "aborts happen if and only if provoked"
        );
    }
}

#[test]
fn a_disk_moves_back_and_forth_under_load() {
    run(Faults::NONE, 0..100);
}

#[test]
fn cancelling_at_any_time_leaves_the_source_serving() {
    run(
        Faults {
            cancels: true,
            ..Faults::NONE
        },
        1000..1100,
    );
}

#[test]
fn losing_connections_at_any_time_loses_no_write() {
    run(
        Faults {
            cuts: true,
            ..Faults::NONE
        },
        2000..2200,
    );
}

#[test]
fn killing_either_process_at_any_time_loses_no_write() {
    run(
        Faults {
            crashes: true,
            ..Faults::NONE
        },
        3000..3300,
    );
}

#[test]
fn disk_errors_at_either_end_end_the_migration_and_lose_no_other_write() {
    run(
        Faults {
            disk_errors: true,
            ..Faults::NONE
        },
        4000..4100,
    );
}

#[test]
fn everything_at_once() {
    run(
        Faults {
            cancels: true,
            cuts: true,
            crashes: true,
            disk_errors: true,
        },
        5000..5300,
    );
}
