//! Output on terminals of several widths.

use std::process::Command;

use godwit_node::api::{GuestLatency, Migration, MigrationPhase};

use super::fake::{FakeApi, Ran, ok, seen};
use super::{get_migration, migration};

/// Returns the output of a followed migration on a terminal of this name and width.
fn followed(term: &str, columns: usize) -> String {
    let copying = Migration {
        rate_bytes_per_second: Some(312.0 * 1048576.0),
        eta_seconds: Some(125.0),
        guest: Some(GuestLatency {
            p50_us: 90,
            p99_us: 180,
            p9999_us: 1200,
            max_us: 2000,
            iops: 10_000.0,
        }),
        ..migration(MigrationPhase::Copying, 1 << 29)
    };
    let mut answers = vec![seen(copying.clone()); 6];
    answers.push(seen(migration(MigrationPhase::Completed, 1 << 30)));
    let api = FakeApi::start(&[
        ("POST /v1/migrations", vec![ok(copying)]),
        (&get_migration(), answers),
    ]);
    let inside = api.command(&["migrate", "d", "--to", "b"]);
    let program = inside.get_program().to_str().unwrap();
    // `script` runs the command on a new terminal, and `stty` sets the width.
    let line = format!("stty cols {columns} rows 24; exec {program} migrate d --to b");
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    for (name, value) in inside.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let ran = Ran::from(command.env("TERM", term).output().unwrap());
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    ran.stdout
}

#[test]
fn rate_time_left_and_p99_are_seen_however_narrow_the_terminal_is() {
    std::thread::scope(|scope| {
        let terminals =
            [60, 80, 120].map(|columns| (columns, scope.spawn(move || followed("xterm", columns))));
        for (columns, seen) in terminals {
            let seen = seen.join().unwrap();
            let line = seen
                .split(['\r', '\n'])
                .find(|line| line.contains("312 MiB/s"))
                .unwrap_or_else(|| panic!("no rate in {columns} columns: {seen:?}"));
            for promised in ["50%", "ETA 2m 05s", "p99 180 µs"] {
                assert!(line.contains(promised), "{promised}, {columns}: {line:?}");
            }
            for more in ["d: copying to b, 512 MiB left", "p99.99 1.2 ms"] {
                assert_eq!(line.contains(more), columns == 120, "{more}: {line:?}");
            }
        }
    });
}

#[test]
fn a_terminal_that_cannot_redraw_gets_lines() {
    let seen = followed("dumb", 80);
    assert!(!seen.contains('\u{1b}'), "{seen:?}");
    let mut lines = seen.lines();
    let line = lines.find(|line| line.starts_with("d: copying to b, 512 MiB of 1.00 GiB left"));
    assert!(line.is_some(), "{seen:?}");
}
