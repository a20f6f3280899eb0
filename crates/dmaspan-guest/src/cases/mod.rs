//! Cases that need VFIO and a device behind an IOMMU.
//!
//! A [`Case`] has a name, what it [needs](Need) of the guest, and a function. The function is
//! called where all needs are met; otherwise the case is skipped, with the reason. For each case a
//! line is said:
//!
//! | line | |
//! |---|---|
//! | `guest: PASS NAME` | it returned [`Outcome::Passed`] |
//! | `guest: SKIP NAME: WHY` | a need is not met, or it returned [`Outcome::Skipped`] |
//! | `guest: FAIL NAME: WHY` | it returned an error, or panicked |
//!
//! Names are `SYSTEM/what_it_shows`. A case leaves the guest as it found it: the device bound, and
//! no mapping behind.

/// Fails where a condition does not hold, with its text or with what that means, or where one value
/// is not the other.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            return Err(concat!("not so: ", stringify!($condition)).into());
        }
    };
    ($condition:expr; $otherwise:literal) => {
        if !$condition {
            return Err($otherwise.into());
        }
    };
    ($left:expr, $right:expr) => {
        match (&$left, &$right) {
            (left, right) if left == right => {}
            (left, right) => {
                let text = concat!(stringify!($left), " is not ", stringify!($right));
                return Err(format!("{text}: {left:#x?}, {right:#x?}").into());
            }
        }
    };
}

mod adopted;
mod context;
mod device;
mod forecast;
mod guest;
mod iommufd;
mod mock;
mod noiommu;
mod nvme;
mod pins;
mod plain;
mod plan;
mod refusals;
mod type1;

use std::error::Error;
use std::fmt::Debug;
use std::panic;
use std::process::ExitCode;

use dmaspan_linux::MemoryKind;
use dmaspan_linux::vfio::UnknownBackend;

pub(crate) use context::{Context, Need};

const MIB: u64 = 1 << 20;
const BACKEND: &[Need] = &[Need::Backend];

/// The size of the kernel's own page.
fn page() -> u64 {
    MemoryKind::Base.page_size()
}

/// How a case ended that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All held.
    Passed,
    /// It could not be shown here; why.
    Skipped(String),
}

/// What a case returns, and what it is made of.
pub(crate) type Result<T = Outcome, E = Box<dyn Error>> = std::result::Result<T, E>;

/// One case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    /// Its name.
    pub(crate) name: &'static str,
    /// What must be there for it to be run.
    pub(crate) needs: &'static [Need],
    /// What it does.
    pub(crate) run: fn(&Context) -> Result,
}

const fn case(name: &'static str, needs: &'static [Need], run: fn(&Context) -> Result) -> Case {
    Case { name, needs, run }
}

/// All cases, in the order in which they are run.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    let systems = [
        guest::CASES,
        device::CASES,
        refusals::CASES,
        type1::CASES,
        iommufd::CASES,
        mock::CASES,
        pins::CASES,
        nvme::CASES,
        plan::CASES,
        forecast::CASES,
        adopted::CASES,
        noiommu::CASES,
    ];
    systems.into_iter().flatten()
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    context: Context,
    /// The beginnings of names; none means all.
    names: Vec<String>,
}

impl Options {
    /// Reads the arguments behind `cases`.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    pub(crate) fn parse(arguments: &[&str]) -> Result<Self, String> {
        let mut options = Self { context: Context::default(), names: Vec::new() };
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument {
                "--backend" => {
                    options.context.backend =
                        value()?.parse().map_err(|error: UnknownBackend| error.to_string())?;
                }
                "--device" => options.context.device = (*value()?).to_owned(),
                option if option.starts_with('-') => {
                    return Err(format!("`{option}` is not understood"));
                }
                name => options.names.push(name.to_owned()),
            }
        }
        match options.names.iter().find(|&name| !all().any(|case| is_named(case, name))) {
            Some(name) => Err(format!("no case begins with `{name}`")),
            None => Ok(options),
        }
    }
}

impl Options {
    /// Maps for the device until the process is killed.
    ///
    /// # Errors
    ///
    /// Why it could not.
    pub(crate) fn be_killed(&self) -> Result<()> {
        refusals::be_killed(&self.context)
    }
}

fn is_named(case: &Case, name: &str) -> bool {
    case.name.starts_with(name)
}

/// Runs the cases that were asked for and are about the backend at all.
pub(crate) fn run(options: &Options) -> ExitCode {
    let Options { context, names } = options;
    let wanted = |case: &&Case| {
        let is_asked_for = match names.is_empty() {
            true => !case.needs.contains(&Need::Named),
            false => names.iter().any(|name| is_named(case, name)),
        };
        is_asked_for && case.needs.iter().all(|need| need.is_about(context.backend))
    };
    let failed = all().filter(wanted).filter(|case| !passes(case, context)).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a case, says how it ended, and returns whether it did not fail.
fn passes(case: &Case, context: &Context) -> bool {
    let name = case.name;
    if let Some(why) = case.needs.iter().find_map(|need| need.lacks(context)) {
        println!("guest: SKIP {name}: {why}");
        return true;
    }
    // The message of a panic is on the console already.
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| (case.run)(context)));
    match result.unwrap_or_else(|_| Err("it panicked".into())) {
        Ok(Outcome::Passed) => println!("guest: PASS {name}"),
        Ok(Outcome::Skipped(why)) => println!("guest: SKIP {name}: {}", one_line(&why)),
        Err(error) => {
            println!("guest: FAIL {name}: {}", one_line(&error.to_string()));
            return false;
        }
    }
    true
}

/// Fails with both where one is not the other.
fn same<T: PartialEq + Debug>(found: T, expected: T, what: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?}, and should be {expected:?}").into())
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(run: fn(&Context) -> Result) -> bool {
        passes(&Case { name: "x", needs: &[], run }, &Context::default())
    }

    #[test]
    fn names_are_unique_and_say_their_system() {
        for (index, case) in all().enumerate() {
            assert!(case.name.contains('/') && !case.name.contains(' '), "{}", case.name);
            assert!(all().skip(index + 1).all(|other| other.name != case.name));
        }
    }

    #[test]
    fn errors_and_panics_fail_and_nothing_else_does() {
        assert!(case(|_| Ok(Outcome::Passed)));
        assert!(case(|_| Ok(Outcome::Skipped("a\nb".into()))));
        assert!(!case(|_| Err("a\nb".into())));
        assert!(!case(|_| panic!("on purpose")));
        assert_eq!(one_line(" a\n  b "), "a b");
    }

    #[test]
    fn arguments_are_understood_and_bad_ones_refused() {
        let parse = |line: &str| Options::parse(&line.split_whitespace().collect::<Vec<_>>());
        let options = parse("--backend iommufd --device 0000:00:06.0 guest/").unwrap();
        assert_eq!(options.context.backend, dmaspan_linux::vfio::Backend::Iommufd);
        assert_eq!(options.context.device, "0000:00:06.0");
        assert_eq!(options.names, ["guest/"]);
        for (line, named) in [
            ("--backend", "--backend"),
            ("--backend soft", "soft"),
            ("--fast", "`--fast`"),
            ("nothing", "`nothing`"),
        ] {
            assert!(parse(line).is_err_and(|why| why.contains(named)), "{line}");
        }
    }
}
