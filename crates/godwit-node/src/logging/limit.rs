//! A filter over all log lines that keeps a guest, client or peer from filling the log.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter};

use super::flood::{Flood, LeftOut};

/// Time between two checks for ended periods.
const LOOK: Duration = Duration::from_secs(1);

/// Longest sample of an omitted line, in bytes.
const SAMPLE: usize = 300;

/// The counts of the process. Set once, like the process's subscriber.
static COUNTED: OnceLock<Arc<Counted>> = OnceLock::new();

type Place = (Identifier, Level);

#[derive(Default)]
struct Counted {
    flood: Mutex<Flood<Place>>,
    /// Signals that a first line was counted.
    begun: Condvar,
}

impl Counted {
    fn lock(&self) -> MutexGuard<'_, Flood<Place>> {
        self.flood.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the summaries of ended periods, also if no more lines come.
    fn watch(&self) {
        loop {
            let mut flood = self.lock();
            while flood.is_empty() {
                flood = self
                    .begun
                    .wait(flood)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            drop(flood);
            thread::sleep(LOOK);
            let ended = self.lock().ended(Instant::now());
            ended.iter().for_each(tell);
        }
    }
}

/// Writes the summaries so far, before the process ends.
pub(crate) fn tell_left_out() {
    if let Some(counted) = COUNTED.get() {
        let all = counted.lock().all(Instant::now());
        all.iter().for_each(tell);
    }
}

fn tell(left_out: &LeftOut<Place>) {
    let LeftOut {
        place: (_, level),
        subject,
        lines,
        seconds,
        sample,
    } = left_out;
    let about = (!subject.is_empty()).then_some(&**subject);
    macro_rules! tell {
        ($level:expr) => {
            tracing::event!(
                $level,
                about,
                left_out = lines,
                "… {lines} more like this in the last {seconds} s: {sample}"
            )
        };
    }
    match *level {
        Level::ERROR => tell!(Level::ERROR),
        Level::WARN => tell!(Level::WARN),
        _ => tell!(Level::INFO),
    }
}

/// Lets lines through up to a limit for each kind. Debug lines, which are written only on request, are never omitted.
pub(super) struct Limit {
    counted: Arc<Counted>,
}

impl Limit {
    /// Returns the limit of the process.
    pub(super) fn new() -> Self {
        let counted = COUNTED.get_or_init(|| {
            let counted = Arc::<Counted>::default();
            let watched = Arc::clone(&counted);
            let name = String::from("log summaries");
            // Without the thread, lines are omitted all the same, and summed up at the end.
            let _ = thread::Builder::new()
                .name(name)
                .spawn(move || watched.watch());
            counted
        });
        Self {
            counted: Arc::clone(counted),
        }
    }
}

impl<S: Subscriber> Filter<S> for Limit {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        // Summaries are bounded by the lines that could be written. Tests wait for fail points, and a release has no
        // fail points.
        let exempt = [module_path!(), "godwit_context::failpoint"];
        if *metadata.level() > Level::INFO || exempt.contains(&metadata.target()) {
            return true;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let place = (metadata.callsite(), *metadata.level());
        let mut flood = self.counted.lock();
        if flood.is_empty() {
            self.counted.begun.notify_one();
        }
        flood.admit(Instant::now(), place, &fields.subject, || fields.message)
    }
}

/// The subject and the text of a line.
#[derive(Default)]
struct Fields {
    subject: String,
    message: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            // The first subject wins: a disk or VM before a peer.
            "disk" | "vm" => value.clone_into(&mut self.subject),
            "peer" if self.subject.is_empty() => value.clone_into(&mut self.subject),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => {
                // Writing to a string cannot fail.
                let _ = write!(self.message, "{value:?}");
                self.message
                    .truncate(self.message.floor_char_boundary(SAMPLE));
            }
            "disk" | "vm" => self.subject = format!("{value:?}"),
            _ => {}
        }
    }
}
