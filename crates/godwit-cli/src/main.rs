//! The program `godwit`.

use std::process::ExitCode;

fn main() -> ExitCode {
    godwit_cli::main()
}
