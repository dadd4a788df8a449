//! Imports and exports: long copies, watched through the API.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_block::image::{CopyProgress, Image, export, import};
use godwit_core::units::Sectors;

use crate::disks::Disks;
use crate::disks::disk::{Activity, Disk};
use crate::disks::lifecycle::create;
use crate::disks::lifecycle::run;
use crate::disks::storage::image;
use godwit_api::{DiskState, ErrorBody, ErrorCode, ImageFormat, Job, JobKind, JobState};
use godwit_context::blocking;
use godwit_peers::names;

/// Jobs remembered. The oldest ended jobs are forgotten first.
const MAX_JOBS: usize = 256;

/// Jobs that run at the same time.
const MAX_RUNNING: usize = 16;

/// The jobs since the start of the node.
#[derive(Debug, Default)]
pub struct Jobs {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    jobs: VecDeque<Tracked>,
}

#[derive(Debug)]
struct Tracked {
    view: Job,
    done: Arc<AtomicU64>,
}

impl Jobs {
    /// Returns all remembered jobs, oldest first.
    pub fn all(&self) -> Vec<Job> {
        self.lock().jobs.iter().map(Tracked::view).collect()
    }

    /// Returns one job.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, id: &str) -> Result<Job, ErrorBody> {
        self.lock()
            .jobs
            .iter()
            .find(|job| job.view.id == id)
            .map(Tracked::view)
            .ok_or_else(|| {
                let shown: String = id.chars().take(64).collect();
                ErrorBody::new(ErrorCode::NotFound, format!("there is no job {shown:?}"))
                    .hint("jobs are forgotten when the node restarts")
            })
    }

    fn begin(
        &self,
        kind: JobKind,
        disk: &str,
        path: &str,
        total: u64,
    ) -> Result<(Job, Arc<AtomicU64>), ErrorBody> {
        let mut table = self.lock();
        let running = |job: &Tracked| job.view.state == JobState::Running;
        if table.jobs.iter().filter(|job| running(job)).count() >= MAX_RUNNING {
            return Err(ErrorBody::new(
                ErrorCode::Busy,
                format!("{MAX_RUNNING} imports and exports run already"),
            )
            .hint("try again when one is done"));
        }
        if table.jobs.len() >= MAX_JOBS
            && let Some(oldest) = table.jobs.iter().position(|job| !running(job))
        {
            table.jobs.remove(oldest);
        }
        table.next += 1;
        let view = Job {
            id: table.next.to_string(),
            kind,
            disk: disk.to_owned(),
            path: path.to_owned(),
            state: JobState::Running,
            bytes_total: total,
            bytes_done: 0,
            error: None,
        };
        let done = Arc::new(AtomicU64::new(0));
        table.jobs.push_back(Tracked {
            view: view.clone(),
            done: Arc::clone(&done),
        });
        Ok((view, done))
    }

    fn end(&self, id: &str, result: Result<(), ErrorBody>) {
        let mut table = self.lock();
        let Some(job) = table.jobs.iter_mut().find(|job| job.view.id == id) else {
            return;
        };
        match result {
            Ok(()) => {
                let Job { disk, path, .. } = &job.view;
                tracing::info!(disk, path, "the copy is complete");
                job.view.state = JobState::Done;
            }
            Err(error) => {
                tracing::error!(disk = job.view.disk, %error, "the copy failed");
                job.view.state = JobState::Failed;
                job.view.error = Some(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tracked {
    fn view(&self) -> Job {
        Job {
            bytes_done: self.done.load(Ordering::Relaxed),
            ..self.view.clone()
        }
    }
}

/// Reports the progress of a copy, and stops the copy when the node closes.
fn reporter(
    disks: &Arc<Disks>,
    done: Arc<AtomicU64>,
) -> impl FnMut(CopyProgress) -> ControlFlow<()> + Send + 'static {
    let disks = Arc::clone(disks);
    move |progress| {
        done.store(progress.done.0, Ordering::Relaxed);
        if disks.context.is_closing() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }
}

/// Starts to copy a raw image into a new disk.
///
/// # Errors
/// The name is not valid or taken, or the image cannot be used.
pub async fn start_import(
    disks: &Arc<Disks>,
    name: String,
    path: String,
    format: Option<ImageFormat>,
) -> Result<Job, ErrorBody> {
    names::check("disk", &name)?;
    let from = absolute(&name, &path)?;
    let size = {
        let (name, from) = (name.clone(), from.clone());
        blocking(move || {
            let size = size_of(&name, &from)?;
            image::check_format(&name, &from, format)?;
            Ok(size)
        })
        .await
        .flatten()?
    };
    let sectors = create::checked_sectors(&name, size)?;
    let disks_dir = disks.context.config.disks_dir();
    image::check_space(
        &disks.context.config.name,
        &name,
        &disks_dir,
        image::allocated(&from).unwrap_or(size),
    )?;
    let to = image::managed_path(&disks_dir, &name);
    let disk = create::reserve(disks, name.clone(), to.clone(), sectors).await?;
    let (job, done) = match disks.jobs.begin(JobKind::Import, &name, &path, size) {
        Ok(begun) => begun,
        Err(error) => return Err(create::undo(disks, &disk, error).await),
    };
    let (disks, id) = (Arc::clone(disks), job.id.clone());
    godwit_context::spawn(async move {
        let report = reporter(&disks, done);
        let copied = blocking(move || {
            import(&from, &to, report).map_err(|problem| image::error(&name, &problem))
        });
        let result = match copied.await.flatten() {
            Ok(made) => create::finish(&disks, &disk, made).await,
            Err(error) => Err(create::undo(&disks, &disk, error).await),
        };
        disks.jobs.end(&id, result);
    });
    Ok(job)
}

/// Starts to copy a disk out into a raw image. The disk cannot be used meanwhile.
///
/// # Errors
/// The disk is not served here, is in use, or the file cannot be made.
pub async fn start_export(disks: &Arc<Disks>, name: &str, path: String) -> Result<Job, ErrorBody> {
    let disk = disks.get(name)?;
    let to = absolute(name, &path)?;
    if to.exists() {
        return Err(ErrorBody::new(
            ErrorCode::Exists,
            format!("disk {name}: {path} exists already"),
        )
        .hint("choose another path, or move the file away"));
    }
    let mut size = 0;
    let guard = disk.begin(Activity::Exporting, |inner| {
        size = inner.entry.sectors * 512;
        let state = inner.state();
        if state != DiskState::Serving {
            let hint = match &inner.entry.moved_to {
                Some(owner) => format!("export it at node '{owner}'"),
                None => String::from("see 'godwit disk show'"),
            };
            return Err(ErrorBody::new(
                ErrorCode::Conflict,
                format!(
                    "disk {name} is {} here: its image is not the disk",
                    state.name()
                ),
            )
            .hint(hint));
        }
        inner.is_whole(name, "exported")?;
        match disk.clients() {
            0 => Ok(()),
            clients => Err(ErrorBody::new(
                ErrorCode::Conflict,
                format!("disk {name} is used by {clients} clients: a copy would not be consistent"),
            )
            .hint("detach the clients, or copy the disk with an NBD client such as nbdcopy")),
        }
    })?;
    let (job, done) = disks.jobs.begin(JobKind::Export, name, &path, size)?;
    let (disks, id) = (Arc::clone(disks), job.id.clone());
    godwit_context::spawn(async move {
        let result = copy_out(&disks, &disk, to, done).await;
        drop(guard);
        disks.jobs.end(&id, result);
    });
    Ok(job)
}

/// Copies the image while the engine, which holds the image's lock, is stopped.
async fn copy_out(
    disks: &Arc<Disks>,
    disk: &Arc<Disk>,
    to: PathBuf,
    done: Arc<AtomicU64>,
) -> Result<(), ErrorBody> {
    run::stop(disk).await;
    let report = reporter(disks, done);
    let name = disk.name.clone();
    let (path, sectors) = {
        let inner = disk.lock();
        (inner.entry.path.clone(), Sectors(inner.entry.sectors))
    };
    let copied = blocking(move || {
        let mut opened: Image = image::open(&name, &path)?;
        opened.leave_the_rest_of_a_device(sectors);
        export(&opened, &to, report).map_err(|problem| image::error(&name, &problem))
    });
    let result = copied.await.flatten();
    run::open_and_start(disks, disk).await;
    result
}

fn absolute(disk: &str, path: &str) -> Result<PathBuf, ErrorBody> {
    let path = PathBuf::from(path);
    names::check_path(&format!("disk {disk}"), &path)?;
    Ok(path)
}

/// Returns the size of a file or block device in bytes.
fn size_of(disk: &str, path: &std::path::Path) -> Result<u64, ErrorBody> {
    use std::io::{Seek, SeekFrom};
    use std::os::unix::fs::FileTypeExt;
    let failed = |error: std::io::Error| {
        let code = match error.kind() {
            std::io::ErrorKind::NotFound => ErrorCode::NotFound,
            _ => ErrorCode::Conflict,
        };
        ErrorBody::new(
            code,
            format!("disk {disk}: cannot read {}: {error}", path.display()),
        )
        .hint("check the path and its permissions on the node")
    };
    let kind = std::fs::metadata(path).map_err(failed)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!(
                "disk {disk}: {} is neither a file nor a block device",
                path.display()
            ),
        )
        .hint("give the path of a raw image"));
    }
    std::fs::File::open(path)
        .and_then(|mut file| file.seek(SeekFrom::End(0)))
        .map_err(failed)
}
