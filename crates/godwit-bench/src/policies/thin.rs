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
use godwit_testkit::report::Report;
use godwit_testkit::scenario::migrate;
use rustix::fs::{SeekFrom, seek};
use serde_json::{Value, json};

use super::site::{Site, allocated};
use super::sizes::Sizes;
use crate::common::in_turns;

const THIN: u64 = 100 << 30;
/// Number of places that hold the thin disk's data.
const PLACES: u64 = 64;
const MIB: u64 = 1 << 20;

/// Moves both disks, in turns.
pub(super) fn run(site: &Site, sizes: &Sizes, report: &mut Report) -> io::Result<()> {
    let bytes = (sizes.thin() / PLACES).next_multiple_of(MIB) * PLACES;
    in_turns(sizes.rounds(), 2, |round, turn| {
        report.add("thin", one(site, bytes, turn == 0, round)?)
    })
}

/// Moves either disk while no guest uses it. The verified bytes were compared and found equal; the rest is a hole at
/// both ends.
fn one(site: &Site, bytes: u64, thin: bool, round: usize) -> io::Result<Value> {
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
    rustix::fs::sync();
    let wire = site.link.carried_bytes()?;
    let begun = Instant::now();
    let shown = migrate(site.a(), &disk, "b", &["--sla", "off"])?;
    let seconds = begun.elapsed().as_secs_f64();
    if shown["phase"] != "completed" {
        return Err(io::Error::other(format!("{disk} did not move: {shown}")));
    }
    let wire_bytes = site.link.carried_bytes()? - wire;
    let there = site.b().image(&disk)?;
    let moved = json!({
        "disk": if thin { "thin" } else { "full" }, "round": round, "seconds": seconds, "wire_bytes": wire_bytes,
        "allocated_at_source": allocated(&path)?, "allocated_at_destination": allocated(&there)?,
        "verified_bytes": compare(&path, &there, &extents)?,
    });
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
