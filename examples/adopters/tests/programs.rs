//! Every program prints what stands beside it, and has the glue and the unsafe code that it states.
//!
//! The expected output of `src/bin/NAME.rs` is `src/bin/NAME.txt`. A program, or a part of one,
//! that cannot run on a machine prints a line that begins with `SKIP` and says why; such a line
//! stands for all lines of the expected output up to the next one that fits.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Glue and unsafe code, in the words of a program's first comment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cost {
    /// Lines of glue that are neither blank nor comments.
    glue: usize,
    /// Unsafe blocks of the whole file.
    blocks: usize,
    /// Unsafe implementations of traits.
    impls: usize,
}

/// What each program may cost.
const LIMITS: &[(&str, Cost)] = &[
    ("compio_reads", Cost { glue: 50, blocks: 3, impls: 1 }),
    ("toy_kernel", Cost { glue: 90, blocks: 2, impls: 2 }),
    ("uring_threads", Cost { glue: 35, blocks: 2, impls: 0 }),
    ("vfio_user_crate", Cost { glue: 35, blocks: 0, impls: 0 }),
    ("vfio_user_server", Cost { glue: 40, blocks: 0, impls: 0 }),
    ("virtio_hal", Cost { glue: 60, blocks: 2, impls: 1 }),
    ("vmm", Cost { glue: 10, blocks: 0, impls: 0 }),
    ("who_mapped", Cost { glue: 10, blocks: 1, impls: 0 }),
];

/// The sources of the programs, by their names.
fn programs() -> BTreeMap<String, PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let sources = files.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    sources.map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), path)).collect()
}

/// The lines that are neither blank nor comments.
fn code(source: &str) -> impl Iterator<Item = &str> {
    source.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"))
}

/// The code between the anchors called `glue`, of which there may be several pairs.
fn glue(source: &str) -> usize {
    let parts = source.split("// ANCHOR: glue\n").skip(1);
    parts.map(|part| code(part.split("// ANCHOR_END: glue\n").next().unwrap()).count()).sum()
}

fn measured(source: &str) -> Cost {
    // Brackets and the like end a word, but for the brace that begins a block.
    let is_between = |character: char| !(character.is_alphanumeric() || "_{".contains(character));
    let words: Vec<&str> = code(source).flat_map(|line| line.split(is_between)).collect();
    let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let all = words.iter().filter(|word| **word == "unsafe").count();
    let behind = |what: &str| {
        let pairs = words.windows(2).filter(|pair| pair[0] == "unsafe");
        pairs.filter(|pair| pair[1].starts_with(what)).count()
    };
    let (blocks, impls) = (behind("{"), behind("impl"));
    let others = behind("fn");
    assert_eq!(all, blocks + impls + others, "there is unsafe code of a kind that is not counted");
    Cost { glue: glue(source), blocks, impls }
}

/// The numbers of the line `//! Glue: 1 line; unsafe: 2 blocks, 3 impls.`
fn stated(source: &str) -> Option<Cost> {
    let line = source.lines().find(|line| line.starts_with("//! Glue: "))?;
    let words = line.split(|character: char| !character.is_ascii_digit());
    let numbers: Vec<usize> = words.filter_map(|word| word.parse().ok()).collect();
    let [glue, blocks, impls] = numbers[..] else { return None };
    Some(Cost { glue, blocks, impls })
}

#[test]
fn every_program_costs_what_it_states_and_no_more_than_it_may() {
    let mut limits: BTreeMap<&str, &Cost> =
        LIMITS.iter().map(|(name, limit)| (*name, limit)).collect();
    for (name, path) in programs() {
        let source = fs::read_to_string(path).unwrap();
        let cost = measured(&source);
        assert_eq!(stated(&source), Some(cost), "{name}: its comment says `Glue: …` otherwise");
        let limit = limits.remove(name.as_str()).unwrap_or_else(|| panic!("{name} has no limit"));
        assert!(cost.glue > 0 && cost.glue <= limit.glue, "{name}: {cost:?} of {limit:?}");
        let within = cost.blocks <= limit.blocks && cost.impls <= limit.impls;
        assert!(within, "{name}: {cost:?} of {limit:?}");
        let lines = source.lines().count();
        assert!((60..=350).contains(&lines), "{name}: {lines} lines");
    }
    assert!(limits.is_empty(), "there are no such programs: {limits:?}");
}

/// Whether the lines are the expected ones, with a line `SKIP…` instead of any number of them.
fn fits(printed: &[&str], expected: &[&str]) -> bool {
    match printed {
        [] => expected.is_empty(),
        [first, rest @ ..] if first.starts_with("SKIP") => {
            (0..=expected.len()).any(|skipped| fits(rest, &expected[skipped..]))
        }
        [first, rest @ ..] => {
            expected.split_first().is_some_and(|(one, others)| first == one && fits(rest, others))
        }
    }
}

/// What is wrong with a program: how it ended, or what it printed. `None` where nothing is.
fn problem(name: &str, source: &Path) -> Option<String> {
    let own = std::env::current_exe().unwrap();
    let program = own.parent().and_then(Path::parent).unwrap().join(name);
    let output = Command::new(&program).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Some(format!("{name}: {}\n{printed}{said}", output.status));
    }
    for line in printed.lines().filter(|line| line.starts_with("SKIP")) {
        eprintln!("{name}: {line}");
    }
    let expected = fs::read_to_string(source.with_extension("txt")).unwrap_or_default();
    let lines: [Vec<&str>; 2] = [printed.lines().collect(), expected.lines().collect()];
    let fits = fits(&lines[0], &lines[1]);
    (!fits).then(|| format!("{name} printed\n{printed}and not\n{expected}"))
}

#[test]
fn every_program_prints_what_stands_beside_it() {
    let problems: Vec<_> =
        programs().iter().filter_map(|(name, source)| problem(name, source)).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn a_count_leaves_out_comments_and_what_is_outside() {
    let source = "//! Glue: 2 lines; unsafe: 1 block, 1 impl.\nunsafe impl A for B {}\n\
        // ANCHOR: glue\nlet x = Ok(unsafe { f() });\n\n// unsafe { g() }\n// ANCHOR_END: glue\n\
        let y = 1;\n// ANCHOR: glue\nunsafe fn g() {}\n// ANCHOR_END: glue\n";
    let cost = Cost { glue: 2, blocks: 1, impls: 1 };
    assert_eq!((measured(source), stated(source)), (cost, Some(cost)));
}

#[test]
fn a_skipped_part_stands_for_its_lines_and_for_no_others() {
    assert!(fits(&["a", "SKIP: no root", "d"], &["a", "b", "c", "d"]));
    assert!(fits(&["SKIP"], &["a"]));
    assert!(!fits(&["a", "d"], &["a", "b", "d"]));
    assert!(!fits(&["SKIP", "e"], &["a", "d"]));
}
