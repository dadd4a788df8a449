//! Lengths of files and sizes of folders.

use std::collections::BTreeMap;

use crate::tree::Tree;

/// Lines of a source file, beyond which it holds two ideas.
const LINES: usize = 600;
/// Source files of a folder, beyond which it is two rooms.
const FILES: usize = 10;

/// Rust files that are too long.
pub(crate) fn long_files(tree: &Tree) -> Vec<String> {
    let lengths = tree
        .rust
        .iter()
        .map(|file| (file, file.text.lines().count()));
    lengths
        .filter(|(_, lines)| *lines > LINES)
        .map(|(file, lines)| format!("{}: {lines} lines", file.path))
        .collect()
}

/// Folders with too many Rust files.
pub(crate) fn full_folders(tree: &Tree) -> Vec<String> {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for file in &tree.rust {
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *folders.entry(folder).or_default() += 1;
    }
    folders
        .into_iter()
        .filter(|(_, files)| *files > FILES)
        .map(|(folder, files)| format!("{folder}: {files} files"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{FILES, LINES, full_folders, long_files};
    use crate::tree::Tree;

    #[test]
    fn a_line_too_many_is_found() {
        let (fits, long) = ("\n".repeat(LINES), "\n".repeat(LINES + 1));
        let tree = Tree::of(&[("a.rs", &fits), ("b.rs", &long)]);
        assert_eq!(long_files(&tree), ["b.rs: 601 lines"]);
    }

    #[test]
    fn a_file_too_many_is_found() {
        let names: Vec<String> = (0..=FILES)
            .map(|number| format!("src/{number}.rs"))
            .collect();
        let files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
        assert_eq!(full_folders(&Tree::of(&files)), ["src: 11 files"]);
        assert!(full_folders(&Tree::of(&files[1..])).is_empty());
    }
}
