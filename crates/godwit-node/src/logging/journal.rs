//! Log lines for systemd's journal, which adds the time and takes the priority from a prefix (sd-daemon(3)).

use std::fmt;
use std::os::fd::AsFd;

use rustix::fs::fstat;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// Returns true if the file leads to the journal: the service manager named the file in `JOURNAL_STREAM`.
pub(super) fn takes(file: impl AsFd) -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    fstat(file).is_ok_and(|status| named == format!("{}:{}", status.st_dev, status.st_ino))
}

/// Puts the priority before each line.
pub(super) struct Prioritized<F>(pub(super) F);

impl<S, N, F> FormatEvent<S, N> for Prioritized<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

/// Returns the priority of syslog(3) for a level.
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::sync::Mutex;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn lines_for_the_journal_have_a_priority_and_no_time() {
        let mut file = tempfile::tempfile().expect("a file");
        let writer = Mutex::new(file.try_clone().expect("a copy"));
        let format = Prioritized(tracing_subscriber::fmt::format().without_time());
        let layer = tracing_subscriber::fmt::layer().with_ansi(false);
        let layer = layer.event_format(format).with_writer(writer);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::error!("broken");
            tracing::warn!("odd");
            tracing::info!("fine");
        });
        let mut text = String::new();
        file.rewind().expect("rewinds");
        file.read_to_string(&mut text).expect("reads");
        let begins: Vec<_> = text
            .lines()
            .map(|line| line.split_whitespace().next())
            .collect();
        assert_eq!(
            begins,
            [Some("<3>ERROR"), Some("<4>"), Some("<6>")],
            "{text}"
        );
    }

    #[test]
    fn only_the_named_file_is_the_journal() {
        assert!(!takes(tempfile::tempfile().expect("a file")));
    }
}
