//! Names of images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An image's name: 1 to 128 letters, digits, `.`, `_`, `-` and `:`, the first a letter or digit, like `debian:12`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

impl ImageName {
    /// Most characters of a name.
    const LONGEST: usize = 128;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ImageName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let begins = text.starts_with(|first: char| first.is_ascii_alphanumeric());
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
        if begins && text.len() <= Self::LONGEST && text.chars().all(plain) {
            return Ok(Self(text.to_owned()));
        }
        let shown: String = text.chars().take(Self::LONGEST).collect();
        Err(format!(
            "{shown:?} is no image's name: 1 to {} letters, digits and . _ - : are, beginning with a letter or digit",
            Self::LONGEST
        ))
    }
}

impl TryFrom<String> for ImageName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere_else_in_the_repository() {
        for good in ["debian:12", "a", "win-2025_v1.2"] {
            assert!(good.parse::<ImageName>().is_ok(), "{good}");
        }
        let long = "a".repeat(129);
        for bad in ["", ".", "../x", "a/b", "-x", "a b", "ä", long.as_str()] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad}");
        }
    }
}
