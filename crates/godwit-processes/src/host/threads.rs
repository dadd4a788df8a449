//! Thread numbers. CRIU restores each thread with the old number, so no other process may have the number.

/// Most threads in the list of a process.
pub(crate) const MOST_THREADS: usize = 1 << 15;

/// Returns the threads of a process of this host.
///
/// # Errors
/// One sentence: the process has ended, or has too many threads.
pub(crate) fn threads_of(pid: u32) -> Result<Vec<u32>, String> {
    let cannot = |error| format!("the threads of process {pid} cannot be listed: {error}");
    let entries = std::fs::read_dir(format!("/proc/{pid}/task")).map_err(cannot)?;
    let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
    let names: Vec<_> = names.collect::<Result<_, _>>().map_err(cannot)?;
    if names.len() > MOST_THREADS {
        return Err(format!(
            "process {pid} has more than {MOST_THREADS} threads"
        ));
    }
    let numbers = names.iter().filter_map(|name| name.to_str()?.parse().ok());
    Ok(numbers.collect())
}

/// Returns the thread of an image file: CRIU writes one file for each thread.
pub(crate) fn thread_in_image(file: &str) -> Option<u32> {
    file.strip_prefix("core-")?
        .strip_suffix(".img")?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_of_a_process_are_told_of() {
        let own = std::process::id();
        let (ready, go_on) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let own = std::fs::read_link("/proc/thread-self").expect("a thread");
                ready.wait();
                go_on.wait();
                own.file_name().and_then(|name| name.to_str()?.parse().ok())
            });
            ready.wait();
            let told = threads_of(own).expect("it lives");
            go_on.wait();
            let number = thread.join().expect("it ends").expect("a number");
            assert!(told.contains(&own) && told.contains(&number), "{told:?}");
            assert_ne!(own, number);
        });
        // No process can have this number.
        assert!(threads_of(0x7fff_ff00).is_err());
    }

    #[test]
    fn an_image_says_which_threads_come() {
        let files = [
            "core-7.img",
            "core-8.img",
            "mm-7.img",
            "core-.img",
            "core-7",
        ];
        let found: Vec<u32> = files.into_iter().filter_map(thread_in_image).collect();
        assert_eq!(found, [7, 8]);
    }
}
