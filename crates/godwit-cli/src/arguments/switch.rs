//! Changes to the options of a running migration.

use clap::{Args, ValueEnum};

use crate::show::units::{InvalidSize, parse_duration, parse_rate};

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("change").required(true).multiple(true)
    .args(["policy", "sla", "deadline", "max_bandwidth"]))]
pub(crate) struct SwitchArguments {
    /// Its id, or as many of its first digits as tell it apart
    pub id: String,
    /// How it goes on, whatever it was before
    #[arg(long, value_enum)]
    pub policy: Option<LeavingPolicy>,
    /// With push-pull: a chunk of 64K that is written so often from now on is pushed no more; 3 when left out
    #[arg(long, value_name = "WRITES", requires = "policy",
        value_parser = clap::value_parser!(u8).range(1..))]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds from now after which the disk changes hands; at once when left out
    #[arg(long, value_name = "SECONDS", requires = "policy")]
    pub push_for: Option<u64>,
    /// What the guest is promised from now on
    #[arg(long, value_name = "off|pNN<TIME")]
    pub sla: Option<String>,
    /// How long the copy may take, from the migration's start, like 30m
    #[arg(long, value_name = "TIME|none", value_parser = parse_deadline)]
    pub deadline: Option<u64>,
    /// Most bytes per second that the migration may take
    #[arg(long, value_name = "SIZE[/s]|none", value_parser = parse_bandwidth)]
    pub max_bandwidth: Option<u64>,
}

/// A policy that can be taken up in the midst of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LeavingPolicy {
    /// The disk changes hands with what is there, and the destination pulls the rest
    PushPull,
    /// The same, and nothing more is pushed
    PostCopy,
}

/// Parses a deadline; `none` is 0.
fn parse_deadline(text: &str) -> Result<u64, InvalidSize> {
    match text {
        "none" => Ok(0),
        _ => parse_duration(text),
    }
}

/// Parses a bandwidth; `none` is 0.
fn parse_bandwidth(text: &str) -> Result<u64, InvalidSize> {
    match text {
        "none" => Ok(0),
        _ => parse_rate(text),
    }
}
