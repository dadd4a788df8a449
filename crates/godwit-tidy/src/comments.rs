//! Comments: the files that they name, and how they open.

use crate::tree::{SourceFile, Tree};

/// Words that hide the subject of a comment.
const ASKING: [&str; 16] = [
    "What", "Whether", "Who", "How", "Whoever", "Whom", "Whatever", "Where", "When", "Why",
    "Which", "So", "One", "Those", "Nobody", "Somebody",
];
/// Of a thousand comments so many may open with such a word.
const OPENINGS: usize = 60;
/// Endings of names that are taken for files.
const ENDINGS: [&str; 6] = [".rs", ".md", ".toml", ".sh", ".c", ".sv"];

/// Files that comments and documents name in code marks, and that the tree lacks.
pub(crate) fn missing_files(tree: &Tree) -> Vec<String> {
    let mut places = Vec::new();
    for file in &tree.rust {
        for comment in comments(file) {
            for name in named_files(&comment.text) {
                let there = |path: &String| path == name || path.ends_with(&format!("/{name}"));
                if !tree.paths.iter().any(there) {
                    places.push(format!("{}:{}: {name}", file.path, comment.line));
                }
            }
        }
    }
    places
}

/// The comments that open with such a word, if they are too many of all.
pub(crate) fn openings(tree: &Tree) -> Vec<String> {
    let (mut all, mut places) = (0, Vec::new());
    for file in &tree.rust {
        for comment in comments(file) {
            all += 1;
            let first = comment
                .text
                .split(|letter: char| !letter.is_alphanumeric())
                .find(|word| !word.is_empty());
            if first.is_some_and(|first| ASKING.contains(&first)) {
                let start: String = comment.text.chars().take(60).collect();
                places.push(format!("{}:{}: {start}", file.path, comment.line));
            }
        }
    }
    if places.len() * 1000 <= all * OPENINGS {
        places.clear();
    }
    places
}

/// Lines of comment on end.
struct Comment {
    line: usize,
    text: String,
}

fn comments(file: &SourceFile) -> Vec<Comment> {
    let mut found: Vec<Comment> = Vec::new();
    let mut goes_on = false;
    for (number, line) in file.text.lines().enumerate() {
        let text = line.trim_start().strip_prefix("//");
        if let Some(text) = text {
            let text = text.trim_start_matches(['/', '!']).trim();
            match found.last_mut().filter(|_| goes_on) {
                Some(comment) => {
                    comment.text.push(' ');
                    comment.text.push_str(text);
                }
                None => found.push(Comment {
                    line: number + 1,
                    text: text.to_owned(),
                }),
            }
        }
        goes_on = text.is_some();
    }
    found
}

/// What stands in code marks or opens with `docs/` and ends like the name of a file.
fn named_files(text: &str) -> Vec<&str> {
    let marked = text.split('`').skip(1).step_by(2);
    let documents = text
        .split_whitespace()
        .filter(|word| word.starts_with("docs/"));
    marked
        .chain(documents)
        .map(|name| name.trim_end_matches(['.', ',', ';', ':', ')']))
        .map(|name| name.split('#').next().unwrap_or(name))
        .filter(|name| {
            ENDINGS
                .iter()
                .any(|ending| name.len() > ending.len() && name.ends_with(ending))
        })
        .filter(|name| {
            name.chars()
                .all(|letter| letter.is_ascii_alphanumeric() || "/._-".contains(letter))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{missing_files, openings};
    use crate::tree::Tree;

    #[test]
    fn a_file_that_a_comment_names_must_be_there() {
        let text = "/// See `b.rs`, `gone.rs` and docs/gone.md.\nfn x() {}\n// As in `src/b.rs` and `x.rss`.\n";
        let tree = Tree::of(&[("src/a.rs", text), ("src/b.rs", "")]);
        assert_eq!(
            missing_files(&tree),
            ["src/a.rs:1: gone.rs", "src/a.rs:1: docs/gone.md"]
        );
    }

    #[test]
    fn comments_that_ask_are_found_when_they_are_many() {
        let good = "/// Sends it.\nfn x() {}\n".repeat(94);
        let asking = "// Whether it is.\n// So it is.\nfn y() {}\n";
        let few = good.clone() + &asking.repeat(6);
        assert!(openings(&Tree::of(&[("a.rs", &few)])).is_empty());
        let many = good + &asking.repeat(7);
        let found = openings(&Tree::of(&[("a.rs", &many)]));
        assert_eq!(found.len(), 7);
        assert_eq!(found[0], "a.rs:189: Whether it is. So it is.");
    }
}
