//! The cases of the benchmark, and their length.

use clap::ValueEnum;
use dmaspan_sim::rng::Rng;

use super::args::{RegbufArgs, RegbufCase};
use crate::failed::Failed;
use crate::time::Effort;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::size::ByteSize;

const MIB: u64 = 1 << 20;
/// The pages that all is counted in.
pub(crate) const PAGE: u64 = 4096;
/// A huge page.
pub(crate) const HUGE: u64 = 2 * MIB;
/// The I/O for which descriptors are made.
const IO_BYTES: u64 = 8 * MIB;
/// Where an I/O may begin: with a sector.
const SECTOR: u64 = 512;
/// How many I/Os have their descriptors made in turn.
const IOS: usize = 64;
/// How many imports are made in turn.
const IMPORTS: usize = 4096;

const USUAL_BYTES: u64 = 1 << 30;
const QUICK_BYTES: u64 = 64 * MIB;
/// A block of huge pages and one of base pages.
const MULTIPLE: u64 = 2 * HUGE;
/// What Linux takes for a buffer, and more than enough of it.
const MOST_BYTES: u64 = 1 << 40;

/// The most times that the kernel registers a buffer, which takes longer than all else.
pub(crate) const MOST_KERNEL_RUNS: u32 = 5;
const USUAL_RUNS: u32 = 31;
const TURN_US: u64 = 1000;
const QUICK: Effort = Effort::new(1, 200);

/// One line of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) name: RegbufCase,
    pub(crate) bytes: u64,
}

/// Bytes of a buffer that an I/O wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Io {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Case {
    /// Bytes of an I/O for which descriptors are made.
    pub(crate) fn io_bytes(&self) -> u64 {
        IO_BYTES.min(self.bytes)
    }

    /// Those I/Os.
    pub(crate) fn ios(&self) -> Vec<Io> {
        let (mut numbers, len) = (Rng::new(1), self.io_bytes());
        let starts = (self.bytes - len) / SECTOR + 1;
        (0..IOS).map(|_| Io { offset: numbers.below(starts) * SECTOR, len }).collect()
    }

    /// What is imported: of pages, and of 4 KiB to 64 KiB from any byte on, in turn.
    pub(crate) fn imports(&self) -> Vec<Io> {
        let mut numbers = Rng::new(2);
        let aligned = |numbers: &mut Rng| {
            let offset = numbers.below(self.bytes / PAGE) * PAGE;
            Io { offset, len: PAGE }
        };
        let odd = |numbers: &mut Rng| {
            let len = PAGE + numbers.below(15 * PAGE);
            Io { offset: numbers.below(self.bytes - len) | 1, len }
        };
        (0..IMPORTS)
            .map(|n| if n % 2 == 0 { aligned(&mut numbers) } else { odd(&mut numbers) })
            .collect()
    }
}

/// What `dmaspan-bench regbuf` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Bytes of all cases but that of four huge pages.
    pub(crate) bytes: u64,
    /// Whether frames are a model's, and not this machine's as far as they can be.
    pub(crate) model: bool,
    pub(crate) effort: Effort,
    /// Whether this is too short for figures.
    pub(crate) quick: bool,
    pub(crate) cases: Vec<Case>,
    /// What is not as a user would expect.
    pub(crate) notes: Vec<String>,
}

/// What a case takes at most: the memory, and for each page about 100 bytes in lists and in the
/// model.
fn needed_bytes(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 16).saturating_add(64 * MIB)
}

/// The most that so much memory is enough for.
fn fitting(available: u64) -> u64 {
    let bytes = available.saturating_sub(64 * MIB) / 17 * 16;
    (bytes / MULTIPLE).max(1) * MULTIPLE
}

impl Plan {
    /// What `args` ask for on `machine`.
    ///
    /// # Errors
    ///
    /// What cannot be done, and what can.
    pub(crate) fn new(args: &RegbufArgs, machine: &Machine) -> Result<Self, Failed> {
        let (usual, available) =
            (if args.quick { QUICK_BYTES } else { USUAL_BYTES }, machine.available());
        let mut notes = Vec::new();
        let bytes = match args.size {
            Some(size) => size.bytes(),
            None if needed_bytes(usual) > available => {
                // Half: others want memory too.
                let less = fitting(available / 2).min(usual);
                notes.push(format!(
                    "buffers have {}, as {} of memory are available",
                    ByteSize::new(less),
                    ByteSize::new(available)
                ));
                less
            }
            None => usual,
        };
        if bytes == 0 || !bytes.is_multiple_of(MULTIPLE) || bytes > MOST_BYTES {
            return Err(Failed::new(format_args!(
                "--size {bytes} cannot be measured: multiples of 4M (blocks of 2M by huge and by \
                 base pages take turns), up to 1T, like 1G"
            )));
        }
        let needed = needed_bytes(bytes);
        if needed > available && args.size.is_some() {
            let fits = fitting(available) / MIB;
            let [bytes, needed, available] = [bytes, needed, available].map(ByteSize::new);
            return Err(Failed::new(format_args!(
                "buffers of {bytes}, {needed} with tables and lists, are more than the \
                 {available} that are available: ask for less, like --size {fits}M"
            )));
        }
        let mut cases: Vec<Case> = Vec::new();
        let asked = if args.cases.is_empty() { RegbufCase::value_variants() } else { &args.cases };
        for &name in asked {
            if cases.iter().all(|case| case.name != name) {
                let bytes = if name == RegbufCase::FourHuge { 4 * HUGE } else { bytes };
                cases.push(Case { name, bytes });
            }
        }
        let usual = Effort::new(args.runs.unwrap_or(USUAL_RUNS), TURN_US);
        Ok(Self {
            bytes,
            model: args.model,
            effort: if args.quick { QUICK } else { usual },
            quick: args.quick,
            cases,
            notes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::name_of;

    fn plan(size: Option<u64>, available: u64) -> Result<Plan, Failed> {
        let args = RegbufArgs {
            cases: Vec::new(),
            size: size.map(ByteSize::new),
            runs: None,
            model: false,
            quick: false,
        };
        Plan::new(&args, &Machine::with_available(available))
    }

    #[test]
    fn every_case_is_measured_and_only_the_first_has_a_size_of_its_own() {
        let plan = plan(None, 8 << 30).unwrap();
        let cases = plan.cases.iter().map(|case| (name_of(&case.name), case.bytes >> 20));
        let all = ["base", "thp", "hugetlb", "mixed"].map(|name| (name.to_owned(), 1024));
        assert!(cases.eq([("8m-4x2m".to_owned(), 8)].into_iter().chain(all)));
        assert!(plan.notes.is_empty());
    }

    #[test]
    fn a_small_machine_has_smaller_buffers_and_is_told_so() {
        let plan = plan(None, 512 << 20).unwrap();
        assert!(plan.bytes < 256 << 20 && plan.bytes.is_multiple_of(MULTIPLE), "{}", plan.bytes);
        assert_eq!(plan.notes.len(), 1);
    }

    #[test]
    fn what_cannot_be_is_refused_and_says_what_can() {
        for bytes in [0, MIB, 6 * MIB, GIB - 1, 2048 * GIB] {
            let error = plan(Some(bytes), u64::MAX).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--size {bytes} cannot be measured")), "{error}");
        }
        let error = plan(Some(8 * GIB), 4 * GIB).unwrap_err().to_string();
        let fits = error.rsplit_once("like --size ").unwrap().1.trim_end_matches('M');
        assert!(plan(Some(fits.parse::<u64>().unwrap() * MIB), 4 * GIB).is_ok(), "{error}");
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn every_io_is_in_its_buffer_and_some_are_odd() {
        for bytes in [4 * MIB, 8 * MIB, GIB] {
            let case = Case { name: RegbufCase::Base, bytes };
            let imports = case.imports();
            for io in case.ios().iter().chain(&imports) {
                assert!(io.len > 0 && io.offset + io.len <= bytes, "{io:?} of {bytes}");
            }
            assert!(case.ios().iter().all(|io| io.offset % SECTOR == 0));
            assert!(imports.iter().any(|io| io.offset % 2 == 1 && io.len % 2 == 1));
            assert!(imports.iter().any(|io| (io.offset % PAGE, io.len) == (0, PAGE)));
        }
    }
}
