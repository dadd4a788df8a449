//! The course of the program from the disks' appearance to the last line: its threads, and the order in which they
//! stop.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::beat;
use crate::console;
use crate::disks::blocks::Blocks;
use crate::disks::files::Files;
use crate::disks::writers;
use crate::echo;
use crate::memory;
use crate::orders::commands;
use crate::orders::ending;
use crate::orders::options::Options;
use crate::stats::Stats;

const DISKS_APPEAR: Duration = Duration::from_secs(30);
const REPORT_EVERY: Duration = Duration::from_secs(1);

/// Runs the load on every disk until told to finish, verifies everything and unmounts.
///
/// # Errors
/// If the load cannot begin or a disk cannot be unmounted. Failures between are counted.
pub(crate) fn run(options: &Options) -> io::Result<()> {
    let mounts = mount_all(&wait_for_disks(options.disks)?)?;
    let stats = Stats::new(mounts.len())?;
    let mut blocks = Vec::new();
    let mut files = Vec::new();
    for (disk, mount) in mounts.iter().enumerate() {
        blocks.push(Blocks::open(mount, disk, options, &stats)?);
        files.push(Files::create(mount, options.seed ^ disk as u64, &stats)?);
    }
    if options.echo_port != 0 {
        echo::serve(options.echo_port)?;
    }
    if options.group_port != 0 {
        echo::serve_group(options.group_port)?;
    }
    load(options, &stats, &mounts, &mut blocks, &mut files);
    drop(blocks);
    for mount in &mounts {
        unmount(mount, UnmountFlags::empty()).map_err(|error| {
            io::Error::other(format!("cannot unmount {}: {error}", mount.display()))
        })?;
    }
    stats.finished();
    console::drain();
    Ok(())
}

/// Loads disks and memory until told to finish, and verifies them.
fn load(
    options: &Options,
    stats: &Stats,
    mounts: &[PathBuf],
    blocks: &mut [Blocks],
    files: &mut [Files],
) {
    let [stop, stop_memory, ended] = [(); 3].map(|()| AtomicBool::new(false));
    let commands = commands::listen();
    let boot = ending::boot();
    console::say(&format!(
        "{{\"started\":{},\"boot\":\"{boot}\"}}",
        blocks.len()
    ));
    thread::scope(|scope| {
        let memory = scope.spawn(|| {
            memory::run(options, stats, &stop_memory);
        });
        scope.spawn(|| beat::run(options.beat_ms, &ended));
        let reports = scope.spawn(|| {
            while !ended.load(Relaxed) {
                thread::sleep(REPORT_EVERY);
                stats.report();
            }
        });
        let mut loads = Vec::new();
        for load in blocks {
            let stop = &stop;
            loads.push(scope.spawn(move || {
                load.run(options.rate, stop);
                load.finish();
            }));
        }
        for load in files {
            let stop = &stop;
            loads.push(scope.spawn(move || {
                load.run(stop);
                load.finish();
            }));
        }
        for mount in mounts.iter().filter(|_| options.writers > 0) {
            let (stop, seed) = (&stop, options.seed);
            loads.push(scope.spawn(move || {
                writers::run(mount, options.writers, seed, stats, stop);
            }));
        }
        commands::obey(&commands, stats);
        stop.store(true, Relaxed);
        let mut whole = loads.into_iter().all(|load| load.join().is_ok());
        // Memory is checked, and reports come, until the disks have been verified.
        stop_memory.store(true, Relaxed);
        whole &= memory.join().is_ok();
        ended.store(true, Relaxed);
        whole &= reports.join().is_ok();
        if !whole {
            stats.error("a part of the load ended early");
        }
    });
}

/// Returns the names of the virtio disks, as soon as there are enough.
fn wait_for_disks(count: usize) -> io::Result<Vec<String>> {
    let deadline = Instant::now() + DISKS_APPEAR;
    loop {
        let mut names: Vec<String> = fs::read_dir("/sys/block")?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("vd") && Path::new("/dev").join(name).exists())
            .collect();
        if names.len() >= count {
            names.sort();
            return Ok(names);
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!(
                "of {count} disks only these appeared: {names:?}"
            )));
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn mount_all(names: &[String]) -> io::Result<Vec<PathBuf>> {
    let mut mounts = Vec::new();
    for name in names {
        let (device, at) = (Path::new("/dev").join(name), Path::new("/mnt").join(name));
        fs::create_dir_all(&at)?;
        mount(&device, &at, "ext4", MountFlags::empty(), None).map_err(|error| {
            io::Error::other(format!(
                "cannot mount {} as ext4: {error}; was it formatted?",
                device.display()
            ))
        })?;
        mounts.push(at);
    }
    Ok(mounts)
}
