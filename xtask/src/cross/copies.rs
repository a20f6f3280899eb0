//! The cost of a bounce slot's copy beside the C library's `memcpy`, in instructions.
//!
//! The emulator of programs says a line for each instruction that it runs one at a time. A test of
//! `dmaspan-linux` copies a page as often as the environment says; two runs of it that differ in
//! nothing else differ by the instructions of those copies.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use super::tools::Tools;
use super::{Target, programs};

/// The test, and how it is told what to do.
const TEST: &str = "sys::bytes::tests::a_page_is_copied_as_often_as_the_environment_says";
const ASKED: &str = "DMASPAN_COPIES";
/// How many copies two runs differ by.
const COPIES: u64 = 200;
const PAGE: u64 = 4096;
/// How many times the C library's instructions ours may be.
const MOST: u64 = 3;

/// Counts both and says how they compare.
pub(super) fn check(target: &Target, tools: &Tools) -> Result<(), String> {
    let built = programs::build(target, tools, "dmaspan-linux", &["--release", "--lib"])?;
    let program = built.iter().find(|program| program.is_test);
    let program = &program.ok_or("cargo names no program of tests")?.path;
    let mut counts = [0; 2];
    for (count, by) in counts.iter_mut().zip(["bounce", "memcpy"]) {
        let run = |copies| instructions(target, tools, program, &format!("{by}:{copies}"));
        let (less, more) = (run(COPIES)?, run(2 * COPIES)?);
        *count = more.saturating_sub(less) / COPIES;
    }
    let [bounce, memcpy] = counts;
    let machine = target.machine;
    crate::say(&format!(
        "   {machine}: a bounce copy of {PAGE} bytes takes {bounce} instructions, memcpy {memcpy}"
    ));
    let is_counted = memcpy >= PAGE / 64;
    match is_counted && bounce <= MOST * memcpy {
        true => Ok(()),
        false => Err(format!("{machine}: at most {MOST} times memcpy's are expected")),
    }
}

/// How many instructions a run takes.
fn instructions(
    target: &Target,
    tools: &Tools,
    program: &Path,
    asked: &str,
) -> Result<u64, String> {
    let log = crate::target_directory().join("cross").join("instructions.log");
    let mut emulator = Command::new(tools.emulator(target.machine));
    emulator.args(["-one-insn-per-tb", "-d", "exec,nochain", "-D"]).arg(&log).arg(program);
    emulator.args(["--exact", TEST, "--test-threads", "1", "--quiet"]);
    crate::run(emulator.env(ASKED, asked).stdout(Stdio::null()))?;
    let unreadable = |error| format!("{} cannot be read: {error}", log.display());
    let mut lines = BufReader::new(File::open(&log).map_err(unreadable)?);
    let (mut count, mut line) = (0, Vec::new());
    while lines.read_until(b'\n', &mut line).map_err(unreadable)? > 0 {
        count += u64::from(line.starts_with(b"Trace "));
        line.clear();
    }
    std::fs::remove_file(&log).map_err(unreadable)?;
    Ok(count)
}
