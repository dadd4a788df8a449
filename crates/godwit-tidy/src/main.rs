//! Checks the tree for what the compiler does not: lengths of files and functions, sizes of folders and structs, links in
//! documents, files that comments name, and the openings of comments. `make tidy` runs it on this checkout.

mod comments;
mod documents;
mod functions;
mod sizes;
mod structs;
mod tree;

use std::path::Path;
use std::process::ExitCode;

use tree::Tree;

/// A rule: every place where the tree breaks it.
type Rule = fn(&Tree) -> Vec<String>;

const RULES: [(&str, Rule); 7] = [
    ("a source file has at most 600 lines", sizes::long_files),
    ("a folder has at most ten source files", sizes::full_folders),
    ("a function has at most 70 lines", functions::long_functions),
    ("a struct has at most 25 fields", structs::large_structs),
    (
        "a link in a document leads somewhere",
        documents::broken_links,
    ),
    (
        "a file that a comment names exists",
        comments::missing_files,
    ),
    ("comments open with their subject", comments::openings),
];

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tree = match Tree::read(&root) {
        Ok(tree) => tree,
        Err(error) => {
            eprintln!("tidy: {}: {error}", root.display());
            return ExitCode::FAILURE;
        }
    };
    let broken: usize = RULES
        .iter()
        .map(|(name, rule)| report(name, rule(&tree)))
        .sum();
    match broken {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Prints the places where a rule is broken, and returns their number.
fn report(name: &str, places: Vec<String>) -> usize {
    if !places.is_empty() {
        eprintln!("tidy: {name}:");
    }
    for place in &places {
        eprintln!("  {place}");
    }
    places.len()
}
