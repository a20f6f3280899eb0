//! `cargo xtask lines` counts lines of code by package: lines that are neither blank nor comments.
//!
//! Tests and benchmarks stand apart, so that what a package does can be compared with what it was
//! before, in another checkout.

use std::collections::BTreeMap;
use std::ops::{AddAssign, RangeInclusive};

use crate::lexer::Lexed;
use crate::tree::{File, Tree};

/// Lines of code, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Everything else: libraries, programs, build scripts and examples.
    pub product: usize,
    /// Items under `#[cfg(test)]`, the files of such modules, files called `tests.rs`, and folders
    /// called `tests`.
    pub tests: usize,
    /// Folders called `benches`.
    pub benches: usize,
}

impl AddAssign for Lines {
    fn add_assign(&mut self, other: Self) {
        self.product += other.product;
        self.tests += other.tests;
        self.benches += other.benches;
    }
}

/// The lines of code of each package, by its folder.
pub fn count(tree: &Tree) -> BTreeMap<String, Lines> {
    let test_code = TestCode::of(tree);
    let mut packages = BTreeMap::<String, Lines>::new();
    for (file, rust) in tree.rust("") {
        let path = file.path.as_str();
        let all = rust.code_lines.len();
        let lines = if is_in(path, "benches") {
            Lines { benches: all, ..Lines::default() }
        } else {
            let is_test = test_code.of_file(path, rust);
            let tests = rust.code_lines.iter().filter(|&&line| is_test(line)).count();
            Lines { product: all - tests, tests, benches: 0 }
        };
        *packages.entry(package(tree, path).to_owned()).or_default() += lines;
    }
    packages
}

/// A table of packages, with the sums below.
pub fn table(packages: &BTreeMap<String, Lines>) -> String {
    let width = packages.keys().map(String::len).max().unwrap_or(0).max("package".len());
    let row = |name: &str, columns: [&str; 3]| {
        let [product, tests, benches] = columns;
        format!("{name:width$}  {product:>8}  {tests:>8}  {benches:>8}")
    };
    let counted = |name: &str, lines: Lines| {
        let columns = [lines.product, lines.tests, lines.benches].map(|count| count.to_string());
        row(name, columns.each_ref().map(String::as_str))
    };
    let mut rows = vec![row("package", ["product", "tests", "benches"])];
    let mut sum = Lines::default();
    for (name, &lines) in packages {
        sum += lines;
        rows.push(counted(name, lines));
    }
    rows.push(counted("all", sum));
    rows.join("\n")
}

/// Which code of a tree is tests.
pub(crate) struct TestCode {
    /// The modules with files of their own that are declared under `#[cfg(test)]`: their paths
    /// without `.rs`.
    modules: Vec<String>,
}

impl TestCode {
    pub(crate) fn of(tree: &Tree) -> Self {
        Self { modules: tree.rust("").flat_map(|(file, rust)| modules(file, rust)).collect() }
    }

    /// Says of a line of a file whether it is of tests.
    pub(crate) fn of_file(&self, path: &str, rust: &Lexed) -> impl Fn(usize) -> bool + use<> {
        let is_module = self.modules.iter().any(|module| {
            let rest = path.strip_prefix(module.as_str());
            rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        });
        let is_whole = is_module || is_of_tests(path);
        let items: Vec<_> = items(rust).map(|item| item.lines).collect();
        move |line| is_whole || items.iter().any(|item| item.contains(&line))
    }
}

/// Whether all of a file is tests, as its place says.
pub(crate) fn is_of_tests(path: &str) -> bool {
    path == "tests.rs" || path.ends_with("/tests.rs") || is_in(path, "tests")
}

/// Whether a folder of this name is above a file.
pub(crate) fn is_in(path: &str, folder: &str) -> bool {
    path.rsplit_once('/').is_some_and(|(folders, _)| folders.split('/').any(|one| one == folder))
}

/// The folder of the package that a file is of, which has its manifest.
fn package<'p>(tree: &Tree, path: &'p str) -> &'p str {
    let mut folders = path.rmatch_indices('/').map(|(at, _)| &path[..at]);
    folders.find(|folder| tree.file(&format!("{folder}/Cargo.toml")).is_some()).unwrap_or(".")
}

/// An item under `#[cfg(test)]`.
struct Item {
    /// The index of its first token behind attributes and `pub`.
    begin: usize,
    lines: RangeInclusive<usize>,
}

/// The attribute that tests stand behind.
pub(crate) const TEST: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
/// What items begin with that do not end at a comma, as fields, variants and arms do.
const ITEMS: [&str; 14] = [
    "fn", "mod", "use", "const", "static", "struct", "enum", "union", "impl", "type", "trait",
    "unsafe", "async", "extern",
];

/// Every item under `#[cfg(test)]`, those within others too.
fn items(rust: &Lexed) -> impl Iterator<Item = Item> {
    let attributes = (0..rust.tokens.len()).filter(|&index| rust.says(index, &TEST));
    attributes.map(|attribute| {
        let mut begin = attribute + TEST.len();
        while rust.says(begin, &["#", "["]) {
            begin = rust.behind(begin + 1);
        }
        if rust.text(begin) == "pub" {
            begin += 1;
            if rust.text(begin) == "(" {
                begin = rust.behind(begin);
            }
        }
        let ends_at_comma = !ITEMS.contains(&rust.text(begin));
        let mut end = begin;
        loop {
            match rust.text(end) {
                "(" | "[" => end = rust.behind(end),
                "{" => {
                    end = rust.behind(end) - 1;
                    break;
                }
                "," if ends_at_comma => break,
                // A bracket that closes what the item is in, or the end of the file.
                ";" | ")" | "]" | "}" | "" => break,
                _ => end += 1,
            }
        }
        let last = rust.tokens.get(end).or(rust.tokens.last()).map_or(0, |token| token.line);
        Item { begin, lines: rust.tokens[attribute].line..=last }
    })
}

/// The modules with files of their own that a file declares under `#[cfg(test)]`: their paths
/// without `.rs`.
fn modules(file: &File, rust: &Lexed) -> Vec<String> {
    let path = file.path.trim_end_matches(".rs");
    let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
    let folder = if matches!(name, "mod" | "lib" | "main") { folder } else { path };
    let declared = items(rust)
        .filter(|item| rust.text(item.begin) == "mod" && rust.text(item.begin + 2) == ";");
    declared.map(|item| format!("{folder}/{}", rust.text(item.begin + 1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of one package.
    fn counted(files: &[(&str, &str)]) -> (usize, usize, usize) {
        let files: Vec<_> = [("a/Cargo.toml", "")].iter().chain(files).copied().collect();
        let packages = count(&Tree::of(&files));
        let Lines { product, tests, benches } = packages["a"];
        assert_eq!(packages.len(), 1, "{packages:?}");
        (product, tests, benches)
    }

    #[test]
    fn comments_and_blanks_are_no_code_and_what_looks_like_them_in_literals_is() {
        let text = "\
//! A crate.

/// Documented, with `code();`.
fn f() { // one
    /* nested /* within */
       still */ g(\"// two\");
    let text = \"

/* three lines */\";
    /** documented */
    let raw = r#\"
// \" */
\"#;
}
";
        assert_eq!(counted(&[("a/src/lib.rs", text)]), (9, 0, 0));
    }

    #[test]
    fn items_under_test_are_tests_wherever_they_stand() {
        let text = "\
#[cfg(test)]
pub(crate) use a::{b, c};
struct S {
    #[cfg(test)]
    pub count: [u8; 4],
    other: u8,
}
#[cfg(test)]
#[expect(x, reason = \"{\")]
pub(super) fn f<A, B>() -> [u8; 2] {
    g(\"}\");
}
#[cfg(not(test))]
fn h() {}

#[cfg(test)] // the tests
mod tests {
    // Why.
    #[test]
    fn t() {}
}
fn k() {}
";
        assert_eq!(counted(&[("a/src/lib.rs", text)]), (6, 14, 0));
    }

    #[test]
    fn files_are_tests_by_their_place_or_by_their_declaration() {
        let lib = "#[cfg(test)]\nmod fake;\n#[cfg(test)]\nmod tests;\nmod b;\n";
        let files = [
            ("a/src/lib.rs", lib),
            ("a/src/fake.rs", "x();\n"),
            ("a/src/fake/deep.rs", "x();\n"),
            ("a/src/tests.rs", "x();\n"),
            ("a/src/b.rs", "#[cfg(test)]\npub(crate) mod fake;"),
            ("a/src/b/fake.rs", "x();\n"),
            ("a/src/b/faker.rs", "x();\n"),
            ("a/src/b/tests/c.rs", "x();\n"),
            ("a/tests/it/main.rs", "x();\n"),
            ("a/benches/b.rs", "x();\nx();\n"),
            ("a/src/contests.rs", "x();\n"),
        ];
        assert_eq!(counted(&files), (3, 12, 2));
    }

    #[test]
    fn packages_are_rows_and_the_last_row_is_their_sum() {
        let tree = Tree::of(&[
            ("Cargo.toml", ""),
            ("a/Cargo.toml", ""),
            ("a/src/lib.rs", "x();"),
            ("a/inner/Cargo.toml", ""),
            ("a/inner/src/main.rs", "x();\nx();"),
            ("a/inner/tests/it.rs", "x();"),
            ("build.rs", "x();"),
        ]);
        let table = table(&count(&tree));
        let rows: Vec<Vec<&str>> =
            table.lines().map(|row| row.split_whitespace().collect()).collect();
        let expected = [
            ["package", "product", "tests", "benches"],
            [".", "1", "0", "0"],
            ["a", "1", "0", "0"],
            ["a/inner", "2", "1", "0"],
            ["all", "4", "1", "0"],
        ];
        assert_eq!(rows, expected);
    }
}
