//! Clients of the guest's web server.

use std::io;

use godwit_testkit::process::run;

use crate::net::{GUEST, Site};

/// Seconds that a request may wait.
const TIMEOUT: &str = "30s";

/// The clients' view of a time under load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Answers {
    pub(super) seconds: f64,
    pub(super) per_second: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

/// Has clients ask for 10 KiB again and again, over this many connections, for this time.
pub(super) fn load(site: &Site, connections: u32, seconds: u64) -> io::Result<Answers> {
    let mut wrk = site.clients().command();
    let (connections, time) = (connections.to_string(), seconds.to_string());
    wrk.args([
        "wrk",
        "--latency",
        "-t",
        "1",
        "-c",
        &connections,
        "-d",
        &time,
        "--timeout",
        TIMEOUT,
    ]);
    wrk.arg(format!("http://{}/10k", GUEST));
    let output = run(&mut wrk)?;
    let said = String::from_utf8_lossy(&output.stdout);
    answers(&said).ok_or_else(|| io::Error::other(format!("wrk said: {said}")))
}

/// Reads wrk's report. Returns nothing if a request failed.
fn answers(said: &str) -> Option<Answers> {
    if said.contains("Socket errors") || said.contains("Non-2xx") {
        return None;
    }
    let after = |name: &str| {
        let line = said
            .lines()
            .find_map(|line| line.trim().strip_prefix(name))?;
        line.split_whitespace().next()
    };
    let words = said.lines().find(|line| line.contains(" requests in "))?;
    let taken = words.split(" requests in ").nth(1)?.split(',').next()?;
    Some(Answers {
        seconds: milliseconds(taken)? / 1e3,
        per_second: after("Requests/sec:")?.parse().ok()?,
        p50_ms: milliseconds(after("50%")?)?,
        p99_ms: milliseconds(after("99%")?)?,
    })
}

/// Returns a time such as `1.25ms` in milliseconds.
fn milliseconds(text: &str) -> Option<f64> {
    let (unit, factor) = [("us", 1e-3), ("ms", 1.0), ("s", 1e3), ("m", 6e4)]
        .into_iter()
        .find(|(unit, _)| text.ends_with(unit))?;
    Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "Running 8s test @ http://10.80.0.10/10k\n  1 threads and 64 connections\n  \
        Thread Stats   Avg      Stdev     Max   +/- Stdev\n    Latency    52.31ms   11.02ms 104.12ms   71.0%\n    \
        Req/Sec     1.21k    98.0      1.40k    70.00%\n  Latency Distribution\n     50%   51.50ms\n     75%   60.01ms\n     \
        90%   66.20ms\n     99%    1.25s \n  9712 requests in 8.01s, 96.80MB read\nRequests/sec:   1212.48\n\
        Transfer/sec:     12.08MB\n";

    #[test]
    fn a_report_of_wrk_is_read() {
        let read = Answers {
            seconds: 8.01,
            per_second: 1212.48,
            p50_ms: 51.5,
            p99_ms: 1250.0,
        };
        assert_eq!(answers(SAID), Some(read));
    }

    #[test]
    fn a_failed_request_is_no_result() {
        let failed = format!("{SAID}  Socket errors: connect 0, read 1, write 0, timeout 0\n");
        assert_eq!(answers(&failed), None);
        assert_eq!(answers("unable to connect"), None);
    }
}
