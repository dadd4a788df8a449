//! The command `godwit manual`, used when the package is built.

use std::path::Path;

use clap::CommandFactory as _;

use crate::arguments::Arguments;
use crate::failure::Failure;

/// Writes a manual page for every command into an existing directory.
pub(crate) fn run(directory: &Path) -> Result<(), Failure> {
    clap_mangen::generate_to(Arguments::command(), directory).map_err(|error| {
        Failure::caused(
            format!("cannot write manual pages to {}", directory.display()),
            &error,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_hidden_ones_have_none() {
        let directory = tempfile::tempdir().unwrap();
        run(directory.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name));
        assert!(page("godwit-vm-run.1").unwrap().contains("godwit-vm-run"));
        for command in Arguments::command().get_subcommands() {
            let name = format!("godwit-{}.1", command.get_name());
            assert_eq!(page(&name).is_ok(), !command.is_hide_set(), "{name}");
        }
    }
}
