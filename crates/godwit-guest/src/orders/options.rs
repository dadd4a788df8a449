//! Options from the kernel's command line, as `godwit.NAME=NUMBER`.

use std::fs;
use std::io;

#[derive(Debug)]
pub(crate) struct Options {
    /// Disks to wait for; the load fails if they do not appear.
    pub(crate) disks: usize,
    /// Writes a second on each disk; 0 for no limit.
    pub(crate) rate: u64,
    /// Random writes in flight on each disk beside these; 0 for none.
    pub(crate) writers: u64,
    /// Size of the file written on each disk, in MiB.
    pub(crate) file_mb: u64,
    /// Memory that is rewritten and checked, in MiB; 0 for none.
    pub(crate) memory_mb: u64,
    /// MiB of this memory that are rewritten each second; at least 1.
    pub(crate) memory_rate_mb: u64,
    /// Memory through which pointers are chased, in MiB; 0 for none.
    pub(crate) pointer_chase_mb: u64,
    /// Share of the time in which pointers are chased, in per cent.
    pub(crate) pointer_chase_percent: u64,
    /// Memory of which every page is written in turn, in MiB; 0 for none.
    pub(crate) dirty_pages_mb: u64,
    /// MiB of these pages that are written each second; 0 for no limit.
    pub(crate) dirty_pages_rate_mb: u64,
    /// Memory that is read in sequence and checked, in MiB; 0 for none.
    pub(crate) linear_scan_mb: u64,
    /// Memory of which single words are read and written at random, in MiB; 0 for none.
    pub(crate) random_access_mb: u64,
    /// Memory that is written once and checked in the end, in MiB; 0 for none.
    pub(crate) cold_mb: u64,
    /// Milliseconds between two beats; 0 for none.
    pub(crate) beat_ms: u64,
    /// True if the load goes on from the last write of the previous boot, and checks that none is missing.
    pub(crate) reboots: bool,
    /// TCP port of the echo server; 0 for none.
    pub(crate) echo_port: u16,
    /// UDP port of the echo server of the multicast group; 0 for none.
    pub(crate) group_port: u16,
    /// Seed of all offsets and contents.
    pub(crate) seed: u64,
}

impl Options {
    /// Reads `/proc/cmdline`.
    pub(crate) fn from_kernel() -> io::Result<Self> {
        Self::parse(&fs::read_to_string("/proc/cmdline")?)
    }

    fn parse(line: &str) -> io::Result<Self> {
        let mut options = Self {
            disks: 0,
            rate: 200,
            writers: 0,
            file_mb: 32,
            memory_mb: 32,
            memory_rate_mb: 32,
            pointer_chase_mb: 0,
            pointer_chase_percent: 100,
            dirty_pages_mb: 0,
            dirty_pages_rate_mb: 64,
            linear_scan_mb: 0,
            random_access_mb: 0,
            cold_mb: 0,
            beat_ms: 0,
            reboots: false,
            echo_port: 0,
            group_port: 0,
            seed: 1,
        };
        for word in line.split_whitespace() {
            let Some((name, value)) = word
                .strip_prefix("godwit.")
                .and_then(|word| word.split_once('='))
            else {
                continue;
            };
            let number: u64 = value.parse().map_err(|_| wrong(word))?;
            match name {
                "disks" => options.disks = usize::try_from(number).map_err(|_| wrong(word))?,
                "rate" => options.rate = number,
                "writers" => options.writers = number,
                "file_mb" => options.file_mb = number.max(1),
                "memory_mb" => options.memory_mb = number,
                "memory_rate_mb" => options.memory_rate_mb = number.max(1),
                "pointer_chase_mb" => options.pointer_chase_mb = number,
                "pointer_chase_percent" => options.pointer_chase_percent = number,
                "dirty_pages_mb" => options.dirty_pages_mb = number,
                "dirty_pages_rate_mb" => options.dirty_pages_rate_mb = number,
                "linear_scan_mb" => options.linear_scan_mb = number,
                "random_access_mb" => options.random_access_mb = number,
                "cold_mb" => options.cold_mb = number,
                "beat_ms" => options.beat_ms = number,
                "reboots" => options.reboots = number != 0,
                "echo_port" => {
                    options.echo_port = u16::try_from(number).map_err(|_| wrong(word))?
                }
                "group_port" => {
                    options.group_port = u16::try_from(number).map_err(|_| wrong(word))?
                }
                "seed" => options.seed = number,
                _ => return Err(wrong(word)),
            }
        }
        Ok(options)
    }
}

fn wrong(word: &str) -> io::Error {
    io::Error::other(format!(
        "'{word}' on the kernel's command line is no option"
    ))
}

#[cfg(test)]
mod tests {
    use super::Options;

    #[test]
    fn only_known_options_with_numbers() {
        let options = Options::parse("console=ttyS0 godwit.rate=7 quiet godwit.disks=2\n").unwrap();
        assert_eq!((options.rate, options.disks, options.file_mb), (7, 2, 32));
        assert!(Options::parse("godwit.rate=fast").is_err());
        assert!(Options::parse("godwit.rat=7").is_err());
    }
}
