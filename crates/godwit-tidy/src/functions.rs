//! Lengths of functions.

use proc_macro2::Span;
use syn::visit::{self, Visit};

use crate::tree::Tree;

/// Lines of a function, from its signature to its closing brace.
const LINES: usize = 70;
/// This file, in the checkout.
const OWN: &str = "crates/godwit-tidy/src/functions.rs";
/// Longer functions of today, a line each as `file: function`. The list gets shorter, not longer.
const EXCUSED: &str = include_str!("../excused.txt");

/// Functions that are too long; and excuses that nothing needs.
pub(crate) fn long_functions(tree: &Tree) -> Vec<String> {
    let mut places = Vec::new();
    let excuses: Vec<&str> = EXCUSED.lines().collect();
    let mut excused: Vec<&str> = Vec::new();
    for file in &tree.rust {
        let mut lengths = Lengths::default();
        match syn::parse_file(&file.text) {
            Ok(parsed) => lengths.visit_file(&parsed),
            Err(error) => places.push(format!("{}: cannot be parsed: {error}", file.path)),
        }
        for (name, line, lines) in lengths.functions {
            let place = format!("{}: {name}", file.path);
            match excuses.iter().find(|excuse| **excuse == place) {
                _ if lines <= LINES => {}
                Some(excuse) => excused.push(excuse),
                None => places.push(format!("{}:{line}: {name} has {lines} lines", file.path)),
            }
        }
    }
    // The trees of this crate's tests have none of these files.
    if tree.rust.iter().any(|file| file.path == OWN) {
        let needless = excuses.iter().filter(|excuse| !excused.contains(excuse));
        places.extend(needless.map(|excuse| format!("{excuse} needs no excuse any more")));
    }
    places
}

/// Name, first line and number of lines of each function.
#[derive(Default)]
struct Lengths {
    functions: Vec<(String, usize, usize)>,
}

impl Lengths {
    fn add(&mut self, signature: &syn::Signature, body: Span) {
        let first = signature.fn_token.span.start().line;
        let lines = body.end().line + 1 - first;
        self.functions
            .push((signature.ident.to_string(), first, lines));
    }
}

impl<'a> Visit<'a> for Lengths {
    fn visit_item_fn(&mut self, function: &'a syn::ItemFn) {
        self.add(&function.sig, function.block.brace_token.span.close());
        visit::visit_item_fn(self, function);
    }

    fn visit_impl_item_fn(&mut self, function: &'a syn::ImplItemFn) {
        self.add(&function.sig, function.block.brace_token.span.close());
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'a syn::TraitItemFn) {
        if let Some(body) = &function.default {
            self.add(&function.sig, body.brace_token.span.close());
        }
        visit::visit_trait_item_fn(self, function);
    }
}

#[cfg(test)]
mod tests {
    use super::{LINES, long_functions};
    use crate::tree::Tree;

    fn function(lines: usize) -> String {
        format!(
            "impl X {{\n/// Long.\n#[inline]\npub fn long() {{\n{}}}\n}}\n",
            "();\n".repeat(lines - 2)
        )
    }

    #[test]
    fn a_line_too_many_is_found() {
        let (fits, long) = (function(LINES), function(LINES + 1));
        let tree = Tree::of(&[("a.rs", &fits), ("b.rs", &long)]);
        assert_eq!(long_functions(&tree), ["b.rs:4: long has 71 lines"]);
    }

    #[test]
    fn a_file_that_is_no_rust_is_found() {
        let found = long_functions(&Tree::of(&[("a.rs", "fn (")]));
        assert!(found[0].starts_with("a.rs: cannot be parsed"), "{found:?}");
    }
}
