//! Records of moves as the last version kept them, one JSON file each. The node's first start takes them over into the
//! store.

use std::path::Path;

use godwit_core::units::MigrationId;
use godwit_move::Course;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Processes, durable};
use godwit_context::store::process_moves::Kind;

/// Files of the last version in a move's folder.
const IN_FOLDERS: [(&str, Kind); 2] = [
    ("outgoing.json", Kind::Outgoing),
    ("arrival.json", Kind::Arrival),
];

/// Takes over all records, and removes their files. A file that cannot be taken over stays: see [`none_is_left`].
pub(crate) fn take_over(processes: &Processes) {
    let entries = std::fs::read_dir(processes.context.config.processes_dir());
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let held = name
            .strip_prefix("held-")
            .and_then(|name| name.strip_suffix(".json"));
        if let Some(held) = held {
            take(processes, Kind::Held, held, &entry.path());
        } else if name.parse::<MigrationId>().is_ok() {
            for (file, kind) in IN_FOLDERS {
                take(processes, kind, &name, &entry.path().join(file));
            }
        }
    }
}

fn take(processes: &Processes, kind: Kind, name: &str, path: &Path) {
    if matches!(path.try_exists(), Ok(false)) {
        return;
    }
    let taken = || -> Result<(), String> {
        let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
        let old: Value = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
        let new = in_this_version(kind, old).map_err(|error| error.to_string())?;
        let store = &processes.context.store;
        let known = store.process_move::<Value>(kind, name);
        // A record in the store is newer than a file whose removal did not last.
        if known.map_err(|error| error.to_string())?.is_none() {
            let stored = store.put_process_move(kind, name, &new);
            stored.map_err(|error| error.to_string())?;
        }
        durable::remove_file(path).map_err(|error| error.to_string())
    };
    if let Err(error) = taken() {
        let why = match kind {
            Kind::Held => "a held process is not known",
            Kind::Outgoing | Kind::Arrival => "a move is not taken up: its process may be an image",
        };
        tracing::error!(
            path = %path.display(),
            error,
            "{why}; mend the file and start the node again"
        );
    }
}

/// Checks that no file of the last version is left of a move, whose record would then be unknown.
///
/// # Errors
/// One sentence.
pub(crate) fn none_is_left(folder: &Path) -> Result<(), String> {
    let is_left = |file: &&str| !matches!(folder.join(file).try_exists(), Ok(false));
    let mut left = IN_FOLDERS.iter().map(|(file, _)| *file).filter(is_left);
    left.next().map_or(Ok(()), |file| {
        Err(format!("{} cannot be read", folder.join(file).display()))
    })
}

fn in_this_version(kind: Kind, mut record: Value) -> serde_json::Result<Value> {
    match kind {
        Kind::Outgoing => {
            let subject = match record["container"].is_null() {
                true => "process",
                false => "container",
            };
            let old = OldMove::deserialize(record["moving"].take())?;
            record["moving"] = serde_json::to_value(old.course(subject)?)?;
        }
        Kind::Arrival => {
            if record["failed"] == true && record["arrival"] == "restoring" {
                record["arrival"] = json!("failed");
            }
        }
        Kind::Held => {}
    }
    Ok(record)
}

/// The course of a move in the last version.
#[derive(Deserialize)]
struct OldMove {
    step: OldStep,
    #[serde(default)]
    pre_copy: bool,
    #[serde(default)]
    copied: bool,
    #[serde(default)]
    pre_setup: bool,
    why: Option<String>,
    lost: Option<String>,
    gone: bool,
    there: bool,
    #[serde(default)]
    interrupted: bool,
    #[serde(default)]
    imaged: bool,
    #[serde(default)]
    sent: bool,
    tries: u32,
}

/// The steps of the last version, in order.
#[derive(Clone, Copy, PartialEq, PartialOrd, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OldStep {
    Wait,
    PreCopy,
    PreSetup,
    Suspend,
    Drain,
    Release,
    Dump,
    Send,
    Restore,
    Settle,
    Recreate,
    Connect,
    Resume,
    BringBack,
    RecreateHere,
    ConnectHere,
    ResumeHere,
    ResumePartners,
    End,
}

impl OldStep {
    fn now(self) -> Value {
        match self {
            Self::Wait => json!("prepare"),
            Self::PreCopy => json!({"copy": "memory"}),
            Self::PreSetup => json!({"copy": "objects"}),
            Self::Suspend => json!("stop"),
            Self::Drain => json!("drain"),
            Self::Release => json!({"freeze": "objects"}),
            Self::Dump => json!({"freeze": "image"}),
            Self::Send => json!({"send": "image"}),
            Self::Restore => json!("decide"),
            Self::Settle => json!("settle"),
            Self::Recreate => json!({"take_up": "objects"}),
            Self::Connect => json!({"take_up": "connections"}),
            Self::Resume => json!("resume"),
            Self::BringBack => json!({"take_back": "image"}),
            Self::RecreateHere => json!({"take_back": "objects"}),
            Self::ConnectHere => json!({"take_back": "connections"}),
            Self::ResumeHere => json!("resume_here"),
            Self::ResumePartners => json!("let_go"),
            Self::End => json!("end"),
        }
    }
}

impl OldMove {
    fn course(self, subject: &str) -> serde_json::Result<Course> {
        let forward = self.step < OldStep::BringBack;
        let image = if self.sent || (forward && self.step >= OldStep::Send) {
            "sending"
        } else if self.imaged || self.step == OldStep::Dump {
            "freezing"
        } else {
            "untouched"
        };
        let objects = match self.step {
            OldStep::Wait | OldStep::PreCopy | OldStep::PreSetup => "untouched",
            OldStep::Suspend | OldStep::Drain => "untouched",
            _ => "freezing",
        };
        let memory = if self.copied { "copied" } else { "untouched" };
        let copies = [(self.pre_copy, "memory"), (self.pre_setup, "objects")].into_iter();
        let left_out: Vec<Value> = copies
            .filter(|(is, _)| !is)
            .map(|(_, plane)| json!({"copy": plane}))
            .collect();
        let place = match (self.gone, self.there) {
            (true, _) => "nowhere",
            (false, true) => "there",
            (false, false) => "here",
        };
        serde_json::from_value(json!({
            "subject": subject,
            "step": self.step.now(),
            "left_out": left_out,
            "planes": {"memory": memory, "objects": objects, "image": image},
            "place": place,
            "why": self.why.map(|what| json!({"kind": "refused", "what": what})),
            "lost": self.lost,
            "interrupted": self.interrupted,
            "tries": self.tries,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_move::{Plane, Progress, Step};

    fn taken_over(step: &str, more: Value) -> Course {
        let mut old = json!({"step": step, "why": null, "lost": null, "gone": false, "there": false, "tries": 0});
        let fields = more.as_object().expect("fields").clone();
        old.as_object_mut().expect("a move").extend(fields);
        let record = json!({"id": "1", "moving": old});
        let new = in_this_version(Kind::Outgoing, record).expect("is taken over");
        serde_json::from_value(new["moving"].clone()).expect("a course")
    }

    #[test]
    fn moves_of_the_last_version_go_on_at_their_step() {
        let back = |step: &str, lives| {
            let mut course = taken_over(step, json!({}));
            course.recover(lives);
            course.step()
        };
        assert_eq!(back("wait", true), Step::End);
        assert_eq!(back("drain", true), Step::ResumeHere);
        assert_eq!(back("release", true), Step::TakeBack(Plane::Objects));
        assert_eq!(back("dump", true), Step::TakeBack(Plane::Objects));
        assert_eq!(back("dump", false), Step::TakeBack(Plane::Image));
        assert_eq!(back("send", false), Step::TakeBack(Plane::Image));
        assert_eq!(back("restore", false), Step::Settle);
        assert_eq!(back("connect_here", false), Step::LetGo);
        assert_eq!(back("connect", false), Step::TakeUp(Plane::Connections));
        let mut doubtful = taken_over("settle", json!({}));
        doubtful.happened(godwit_move::Outcome::Failed(godwit_move::Refusal::new(
            godwit_move::Kind::Refused,
            "no",
        )));
        assert_eq!(doubtful.step(), Step::TakeBack(Plane::Image));
    }

    #[test]
    fn moves_of_the_last_version_keep_what_they_know() {
        let known = json!({"pre_copy": true, "copied": true, "imaged": true, "why": "x"});
        let course = taken_over("bring_back", known);
        assert_eq!(course.progress(Plane::Memory), Progress::Copied);
        assert_eq!(course.progress(Plane::Image), Progress::Freezing);
        let ended = taken_over("end", json!({"there": true, "sent": true, "lost": "y"}));
        let lost = Some("y".to_owned());
        assert_eq!(ended.ending(), Some(godwit_move::Ending::Moved { lost }));
        assert_eq!(ended.progress(Plane::Image), Progress::Sending);
        let failed = json!({"arrival": "restoring", "failed": true});
        let failed = in_this_version(Kind::Arrival, failed).expect("is taken over");
        assert_eq!(failed["arrival"], "failed");
    }
}
