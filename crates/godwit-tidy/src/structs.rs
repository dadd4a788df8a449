//! Sizes of structs.

use syn::visit::{self, Visit};

use crate::tree::Tree;

/// Fields of a struct, beyond which it is several things.
const FIELDS: usize = 25;
/// Larger structs: `file: struct`, and why the struct cannot be split.
const EXCUSED: [(&str, &str); 1] = [(
    "crates/godwit-verbs/src/abi/objects.rs: ibv_qp_attr",
    "its layout is part of libibverbs' ABI",
)];

/// Structs with too many fields. Files that cannot be parsed are found by [`crate::functions::long_functions`].
pub(crate) fn large_structs(tree: &Tree) -> Vec<String> {
    let mut places = Vec::new();
    for file in &tree.rust {
        let mut sizes = Sizes::default();
        if let Ok(parsed) = syn::parse_file(&file.text) {
            sizes.visit_file(&parsed);
        }
        for (name, line, fields) in sizes.structs {
            let place = format!("{}: {name}", file.path);
            let is_excused = EXCUSED.iter().any(|(excused, _)| *excused == place);
            if fields > FIELDS && !is_excused {
                places.push(format!("{}:{line}: {name} has {fields} fields", file.path));
            }
        }
    }
    places
}

/// Name, line and number of named fields of each struct.
#[derive(Default)]
struct Sizes {
    structs: Vec<(String, usize, usize)>,
}

impl<'a> Visit<'a> for Sizes {
    fn visit_item_struct(&mut self, found: &'a syn::ItemStruct) {
        if let syn::Fields::Named(fields) = &found.fields {
            let (name, line) = (&found.ident, found.struct_token.span.start().line);
            self.structs
                .push((name.to_string(), line, fields.named.len()));
        }
        visit::visit_item_struct(self, found);
    }
}

#[cfg(test)]
mod tests {
    use super::{EXCUSED, FIELDS, large_structs};
    use crate::tree::Tree;

    fn definition(name: &str, fields: usize) -> String {
        let fields: String = (0..fields)
            .map(|field| format!("    f{field}: u8,\n"))
            .collect();
        format!("fn x() {{\n#[derive(Debug)]\nstruct {name} {{\n{fields}}}\n}}\n")
    }

    #[test]
    fn a_field_too_many_is_found() {
        let (fits, large) = (definition("Fits", FIELDS), definition("Large", FIELDS + 1));
        let tree = Tree::of(&[("a.rs", &fits), ("b.rs", &large)]);
        assert_eq!(large_structs(&tree), ["b.rs:3: Large has 26 fields"]);
    }

    #[test]
    fn an_excuse_is_for_one_struct_of_one_file() {
        let large = definition("ibv_qp_attr", FIELDS + 1);
        let (path, _) = EXCUSED[0].0.split_once(": ").expect("file and struct");
        let tree = Tree::of(&[(path, &large), ("b.rs", &large)]);
        assert_eq!(large_structs(&tree), ["b.rs:3: ibv_qp_attr has 26 fields"]);
    }
}
