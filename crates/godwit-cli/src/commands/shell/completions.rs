//! The command `godwit completions`.

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::show::output::print_text;

pub(crate) fn run(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "godwit", &mut script);
    print_text(&String::from_utf8_lossy(&script))
}
