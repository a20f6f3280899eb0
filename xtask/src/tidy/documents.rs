//! These rules say what the documents must contain.

use std::path::Path;

use super::manifests;
use crate::problem::Problem;
use crate::tree::{File, Tree, normal};

const MANIFEST: &str = "Cargo.toml";
const ARCHITECTURE: &str = "ARCHITECTURE.md";
pub(super) const GLOSSARY: &str = "docs/src/glossary.md";
const TERMS: usize = 40;
const README: &str = "README.md";
const README_LINES: usize = 250;

/// Finds dependencies of the workspace without a word in the architecture about why they are there.
pub fn dependencies(tree: &Tree) -> Vec<Problem> {
    let Some(architecture) = tree.file(ARCHITECTURE) else {
        let what = "this file is missing; it names every dependency and why it is there";
        return vec![Problem::of_file(ARCHITECTURE, what.to_owned())];
    };
    let Some(manifest) = tree.file(MANIFEST) else {
        return vec![Problem::of_file(MANIFEST, "the workspace's manifest is missing".to_owned())];
    };
    manifests::settings(&manifest.text)
        // What has a path is a crate of the workspace.
        .filter(|setting| setting.table == "workspace.dependencies")
        .filter(|setting| !setting.value.contains("path"))
        .filter(|setting| !architecture.text.contains(&format!("`{}`", setting.key)))
        .map(|setting| {
            let what = format!(
                "the dependency `{}` has no reason in {ARCHITECTURE}; write there, with its name \
                 in backticks, what it is for",
                setting.key
            );
            Problem::new(MANIFEST, setting.line, what)
        })
        .collect()
}

/// The terms of the glossary in lower case, and the lines that they stand in. A term stands in bold
/// at the beginning of a list item.
pub(super) fn terms(tree: &Tree) -> Vec<(usize, String)> {
    let text = tree.file(GLOSSARY).map_or("", |glossary| glossary.text.as_str());
    let terms = (1..).zip(text.lines()).filter_map(|(number, line)| {
        let (term, _) = line.strip_prefix("- **")?.split_once("**")?;
        Some((number, term.to_lowercase()))
    });
    terms.collect()
}

/// Finds a glossary that is missing, too long, out of order or repeats a term.
pub fn glossary(tree: &Tree) -> Vec<Problem> {
    if tree.file(GLOSSARY).is_none() {
        let what = "this file is missing; it says what the terms of the code mean";
        return vec![Problem::of_file(GLOSSARY, what.to_owned())];
    }
    let terms = terms(tree);
    let mut problems = Vec::new();
    if terms.is_empty() || terms.len() > TERMS {
        let what = format!(
            "{} terms, of 1 to {TERMS}; a term is `- **term**`, and those that nobody needs go",
            terms.len()
        );
        problems.push(Problem::of_file(GLOSSARY, what));
    }
    for pair in terms.windows(2).filter(|pair| pair[0].1 >= pair[1].1) {
        let what = format!("`{}` stands behind `{}`; sort the terms", pair[1].1, pair[0].1);
        problems.push(Problem::new(GLOSSARY, pair[1].0, what));
    }
    problems
}

/// Finds links of documents to files that are not there. Addresses of other machines and places in
/// a page are not looked at.
pub fn links(tree: &Tree) -> Vec<Problem> {
    let documents = tree.files().iter().filter(|file| file.path.ends_with(".md"));
    documents.flat_map(|file| dead(tree, file)).collect()
}

fn dead(tree: &Tree, document: &File) -> Vec<Problem> {
    let folder = Path::new(&document.path).parent().unwrap_or(Path::new(""));
    let mut problems = Vec::new();
    let mut is_code = false;
    for (number, line) in (1..).zip(document.text.lines()) {
        is_code ^= line.starts_with("```");
        // What stands between backticks is code as well.
        let text: String = line.split('`').step_by(2).collect();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if is_code || path.is_empty() || path.contains("://") {
                continue;
            }
            let target = normal(&folder.join(path));
            let target = target.to_string_lossy();
            let is_there = |path: &str| {
                path.strip_prefix(&*target)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            if !tree.files().iter().any(|file| is_there(&file.path)) {
                let what = format!("leads to {target}, which is not there; mend the link");
                problems.push(Problem::new(&document.path, number, what));
            }
        }
    }
    problems
}

/// Finds a front page that a visitor does not read to its end.
pub fn front_page(tree: &Tree) -> Vec<Problem> {
    let lines = tree.file(README).map_or(0, |file| file.text.lines().count());
    if lines <= README_LINES {
        return Vec::new();
    }
    let what = format!("{lines} lines, of {README_LINES} at most; move what is new to the book");
    vec![Problem::new(README, lines, what)]
}

/// Finds lines of examples that rustdoc hides: a reader of the source or of another renderer sees
/// them, and a reader of rustdoc cannot copy what is shown.
pub fn hidden_lines(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.files() {
        let is_rust = file.rust.is_some();
        if !is_rust && !file.path.ends_with(".md") {
            continue;
        }
        // Whether the block of code that this line is in is Rust; `None` outside of one.
        let mut block = None;
        for (number, line) in (1..).zip(file.text.lines()) {
            let line = line.trim_start();
            let text = if is_rust {
                line.strip_prefix("///").or(line.strip_prefix("//!")).map(str::trim_start)
            } else {
                Some(line)
            };
            // A comment that ends takes its block with it.
            let Some(text) = text else {
                block = None;
                continue;
            };
            if let Some(words) = text.strip_prefix("```") {
                // In a comment a block is Rust where nothing is said.
                let begins = is_rust && words.is_empty() || says_rust(words);
                block = if block.is_some() { None } else { Some(begins) };
            } else if block == Some(true) && (text == "#" || text.starts_with("# ")) {
                let what = "rustdoc hides this line of an example; show it without the `#`";
                problems.push(Problem::new(&file.path, number, what.to_owned()));
            }
        }
    }
    problems
}

/// Whether the words behind a fence say that its block is Rust.
fn says_rust(words: &str) -> bool {
    words.split([',', ' ']).any(|word| {
        matches!(word, "rust" | "no_run" | "ignore" | "should_panic" | "compile_fail")
            || word.starts_with("edition")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = r#"
[workspace.dependencies]
own = { path = "own" }
serde = "1"
serde_json = "1"
[workspace.lints.rust]
x = 1
"#;

    #[test]
    fn a_dependency_without_a_reason_is_found() {
        let tree = |text| Tree::of(&[("Cargo.toml", ROOT), ("ARCHITECTURE.md", text)]);
        assert!(dependencies(&tree("`serde` and `serde_json`")).is_empty());
        let problems = dependencies(&tree("`serde_json` alone"));
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].line, 4);
        assert!(problems[0].what.contains("`serde`"), "{problems:?}");
    }

    #[test]
    fn a_missing_document_is_found() {
        let tree = Tree::of(&[("Cargo.toml", ROOT)]);
        assert_eq!(dependencies(&tree).len(), 1);
        assert_eq!(glossary(&tree).len(), 1);
    }

    #[test]
    fn a_long_or_unsorted_glossary_is_found() {
        let found = |text: &str| glossary(&Tree::of(&[("docs/src/glossary.md", text)]));
        let terms = |count: usize| (0..count).map(|n| format!("- **term {n:02}**: x\n")).collect();
        let (most, more): (String, String) = (terms(TERMS), terms(TERMS + 1));
        assert!(found(&most).is_empty());
        assert_eq!(found(&more).len(), 1);
        assert_eq!(found("no terms").len(), 1);
        assert_eq!(found("- **b**: x\n- **a**: x\n")[0].line, 2);
        assert_eq!(found("- **a**: x\n- **A**: y\n").len(), 1);
    }

    #[test]
    fn a_front_page_that_is_too_long_is_found() {
        let of = |lines| front_page(&Tree::of(&[(README, &"line\n".repeat(lines))])).len();
        assert_eq!((of(README_LINES), of(README_LINES + 1)), (0, 1));
    }

    #[test]
    fn lines_that_rustdoc_hides_are_found() {
        let found = |path: &str, text: &str| -> Vec<usize> {
            hidden_lines(&Tree::of(&[(path, text)])).iter().map(|problem| problem.line).collect()
        };
        let comment = "/// # Errors\n///\n/// ```\n/// # use a::B;\n///     # x();\n/// #\n\
                       /// #[test]\n/// ```\n/// # Safety\nfn f() {}\n";
        assert_eq!(found("a.rs", comment), [4, 5, 6]);
        assert_eq!(found("a.rs", &comment.replace("///", "//!")), [4, 5, 6]);
        assert!(found("a.rs", &comment.replacen("```", "```text", 1)).is_empty());
        assert_eq!(found("a.rs", &comment.replacen("```", "```compile_fail,E0061", 1)), [4, 5, 6]);
        let page = "# Title\n```rust,ignore\n# hidden\n```\n```sh\n# comment\n```\n# Next\n";
        assert_eq!(found("a.md", page), [3]);
        assert!(found("a.txt", page).is_empty());
        // A block that its comment does not close ends with it.
        assert!(found("a.rs", "/// ```\nfn f() {}\n/// # Errors\n").is_empty());
    }

    #[test]
    fn links_to_files_that_are_not_there_are_found() {
        let text = "[a](b/c.md#d) [b](b) [e](../f.svg)\n[g](https://h/i) [j](#k) `[l](m)`\n\
                    ```\n[n](o)\n```\n[p](../q.md)\n";
        let tree = Tree::of(&[("r/s.md", text), ("r/b/c.md", ""), ("f.svg", "")]);
        let problems = links(&tree);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!((problems[0].path.as_str(), problems[0].line), ("r/s.md", 6));
        assert!(problems[0].what.starts_with("leads to q.md,"), "{problems:?}");
    }
}
