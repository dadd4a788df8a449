//! Runs of iperf3 against the guest, and their results.

use std::io;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::site::{GUEST, Site};

/// Port of a server in the guest. Each server serves a single test at a time.
const PORT: u16 = 5201;
pub(super) const MOVING_PORT: u16 = 5202;
/// Payload of a 64-byte frame: the rest is the Ethernet, IPv4 and UDP headers and the frame's checksum.
const SMALL: &str = "18";
/// Longest time for which a server may be busy with the end of the previous test.
const PATIENCE: Duration = Duration::from_secs(15);

/// The traffic through the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Workload {
    /// A TCP stream to the guest.
    StreamIn,
    /// A TCP stream from the guest.
    StreamOut,
    /// UDP in frames of 64 bytes to the guest, as many as the sender can send.
    SmallIn,
    /// UDP in frames of 64 bytes from the guest, as many as the guest can send.
    SmallOut,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Outcome {
    /// Duration of the sending.
    pub(super) seconds: f64,
    /// Megabits a second at the receiving program.
    pub(super) mbps: f64,
    /// Segments that the sender retransmitted, for a stream.
    pub(super) retransmits: Option<u64>,
    /// Datagrams at the receiving program.
    pub(super) datagrams: Option<u64>,
}

impl Workload {
    pub(super) const ALL: [Self; 4] = [
        Self::StreamIn,
        Self::StreamOut,
        Self::SmallIn,
        Self::SmallOut,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::StreamIn => "stream-in",
            Self::StreamOut => "stream-out",
            Self::SmallIn => "small-in",
            Self::SmallOut => "small-out",
        }
    }

    /// Returns true for a TCP stream.
    pub(super) const fn is_stream(self) -> bool {
        matches!(self, Self::StreamIn | Self::StreamOut)
    }

    /// Returns true for traffic to the guest.
    pub(super) const fn is_inward(self) -> bool {
        matches!(self, Self::StreamIn | Self::SmallIn)
    }

    /// Runs the workload for `seconds`.
    pub(super) fn run(self, site: &Site, seconds: u64) -> io::Result<Outcome> {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut client = site.clients().command();
            // iperf3 has no time limit for an unresponsive peer.
            client.args(["timeout", &(seconds + 30).to_string()]);
            client
                .args(command(PORT))
                .args(["--json", "-t", &seconds.to_string()]);
            if !self.is_inward() {
                client.arg("--reverse");
            }
            if !self.is_stream() {
                client.args(["--udp", "--bitrate", "0", "--length", SMALL]);
            }
            let output = client.output()?;
            let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            match said["error"].as_str() {
                Some(error) if error.contains("busy") && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(200));
                }
                Some(error) => {
                    let name = self.name();
                    return Err(io::Error::other(format!("iperf3, {name}: {error}")));
                }
                None => {
                    return self.outcome(&said).ok_or_else(|| {
                        let text = String::from_utf8_lossy(&output.stderr);
                        io::Error::other(format!("iperf3 ended with {}: {text}", output.status))
                    });
                }
            }
        }
    }

    fn outcome(self, said: &Value) -> Option<Outcome> {
        let (sent, received) = (&said["end"]["sum_sent"], &said["end"]["sum_received"]);
        let datagrams = || {
            let all = received["packets"].as_u64()?;
            Some(all.saturating_sub(received["lost_packets"].as_u64()?))
        };
        Some(Outcome {
            seconds: sent["seconds"].as_f64().filter(|seconds| *seconds > 0.0)?,
            mbps: received["bits_per_second"].as_f64()? / 1e6,
            retransmits: if self.is_stream() {
                Some(sent["retransmits"].as_u64()?)
            } else {
                None
            },
            datagrams: if self.is_stream() {
                None
            } else {
                Some(datagrams()?)
            },
        })
    }
}

/// Returns the client's command line against the guest's server at a port.
pub(super) fn command(port: u16) -> Vec<String> {
    let words = [
        "iperf3",
        "--client",
        &GUEST.to_string(),
        "--port",
        &port.to_string(),
    ];
    words.map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn iperf3_reports_streams_and_of_datagrams() {
        let stream = json!({"end": {
            "sum_sent": {"seconds": 3.0, "retransmits": 6},
            "sum_received": {"bits_per_second": 8e8},
        }});
        let outcome = Outcome {
            seconds: 3.0,
            mbps: 800.0,
            retransmits: Some(6),
            datagrams: None,
        };
        assert_eq!(Workload::StreamOut.outcome(&stream), Some(outcome));
        let small = json!({"end": {
            "sum_sent": {"seconds": 3.0},
            "sum_received": {"bits_per_second": 1e6, "packets": 100, "lost_packets": 40},
        }});
        let outcome = Workload::SmallIn
            .outcome(&small)
            .map(|outcome| outcome.datagrams);
        assert_eq!(outcome, Some(Some(60)));
        assert_eq!(Workload::SmallIn.outcome(&stream), None);
        assert_eq!(Workload::StreamIn.outcome(&json!({})), None);
    }
}
