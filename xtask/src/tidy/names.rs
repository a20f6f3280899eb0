//! What public types are called.

use std::collections::{BTreeMap, BTreeSet};

use super::{documents, manifests};
use crate::lines::TestCode;
use crate::problem::Problem;
use crate::tree::Tree;

/// Names that every crate may have: each stands behind the name of its module wherever it is used,
/// or nobody outside can use it.
const CUSTOMARY: [&str; 2] = ["Error", "Sealed"];

/// Names with more than one meaning: how many each has, and which.
const DUPLICATES: &[(&str, usize, &str)] = &[
    ("AmdV1Registers", 2, "what tables want in them; what a walker reads"),
    ("ArmS1Registers", 2, "what tables want in them; what a walker reads"),
    ("ArmS2Registers", 2, "what tables want in them; what a walker reads"),
    ("ArmV7sRegisters", 2, "what tables want in them; what a walker reads"),
    ("AttachError", 2, "of a stream to a domain; of a pool to a ring"),
    ("Attachment", 2, "of a stream; of a pool to a ring"),
    ("BadRegisters", 2, "of Arm's long descriptors; of its short ones"),
    ("BadTable", 2, "of any format; of Arm's long descriptors"),
    ("Bar", 2, "one that is mapped; one in sysfs"),
    ("Class", 2, "of a PCI function; of a finding"),
    ("Config", 4, "of a flush queue; a function's registers; of the sanitizer; of a walker"),
    ("Counters", 2, "of an IOTLB; of a model of SMMUv2"),
    ("Counts", 2, "of a pool's memory; of a folio"),
    ("Device", 3, "of the DMA API; of VFIO; simulated"),
    ("DirtyBitmap", 2, "of a page table's ranges; of a device's"),
    ("DirtyTracking", 2, "whether entries are marked; whether a space notes pages"),
    ("Entry", 2, "of a page table; of a scatter list"),
    ("Event", 2, "of a domain; an interrupt's counter"),
    ("Half", 2, "that a table translates; that a walker's register is for"),
    ("Interrupts", 2, "whether a domain's are isolated; how an SMMU tells of events"),
    ("Kind", 2, "of pinned memory; of a finding"),
    ("Limits", 2, "of a space; of descriptors"),
    ("MapFailed", 2, "in a domain; in a table"),
    ("Mapped", 4, "leaves; what a map found; a mapping that is held; a buffer of one call"),
    ("MemoryError", 2, "of real memory; of simulated"),
    ("MockRegisters", 2, "what tables want in them; what a walker reads"),
    ("Mode", 2, "of VT-d; of the sanitizer"),
    ("Node", 2, "a registered buffer; a file of /dev"),
    ("Owner", 2, "of registered buffers; of a file"),
    ("Privilege", 2, "that a mapping demands; that an access has"),
    ("Refused", 3, "a mapping; an operation on a buffer; a transaction"),
    ("Region", 2, "memory that a device shall use; a range of a table"),
    ("RegionError", 2, "of reserved IOVAs; of a client's memory"),
    ("Request", 2, "of IOVAs; of a slot's buffer"),
    ("RiscvRegisters", 2, "what tables want in them; what a walker reads"),
    ("RiscvStage", 2, "that a table is for; that a walker's register is for"),
    ("Segment", 2, "of a list; of simulated user memory"),
    ("Segments", 2, "of a registered buffer; of a list"),
    ("Space", 2, "of IOVAs; of a VFIO container or an IOAS"),
    ("Stage", 2, "of VT-d; of an SMMUv3"),
    ("Stats", 2, "of IOVAs; of a pool"),
    ("StreamMapping", 2, "of the driver; of the model"),
    ("Tables", 3, "whether an invalidation is of tables; what two drivers ask of formats, sealed"),
    ("Target", 2, "of a stream; of an operation on a ring"),
    ("Translation", 2, "what translates a device's addresses; what an address translates to"),
    ("Type1", 2, "the interface that is offered; the one that is used"),
    ("Unmapped", 3, "what an unmap did; what became of memory; an unmap that failed"),
    ("VtdSsRegisters", 2, "what tables want in them; what a walker reads"),
];

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
    found(tree, DUPLICATES)
}

fn found(tree: &Tree, known: &[(&str, usize, &str)]) -> Vec<Problem> {
    let mut names = BTreeMap::<&str, Vec<Type<'_>>>::new();
    for one in types(tree) {
        names.entry(one.name).or_default().push(one);
    }
    names.retain(|name, types| types.len() > 1 && !CUSTOMARY.contains(name));
    let mut problems = Vec::new();
    for (name, types) in &names {
        let allowed = known.iter().find(|known| known.0 == *name).map_or(1, |known| known.1);
        for one in types.iter().skip(allowed) {
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
    for (name, count, _) in known {
        let now = names.get(name).map_or(0, Vec::len);
        if now < *count {
            let what = format!(
                "`{name}` has {now} meanings in the crates and {count} in the list of \
                 xtask/src/tidy/names.rs; shorten the list"
            );
            problems.push(Problem::of_file("crates", what));
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
    let crates = tree.files().iter().filter_map(|file| {
        let folder =
            file.path.strip_suffix("/Cargo.toml").filter(|path| path.starts_with("crates/"))?;
        let is_kept = manifests::settings(&file.text).any(|setting| {
            (setting.table, setting.key, setting.value) == ("package", "publish", "false")
        });
        (!is_kept).then(|| format!("{folder}/src/"))
    });
    let crates: Vec<String> = crates.collect();
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

    const KNOWN: &[(&str, usize, &str)] = &[("Known", 2, "one; another")];

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
        found(&tree, KNOWN).into_iter().map(|problem| (problem.path, problem.line)).collect()
    }

    const BOTH: &str = "pub struct Known;\n";

    #[test]
    fn a_name_of_two_public_types_is_found_at_the_second() {
        let b = format!("{BOTH}\npub enum Twice {{}}");
        let found = places(&format!("pub struct Twice;\n{BOTH}"), &b, "pub struct Twice;");
        assert_eq!(found, [("crates/b/src/lib.rs".to_owned(), 3)]);
        for kind in ["pub unsafe trait Twice {}", "pub type Twice = u8;", "pub union Twice {}"] {
            let a = format!("pub struct Twice;\n{kind}\n{BOTH}");
            assert_eq!(places(&a, BOTH, ""), [("crates/a/src/lib.rs".to_owned(), 2)], "{kind}");
        }
    }

    #[test]
    fn what_is_not_public_or_of_tests_has_any_name() {
        let a = format!("pub struct Twice;\npub enum Error {{}}\n{BOTH}");
        let others = "pub enum Error {}\npub(crate) struct Twice;\nstruct Twice;\n\
             impl A for B { type Twice = u8; }\n// pub struct Twice;\n\
             #[cfg(test)]\nmod tests { pub struct Twice; }\nfn f(pub_struct: Twice) {}\n";
        assert_eq!(places(&a, &format!("{BOTH}{others}"), "pub struct Twice;"), []);
    }

    #[test]
    fn names_are_made_of_plain_words_and_of_those_in_the_glossary() {
        let found = |text: &str| {
            let tree = Tree::of(&[
                ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
                ("crates/a/src/lib.rs", text),
                ("docs/glossary.md", "- **grubble**: x\n- **stream wibble**: y\n"),
            ]);
            words(&tree).len()
        };
        assert_eq!(found("pub struct GrubbleMap;\npub enum WibblesOfIommu64 {}\n"), 0);
        assert_eq!(found("pub struct MapFrobnic;\nstruct Frobnic;"), 1);
        assert_eq!(split("X86_64ConfigOfIova2M"), ["x", "config", "of", "iova", "m"]);
        assert_eq!(split("VtdSSRegisters"), ["vtd", "ss", "registers"]);
    }

    #[test]
    fn a_known_name_may_not_spread_and_leaves_the_list_when_it_has_one_meaning() {
        let third = format!("{BOTH}mod m {{\npub struct Known;\n}}");
        assert_eq!(places(BOTH, &third, ""), [("crates/b/src/lib.rs".to_owned(), 3)]);
        assert_eq!(places(BOTH, BOTH, ""), []);
        assert_eq!(places(BOTH, "", ""), [("crates".to_owned(), 1)]);
    }
}
