//! The example `fixed_copy` as its users run it.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const K4: usize = 4 << 10;
const M1: usize = 1 << 20;

/// A folder of one test, removed in the end, and the program.
struct Scratch {
    /// And what comes before it on the command line.
    program: Vec<OsString>,
    folder: PathBuf,
}

impl Scratch {
    /// `None`, said, where the example is not built, or io_uring cannot be used.
    fn new(test: &str) -> Option<Self> {
        let program = vec![program()?.into()];
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fixed_copy-{test}"));
        // That of a run that was stopped.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let scratch = Self { program, folder };
        scratch.file("probe", &[1]);
        let output = scratch.copy(&["probe", "probe-copy"]);
        let said = text(&output.stderr);
        if !output.status.success() && said.starts_with("fixed_copy: no ring: io_uring cannot") {
            eprintln!("SKIP: {said}");
            return None;
        }
        assert!(output.status.success(), "{said}");
        for name in ["probe", "probe-copy"] {
            fs::remove_file(scratch.path(name)).unwrap();
        }
        Some(scratch)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn file(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// What is in the folder.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        names
    }

    /// Runs the program in the folder.
    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]).args(arguments);
        command.current_dir(&self.folder).env("RUST_BACKTRACE", "1").output().unwrap()
    }

    /// The same with a few base pages, so that nothing depends on huge ones.
    fn copy(&self, arguments: &[&str]) -> Output {
        self.run(&[arguments, &["--memory", "base", "--block", "64K", "--depth", "4"]].concat())
    }

    #[track_caller]
    fn copied(&self, arguments: &[&str]) -> Output {
        let output = self.copy(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        output
    }

    /// Asserts that the program refuses by one line, which has `part` in it, and that the folder
    /// stays as it is.
    #[track_caller]
    fn refused(&self, arguments: &[&str], part: &str) {
        let before = self.names();
        let output = self.copy(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let line = said.strip_suffix('\n').unwrap_or_default();
        assert!(line.starts_with("fixed_copy: ") && !line.contains('\n'), "{arguments:?}: {said}");
        assert!(line.contains(part), "{arguments:?}: {said}");
        assert!(!line.contains("os error"), "{arguments:?}: {said}");
        assert_eq!(self.names(), before, "{arguments:?}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The example, which `cargo test` builds beside the folder of this test; `--test` does not.
fn program() -> Option<PathBuf> {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join("fixed_copy");
    if !program.is_file() {
        let how = "cargo build -p dmaspan-linux --example fixed_copy";
        eprintln!("SKIP: {} is not built: `{how}`", program.display());
        return None;
    }
    Some(program)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Bytes of which no two blocks are alike.
fn bytes(len: usize) -> Vec<u8> {
    let words = (0u64..).map(|n| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut bytes: Vec<u8> =
        words.take(len.div_ceil(8)).flat_map(|word| word.rotate_left(29).to_ne_bytes()).collect();
    bytes.truncate(len);
    bytes
}

#[test]
fn files_of_any_length_are_copied_byte_for_byte() {
    let Some(scratch) = Scratch::new("lengths") else { return };
    let several = 4 * (64 << 10);
    for len in [0, 1, K4 - 1, K4, K4 + 1, several, several + 1, M1 + 1, 3 * M1 + 4095] {
        let source = bytes(len);
        scratch.file("source", &source);
        scratch.copied(&["source", "target", "--force"]);
        assert!(scratch.read("target") == source, "{len} bytes");
        assert!(scratch.read("source") == source, "{len} bytes");
        assert_eq!(scratch.names(), ["source", "target"], "{len} bytes");
    }
}

#[test]
fn any_block_and_depth_copies_the_same() {
    let Some(scratch) = Scratch::new("blocks") else { return };
    let source = bytes(M1 + 4097);
    scratch.file("source", &source);
    for (block, depth) in [("4096", "1"), ("12k", "7"), ("4K", "64"), ("1M", "2"), ("8M", "1")] {
        let output = scratch.run(&["source", "target", "--block", block, "--depth", depth]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(scratch.read("target") == source, "blocks of {block}, {depth} at a time");
        fs::remove_file(scratch.path("target")).unwrap();
    }
}

#[test]
fn holes_are_zeros() {
    let Some(scratch) = Scratch::new("holes") else { return };
    let mut file = File::create(scratch.path("source")).unwrap();
    file.write_all(b"first").unwrap();
    file.set_len(1_000_001).unwrap();
    scratch.copied(&["source", "target"]);
    let copy = scratch.read("target");
    assert_eq!(copy.len(), 1_000_001);
    assert_eq!(&copy[..5], b"first");
    assert!(copy[5..].iter().all(|byte| *byte == 0));
}

#[test]
fn the_copy_has_the_permissions_of_the_source() {
    let Some(scratch) = Scratch::new("mode") else { return };
    for mode in [0o640, 0o600, 0o700] {
        // The mask of this process is the program's too.
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(mode).open(scratch.path("source"));
        file.unwrap().write_all(b"bytes").unwrap();
        scratch.copied(&["source", "target", "--force"]);
        let mode_of = |name| fs::metadata(scratch.path(name)).unwrap().permissions().mode();
        assert_eq!(mode_of("target"), mode_of("source"), "{mode:o}");
        fs::remove_file(scratch.path("source")).unwrap();
    }
}

#[test]
fn a_target_that_exists_stays_unless_it_is_to_be_replaced() {
    let Some(scratch) = Scratch::new("exists") else { return };
    scratch.file("source", b"new");
    scratch.file("target", b"what was there before");
    scratch.refused(&["source", "target"], "target: it exists: --force replaces it");
    assert_eq!(scratch.read("target"), b"what was there before");
    scratch.copied(&["source", "target", "--force"]);
    assert_eq!(scratch.read("target"), b"new");
    symlink("nowhere", scratch.path("link")).unwrap();
    scratch.refused(&["source", "link"], "link: it exists");
    assert_eq!(scratch.names(), ["link", "source", "target"]);
}

#[test]
fn what_a_stopped_copy_left_is_replaced_and_not_written_through() {
    let Some(scratch) = Scratch::new("left") else { return };
    scratch.file("source", b"new");
    scratch.file("another", b"somebody's");
    symlink("another", scratch.path("target.part")).unwrap();
    scratch.refused(&["source", "target"], "target.part: it is left of a copy");
    scratch.copied(&["source", "target", "--force"]);
    assert_eq!(scratch.read("target"), b"new");
    assert_eq!(scratch.read("another"), b"somebody's");
    assert!(!scratch.path("target").is_symlink());
    assert_eq!(scratch.names(), ["another", "source", "target"]);
}

#[test]
fn a_file_is_not_copied_to_itself() {
    let Some(scratch) = Scratch::new("same") else { return };
    let source = bytes(K4 + 1);
    scratch.file("source", &source);
    fs::hard_link(scratch.path("source"), scratch.path("hard")).unwrap();
    symlink("source", scratch.path("soft")).unwrap();
    for target in ["source", "hard", "soft", "./source"] {
        for arguments in [&["source", target][..], &["source", target, "--force"]] {
            scratch.refused(arguments, "source and target are the same file");
            assert!(scratch.read("source") == source);
        }
    }
}

#[test]
fn what_is_no_file_or_not_there_is_refused_by_name() {
    let Some(scratch) = Scratch::new("names") else { return };
    scratch.file("source", b"bytes");
    fs::create_dir(scratch.path("folder")).unwrap();
    for (source, target, part) in [
        ("missing", "target", "missing: cannot read it: No such file or directory"),
        ("folder", "target", "folder: not a regular file"),
        ("/dev/null", "target", "/dev/null: not a regular file"),
        ("source", "folder", "folder: not a regular file"),
        ("source", "/dev/null", "/dev/null: not a regular file"),
        ("source", "nowhere/target", "nowhere/target: cannot create it: No such file"),
        ("source", "source/target", "source/target: cannot create it: Not a directory"),
    ] {
        scratch.refused(&[source, target], part);
        scratch.refused(&[source, target, "--force"], part);
    }
    assert_eq!(scratch.read("source"), b"bytes");
}

#[test]
fn a_copy_that_may_not_become_so_long_leaves_nothing() {
    let Some(mut scratch) = Scratch::new("limit") else { return };
    scratch.file("source", &bytes(M1));
    scratch.file("target", b"what was there before");
    // A few KiB a file, and no signal, which ends programs by default.
    let script = r#"trap '' XFSZ; ulimit -f 16; exec "$0" "$@""#;
    scratch.program.splice(0..0, ["sh", "-c", script].map(OsString::from));
    scratch.refused(&["source", "target", "--force"], "target: cannot write it: File too large");
    assert_eq!(scratch.read("target"), b"what was there before");
}

#[test]
fn wrong_usage_is_told_with_exit_code_2() {
    let Some(scratch) = Scratch::new("usage") else { return };
    scratch.file("source", b"bytes");
    for (option, part) in [
        ("--block=1000", "a multiple of 4K"),
        ("--block=0", "a multiple of 4K"),
        ("--block=2000M", "up to 1024M"),
        ("--block=99999999999999999999K", "up to 1024M"),
        ("--block=many", "as 64K or 1M"),
        ("--depth=0", "1..=4096"),
        ("--memory=none", "hugetlb-1g"),
        ("--rounds=3", "--compare"),
    ] {
        let output = scratch.run(&["source", "target", option]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{option}: {said}");
        assert!(said.starts_with("error: ") && said.contains(part), "{option}: {said}");
    }
    assert_eq!(scratch.names(), ["source"]);
}

#[test]
fn the_program_says_what_it_copied_through_and_nothing_else() {
    let Some(scratch) = Scratch::new("says") else { return };
    scratch.file("source", &bytes(M1));
    let output = scratch.copied(&["source", "target"]);
    let said = text(&output.stderr);
    let lines: Vec<_> = said.lines().filter(|line| !line.starts_with("note: ")).collect();
    let [buffers, memory, copied] = lines[..] else { panic!("{said}") };
    assert!(buffers.starts_with("buffers: 4 of 64K, registered "), "{said}");
    assert_eq!(memory, "memory:  256 KiB of base memory");
    assert!(copied.starts_with("copied:  1.00 MiB in "), "{said}");
    assert!(output.stdout.is_empty());
}

#[test]
fn a_comparison_is_a_table_and_leaves_one_copy() {
    let Some(scratch) = Scratch::new("compare") else { return };
    let source = bytes(200_001);
    scratch.file("source", &source);
    let output = scratch.copied(&["source", "target", "--compare", "--rounds", "1"]);
    let table = text(&output.stdout);
    for part in ["× fixed", "fixed buffers, O_DIRECT, 4 at a time", "plain loop, page cache"] {
        assert!(table.contains(part), "{table}");
    }
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(scratch.read("target") == source);
    assert_eq!(scratch.names(), ["source", "target"]);
}

#[test]
fn the_help_fits_into_80_columns() {
    let Some(program) = program() else { return };
    let output = Command::new(program).arg("--help").output().unwrap();
    assert!(output.status.success());
    let help = text(&output.stdout);
    for option in ["--block", "--depth", "--memory", "--force", "--compare", "--rounds"] {
        assert!(help.contains(option), "{help}");
    }
    let long: Vec<_> = help.lines().filter(|line| line.chars().count() > 80).collect();
    assert!(long.is_empty(), "{long:#?}");
}
