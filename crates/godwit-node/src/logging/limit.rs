//! Keeps a guest, client or peer from filling the log: a filter over all lines, whoever causes them.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Filter};

use super::flood::{Flood, LeftOut};

/// How often it is looked whether a period has ended.
const LOOK: Duration = Duration::from_secs(1);

/// How much of a line's text is repeated when others like it were left out, in bytes.
const SAMPLE: usize = 300;

/// What the process counts. Set once, like the process's subscriber.
static COUNTED: OnceLock<Arc<Counted>> = OnceLock::new();

type Place = (Identifier, Level);

#[derive(Default)]
struct Counted {
    flood: Mutex<Flood<Place>>,
    /// Something is counted.
    begun: Condvar,
}

impl Counted {
    fn lock(&self) -> MutexGuard<'_, Flood<Place>> {
        self.flood.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells what was left out when a period has ended, also when no more lines come.
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

/// Tells what was left out so far: the process is about to end.
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

/// Lets lines through unless there are too many of their kind. Those for debugging, which are written
/// only when somebody asks for them, are never left out.
pub(super) struct Limit {
    counted: Arc<Counted>,
}

impl Limit {
    /// The process's limit.
    pub(super) fn new() -> Self {
        let counted = COUNTED.get_or_init(|| {
            let counted = Arc::<Counted>::default();
            let watched = Arc::clone(&counted);
            let name = String::from("log summaries");
            // Without the thread lines are left out all the same, and told of at the end.
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
        // What was left out is bounded by what could be written. For fail points tests wait, and there are
        // none in a release.
        let exempt = [module_path!(), "godwit_node::failpoint"];
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

/// What a line is about, and what it says.
#[derive(Default)]
struct Fields {
    subject: String,
    message: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            // Whoever is named first: a disk or machine before a peer.
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
