//! Trying changes: the tests that come by one run with it, until one fails.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Area, Mutant, cargo};

/// A test in its program.
struct Test {
    program: usize,
    name: String,
    takes: Duration,
}

/// The programs of an area's tests.
fn programs(area: &Area, copy: &Path) -> Result<Vec<PathBuf>, String> {
    let mut test = cargo(copy, &["test", "--no-run", "--message-format=json", "-p", area.package]);
    for program in area.programs {
        match *program {
            "lib" => test.arg("--lib"),
            program => test.args(["--test", program]),
        };
    }
    let output = test.stderr(Stdio::inherit()).output().map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    let messages = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let found: HashMap<String, PathBuf> = messages
        .filter(|it| it["profile"]["test"] == true)
        .filter_map(|it| {
            let is_lib = it["target"]["kind"][0] == "lib";
            let name = if is_lib { "lib" } else { it["target"]["name"].as_str()? };
            Some((name.to_owned(), it["executable"].as_str()?.into()))
        })
        .collect();
    let of =
        |name: &&str| found.get(*name).cloned().ok_or(format!("no program `{name}` was built"));
    area.programs.iter().map(of).collect()
}

/// The changes that no test of the area notices.
pub(super) fn living<'m>(
    area: &Area,
    copy: &Path,
    mutants: &[&'m Mutant],
) -> Result<Vec<&'m Mutant>, String> {
    let programs = programs(area, copy)?;
    let folder = copy.join("crates").join(area.package);
    let runs = |program: usize, names: &[&str]| {
        let mut command = Command::new(&programs[program]);
        command.args(["--exact", "--test-threads=2"]).args(names).current_dir(&folder);
        command
    };
    let mut tests = Vec::new();
    for program in 0..programs.len() {
        let listed = crate::debian::output_of(
            Command::new(&programs[program])
                .args(["--list", "--format=terse"])
                .current_dir(&folder),
        )?;
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        tests.extend(names.map(|name| (program, name.to_owned())));
    }
    let seen_by = Mutex::new(HashMap::<usize, Vec<usize>>::new());
    let noted: Vec<Option<Test>> = each(tests.len(), |n| {
        let (program, name) = &tests[n];
        let notes = copy.join(format!("seen-{n}"));
        let started = Instant::now();
        let mut command = runs(*program, &[name]);
        let is_bad = fails(command.env("DMASPAN_MUTANTS_SEEN", &notes), Duration::from_secs(600));
        let takes = started.elapsed();
        let bytes = fs::read(&notes).unwrap_or_default();
        let _ = fs::remove_file(&notes);
        if is_bad {
            crate::say(&format!("{name} fails without a change, and is left out"));
            return None;
        }
        let mut seen_by = seen_by.lock().unwrap_or_else(|it| it.into_inner());
        for number in
            bytes.chunks_exact(4).filter_map(|it| it.try_into().ok()).map(u32::from_le_bytes)
        {
            seen_by.entry(number as usize).or_default().push(n);
        }
        Some(Test { program: *program, name: name.clone(), takes })
    });
    let mut seen_by = seen_by.into_inner().unwrap_or_else(|it| it.into_inner());
    for seen in seen_by.values_mut() {
        seen.sort_by_key(|&n| noted[n].as_ref().map(|it| it.takes));
    }
    let is_alive = each(mutants.len(), |n| {
        let mutant = mutants[n];
        let seen = seen_by.get(&mutant.number).map_or(&[][..], Vec::as_slice);
        let seen: Vec<&Test> = seen.iter().filter_map(|&n| noted[n].as_ref()).collect();
        // The quickest ones first, and then more and more at once.
        let (mut from, mut at_once) = (0, 8);
        while from < seen.len() {
            let batch = &seen[from..seen.len().min(from + at_once)];
            for program in 0..programs.len() {
                let of_program = batch.iter().filter(|it| it.program == program);
                let names: Vec<&str> = of_program.clone().map(|it| &*it.name).collect();
                let usual: Duration = of_program.map(|it| it.takes).sum();
                let mut command = runs(program, &names);
                command.env("DMASPAN_MUTANT", mutant.number.to_string());
                if !names.is_empty() && fails(&mut command, usual * 8 + Duration::from_secs(10)) {
                    return false;
                }
            }
            from += at_once;
            at_once *= 2;
        }
        crate::say(&format!("lives, by {} tests: {}", seen.len(), mutant.name()));
        true
    });
    Ok(mutants.iter().zip(is_alive).filter(|(_, alive)| *alive).map(|(it, _)| *it).collect())
}

/// The answers for `0..count`, by as many threads as there are CPUs.
fn each<T: Send>(count: usize, answer: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= count {
                        break;
                    }
                    let one = answer(n);
                    answers.lock().unwrap_or_else(|it| it.into_inner()).push((n, one));
                }
            });
        }
    });
    let mut answers = answers.into_inner().unwrap_or_else(|it| it.into_inner());
    answers.sort_by_key(|(n, _)| *n);
    answers.into_iter().map(|(_, one)| one).collect()
}

/// Whether a program of tests fails: it says so, ends badly, or does not end in time.
fn fails(command: &mut Command, time: Duration) -> bool {
    // What runs away takes no memory from others.
    let mut limited = Command::new("prlimit");
    limited
        .args(["--as=8000000000", "--core=0", "--"])
        .arg(command.get_program())
        .args(command.get_args());
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.get_current_dir().map(|folder| limited.current_dir(folder));
    let child = limited.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let Ok(mut child) = child else { return true };
    let Some(said) = child.stdout.take() else { return true };
    let child = Mutex::new(child);
    let kill = || {
        let _ = child.lock().unwrap_or_else(|it| it.into_inner()).kill();
    };
    let (over, ended) = std::sync::mpsc::channel::<()>();
    thread::scope(|scope| {
        let (kill, child) = (&kill, &child);
        scope.spawn(move || {
            if ended.recv_timeout(time) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                kill();
            }
        });
        let mut failed = false;
        for line in BufReader::new(said).lines().map_while(Result::ok) {
            if line.ends_with("... FAILED") {
                failed = true;
                kill();
                break;
            }
        }
        let status = child.lock().unwrap_or_else(|it| it.into_inner()).wait();
        drop(over);
        failed || !status.is_ok_and(|status| status.success())
    })
}
