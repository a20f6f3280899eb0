//! A comparison of dmaspan's page tables with Linux's own, on this machine: in time, or byte for
//! byte.
//!
//! `xtask/peers/build.sh` takes Linux's source package from the machine's distribution and builds
//! its page-table code, unmodified, into programs of their own. They and dmaspan's benchmark take
//! turns on the same cases. No code of Linux is stored here or linked to anything of this project.
//! `xtask/peers/README.md` has the method.

mod bytes;
mod contention;
mod instructions;
mod plan;
mod samples;
mod series;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use plan::{BUILDS, Comparison, Peer, Versus};
use samples::Samples;
use series::Series;

use crate::{Checked, Outcome};

/// The benchmark of the crate `dmaspan-bench`.
const OWN_BENCHMARK: &str = "peers";

/// How the result is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// For people, with the goals.
    Table,
    /// One array of rows.
    Json,
}

/// What is traced for accesses to what several CPUs write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Traced {
    /// Cases of both sides.
    Cases,
    /// A program that marks its operations, with its arguments.
    Program(String),
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Processes of each program; the median of their results counts.
    pub runs: usize,
    /// Where Linux's files and programs are built and kept, in a folder for each version.
    pub work: PathBuf,
    /// The versions of Linux that dmaspan is compared with.
    pub linux: Vec<&'static str>,
    /// How the result is printed.
    pub output: Output,
    /// Only cases whose `format/case` contains this; all where it is empty. Where bytes are
    /// compared it is a part of the format's name.
    pub case: String,
    /// Whether instructions are counted, and no time is taken.
    pub instructions: bool,
    /// Whose accesses to what several CPUs write are counted, where they are.
    pub contention: Option<Traced>,
    /// The series for Linux that are shown beside the versions before and behind them.
    pub series: Vec<&'static Series>,
    /// How long an invalidation of the whole DMA API takes, in nanoseconds.
    pub invalidation_ns: u64,
    /// Whether tables are compared, and not times.
    pub bytes: bool,
    /// Whether only what was found in Linux's tables is shown.
    pub findings: bool,
    /// Which random operations tables are compared after.
    pub seed: Option<u64>,
    /// How many random configurations there are, all formats together.
    pub configurations: Option<u64>,
}

/// Options that do not go with `--bytes`.
const TIMING: [&str; 6] =
    ["--runs", "--format", "--instructions", "--contention", "--program", "--invalidation-ns"];

/// Options whose place a series takes.
const SERIES_HAVE: [&str; 5] =
    ["--linux", "--case", "--invalidation-ns", "--seed", "--configurations"];

impl Options {
    /// Reads the command line's arguments behind `peers`.
    ///
    /// # Errors
    ///
    /// What is wrong with them, in one line.
    pub fn parse(arguments: &[&str]) -> Result<Self, String> {
        let mut options = Self {
            runs: 5,
            work: crate::target_directory().join("peers"),
            linux: vec![plan::DEFAULT_LINUX],
            output: Output::Table,
            case: String::new(),
            instructions: false,
            contention: None,
            series: Vec::new(),
            invalidation_ns: 0,
            bytes: false,
            findings: false,
            seed: None,
            configurations: None,
        };
        let mut timing = None;
        let mut chosen = None;
        let mut arguments = arguments.iter().peekable();
        while let Some(&name) = arguments.next() {
            if matches!(name, "--bytes" | "--findings") {
                options.bytes = true;
                options.findings |= name == "--findings";
                continue;
            }
            if TIMING.contains(&name) {
                timing = Some(name);
            }
            if matches!(name, "--instructions" | "--contention") {
                options.instructions |= name == "--instructions";
                if name == "--contention" {
                    options.contention.get_or_insert(Traced::Cases);
                }
                continue;
            }
            if name == "--series" {
                options.series = match arguments.next_if(|next| !next.starts_with("--")) {
                    Some(names) => series::named(names)?,
                    None => series::ALL.iter().collect(),
                };
                continue;
            }
            if SERIES_HAVE.contains(&name) {
                chosen = Some(name);
            }
            let value = arguments.next().ok_or(format!("`{name}` needs a value behind it"))?;
            options.set(name, value)?;
        }
        let chosen = chosen.or(options.instructions.then_some("--instructions"));
        match chosen.or(options.bytes.then_some("--bytes")) {
            _ if options.series.is_empty() => options.checked(timing),
            None if options.contention.is_none() => {
                options.linux = series::versions(&options.series);
                Ok(options)
            }
            other => {
                let other = other.unwrap_or("--contention");
                Err(format!("`{other}` and `--series` exclude each other"))
            }
        }
    }

    /// Takes an option that has a value.
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match (name, value) {
            ("--runs", value) => match value.parse() {
                Ok(runs) if runs > 0 => self.runs = runs,
                _ => return Err(format!("`{value}` is not a number of runs")),
            },
            ("--work", value) => self.work = value.into(),
            ("--linux", value) => self.linux = versions(value)?,
            ("--format", "table") => self.output = Output::Table,
            ("--format", "json") => self.output = Output::Json,
            ("--format", value) => return Err(format!("there is no format `{value}`")),
            ("--invalidation-ns", value) => self.invalidation_ns = number(value)?,
            ("--case", value) => self.case = value.to_owned(),
            ("--program", value) => {
                self.contention = Some(Traced::Program(value.to_owned()));
            }
            ("--seed", value) => self.seed = Some(number(value)?),
            ("--configurations", value) => self.configurations = Some(number(value)?),
            _ => return Err(format!("there is no option `{name}`")),
        }
        Ok(())
    }

    /// The same, unless some of them exclude each other; `timing` is one that is not for bytes.
    fn checked(self, timing: Option<&str>) -> Result<Self, String> {
        match timing {
            Some(name) if self.bytes => Err(format!("`{name}` and `--bytes` exclude each other")),
            _ if self.instructions && self.contention.is_some() => {
                Err("`--instructions` and `--contention` exclude each other".to_owned())
            }
            _ if matches!(self.contention, Some(Traced::Program(_))) && !self.case.is_empty() => {
                Err("`--program` has no cases".to_owned())
            }
            _ if (self.instructions || self.contention.is_some()) && self.invalidation_ns > 0 => {
                Err("`--invalidation-ns` goes with times, and not with counts".to_owned())
            }
            _ if self.linux.len() > 1 && (self.bytes || self.contention.is_some()) => {
                Err("tables and accesses are compared with one version of Linux at a time"
                    .to_owned())
            }
            _ if !self.bytes && (self.seed, self.configurations) != (None, None) => {
                Err("`--seed` and `--configurations` go with `--bytes`".to_owned())
            }
            _ => Ok(self),
        }
    }
}

/// Versions of Linux, with commas between them.
fn versions(value: &str) -> Result<Vec<&'static str>, String> {
    let known = |version| plan::LINUXES.into_iter().find(|known| *known == version);
    let all = plan::LINUXES.join(", ");
    let none = |version| format!("Linux {version} is not one of those that can be built: {all}");
    value.split(',').map(|version| known(version).ok_or_else(|| none(version))).collect()
}

fn number(value: &str) -> Result<u64, String> {
    value.parse().map_err(|_| format!("`{value}` is not a number"))
}

/// Builds everything, measures, and prints the result.
///
/// # Errors
///
/// What is missing or failed, in one line; the tools called have said more by then.
pub fn run(options: &Options) -> Checked {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("Linux's page tables are built and run on Linux on x86-64 only".to_owned());
    }
    if options.bytes {
        return bytes::run(options);
    }
    if let Some(traced) = &options.contention {
        return count_contention(options, traced);
    }
    let comparisons = if options.series.is_empty() {
        plan::with_each(plan::comparisons(&options.case), &options.linux)
    } else {
        series::comparisons(&options.series)
    };
    if comparisons.is_empty() {
        return Err(format!(
            "no case contains `{}`; they are like lpae/4k_512, and xtask/peers/README.md has all",
            options.case
        ));
    }
    let is_counted = options.instructions || !options.series.is_empty();
    if is_counted && !instructions::are_counted() {
        let why = "instructions are counted by valgrind, which is not installed";
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    let own = build_own()?;
    let built: Built =
        options.linux.iter().map(|&version| build(options, version)).collect::<Result<_, _>>()?;
    let is_built = |one: &Comparison, peer: &Peer| built[one.version].formats.contains(peer.format);
    let version = built.values().map(|linux| linux.full.as_str()).collect::<Vec<_>>().join(", ");
    compare_mappings(options, &own, &comparisons, &built)?;
    if options.instructions {
        let counts = instructions::count(&comparisons, &options.work, &own, is_built)?;
        crate::say(
            match options.output {
                Output::Json => instructions::json(&counts),
                Output::Table => instructions::table(&counts, &version),
            }
            .trim_end(),
        );
        skip_absent(&comparisons, is_built);
        return Ok(Outcome::Passed);
    }

    let samples = measure(options, &own, &comparisons, is_built)?;
    if !options.series.is_empty() {
        crate::say(series::report(options, &own, &samples, &built)?.trim_end());
        return Ok(Outcome::Passed);
    }
    let rows = table::rows(&comparisons, &samples);
    match options.output {
        Output::Json => crate::say(&table::json(&rows)),
        Output::Table => {
            crate::say(table::text(&rows, &version, options.runs).trim_end());
        }
    }
    skip_absent(&comparisons, is_built);
    Ok(Outcome::Passed)
}

/// Times both sides in turn.
fn measure(
    options: &Options,
    own: &Path,
    comparisons: &[Comparison],
    is_built: impl Fn(&Comparison, &Peer) -> bool,
) -> Result<Samples, String> {
    let mut samples = Samples::default();
    for nth in 1..=options.runs {
        eprintln!("peers: run {nth} of {}", options.runs);
        let mut done = BTreeSet::new();
        for one in comparisons {
            if let Some(peer) = one.linux()
                && is_built(one, peer)
                && done.insert(plan::who(one.version, peer))
            {
                run_peer(options, (one.version, peer), comparisons, &mut samples)?;
            }
            if done.insert(one.format.to_owned()) {
                run_own(options, own, one.format, comparisons, &mut samples)?;
            }
        }
    }
    Ok(samples)
}

/// Counts what CPUs do to each other, and prints it.
fn count_contention(options: &Options, traced: &Traced) -> Checked {
    if !contention::is_counted() {
        let why = "accesses are traced by valgrind's lackey, which is not installed";
        return Ok(Outcome::Skipped(why.to_owned()));
    }
    let (result, version) = match traced {
        Traced::Program(line) => (contention::count_program(line)?, String::new()),
        Traced::Cases => count_cases(options)?,
    };
    crate::say(
        match options.output {
            Output::Json => contention::json(&result),
            Output::Table => contention::table(&result, version.trim()),
        }
        .trim_end(),
    );
    Ok(Outcome::Passed)
}

/// The cases of both sides, and the version of Linux.
fn count_cases(options: &Options) -> Result<(contention::Contention, String), String> {
    let cases = contention::cases(&options.case);
    if cases.is_empty() {
        return Err(format!(
            "no case contains `{}`; they are like iova/pair_1, and xtask/peers/README.md has all",
            options.case
        ));
    }
    let own = build_own()?;
    let version = options.linux[0];
    let (_, built) = build(options, version)?;
    build_peers(options, version, &["contention"])?;
    let is_built = |format: &str| built.formats.contains(format);
    let result = contention::count(&cases, &options.work.join(version), &own, is_built)?;
    Ok((result, built.full))
}

/// Says which of Linux's code there is not.
fn skip_absent(comparisons: &[Comparison], is_built: impl Fn(&Comparison, &Peer) -> bool) {
    let peers = comparisons.iter().filter_map(|one| match one.versus {
        Versus::Linux(peer) if !is_built(one, peer) => Some(plan::who(one.version, peer)),
        _ => None,
    });
    for absent in peers.collect::<BTreeSet<_>>() {
        eprintln!("peers: SKIP: Linux {absent} is not built");
    }
}

/// Compares what each kind of mapping of the whole DMA API and of containers leads to on both
/// sides, before any of it is measured.
fn compare_mappings(
    options: &Options,
    own: &Path,
    comparisons: &[Comparison],
    built: &Built,
) -> Result<(), String> {
    for (format, peer) in plan::described() {
        let is_wanted = comparisons.iter().any(|one| one.format == format);
        let mut with =
            built.iter().filter(|(_, linux)| linux.formats.contains(peer.format)).peekable();
        if !is_wanted || with.peek().is_none() {
            continue;
        }
        let ours = output_of(Command::new(own).args([format, "same"]))?;
        for ((version, _), build) in with.flat_map(|linux| BUILDS.map(|build| (linux, build))) {
            let program = options.work.join(version).join(build).join(peer.program);
            let theirs = output_of(Command::new(program).args([peer.format, "same"]))?;
            if let Some((theirs, ours)) = first_difference(&theirs, &ours) {
                return Err(format!(
                    "{format}: the mappings differ\n  Linux {version}: {theirs}\n  dmaspan: {ours}"
                ));
            }
        }
        let lines = ours.lines().count();
        eprintln!("peers: {format}: all sides map the same, {lines} lines");
    }
    Ok(())
}

/// The first lines that are not the same, of which one may be missing.
fn first_difference<'a>(theirs: &'a str, ours: &'a str) -> Option<(&'a str, &'a str)> {
    let (mut theirs, mut ours) = (theirs.lines(), ours.lines());
    loop {
        match (theirs.next(), ours.next()) {
            (None, None) => return None,
            (one, other) if one == other => {}
            (one, other) => return Some((one.unwrap_or("nothing"), other.unwrap_or("nothing"))),
        }
    }
}

/// Runs the builds of a peer, one behind the other, on all its cases.
fn run_peer(
    options: &Options,
    (version, peer): (&str, &'static Peer),
    comparisons: &[Comparison],
    samples: &mut Samples,
) -> Result<(), String> {
    let is_of_peer = |one: &&Comparison| one.version == version && one.linux() == Some(peer);
    let of_peer = comparisons.iter().filter(is_of_peer);
    let cases: BTreeSet<String> = of_peer.flat_map(|one| one.cases().1).collect();
    for build in BUILDS {
        let mut command = Command::new(options.work.join(version).join(build).join(peer.program));
        command.env("PEERS_INVALIDATION_NS", options.invalidation_ns.to_string());
        let lines = output_of(command.arg(peer.format).args(&cases))?;
        samples.read(&format!("{}/{build}", plan::who(version, peer)), &lines)?;
    }
    Ok(())
}

/// Runs dmaspan's benchmark on all cases of a format.
fn run_own(
    options: &Options,
    program: &Path,
    format: &str,
    comparisons: &[Comparison],
    samples: &mut Samples,
) -> Result<(), String> {
    let of_format = comparisons.iter().filter(|one| one.format == format);
    let cases: BTreeSet<String> = of_format.flat_map(|one| one.cases().0).collect();
    let mut command = Command::new(program);
    command.env("PEERS_INVALIDATION_NS", options.invalidation_ns.to_string());
    let lines = output_of(command.arg(format).args(&cases))?;
    samples.read(&format!("dmaspan/{format}"), &lines)
}

/// What there is of a version of Linux once it is built.
struct Linux {
    /// The version of its package.
    full: String,
    /// The formats that its programs have.
    formats: BTreeSet<String>,
}

/// All that were built, by version.
type Built = BTreeMap<&'static str, Linux>;

/// Builds the programs of a version.
fn build(options: &Options, version: &'static str) -> Result<(&'static str, Linux), String> {
    build_peers(options, version, &[])?;
    let work = options.work.join(version);
    let read = |name| fs::read_to_string(work.join(name)).unwrap_or_default();
    let formats = read("formats").split_whitespace().map(str::to_owned).collect();
    Ok((version, Linux { full: read("linux/version").trim().to_owned(), formats }))
}

fn build_peers(options: &Options, version: &str, what: &[&str]) -> Result<(), String> {
    let script = crate::root().join("xtask/peers/build.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg(options.work.join(version)).arg(version).args(what);
    let status = command.stdin(Stdio::null()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("Linux's page tables could not be built here; the reason is above".to_owned()),
        Err(error) => Err(format!("`bash` did not start: {error}")),
    }
}

/// Builds dmaspan's benchmark as every user builds it, and returns its program.
fn build_own() -> Result<PathBuf, String> {
    let package = ["-p", "dmaspan-bench", "--no-default-features", "--bench", OWN_BENCHMARK];
    build_program(&package, OWN_BENCHMARK)
}

/// Builds a program of the workspace, with these arguments, and returns where it is.
fn build_program(arguments: &[&str], name: &str) -> Result<PathBuf, String> {
    eprintln!("peers: building dmaspan's side");
    let mut cargo = crate::cargo(&["build", "--release", "-q"]);
    let cargo = cargo.args(arguments).arg("--message-format=json-render-diagnostics");
    let messages = output_of(cargo)?;
    let program = messages.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_own = message["target"]["name"] == name;
        message["executable"].as_str().filter(|_| is_own).map(PathBuf::from)
    });
    program.ok_or_else(|| format!("cargo named no program `{name}`"))
}

fn output_of(command: &mut Command) -> Result<String, String> {
    let name = Path::new(command.get_program()).display().to_string();
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("`{name}` did not start: {error}"))?;
    if !output.status.success() {
        return Err(format!("`{name}` failed with {}", output.status));
    }
    String::from_utf8(output.stdout).map_err(|_| format!("the output of `{name}` is not text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_differs_or_is_missing_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(("b", "c")));
        assert_eq!(first_difference("a\n", "a\nc\n"), Some(("nothing", "c")));
        assert_eq!(first_difference("a\nb", ""), Some(("a", "nothing")));
    }

    #[test]
    fn arguments_are_understood_and_bad_ones_refused() {
        let parse = |line: &str| Options::parse(&line.split_whitespace().collect::<Vec<_>>());
        let options = parse("--runs 2 --format json --work there --case lpae/4k").unwrap();
        let expected = Options {
            runs: 2,
            work: "there".into(),
            linux: vec!["7.2"],
            output: Output::Json,
            case: "lpae/4k".into(),
            instructions: false,
            contention: None,
            series: Vec::new(),
            invalidation_ns: 0,
            bytes: false,
            findings: false,
            seed: None,
            configurations: None,
        };
        assert_eq!(options, expected);
        assert_eq!(parse("--series --runs 2").unwrap().series.len(), 5);
        let options = parse("--runs 2 --series registered --format json").unwrap();
        assert_eq!((options.series.len(), options.linux), (1, vec!["6.1", "6.12"]));
        for wrong in ["x", "--linux 7.2", "--instructions", "--bytes", "--contention", "--case v7s"]
        {
            assert!(parse(&format!("--series {wrong}")).is_err(), "{wrong}");
        }
        let options = parse("--bytes --seed 7 --configurations 100 --case v7s").unwrap();
        assert!(options.bytes && options.case == "v7s");
        assert_eq!((options.seed, options.configurations), (Some(7), Some(100)));
        assert!(parse("--instructions --format json").unwrap().instructions);
        assert_eq!(parse("--contention --case iova").unwrap().contention, Some(Traced::Cases));
        let program = Options::parse(&["--program", "queue 4", "--contention"]).unwrap();
        assert_eq!(program.contention, Some(Traced::Program("queue 4".into())));
        for wrong in
            ["--contention --instructions", "--contention --bytes", "--program x --case iova"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse("--invalidation-ns 1000").unwrap().invalidation_ns, 1000);
        for wrong in ["--instructions --bytes", "--instructions --invalidation-ns 5"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(parse("").unwrap().work.ends_with("peers"));
        for wrong in ["--runs", "--runs 0", "--runs x", "--format xml", "--verbose yes", "4k"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse("--linux 6.1,7.3").unwrap().linux, ["6.1", "7.3"]);
        for wrong in ["--linux 6.2", "--linux 7.2,", "--bytes --linux 7.2,7.3"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        for wrong in ["--seed 1", "--configurations 5", "--bytes --runs 2", "--bytes --seed x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
