//! Links in documents.

use std::collections::HashSet;

use crate::tree::Tree;

/// Links to files that are not there, and to headings that their document lacks.
pub(crate) fn broken_links(tree: &Tree) -> Vec<String> {
    let mut places = Vec::new();
    for document in &tree.documents {
        for (line, link) in links(&document.text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = resolve(&document.path, file);
            let is_folder = || {
                tree.paths
                    .iter()
                    .any(|path| path.starts_with(&format!("{target}/")))
            };
            let found = tree.documents.iter().find(|found| found.path == target);
            let leads_somewhere = match found {
                Some(found) => heading.is_empty() || headings(&found.text).contains(heading),
                None => heading.is_empty() && (tree.paths.contains(&target) || is_folder()),
            };
            if !leads_somewhere {
                places.push(format!("{}:{line}: {link}", document.path));
            }
        }
    }
    places
}

/// The links outside of code, with their lines.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let targets = line.split("](").skip(1);
        let targets = targets.filter_map(|rest| rest.split_once(')'));
        found.extend(targets.map(|(target, _)| (number + 1, target)));
    }
    found
}

/// The path of a link's file, relative to the root.
fn resolve(from: &str, link: &str) -> String {
    if link.is_empty() {
        return from.to_owned();
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in link.trim_end_matches('/').split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The anchors that a forge makes of a document's headings.
fn headings(text: &str) -> HashSet<String> {
    let mut found = HashSet::new();
    let mut in_code = false;
    for line in text.lines() {
        in_code ^= line.starts_with("```");
        let title = line.trim_start_matches('#');
        if in_code || title.len() == line.len() {
            continue;
        }
        let letters = title.trim().to_lowercase();
        let kept = letters
            .chars()
            .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
        let anchor: String = kept
            .map(|letter| if letter == ' ' { '-' } else { letter })
            .collect();
        let again = (1..).map(|times| format!("{anchor}-{times}"));
        let mut names = std::iter::once(anchor.clone()).chain(again);
        let name = names.find(|name| !found.contains(name));
        found.extend(name);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::broken_links;
    use crate::tree::Tree;

    #[test]
    fn links_to_nothing_are_found() {
        let one = "# One, `two`\n[a](b.md) [b](b.md#the-end) [c](#one-two) [d](../x.rs) [e](https://x/y.md)\n\
                   [f](c.md) [g](b.md#start) [h](#two)\n```\n[i](none.md)\n```\n";
        let tree = Tree::of(&[
            ("docs/a.md", one),
            ("docs/b.md", "## The end\n"),
            ("x.rs", ""),
        ]);
        let expected = [
            "docs/a.md:3: c.md",
            "docs/a.md:3: b.md#start",
            "docs/a.md:3: #two",
        ];
        assert_eq!(broken_links(&tree), expected);
    }
}
