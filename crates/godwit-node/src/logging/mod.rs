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

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Sends the process's logs to standard error, with priorities when that is systemd's journal. `RUST_LOG` chooses what is logged; without it,
/// everything from `info` up. Of lines that repeat without end, those beyond a few are counted instead.
/// Does nothing when logging is set up already.
pub fn init_logging(format: LogFormat) {
    // What the TLS library warns of is what strangers send, such as an address for a name, of which nobody
    // need know; why one was turned away is told where that happens.
    let usual = || EnvFilter::new("info,rustls=error");
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    let asked = (!asked.is_empty()).then(|| EnvFilter::try_new(asked));
    let filter = asked.and_then(Result::ok).unwrap_or_else(usual);
    let filter = filter.and(limit::Limit::new());
    let logs = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let to_journal = journal::takes(std::io::stderr());
    // The only failure is that the process has a subscriber, which then stays.
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
