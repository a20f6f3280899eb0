//! Every example that is a single file runs, and prints what stands beside it.
//!
//! `cargo test --workspace` builds the examples of all crates; the expected output of
//! `examples/NAME.rs` is `examples/NAME.txt`. An example that cannot run on a machine prints one
//! line that begins with `SKIP:` and ends well.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates whose examples are run.
const CRATES: [&str; 2] = ["dmaspan", "dmaspan-linux"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// The sources of the examples, by their names.
fn examples() -> BTreeMap<String, PathBuf> {
    let mut examples = BTreeMap::new();
    for name in CRATES {
        let folder = workspace().join("crates").join(name).join("examples");
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                let twice = examples.insert(name, path);
                assert_eq!(twice, None, "two examples have one name, and one program");
            }
        }
    }
    examples
}

/// What is wrong with an example: how it ended, or what it printed. `None` where nothing is.
fn problem(name: &str, source: &Path) -> Option<String> {
    let own = std::env::current_exe().unwrap();
    let program = own.parent().and_then(Path::parent).unwrap().join("examples").join(name);
    if !program.is_file() {
        eprintln!("SKIP: the example {name} is not built, as `cargo test --workspace` does");
        return None;
    }
    let output = Command::new(&program).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Some(format!("{name}: {}\n{printed}{said}", output.status));
    }
    if printed.starts_with("SKIP: ") && printed.lines().count() == 1 {
        eprint!("{name}: {printed}");
        return None;
    }
    let expected = fs::read_to_string(source.with_extension("txt")).unwrap_or_default();
    (printed != expected).then(|| format!("{name} printed\n{printed}and not\n{expected}"))
}

#[test]
fn every_example_prints_what_stands_beside_it() {
    let problems: Vec<_> =
        examples().iter().filter_map(|(name, source)| problem(name, source)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn examples_have_50_to_150_lines() {
    for source in examples().values() {
        let lines = fs::read_to_string(source).unwrap().lines().count();
        assert!((50..=150).contains(&lines), "{}: {lines} lines", source.display());
    }
}

#[test]
fn only_examples_about_testing_use_the_test_crate() {
    for (name, source) in examples() {
        let uses = fs::read_to_string(source).unwrap().contains("dmaspan_sim");
        assert!(!uses || name.starts_with("sanitize"), "{name} uses dmaspan_sim");
    }
}
