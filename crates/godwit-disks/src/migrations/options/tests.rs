use super::in_flight::{BUSY_CHUNK, MAX_CHUNK, MAX_WINDOW, MAX_WINDOW_CHUNKS};
use super::*;
use godwit_api::{Policy, RoundSettings};

fn request(chunk: Option<u64>, window: Option<u64>) -> MigrateRequest {
    with(|options| {
        options.chunk_bytes = chunk;
        options.window_bytes = window;
    })
}

fn with(change: impl FnOnce(&mut MoveOptions)) -> MigrateRequest {
    let mut options = MoveOptions {
        policy: Some(Policy::default()),
        ..MoveOptions::default()
    };
    change(&mut options);
    MigrateRequest {
        disk: String::from("root"),
        to: String::from("b"),
        options,
        ..MigrateRequest::default()
    }
}

#[test]
fn a_place_is_said_once_and_is_possible() {
    let asked = |pool: Option<&str>, into: Option<&str>| {
        place(&MigrateRequest {
            pool: pool.map(str::to_owned),
            into: into.map(str::to_owned),
            ..plain()
        })
    };
    let pool = Place::Pool(String::from("fast"));
    let path = Place::Path(String::from("/dev/vg0/d"));
    assert_eq!(asked(None, None), Ok(None));
    assert_eq!(asked(Some("fast"), None), Ok(Some(pool)));
    assert_eq!(asked(None, Some("/dev/vg0/d")), Ok(Some(path)));
    let long = format!("/{}", "d".repeat(MAX_PLACE));
    for (pool, into) in [
        (Some("fast"), Some("/dev/vg0/d")),
        (Some("../fast"), None),
        (None, Some("d.raw")),
        (None, Some("/d\0")),
        (None, Some(&*long)),
    ] {
        let refused = asked(pool, into).expect_err("not possible");
        assert_eq!(refused.code, ErrorCode::Invalid, "{refused}");
    }
}

fn plain() -> MigrateRequest {
    with(|_| {})
}

fn refused(request: &MigrateRequest, asked: Asked) -> String {
    let error = settings(request, asked).expect_err("invalid");
    assert_eq!(error.code, ErrorCode::Invalid);
    assert!(error.message.starts_with("disk root: "), "{error}");
    assert!(error.hint.is_some(), "{error}");
    error.message
}

#[test]
fn what_is_left_open_fits_what_is_given() {
    for (chunk, window) in [
        (None, None),
        (Some(4096), None),
        (Some(64 << 10), None),
        (Some(MAX_CHUNK), None),
        (None, Some(BUSY_CHUNK)),
        (None, Some(8 << 20)),
        (None, Some((9 << 20) + 1)),
        (None, Some(MAX_WINDOW)),
        (Some(1 << 20), Some(3 << 20)),
    ] {
        let case = format!("chunk {chunk:?}, window {window:?}");
        let settings = settings(&request(chunk, window), Asked::Off).expect("valid");
        let flight = InFlight::of(&settings);
        let most = flight.window_chunks;
        assert!(u64::from(most) <= MAX_WINDOW_CHUNKS, "{case}: {most}");
        for chunks in [flight.idle_window_chunks, flight.busy_window_chunks] {
            assert!((1..=most).contains(&chunks), "{case}: {chunks} of {most}");
        }
        assert!(flight.busy_chunk_sectors <= flight.chunk_sectors, "{case}");
        assert!(settings.window_bytes <= MAX_WINDOW, "{case}");
        let chosen = [settings.idle_window_bytes, settings.busy_window_bytes];
        if let Some(window) = window {
            assert_eq!(chosen, [window; 2], "{case}");
        }
        if let Some(chunk) = chunk {
            assert_eq!(settings.chunk_bytes, chunk, "{case}");
            assert_eq!(settings.busy_chunk_bytes, chunk, "{case}");
        }
    }
}

#[test]
fn impossible_options_are_refused() {
    for (chunk, window) in [
        (Some(0), None),
        (Some(512), None),
        (Some(4097), None),
        (Some(MAX_CHUNK + 4096), None),
        (Some(8192), Some(4096)),
        (Some(4096), Some(4096 * (MAX_WINDOW_CHUNKS + 1))),
        (None, Some(u64::MAX)),
    ] {
        refused(&request(chunk, window), Asked::Auto);
    }
}

#[test]
fn nothing_moves_at_a_rate_of_zero_or_in_no_time() {
    let (zero, eth0) = (Some(0), Some(String::from("eth0")));
    for (request, what) in [
        (with(|options| options.max_bandwidth = zero), "bandwidth"),
        (
            with(|options| options.delayed_write_rate = zero),
            "delayed writes",
        ),
        (
            with(|options| (options.interface_budget, options.interface) = (zero, eth0)),
            "interface",
        ),
        (with(|options| options.deadline_seconds = zero), "deadline"),
    ] {
        let message = refused(&request, Asked::Auto);
        assert!(message.contains(what) && message.contains('0'), "{message}");
    }
}

#[test]
fn an_interface_and_its_budget_go_together() {
    let on = |interface: Option<&str>, budget| {
        with(|options| {
            options.interface = interface.map(str::to_owned);
            options.interface_budget = budget;
        })
    };
    let budget = Some(1 << 20);
    assert!(refused(&on(None, budget), Asked::Auto).contains("needs the interface"));
    let both = on(Some("lo"), budget);
    let valid = settings(&both, Asked::Off).expect("valid");
    assert!(
        valid.delayed_writes,
        "a budget pauses without a promise, too"
    );
    open_interface("root", &valid)
        .expect("loopback")
        .expect("a counter");
    refused(&on(Some("lo"), None), Asked::Auto);
    let unknown = settings(&on(Some("no-such-if"), budget), Asked::Auto);
    let error = open_interface("root", &unknown.expect("valid")).expect_err("unknown");
    assert_eq!(error.code, ErrorCode::Invalid);
    assert!(error.message.contains("disk root") && error.message.contains("no-such-if"));
    assert!(error.hint.expect("a hint").contains("lo"));
}

#[test]
fn writes_that_are_not_delayed_have_no_rate() {
    let rated = with(|options| options.delayed_write_rate = Some(1 << 20));
    let valid = settings(&rated, Asked::Auto).expect("valid");
    assert_eq!(valid.delayed_write_rate, Some(1 << 20));
    assert!(refused(&rated, Asked::Off).contains("without a promise"));
    let never = |rate| {
        with(|options| {
            options.delayed_writes = Some(false);
            options.delayed_write_rate = rate;
        })
    };
    assert!(refused(&never(Some(1 << 20)), Asked::Auto).contains("contradicts"));
    let never = never(None);
    assert!(!settings(&never, Asked::Auto).expect("valid").delayed_writes);
    assert!(
        !settings(&plain(), Asked::Off)
            .expect("valid")
            .delayed_writes
    );
}

#[test]
fn a_deadline_must_leave_the_bandwidth_enough_time() {
    let limited = |seconds, bandwidth| {
        let request = with(|options| {
            options.deadline_seconds = seconds;
            options.max_bandwidth = bandwidth;
        });
        let settings = settings(&request, Asked::Auto).expect("valid");
        check_deadline("root", &settings, 1_000_001)
    };
    limited(None, Some(1)).expect("no deadline");
    limited(Some(1), None).expect("no limit");
    limited(Some(100), Some(10_001)).expect("enough");
    let error = limited(Some(100), Some(10_000)).expect_err("too little");
    assert_eq!(error.code, ErrorCode::Invalid);
    for part in [
        "disk root",
        "976 KiB (1000001 bytes)",
        "at least 1m 41s at 9.76 KiB (10000 bytes)/s",
        "the deadline of 1m 40s",
    ] {
        assert!(error.message.contains(part), "{part}: {}", error.message);
    }
    assert!(
        error
            .hint
            .expect("a hint")
            .contains("10001 bytes)/s or more")
    );
}

#[test]
fn what_is_too_large_to_be_compared_is_refused_before_it_moves() {
    let settings = |verify| {
        let request = with(|options| options.verify = verify);
        settings(&request, Asked::Auto).expect("valid")
    };
    check_size("root", &settings(true), MAX_VERIFIED).expect("just fits");
    let larger = Bytes(1000 << 40);
    check_size("root", &settings(false), larger).expect("is not compared");
    let error = check_size("root", &settings(true), larger).expect_err("too large");
    for part in ["disk root has 1000 TiB", "up to 64 TiB"] {
        assert!(error.message.contains(part), "{part}: {}", error.message);
    }
}

#[test]
fn what_is_too_large_to_be_moved_is_refused() {
    let settings = settings(&plain(), Asked::Auto).expect("valid");
    check_size("root", &settings, MAX_MOVED).expect("just fits");
    let rounds = |block_bytes| {
        let rounds = RoundSettings {
            block_bytes,
            max_rounds: 1,
            left_bytes: 0,
        };
        let settings = MigrationSettings {
            rounds: Some(rounds),
            ..settings.clone()
        };
        check_size("root", &settings, MAX_MOVED)
    };
    rounds(65536).expect("a bitmap of 2 GiB");
    rounds(1 << 30).expect("a short bitmap");
    let error = rounds(4096).expect_err("a bitmap of 32 GiB");
    assert!(error.message.contains("64 TiB"), "{error:?}");
    let error = check_size("root", &settings, Bytes(1 << 56)).expect_err("too large");
    for part in ["disk root has 64 PiB", "up to 1 PiB"] {
        assert!(error.message.contains(part), "{part}: {}", error.message);
    }
}
