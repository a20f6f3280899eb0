//! Counts of what CPUs do to each other: atomic read-modify-writes, and accesses to cache lines
//! that another CPU writes, for the same operations on both sides, and what they come to on many
//! CPUs.
//!
//! Each program does a case's operations on four CPUs in turn under valgrind's lackey, which prints
//! every access; [`trace`] reads that and keeps what is within operations. The parts of operations
//! that wait for nothing are the same whatever else runs on the machine.

mod code;
mod counts;
mod projection;
mod report;
mod trace;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;
use std::process::{self, Command, Stdio};

use super::output_of;
use super::samples::Samples;
use counts::Counts;
use trace::Trace;

pub(super) use report::{json, table};

/// A case, and who of Linux does the same.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) format: &'static str,
    name: &'static str,
    /// The peer's name, its program, and what that calls the format and the case.
    peer: Option<(&'static str, &'static str, &'static str, &'static str)>,
    /// The cases by which both sides are timed, without `_threads_1` and `_threads_2`.
    timed: Option<(&'static str, &'static str)>,
}

const fn case(
    format: &'static str,
    name: &'static str,
    peer: (&'static str, &'static str, &'static str, &'static str),
    timed: (&'static str, &'static str),
) -> Case {
    Case { format, name, peer: Some(peer), timed: Some(timed) }
}

const fn without_peer(format: &'static str, name: &'static str) -> Case {
    Case { format, name, peer: None, timed: None }
}

const ARM: (&str, &str, &str, &str) = ("io-pgtable-arm", "io_pgtable", "lpae", "pair_4k_1");
const CASES: [Case; 13] = [
    case("lpae", "pair_4k_1", ARM, ("pair_4k_1", "pair_4k_1")),
    case(
        "vtd_ss",
        "pair_4k_1",
        ("generic_pt vtdss", "generic_pt", "vtdss", "pair_4k_1"),
        ("pair_4k_1", "pair_4k_1"),
    ),
    case("lpae", "domain_pair_1", ARM, ("domain_pair_1", "pair_4k_1")),
    case("iova", "pair_1", ("iova.c", "iova", "iova", "pair_1"), ("pair_1", "pair_1")),
    case("iova", "pair_64", ("iova.c", "iova", "iova", "pair_64"), ("pair_64", "pair_64")),
    case(
        "swiotlb",
        "pair_4k",
        ("swiotlb.c", "swiotlb", "swiotlb", "pair_4k"),
        ("pair_4k", "pair_4k"),
    ),
    of_dma("dma_lpae", "single_1_lazy", "dma-iommu.c, arm"),
    of_dma("dma_lpae", "single_1_strict", "dma-iommu.c, arm"),
    of_dma("dma_vtdss", "single_1_lazy", "dma-iommu.c, vtdss"),
    of_dma("dma_vtdss", "single_1_strict", "dma-iommu.c, vtdss"),
    without_peer("registered", "own_registry"),
    without_peer("registered", "shared_buffer"),
    without_peer("registered", "one_slot"),
];

const fn of_dma(format: &'static str, name: &'static str, peer: &'static str) -> Case {
    case(format, name, (peer, format, format, name), (name, name))
}

impl Case {
    fn name(&self) -> String {
        format!("{}/{}", self.format, self.name)
    }
}

/// The cases whose name contains `filter`.
pub(super) fn cases(filter: &str) -> Vec<&'static Case> {
    static ALL: [Case; 13] = CASES;
    ALL.iter().filter(|case| case.name().contains(filter)).collect()
}

/// One side of a case: Linux's or dmaspan's.
#[derive(Debug)]
pub(super) struct Side {
    who: String,
    counts: Counts,
    /// Nanoseconds of a pair of one CPU alone, and of two at once, where they were taken.
    alone_ns: Option<f64>,
    two_ns: Option<f64>,
}

/// A case that was counted.
#[derive(Debug)]
pub(super) struct Counted {
    case: String,
    /// Linux's first, where it has one.
    sides: Vec<Side>,
}

/// All that was counted.
#[derive(Debug)]
pub(super) struct Contention {
    cases: Vec<Counted>,
    /// How long a line takes from one CPU of this machine to another, where that was taken.
    line_ns: Option<f64>,
}

/// Whether this machine has what counts it.
pub(super) fn is_counted() -> bool {
    let help = Command::new("valgrind").args(["--tool=lackey", "--help"]).output();
    help.is_ok_and(|help| help.status.success())
}

/// Counts all cases that this Linux has, and takes the times of both sides from which the
/// projection starts.
///
/// # Errors
///
/// What is missing or failed, in one line.
pub(super) fn count(
    cases: &[&Case],
    work: &Path,
    own: &Path,
    is_built: impl Fn(&str) -> bool,
) -> Result<Contention, String> {
    let mut counted = Vec::new();
    let mut traced: BTreeMap<(&str, &str), Counts> = BTreeMap::new();
    for case in cases {
        let mut sides = Vec::new();
        eprintln!("peers: counting {}", case.name());
        if let Some((peer, program, format, their_case)) = case.peer
            && is_built(format)
        {
            let counts = match traced.get(&(format, their_case)) {
                Some(counts) => counts.clone(),
                None => counts_of(&work.join("c").join(program), &[format, their_case])?,
            };
            traced.insert((format, their_case), counts.clone());
            let [alone_ns, two_ns] = match case.timed {
                Some((_, timed)) => times(&work.join("u").join(program), format, timed)?,
                None => [None; 2],
            };
            sides.push(Side { who: peer.to_owned(), counts, alone_ns, two_ns });
        }
        let counts = counts_of(own, &[case.format, case.name])?;
        let [alone_ns, two_ns] = match case.timed {
            Some((timed, _)) => times(own, case.format, timed)?,
            None => [None; 2],
        };
        sides.push(Side { who: "dmaspan".to_owned(), counts, alone_ns, two_ns });
        counted.push(Counted { case: case.name(), sides });
    }
    let mut samples = Samples::default();
    samples.read("line", &output_of(Command::new(own).args(["line"]))?)?;
    let line_ns = samples.median("line", "line", "transfer");
    Ok(Contention { cases: counted, line_ns })
}

/// Counts a program that marks its operations, by its path and arguments.
///
/// # Errors
///
/// As [`count`].
pub(super) fn count_program(line: &str) -> Result<Contention, String> {
    let mut words = line.split_whitespace();
    let program = Path::new(words.next().ok_or("`--program` names none")?);
    let counts = counts_of(program, &words.collect::<Vec<_>>())?;
    let side = Side { who: "the program".to_owned(), counts, alone_ns: None, two_ns: None };
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Contention { cases: vec![Counted { case: name, sides: vec![side] }], line_ns: None })
}

/// What a program accesses in a case. A trace in which CPUs were not in turn, since the machine was
/// busy, is taken again.
fn counts_of(program: &Path, arguments: &[&str]) -> Result<Counts, String> {
    let mut last = String::new();
    for _ in 0..3 {
        match traced(program, arguments) {
            Ok(trace) => return Ok(Counts::of(&trace)),
            Err(error) => last = error,
        }
    }
    let (program, arguments) = (program.display(), arguments.join(" "));
    Err(format!("`{program} {arguments}` was not counted: {last}"))
}

/// By way of a file: lackey writes each line by itself, and who reads a pipe is woken by each.
fn traced(program: &Path, arguments: &[&str]) -> Result<Trace, String> {
    let path = crate::target_directory().join(format!("contention-{}.trace", process::id()));
    let trace = traced_to(&path, program, arguments);
    // Where there is none it could not be made, which was said.
    let _ = fs::remove_file(path);
    trace
}

fn traced_to(path: &Path, program: &Path, arguments: &[&str]) -> Result<Trace, String> {
    let failed = |error| format!("{}: {error}", path.display());
    let status = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no", "--fair-sched=yes"])
        .arg(program)
        .args(arguments)
        .env("PEERS_CONTENTION", "1")
        .env("PEERS_COUNTED_ROUNDS", "1")
        .stdout(Stdio::null())
        .stderr(File::create(path).map_err(failed)?)
        .status();
    let status = status.map_err(|error| format!("`valgrind` did not start: {error}"))?;
    let stream = BufReader::with_capacity(1 << 20, File::open(path).map_err(failed)?);
    let trace = Trace::read(stream)?;
    if status.success() { Ok(trace) } else { Err(format!("it failed with {status}")) }
}

/// The nanoseconds of a pair of one thread, and of two at once, where the machine has two CPUs.
fn times(program: &Path, format: &str, case: &str) -> Result<[Option<f64>; 2], String> {
    let names = [format!("{case}_threads_1"), format!("{case}_threads_2")];
    let mut samples = Samples::default();
    samples.read("it", &output_of(Command::new(program).arg(format).args(&names))?)?;
    Ok(names.map(|name| samples.median("it", &name, "pair")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_keeps_the_cases_that_contain_it() {
        let names = |filter| cases(filter).iter().map(|case| case.name()).collect::<Vec<_>>();
        assert_eq!(names("iova/"), ["iova/pair_1", "iova/pair_64"]);
        assert_eq!(names("").len(), CASES.len());
        assert!(names("no such case").is_empty());
    }
}
