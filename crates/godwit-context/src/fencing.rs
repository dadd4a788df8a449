//! The hosts that this node is fencing. A fenced host may start again at once: until this node has stored what the fence
//! gave it the right to, the host must not get an answer from before.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use godwit_core::units::ProtectionId;

/// Splits a command that fences into its words, as a shell does.
///
/// # Errors
/// The command is empty, or a quote has no end.
pub fn words(command: &str) -> Result<Vec<String>, String> {
    let words = shlex::split(command).ok_or_else(|| {
        format!(
            "{:?} has a quote or backslash without its end",
            command.chars().take(64).collect::<String>()
        )
    })?;
    match words.first() {
        Some(program) if !program.is_empty() && !command.contains('\0') => Ok(words),
        _ => Err(String::from(
            "the command is missing, as in 'fence_ipmilan --ip=192.0.2.9 --action=off'",
        )),
    }
}

/// The fences under way.
#[derive(Debug, Default)]
pub struct Fencing {
    hosts: Mutex<HashMap<String, (usize, Arc<Host>)>>,
    /// Protections of which the other node has told the grant since this process started.
    met: Mutex<BTreeSet<ProtectionId>>,
}

/// A host while at least one fence of the host is under way.
#[derive(Debug, Default)]
struct Host {
    /// The beginning of the last fence, and its result. Locked during a fence.
    last: tokio::sync::Mutex<Option<(Instant, Result<(), String>)>>,
}

impl Fencing {
    /// Returns true while this node fences the host.
    pub fn concerns(&self, host: &str) -> bool {
        self.lock().contains_key(host)
    }

    /// Begins to fence a host, until the result is dropped.
    pub fn begin(&self, host: &str) -> Fence<'_> {
        let mut hosts = self.lock();
        let (users, it) = hosts.entry(host.to_owned()).or_default();
        *users += 1;
        Fence {
            fencing: self,
            name: host.to_owned(),
            host: Arc::clone(it),
            begun: Instant::now(),
        }
    }

    /// Notes that the other node of a protection has told this process its grant.
    pub fn meet(&self, protection: ProtectionId) {
        self.lock_met().insert(protection);
    }

    /// Returns true if the other node of a protection has told this process its grant.
    pub fn has_met(&self, protection: ProtectionId) -> bool {
        self.lock_met().contains(&protection)
    }

    /// Forgets what the other node of a protection has told, because the protection has ended.
    pub fn forget(&self, protection: ProtectionId) {
        self.lock_met().remove(&protection);
    }

    fn lock_met(&self) -> std::sync::MutexGuard<'_, BTreeSet<ProtectionId>> {
        self.met.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, (usize, Arc<Host>)>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fence of one host for one protection.
#[derive(Debug)]
pub struct Fence<'a> {
    fencing: &'a Fencing,
    name: String,
    host: Arc<Host>,
    begun: Instant,
}

impl Fence<'_> {
    /// Fences the host by `fence`, unless another fence of the host has begun since: many machines of a host are taken
    /// over at once.
    ///
    /// # Errors
    /// The error of the fence that ran.
    pub async fn run(&self, fence: impl Future<Output = Result<(), String>>) -> Result<(), String> {
        let mut last = self.host.last.lock().await;
        if let Some((begun, result)) = &*last
            && *begun >= self.begun
        {
            return result.clone();
        }
        let begun = Instant::now();
        let result = fence.await;
        *last = Some((begun, result.clone()));
        result
    }
}

impl Drop for Fence<'_> {
    fn drop(&mut self) {
        let mut hosts = self.fencing.lock();
        if let Some((users, _)) = hosts.get_mut(&self.name) {
            *users -= 1;
            if *users == 0 {
                hosts.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn fences_of_a_host_that_wait_share_one_that_begins_later() {
        let fencing = Fencing::default();
        let runs = AtomicU32::new(0);
        let run = || async {
            runs.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            Ok(())
        };
        let fences = [(); 3].map(|()| fencing.begin("b"));
        let (one, two, three) = tokio::join!(
            fences[0].run(run()),
            fences[1].run(run()),
            fences[2].run(run())
        );
        assert_eq!([one, two, three], [const { Ok(()) }; 3]);
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        let later = fencing.begin("b");
        assert_eq!(later.run(run()).await, Ok(()));
        assert_eq!(runs.load(Ordering::Relaxed), 2, "an earlier fence is void");
        drop(fences);
        assert!(fencing.concerns("b") && !fencing.concerns("c"));
        drop(later);
        assert!(!fencing.concerns("b"));
    }

    #[test]
    fn a_command_is_split_into_words_and_a_wrong_one_is_told() {
        let fence = words(" fence_x --ip=1 -p 'a $b'");
        assert_eq!(
            fence,
            Ok(["fence_x", "--ip=1", "-p", "a $b"]
                .map(str::to_owned)
                .to_vec())
        );
        for (command, told) in [
            ("", "the command is missing"),
            ("''", "the command is missing"),
            ("a\0b", "the command is missing"),
            ("a 'b", "a quote or backslash without its end"),
        ] {
            let error = words(command).expect_err(command);
            assert!(error.contains(told), "{command}: {error}");
        }
    }
}
