//! Links in HTML, and those among them that lead nowhere. Nothing is asked of a network: addresses
//! of other machines are not looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use html5gum::{Token, Tokenizer};

use crate::tree::normal;

/// The parts of a page that matter to links.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    /// The places in it that links can name.
    anchors: BTreeSet<String>,
    /// Where it leads: to pages, pictures, styles and scripts.
    links: Vec<String>,
}

/// Reads a page.
pub(super) fn page(html: &str) -> Page {
    let mut page = Page::default();
    for Ok(token) in Tokenizer::new(html) {
        let Token::StartTag(tag) = token else { continue };
        for (name, value) in &tag.attributes {
            let value = || String::from_utf8_lossy(&value.value).into_owned();
            match name.as_slice() {
                b"id" => drop(page.anchors.insert(value())),
                b"name" if tag.name.as_slice() == b"a" => drop(page.anchors.insert(value())),
                b"href" | b"src" => page.links.push(value()),
                _ => {}
            }
        }
    }
    page
}

/// The links of `pages` that lead to no file, or to no place in a page, a line each; only those to
/// files that are `wanted`.
pub(super) fn dead(pages: &BTreeMap<PathBuf, Page>, wanted: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut problems = Vec::new();
    for (path, page) in pages {
        for link in page.links.iter().filter(|link| is_local(link)) {
            let (target, anchor) = resolve(path, link);
            if !wanted(&target) {
                continue;
            }
            if let Some(why) = is_dead(pages, &target, &anchor) {
                problems.push(format!("{}: `{link}` is a dead link: {why}", path.display()));
            }
        }
    }
    problems
}

/// Why nothing is there.
fn is_dead(pages: &BTreeMap<PathBuf, Page>, target: &Path, anchor: &str) -> Option<String> {
    let outside;
    let page = match pages.get(target) {
        Some(page) => Some(page),
        None if !target.is_file() => return Some(format!("there is no {}", target.display())),
        None if anchor.is_empty() || target.extension().is_none_or(|it| it != "html") => None,
        None => {
            outside = page(&std::fs::read_to_string(target).unwrap_or_default());
            Some(&outside)
        }
    };
    let lacks = |page: &Page| !anchor.is_empty() && !page.anchors.contains(anchor);
    page.is_some_and(lacks).then(|| format!("the page has no place `{anchor}`"))
}

/// Whether a link leads to a file.
fn is_local(link: &str) -> bool {
    let scheme = link.split_once(':').map_or("", |(scheme, _)| scheme);
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphabetic());
    !is_scheme && !link.starts_with("//")
}

/// The file and the place in it that a link of the page at `from` leads to.
fn resolve(from: &Path, link: &str) -> (PathBuf, String) {
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let file = file.split('?').next().unwrap_or_default();
    let folder = from.parent().unwrap_or(Path::new(""));
    let mut target = if file.is_empty() { from.to_path_buf() } else { folder.join(decoded(file)) };
    if file.ends_with('/') || target.is_dir() {
        target.push("index.html");
    }
    (normal(&target), decoded(anchor))
}

/// What percent-encoding stands for (RFC 3986, 2.1).
fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&byte, behind)) = rest.split_first() {
        let hex = behind.get(..2).filter(|_| byte == b'%');
        let hex = hex.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(hex.unwrap_or(byte));
        rest = if hex.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(pages: &[(&str, &str)]) -> BTreeMap<PathBuf, Page> {
        pages.iter().map(|&(path, html)| (PathBuf::from(path), page(html))).collect()
    }

    #[test]
    fn links_and_places_are_read_from_tags_and_from_nothing_else() {
        let html = "<h1 id='a&amp;b'>x</h1><!-- <a href=c> --><a href=\"d.html#e\">&lt;a href=f&gt;\
                    </a><img src=g.svg><a name=h></a><meta name=i><script>\"<b id=j>\"</script>";
        let page = page(html);
        assert!(page.anchors.contains("a&b") && page.anchors.contains("h"), "{page:?}");
        assert!(!page.anchors.contains("i"));
        assert_eq!(page.links, ["d.html#e", "g.svg"]);
    }

    #[test]
    fn dead_files_and_places_are_found_and_live_ones_are_not() {
        let pages = pages(&[
            ("book/a.html", "<p id=x><a href=#x><a href='g/b.html#y%20z'><a href=https://c.d/e>"),
            ("book/g/b.html", "<p id='y z'><a href=../a.html#x><a href='mailto:f@g'>"),
        ]);
        assert_eq!(dead(&pages, |_| true), Vec::<String>::new());
        let bad = "<a href=#y><a href=h.html><img src=i.svg><a href=a.html#z><a href=./g/b.html>";
        let mut pages = pages;
        pages.insert("book/j.html".into(), page(bad));
        let problems = dead(&pages, |_| true);
        assert_eq!(problems.len(), 4, "{problems:?}");
        for (problem, link) in problems.iter().zip(["#y", "h.html", "i.svg", "a.html#z"]) {
            assert!(problem.starts_with(&format!("book/j.html: `{link}`")), "{problem}");
        }
        assert_eq!(dead(&pages, |target| target.ends_with("i.svg")).len(), 1);
    }

    #[test]
    fn paths_are_resolved_as_browsers_do() {
        let from = Path::new("book/g/b.html");
        assert_eq!(resolve(from, "").0, from);
        assert_eq!(resolve(from, "?a=b#c"), (from.to_path_buf(), "c".to_owned()));
        assert_eq!(resolve(from, "../d/").0, Path::new("book/d/index.html"));
        assert_eq!(resolve(from, "./../d%2de.html").0, Path::new("book/d-e.html"));
    }
}
