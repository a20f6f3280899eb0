//! The rules about the source tree that no compiler checks.
//!
//! Each rule is a function of the [`Tree`], and a test of this crate applied to the workspace;
//! beside it stand tests that it finds what it is for.

pub mod documents;
pub mod errors;
pub mod imports;
pub mod listed;
pub mod manifests;
pub mod names;
pub mod size;
pub mod unsafety;
pub mod words;

#[cfg(test)]
mod tests;

use crate::problem::Problem;
use crate::tree::Tree;

/// What a rule finds in a tree.
pub type Rule = fn(&Tree) -> Vec<Problem>;

/// All rules.
pub const RULES: [Rule; 20] = [
    imports::systems,
    listed::tested,
    size::lines_of_code,
    size::line_width,
    unsafety::placement,
    words::leftovers,
    words::plans,
    words::machine_paths,
    words::headless,
    errors::causes,
    errors::growth,
    documents::dependencies,
    documents::glossary,
    documents::links,
    documents::front_page,
    documents::hidden_lines,
    manifests::lints,
    manifests::product,
    names::duplicates,
    names::words,
];

/// What all rules find in a tree, by place.
pub fn check(tree: &Tree) -> Vec<Problem> {
    let mut problems: Vec<Problem> = RULES.iter().flat_map(|rule| rule(tree)).collect();
    problems.sort();
    problems
}
