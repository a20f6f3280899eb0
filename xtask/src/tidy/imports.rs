//! This checks which system of the core may import which.
//!
//! Every folder of `crates/dmaspan/src` is one system, and every plain file there is shared by all.
//! Paths that begin with `crate`, `super` or `self` are resolved to the crate's root, groups
//! included, and what `lib.rs` re-exports counts as the system that it comes from. Only code is
//! looked at: a link in a doc comment imports nothing.

use std::collections::{BTreeMap, BTreeSet};

use crate::lexer::Lexed;
use crate::problem::Problem;
use crate::tree::Tree;

const SRC: &str = "crates/dmaspan/src/";

/// Each system, and the other systems that it may import.
const SYSTEMS: [(&str, &[&str]); 6] = [
    ("io_pgtable", &[]),
    ("iommu", &["io_pgtable"]),
    ("container", &["io_pgtable", "iommu"]),
    ("swiotlb", &[]),
    ("regbuf", &[]),
    ("dma", &["io_pgtable", "iommu", "container", "swiotlb", "regbuf"]),
];

/// A path from the crate's root on.
struct Import {
    path: Vec<String>,
    /// What it is called where it stands.
    name: String,
    line: usize,
}

/// Finds imports against the direction, and folders that are no system.
pub fn systems(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut unknown = BTreeSet::new();
    let exported = exported(tree, &mut problems);
    for (file, rust) in tree.rust(SRC) {
        let inner = &file.path[SRC.len()..];
        if inner == "lib.rs" {
            continue;
        }
        let parts: Vec<&str> = inner.trim_end_matches(".rs").split('/').collect();
        let owner = system(parts[0]);
        if owner.is_none() && parts.len() > 1 {
            unknown.insert(parts[0]);
            continue;
        }
        let module = parts.iter().filter(|&&part| part != "mod").map(|&part| part.to_owned());
        for import in imports(rust, module.collect()) {
            let Some(first) = import.path.first() else { continue };
            let target = system(first).or_else(|| exported.get(first).copied());
            let what = match (owner, target) {
                _ if first == "*" => {
                    "imports everything at the crate's root; name what is used".into()
                }
                (_, None) => continue,
                (None, Some(target)) => format!(
                    "a file that all systems share imports `{}`; move this code into the system, \
                     or what both need into a shared file",
                    target.0
                ),
                (Some(owner), Some(target)) if owner.0 == target.0 => continue,
                (Some(owner), Some(target)) if owner.1.contains(&target.0) => continue,
                (Some(owner), Some(target)) => format!(
                    "`{}` imports `{}`, and may import {}; move what both need into a shared file",
                    owner.0,
                    target.0,
                    listed(owner.1)
                ),
            };
            problems.push(Problem::new(&file.path, import.line, what));
        }
    }
    for folder in unknown {
        let names = SYSTEMS.map(|(name, _)| name).join(", ");
        let what = format!(
            "this folder is not a system; the systems are {names}: make it a plain file, or \
             name the system in the design and in xtask/src/tidy/imports.rs"
        );
        problems.push(Problem::of_file(&format!("{SRC}{folder}"), what));
    }
    problems
}

type System = (&'static str, &'static [&'static str]);

fn system(name: &str) -> Option<System> {
    SYSTEMS.into_iter().find(|system| system.0 == name)
}

fn listed(systems: &[&str]) -> String {
    match systems {
        [] => "no other system".to_owned(),
        systems => format!("no system but {}", systems.join(", ")),
    }
}

/// The names that `lib.rs` re-exports from systems.
fn exported(tree: &Tree, problems: &mut Vec<Problem>) -> BTreeMap<String, System> {
    let mut names = BTreeMap::new();
    for (file, rust) in tree.rust(SRC).filter(|(file, _)| file.path == format!("{SRC}lib.rs")) {
        let uses = (0..rust.tokens.len()).filter(|&index| rust.text(index) == "use");
        for index in uses {
            let mut found = Vec::new();
            resolve(rust, index + 1, Vec::new(), &mut found);
            for Import { path, name, line } in found {
                let Some(system) = path.first().and_then(|first| system(first)) else { continue };
                if name == "*" {
                    let what = format!("re-exports all of `{}`; name what is exported", system.0);
                    problems.push(Problem::new(&file.path, line, what));
                }
                names.insert(name, system);
            }
        }
    }
    names
}

/// All paths of a file that begin with `crate`, `super` or `self`. `module` is where the file
/// stands.
fn imports(rust: &Lexed, mut module: Vec<String>) -> Vec<Import> {
    let mut found = Vec::new();
    // For each open brace, whether it opened a module.
    let mut opened = Vec::new();
    let mut index = 0;
    while index < rust.tokens.len() {
        match rust.text(index) {
            "mod" if rust.text(index + 2) == "{" => {
                module.push(rust.text(index + 1).to_owned());
                opened.push(true);
                index += 3;
            }
            "{" => {
                opened.push(false);
                index += 1;
            }
            "}" => {
                if opened.pop() == Some(true) {
                    module.pop();
                }
                index += 1;
            }
            "crate" | "super" | "self" if rust.text(index + 1) == "::" => {
                index = resolve(rust, index, module.clone(), &mut found);
            }
            _ => index += 1,
        }
    }
    found
}

/// Resolves the path at `index`, and those of its groups, and returns the index behind it.
fn resolve(rust: &Lexed, mut index: usize, mut path: Vec<String>, out: &mut Vec<Import>) -> usize {
    let line = rust.tokens.get(index).map_or(1, |token| token.line);
    loop {
        match rust.text(index) {
            "{" => {
                index += 1;
                while !matches!(rust.text(index), "}" | "") {
                    index = match rust.text(index) {
                        "," => index + 1,
                        _ => resolve(rust, index, path.clone(), out),
                    };
                }
                return index + 1;
            }
            "crate" => path.clear(),
            "super" => drop(path.pop()),
            "self" => {}
            segment => path.push(segment.to_owned()),
        }
        index += 1;
        if rust.text(index) != "::" {
            break;
        }
        index += 1;
    }
    let mut name = path.last().cloned().unwrap_or_default();
    if rust.text(index) == "as" {
        name = rust.text(index + 1).to_owned();
        index += 2;
    }
    out.push(Import { path, name, line });
    index
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the rule says about a file of the core with this text.
    fn found(path: &str, text: &str) -> Vec<Problem> {
        let lib =
            "pub use addr::Iova;\npub use container::Container;\npub use iommu::{Domain as D};";
        let path = format!("{SRC}{path}");
        systems(&Tree::of(&[("crates/dmaspan/src/lib.rs", lib), (&path, text)]))
    }

    #[test]
    fn a_shared_file_imports_no_system() {
        let problems = found("space.rs", "use crate::addr::Iova;\nuse crate::iommu::Domain;");
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].line, 2);
        assert!(problems[0].what.contains("`iommu`"), "{problems:?}");
    }

    #[test]
    fn each_pair_of_systems_is_judged_as_the_design_says() {
        let order = ["io_pgtable", "iommu", "container", "swiotlb", "regbuf", "dma"];
        let allowed = |from: usize, to: usize| from == to || from == 5 || (to < from && from <= 2);
        for (from, owner) in order.iter().enumerate() {
            for (to, target) in order.iter().enumerate() {
                let problems = found(&format!("{owner}/x.rs"), &format!("use crate::{target}::X;"));
                assert_eq!(problems.is_empty(), allowed(from, to), "{owner} imports {target}");
            }
        }
    }

    #[test]
    fn groups_are_looked_into_however_deep() {
        let text = "use crate::{\n addr::Iova,\n lg2::{self, size},\n iommu::{Domain, X}\n};";
        assert_eq!(found("io_pgtable/map.rs", text)[0].line, 4);
        assert_eq!(found("swiotlb/mod.rs", "use {core::fmt, crate::{dma}};").len(), 1);
        assert_eq!(found("swiotlb/x.rs", "use super::{super::regbuf, x};").len(), 1);
        assert_eq!(found("swiotlb/x/y.rs", "use super::{super::regbuf, x};").len(), 0);
    }

    #[test]
    fn paths_within_code_count_too() {
        assert_eq!(found("swiotlb/a.rs", "fn f() { crate::regbuf::g::<u8>(1) }").len(), 1);
        assert_eq!(found("swiotlb/a.rs", "type T = super::super::regbuf::X;").len(), 1);
        assert_eq!(found("swiotlb/mod.rs", "type T = super::regbuf::X;").len(), 1);
        assert_eq!(found("swiotlb/a.rs", "type T = super::regbuf::X;").len(), 0);
    }

    #[test]
    fn a_module_within_a_file_is_one_step_further_down() {
        let text = "mod tests { fn f() {} use super::super::iommu::X; }";
        assert_eq!(found("container/a.rs", text).len(), 0);
        assert_eq!(found("swiotlb/mod.rs", text).len(), 1);
        assert_eq!(found("addr.rs", "mod m { fn f() {} }\nuse super::iommu::X;")[0].line, 2);
    }

    #[test]
    fn names_at_the_root_belong_to_the_system_that_they_come_from() {
        assert_eq!(found("pin.rs", "use crate::Container;").len(), 1);
        assert_eq!(found("pin.rs", "use crate::D;").len(), 1);
        assert_eq!(found("pin.rs", "use crate::Iova;").len(), 0);
        assert_eq!(found("pin.rs", "use super::*;").len(), 1);
        assert_eq!(found("pin.rs", "mod tests { use super::*; }").len(), 0);
        let lib = [("crates/dmaspan/src/lib.rs", "pub use iommu::*;")];
        assert_eq!(systems(&Tree::of(&lib)).len(), 1);
    }

    #[test]
    fn links_in_doc_comments_and_strings_import_nothing() {
        let text = "/// See [`crate::iommu::Domain`].\nconst X: &str = \"crate::iommu::X\";";
        assert!(found("pin.rs", text).is_empty());
    }

    #[test]
    fn a_folder_that_is_no_system_is_named_once() {
        let files = ["crates/dmaspan/src/util/a.rs", "crates/dmaspan/src/util/b.rs"];
        let problems = systems(&Tree::of(&files.map(|path| (path, ""))));
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].path, "crates/dmaspan/src/util");
        assert!(problems[0].what.contains("not a system"), "{problems:?}");
    }
}
