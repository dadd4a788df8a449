//! The cases of the scene: a guest, its rate, and the link.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use godwit_testkit::fio::{FioLoad, Requests};

use crate::suite::site::{Data, Destination};

/// The guest's requests, 4 KiB at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// Random writes
    Randwrite,
    /// Random requests, half of them writes
    Rw50,
    /// Random requests, nine of ten writes
    Rw90,
    /// Random writes, most of them to few places
    Zipf,
    /// Writes one after the other
    Seqwrite,
}

/// The rate of the guest's requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rate {
    /// MB/s; 0 for an idle guest.
    Megabytes(f64),
    Unthrottled,
}

/// The bandwidth of the link in Gbit/s; `None` for as fast as the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bandwidth(pub(crate) Option<f64>);

/// A workload with its rate, link, destination and kind of data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) workload: Workload,
    pub(crate) rate: Rate,
    pub(crate) link: Bandwidth,
    pub(crate) destination: Destination,
    pub(crate) data: Data,
}

impl Workload {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Randwrite => "randwrite",
            Self::Rw50 => "rw50",
            Self::Rw90 => "rw90",
            Self::Zipf => "zipf",
            Self::Seqwrite => "seqwrite",
        }
    }

    const fn requests(self) -> Requests {
        match self {
            Self::Randwrite => Requests::Mixed(100),
            Self::Rw50 => Requests::Mixed(50),
            Self::Rw90 => Requests::Mixed(90),
            Self::Zipf => Requests::HotSet,
            Self::Seqwrite => Requests::Sequential,
        }
    }
}

impl Rate {
    pub(crate) const fn mbps(self) -> Option<f64> {
        match self {
            Self::Megabytes(rate) => Some(rate),
            Self::Unthrottled => None,
        }
    }
}

impl Case {
    /// Returns the guest of a disk of this size; `None` for an idle guest.
    pub(crate) fn guest(&self, bytes: u64) -> Option<FioLoad> {
        let mbps = self.rate.mbps();
        (mbps != Some(0.0)).then(|| FioLoad {
            compressible: self.data == Data::Files,
            ..load(self.workload, mbps, bytes)
        })
    }
}

/// Returns a guest that writes at random with this rate in MB/s to a disk of this size.
pub(crate) fn random_writes(mbps: f64, bytes: u64) -> FioLoad {
    load(Workload::Randwrite, Some(mbps), bytes)
}

fn load(workload: Workload, mbps: Option<f64>, bytes: u64) -> FioLoad {
    FioLoad {
        requests: workload.requests(),
        region: 0..bytes,
        rate: mbps.map(|mbps| (mbps * 1e6) as u64),
        ..FioLoad::default()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Megabytes(rate) => write!(formatter, "{rate} MB/s"),
            Self::Unthrottled => write!(formatter, "unthrottled"),
        }
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(gigabits) => write!(formatter, "{gigabits} Gb/s"),
            None => write!(formatter, "uncapped"),
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            workload,
            rate,
            link,
            destination,
            data,
        } = self;
        match rate {
            Rate::Megabytes(0.0) => write!(formatter, "idle, {link}")?,
            _ => write!(formatter, "{} {rate}, {link}", workload.name())?,
        }
        match destination {
            Destination::SameDisk => {}
            Destination::Memory => write!(formatter, ", to memory")?,
        }
        match data {
            Data::Random => Ok(()),
            Data::Files => write!(formatter, ", files"),
        }
    }
}

fn amount(text: &str, least: f64) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| *number >= least);
    number.ok_or_else(|| format!("'{text}' is no number from {least} on"))
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "max" => Ok(Self::Unthrottled),
            _ => amount(text, 0.0).map(Self::Megabytes),
        }
    }
}

impl FromStr for Bandwidth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "uncapped" => Ok(Self(None)),
            _ => amount(text, 0.01).map(|gigabits| Self(Some(gigabits))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_links_are_read() {
        assert_eq!("40".parse(), Ok(Rate::Megabytes(40.0)));
        assert_eq!("max".parse(), Ok(Rate::Unthrottled));
        assert!("-1".parse::<Rate>().is_err());
        assert_eq!("10".parse(), Ok(Bandwidth(Some(10.0))));
        assert_eq!("uncapped".parse(), Ok(Bandwidth(None)));
        assert!("0".parse::<Bandwidth>().is_err());
    }

    #[test]
    fn an_idle_guest_is_none() {
        let case = |rate| Case {
            workload: Workload::Zipf,
            rate,
            link: Bandwidth(None),
            destination: Destination::SameDisk,
            data: Data::Random,
        };
        assert!(case(Rate::Megabytes(0.0)).guest(1 << 20).is_none());
        let paced = case(Rate::Megabytes(40.0)).guest(1 << 20).unwrap();
        assert_eq!(
            (paced.rate, paced.requests),
            (Some(40_000_000), Requests::HotSet)
        );
        assert_eq!(case(Rate::Unthrottled).guest(1 << 20).unwrap().rate, None);
    }
}
