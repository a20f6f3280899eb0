//! This rule says what the texts of errors must contain.

use std::ops::Range;

use super::manifests;
use crate::lexer::Lexed;
use crate::problem::Problem;
use crate::tree::Tree;

/// Finds errors whose text leaves out their cause, which is most often all that a user can act on:
/// programs print the text of an error and not the chain behind it.
pub fn causes(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (file, rust) in tree.rust("") {
        let attributes =
            (0..rust.tokens.len()).filter(|&index| rust.says(index, &["#", "[", "error", "("]));
        for at in attributes {
            let attribute = at..rust.behind(at + 1);
            let Some(cause) = cause(rust, attribute.end) else { continue };
            if !names(rust, &file.text, attribute, &cause) {
                let line = rust.tokens[at].line;
                let what = format!("the error's text has no `{{{cause}}}`; say the cause in it");
                problems.push(Problem::new(&file.path, line, what));
            }
        }
    }
    problems
}

/// Finds public enums of errors in published crates that cannot get another variant without
/// breaking who matches on them.
pub fn growth(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    let published = manifests::published(tree);
    let files = tree.rust("crates/");
    let files = files.filter(|(file, _)| published.iter().any(|at| file.path.starts_with(at)));
    for (file, rust) in files {
        for index in (0..rust.tokens.len()).filter(|&index| rust.says(index, &["pub", "enum"])) {
            let attributes = attributes(rust, index);
            let has = |word: &str| attributes.clone().any(|index| rust.text(index) == word);
            if has("derive") && has("Error") && !has("non_exhaustive") {
                let what = format!(
                    "`{}` cannot get another variant without breaking its users; add \
                     `#[non_exhaustive]`",
                    rust.text(index + 2)
                );
                problems.push(Problem::new(&file.path, rust.tokens[index].line, what));
            }
        }
    }
    problems
}

/// The tokens of the attributes of the item at `index`.
fn attributes(rust: &Lexed, index: usize) -> Range<usize> {
    let mut first = index;
    while let Some(begin) = (0..first)
        .rev()
        .take_while(|&at| !matches!(rust.text(at), ";" | "}"))
        .find(|&at| rust.says(at, &["#", "["]) && rust.behind(at + 1) == first)
    {
        first = begin;
    }
    first..index
}

/// The field that is the cause of the struct or variant at `index`: the one that is called so, or
/// that an attribute names, and `0` where it has no name.
fn cause(rust: &Lexed, index: usize) -> Option<String> {
    let fields = (index..rust.tokens.len()).find(|&index| match rust.text(index) {
        "#" | "[" | "]" | "pub" | "struct" => false,
        text => matches!(text, "(" | "{" | "," | "}" | ";") && rust.text(index + 1) != "crate",
    })?;
    if !matches!(rust.text(fields), "(" | "{") {
        return None;
    }
    (fields + 1..rust.behind(fields)).find_map(|index| {
        let marked = ["from", "source"].iter().any(|mark| rust.says(index, &["#", "[", mark, "]"]));
        let name = if marked { index + 4 } else { index };
        let name = if rust.text(name) == "pub" { name + 1 } else { name };
        let is_named = rust.text(name + 1) == ":";
        match rust.text(name) {
            "source" if is_named => Some("source".to_owned()),
            field if marked && is_named => Some(field.to_owned()),
            _ if marked => Some("0".to_owned()),
            _ => None,
        }
    })
}

/// Whether an attribute shows a field, in its text or behind it, or shows nothing else.
fn names(rust: &Lexed, text: &str, attribute: Range<usize>, field: &str) -> bool {
    let tokens = &rust.tokens[attribute];
    if tokens.iter().any(|token| token.text == field || token.text == "transparent") {
        return true;
    }
    let (Some(first), Some(last)) = (tokens.first(), tokens.last()) else { return false };
    let lines = text.lines().skip(first.line - 1).take(last.line - first.line + 1);
    let placeholders = [format!("{{{field}}}"), format!("{{{field}:")];
    lines.into_iter().any(|line| placeholders.iter().any(|placeholder| line.contains(placeholder)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        causes(&Tree::of(&[("a.rs", text)])).iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn a_cause_that_no_text_shows_is_found() {
        let text = "enum E<T> {\n#[error(\"failed\")]\nA { range: R, source: T },\n\
            /// Doc.\n#[error(\n\"no {range}\"\n)]\nB {\n#[source]\nwhy: T },\n\
            #[error(\"x\")]\nC(#[from] io::Error),\n#[error(\"y\")] D }";
        assert_eq!(lines(text), [2, 5, 11]);
        assert_eq!(
            lines("#[error(\"x\")]\npub struct S<T: U> { pub left: L, pub source: T }"),
            [1]
        );
        assert_eq!(lines("#[error(\"x\")]\npub(crate) struct S(#[from] T);"), [1]);
    }

    #[test]
    fn a_cause_is_shown_in_the_text_or_behind_it() {
        let text = "enum E<T> {\n#[error(\"no {range}: {source}\")]\nA { range: R, source: T },\n\
            #[error(\"{0}\")] B(#[source] T),\n#[error(transparent)] C(#[from] T),\n\
            #[error(\"{}: {why:?}\", words(*source))]\nD { source: T },\n\
            #[error(\"x {error}\")] F { #[source] error: T, resource: U },\n\
            #[error(\"z\")] G { resource: U } }\n\
            fn f(source: T) {}";
        assert!(lines(text).is_empty(), "{:?}", lines(text));
    }

    #[test]
    fn a_public_enum_of_errors_that_cannot_grow_is_found() {
        let manifest = "[package]\nname = \"a\"\n";
        let found = |text: &str| {
            let files = [("crates/a/Cargo.toml", manifest), ("crates/a/src/lib.rs", text)];
            growth(&Tree::of(&files)).len()
        };
        let derives = "#[derive(Debug, thiserror::Error)]\n";
        assert_eq!(found(&format!("{derives}pub enum E {{ A }}")), 1);
        assert_eq!(found(&format!("{derives}/// Text.\n#[must_use]\npub enum E {{ A }}")), 1);
        assert_eq!(found(&format!("{derives}#[non_exhaustive]\npub enum E {{ A }}")), 0);
        assert_eq!(found(&format!("{derives}enum E {{ A }}\npub enum F {{ B }}")), 0);
        let before = "#[non_exhaustive]\npub struct S;\n";
        assert_eq!(found(&format!("{before}{derives}pub enum E {{ A }}")), 1);
        let kept = "[package]\npublish = false\n";
        let text = format!("{derives}pub enum E {{ A }}");
        let files = [("crates/a/Cargo.toml", kept), ("crates/a/src/lib.rs", text.as_str())];
        assert_eq!(growth(&Tree::of(&files)), []);
    }
}
