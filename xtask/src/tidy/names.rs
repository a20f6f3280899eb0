//! These rules say how public types may be called.

use std::collections::{BTreeMap, BTreeSet};

use super::{documents, manifests};
use crate::lines::TestCode;
use crate::problem::Problem;
use crate::tree::Tree;

/// Names that every crate may have: each stands behind the name of its module wherever it is used,
/// or nobody outside can use it.
const CUSTOMARY: [&str; 2] = ["Error", "Sealed"];

/// The words that need no explanation.
const WORDS: &str = include_str!("words.txt");

/// A public type or trait, and where it is declared.
struct Type<'t> {
    name: &'t str,
    path: &'t str,
    line: usize,
}

/// Finds public types and traits of published crates that share their name with another.
pub fn duplicates(tree: &Tree) -> Vec<Problem> {
    let mut names = BTreeMap::<&str, Vec<Type<'_>>>::new();
    for one in types(tree) {
        names.entry(one.name).or_default().push(one);
    }
    names.retain(|name, types| types.len() > 1 && !CUSTOMARY.contains(name));
    let mut problems = Vec::new();
    for (name, types) in &names {
        for one in types.iter().skip(1) {
            let others =
                types.iter().filter(|other| other.path != one.path || other.line != one.line);
            let others: Vec<_> = others.map(|other| other.path).collect();
            let what = format!(
                "`{name}` is the name of another public type too, in {}: a name has one meaning \
                 in all crates",
                others.join(", ")
            );
            problems.push(Problem::new(one.path, one.line, what));
        }
    }
    problems
}

/// Finds public types and traits of published crates with a word in their name that is neither
/// plain English nor in the glossary.
pub fn words(tree: &Tree) -> Vec<Problem> {
    let lines = WORDS.lines().filter(|line| !line.starts_with('#'));
    let mut known: BTreeSet<String> =
        lines.flat_map(str::split_whitespace).map(str::to_owned).collect();
    for (_, term) in documents::terms(tree) {
        known.extend(term.split_whitespace().map(str::to_owned));
    }
    let is_known = |word: &str| {
        word.len() == 1
            || known.contains(word)
            || word.strip_suffix('s').is_some_and(|one| known.contains(one))
    };
    let mut problems = Vec::new();
    for one in types(tree) {
        for word in split(one.name).into_iter().filter(|word| !is_known(word)) {
            let what = format!(
                "`{}` has the word `{word}`, which is neither in {} nor among the plain words of \
                 xtask/src/tidy/words.txt; take another word, or say there what it means",
                one.name,
                documents::GLOSSARY,
            );
            problems.push(Problem::new(one.path, one.line, what));
        }
    }
    problems
}

/// The words of a name, in lower case; digits separate them.
fn split(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut characters = name.chars().peekable();
    let mut before = '_';
    while let Some(character) = characters.next() {
        if character.is_alphabetic() {
            let ends_capitals = characters.peek().is_some_and(|next| next.is_lowercase());
            let begins = !before.is_alphabetic()
                || character.is_uppercase() && (before.is_lowercase() || ends_capitals);
            match words.last_mut() {
                Some(word) if !begins => word.extend(character.to_lowercase()),
                _ => words.push(character.to_lowercase().collect()),
            }
        }
        before = character;
    }
    words
}

/// The public types and traits of the crates that are published. What is `pub` is public: the
/// compiler's lint `unreachable_pub` sees to it.
fn types(tree: &Tree) -> impl Iterator<Item = Type<'_>> {
    let tests = TestCode::of(tree);
    let crates = manifests::published(tree);
    let files = tree
        .rust("crates/")
        .filter(move |(file, _)| crates.iter().any(|folder| file.path.starts_with(folder)));
    files.flat_map(move |(file, rust)| {
        let is_test = tests.of_file(&file.path, rust);
        (0..rust.tokens.len()).filter_map(move |index| {
            if rust.text(index) != "pub" || is_test(rust.tokens[index].line) {
                return None;
            }
            let kind = if rust.text(index + 1) == "unsafe" { index + 2 } else { index + 1 };
            let is_type = matches!(rust.text(kind), "struct" | "enum" | "union" | "trait" | "type");
            let name = rust.tokens.get(kind + 1).filter(|name| is_type && name.text != "$")?;
            Some(Type { name: &name.text, path: &file.path, line: name.line })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places that the rule names in crates `a` and `b`, published, and `c`, which is not.
    fn places(a: &str, b: &str, c: &str) -> Vec<(String, usize)> {
        let tree = Tree::of(&[
            ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
            ("crates/a/src/lib.rs", a),
            ("crates/b/Cargo.toml", "[package]\nname = \"b\"\n"),
            ("crates/b/src/lib.rs", b),
            ("crates/c/Cargo.toml", "[package]\npublish = false\n"),
            ("crates/c/src/lib.rs", c),
        ]);
        duplicates(&tree).into_iter().map(|problem| (problem.path, problem.line)).collect()
    }

    #[test]
    fn a_name_of_two_public_types_is_found_at_the_second() {
        let found = places("pub struct Twice;", "\n\npub enum Twice {}", "pub struct Twice;");
        assert_eq!(found, [("crates/b/src/lib.rs".to_owned(), 3)]);
        for kind in ["pub unsafe trait Twice {}", "pub type Twice = u8;", "pub union Twice {}"] {
            let a = format!("pub struct Twice;\n{kind}\n");
            assert_eq!(places(&a, "", ""), [("crates/a/src/lib.rs".to_owned(), 2)], "{kind}");
        }
    }

    #[test]
    fn what_is_not_public_or_of_tests_has_any_name() {
        let a = "pub struct Twice;\npub enum Error {}\n";
        let others = "pub enum Error {}\npub(crate) struct Twice;\nstruct Twice;\n\
             impl A for B { type Twice = u8; }\n// pub struct Twice;\n\
             #[cfg(test)]\nmod tests { pub struct Twice; }\nfn f(pub_struct: Twice) {}\n";
        assert_eq!(places(a, others, "pub struct Twice;"), []);
    }

    #[test]
    fn names_are_made_of_plain_words_and_of_those_in_the_glossary() {
        let found = |text: &str| {
            let tree = Tree::of(&[
                ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
                ("crates/a/src/lib.rs", text),
                ("docs/src/glossary.md", "- **grubble**: x\n- **stream wibble**: y\n"),
            ]);
            words(&tree).len()
        };
        assert_eq!(found("pub struct GrubbleMap;\npub enum WibblesOfIommu64 {}\n"), 0);
        assert_eq!(found("pub struct MapFrobnic;\nstruct Frobnic;"), 1);
        assert_eq!(split("X86_64ConfigOfIova2M"), ["x", "config", "of", "iova", "m"]);
        assert_eq!(split("VtdSSRegisters"), ["vtd", "ss", "registers"]);
    }
}
