//! The files that the rules look at.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders with nothing that a person wrote.
const FOREIGN: [&str; 4] = [".git", "target", "corpus", "node_modules"];

/// A file of the checkout.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Relative to the root of the checkout, with slashes.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// All text files of the checkout that people edit.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Rust sources.
    pub(crate) rust: Vec<SourceFile>,
    /// Markdown documents.
    pub(crate) documents: Vec<SourceFile>,
    /// The path of every file, of any kind.
    pub(crate) paths: Vec<String>,
}

impl Tree {
    /// Reads the checkout below `root`.
    ///
    /// # Errors
    /// A folder or a source cannot be read.
    pub(crate) fn read(root: &Path) -> io::Result<Self> {
        let mut tree = Self::default();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    let is_foreign = FOREIGN.iter().any(|name| path.ends_with(name));
                    folders.extend((!is_foreign).then_some(path));
                } else {
                    tree.add(root, path)?;
                }
            }
        }
        for files in [&mut tree.rust, &mut tree.documents] {
            files.sort_by(|a, b| a.path.cmp(&b.path));
        }
        tree.paths.sort();
        Ok(tree)
    }

    fn add(&mut self, root: &Path, path: PathBuf) -> io::Result<()> {
        let relative = path.strip_prefix(root).unwrap_or(&path);
        let relative = relative.to_string_lossy().replace('\\', "/");
        let files = match path.extension().and_then(OsStr::to_str) {
            Some("rs") => &mut self.rust,
            Some("md") => &mut self.documents,
            _ => {
                self.paths.push(relative);
                return Ok(());
            }
        };
        files.push(SourceFile {
            text: fs::read_to_string(&path)?,
            path: relative.clone(),
        });
        self.paths.push(relative);
        Ok(())
    }
}

#[cfg(test)]
impl Tree {
    /// A tree with these Rust sources and documents.
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self::default();
        for (path, text) in files {
            tree.paths.push((*path).to_owned());
            let file = SourceFile {
                path: (*path).to_owned(),
                text: (*text).to_owned(),
            };
            if path.ends_with(".md") {
                tree.documents.push(file);
            } else if path.ends_with(".rs") {
                tree.rust.push(file);
            }
        }
        tree
    }
}
