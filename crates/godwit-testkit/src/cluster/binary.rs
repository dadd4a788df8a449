//! The path of the `godwit` program.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::process::{run, target_dir};

/// Returns the program for tests, with fail points: `GODWIT_BIN`, or built once per test process.
pub fn godwit_binary() -> io::Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(path) = std::env::var_os("GODWIT_BIN") {
        return Ok(path.into());
    }
    BUILT
        .get_or_init(|| build().map_err(|error| error.to_string()))
        .clone()
        .map_err(io::Error::other)
}

/// Returns the program for the demo and the benchmarks: `GODWIT_BIN`, or the one next to this program.
pub fn release_binary() -> io::Result<PathBuf> {
    if let Some(path) = std::env::var_os("GODWIT_BIN") {
        return Ok(path.into());
    }
    let path = std::env::current_exe()?.with_file_name("godwit");
    if path.exists() {
        return Ok(path);
    }
    Err(io::Error::other(format!(
        "{} is missing: build godwit-cli first",
        path.display()
    )))
}

fn build() -> io::Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .args([
            "build",
            "--quiet",
            "-p",
            "godwit-cli",
            "--features",
            "failpoints",
        ]);
    run(&mut command)?;
    Ok(target_dir().join("debug/godwit"))
}
