//! `cargo xtask book` builds the book in `docs/` and checks what came out.
//!
//! The book lies beside the interfaces that `cargo doc` builds, so that each can lead to the other.

mod links;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::tree::{Tree, normal};
use crate::{Checked, Outcome};

/// The version that is installed, and what its version begins with where it is there.
const VERSION: &str = "0.5.4";
const SERIES: &str = "mdbook v0.5.";
/// Where the book's source is, and its chapters.
const SOURCE: &str = "docs";
const CHAPTERS: &str = "docs/src/";
/// Where it is built, below the target directory.
const BUILT: &str = "doc/book";
/// Programs that checks need, below the target directory.
const TOOLS: &str = "ci-tools";

/// Builds the book, and checks its links and what it includes.
///
/// # Errors
///
/// What is wrong, a line each.
pub fn check() -> Checked {
    let problems = sources(Tree::of_workspace()?);
    if !problems.is_empty() {
        return Err(problems.join("\n   "));
    }
    let program = match found().map_or_else(install, Ok) {
        Ok(program) => program,
        Err(why) => return Ok(Outcome::Skipped(format!("mdBook {VERSION} cannot be had: {why}"))),
    };
    let documents = crate::target_directory().join("doc");
    let built = crate::target_directory().join(BUILT);
    crate::debian::remove(&built)
        .map_err(|error| format!("{} cannot be removed: {error}", built.display()))?;
    let mut build = Command::new(program);
    // Only what goes wrong.
    build.env("RUST_LOG", "warn").arg("build").arg(crate::root().join(SOURCE));
    crate::run(build.arg("--dest-dir").arg(&built))?;

    let pages = read(&built, &|path| path.file_name().is_none_or(|name| name != "404.html"))?;
    // The pages with sources have no links of ours.
    let others = [built.clone(), documents.join("src")];
    let is_other = |path: &Path| others.iter().any(|other| path.starts_with(other));
    let interfaces = read(&documents, &|path| !is_other(path))?;
    let mut problems = links::dead(&pages, |_| true);
    // Of the interfaces' links those to the book are ours.
    problems.extend(links::dead(&interfaces, |target| target.starts_with(&built)));
    if problems.is_empty() {
        let at = built.join("index.html");
        crate::say(&format!("book: {} pages, no dead link: {}", pages.len(), at.display()));
        Ok(Outcome::Passed)
    } else {
        Err(problems.join("\n   "))
    }
}

/// mdBook where it is installed, in the version that is wanted.
fn found() -> Option<PathBuf> {
    let tools = crate::target_directory().join(TOOLS).join("bin/mdbook");
    let is_one = |program: &PathBuf| {
        let version = Command::new(program).arg("--version").stderr(Stdio::null()).output();
        version.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).starts_with(SERIES))
    };
    [tools, PathBuf::from("mdbook")].into_iter().find(is_one)
}

/// Installs mdBook, unoptimised: building it takes longer than the book does.
fn install() -> Result<PathBuf, String> {
    let tools = crate::target_directory().join(TOOLS);
    let what = ["install", "mdbook", "--version", VERSION, "--locked", "--debug", "--quiet"];
    let mut cargo = crate::cargo(&what);
    cargo.args(["--no-default-features", "--features", "search", "--root"]).arg(&tools);
    cargo.env("CARGO_PROFILE_DEV_DEBUG", "false");
    // A directory of its own, which goes when it is installed.
    crate::run(cargo.env_remove("CARGO_TARGET_DIR"))?;
    Ok(tools.join("bin/mdbook"))
}

/// The files of HTML below `folder` that are wanted, by their paths.
fn read(
    folder: &Path,
    wanted: &dyn Fn(&Path) -> bool,
) -> Result<BTreeMap<PathBuf, links::Page>, String> {
    let mut pages = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.filter_map(Result::ok) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "html") && wanted(&path) {
                let html = fs::read_to_string(&path);
                let html = html.map_err(|error| format!("{}: {error}", path.display()))?;
                pages.insert(path, links::page(&html));
            }
        }
    }
    Ok(pages)
}

/// Finds the mistakes in the sources that mdBook accepts: chapters that no page leads to, and files
/// or anchors that are included and are not there.
fn sources(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    let summary = tree.file("docs/src/SUMMARY.md").map_or("", |file| &file.text);
    let chapters = tree.files().iter().filter(|file| file.path.starts_with(CHAPTERS));
    for file in chapters.filter(|file| file.path.ends_with(".md")) {
        let name = file.path.strip_prefix(CHAPTERS).unwrap_or_default();
        if name != "SUMMARY.md" && !summary.contains(&format!("({name})")) {
            problems.push(format!("{}: SUMMARY.md does not lead to it", file.path));
        }
        for included in included(&file.text) {
            if let Err(why) = resolve(tree, &file.path, included) {
                problems.push(format!("{}: `{included}` is included, and {why}", file.path));
            }
        }
    }
    problems
}

/// What a chapter includes: what stands between `{{#include` and `}}`.
fn included(text: &str) -> impl Iterator<Item = &str> {
    text.split("{{#include ").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0.trim()))
}

/// Looks for what `chapter` includes.
fn resolve(tree: &Tree, chapter: &str, included: &str) -> Result<(), String> {
    let (path, part) = included.split_once(':').unwrap_or((included, ""));
    let folder = Path::new(chapter).parent().unwrap_or(Path::new(""));
    let path = normal(&folder.join(path));
    let file = tree.file(&path.to_string_lossy()).ok_or("there is no such file")?;
    let is_anchor = part.starts_with(|first: char| first.is_alphabetic());
    let has = |word: &str| {
        let anchor = format!("{word}: {part}");
        file.text.lines().any(|line| line.trim_end_matches(" -->").ends_with(&anchor))
    };
    if is_anchor && !(has("ANCHOR") && has("ANCHOR_END")) {
        return Err(format!("the file has no anchor `{part}`"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chapter_is_in_the_summary_and_includes_what_there_is() {
        assert_eq!(sources(Tree::of_workspace().unwrap()), Vec::<String>::new());
    }

    #[test]
    fn a_chapter_that_nothing_leads_to_is_found() {
        let tree = Tree::of(&[
            ("docs/src/SUMMARY.md", "- [A](a.md)\n"),
            ("docs/src/a.md", ""),
            ("docs/src/b/c.md", ""),
        ]);
        assert_eq!(sources(&tree), ["docs/src/b/c.md: SUMMARY.md does not lead to it"]);
    }

    #[test]
    fn a_file_or_an_anchor_that_is_not_there_is_found() {
        let chapter = "{{#include ../../x.rs}} {{#include ../../x.rs:one}}\n{{#include ../y.rs}}\n\
                       {{#include ../../x.rs:3:}} {{#include ../../x.rs:two}}";
        let tree = Tree::of(&[
            ("docs/src/SUMMARY.md", "- [A](a.md)\n"),
            ("docs/src/a.md", chapter),
            ("x.rs", "// ANCHOR: one\nfn x() {}\n// ANCHOR_END: one\n// ANCHOR: two\n"),
        ]);
        let problems = sources(&tree);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("`../y.rs`") && problems[1].contains("no anchor `two`"));
    }
}
