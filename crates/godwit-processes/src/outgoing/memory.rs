//! Pre-copy: copies the process's memory to the destination in rounds while the process works. The image of the stopped
//! process then has only the last changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_verbs::control::Request;
use godwit_verbs::mover::another_round;

use super::Running;
use super::preparing::reach::Trouble;
use super::steps::failed;
use crate::host::criu;
use crate::images::Source;
use crate::incoming::rounds;
use crate::messages::{Ask, MemoryOffer};
use crate::{folder, images};

/// Time between two checks for a cancelled move.
const LOOK: Duration = Duration::from_millis(100);
/// CRIU's message about a device's queues without a plugin for them.
const NO_PLUGIN: &str = "handle_device_vma plugin failed";

impl Running {
    /// Copies all rounds; no round is left after an error.
    pub(super) async fn pre_copy(&mut self) -> Result<(), Trouble> {
        let place = folder(&self.processes, &self.plan.id).join(rounds::KEPT);
        let copied = self.copy_rounds(&place).await;
        match &copied {
            Ok(count) => self.plan.rounds = *count,
            Err(trouble) => {
                // Rounds without an image would only fill the disk. They go with the move's folder at the latest.
                let _left = std::fs::remove_dir_all(&place);
                if !self.is_cancelled() {
                    let why = trouble.clone().into_text();
                    let plugin = if why.contains(NO_PLUGIN) {
                        "; put the plugin godwit_rdma.so into /usr/lib/criu"
                    } else {
                        ""
                    };
                    self.warn(format!(
                        "its memory was not copied while it worked: {why}{plugin}"
                    ));
                }
            }
        }
        copied.map(drop)
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    async fn copy_rounds(&mut self, place: &Path) -> Result<u32, Trouble> {
        if let Some(why) = criu::notes_no_changes().await {
            return Err(failed(why));
        }
        if !self.plan.plain {
            if let Some(why) = criu::moves_pinned_pages() {
                return Err(failed(why));
            }
            self.own(Request::TrackWritten).await?;
        }
        let subject = self.plan.subject();
        // Changed pages are copied again in later rounds, and with the image.
        let wanted = subject
            .resident()
            .saturating_mul(2)
            .saturating_add(images::LEFT_FREE);
        let free = images::free(&self.processes.context.config.processes_dir());
        if wanted > free {
            let text = format!("that may take {wanted} bytes here, and {free} are free");
            return Err(failed(text));
        }
        let mut copied = Vec::new();
        while another_round(&copied) {
            let before = copied.len() as u32;
            let image = place.join((before + 1).to_string());
            std::fs::create_dir_all(&image)
                .map_err(|error| failed(format!("cannot make {}: {error}", image.display())))?;
            let since = (before > 0).then(|| format!("../{before}"));
            let made = subject.copy_memory(&image, since.as_deref()).await;
            made.map_err(failed)?;
            if self.is_cancelled() {
                return Err(failed("it was cancelled".to_owned()));
            }
            let bytes = self.send_round(before + 1, &image).await?;
            copied.push(bytes);
            self.shows(|view| {
                view.pre_copy_rounds = before + 1;
                view.pre_copied_bytes += bytes;
            });
        }
        Ok(copied.len() as u32)
    }

    /// Sends a round and returns the sent bytes.
    async fn send_round(&mut self, round: u32, image: &Path) -> Result<u64, Trouble> {
        let (files, _) = images::gather(image, &[]).map_err(failed)?;
        let bytes = files.iter().map(|file| file.bytes).sum();
        let sources = files.iter().map(|file| {
            let path: PathBuf = image.join(&file.name);
            (Source::Own(path), file.bytes)
        });
        let sources = sources.collect();
        let asked = Ask::Memory(MemoryOffer {
            round,
            image: files,
        });
        let (to, cancelled) = (self.plan.to.clone(), Arc::clone(&self.cancelled));
        let sent = tokio::select! {
            sent = self.transfer(asked, sources) => Some(sent),
            () = until(&cancelled) => None,
        };
        match sent {
            Some(sent) => sent.map(|()| bytes),
            None => {
                // The cancellation may have come in the middle of a transfer.
                self.reach.hang_up(&to);
                Err(failed("it was cancelled".to_owned()))
            }
        }
    }

    /// Returns the folder of the last round relative to the next image, or `None` if the image must have all memory.
    pub(super) async fn since(&mut self) -> Option<String> {
        let count = self.plan.rounds_before();
        if count == 0 {
            return None;
        }
        if !self.plan.plain
            && let Err(trouble) = self.own(Request::MarkWritten).await
        {
            let why = trouble.into_text();
            self.warn(format!(
                "all of its memory was copied once more, since it is not known what its device has written: {why}"
            ));
            self.plan.rounds = 0;
            return None;
        }
        Some(rounds::since(count))
    }
}

/// Returns once the move is cancelled.
async fn until(cancelled: &AtomicBool) {
    while !cancelled.load(Ordering::Acquire) {
        tokio::time::sleep(LOOK).await;
    }
}
