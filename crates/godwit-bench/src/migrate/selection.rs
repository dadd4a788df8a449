//! Selection of cases and movers for a run of the scene.

use std::path::PathBuf;

use clap::Args;

use crate::migrate::case::{Bandwidth, Case, Rate, Workload};
use crate::migrate::movers::{self, Mover};
use crate::suite::Extent;
use crate::suite::site::{Data, Destination};

/// The measured part of the scene `migrate`; the defaults depend on quick or full.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Scene migrate")]
pub(crate) struct Selection {
    /// Workload of the guest
    #[arg(long = "workload", value_name = "WORKLOAD", value_delimiter = ',')]
    workloads: Vec<Workload>,
    /// MB/s that the guest asks for; 0 is an idle guest, max one without a limit
    #[arg(long = "rate", value_name = "MB/s|max", value_delimiter = ',')]
    rates: Vec<Rate>,
    /// Gbit/s between the hosts
    #[arg(long = "link", value_name = "GBIT/s|uncapped", value_delimiter = ',')]
    links: Vec<Bandwidth>,
    /// Destination of the disk; same-disk when left out
    #[arg(long = "destination", value_delimiter = ',')]
    destinations: Vec<Destination>,
    /// Content of the disk; random when left out
    #[arg(long = "data", value_delimiter = ',')]
    data: Vec<Data>,
    /// Movers of the disk
    #[arg(long = "mover", value_name = "NAME", value_delimiter = ',')]
    movers: Vec<String>,
    /// Also moves by another build of Godwit
    #[arg(long = "other-build", value_name = "PROGRAM")]
    other_build: Option<PathBuf>,
    /// Also moves without each of these parts of the governor
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    without: Vec<String>,
    /// Size of the image, like 1GiB
    #[arg(long = "image", value_name = "SIZE", value_parser = bytes)]
    image: Option<u64>,
}

const fn case(workload: Workload, rate: Rate, link: Option<f64>) -> Case {
    Case {
        workload,
        rate,
        link: Bandwidth(link),
        destination: Destination::SameDisk,
        data: Data::Random,
    }
}

const IDLE: Rate = Rate::Megabytes(0.0);

/// The cases that tell most in little time.
const QUICK: [Case; 4] = [
    case(Workload::Randwrite, IDLE, None),
    case(Workload::Randwrite, Rate::Megabytes(40.0), None),
    case(Workload::Randwrite, Rate::Unthrottled, None),
    case(Workload::Zipf, Rate::Megabytes(40.0), Some(5.0)),
];

const WORKLOADS: [Workload; 5] = [
    Workload::Randwrite,
    Workload::Rw50,
    Workload::Rw90,
    Workload::Zipf,
    Workload::Seqwrite,
];
const RATES: [Rate; 6] = [
    IDLE,
    Rate::Megabytes(20.0),
    Rate::Megabytes(40.0),
    Rate::Megabytes(80.0),
    Rate::Megabytes(160.0),
    Rate::Unthrottled,
];
const LINKS: [Bandwidth; 4] = [
    Bandwidth(None),
    Bandwidth(Some(10.0)),
    Bandwidth(Some(5.0)),
    Bandwidth(Some(1.0)),
];

impl Selection {
    /// Returns the cases, grouped by destination, kind of data and link.
    pub(crate) fn cases(&self, extent: Extent) -> Vec<Case> {
        let to = |(destination, data)| {
            let cases = self.guests(extent).into_iter();
            cases.map(move |case| Case {
                destination,
                data,
                ..case
            })
        };
        let destinations = or(&self.destinations, &[Destination::SameDisk]).iter();
        let sorts = or(&self.data, &[Data::Random]).iter();
        let places = destinations.flat_map(|destination| {
            let sorts = sorts.clone();
            sorts.map(|data| (*destination, *data))
        });
        places.flat_map(to).collect()
    }

    /// Returns the cases of a destination, grouped by link.
    fn guests(&self, extent: Extent) -> Vec<Case> {
        let chosen = !(self.workloads.is_empty() && self.rates.is_empty() && self.links.is_empty());
        if extent == Extent::Quick && !chosen {
            return QUICK.to_vec();
        }
        let mut cases = Vec::new();
        for &link in or(&self.links, &LINKS) {
            for &rate in or(&self.rates, &RATES) {
                let workloads = or(&self.workloads, &WORKLOADS);
                // Idle guests do not differ.
                let count = if rate == IDLE { 1 } else { workloads.len() };
                let workloads = workloads.iter().take(count);
                cases.extend(workloads.map(|&workload| case(workload, rate, link.0)));
            }
        }
        cases
    }

    pub(crate) fn movers(&self, extent: Extent) -> std::io::Result<Vec<Box<dyn Mover>>> {
        let mut all = movers::all();
        let names: Vec<String> = all.iter().map(|mover| mover.name().to_owned()).collect();
        if let Some(unknown) = self.movers.iter().find(|name| !names.contains(name)) {
            return Err(std::io::Error::other(format!(
                "no mover '{unknown}': there are {}",
                names.join(", ")
            )));
        }
        all.retain(|mover| {
            let in_all = extent == Extent::Full || mover.in_quick();
            let named = self.movers.iter().any(|name| name == mover.name());
            named || self.movers.is_empty() && in_all
        });
        let other = self.other_build.clone().map(movers::other_build);
        let lesser = self.without.iter().map(|part| movers::without(part));
        all.extend(other.into_iter().chain(lesser).map(|it| Box::new(it) as _));
        Ok(all)
    }

    pub(crate) fn image_bytes(&self, extent: Extent) -> u64 {
        self.image.unwrap_or(extent.of(1 << 30, 4 << 30))
    }
}

fn or<'a, T>(chosen: &'a [T], all: &'a [T]) -> &'a [T] {
    if chosen.is_empty() { all } else { chosen }
}

/// Parses a size like `1GiB` or `512MiB`: whole MiB, because fio and the comparison work on whole blocks.
fn bytes(text: &str) -> Result<u64, String> {
    let units = [("MiB", 20), ("GiB", 30)];
    let found = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?.parse::<u64>().ok()?, shift)));
    found
        .and_then(|(count, shift)| count.checked_shl(*shift))
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| format!("'{text}' is no size like 512MiB or 4GiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_has_every_workload_at_every_rate_and_an_idle_guest_once() {
        let cases = Selection::default().cases(Extent::Full);
        assert_eq!(
            cases.len(),
            LINKS.len() * (1 + (RATES.len() - 1) * WORKLOADS.len())
        );
        assert_eq!(
            cases.iter().filter(|case| case.rate == IDLE).count(),
            LINKS.len()
        );
        let chosen = Selection {
            rates: vec![Rate::Unthrottled],
            links: vec![Bandwidth(None)],
            workloads: vec![Workload::Zipf],
            ..Selection::default()
        };
        let quick = Selection {
            destinations: vec![Destination::Memory, Destination::SameDisk],
            ..Selection::default()
        };
        let quick = quick.cases(Extent::Quick);
        assert_eq!(quick[QUICK.len()..], QUICK);
        assert_eq!(
            quick[0],
            Case {
                destination: Destination::Memory,
                ..QUICK[0]
            }
        );
        for extent in [Extent::Quick, Extent::Full] {
            assert_eq!(
                chosen.cases(extent),
                [case(Workload::Zipf, Rate::Unthrottled, None)]
            );
        }
    }

    #[test]
    fn movers_are_found_by_name() {
        let count = |extent| Selection::default().movers(extent).unwrap().len();
        assert!(count(Extent::Quick) >= 4);
        assert!(count(Extent::Full) > count(Extent::Quick));
        let mut one = Selection {
            movers: vec!["godwit".to_owned()],
            ..Selection::default()
        };
        assert_eq!(one.movers(Extent::Quick).unwrap()[0].name(), "godwit");
        one.movers = vec!["goodwit".to_owned()];
        assert!(
            one.movers(Extent::Quick)
                .unwrap_err()
                .to_string()
                .contains("qemu-proxmox")
        );
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("512MiB"), Ok(512 << 20));
        assert!(bytes("4GB").is_err() && bytes("0GiB").is_err() && bytes("x").is_err());
    }
}
