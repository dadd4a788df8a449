//! Constants of the governor, each with its meaning, its unit, and the experiment behind its value.
//!
//! `_PART` is a part of a whole, `_PARTS` a divisor, `_FACTOR` a multiple, `_PERIODS` sampling periods of 10 ms,
//! `_BYTES` bytes, or bytes per second for a rate. Durations have their unit in their type.

/// Constants of `mod.rs`.
pub(in crate::controller) mod rate_and_pause {
    use core::time::Duration;

    /// `PAUSE_DURATION` after a long time without a pause; doubled for each pause soon after the previous one.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

    /// Longest `PAUSE_DURATION`.
    pub(in crate::controller) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

    /// Initial rate of copies and delayed writes, bounded by a quarter of the interface budget and by the least rate.
    /// The amount in flight starts small, which spares a slow path.
    ///
    /// From: docs/lab/governor.md#a-closed-loop-is-promised-what-its-share-means-and-copies-begin-faster.
    pub(in crate::controller) const FIRST_RATE_BYTES: u64 = 256 << 20;

    /// Lower bound on the rate, whatever strains the guest.
    ///
    /// From: no experiment: a move has to end some day.
    pub(in crate::controller) const LEAST_RATE_BYTES: u64 = 4 << 20;

    /// Lower bound on the rate under an implicit promise, raised to the guest's own reads and writes. An implicit
    /// promise is not worth a migration without an end.
    ///
    /// From: docs/lab/governor.md#a-guest-that-takes-everything.
    pub(in crate::controller) const LEAST_AUTOMATIC_RATE_BYTES: u64 = 32 << 20;

    /// Lower bound while only delayed writes are left: the rate must outrun the writes added by pauses.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const LEAST_LAST_RATE_BYTES: u64 = 16 << 20;

    /// Upper bound on every rate.
    pub(in crate::controller) const MOST_RATE_BYTES: u64 = 16 << 30;

    /// Smallest part of the rate kept by copies when the guest gets too little done.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const LEAST_KEPT_PART: f64 = 0.3;

    /// Largest part of the rate kept by copies.
    pub(in crate::controller) const MOST_KEPT_PART: f64 = 0.7;

    /// Reaction time of the thread that runs the controller. The threshold stays this far below the promise, as far as
    /// possible.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const REACTION: Duration = Duration::from_micros(500);

    /// Part of past requests remembered after a sampling period by the judgement of the error budget: about a second's
    /// worth in all.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const MEMORY_PART: f64 = 0.99;
}

/// Constants of `judgement/local_answer_budget.rs`.
pub(in crate::controller) mod local_answer_budget {
    /// Requests in a sampling period.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const MOST_REQUESTS: u32 = 64;

    /// Part of all recent requests, beyond [`MOST_REQUESTS`].
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const MOST_PART: f64 = 0.01;
}

/// Constants of `judgement/haste.rs`.
pub(in crate::controller) mod haste {
    use core::time::Duration;

    /// Time over which answers are counted before a judgement.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const WINDOW: Duration = Duration::from_millis(100);

    /// Time for which copies must be held back continuously before they may hurry.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const HELD_BACK: Duration = Duration::from_millis(500);

    /// A guest that lost less than this part of its work is well.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const LACKING_PART: f64 = 0.04;

    /// A hurry is worth its cost if a byte costs less by this factor.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const LEAST_GAIN_FACTOR: f64 = 1.1;

    /// Shortest hurry: the window of chunks in flight widens meanwhile.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const SHORTEST: Duration = Duration::from_millis(500);

    /// Longest hurry before copies spare the guest again for a new comparison; doubled after each gainful hurry.
    ///
    /// From: no experiment: a comparison costs [`HELD_BACK`].
    pub(in crate::controller) const LONGEST: Duration = Duration::from_secs(8);

    /// Time until the next hurry after a hurry without gain; doubled each time.
    ///
    /// From: no experiment: an eighth of the time may be spent in vain at first.
    pub(in crate::controller) const FIRST_WAIT: Duration = Duration::from_secs(4);
}

/// Constants of `judgement/net_progress.rs`.
pub(in crate::controller) mod net_progress {
    use core::time::Duration;

    /// Time between judgements of the gain.
    ///
    /// From: docs/lab/governor.md#a-guest-that-writes-as-fast-as-the-link-takes-it.
    pub(in crate::controller) const WINDOW: Duration = Duration::from_millis(250);

    /// Least gain of copies, as a part of the bytes written by the guest.
    ///
    /// From: docs/lab/governor.md#a-guest-that-writes-as-fast-as-the-link-takes-it.
    pub(in crate::controller) const LEAST_GAIN_PART: f64 = 0.5;

    /// Factor on the easing of the promise after a window without sufficient gain; [`FALL_FACTOR`] after a window with
    /// sufficient gain.
    ///
    /// From: docs/lab/governor.md#a-guest-that-writes-as-fast-as-the-link-takes-it.
    pub(in crate::controller) const RISE_FACTOR: f64 = 1.5;

    /// See [`RISE_FACTOR`].
    pub(in crate::controller) const FALL_FACTOR: f64 = 0.95;

    /// See [`RISE_FACTOR`].
    pub(in crate::controller) const MOST_FACTOR: f64 = 100.0;
}

/// Constants of `obstacles.rs`.
pub(in crate::controller) mod obstacles {
    use core::time::Duration;

    /// Period of a judgement: long enough for several of the longest pauses.
    ///
    /// From: no recorded experiment: five of the longest pauses; a TiB in nine hours.
    pub(in crate::controller) const PERIOD: Duration = Duration::from_secs(5);

    /// A migration that gains this many bytes per second moves, however large the disk is.
    ///
    /// From: no recorded experiment: five of the longest pauses; a TiB in nine hours.
    pub(in crate::controller) const MOVES_BYTES: u64 = 32 << 20;

    /// A round of pre-copy counts as shorter than its predecessor if the difference is at least the predecessor divided
    /// by this number.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const ROUND_SHRINKS_PART: u64 = 10;

    /// After this many consecutive rounds that were no shorter, the guest writes as fast as the rounds send. A single
    /// such round may be chance.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const ROUNDS_AS_LONG: u32 = 2;

    /// Rounds that have resent the first round's bytes this many times cost more than rewritten data left for later.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const MOST_TIMES_AGAIN: u64 = 2;

    /// Lower bound on the counted size of the first round: 64 MiB, which a link sends in a moment.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const LEAST_FIRST_ROUND_BYTES: u64 = 64 << 20;
}

/// Constants of `judgement/rate_search.rs`.
pub(in crate::controller) mod rate_search {
    /// Unstrained periods after which a strained period counts as a new onset.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const CALM_PERIODS: u32 = 15;

    /// Divisors of the rate, for its rise in a period: [`FIRST_PARTS`] without knowledge, [`FAR_BELOW_PARTS`] below
    /// half of the strained rate, [`FAR_PARTS`] elsewhere far from the strained rate, and [`NEAR_PARTS`] near the
    /// strained rate.
    ///
    /// From: docs/lab/governor.md#a-closed-loop-is-promised-what-its-share-means-and-copies-begin-faster.
    pub(in crate::controller) const FIRST_PARTS: u64 = 2;

    /// See [`FIRST_PARTS`].
    pub(in crate::controller) const FAR_BELOW_PARTS: u64 = 16;

    /// See [`FIRST_PARTS`].
    pub(in crate::controller) const FAR_PARTS: u64 = 64;

    /// See [`FIRST_PARTS`].
    pub(in crate::controller) const NEAR_PARTS: u64 = 1024;

    /// Unstrained periods in which half of the knowledge about a rate is forgotten.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const FORGET_PERIODS: u32 = 50;
}

/// Constants of `judgement/relaxed_bound.rs`.
pub(in crate::controller) mod relaxed_bound {
    /// Factor on the bound after a period that exceeded the bound; [`UNEASE_FACTOR`] after any other period. In
    /// equilibrium about one period in fifty exceeds the bound.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const EASE_FACTOR: f64 = 1.25;

    /// See [`EASE_FACTOR`].
    pub(in crate::controller) const UNEASE_FACTOR: f64 = 0.995;

    /// See [`EASE_FACTOR`].
    pub(in crate::controller) const MOST_FACTOR: f64 = 100.0;
}

/// Constants of `judgement/strain_cause.rs`.
pub(in crate::controller) mod strain_cause {
    /// Part of the past remembered after a sampling period: about two seconds' worth in all.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const MEMORY_PART: f64 = 0.995;

    /// Part of sampling periods that may be strained without fault of the migration.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const BORNE_PART: f64 = 0.01;

    /// Number of consecutive strained periods that is no accident. The effect of yielding shows within the same number
    /// of periods.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const ON_END_PERIODS: u32 = 3;

    /// Rate at which the machine's own strain is learnt, with [`FORGET_FACTOR`] for forgetting.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const LEARN_PART: f64 = 0.005;

    /// See [`LEARN_PART`].
    pub(in crate::controller) const FORGET_FACTOR: f64 = 0.9995;
}

/// Constants of `judgement/throughput.rs`.
pub(in crate::controller) mod throughput {
    use core::time::Duration;

    /// Time over which answers are counted before a judgement.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const WINDOW: Duration = Duration::from_millis(100);

    /// Sufficient part of the guest's former rate. [`ENOUGH_AT_A_PACE_PART`] applies to a guest with its own pace,
    /// whose rate hardly drops by chance.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const ENOUGH_PART: f64 = 0.97;

    /// See [`ENOUGH_PART`].
    pub(in crate::controller) const ENOUGH_AT_A_PACE_PART: f64 = 0.98;

    /// A guest above this part of its former rate makes up for missed requests.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const CATCHING_UP_PART: f64 = 1.02;

    /// A guest is short after missing its former requests of this time, plus [`CHANCE_REQUESTS`]. A guest held up for a
    /// moment makes its requests later. Even a steady guest makes fewer requests in some windows by chance;
    /// [`CHANCE_REQUESTS`] covers the chance at any rate, except about once in a thousand windows.
    ///
    /// From: docs/lab/governor.md#what-a-guest-missed-not-what-a-window-shows.
    pub(in crate::controller) const SLACK: Duration = Duration::from_millis(15);

    /// See [`SLACK`].
    pub(in crate::controller) const CHANCE_REQUESTS: f64 = 100.0;

    /// Weight of the last window in the average.
    ///
    /// From: docs/lab/governor.md#a-guest-that-takes-everything.
    pub(in crate::controller) const WEIGHT_PART: f64 = 0.4;

    /// A guest that does no more although the migration has stepped back for this long asks for no more.
    ///
    /// From: docs/lab/governor.md#a-guest-that-takes-everything.
    pub(in crate::controller) const PATIENCE: Duration = Duration::from_secs(3);
}

/// Constants of `token_bucket.rs`.
pub(in crate::controller) mod token_bucket {
    use core::time::Duration;

    /// Time for which unused budget is kept. Late timers then do not cost throughput, and no burst delays a guest that
    /// is catching up after a stall.
    ///
    /// From: no recorded experiment.
    pub(in crate::controller) const BURST: Duration = Duration::from_millis(4);
}

/// Constants of `in_flight/busy_window.rs`.
pub(in crate::controller) mod busy_window {
    /// Shortest chunk: 32 KiB.
    ///
    /// From: docs/lab/governor.md#the-window-follows-the-guest.
    pub(in crate::controller) const LEAST_CHUNK_SECTORS: u32 = 64;

    /// From this many chunks in flight on, longer chunks are better than more chunks.
    ///
    /// From: docs/lab/governor.md#few-long-chunks-instead-of-many-short-ones.
    pub(in crate::controller) const FEWEST_CHUNKS: u16 = 4;

    /// Unit of a chunk's length: 4 KiB.
    ///
    /// From: what disks and page buffers are aligned to.
    pub(in crate::controller) const BLOCK_SECTORS: u32 = 8;
}

/// Constants of `in_flight/idle_window.rs`.
pub(in crate::controller) mod idle_window {
    use core::time::Duration;

    /// A chunk that takes longer makes the window smaller again.
    ///
    /// From: docs/lab/governor.md#more-in-flight-while-the-guest-is-idle.
    pub(in crate::controller) const QUICK: Duration = Duration::from_millis(15);

    /// Like [`QUICK`], for a guest that has made no request for [`LONG`]: such a guest meets the delay once, and not
    /// with each of a few requests per second.
    ///
    /// From: docs/lab/governor.md#more-in-flight-while-the-guest-is-idle.
    pub(in crate::controller) const QUICK_ENOUGH: Duration = Duration::from_millis(30);

    /// Idle time of the guest after which [`QUICK_ENOUGH`] applies.
    ///
    /// From: docs/lab/governor.md#more-in-flight-while-the-guest-is-idle.
    pub(in crate::controller) const LONG: Duration = Duration::from_secs(1);
}
