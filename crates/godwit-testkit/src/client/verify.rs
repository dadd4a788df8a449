//! Verification of a whole disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::model::Model;
use crate::SECTOR;
use crate::nbd::NbdConnection;

const STEP: u64 = 1 << 20;

/// A disk that can be read as a whole.
pub trait DiskReader {
    /// Fills `into` from this byte on.
    fn read_disk(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

impl DiskReader for NbdConnection {
    fn read_disk(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, into)
    }
}

#[derive(Debug)]
pub struct RawImage(File);

impl RawImage {
    /// Opens the file for reading.
    pub fn open(path: &Path) -> io::Result<Self> {
        File::open(path).map(Self)
    }
}

impl DiskReader for RawImage {
    fn read_disk(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, offset)
    }
}

/// The result of a whole read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Sectors read and found right.
    pub sectors: u64,
    /// Sectors among them that had been written.
    pub written: u64,
}

impl Model {
    /// Reads the whole disk and verifies that every sector holds the last acknowledged write or a later, unacknowledged
    /// one. Nothing may be in flight.
    pub fn verify_all(&mut self, disk: &mut dyn DiskReader) -> Result<Verified, String> {
        let bytes = self.sectors() * SECTOR as u64;
        let mut buffer = vec![0; STEP as usize];
        let mut wrong = Vec::new();
        let mut offset = 0;
        while offset < bytes {
            let length = STEP.min(bytes - offset) as usize;
            let into = &mut buffer[..length];
            disk.read_disk(offset, into)
                .map_err(|error| format!("cannot verify: {error}"))?;
            let ticket = self.begin_read(offset / SECTOR as u64);
            if let Err(violation) = self.end_read(&ticket, into) {
                wrong.push(violation.0);
            }
            offset += length as u64;
        }
        if wrong.is_empty() {
            return Ok(Verified {
                sectors: self.sectors(),
                written: self.touched() as u64,
            });
        }
        let count = wrong.len();
        wrong.truncate(10);
        Err(format!(
            "{count} MiB with wrong sectors:\n  {}",
            wrong.join("\n  ")
        ))
    }
}
