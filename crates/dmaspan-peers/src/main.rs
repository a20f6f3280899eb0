//! dmaspan's tables beside those that Linux's own code writes.
//!
//! `dmaspan-peers SERVER [--seed N] [--configurations N] [--case SUBSTRING]` tells the program that
//! `xtask/peers/build.sh` made of Linux's page tables, and dmaspan, to do the same, and compares
//! the tables entry by entry. `cargo xtask peers --bytes` builds and runs both;
//! `xtask/peers/README.md` has the method and the list of differences.
//!
//! `dmaspan-peers SERVER --findings` shows what was found in Linux's tables.
//! The book has these [findings], and the [times] of both; `cargo xtask book` builds the book
//! beside these pages.
//!
//! [findings]: ../book/findings.html
//! [times]: ../book/benchmarks/linux.html

mod choose;
mod compare;
mod differences;
mod findings;
mod formats;
mod linux;
mod memory;
mod model;
mod plant;
mod run;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use dmaspan_sim::rng::Rng;

use formats::{Subject, amd_v1, chance, lpae, lpae_32, riscv, v7s, vtd_ss, x86_64};
use linux::Linux;
use memory::View;
use run::{Run, Totals};

/// How often both sides are compared in a configuration, besides when all is unmapped, and how many
/// operations there are before each.
const BATCHES: u64 = 4;
const OPERATIONS: u64 = 9;

/// What was asked for.
struct Options {
    server: PathBuf,
    seed: u64,
    configurations: u64,
    case: String,
    /// Show what was found, and compare nothing.
    findings: bool,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let done = if options.findings {
        findings::show(&options.server).map(|()| false)
    } else {
        compare_all(&options)
    };
    match done {
        Ok(failed) if !failed => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let server = arguments.next().ok_or("the program of Linux's page tables is missing")?.into();
    let case = String::new();
    let mut options = Options { server, seed: 1, configurations: 5200, case, findings: false };
    while let Some(name) = arguments.next() {
        if name == "--findings" {
            options.findings = true;
            continue;
        }
        let value = arguments.next().ok_or(format!("`{name}` needs a value behind it"))?;
        let number = || value.parse().map_err(|_| format!("`{value}` is no number"));
        match name.as_str() {
            "--seed" => options.seed = number()?,
            "--configurations" => match number()? {
                0 => return Err("no configuration is none to compare".to_owned()),
                configurations => options.configurations = configurations,
            },
            "--case" => options.case = value,
            _ => return Err(format!("there is no option `{name}`")),
        }
    }
    Ok(options)
}

/// A format, and how its configurations are compared.
struct Case {
    name: &'static str,
    compare: fn(&Path, u64, u64) -> (Totals, Vec<String>),
}

fn case<S: Subject>() -> Case {
    Case { name: S::NAME, compare: configurations::<S> }
}

/// Compares all formats and prints what came of it; whether anything differs.
fn compare_all(options: &Options) -> Result<bool, String> {
    let mut cases = vec![
        case::<lpae::S1<12>>(),
        case::<lpae::S1<14>>(),
        case::<lpae::S1<16>>(),
        case::<lpae::S2<12>>(),
        case::<lpae::S2<14>>(),
        case::<lpae::S2<16>>(),
        case::<lpae_32::S1>(),
        case::<lpae_32::S2>(),
        case::<v7s::V7s>(),
        case::<amd_v1::Amd>(),
        case::<vtd_ss::Vtd>(),
        case::<x86_64::X86>(),
        case::<riscv::Rv64>(),
    ];
    let names: Vec<&str> = cases.iter().map(|case| case.name).collect();
    let names = names.join(" ");
    cases.retain(|case| case.name.contains(&options.case));
    if cases.is_empty() {
        return Err(format!("no format contains `{}`; there are {names}", options.case));
    }
    let started = Instant::now();
    let mut all = Totals::default();
    let mut failures = Vec::new();
    print_header();
    for case in &cases {
        let each = options.configurations.div_ceil(cases.len() as u64);
        let (totals, failed) = (case.compare)(&options.server, options.seed, each);
        print_totals(case.name, &totals);
        all.configurations += totals.configurations;
        all.operations += totals.operations;
        for (all, planted) in all.planted.iter_mut().zip(totals.planted) {
            *all += planted;
        }
        all.counts.add(&totals.counts);
        failures.extend(failed);
    }
    print_totals("all", &all);
    println!("seed {}, {:.0} s", options.seed, started.elapsed().as_secs_f64());
    for failure in &failures {
        eprintln!("FAILED {failure}");
    }
    Ok(!failures.is_empty())
}

fn print_header() {
    println!(
        "{:12} {:>6} {:>7} {:>10} {:>9} {:>6} {:>7}  listed differences",
        "format", "tables", "ops", "leaves", "links", "regs", "planted"
    );
}

fn print_totals(name: &str, totals: &Totals) {
    let counts = &totals.counts;
    let met: Vec<String> =
        counts.met.named().map(|(name, times)| format!("{name} {times}")).collect();
    println!(
        "{name:12} {:>6} {:>7} {:>10} {:>9} {:>6} {:>7}  {}",
        totals.configurations,
        totals.operations,
        counts.leaves,
        counts.links,
        counts.registers,
        totals.planted.iter().sum::<u64>(),
        met.join(", ")
    );
}

/// Compares the configurations of a format, each from a seed of its own, until some have failed.
fn configurations<S: Subject>(server: &Path, seed: u64, count: u64) -> (Totals, Vec<String>) {
    let mut totals = Totals::default();
    let mut failures = Vec::new();
    let mut linux = None;
    for nth in 0..count {
        let seed = seed.wrapping_add(nth);
        let running = match linux.take() {
            Some(running) => Ok(running),
            None => Linux::start(server),
        };
        let compared = running.and_then(|mut running| {
            configuration::<S>(&mut running, seed, &mut totals)?;
            Ok(running)
        });
        match compared {
            Ok(running) => linux = Some(running),
            Err(error) => {
                let name = S::NAME;
                let again = format!("--case {name} --configurations 1 --seed {seed}");
                failures
                    .push(format!("{name}, {error}\n  again: cargo xtask peers --bytes {again}"));
            }
        }
        if failures.len() == 3 {
            return (totals, failures);
        }
    }
    // Where a failure is tried again, its configuration alone may have no tables below the root.
    if failures.is_empty() && totals.planted == [0; 2] && count > 1 {
        failures.push(format!("{}: no configuration had tables to plant a wrong bit in", S::NAME));
    }
    (totals, failures)
}

/// Compares one configuration.
fn configuration<S: Subject>(
    linux: &mut Linux,
    seed: u64,
    totals: &mut Totals,
) -> Result<(), String> {
    let mut rng =
        Rng::new(S::NAME.bytes().fold(seed, |mixed, byte| {
            mixed.wrapping_mul(0x100_0000_01b3).wrapping_add(byte.into())
        }));
    let setup = S::setup(&mut rng);
    let described = format!("{setup:x?}");
    let failed = |error| format!("configuration {described}: {error}");
    let Some(mut run) = Run::<S>::open(linux, setup, rng, totals).map_err(failed)? else {
        return Ok(());
    };
    let result = operations(&mut run, totals);
    totals.configurations += 1;
    totals.operations += run.trail.len() as u64;
    totals.counts.add(&run.counts);
    if let Err(error) = result {
        let since = &run.trail[run.compared.min(run.trail.len())..];
        let named: Vec<String> = since.iter().map(|one| format!("\n    {one}")).collect();
        let (done, named) = (run.trail.len(), named.concat());
        return Err(format!(
            "configuration {described}: {error}\n  after {done} operations, of which these came \
             since the last comparison:{named}"
        ));
    }
    run.close().map_err(failed)
}

/// The operations of a configuration, and the comparisons among them.
fn operations<S: Subject>(run: &mut Run<'_, S>, totals: &mut Totals) -> Result<(), String> {
    let regions = run.regions();
    let view = run.setup.view();
    run.check(view)?;
    for _ in 0..BATCHES {
        for _ in 0..OPERATIONS {
            match run.rng.below(100) {
                0..55 => run.map_some(&regions)?,
                55..75 => run.unmap_some()?,
                75..82 => run.collide()?,
                82..88 => run.replace()?,
                88..90 => run.out_of_bounds()?,
                _ if run.setup.dirty => run.dirty_some()?,
                _ => run.map_some(&regions)?,
            }
        }
        let found = run.check(view)?;
        let planted = &mut totals.planted[view as usize];
        if *planted == 0 && !found.links.is_empty() && !found.leaves.is_empty() {
            *planted = run.plant(&found)?;
        }
    }
    if view == View::Hardware {
        run.check(View::Cpu)?;
    }
    while let Some(mapping) = run.model.nth(0) {
        let last = run.model.run_end(mapping.start).unwrap_or(mapping.last);
        let last = if chance(&mut run.rng, 50) { mapping.last } else { last };
        run.unmap(mapping.start, last)?;
    }
    run.check(view).map(|_| ())
}
