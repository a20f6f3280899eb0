//! This rule says what manifests must contain.

use crate::problem::Problem;
use crate::tree::Tree;

/// A key of a manifest and its value as text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Setting<'t> {
    pub(super) table: &'t str,
    pub(super) key: &'t str,
    pub(super) value: &'t str,
    pub(super) line: usize,
}

/// The settings of a manifest that stand on a line of their own.
pub(super) fn settings(text: &str) -> impl Iterator<Item = Setting<'_>> {
    let mut table = "";
    (1..).zip(text.lines()).filter_map(move |(number, line)| {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            table = header.split(']').next().unwrap_or("").trim_matches('[');
            return None;
        }
        let (key, value) = line.split_once('=').filter(|_| !line.starts_with('#'))?;
        Some(Setting { table, key: key.trim(), value: value.trim(), line: number })
    })
}

/// Finds crates that do not take the workspace's lints.
pub fn lints(tree: &Tree) -> Vec<Problem> {
    let members = tree.files().iter().filter(|file| {
        let folder = file.path.strip_suffix("/Cargo.toml");
        folder.is_some_and(|folder| {
            ["docs", "xtask"].contains(&folder)
                || ["adapters/", "crates/", "examples/"].iter().any(|at| folder.starts_with(at))
        })
    });
    let lacks = members.filter(|file| {
        !settings(&file.text).any(|setting| {
            (setting.table, setting.key, setting.value) == ("lints", "workspace", "true")
        })
    });
    let what = "the workspace's lints do not apply; add `[lints]` with `workspace = true`";
    lacks.map(|file| Problem::of_file(&file.path, what.to_owned())).collect()
}

/// What tests and benchmarks stand on.
const OF_TESTS: [&str; 5] =
    ["dmaspan-sim", "dmaspan-qemu", "dmaspan-guest", "dmaspan-bench", "dmaspan-peers"];

/// Finds crates of the product, and examples to copy, that depend on what tests stand on for more
/// than their tests.
pub fn product(tree: &Tree) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in tree.files() {
        let Some(folder) = file.path.strip_suffix("/Cargo.toml") else { continue };
        let name = folder.rsplit('/').next().unwrap_or(folder);
        let is_product = !OF_TESTS.contains(&name)
            && ["crates/", "examples/", "adapters/"].iter().any(|at| folder.starts_with(at));
        if !is_product {
            continue;
        }
        let mut table = "";
        for (number, line) in (1..).zip(file.text.lines().map(str::trim)) {
            if let Some(header) = line.strip_prefix('[') {
                table = header.split(']').next().unwrap_or("").trim_matches('[');
            }
            let is_dependency = table.contains("dependencies") && !table.contains("dev-");
            let found = OF_TESTS.into_iter().find(|of_tests| names(line, table, of_tests));
            if let Some(of_tests) = found.filter(|_| is_dependency) {
                let what = format!(
                    "depends on `{of_tests}`, which tests and benchmarks stand on; take what is \
                     needed from the product, or make it a dev-dependency"
                );
                problems.push(Problem::new(&file.path, number, what));
            }
        }
    }
    problems
}

/// Whether a line of a manifest, in `table`, names a dependency.
fn names(line: &str, table: &str, dependency: &str) -> bool {
    if line.starts_with('[') {
        return table.ends_with(&format!(".{dependency}"));
    }
    let is_key =
        line.strip_prefix(dependency).is_some_and(|rest| rest.starts_with(['.', ' ', '=']));
    is_key || !line.starts_with('#') && line.contains(&format!("package = \"{dependency}\""))
}

/// The folders of the sources of the crates that are published.
pub(super) fn published(tree: &Tree) -> Vec<String> {
    let crates = tree.files().iter().filter_map(|file| {
        let folder =
            file.path.strip_suffix("/Cargo.toml").filter(|path| path.starts_with("crates/"))?;
        let is_kept = settings(&file.text).any(|setting| {
            (setting.table, setting.key, setting.value) == ("package", "publish", "false")
        });
        (!is_kept).then(|| format!("{folder}/src/"))
    });
    crates.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        lints(&Tree::of(&[(path, text)])).len()
    }

    #[test]
    fn a_crate_without_the_lints_is_found() {
        let path = "crates/x/Cargo.toml";
        assert_eq!(found(path, "[package]\nname = \"x\"\n\n[lints]\nworkspace = true\n"), 0);
        assert_eq!(found(path, "[package]\nname = \"x\"\n"), 1);
        assert_eq!(found(path, "[lints]\n# workspace = true\n"), 1);
        assert_eq!(found(path, "[dependencies.x]\nworkspace = true\n"), 1);
        assert_eq!(found("xtask/Cargo.toml", ""), 1);
        assert_eq!(found("docs/Cargo.toml", ""), 1);
        assert_eq!(found("examples/x/Cargo.toml", ""), 1);
    }

    #[test]
    fn the_product_needs_what_tests_stand_on_for_its_tests_alone() {
        let lines = |path: &str, text: &str| -> Vec<usize> {
            product(&Tree::of(&[(path, text)])).iter().map(|problem| problem.line).collect()
        };
        let path = "crates/dmaspan-cli/Cargo.toml";
        assert_eq!(lines(path, "[dependencies]\ndmaspan.workspace = true\ndmaspan-sim = {}"), [3]);
        assert_eq!(lines(path, "[dependencies]\ndmaspan-sim.workspace = true"), [2]);
        assert_eq!(lines(path, "[dependencies.dmaspan-qemu]\nworkspace = true"), [1]);
        assert_eq!(lines(path, "[target.'cfg(unix)'.dependencies]\ndmaspan-bench = \"1\""), [2]);
        assert_eq!(lines(path, "[build-dependencies]\nx = { package = \"dmaspan-sim\" }"), [2]);
        assert!(lines(path, "[dev-dependencies]\ndmaspan-sim.workspace = true").is_empty());
        assert!(lines(path, "[dependencies]\n# dmaspan-sim = 1\ndmaspan-simple = 1").is_empty());
        assert_eq!(lines("examples/x/Cargo.toml", "[dependencies]\ndmaspan-sim = 1"), [2]);
        assert!(
            lines("crates/dmaspan-bench/Cargo.toml", "[dependencies]\ndmaspan-sim = 1").is_empty()
        );
    }

    #[test]
    fn packages_outside_of_the_workspace_cannot_take_them() {
        assert_eq!(found("Cargo.toml", ""), 0);
        assert_eq!(found("xtask/no-std/Cargo.toml", ""), 0);
    }
}
