//! The figures and their goals.

use godwit_testkit::report::{Report, Target};

use super::Scene;
use super::load::Kind;
use super::policy::{AUTO, MIRROR, OF_CHOICE, POST_COPY, PRE_COPY, PUSH_PULL, Policy, REMOTE};
use super::scenes::LOADS;
use super::sizes::Sizes;

/// Returns the targets of a scene that has run.
pub(super) fn of(scene: Scene, report: &Report, sizes: &Sizes) -> Vec<Target> {
    match scene {
        Scene::Table => of_the_table(report),
        Scene::Many => of_many(report, sizes),
        Scene::Thin => of_thin(report),
        Scene::Choice => of_the_choice(report),
    }
}

fn ratio(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.zip(other).map(|(one, other)| one / other)
}

fn of_the_table(report: &Report) -> Vec<Target> {
    let runs = report.runs("moves").only("scene", "table");
    let of = |policy: Policy, load: Kind, figure: &str| {
        runs.only("policy", policy.name)
            .only("load", load.name())
            .median(figure)
    };
    let against =
        |load, other: Policy, figure| ratio(of(PUSH_PULL, load, figure), of(other, load, figure));
    let others = [MIRROR, POST_COPY, PRE_COPY, REMOTE];
    let best = others
        .into_iter()
        .filter_map(|other| of(other, Kind::Ior, "write"));
    let best = best.max_by(f64::total_cmp);
    let known = [PUSH_PULL, MIRROR, POST_COPY]
        .into_iter()
        .flat_map(|policy| {
            [Kind::Ior, Kind::AsyncWr].map(|load| of(policy, load, "source_needed_seconds"))
        });
    vec![
        Target::at_most(
            "ior: time of push-pull in that of pre-copy",
            0.1,
            against(Kind::Ior, PRE_COPY, "seconds"),
        ),
        Target::at_most(
            "ior: bytes of push-pull in those of pre-copy",
            0.1,
            against(Kind::Ior, PRE_COPY, "wire_bytes"),
        ),
        Target::at_least(
            "ior: write throughput with push-pull in the best of mirror, post-copy, pre-copy, remote",
            1.0,
            ratio(of(PUSH_PULL, Kind::Ior, "write"), best),
        ),
        Target::at_most(
            "async-wr: bytes of push-pull in those of mirror",
            1.0,
            against(Kind::AsyncWr, MIRROR, "wire_bytes"),
        ),
        Target::at_least(
            "moves of which it is known how long the source was needed",
            6.0,
            Some(known.flatten().count() as f64),
        ),
    ]
}

/// Relates the time of many simultaneous moves to the link's time for as many times the bytes of one move.
fn of_many(report: &Report, sizes: &Sizes) -> Vec<Target> {
    let machines = sizes.machines();
    let (Some(&fewest), Some(&most)) = (machines.first(), machines.last()) else {
        return Vec::new();
    };
    let runs = report
        .runs("moves")
        .only("scene", "many")
        .only("policy", PUSH_PULL.name);
    let of = |machines: usize, figure: &str| runs.only("machines", machines).median(figure);
    let alone = of(fewest, "wire_bytes").map(|bytes| bytes / fewest as f64);
    let share = alone.map(|bytes| bytes * most as f64 / sizes.link_bytes());
    let name = format!("push-pull: time of {most} at once in their shares of the link");
    vec![Target::at_most(
        name,
        1.3,
        ratio(of(most, "seconds"), share),
    )]
}

fn of_thin(report: &Report) -> Vec<Target> {
    let of = |disk: &str, figure: &str| report.runs("thin").only("disk", disk).median(figure);
    let time = ratio(of("thin", "seconds"), of("full", "seconds"));
    let bytes = ratio(
        of("thin", "allocated_at_destination"),
        of("thin", "allocated_at_source"),
    );
    let name = "bytes that the thin disk takes at the destination in those at the source";
    vec![
        Target::at_most(
            "time of the thin disk of 100 GiB in that of the full one",
            1.1,
            time,
        ),
        Target::at_most(name, 1.01, bytes),
    ]
}

/// Relates the cost of the node's choice to the cost of the best policy.
fn of_the_choice(report: &Report) -> Vec<Target> {
    let of = |load: Kind| {
        let runs = report
            .runs("moves")
            .only("scene", "choice")
            .only("load", load.name());
        let cost = |policy: &Policy| runs.only("policy", policy.name).median("cost");
        let fixed = OF_CHOICE.iter().filter(|policy| **policy != AUTO);
        let best = fixed.filter_map(cost).min_by(f64::total_cmp);
        let name = format!("{}: cost of auto in that of the best policy", load.name());
        Target::at_most(name, 1.1, ratio(cost(&AUTO), best))
    };
    LOADS.map(of).into()
}
