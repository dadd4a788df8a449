//! A disk of 100 GiB with little data, beside a full disk of the size of that data.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use godwit_testkit::client::RawImage;
use godwit_testkit::image::first_difference;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::migrate;
use rustix::fs::{SeekFrom, seek};
use serde::Serialize;

use crate::policies::report::Report;
use crate::policies::site::{Site, allocated, settle};
use crate::policies::sizes::Sizes;

const THIN: u64 = 100 << 30;
/// Number of places that hold the thin disk's data.
const PLACES: u64 = 64;
const MIB: u64 = 1 << 20;

/// One move of either disk while no guest uses it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Moved {
    pub(crate) thin: bool,
    pub(crate) round: usize,
    pub(crate) seconds: f64,
    pub(crate) wire_bytes: u64,
    pub(crate) allocated_at_source: u64,
    pub(crate) allocated_at_destination: u64,
    /// Bytes compared and found equal; the rest is a hole at both ends.
    pub(crate) verified_bytes: u64,
}

/// Moves both disks, in turns.
///
/// # Errors
/// A failed move, or a destination with different content.
pub(crate) fn run(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    let bytes = (sizes.thin() / PLACES).next_multiple_of(MIB) * PLACES;
    for round in 0..sizes.rounds() {
        let turns = if round % 2 == 0 {
            [true, false]
        } else {
            [false, true]
        };
        for thin in turns {
            report.add_thin(one(site, bytes, thin, round)?)?;
        }
    }
    Ok(())
}

fn one(site: &Site, bytes: u64, thin: bool, round: usize) -> io::Result<Moved> {
    let disk = format!("{}{round}", if thin { "thin" } else { "full" });
    let path = site.path(&disk);
    let (size, step) = match thin {
        true => (THIN, THIN / PLACES),
        false => (bytes, bytes / PLACES),
    };
    let extents = (0..PLACES).map(|place| place * step..place * step + bytes / PLACES);
    let extents: Vec<_> = extents.collect();
    write(&path, size, &extents, round as u64)?;
    let words = ["disk", "create", &disk, "--path", &path.to_string_lossy()];
    site.a().godwit(&words).json()?;
    settle();
    let wire = site.link.carried_bytes()?;
    let begun = Instant::now();
    let shown = migrate(site.a(), &disk, "b", &["--sla", "off"])?;
    let seconds = begun.elapsed().as_secs_f64();
    if shown["phase"] != "completed" {
        return Err(io::Error::other(format!("{disk} did not move: {shown}")));
    }
    let wire_bytes = site.link.carried_bytes()? - wire;
    let there = site.b().image(&disk)?;
    let moved = Moved {
        thin,
        round,
        seconds,
        wire_bytes,
        allocated_at_source: allocated(&path)?,
        allocated_at_destination: allocated(&there)?,
        verified_bytes: compare(&path, &there, &extents)?,
    };
    site.remove(&disk)?;
    std::fs::remove_file(path)?;
    Ok(moved)
}

fn write(path: &Path, size: u64, extents: &[Range<u64>], seed: u64) -> io::Result<()> {
    let file = File::create_new(path)?;
    file.set_len(size)?;
    let mut random = Random::new(seed);
    let mut piece = vec![0; MIB as usize];
    for extent in extents {
        for at in extent.clone().step_by(piece.len()) {
            random.fill(&mut piece);
            file.write_all_at(&piece, at)?;
        }
    }
    file.sync_all()
}

/// Checks that both images are equal within the extents and have no data elsewhere. Returns the bytes compared.
fn compare(source: &Path, destination: &Path, extents: &[Range<u64>]) -> io::Result<u64> {
    let (mut here, mut there) = (RawImage::open(source)?, RawImage::open(destination)?);
    for extent in extents {
        if let Some(at) = first_difference(&mut here, &mut there, extent.clone())? {
            return Err(io::Error::other(format!("the images differ at byte {at}")));
        }
    }
    let file = File::open(destination)?;
    let size = file.metadata()?.len();
    if size != source.metadata()?.len() {
        return Err(io::Error::other(format!("the image has {size} bytes")));
    }
    let mut at = 0;
    // The seek fails once no data follows.
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        let hole = seek(&file, SeekFrom::Hole(data))?;
        if !extents
            .iter()
            .any(|extent| extent.start <= data && hole <= extent.end)
            && !(data..hole)
                .step_by(MIB as usize)
                .all(|at| is_within(extents, at))
        {
            return Err(io::Error::other(format!(
                "bytes {data} to {hole} are no hole"
            )));
        }
        at = hole;
    }
    Ok(extents.iter().map(|extent| extent.end - extent.start).sum())
}

fn is_within(extents: &[Range<u64>], at: u64) -> bool {
    extents.iter().any(|extent| extent.contains(&at))
}
