//! A few of the thousands of runs of `make sim`.

use godwit_sim::{Soak, soak};

fn seeds(first: u64, seeds: u64, jobs: usize) -> godwit_sim::Report {
    let what = Soak {
        first,
        seeds,
        jobs,
        bug: None,
    };
    soak(what, |_| {})
}

#[test]
fn disks_move_under_load_and_faults_and_nothing_is_lost() {
    let report = seeds(0, 150, 2);
    if let Some((seed, violation)) = &report.failure {
        panic!(
            "seed {seed} {violation}\nrepeat it with\n  \
             cargo run --release -p godwit-sim -- replay {seed}"
        );
    }
    assert_eq!(report.runs, 150);
    assert!(report.moves() > 50, "{} moves", report.moves());
}

#[test]
fn a_seed_is_one_run() {
    let (once, again) = (seeds(7, 20, 1), seeds(7, 20, 2));
    assert!(once.coverage().eq(again.coverage()));
    let other = seeds(27, 20, 1);
    assert!(once.coverage().ne(other.coverage()));
}
