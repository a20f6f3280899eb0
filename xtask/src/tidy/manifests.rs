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
                || ["crates/", "examples/"].iter().any(|at| folder.starts_with(at))
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
    fn packages_outside_of_the_workspace_cannot_take_them() {
        assert_eq!(found("Cargo.toml", ""), 0);
        assert_eq!(found("xtask/no-std/Cargo.toml", ""), 0);
    }
}
