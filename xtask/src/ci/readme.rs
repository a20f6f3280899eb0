//! The README's commands, each of which runs: as it stands there, or in a form that is quicker.
//!
//! The commands are taken out of the text, so that a new one without an entry here is a failure.

use std::process::Command;
use std::time::Instant;

use super::{Extent, quietly};
use crate::hw;

/// How a command is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// As it stands.
    AsIs,
    /// With these words behind it, by which it takes seconds.
    With(&'static str),
    /// By this line of the shell: the same with sizes that take seconds, or with names of files and
    /// devices that there are.
    Line(&'static str),
    /// By the check whose name begins with this, which runs the command, or the same program so.
    Check(&'static str),
}

use Form::{AsIs, Check, Line, With};

/// A command of the README.
struct Entry {
    command: &'static str,
    quick: Form,
    full: Form,
}

const fn entry(command: &'static str, quick: Form, full: Form) -> Entry {
    Entry { command, quick, full }
}

/// A quick form of the benchmarks of the core: each case once.
const BENCHES: &str =
    "cargo test --workspace --exclude dmaspan-qemu --bench io_pgtable --bench dma --bench regbuf";
const TESTS: Form = Check("tests");
const GUESTS: Form = Check("guests");

const COMMANDS: &[Entry] = &[
    entry("cargo run --release -- map", With("64M --runs 1"), AsIs),
    entry("cargo run --release -- devices", AsIs, AsIs),
    entry(
        "cargo run --release -- devices 0000:00:05.0",
        GUESTS,
        Line("cargo xtask guest --kernel iommufd -- dmaspan devices 0000:00:05.0"),
    ),
    entry(
        "cargo run --release -- map 256M --backend vfio:0000:00:05.0 --runs 3",
        GUESTS,
        Line(
            "cargo xtask guest --kernel iommufd --prepare 'hugepages 128' -- \
             dmaspan map 256M --backend vfio:0000:00:05.0 --runs 3",
        ),
    ),
    entry("cargo xtask guest", GUESTS, GUESTS),
    entry("cargo xtask guest --help", AsIs, AsIs),
    entry(
        "cargo xtask guest --kernel iommufd --icount -- \
         dmaspan-nvme bench 0000:00:05.0 --count 20000 --turns 4 --hand-written",
        GUESTS,
        AsIs,
    ),
    entry(
        "cargo run --release -p dmaspan-bench -- io-pgtable --format-name arm-lpae",
        Line("cargo run --release -q -p dmaspan-bench -- io-pgtable --quick"),
        // Without a name it is every format.
        Line("cargo run --release -q -p dmaspan-bench -- io-pgtable"),
    ),
    entry("cargo run --release -p dmaspan-bench -- dma", With("--quick"), AsIs),
    entry("cargo run --release -p dmaspan-bench -- container", With("--quick"), AsIs),
    entry("cargo run --release -p dmaspan-bench -- swiotlb", With("--quick"), AsIs),
    entry("cargo run --release -p dmaspan-bench -- regbuf", With("--quick --size 64M"), AsIs),
    entry(
        "cargo run --release -p dmaspan-linux --example fixed_copy -- SOURCE TARGET",
        TESTS,
        Line(
            "there=$(mktemp -d -p \"${CARGO_TARGET_DIR:-target}\") && \
             head -c 512M /dev/urandom > \"$there/source\" && \
             cargo run --release -q -p dmaspan-linux --example fixed_copy -- \
             \"$there/source\" \"$there/target\" && cmp \"$there/source\" \"$there/target\"; \
             code=$?; rm -r \"$there\"; exit $code",
        ),
    ),
    entry(
        "DMASPAN_COST_PAGES=262144 cargo test --release -p dmaspan-qemu --test it cost -- \
         --nocapture",
        Check("hardware"),
        AsIs,
    ),
    entry("cargo test -p dmaspan-drivers --test arm_smmu", TESTS, TESTS),
    entry("cargo xtask peers", With("--runs 1 --case lpae/4k_1"), AsIs),
    entry(
        "cargo xtask peers --runs 3 --case domain",
        Line("cargo xtask peers --runs 1 --case domain_4k_1"),
        AsIs,
    ),
    entry(
        "cargo xtask peers --runs 3 --case swiotlb",
        Line("cargo xtask peers --runs 1 --case swiotlb/pair_4k"),
        AsIs,
    ),
    entry("cargo xtask peers --bytes", With("--configurations 100"), AsIs),
    entry("cargo test --workspace", TESTS, TESTS),
    entry("cargo bench -p dmaspan --bench io_pgtable", Line(BENCHES), AsIs),
    entry("cargo bench -p dmaspan --bench dma", Line(BENCHES), AsIs),
    entry("cargo bench -p dmaspan --bench regbuf", Line(BENCHES), AsIs),
    entry("cargo xtask hw", Check("hardware"), Check("hardware")),
    entry("cargo xtask msrv", Check("oldest Rust"), Check("oldest Rust")),
    // The very thing that runs.
    entry("cargo xtask ci", Check(""), Check("")),
    entry("cargo xtask ci --full", Check(""), Check("")),
];

/// Runs all commands of the README that no other check runs, each line once, and returns what
/// failed; what a line printed is shown where it failed.
pub(super) fn run(extent: Extent) -> Vec<String> {
    let mut failed = unknown(&text());
    let mut lines: Vec<String> = Vec::new();
    for entry in COMMANDS {
        let form = match extent {
            Extent::Quick => entry.quick,
            Extent::Full => entry.full,
        };
        let line = match form {
            AsIs => entry.command.to_owned(),
            With(words) => format!("{} {words}", entry.command),
            Line(line) => line.to_owned(),
            Check(_) => continue,
        };
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let qemu = hw::found();
    for line in lines {
        let started = Instant::now();
        let mut shell = Command::new("sh");
        if let Some(folder) = &qemu {
            shell.env(hw::FOLDER, folder);
        }
        match quietly(shell.args(["-c", &line]).current_dir(crate::root())) {
            Ok(()) => println!("   {} s: {line}", started.elapsed().as_secs()),
            Err(how) => failed.push(format!("`{line}`: {how}")),
        }
    }
    failed
}

fn text() -> String {
    std::fs::read_to_string(crate::root().join("README.md")).unwrap_or_default()
}

/// The commands of a text that no entry is of, and the entries that are of none, a line each.
fn unknown(text: &str) -> Vec<String> {
    let commands = commands(text);
    let is_known = |command: &String| COMMANDS.iter().any(|entry| entry.command == command);
    let new = commands.iter().filter(|command| !is_known(command));
    let new = new.map(|command| {
        format!("README.md has `{command}`, and xtask/src/ci/readme.rs does not say how it is run")
    });
    let old = COMMANDS.iter().filter(|entry| !commands.iter().any(|one| one == entry.command));
    let old = old.map(|entry| {
        format!("README.md has no `{}`: take it out of xtask/src/ci/readme.rs", entry.command)
    });
    new.chain(old).collect()
}

/// The commands in a text, each once: the lines of its blocks of shell, those behind a `$` in its
/// blocks of output, and the calls of cargo that stand in a sentence.
fn commands(text: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    let mut add = |command: &str| {
        let words: Vec<&str> = command.split_whitespace().collect();
        let command = words.join(" ");
        if !command.is_empty() && !commands.contains(&command) {
            commands.push(command);
        }
    };
    let mut prose = String::new();
    let mut block: Option<&str> = None;
    let joined = text.replace("\\\n", " ");
    for line in joined.lines() {
        match (line.strip_prefix("```"), block) {
            (Some(_), Some(_)) => block = None,
            (Some(kind), None) => block = Some(kind),
            (None, Some("sh")) => add(line.split(" #").next().unwrap_or(line)),
            (None, Some(_)) => line.strip_prefix("$ ").into_iter().for_each(&mut add),
            (None, None) => prose.extend([line, "\n"]),
        }
    }
    for code in prose.split('`').skip(1).step_by(2).filter(|code| code.starts_with("cargo ")) {
        add(code);
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::super::CHECKS;
    use super::*;

    #[test]
    fn every_command_of_the_readme_is_known_and_no_other() {
        assert_eq!(unknown(&text()), Vec::<String>::new());
    }

    #[test]
    fn what_another_check_runs_names_a_check_that_there_is() {
        for entry in COMMANDS {
            for form in [entry.quick, entry.full] {
                if let Check(name) = form {
                    let is_one = CHECKS.iter().any(|check| check.name.starts_with(name));
                    assert!(is_one, "{}: {name}", entry.command);
                }
            }
        }
    }

    #[test]
    fn commands_are_found_wherever_they_stand() {
        let text = "See `cargo a\n--b` and `map`.\n```sh\ncargo c  # what it does\nX=1 d\n\n```\n\
                    ```text\n$ cargo e \\\n    f\nits output\n```\nAgain `cargo c`, ```` no.";
        assert_eq!(commands(text), ["cargo c", "X=1 d", "cargo e f", "cargo a --b"]);
    }

    #[test]
    fn a_command_that_nobody_knows_how_to_run_is_a_failure() {
        let text = format!("{}\n```sh\ncargo brew\n```\n", text());
        let [problem] = &unknown(&text)[..] else { panic!("one") };
        assert!(problem.contains("`cargo brew`"), "{problem}");
        assert_eq!(unknown("").len(), COMMANDS.len());
    }
}
