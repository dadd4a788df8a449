//! Options of a disk's move: requested, changed during the move, and in effect.
//!
//! A new option is a field of [`MoveOptions`], from which the API's requests and the command line take it, and of
//! [`MigrationSettings`]. The node's `migrations/options` checks it, completes it, and passes it on to the engine.

pub(crate) mod policy;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use self::policy::Policy;
use crate::text::{format_bytes, format_rate, format_seconds};

#[cfg(feature = "clap")]
use self::arguments::*;

/// Options of a move of one disk, or of each disk of a VM. Options that are left out have the node's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct MoveOptions {
    /// Policy of the move. Left out, the node chooses for each disk, and may choose again during the move.
    // The path keeps clap from taking the option itself for optional: the value `auto` is `None`.
    #[cfg_attr(feature = "clap", arg(long, value_parser = policy_or_auto(), default_value = "auto"))]
    pub policy: core::option::Option<Policy>,
    /// With pre-copy: bytes of a block in the dirty bitmap, a multiple of 4K up to 1G; 64K if left out.
    #[schema(minimum = 4096, maximum = 1_073_741_824, multiple_of = 4096)]
    #[cfg_attr(feature = "clap", arg(long = "round-block", value_name = "SIZE", value_parser = parse_size))]
    pub round_block_bytes: Option<u64>,
    /// With pre-copy: rounds, the first over the whole disk, after which writes go to both nodes; 8 if left out.
    #[schema(minimum = 1)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "NUMBER"))]
    pub max_rounds: Option<u32>,
    /// With pre-copy: most bytes of a disk that are copied while the guest is held; 4M if left out.
    #[cfg_attr(feature = "clap", arg(long = "round-left", value_name = "SIZE", value_parser = parse_size))]
    pub round_left_bytes: Option<u64>,
    /// With push-pull: number of writes during the move after which a chunk of 64K is no longer pushed; 3 if left out.
    #[schema(minimum = 1, maximum = 255)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "WRITES",
        value_parser = clap::value_parser!(u8).range(1..)))]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds after which a disk changes hands, even if chunks are left to push.
    #[cfg_attr(feature = "clap", arg(long = "push-for", value_name = "SECONDS"))]
    pub push_seconds: Option<u64>,
    /// Most bytes in flight between both disks, from one chunk up to 64 chunks and 32M; chosen by the node if left out.
    #[schema(minimum = 4096, maximum = 33_554_432)]
    #[cfg_attr(feature = "clap", arg(long = "window", value_name = "SIZE", value_parser = parse_size))]
    pub window_bytes: Option<u64>,
    /// Bytes per copy, a multiple of 4K up to 16M; 1M, and 256K while the guest works, if left out.
    #[schema(minimum = 4096, maximum = 16_777_216, multiple_of = 4096)]
    #[cfg_attr(feature = "clap", arg(long = "chunk", value_name = "SIZE", value_parser = parse_size))]
    pub chunk_bytes: Option<u64>,
    /// Latency promised to the guest: auto, off, or a percentile and a time such as 'p99.99<2ms'.
    ///
    /// The move pauses rather than break the promise. With auto the node measures the guest, and promises that p99.99
    /// grows by no more than a quarter, or stays below 3 ms (10 ms for a guest that has asked for little before).
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "auto|off|pNN<TIME", default_value = "auto")
    )]
    pub sla: Option<String>,
    /// While the move pauses, keep the guest's writes at the source and send them later; otherwise they go to both
    /// nodes. On if left out.
    #[cfg_attr(feature = "clap", arg(long, value_name = "on|off", value_parser = on_or_off(), default_value = "on"))]
    pub delayed_writes: Option<bool>,
    /// Most bytes per second of delayed writes; chosen by the node if left out.
    #[schema(minimum = 1)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE[/s]", value_parser = parse_rate))]
    pub delayed_write_rate: Option<u64>,
    /// Time within which the first pass should end, in seconds, or like 30m; near the end it goes before the promise.
    #[schema(minimum = 1)]
    #[cfg_attr(feature = "clap", arg(long = "deadline", value_name = "TIME", value_parser = parse_duration))]
    pub deadline_seconds: Option<u64>,
    /// Most bytes per second of copies, double writes and delayed writes; the guest's writes are never held back.
    #[schema(minimum = 1)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE[/s]", value_parser = parse_rate))]
    pub max_bandwidth: Option<u64>,
    /// The node's network interface that has the budget.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "NAME", requires = "interface_budget")
    )]
    pub interface: Option<String>,
    /// Most bytes per second that may leave through the interface, other traffic included; above the budget the move
    /// pauses.
    #[schema(minimum = 1)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE[/s]", value_parser = parse_rate,
        requires = "interface"))]
    pub interface_budget: Option<u64>,
    /// Compare both images by hash before switchover; disks of up to 64T.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long))]
    pub verify: bool,
    /// Send the whole disk, even if the destination holds an older copy.
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long = "no-delta"))]
    pub whole: bool,
}

/// A request to change the options of a running move. Options that are left out stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "clap", derive(clap::Args), command(group = clap::ArgGroup::new("change").required(true)
    .multiple(true).args(["policy", "sla", "deadline_seconds", "max_bandwidth"])))]
pub struct SwitchMigration {
    /// Push-pull or post-copy, whatever the policy before: the disk changes hands with the data already sent, and the
    /// destination pulls the rest.
    #[cfg_attr(feature = "clap", arg(long, value_parser = leaving_policy()))]
    pub policy: Option<Policy>,
    /// With push-pull: number of writes from now on after which a chunk of 64K is no longer pushed; 3 if left out.
    #[schema(minimum = 1, maximum = 255)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "WRITES", requires = "policy",
        value_parser = clap::value_parser!(u8).range(1..)))]
    pub push_threshold: Option<u8>,
    /// With push-pull: seconds from now after which the disk changes hands, even if chunks are left to push. Left out,
    /// the disk changes hands when no chunk is left to push.
    #[cfg_attr(
        feature = "clap",
        arg(
            long = "push-for",
            value_name = "SECONDS",
            requires = "policy",
            help = "With push-pull: seconds from now after which the disk changes hands; at once if left out"
        )
    )]
    pub push_seconds: Option<u64>,
    /// Latency promised to the guest from now on: off, or a percentile and a time such as 'p99.99<2ms'.
    #[cfg_attr(feature = "clap", arg(long, value_name = "off|pNN<TIME"))]
    pub sla: Option<String>,
    /// Time from the move's start within which the first pass should end, in seconds, or like 30m; 0 for no deadline.
    #[cfg_attr(feature = "clap", arg(long = "deadline", value_name = "TIME|none", value_parser = deadline_or_none))]
    pub deadline_seconds: Option<u64>,
    /// Most bytes per second of copies, double writes and delayed writes; 0 for no limit.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE[/s]|none", value_parser = rate_or_none))]
    pub max_bandwidth: Option<u64>,
}

/// Values of the command line.
#[cfg(feature = "clap")]
mod arguments {
    use std::iter::once;

    use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
    use godwit_core::{POLICIES, PolicyDescription};

    use super::Policy;
    use crate::text::InvalidSize;
    pub(super) use crate::text::{parse_duration, parse_rate, parse_size};

    fn value(policy: &PolicyDescription) -> PossibleValue {
        PossibleValue::new(policy.name).help(policy.summary)
    }

    pub(super) fn policy_or_auto() -> impl TypedValueParser<Value = Option<Policy>> {
        let help = "double-write; push-pull if that cannot end, or its deadline has come";
        let auto = PossibleValue::new("auto").help(help);
        PossibleValuesParser::new(once(auto).chain(POLICIES.map(value)))
            .map(|name| Policy::named(&name))
    }

    pub(super) fn leaving_policy() -> impl TypedValueParser<Value = Policy> {
        let leaving = POLICIES.into_iter().filter(|policy| policy.pulls());
        PossibleValuesParser::new(leaving.map(value))
            .try_map(|name| Policy::named(&name).ok_or(name))
    }

    pub(super) fn on_or_off() -> impl TypedValueParser<Value = bool> {
        PossibleValuesParser::new(["on", "off"]).map(|word| word == "on")
    }

    pub(super) fn deadline_or_none(text: &str) -> Result<u64, InvalidSize> {
        match text {
            "none" => Ok(0),
            _ => parse_duration(text),
        }
    }

    pub(super) fn rate_or_none(text: &str) -> Result<u64, InvalidSize> {
        match text {
            "none" => Ok(0),
            _ => parse_rate(text),
        }
    }
}

/// The settings of pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RoundSettings {
    /// Bytes of a block in the record of written blocks.
    pub block_bytes: u64,
    /// Rounds after which the guest's writes go to both nodes if too much is left.
    pub max_rounds: u32,
    /// Most bytes that are copied while the guest is held.
    pub left_bytes: u64,
}

/// The settings of the push phase before a disk changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PushSettings {
    /// Number of writes after which a chunk of 64 KiB is no longer pushed.
    pub threshold: u8,
    /// Seconds after which the disk changes hands, even if chunks are left to push.
    pub longest_seconds: Option<u64>,
}

/// The options of a migration in effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationSettings {
    /// Policy of the move.
    pub policy: Policy,
    /// The reason for the policy, if the node chose it.
    #[serde(default)]
    pub policy_reason: Option<String>,
    /// Settings of pre-copy; absent with another policy.
    #[serde(default)]
    pub rounds: Option<RoundSettings>,
    /// Settings of the push phase; absent with a policy that pulls nothing.
    #[serde(default)]
    pub push: Option<PushSettings>,
    /// Most bytes in flight from the source's disk to the destination's.
    pub window_bytes: u64,
    /// Bytes in flight while the guest is idle; up to `window_bytes` while copies are quick.
    #[serde(default)]
    pub idle_window_bytes: u64,
    /// Most bytes in flight while the guest does I/O.
    #[serde(default)]
    pub busy_window_bytes: u64,
    /// Bytes per copy.
    pub chunk_bytes: u64,
    /// Bytes per copy while the guest does I/O.
    #[serde(default)]
    pub busy_chunk_bytes: u64,
    /// Most bytes per second of copies, double writes and delayed writes.
    pub max_bandwidth: Option<u64>,
    /// True if both images are compared before switchover.
    pub verify: bool,
    /// True if the whole disk is sent, even if the destination holds an older copy.
    #[serde(default)]
    pub whole: bool,
    /// True if the switchover waits for the guest's hypervisor.
    #[serde(default)]
    pub with_guest: bool,
    /// The latency promised to the guest, such as `p99.99<3.2ms`; absent without a promise.
    #[serde(default)]
    pub sla: Option<String>,
    /// True if the node chose the promise.
    #[serde(default)]
    pub sla_auto: bool,
    /// True if the guest's writes stay at the source during pauses and are sent later.
    #[serde(default)]
    pub delayed_writes: bool,
    /// Most bytes per second of delayed writes; chosen by the node if absent.
    #[serde(default)]
    pub delayed_write_rate: Option<u64>,
    /// Seconds from the start within which the first pass should end.
    #[serde(default)]
    pub deadline_seconds: Option<u64>,
    /// The network interface that is watched.
    #[serde(default)]
    pub interface: Option<String>,
    /// Most bytes per second that may leave through the interface, other traffic included.
    #[serde(default)]
    pub interface_budget: Option<u64>,
}

impl MigrationSettings {
    /// Describes the settings in short words.
    pub fn words(&self) -> Vec<String> {
        let rate = |bytes: u64| format_rate(bytes as f64);
        let time = |seconds: u64| format_seconds(seconds as f64);
        let mut words = vec![
            self.policy.name.to_owned(),
            format!("window {}", format_bytes(self.window_bytes)),
            format!("chunk {}", format_bytes(self.chunk_bytes)),
        ];
        if let Some(rounds) = &self.rounds {
            words.push(format!(
                "{} rounds at most over blocks of {} until {} are left",
                rounds.max_rounds,
                format_bytes(rounds.block_bytes),
                format_bytes(rounds.left_bytes)
            ));
        }
        if let Some(push) = self.push.filter(|push| push.threshold > 0) {
            let writes = push.threshold;
            words.push(format!("pushes what was written less than {writes} times"));
            if let Some(seconds) = push.longest_seconds {
                words.push(format!("pushes for {} at most", time(seconds)));
            }
        }
        if let Some(limit) = self.max_bandwidth {
            words.push(format!("at most {}", rate(limit)));
        }
        if let Some(seconds) = self.deadline_seconds {
            words.push(format!("within {}", time(seconds)));
        }
        if let (Some(interface), Some(budget)) = (&self.interface, self.interface_budget) {
            words.push(format!("{interface} at most {}", rate(budget)));
        }
        match self.delayed_write_rate {
            Some(limit) => words.push(format!("delayed writes at most {}", rate(limit))),
            None if self.delayed_writes => words.push("delayed writes".to_owned()),
            None => {}
        }
        if self.verify {
            words.push("verify".to_owned());
        }
        if self.whole {
            words.push("no delta".to_owned());
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::MigrateRequest;

    fn read(json: &str) -> Result<MigrateRequest, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn options_stand_beside_the_other_fields() {
        let request =
            read(r#"{"disk": "d", "to": "b", "policy": "push-pull", "push_threshold": 2}"#);
        let request = request.expect("valid");
        assert_eq!(request.options.policy, Policy::named("push-pull"));
        assert_eq!(request.options.push_threshold, Some(2));
        let written = serde_json::to_value(&request).expect("is JSON");
        assert_eq!(written["push_threshold"], 2);
        assert_eq!(written["verify"], false);
    }

    #[test]
    fn unknown_and_missing_fields_are_refused() {
        let unknown = read(r#"{"disk": "d", "to": "b", "speed": 1}"#).expect_err("unknown");
        assert!(unknown.to_string().contains("speed"), "{unknown}");
        let missing = read(r#"{"to": "b"}"#).expect_err("missing");
        assert!(missing.to_string().contains("disk"), "{missing}");
        let wrong = read(r#"{"disk": "d", "to": "b", "chunk_bytes": "1M"}"#);
        wrong.expect_err("not a number");
    }
}
