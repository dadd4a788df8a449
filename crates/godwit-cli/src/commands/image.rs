//! The command `godwit image`, which works with the repository itself, without a node.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_block::image::{ImageError, refuse_formats};
use godwit_image::{
    ImageInfo, ImageName, Progress, PushOptions, Repository, RepositoryError, convert,
};
use serde_json::json;

use crate::arguments::{ImageArguments, ImageCommand, ImageFile};
use crate::commands::moves::follow::interrupts;
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::show::line::{Line, Matters};
use crate::show::output::{Output, facts, table};
use crate::show::progress::{ProgressLine, Status};
use godwit_api::text::{format_bytes, format_rate};

const SHOWN_EVERY: Duration = Duration::from_millis(200);

pub(crate) fn run(arguments: ImageArguments, output: Output) -> Result<(), Failure> {
    let location = arguments.repository.location()?.ok_or_else(|| {
        Failure::usage("which repository is meant is not said")
            .hint("give --repository s3://BUCKET or a directory, or set GODWIT_REPOSITORY")
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::caused("cannot start", &error))?;
    let work: Pin<Box<dyn Future<Output = _>>> = Box::pin(async {
        let repository = Repository::open(&location)?;
        carry_out(arguments.command, &repository, output).await
    });
    runtime.block_on(work)
}

async fn carry_out(
    command: ImageCommand,
    repository: &Repository,
    output: Output,
) -> Result<(), Failure> {
    match command {
        ImageCommand::Push {
            name,
            file,
            format,
            replace,
            check,
        } => {
            let options = PushOptions { replace, check };
            push(repository, &name, &file, format, options, output).await
        }
        ImageCommand::Pull { name, file, format } => {
            pull(repository, &name, &file, format, output).await
        }
        ImageCommand::List => {
            let images = repository.images().await?;
            output.print(&images, |images| list(images))
        }
        ImageCommand::Show { name } => {
            let (image, users) = repository.image(&name).await?;
            let value = json!({ "image": image, "users": users });
            output.print(&value, |_| show(&image, &users))
        }
        ImageCommand::Rm { name, force } => {
            let removed = repository.remove(&name, force).await?;
            output.print(&removed, |removed| {
                let lost = removed.users.join(", ");
                match removed.users.is_empty() {
                    true => format!("removed image '{name}'"),
                    false => format!("removed image '{name}', from which {lost} still fetched"),
                }
            })
        }
        ImageCommand::ForgetNode { node } => {
            let forgotten = repository.forget_node(&node).await?;
            let disks: Vec<String> = forgotten.into_iter().map(|(_, user)| user.disk).collect();
            let value = json!({ "node": node, "disks": disks });
            output.print(&value, |_| match disks.is_empty() {
                true => format!("no disk of node '{node}' was noted"),
                false => format!(
                    "forgot what disks of node '{node}' fetched: {}",
                    disks.join(", ")
                ),
            })
        }
        ImageCommand::Gc {
            dry_run,
            cache_time,
        } => {
            let repository = match cache_time {
                Some(lag) => &repository.clone().with_lag(Duration::from_secs(lag))?,
                None => repository,
            };
            collect(repository, dry_run, output).await
        }
    }
}

async fn collect(repository: &Repository, dry_run: bool, output: Output) -> Result<(), Failure> {
    let waits = repository.collecting_waits();
    if !dry_run && !waits.is_zero() {
        output.say(&format!(
            "waiting {} s in all, so that other hosts see what is done (--cache-time)",
            waits.as_secs()
        ));
    }
    let collected = repository.collect(!dry_run).await?;
    output.print(&collected, |collected| {
        let done = if dry_run { "would remove" } else { "removed" };
        format!(
            "{done} {} chunks ({}) and {} manifests; {} chunks stay",
            collected.chunks,
            format_bytes(collected.bytes),
            collected.manifests,
            collected.kept_chunks
        )
    })
}

async fn push(
    repository: &Repository,
    name: &ImageName,
    file: &Path,
    format: Option<ImageFile>,
    options: PushOptions,
    output: Output,
) -> Result<(), Failure> {
    let mut interrupted = interrupts()?;
    let converted = match format {
        Some(ImageFile::Raw) => None,
        None => {
            refuse_formats(file).map_err(|error| not_raw(file, &error))?;
            None
        }
        Some(ImageFile::Qcow2) => {
            let folder = tempfile::tempdir()
                .map_err(|error| Failure::caused("cannot make a folder in TMPDIR", &error))?;
            let raw = folder.path().join("raw");
            output.say(&format!("converting {} from qcow2", file.display()));
            tokio::select! {
                converted = convert::from_qcow2(file, &raw) => converted?,
                _ = interrupted.recv() => return Err(RepositoryError::Interrupted("nothing was pushed").into()),
            }
            Some((folder, raw))
        }
    };
    let raw = converted.as_ref().map_or(file, |(_, raw)| raw);
    let progress = Arc::new(Progress::default());
    let shown = Shown::start(&progress, "pushing", output);
    let cancel = async { _ = interrupted.recv().await };
    let pushed = repository.push(name, raw, options, &progress, cancel).await;
    shown.end();
    let pushed = pushed?;
    output.print(&pushed, |pushed| {
        format!(
            "pushed image '{name}': {} with {} of data, of which {} were not there yet",
            format_bytes(pushed.image.size_bytes),
            format_bytes(pushed.image.data_bytes),
            format_bytes(pushed.sent_bytes)
        )
    })
}

async fn pull(
    repository: &Repository,
    name: &ImageName,
    file: &Path,
    format: ImageFile,
    output: Output,
) -> Result<(), Failure> {
    let mut interrupted = interrupts()?;
    let file = std::path::absolute(file)
        .map_err(|error| Failure::caused(format!("cannot write {}", file.display()), &error))?;
    if file.exists() {
        let text = format!("cannot write {}: it exists", file.display());
        return Err(Failure::new(text).hint("choose another path, or move the file away"));
    }
    let raw = match format {
        ImageFile::Raw => file.clone(),
        ImageFile::Qcow2 => beside(&file, "raw"),
    };
    let progress = Arc::new(Progress::default());
    let shown = Shown::start(&progress, "pulling", output);
    let cancel = async { _ = interrupted.recv().await };
    let pulled = repository.pull(name, &raw, &progress, cancel).await;
    shown.end();
    let mut pulled = pulled?;
    if format != ImageFile::Raw {
        let part = beside(&file, "part");
        let converted = tokio::select! {
            converted = convert::to_qcow2(&raw, &part) => converted,
            _ = interrupted.recv() => Err(RepositoryError::Interrupted("there is no file")),
        };
        // A leftover file cannot be helped.
        let _ = std::fs::remove_file(&raw);
        if let Err(error) = converted {
            let _ = std::fs::remove_file(&part);
            return Err(error.into());
        }
        std::fs::rename(&part, &file)
            .map_err(|error| Failure::caused(format!("cannot write {}", file.display()), &error))?;
        pulled.path = file;
    }
    output.print(&pulled, |pulled| {
        format!(
            "pulled image '{name}' of {} to {}",
            format_bytes(pulled.image.size_bytes),
            pulled.path.display()
        )
    })
}

/// Returns the name of a temporary file beside a file.
fn beside(file: &Path, what: &str) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    file.with_file_name(format!(".{name}.{}.{what}", std::process::id()))
}

/// Explains why a file is not pushed as raw. A guest can make its disk look like any format, so the user must choose
/// the format.
fn not_raw(file: &Path, error: &ImageError) -> Failure {
    let shown = file.display();
    let ImageError::Format { format, .. } = error else {
        return Failure::caused(format!("cannot push {shown}"), error);
    };
    let format = format.name();
    let way = match format {
        "qcow2" => String::from("say --format qcow2"),
        _ => format!("convert it first with 'qemu-img convert -f {format} -O raw {shown} NEW'"),
    };
    Failure::usage(format!("{shown} begins like an image in the format {format}, and what it is was not said")).hint(format!(
        "if a node exported it, or a guest wrote it, it is raw: say --format raw; if you trust whoever made it as {format}, {way}"
    ))
}

/// A progress line that a background task keeps up to date.
struct Shown {
    task: tokio::task::JoinHandle<()>,
}

impl Shown {
    fn start(progress: &Arc<Progress>, action: &'static str, output: Output) -> Self {
        let progress = Arc::clone(progress);
        let task = tokio::spawn(async move {
            let mut line = Cleared(ProgressLine::new(output));
            let started = Instant::now();
            loop {
                tokio::time::sleep(SHOWN_EVERY).await;
                line.0
                    .show(action, &status(&progress, action, started.elapsed()));
            }
        });
        Self { task }
    }

    /// Removes the line.
    fn end(self) {
        self.task.abort();
    }
}

/// A progress line that is cleared on drop.
struct Cleared(ProgressLine);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.clear();
    }
}

fn status(progress: &Progress, action: &str, elapsed: Duration) -> Status {
    let (done, total) = (progress.done(), progress.total());
    let left = format_bytes(total.saturating_sub(done));
    let rate = progress.moved() as f64 / elapsed.as_secs_f64().max(0.001);
    let line = Line::default()
        .then(Matters::Step, action)
        .then_or(&[
            (Matters::Always, format!("{left} left")),
            (
                Matters::Rest,
                format!("{left} of {} left", format_bytes(total)),
            ),
        ])
        .then(Matters::Always, format_rate(rate));
    Status {
        line,
        done: (total > 0).then_some((done, total)),
        note: progress.waits().map(|why| format!("waiting: {why}")),
    }
}

fn list(images: &[ImageInfo]) -> String {
    let row = |image: &ImageInfo| {
        [
            image.name.to_string(),
            format_bytes(image.size_bytes),
            format_bytes(image.data_bytes),
            image.created.clone(),
            image.manifest.chars().take(12).collect(),
        ]
    };
    let empty = "no images: bring one in with godwit image push NAME FILE";
    table(
        ["NAME", "SIZE", "DATA", "PUSHED", "CONTENT"],
        images.iter().map(row),
        empty,
    )
}

fn show(image: &ImageInfo, users: &[String]) -> String {
    facts([
        ("name", Some(image.name.to_string())),
        (
            "size",
            Some(format!(
                "{} ({} bytes)",
                format_bytes(image.size_bytes),
                image.size_bytes
            )),
        ),
        ("data", Some(format_bytes(image.data_bytes))),
        ("pushed", Some(image.created.clone())),
        ("content", Some(image.manifest.clone())),
        ("fetched by", (!users.is_empty()).then(|| users.join(", "))),
    ])
}

impl From<RepositoryError> for Failure {
    fn from(error: RepositoryError) -> Self {
        let failure = Self::new(error.to_string());
        let failure = match error.hint() {
            Some(hint) => failure.hint(hint),
            None => failure,
        };
        match error {
            RepositoryError::Interrupted(_) => failure.exit(EXIT_INTERRUPTED),
            RepositoryError::NoImage { .. } => Self {
                code: Some(godwit_api::ErrorCode::NotFound),
                ..failure
            },
            RepositoryError::Exists { .. } => Self {
                code: Some(godwit_api::ErrorCode::Exists),
                ..failure
            },
            RepositoryError::InUse { .. } | RepositoryError::Busy { .. } => Self {
                code: Some(godwit_api::ErrorCode::Conflict),
                ..failure
            },
            _ => failure,
        }
    }
}
