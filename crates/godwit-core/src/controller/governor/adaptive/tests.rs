use core::ops::RangeInclusive;

use super::*;
use crate::Arrivals;
use crate::GuestLoad;
use crate::units::{Bytes, MigrationId};

const LIMIT: Duration = Duration::from_millis(4);
const BLOCK: Bytes = Bytes(4096);

fn unknown(per_second: u64) -> Option<GuestLoad> {
    let arrivals = Arrivals::Unknown;
    Some(GuestLoad {
        per_second,
        arrivals,
    })
}

/// Notes an answer in time to a request that writes nothing.
fn answered(governor: &mut Adaptive, bytes: Bytes, latency: Duration) {
    governor.answered(&Answer {
        bytes,
        latency,
        known_late: false,
        writes: false,
    });
}

fn written(governor: &mut Adaptive, bytes: Bytes) {
    if let Some(net_progress) = &mut governor.net_progress {
        net_progress.written(bytes.0);
    }
}

fn governor(change: impl FnOnce(&mut MigrationOptions)) -> Adaptive {
    let mut options = MigrationOptions::new(MigrationId([1; 16]));
    options.sla = Some(LatencyTarget {
        limit: LIMIT,
        allowed_per_million: 100,
    });
    change(&mut options);
    Adaptive::new(&options, JudgedPeriods::default(), Time(0))
}

/// Runs a sampling period in which the guest's slowest request took `worst`.
fn period(governor: &mut Adaptive, number: u32, worst: Duration) {
    let now = Time(0).after(SAMPLING * number);
    for _ in 0..100 {
        answered(governor, BLOCK, worst);
    }
    let period = Period {
        copying: true,
        ..Period::default()
    };
    governor.sample(now, &period);
}

/// Runs periods in which copies use their whole rate.
fn busy_periods(governor: &mut Adaptive, numbers: RangeInclusive<u32>, worst: Duration) {
    for number in numbers {
        governor.spend(governor.rate / 100, false);
        period(governor, number, worst);
    }
}

#[test]
fn room_that_the_guest_leaves_is_spent_and_a_strained_guest_gets_it_back() {
    let mut governor = governor(|_| {});
    busy_periods(&mut governor, 1..=50, LIMIT / 4);
    let fast = governor.rate;
    assert!(fast > LEAST_RATE_BYTES * 80, "{fast}");
    for number in 51..=60 {
        period(&mut governor, number, LIMIT / 10 * 11);
    }
    assert!(governor.rate < fast / 20, "{}", governor.rate);
    for number in 61..80 {
        period(&mut governor, number, LIMIT * 2);
    }
    assert_eq!(governor.rate, LEAST_RATE_BYTES);
    assert_eq!((governor.judged.all, governor.judged.breached), (79, 29));
}

#[test]
fn a_promise_that_nobody_stated_is_eased_until_the_migration_gains_on_the_guest() {
    const WRITTEN: u64 = 1 << 20;
    // Returns the threshold after two seconds. In each period the guest writes `WRITTEN` bytes, and the bytes left
    // shrink by the part `gained` of this amount.
    let threshold = |guest_load, max_bandwidth, gained: f64| {
        let mut governor = governor(|options| {
            options.guest_load = guest_load;
            options.max_bandwidth = max_bandwidth;
        });
        for number in 1..=200 {
            written(&mut governor, Bytes(WRITTEN));
            answered(&mut governor, BLOCK, LIMIT / 2);
            let gained = f64::from(number) * gained * WRITTEN as f64;
            let period = Period {
                left: (1 << 40) - gained as u64,
                copying: true,
                ..Period::default()
            };
            governor.sample(Time(0).after(SAMPLING * number), &period);
        }
        governor.threshold().expect("there is a promise")
    };
    assert!(threshold(unknown(10_000), None, 0.6) < LIMIT);
    let eased = threshold(unknown(10_000), None, 0.4);
    assert!(eased > LIMIT * 10 && eased < Controller::MOST_EASED);
    assert!(threshold(None, None, 0.4) < LIMIT, "the user stated it");
    let bounded = threshold(unknown(10_000), Some(1 << 20), 0.4);
    assert!(bounded < LIMIT, "it would change nothing");
}

#[test]
fn what_the_guest_suffers_by_itself_shows_however_far_the_promise_is_eased() {
    let mut governor = governor(|options| options.guest_load = unknown(10_000));
    let still = Period {
        left: 1 << 40,
        paused: true,
        still: true,
        ..Period::default()
    };
    let mut eased = NetProgress::new(Time(0));
    for number in 0..100 {
        eased.written(1 << 20);
        eased.period_ends(Time(0).after(SAMPLING * 25 * number), 1 << 40, false);
    }
    governor.net_progress = Some(eased);
    assert!(governor.threshold() > Some(LIMIT * 20));
    for number in 1..=50 {
        answered(&mut governor, BLOCK, LIMIT * 5);
        governor.sample(Time(0).after(SAMPLING * number), &still);
    }
    assert!(governor.own.factor() > 5.0, "{:?}", governor.own);
}

#[test]
fn what_the_guest_suffers_while_the_migration_stands_still_is_not_held_against_it() {
    let mut governor = governor(|_| {});
    let before = governor.threshold();
    let still = Period {
        still: true,
        ..Period::default()
    };
    for number in 1..=50 {
        answered(&mut governor, BLOCK, LIMIT * 5);
        governor.sample(Time(0).after(SAMPLING * number), &still);
    }
    assert!(governor.threshold() > Some(LIMIT * 5), "{:?}", governor.own);
    assert_eq!(governor.judged.breached, 50, "it is a breach all the same");
    for number in 51..=1000 {
        answered(&mut governor, BLOCK, LIMIT / 4);
        governor.sample(Time(0).after(SAMPLING * number), &still);
    }
    assert_eq!(governor.threshold(), before);
}

#[test]
fn copies_that_hardly_move_are_not_what_strains_the_guest() {
    let mut governor = governor(|_| {});
    for number in 1..=200 {
        governor.spend(governor.rate / 100, false);
        period(&mut governor, number, LIMIT * 2);
    }
    assert!(governor.rate > LEAST_RATE_BYTES, "{}", governor.rate);
    assert!(
        governor.threshold() < Some(LIMIT),
        "the promise is the same"
    );
}

#[test]
fn waits_while_copies_hardly_move_do_not_slow_them_down_later() {
    let mut governor = governor(|options| options.guest_load = unknown(10_000));
    let mut number = 0;
    let mut pass = |governor: &mut Adaptive, periods, worst| {
        for _ in 0..periods {
            number += 1;
            governor.spend(governor.rate / 100, false);
            period(governor, number, worst);
        }
    };
    governor.rate = LEAST_AUTOMATIC_RATE_BYTES;
    pass(&mut governor, 10, LIMIT * 20);
    assert_eq!(governor.rate, LEAST_AUTOMATIC_RATE_BYTES);
    pass(&mut governor, 50, LIMIT / 4);
    assert!(governor.rate > LEAST_RATE_BYTES * 80, "{}", governor.rate);
}

#[test]
fn a_guest_that_gets_less_done_gets_room_back_however_short_its_waits() {
    let mut governor = governor(|options| {
        options.guest_load = unknown(20_000);
        options.governor.haste = false;
    });
    busy_periods(&mut governor, 1..=80, LIMIT / 10);
    // A period has 100 answers: half of the guest's former rate.
    assert_eq!(governor.rate, LEAST_AUTOMATIC_RATE_BYTES);
}

#[test]
fn a_guest_that_takes_all_there_is_shares_it() {
    let mut governor = governor(|options| options.guest_load = unknown(20_000));
    busy_periods(&mut governor, 1..=150, LIMIT / 10);
    assert_eq!(governor.rate, MOST_RATE_BYTES);
}

/// Runs periods in which the guest gets 75 quick answers and copies take `took` bytes.
fn short_periods(governor: &mut Adaptive, numbers: RangeInclusive<u32>, took: u64) {
    for number in numbers {
        governor.spend(took, false);
        for _ in 0..75 {
            answered(governor, BLOCK, LIMIT / 10);
        }
        let period = Period {
            copying: true,
            ..Period::default()
        };
        governor.sample(Time(0).after(SAMPLING * number), &period);
    }
}

#[test]
fn copies_that_took_nothing_are_not_what_the_guest_was_short_of() {
    let mut governor = governor(|options| options.guest_load = unknown(10_000));
    busy_periods(&mut governor, 1..=20, LIMIT / 10);
    let before = governor.rate;
    short_periods(&mut governor, 21..=60, 0);
    assert_eq!(governor.rate, before);
}

#[test]
fn a_guest_that_gets_less_done_has_room_after_two_windows() {
    let mut governor = governor(|options| options.guest_load = unknown(10_000));
    busy_periods(&mut governor, 1..=50, LIMIT / 10);
    // Copies take little more than half of their rate, and the guest gets three quarters done.
    let took = governor.rate / 100 * 6 / 10;
    short_periods(&mut governor, 51..=70, took);
    assert!(governor.rate <= took * 100 * 55 / 100, "{}", governor.rate);
    assert!(governor.rate >= took * 100 * 45 / 100, "{}", governor.rate);
}

#[test]
fn what_nobody_stated_does_not_keep_a_migration_from_its_end() {
    let slowest = |guest_load, interface_budget, bytes| {
        let mut governor = governor(|options| {
            options.guest_load = guest_load;
            options.interface_budget = interface_budget;
            options.governor.haste = false;
        });
        for number in 1..=600 {
            governor.spend(governor.rate / 100, false);
            for _ in 0..100 {
                answered(&mut governor, bytes, LIMIT * 2);
            }
            let period = Period {
                copying: true,
                ..Period::default()
            };
            governor.sample(Time(0).after(SAMPLING * number), &period);
            governor.crept = RelaxedBound::NONE;
        }
        governor.rate
    };
    assert_eq!(
        slowest(None, None, BLOCK),
        LEAST_RATE_BYTES,
        "the user stated it"
    );
    let budget = Some(LEAST_AUTOMATIC_RATE_BYTES / 2);
    assert_eq!(slowest(unknown(20_000), budget, BLOCK), LEAST_RATE_BYTES);
    assert_eq!(
        slowest(unknown(20_000), None, Bytes(512)),
        LEAST_AUTOMATIC_RATE_BYTES
    );
    // Almost 10,000 requests of 64 KiB per second.
    let guests = slowest(unknown(20_000), None, Bytes(64 << 10));
    assert!((600_000_000..=660_000_000).contains(&guests), "{guests}");
}

/// Returns the rate after four seconds on a host whose processors are full: the guest gets six tenths of its work done
/// at any pace of copies.
fn rate_on_a_full_host(change: impl FnOnce(&mut MigrationOptions)) -> u64 {
    const TAKES: u64 = 400 << 20;
    let mut governor = governor(change);
    let mut fastest = 0;
    for number in 1..=400 {
        governor.spend(governor.rate.min(TAKES) / 100, false);
        for _ in 0..60 {
            answered(&mut governor, BLOCK, LIMIT * 2);
        }
        let period = Period {
            copying: true,
            ..Period::default()
        };
        governor.sample(Time(0).after(SAMPLING * number), &period);
        if number > 200 {
            fastest = fastest.max(governor.rate);
        }
    }
    fastest
}

#[test]
fn a_full_host_is_left_soon_unless_the_promise_was_stated() {
    let automatic = rate_on_a_full_host(|options| options.guest_load = unknown(10_000));
    assert_eq!(automatic, MOST_RATE_BYTES);
    let stated = rate_on_a_full_host(|_| {});
    assert!(stated < LEAST_AUTOMATIC_RATE_BYTES * 2, "{stated}");
    let bounded = rate_on_a_full_host(|options| {
        options.guest_load = unknown(10_000);
        options.interface_budget = Some(100 << 20);
    });
    assert!(bounded < MOST_RATE_BYTES, "{bounded}");
}

#[test]
fn slow_chunks_keep_copies_below_their_least_only_for_a_promise_that_somebody_stated() {
    let in_flight = |guest_load| {
        let mut governor = governor(|options| {
            options.guest_load = guest_load;
            options.delayed_writes = false;
        });
        for number in 1..=20 {
            governor.chunk_done(LIMIT);
            governor.spend(LEAST_RATE_BYTES / 100, false);
            period(&mut governor, number, LIMIT / 4);
        }
        let (chunks, sectors) = governor.in_flight();
        u32::from(chunks) * sectors
    };
    let (stated, automatic) = (in_flight(None), in_flight(unknown(10_000)));
    assert!(automatic > stated * 50, "{automatic} {stated}");
}

#[test]
fn copies_do_not_give_way_to_a_disk_that_stands_still_for_a_moment() {
    let mut governor = governor(|options| options.guest_load = unknown(10_000));
    busy_periods(&mut governor, 1..=15, LIMIT / 4);
    let before = governor.rate;
    for number in 16..=55 {
        let period = Period {
            oldest: SAMPLING * (number - 15),
            copying: true,
            ..Period::default()
        };
        governor.sample(Time(0).after(SAMPLING * number), &period);
    }
    assert_eq!(governor.rate, before);
}

#[test]
fn a_machine_that_stays_the_same_is_used_well_and_seldom_too_much() {
    const BEARABLE: u64 = 300 << 20;
    let mut governor = governor(|_| {});
    let (mut used, mut strained) = (0, 0);
    for number in 1..=4000 {
        let rate = governor.rate;
        governor.spend(rate / 100, false);
        let worst = if rate > BEARABLE {
            LIMIT * 2
        } else {
            LIMIT / 4
        };
        period(&mut governor, number, worst);
        if number > 1000 {
            used += rate;
            strained += u32::from(rate > BEARABLE);
        }
    }
    assert!(used / 3000 > BEARABLE / 20 * 17, "{}", used / 3000);
    assert!((5..=30).contains(&strained), "{strained} of 3000");
}

#[test]
fn room_that_nobody_uses_is_not_asked_for() {
    let mut governor = governor(|_| {});
    for number in 1..=50 {
        period(&mut governor, number, LIMIT / 4);
    }
    assert_eq!(governor.rate, FIRST_RATE_BYTES);
}

#[test]
fn copies_begin_at_a_quarter_of_what_a_narrow_interface_may_carry_or_at_the_least() {
    let first = |budget| governor(|options| options.interface_budget = budget).rate;
    assert_eq!(first(None), FIRST_RATE_BYTES);
    assert_eq!(first(Some(4 << 30)), FIRST_RATE_BYTES);
    assert_eq!(first(Some(100 << 20)), 25 << 20);
    assert_eq!(first(Some(1 << 20)), LEAST_RATE_BYTES);
}

#[test]
fn pauses_that_follow_each_other_become_longer_and_others_stay_short() {
    let mut governor = governor(|_| {});
    let mut now = Time(0);
    let mut lengths = Vec::new();
    for _ in 0..8 {
        let until = governor.pause(now);
        lengths.push(until.since(now));
        now = until;
        governor.resume(now);
    }
    assert_eq!(lengths[0], SHORTEST_PAUSE);
    assert!(
        lengths
            .windows(2)
            .all(|pair| pair[0] < pair[1] || pair[1] == LONGEST_PAUSE)
    );
    assert_eq!(lengths[7], LONGEST_PAUSE);
    let later = now.after(Duration::from_secs(10));
    assert_eq!(governor.pause(later).since(later), SHORTEST_PAUSE);
}

/// Returns the longest of forty pauses, 50 ms apart, while the guest writes a block in each period and copies gain
/// `gained`. The first few pauses show the gain.
fn longest_pause(governor: &mut Adaptive, gained: i64) -> Option<Duration> {
    let (mut now, mut left) = (Time(0), 1_u64 << 30);
    let pauses = (0..40).map(|_| {
        for _ in 0..5 {
            now = now.after(SAMPLING);
            left = left.saturating_add_signed(-gained);
            written(governor, BLOCK);
            let period = Period {
                left,
                copying: true,
                ..Period::default()
            };
            governor.sample(now, &period);
        }
        let until = governor.pause(now);
        let length = until.since(now);
        now = until;
        governor.resume(now);
        length
    });
    pauses.skip(10).max()
}

#[test]
fn pauses_that_cost_more_than_they_bring_stay_short() {
    let block = BLOCK.0 as i64;
    let mut loses = governor(|_| {});
    assert_eq!(longest_pause(&mut loses, -block), Some(SHORTEST_PAUSE));
    assert_eq!(loses.eased(LIMIT), LIMIT, "a stated promise is kept");
    let mut gains = governor(|_| {});
    assert_eq!(longest_pause(&mut gains, block * 2), Some(LONGEST_PAUSE));
}

#[test]
fn a_percentile_leaves_as_many_late_requests_as_it_says() {
    let mut strict = governor(|_| {});
    let mut loose = governor(|options| {
        options.sla = Some(LatencyTarget {
            limit: LIMIT,
            allowed_per_million: 10_000,
        });
    });
    for governor in [&mut strict, &mut loose] {
        for number in 1..=20 {
            period(governor, number, LIMIT / 4);
        }
    }
    assert!(!strict.may_be_late());
    let tolerated = (0..100).take_while(|_| loose.may_be_late()).count();
    assert!(
        (5..=10).contains(&tolerated),
        "half of 1% of 2000: {tolerated}"
    );
}

#[test]
fn a_deadline_that_comes_near_takes_what_it_needs() {
    let mut governor = governor(|_| {});
    let left = 2 << 30;
    assert!(!governor.pressed(FIRST_RATE_BYTES / 10));
    answered(&mut governor, BLOCK, LIMIT * 3);
    let period = Period {
        left,
        required: left / 2,
        copying: true,
        ..Period::default()
    };
    governor.sample(Time(0).after(SAMPLING), &period);
    assert_eq!(governor.rate, left / 2);
    assert!(governor.pressed(left / 2));
}

#[test]
fn a_deadline_that_has_passed_is_no_rate_above_the_highest() {
    let mut governor = governor(|_| {});
    answered(&mut governor, BLOCK, LIMIT * 3);
    let period = Period {
        required: u64::MAX,
        copying: true,
        ..Period::default()
    };
    governor.sample(Time(0).after(SAMPLING), &period);
    assert_eq!(governor.rate, MOST_RATE_BYTES);
}

/// Creates a governor of an implicit promise, without the named parts.
fn without(parts: &str) -> Adaptive {
    governor(|options| {
        options.guest_load = unknown(10_000);
        options.governor = parts.parse().expect("parts of the governor");
    })
}

#[test]
fn without_its_budget_nothing_is_answered_alone() {
    let mut whole = without("");
    assert!(whole.may_answer_alone());
    assert!(!without("local_answer_budget").may_answer_alone());
}

#[test]
fn without_its_cause_one_strained_period_is_enough_to_yield() {
    let rate_after_a_strained_period = |parts| {
        let mut governor = without(parts);
        busy_periods(&mut governor, 1..=20, LIMIT / 4);
        let before = governor.rate;
        busy_periods(&mut governor, 21..=21, LIMIT * 2);
        governor.rate < before
    };
    assert!(!rate_after_a_strained_period(""));
    assert!(rate_after_a_strained_period("strain_cause"));
}

#[test]
fn without_net_progress_a_promise_is_not_eased_for_a_migration_that_loses_ground() {
    let eased = |parts| {
        let mut governor = without(parts);
        for number in 1..=200 {
            written(&mut governor, Bytes(1 << 20));
            let now = Time(0).after(SAMPLING * number);
            let period = Period {
                left: 1 << 30,
                copying: true,
                ..Period::default()
            };
            governor.sample(now, &period);
        }
        governor.eased(LIMIT) > LIMIT
    };
    assert!(eased(""));
    assert!(!eased("net_progress"));
}
