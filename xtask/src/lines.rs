//! `cargo xtask lines` counts lines of code by package: lines that are neither blank nor comments.
//!
//! Tests and benchmarks stand apart, so that what a package does can be compared with what it was
//! before, in another checkout. C has a column of its own.

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
    /// C and its headers, whatever they are for.
    pub c: usize,
}

impl AddAssign for Lines {
    fn add_assign(&mut self, other: Self) {
        self.product += other.product;
        self.tests += other.tests;
        self.benches += other.benches;
        self.c += other.c;
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
            Lines { product: all - tests, tests, ..Lines::default() }
        };
        *packages.entry(package(tree, path).to_owned()).or_default() += lines;
    }
    let is_c = |path: &str| path.ends_with(".c") || path.ends_with(".h");
    for file in tree.files().iter().filter(|file| is_c(&file.path)) {
        let lines = Lines { c: lines_of_c(&file.text), ..Lines::default() };
        *packages.entry(package(tree, &file.path).to_owned()).or_default() += lines;
    }
    packages
}

/// The lines of C that have something besides comments.
fn lines_of_c(text: &str) -> usize {
    let (mut lines, mut is_code) = (0, false);
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let end = match next {
            '/' if rest.starts_with("/*") => {
                let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
                // The line that it begins on; those within it are none, and the last one goes on.
                if rest[..end].contains('\n') {
                    lines += usize::from(is_code);
                    is_code = false;
                }
                end
            }
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' => {
                is_code = true;
                literal(rest, next)
            }
            '\n' => {
                lines += usize::from(is_code);
                is_code = false;
                1
            }
            _ => {
                is_code |= !next.is_whitespace();
                next.len_utf8()
            }
        };
        rest = &rest[end..];
    }
    lines + usize::from(is_code)
}

/// Where the text or character ends that `rest` begins with, behind its quotation mark.
fn literal(rest: &str, mark: char) -> usize {
    let mut is_escaped = true;
    for (at, next) in rest.char_indices() {
        match next {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if next == mark => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// A table of packages, with the sums below.
pub fn table(packages: &BTreeMap<String, Lines>) -> String {
    let width = packages.keys().map(String::len).max().unwrap_or(0).max("package".len());
    let row = |name: &str, columns: [&str; 4]| {
        let [product, tests, benches, c] = columns;
        format!("{name:width$}  {product:>8}  {tests:>8}  {benches:>8}  {c:>8}")
    };
    let counted = |name: &str, lines: Lines| {
        let counts = [lines.product, lines.tests, lines.benches, lines.c];
        let columns = counts.map(|count| count.to_string());
        row(name, columns.each_ref().map(String::as_str))
    };
    let mut rows = vec![row("package", ["product", "tests", "benches", "C"])];
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
        let Lines { product, tests, benches, .. } = packages["a"];
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
    fn comments_and_blanks_of_c_are_no_code_and_what_looks_like_them_in_literals_is() {
        let text = "\
/*
 * A shim: int none;
 */
#define A 1 /* one
 and two */ + 2
// int none;

char quote = '\"', escaped = '\\''; // a
const char *text = \"/*\"; int a;
const char *more = \"\\\"//\";
\t/* none */
}";
        assert_eq!(lines_of_c(text), 6);
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
            ("a/c/x.c", "int a;\n"),
        ]);
        let table = table(&count(&tree));
        let rows: Vec<Vec<&str>> =
            table.lines().map(|row| row.split_whitespace().collect()).collect();
        let expected = [
            ["package", "product", "tests", "benches", "C"],
            [".", "1", "0", "0", "0"],
            ["a", "1", "0", "0", "1"],
            ["a/inner", "2", "1", "0", "0"],
            ["all", "4", "1", "0", "1"],
        ];
        assert_eq!(rows, expected);
    }
}
