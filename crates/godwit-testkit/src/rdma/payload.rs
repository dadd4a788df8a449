//! Godwit's files for a guest: the library, the node, the programs, the CRIU plugin and certificates.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::certificates;

/// Returns the files for the guests, without symbols, from the folder of the running program; copies are made in
/// `into`.
pub fn payload(into: &Path) -> io::Result<Vec<PathBuf>> {
    let here = std::env::current_exe()?;
    let built = here
        .parent()
        .ok_or_else(|| io::Error::other("this program is in no directory"))?;
    std::fs::create_dir_all(into)?;
    let mut files = Vec::new();
    for name in [
        "libgodwit_verbs.so",
        "godwit-verbs",
        "godwit-verbs-client",
        "godwit",
    ] {
        let file = into.join(name);
        let stripped = Command::new("strip")
            .arg("-o")
            .arg(&file)
            .arg(built.join(name))
            .status()?;
        if !stripped.success() {
            return Err(io::Error::other(format!(
                "{} is missing; make rdma-programs builds it",
                built.join(name).display()
            )));
        }
        files.push(file);
    }
    files.extend(certificates(&built.join("godwit"), &into.join("certs"), 3)?);
    let plugin = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../criu-plugin/build");
    let plugins = into.join("plugins");
    let compiled = Command::new(plugin).arg(&plugins).output()?;
    if !compiled.status.success() {
        return Err(io::Error::other(
            String::from_utf8_lossy(&compiled.stderr).into_owned(),
        ));
    }
    files.push(plugins);
    Ok(files)
}
