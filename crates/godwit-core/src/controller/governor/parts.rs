//! Selection of the governor's parts. All parts are active, except in an experiment that measures the value of a part.

use core::str::FromStr;

/// The governor's heuristics beyond the algorithm of the SmartNIC storage-migration paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GovernorParts {
    /// Copies yield only after the guest was strained often, or in consecutive periods.
    pub strain_cause: bool,
    /// A few requests are answered without the destination where the migration would pause.
    pub local_answer_budget: bool,
    /// An implicit promise is eased until copies gain on the guest.
    pub net_progress: bool,
    /// Copies hurry where slow copies do not spare the guest.
    pub haste: bool,
}

impl GovernorParts {
    /// All parts.
    pub const ALL: Self = Self {
        strain_cause: true,
        local_answer_budget: true,
        net_progress: true,
        haste: true,
    };

    /// Names of the parts.
    pub const NAMES: [&'static str; 4] = [
        "strain_cause",
        "local_answer_budget",
        "net_progress",
        "haste",
    ];
}

/// Error: no part has this name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the governor has no part '{0}': it has {all}", all = GovernorParts::NAMES.join(", "))]
pub struct UnknownPart(String);

impl FromStr for GovernorParts {
    type Err = UnknownPart;

    /// Parses a comma-separated list of the parts to leave out.
    fn from_str(without: &str) -> Result<Self, UnknownPart> {
        let mut parts = Self::ALL;
        for name in without.split(',').filter(|name| !name.is_empty()) {
            let part = match name {
                "strain_cause" => &mut parts.strain_cause,
                "local_answer_budget" => &mut parts.local_answer_budget,
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
        assert!(!two.strain_cause && !two.net_progress && two.local_answer_budget);
        assert!("strain".parse::<GovernorParts>().is_err());
    }
}
