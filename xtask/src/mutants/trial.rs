//! Trying changes: the tests that come by one run with it, until one fails.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, iter, panic, thread};

use super::{Area, Mutant, cargo, messages};

/// A test in its program, which runs in the folder of its package.
#[derive(Clone)]
struct Test {
    program: PathBuf,
    folder: PathBuf,
    name: String,
    takes: Duration,
    /// The numbers of the changes that it comes by.
    seen: HashSet<u32>,
}

impl Test {
    /// Whether it fails, or does not end in time, with this variable.
    fn fails(&self, variable: &str, value: impl AsRef<OsStr>, time: Duration) -> bool {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", &time.as_secs_f64().to_string()]);
        // What runs away takes no memory from others.
        command.args(["prlimit", "--as=8000000000", "--core=0", "--"]).arg(&self.program);
        command.args(["--exact", "--test-threads=2", &self.name]).current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        !command.env(variable, value).status().is_ok_and(|status| status.success())
    }

    /// The same with its time and the changes that it comes by; nothing where it fails without any.
    fn noted(&self) -> Option<Self> {
        let notes = format!("{}-{}.seen", self.program.display(), self.name);
        let started = Instant::now();
        if self.fails("DMASPAN_MUTANTS_SEEN", &notes, Duration::from_secs(600)) {
            crate::say(&format!("{} fails without a change, and is left out", self.name));
            return None;
        }
        let takes = started.elapsed();
        let bytes = fs::read(&notes).unwrap_or_default();
        let _ = fs::remove_file(&notes);
        let numbers = bytes.chunks_exact(4).filter_map(|it| it.try_into().ok());
        Some(Self { takes, seen: numbers.map(u32::from_le_bytes).collect(), ..self.clone() })
    }
}

/// The programs of an area's tests.
fn programs(area: &Area, copy: &Path) -> Result<Vec<PathBuf>, String> {
    let mut test = cargo(copy, &["test", "--no-run", "--message-format=json", "-p"]);
    test.arg(area.package).args(area.tests.split(' '));
    let built = crate::debian::output_of(&mut test)?;
    let tests = messages(built.as_bytes()).filter(|it| it["profile"]["test"] == true);
    Ok(tests.filter_map(|it| it["executable"].as_str().map(PathBuf::from)).collect())
}

/// The changes, all of one area, that no test of it notices.
pub(super) fn living<'m, 'a>(
    area: &Area,
    copy: &Path,
    mutants: &'m [Mutant<'a>],
) -> Result<Vec<&'m Mutant<'a>>, String> {
    let folder = copy.join("crates").join(area.package);
    let mut tests = Vec::new();
    for program in programs(area, copy)? {
        let mut list = Command::new(&program);
        let list = list.args(["--list", "--format=terse"]).current_dir(&folder);
        let listed = crate::debian::output_of(list)?;
        tests.extend(listed.lines().filter_map(|line| {
            let name = line.strip_suffix(": test")?.to_owned();
            let (program, folder) = (program.clone(), folder.clone());
            Some(Test { program, folder, name, takes: Duration::ZERO, seen: HashSet::new() })
        }));
    }
    let mut tests = each(&tests, Test::noted);
    tests.sort_by_key(|it| it.takes);
    Ok(each(mutants, |mutant| {
        let number = mutant.change.number.to_string();
        let seen = || tests.iter().filter(|it| it.seen.contains(&mutant.change.number));
        let time = |test: &Test| test.takes * 8 + Duration::from_secs(10);
        if seen().any(|it| it.fails("DMASPAN_MUTANT", &number, time(it))) {
            return None;
        }
        crate::say(&format!("lives, by {} tests: {}", seen().count(), mutant.change.name));
        Some(mutant)
    }))
}

/// The answers for these, in no order, by as many threads as there are CPUs.
fn each<'i, I: Sync, A: Send>(
    items: &'i [I],
    answer: impl Fn(&'i I) -> Option<A> + Sync,
) -> Vec<A> {
    let next = AtomicUsize::new(0);
    let take = || items.get(next.fetch_add(1, Ordering::Relaxed));
    let work = || iter::from_fn(take).filter_map(&answer).collect::<Vec<A>>();
    thread::scope(|scope| {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..cpus).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
        ended.flat_map(|it| it.unwrap_or_else(|why| panic::resume_unwind(why))).collect()
    })
}
