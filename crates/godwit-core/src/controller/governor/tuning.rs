//! Every constant of the governor: what it bounds, in which unit, and the experiment that it came from.
//!
//! `_PART` is a part of a whole, `_PARTS` a divisor, `_FACTOR` a multiple, `_PERIODS` sampling periods of 10 ms,
//! `_BYTES` bytes, or bytes a second of a rate. Durations have their unit in their type.

/// Those of `mod.rs`.
pub(in crate::controller) mod rate_and_pause {
    use core::time::Duration;

    /// `PAUSE_DURATION` of a pause that follows a long time without one; doubled for each that follows
    /// soon after another.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

    /// The longest that such a pause becomes.
    pub(in crate::controller) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

    /// Copies and delayed writes start at this rate, or at a quarter of what the interface may carry, and
    /// never go below the least. What is in flight is little at first, which a slow path is spared by.
    ///
    /// From: docs/lab/a-closed-loop-is-promised-what-its-share-means-and-copies-begin-faster.md.
    pub(in crate::controller) const FIRST_RATE_BYTES: u64 = 256 << 20;

    /// They never go below this, whatever strains the guest.
    ///
    /// From: no experiment: a move has to end some day.
    pub(in crate::controller) const LEAST_RATE_BYTES: u64 = 4 << 20;

    /// The least when nobody stated the promise: as much as the guest itself reads and writes, and never
    /// less than this. What no user asked for is not worth a migration without an end.
    ///
    /// From: docs/lab/a-guest-that-takes-everything.md.
    pub(in crate::controller) const LEAST_AUTOMATIC_RATE_BYTES: u64 = 32 << 20;

    /// When only delayed writes are left they must outrun what pauses add to them.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const LEAST_LAST_RATE_BYTES: u64 = 16 << 20;

    /// No rate is higher.
    pub(in crate::controller) const MOST_RATE_BYTES: u64 = 16 << 30;

    /// The part that copies keep of what they took when the guest gets too little done.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const LEAST_KEPT_PART: f64 = 0.3;

    /// The most that they keep.
    pub(in crate::controller) const MOST_KEPT_PART: f64 = 0.7;

    /// Reaction time of the thread that runs the controller: the threshold stays this far below what
    /// was promised, as far as that is possible.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const REACTION: Duration = Duration::from_micros(500);

    /// The part of past requests that the judgement of the error budget still remembers after a
    /// sampling period: about a second's worth in all.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const MEMORY_PART: f64 = 0.99;
}

/// Those of `judgement/local_answer_budget.rs`.
pub(in crate::controller) mod local_answer_budget {
    /// Requests in a sampling period.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const MOST_REQUESTS: u32 = 64;

    /// The part of all requests lately, beyond as many.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const MOST_PART: f64 = 0.01;
}

/// Those of `judgement/haste.rs`.
pub(in crate::controller) mod haste {
    use core::time::Duration;

    /// How long answers are counted before they are judged.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const WINDOW: Duration = Duration::from_millis(100);

    /// Copies are held back for so long on end before they may hurry.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const HELD_BACK: Duration = Duration::from_millis(500);

    /// A guest that lost less than this part of its work is well.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const LACKING_PART: f64 = 0.04;

    /// Hurrying is worth it if a byte costs this many times less.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const LEAST_GAIN_FACTOR: f64 = 1.1;

    /// Copies hurry for at least this long: the window of chunks in flight widens meanwhile.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const SHORTEST: Duration = Duration::from_millis(500);

    /// Copies that hurry spare the guest again after this long, to compare anew: doubled each time that hurrying was
    /// worth it.
    ///
    /// From: no experiment: a comparison costs [`HELD_BACK`].
    pub(in crate::controller) const LONGEST: Duration = Duration::from_secs(8);

    /// After a hurry that was not worth it copies wait for so long with the next one: doubled each time.
    ///
    /// From: no experiment: an eighth of the time may be spent in vain at first.
    pub(in crate::controller) const FIRST_WAIT: Duration = Duration::from_secs(4);
}

/// Those of `judgement/net_progress.rs`.
pub(in crate::controller) mod net_progress {
    use core::time::Duration;

    /// How often the gain is judged.
    ///
    /// From: docs/lab/a-guest-that-writes-as-fast-as-the-link-takes-it.md.
    pub(in crate::controller) const WINDOW: Duration = Duration::from_millis(250);

    /// The part of what the guest writes that copies gain at least.
    ///
    /// From: docs/lab/a-guest-that-writes-as-fast-as-the-link-takes-it.md.
    pub(in crate::controller) const LEAST_GAIN_PART: f64 = 0.5;

    /// By how much the promise is eased in a window without such a gain, and how it comes back in one with it.
    ///
    /// From: docs/lab/a-guest-that-writes-as-fast-as-the-link-takes-it.md.
    pub(in crate::controller) const RISE_FACTOR: f64 = 1.5;

    /// See [`RISE_FACTOR`].
    pub(in crate::controller) const FALL_FACTOR: f64 = 0.95;

    /// See [`RISE_FACTOR`].
    pub(in crate::controller) const MOST_FACTOR: f64 = 100.0;
}

/// Those of `obstacles.rs`.
pub(in crate::controller) mod obstacles {
    use core::time::Duration;

    /// How much time a judgement looks back on: long enough for several of the longest pauses.
    ///
    /// From: no experiment that is recorded: five of the longest pauses; a TiB in nine hours.
    pub(in crate::controller) const PERIOD: Duration = Duration::from_secs(5);

    /// Whoever comes nearer to the end by as much as this each second moves, however large the disk is.
    ///
    /// From: no experiment that is recorded: five of the longest pauses; a TiB in nine hours.
    pub(in crate::controller) const MOVES_BYTES: u64 = 32 << 20;

    /// A round of pre-copy counts as shorter than the one before if it is so by this part of it.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const ROUND_SHRINKS_PART: u64 = 10;

    /// After so many rounds in a row that were no shorter, the guest writes as fast as they send. One may be chance.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const ROUNDS_AS_LONG: u32 = 2;

    /// Rounds that have sent so many times again what the first had to send cost more than to have left after it.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const MOST_TIMES_AGAIN: u64 = 2;

    /// What the first round had to send counts as this at least: 64 MiB, which a link sends in a moment.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const LEAST_FIRST_ROUND_BYTES: u64 = 64 << 20;
}

/// Those of `judgement/rate_search.rs`.
pub(in crate::controller) mod rate_search {
    /// After as many sampling periods without one, a strained period is not one more of those before.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const CALM_PERIODS: u32 = 15;

    /// The part of itself by which a rate rises in a period: while nothing is known, below half of what
    /// strained the guest, elsewhere far from it, and near it.
    ///
    /// From: docs/lab/a-closed-loop-is-promised-what-its-share-means-and-copies-begin-faster.md.
    pub(in crate::controller) const FIRST_PARTS: u64 = 2;

    /// See [`FIRST_PARTS`].
    pub(in crate::controller) const FAR_BELOW_PARTS: u64 = 16;

    /// See [`FIRST_PARTS`].
    pub(in crate::controller) const FAR_PARTS: u64 = 64;

    /// See [`FIRST_PARTS`].
    pub(in crate::controller) const NEAR_PARTS: u64 = 1024;

    /// In as many periods without a strained one, half of what is known of a rate is forgotten.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const FORGET_PERIODS: u32 = 50;
}

/// Those of `judgement/relaxed_bound.rs`.
pub(in crate::controller) mod relaxed_bound {
    /// How it is eased, and how it comes back in each period without such evidence: at last about one
    /// period in fifty exceeds it.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const EASE_FACTOR: f64 = 1.25;

    /// See [`EASE_FACTOR`].
    pub(in crate::controller) const UNEASE_FACTOR: f64 = 0.995;

    /// See [`EASE_FACTOR`].
    pub(in crate::controller) const MOST_FACTOR: f64 = 100.0;
}

/// Those of `judgement/strain_cause.rs`.
pub(in crate::controller) mod strain_cause {
    /// What is remembered of the past after a sampling period: about two seconds' worth in all.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const MEMORY_PART: f64 = 0.995;

    /// The part of sampling periods that may be strained without anybody's fault.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const BORNE_PART: f64 = 0.01;

    /// So many strained periods on end are no accident; and in as many more it shows what yielding did.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const ON_END_PERIODS: u32 = 3;

    /// How soon it is learnt, and forgotten again, what the machine does by itself.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const LEARN_PART: f64 = 0.005;

    /// See [`LEARN_PART`].
    pub(in crate::controller) const FORGET_FACTOR: f64 = 0.9995;
}

/// Those of `judgement/throughput.rs`.
pub(in crate::controller) mod throughput {
    use core::time::Duration;

    /// How long answers are counted before they are judged.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const WINDOW: Duration = Duration::from_millis(100);

    /// Less than this part of what it did before is too little; of one that sets its own pace, which hardly
    /// does less by chance, this part.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const ENOUGH_PART: f64 = 0.97;

    /// See [`ENOUGH_PART`].
    pub(in crate::controller) const ENOUGH_AT_A_PACE_PART: f64 = 0.98;

    /// More than this part of what it did before: it makes up for what it missed.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const CATCHING_UP_PART: f64 = 1.02;

    /// A guest is short once it has missed what it did before in this time, and so many requests more. One
    /// that was held up for a moment asks later for what it could not ask for then; and however steady it
    /// is, by chance there are fewer requests in some windows than in others, which as many cover at any
    /// rate of requests but about once in a thousand windows.
    ///
    /// From: docs/lab/what-a-guest-missed-not-what-a-window-shows.md.
    pub(in crate::controller) const SLACK: Duration = Duration::from_millis(15);

    /// See [`SLACK`].
    pub(in crate::controller) const CHANCE_REQUESTS: f64 = 100.0;

    /// The part that a guest is owed which behaves like a closed loop.
    ///
    /// From: docs/lab/a-guest-that-takes-everything.md.
    pub(in crate::controller) const OWED_ON_TRIAL_PART: f64 = 0.25;

    /// A guest that behaved like a closed loop may have met a disk that stood in its way for longer than
    /// others do. So it is tried out again after this time, and each time after twice as long.
    ///
    /// From: docs/lab/a-guest-that-takes-everything.md.
    pub(in crate::controller) const FIRST_TRIAL: Duration = Duration::from_secs(1);

    /// As many windows on end with too little, although copies hardly move, are no stall: after one of
    /// those a guest catches up as soon as there is room. As many with enough tell that it was one.
    ///
    /// From: docs/lab/a-guest-that-takes-everything.md.
    pub(in crate::controller) const SATURATING_WINDOWS: u32 = 4;

    /// Weight of the last window in the average.
    ///
    /// From: docs/lab/a-guest-that-takes-everything.md.
    pub(in crate::controller) const WEIGHT_PART: f64 = 0.4;

    /// A guest that does not do more although the migration has stepped back this long asks for no more.
    ///
    /// From: docs/lab/a-guest-that-takes-everything.md.
    pub(in crate::controller) const PATIENCE: Duration = Duration::from_secs(3);
}

/// Those of `token_bucket.rs`.
pub(in crate::controller) mod token_bucket {
    use core::time::Duration;

    /// Unused budget is kept for this long: enough that timers that are late do not cost throughput, and no
    /// burst that the guest would wait for just when it catches up after a stall.
    ///
    /// From: no experiment that is recorded.
    pub(in crate::controller) const BURST: Duration = Duration::from_millis(4);
}

/// Those of `in_flight/busy_window.rs`.
pub(in crate::controller) mod busy_window {
    /// Shortest chunk: 32 KiB.
    ///
    /// From: docs/lab/the-window-follows-the-guest.md.
    pub(in crate::controller) const LEAST_CHUNK_SECTORS: u32 = 64;

    /// Chunks that take this many times what one takes alone mostly wait for each other: less of a crowd
    /// than that keeps the path busy.
    ///
    /// From: docs/lab/chunks-do-not-wait-for-each-other.md.
    pub(in crate::controller) const CROWDED_FACTOR: f64 = 6.0;

    /// As long as they take less than this part of that one more may join them.
    ///
    /// From: docs/lab/chunks-do-not-wait-for-each-other.md.
    pub(in crate::controller) const ROOMY_PART: f64 = 0.8;

    /// Chunks that take less than this part of what was promised are no crowd to the guest.
    ///
    /// From: docs/lab/the-path-is-filled-sooner-and-further-while-the-guest-does-not-notice.md.
    pub(in crate::controller) const NOTICEABLE_PARTS: u32 = 2;

    /// With this many chunks in flight it is better that they become longer than that they become more.
    ///
    /// From: docs/lab/few-long-chunks-instead-of-many-short-ones.md.
    pub(in crate::controller) const FEWEST_CHUNKS: u16 = 4;

    /// What chunks are a multiple of: 4 KiB.
    ///
    /// From: what disks and page buffers are aligned to.
    pub(in crate::controller) const BLOCK_SECTORS: u32 = 8;

    /// As few chunks as these are no crowd.
    ///
    /// From: docs/lab/chunks-do-not-wait-for-each-other.md.
    pub(in crate::controller) const FEW_CHUNKS: u16 = 2;
}

/// Those of `in_flight/idle_window.rs`.
pub(in crate::controller) mod idle_window {
    use core::time::Duration;

    /// A chunk that takes longer than this makes the window smaller again.
    ///
    /// From: docs/lab/more-in-flight-while-the-guest-is-idle.md.
    pub(in crate::controller) const QUICK: Duration = Duration::from_millis(15);

    /// The same when the guest has asked for nothing for [`LONG`]: then it meets that once, and not with
    /// each of a few requests a second.
    ///
    /// From: docs/lab/more-in-flight-while-the-guest-is-idle.md.
    pub(in crate::controller) const QUICK_ENOUGH: Duration = Duration::from_millis(30);

    /// How long the guest has to have been idle for that.
    ///
    /// From: docs/lab/more-in-flight-while-the-guest-is-idle.md.
    pub(in crate::controller) const LONG: Duration = Duration::from_secs(1);
}

/// Those of `in_flight/queueing_ratio.rs`.
pub(in crate::controller) mod queueing_ratio {
    use core::time::Duration;

    /// Weight of a chunk in what one usually takes.
    ///
    /// From: docs/lab/chunks-do-not-wait-for-each-other.md.
    pub(in crate::controller) const WEIGHT_PART: f64 = 1.0 / 8.0;

    /// With few in flight, what a chunk took when it was least counts for this much more after each
    /// sampling period: the path has become longer.
    ///
    /// From: docs/lab/chunks-do-not-wait-for-each-other.md.
    pub(in crate::controller) const LONGER_FACTOR: f64 = 1.01;

    /// Shorter than this is nothing that could be measured.
    ///
    /// From: the clock's resolution.
    pub(in crate::controller) const LEAST: Duration = Duration::from_micros(1);
}
