//! Images in other formats than raw, through `qemu-img`.

use std::path::Path;
use std::process::Stdio;

use serde::Deserialize;

use crate::error::RepositoryError;

const PROGRAM: &str = "qemu-img";

#[derive(Deserialize)]
struct Info {
    format: String,
}

/// The format of the image at `path`, as `qemu-img` calls it: `raw` for what has no other.
///
/// # Errors
/// `qemu-img` is not installed, or cannot read the file.
pub async fn format_of(path: &Path) -> Result<String, RepositoryError> {
    let words = ["info", "--output=json"].map(String::from);
    let answer = run("examine", path, words.into_iter().chain([shown(path)])).await?;
    let info: Info = serde_json::from_slice(&answer)
        .map_err(|error| RepositoryError::file("examine", path, error))?;
    Ok(info.format)
}

/// Writes the image at `from` into a new file at `to`, in these formats. Dropped before it is ready it ends.
///
/// # Errors
/// `qemu-img` is not installed, or cannot do it.
pub async fn convert(
    from: &Path,
    from_format: &str,
    to: &Path,
    to_format: &str,
) -> Result<(), RepositoryError> {
    let words = ["convert", "-f", from_format, "-O", to_format].map(String::from);
    let words = words.into_iter().chain([shown(from), shown(to)]);
    run("convert", from, words).await.map(|_| ())
}

/// A path that `qemu-img` takes for one, whatever it looks like.
fn shown(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.display().to_string()
}

async fn run(
    action: &'static str,
    path: &Path,
    words: impl Iterator<Item = String>,
) -> Result<Vec<u8>, RepositoryError> {
    let failed = |why: String| RepositoryError::file(action, path, why);
    let output = tokio::process::Command::new(PROGRAM)
        .args(words)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(|error| {
            failed(format!(
                "{PROGRAM} cannot be run ({error}): install qemu-utils"
            ))
        })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().unwrap_or("it said nothing").trim();
    Err(failed(format!("{PROGRAM} said: {line}")))
}
