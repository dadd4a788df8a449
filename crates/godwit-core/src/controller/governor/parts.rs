//! Which parts of the governor take part. All do, but for an experiment that asks what one of them is worth.

use core::str::FromStr;

/// The governor's heuristics beyond the algorithm of the SmartNIC storage-migration paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GovernorParts {
    /// A strained guest has to be strained often, or on end, before copies yield.
    pub strain_cause: bool,
    /// A few requests are answered without the destination where the migration would pause.
    pub local_answer_budget: bool,
    /// How much longer chunks take than alone bounds how many are in flight.
    pub queueing_ratio: bool,
    /// A promise that nobody stated is eased until copies gain on the guest.
    pub net_progress: bool,
    /// Copies hurry where going slowly does not spare the guest.
    pub haste: bool,
}

impl GovernorParts {
    /// Every part.
    pub const ALL: Self = Self {
        strain_cause: true,
        local_answer_budget: true,
        queueing_ratio: true,
        net_progress: true,
        haste: true,
    };

    /// The names of the parts.
    pub const NAMES: [&'static str; 5] = [
        "strain_cause",
        "local_answer_budget",
        "queueing_ratio",
        "net_progress",
        "haste",
    ];
}

/// A part that there is not.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the governor has no part '{0}': it has {all}", all = GovernorParts::NAMES.join(", "))]
pub struct UnknownPart(String);

impl FromStr for GovernorParts {
    type Err = UnknownPart;

    /// All parts without those that are named, with commas between them.
    fn from_str(without: &str) -> Result<Self, UnknownPart> {
        let mut parts = Self::ALL;
        for name in without.split(',').filter(|name| !name.is_empty()) {
            let part = match name {
                "strain_cause" => &mut parts.strain_cause,
                "local_answer_budget" => &mut parts.local_answer_budget,
                "queueing_ratio" => &mut parts.queueing_ratio,
                "net_progress" => &mut parts.net_progress,
                "haste" => &mut parts.haste,
                unknown => return Err(UnknownPart(unknown.to_owned())),
            };
            *part = false;
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_can_be_left_out_by_its_name_and_nothing_else() {
        assert_eq!("".parse(), Ok(GovernorParts::ALL));
        for name in GovernorParts::NAMES {
            assert_ne!(name.parse(), Ok(GovernorParts::ALL), "{name}");
        }
        let two: GovernorParts = "strain_cause,net_progress".parse().expect("parts");
        assert!(!two.strain_cause && !two.net_progress && two.queueing_ratio);
        assert!("strain".parse::<GovernorParts>().is_err());
    }
}
