//! Structured logs on standard error.

mod flood;
mod journal;
mod limit;

use std::io::IsTerminal;

use tracing_subscriber::filter::FilterExt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, registry};

use self::journal::Prioritized;
pub(crate) use self::limit::tell_left_out;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// A JSON object per line.
    Json,
}

/// Sends the process's logs to standard error, with priorities if standard error is systemd's journal. `RUST_LOG`
/// selects the logged lines; the default is everything from `info` up. Beyond a few, endlessly repeated lines are
/// counted instead of written. Does nothing if logging is set up already.
pub fn init_logging(format: LogFormat) {
    // Warnings of the TLS library concern input from strangers, such as an address for a name. The listener logs the
    // reason for a refused connection.
    let usual = || EnvFilter::new("info,rustls=error");
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    let asked = (!asked.is_empty()).then(|| EnvFilter::try_new(asked));
    let filter = asked.and_then(Result::ok).unwrap_or_else(usual);
    let filter = filter.and(limit::Limit::new());
    let logs = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let to_journal = journal::takes(std::io::stderr());
    // The only failure is a subscriber that the process already has, which then stays.
    let _ = match (format, to_journal) {
        (LogFormat::Text, false) => registry().with(logs.with_filter(filter)).try_init(),
        (LogFormat::Text, true) => {
            let lines = tracing_subscriber::fmt::format().without_time();
            let logs = logs.event_format(Prioritized(lines));
            registry().with(logs.with_filter(filter)).try_init()
        }
        (LogFormat::Json, false) => {
            let logs = logs.json().flatten_event(true).with_filter(filter);
            registry().with(logs).try_init()
        }
        (LogFormat::Json, true) => {
            let logs = logs
                .json()
                .flatten_event(true)
                .map_event_format(Prioritized);
            registry().with(logs.with_filter(filter)).try_init()
        }
    };
}
