//! The arguments of `godwit migrate`, and the words that it took the place of.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, ValueHint};
use godwit_api::{MemoryMode, MoveOptions, ProcessMoveOptions};

use super::nic::parse_uplink;

// A heading names the kinds of subjects that its options are for: see `check`.
const DISK: &str = "For a disk";
const MACHINE: &str = "For a virtual machine";
const DISK_OR_MACHINE: &str = "For a disk or a virtual machine";
const PROCESS: &str = "For a process";
const PROCESS_OR_CONTAINER: &str = "For a process or a container";

#[derive(Debug, Args)]
pub(crate) struct MigrateArguments {
    /// The disk, virtual machine with its disks, process with those that descend from it, or container under runc
    #[arg(
        value_name = "DISK|vm/NAME|process/PID|container/ID",
        required_unless_present = "cgroup"
    )]
    pub subject: Option<Subject>,
    /// In place of process/PID: the process of this control group that has started all others in it
    #[arg(long, value_name = "PATH", value_hint = ValueHint::DirPath, conflicts_with = "subject")]
    pub cgroup: Option<PathBuf>,
    /// The node to move it to
    #[arg(long, value_name = "NODE")]
    pub to: String,
    /// Print the migration's id and return at once
    #[arg(long)]
    pub detach: bool,
    /// The destination's pool for the images; the node's data directory if left out
    #[arg(long, value_name = "NAME", conflicts_with = "into", help_heading = DISK_OR_MACHINE)]
    pub pool: Option<String>,
    #[command(flatten, next_help_heading = DISK_OR_MACHINE)]
    pub options: MoveOptions,
    /// Wait until the source is needed no more: until all of each disk has been pulled
    #[arg(long, conflicts_with = "detach", help_heading = DISK_OR_MACHINE)]
    pub wait: bool,
    /// The image's path in one of the destination's pools: a new file, or a block device, which loses what it holds
    #[arg(long, value_name = "PATH", help_heading = DISK)]
    pub into: Option<String>,
    /// Wait for a machine that virsh or QEMU moves: its start there moves the disk
    #[arg(long, help_heading = DISK)]
    pub with_guest: bool,
    /// What a tap or bridge of its NICs is called there, if not the same (repeat for more)
    #[arg(long = "uplink", value_name = "NAME=NAME", value_parser = parse_uplink, help_heading = MACHINE)]
    pub uplinks: Vec<(String, String)>,
    /// When its memory moves: pre-copy if left out
    #[arg(long, value_enum, help_heading = MACHINE)]
    pub memory: Option<MemoryMode>,
    /// With --memory zero-copy: leave the memory in the memory pool, on which the guest then depends
    #[arg(long, help_heading = MACHINE)]
    pub stay_in_pool: bool,
    #[command(flatten, next_help_heading = PROCESS_OR_CONTAINER)]
    pub of_process: ProcessMoveOptions,
    /// Make the device's objects at the destination and at partners while the process still works
    #[arg(long, help_heading = PROCESS)]
    pub pre_setup: bool,
}

/// The subject of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    Disk(String),
    Machine(String),
    Process(u32),
    Container(String),
}

impl Subject {
    const fn kind(&self) -> &'static str {
        match self {
            Self::Disk(_) => "a disk",
            Self::Machine(_) => "a virtual machine",
            Self::Process(_) => "a process",
            Self::Container(_) => "a container",
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(name) => f.write_str(name),
            Self::Machine(name) => write!(f, "vm/{name}"),
            Self::Process(pid) => write!(f, "process/{pid}"),
            Self::Container(id) => write!(f, "container/{id}"),
        }
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((kind, name)) = text.split_once('/') else {
            return Ok(Self::Disk(text.to_owned()));
        };
        match kind {
            "vm" => Ok(Self::Machine(name.to_owned())),
            "process" => match name.parse() {
                Ok(pid) => Ok(Self::Process(pid)),
                Err(_) => Err(format!("{name:?} is no number of a process")),
            },
            "container" => Ok(Self::Container(name.to_owned())),
            _ => Err(format!("{kind:?} is no kind of what can move")),
        }
    }
}

/// Refuses options that are not for the kind of the subject.
///
/// # Errors
/// Names the option and the kinds that it is for.
pub(super) fn check(command: &mut Command, found: &ArgMatches) -> Result<(), clap::Error> {
    let (Some(found), Some(command)) = (
        found.subcommand_matches("migrate"),
        command.find_subcommand_mut("migrate"),
    ) else {
        return Ok(());
    };
    let subject = found.get_one::<Subject>("subject");
    // Only a process is named otherwise, by its control group.
    let kind = subject.map_or("a process", Subject::kind);
    let wrong = command.get_arguments().find_map(|argument| {
        let kinds = argument.get_help_heading()?.strip_prefix("For ")?;
        let given =
            found.value_source(argument.get_id().as_str()) == Some(ValueSource::CommandLine);
        let wrong = given && !kinds.contains(kind);
        wrong.then(|| {
            let option = argument.get_long().unwrap_or_default();
            let subject = subject.map_or_else(|| String::from("--cgroup"), Subject::to_string);
            let instead = instead(argument.get_id().as_str(), kind);
            format!("--{option} is for {kinds}, and {subject} is {kind}{instead}")
        })
    });
    match wrong {
        None => Ok(()),
        Some(text) => Err(command.error(ErrorKind::ArgumentConflict, text)),
    }
}

/// Returns the next step after an option that is not for this kind.
fn instead(option: &str, kind: &str) -> &'static str {
    match (option, kind) {
        ("into", "a virtual machine") => {
            "; give --pool NAME: each disk gets an image of its name there"
        }
        ("with_guest", "a virtual machine") => "; leave it out, or give one of its disks",
        ("memory" | "stay_in_pool" | "uplinks", "a disk") => "; for a virtual machine give vm/NAME",
        _ => "",
    }
}

/// Former commands, and the commands in their place.
const FORMER: [([&str; 2], &str); 5] = [
    (
        ["process", "migrate"],
        "'godwit migrate process/PID --to NODE'",
    ),
    (["process", "moves"], "'godwit migration list'"),
    (["process", "watch"], "'godwit migration watch ID'"),
    (["process", "cancel"], "'godwit migration cancel ID'"),
    (
        ["container", "migrate"],
        "'godwit migrate container/ID --to NODE'",
    ),
];

/// Returns a sentence about a former command in a command line that is not understood.
pub(super) fn former(words: &[OsString]) -> Option<String> {
    let is_option = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
    let words: Vec<_> = words.iter().filter(|word| !is_option(word)).collect();
    let mut pairs = words.windows(2);
    let ([of, word], now) = pairs.find_map(|pair| {
        let is = |(former, _): &&([&str; 2], &str)| pair[0] == former[0] && pair[1] == former[1];
        FORMER.iter().find(is)
    })?;
    Some(format!("instead of '{of} {word}' there is {now}"))
}
