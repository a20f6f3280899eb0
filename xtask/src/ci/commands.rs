//! The commands of README and book, each of which runs: as it stands there, or in a form that is
//! quicker.
//!
//! The commands are taken out of the texts, so that a new one without an entry here is a failure.
//! Only those that run an example need none: [`is_example`] knows them by their form.

use std::process::Command;
use std::time::Instant;

use super::{Extent, quietly};
use crate::hw;
use crate::tree::Tree;

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

/// Commands of the README or of the book that are run alike.
struct Entry {
    quick: Form,
    full: Form,
    commands: &'static [&'static str],
}

const fn alike(quick: Form, full: Form) -> Entry {
    Entry { quick, full, commands: &[] }
}

impl Entry {
    const fn of(self, commands: &'static [&'static str]) -> Self {
        Self { commands, ..self }
    }
}

/// Every command, and how it is run.
fn entries() -> impl Iterator<Item = (&'static str, &'static Entry)> {
    COMMANDS.iter().flat_map(|entry| entry.commands.iter().map(move |&command| (command, entry)))
}

/// A quick form of the benchmarks of the core: each case once.
const BENCHES: &str =
    "cargo test --workspace --bench io_pgtable --bench dma --bench regbuf --bench queue";
const IOVAS: &str = "cargo xtask peers --runs 1 --case iova/pair_1_threads_1";
const DMA_PAIR: &str = "cargo xtask peers --runs 1 --case dma_pair";
const ONE_COUNT: &str = "cargo xtask peers --instructions --case dma_lpae/single_1_lazy";
const ONE_CONTENTION: &str = "cargo xtask peers --contention --case iova/pair_1";
const ONE_CONTAINER: &str =
    "cargo xtask peers --instructions --case container_lpae/64k_folio_cheap";
const ONE_REGISTERED: &str = "cargo xtask peers --instructions --case registered/64k_folio_cheap";
const ONE_SERIES: &str = "cargo xtask peers --series map-pages --runs 1";
const ONE_ROW: &str = "cargo xtask peers --format json --runs 1 --case lpae/4k_1";
/// It says that mapping would fail.
const FAILS: Form =
    Line("cargo run --release -- plan --layout docs/layouts/laptop-39-bits.toml; test $? = 1");
/// What is wrong with this machine is no failure.
const DOCTOR: Form = Line("cargo run --release -- doctor || test $? = 1");
const BOOK: Form = Check("book");
const TESTS: Form = Check("tests");
/// The crates whose examples `docs/tests/examples.rs` runs.
const EXAMPLES: [&str; 2] = ["dmaspan", "dmaspan-linux"];
const GUESTS: Form = Check("guests");
const KERNEL: Form = Check("kernel");
const OTHER_CPUS: Form = Check("other CPUs");

const COMMANDS: &[Entry] = &[
    alike(With("64M --runs 1"), AsIs).of(&["cargo run --release -- map"]),
    alike(Line("cargo run --release -- map 64M --memory base --runs 1"), AsIs)
        .of(&["cargo run --release -- map 2G --memory base"]),
    alike(AsIs, AsIs).of(&[
        "cargo run --release -- devices",
        "cargo run --release -- inspect crates/dmaspan-cli/tests/dumps/smmuv3.core \
         --root 0x434fe000 --iommu smmuv3",
        "cargo run --release -- inspect crates/dmaspan-cli/tests/dumps/vtd.core --root 0x97f000 \
         --iommu vtd --iova 0x40001000 --phys 0x201000",
        "cargo xtask guest --help",
        "cargo xtask peers --findings",
    ]),
    alike(FAILS, FAILS)
        .of(&["cargo run --release -- plan --layout docs/layouts/laptop-39-bits.toml"]),
    alike(DOCTOR, DOCTOR).of(&["cargo run --release -- doctor"]),
    alike(TESTS, AsIs).of(&[
        "cargo test --release -p dmaspan-cli --test it process:: -- --nocapture",
        // Tests run the program so, and it takes minutes to build it to be timed.
        "cargo run --release -p dmaspan-bench -- swiotlb",
        "cargo run --release -p dmaspan-bench -- swiotlb --oversubscribe",
        "cargo test -p dmaspan-qemu --test it cost -- --nocapture",
        "cargo run --release -p dmaspan-sim --example packets -- 1000000",
        "cargo run -p dmaspan-sim --example virtio_blk",
        "cargo xtask picture",
    ]),
    alike(GUESTS, Line("cargo xtask guest --kernel iommufd -- dmaspan devices 0000:00:05.0"))
        .of(&["cargo run --release -- devices 0000:00:05.0"]),
    alike(
        GUESTS,
        Line(
            "cargo xtask guest --kernel iommufd --prepare 'hugepages 128' -- \
             dmaspan map 256M --backend vfio:0000:00:05.0 --runs 3",
        ),
    )
    .of(&["cargo run --release -- map 256M --backend vfio:0000:00:05.0 --runs 3"]),
    alike(GUESTS, GUESTS).of(&[
        "cargo xtask guest",
        "cargo xtask guest --series",
        "cargo xtask guest --boot map-pages",
        "cargo xtask guest --boot map-pages-arm",
        "cargo xtask guest --jobs 1 --boot swiotlb --boot swiotlb-one-area --boot no-swiotlb",
        "cargo xtask guest --boot large-folios",
        "cargo xtask guest --boot unaligned-bar",
        "cargo xtask guest --boot vm-boot",
        "cargo xtask guest --boot vm-boot-requests",
        "cargo xtask guest --boot registered-buffers",
        "cargo xtask guest --boot vfio-user --boot vfio-user-viommu",
        "cargo xtask guest --kernel newest --boot vfio-user-viommu-whole",
        "cargo xtask guest --boot vfio-user-iops",
        "cargo xtask guest --boot vfio-user-killed --boot vfio-user-killed-busy",
        "cargo xtask guest --boot noiommu",
        "dmaspan-bench fixed /dev/nvme0n1 --depth 16 --count 512 --runs 3",
        "cargo xtask guest --kernel 6.18 --icount --memory 3G --membar 32G --prepare \"settle 20\" \
         -- dmaspan map 256M --backend vfio:0000:00:05.0 --runs 3",
        "cargo xtask guest --kernel 6.12 --icount --membar 32G \
         -- dmaspan map --backend vfio:0000:00:07.0 --bar 2 --runs 1",
    ]),
    alike(TESTS, GUESTS).of(&["cargo run -p dmaspan-nvme-server -- /tmp/nvme.sock disk.img"]),
    alike(TESTS, TESTS).of(&[
        "cargo test -p dmaspan-nvme-server hostile",
        "cargo test -p dmaspan-drivers --test arm_smmu",
        "cargo test --workspace",
        "cargo xtask hw",
    ]),
    alike(OTHER_CPUS, OTHER_CPUS).of(&[
        "cargo xtask cross",
        "cargo xtask cross bare",
        "cargo xtask cross user",
        "cargo xtask cross copies",
        "cargo xtask cross registers",
        "cargo xtask cross guest",
    ]),
    alike(KERNEL, KERNEL).of(&[
        "cargo xtask kernel",
        "cargo xtask kernel aarch64",
        "cargo xtask kernel aarch64-el2",
    ]),
    alike(Check("mutants"), Check("mutants")).of(&["cargo xtask mutants"]),
    alike(Check("sanitizers"), Check("sanitizers"))
        .of(&["cargo xtask sanitize", "cargo xtask sanitize big-endian"]),
    alike(GUESTS, AsIs).of(&[
        "cargo xtask guest --kernel iommufd --icount -- \
         dmaspan-nvme bench 0000:00:05.0 --count 20000 --turns 4 --hand-written",
        "cargo xtask guest --kernel iommufd -- dmaspan map 64M --runs 1",
        "cargo xtask guest --kernel iommufd -- dmaspan-guest cases --backend iommufd mock/",
        "cargo xtask guest --kernel iommufd --memory 3G \
         -- dmaspan-guest cases --backend iommufd pins/",
        "cargo xtask guest --kernel iommufd --boot viommu-pins",
        "cargo xtask guest --kernel iommufd --boot requests",
    ]),
    alike(
        TESTS,
        Line(
            "there=$(mktemp -d -p \"${CARGO_TARGET_DIR:-target}\") && \
             head -c 512M /dev/urandom > \"$there/source\" && \
             cargo run --release -q -p dmaspan-linux --example fixed_copy -- \
             \"$there/source\" \"$there/target\" && cmp \"$there/source\" \"$there/target\"; \
             code=$?; rm -r \"$there\"; exit $code",
        ),
    )
    .of(&["cargo run --release -p dmaspan-linux --example fixed_copy -- SOURCE TARGET"]),
    alike(Line(ONE_ROW), AsIs).of(&["cargo xtask peers", "cargo xtask peers --format json"]),
    alike(Line(DMA_PAIR), AsIs).of(&[
        "cargo xtask peers --runs 3 --case domain",
        "cargo xtask peers --runs 3 --case dma_pair",
    ]),
    alike(Line("cargo xtask peers --runs 1 --case swiotlb/pair_4k"), AsIs)
        .of(&["cargo xtask peers --runs 3 --case swiotlb"]),
    alike(Line(ONE_COUNT), AsIs).of(&[
        "cargo xtask peers --instructions --case dma_lpae",
        "cargo xtask peers --runs 3 --case dma_lpae/",
        "cargo xtask peers --runs 3 --case dma_lpae/ --invalidation-ns 1000",
    ]),
    alike(Line(ONE_CONTENTION), AsIs).of(&[
        "cargo xtask peers --contention",
        "cargo xtask peers --contention --linux 5.10 --case swiotlb",
        "cargo xtask peers --contention --linux 6.1 --case swiotlb",
    ]),
    alike(Line(ONE_CONTAINER), AsIs).of(&[
        "cargo xtask peers --instructions --case container",
        "cargo xtask peers --runs 3 --case container",
    ]),
    alike(Line(ONE_REGISTERED), AsIs).of(&[
        "cargo xtask peers --instructions --case registered",
        "cargo xtask peers --runs 1 --case registered/import",
    ]),
    alike(With("--configurations 100"), AsIs).of(&["cargo xtask peers --bytes"]),
    alike(Line(ONE_SERIES), AsIs)
        .of(&["cargo xtask peers --series", "cargo xtask peers --series registered"]),
    alike(Check("interleavings"), Check("interleavings"))
        .of(&["cargo test -p dmaspan --test loom"]),
    alike(Line(BENCHES), AsIs).of(&[
        "cargo bench -p dmaspan --bench io_pgtable",
        "cargo bench -p dmaspan --bench dma",
        "cargo bench -p dmaspan --bench regbuf",
        "cargo bench -p dmaspan-drivers --bench queue",
    ]),
    alike(Line(IOVAS), AsIs).of(&["cargo xtask peers --runs 3 --case iova/"]),
    alike(BOOK, BOOK).of(&["cargo xtask book"]),
    alike(Check("documentation"), Check("documentation"))
        .of(&["cargo doc --workspace --no-deps --open"]),
    alike(Check("oldest Rust"), Check("oldest Rust")).of(&["cargo xtask msrv"]),
    alike(Check(""), Check("")).of(&[
        // The very thing that runs.
        "cargo xtask ci",
        "cargo xtask ci --full",
    ]),
];

/// Runs all commands of README and book that no other check runs, each line once, and returns what
/// failed; what a line printed is shown where it failed.
pub(super) fn run(extent: Extent) -> Vec<String> {
    let mut failed = match Tree::of_workspace() {
        Ok(tree) => unknown(tree),
        Err(why) => vec![why.to_owned()],
    };
    let mut lines: Vec<String> = Vec::new();
    for (command, entry) in entries() {
        let form = match extent {
            Extent::Quick => entry.quick,
            Extent::Full => entry.full,
        };
        let line = match form {
            AsIs => command.to_owned(),
            With(words) => format!("{command} {words}"),
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

/// The README and the chapters of the book.
fn documents(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    let documents = tree.files().iter().map(|file| (file.path.as_str(), file.text.as_str()));
    documents.filter(|(path, _)| {
        *path == "README.md" || path.starts_with("docs/src/") && path.ends_with(".md")
    })
}

/// The commands of the documents that no entry is of, and the entries that are of none, a line
/// each.
fn unknown(tree: &Tree) -> Vec<String> {
    let mut problems = Vec::new();
    let mut all: Vec<String> = Vec::new();
    for (path, text) in documents(tree) {
        for command in commands(text) {
            let is_known = entries().any(|(known, _)| known == command);
            if !is_known && !is_example(tree, &command) {
                problems.push(format!(
                    "{path} has `{command}`, and xtask/src/ci/commands.rs does not say how it \
                     is run"
                ));
            }
            all.push(command);
        }
    }
    let old = entries().filter(|(command, _)| !all.iter().any(|one| one == command));
    problems.extend(old.map(|(command, _)| {
        format!("nothing has `{command}`: take it out of xtask/src/ci/commands.rs")
    }));
    problems
}

/// Whether a command runs an example of a single file as it stands: a test runs all of those, and
/// looks at what they print.
fn is_example(tree: &Tree, command: &str) -> bool {
    let words: Vec<&str> = command.split(' ').collect();
    let ["cargo", "run", "-p", package, "--example", example] = words[..] else { return false };
    let source = format!("crates/{package}/examples/{example}.rs");
    EXAMPLES.contains(&package) && tree.file(&source).is_some()
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
    fn every_command_of_the_documents_is_known_and_no_other() {
        assert_eq!(unknown(Tree::of_workspace().unwrap()), Vec::<String>::new());
    }

    #[test]
    fn what_another_check_runs_names_a_check_that_there_is() {
        for (command, entry) in entries() {
            for form in [entry.quick, entry.full] {
                if let Check(name) = form {
                    let is_one = CHECKS.iter().any(|check| check.name.starts_with(name));
                    assert!(is_one, "{command}: {name}");
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
        let found = |path: &str| unknown(&Tree::of(&[(path, "```sh\ncargo brew\n```\n")]));
        for path in ["README.md", "docs/src/a/b.md"] {
            let problems = found(path);
            // No other command is there.
            assert_eq!(problems.len(), 1 + entries().count());
            assert!(problems[0].starts_with(&format!("{path} has `cargo brew`")), "{problems:?}");
        }
        assert_eq!(found("CONTRIBUTING.md").len(), entries().count());
    }

    #[test]
    fn examples_of_a_single_file_are_known_where_they_are_there() {
        let tree = Tree::of(&[
            ("crates/dmaspan/examples/b.rs", "fn main() {}"),
            ("crates/a/examples/b.rs", "fn main() {}"),
        ]);
        assert!(is_example(&tree, "cargo run -p dmaspan --example b"));
        for other in [
            "cargo run -p dmaspan --example c",
            "cargo run -p dmaspan --example b -- x",
            "cargo run -p a --example b",
            "cargo run",
        ] {
            assert!(!is_example(&tree, other), "{other}");
        }
    }
}
