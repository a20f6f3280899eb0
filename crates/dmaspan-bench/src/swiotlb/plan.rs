//! The cases of the benchmark, and their length.

use dmaspan::Direction;
use dmaspan::swiotlb::{Fill, MAX_AREAS};

use super::args::SwiotlbArgs;
use crate::args::sorted;
use crate::failed::Failed;
use crate::models::swiotlb_before::Patches;
use crate::time::Effort;
use dmaspan_cli::size::ByteSize;

const MIB: u64 = 1 << 20;

/// The sizes of pools.
const POOL_MIB: std::ops::RangeInclusive<u64> = 1..=4096;
/// The sizes of blocks: whole sectors, up to the longest slot that vanilla has.
const SECTOR: u64 = 512;
const MOST_BLOCK: u64 = 256 << 10;
/// Slots are multiples of this.
const SLOT: u64 = 2048;

/// Jobs for each CPU where they share CPUs.
const CROWD: u64 = 4;

/// The most jobs of the first tables, if nobody says: those of the series.
const USUAL_JOBS: u64 = 4;

/// In which order a job maps and unmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// All are mapped, and the oldest is unmapped and mapped again.
    Queue,
    /// All are mapped, then all are unmapped, the oldest first.
    Burst,
}

/// The names of the patches, alone and together.
pub(crate) const PATCHES: [&str; 4] = ["lock", "bitmap", "order", "all"];

/// One line of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// How scripts call it.
    pub(crate) name: &'static str,
    /// How the tables do.
    pub(crate) label: &'static str,
    /// How many jobs there are at once.
    pub(crate) threads: u64,
    /// Bytes of a buffer.
    pub(crate) block: u64,
    /// How many buffers a job has out at most.
    pub(crate) depth: u64,
    pub(crate) order: Order,
    pub(crate) direction: Direction,
    /// Whether slots are filled by the pool of now. By vanilla they always are.
    pub(crate) fill: Fill,
    /// Whether pools copy. Where they do not, what is left are the slots.
    pub(crate) copies: bool,
}

impl Case {
    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> u64 {
        self.threads.saturating_mul(self.depth).saturating_mul(self.block)
    }

    /// Bytes of slots that are out at most.
    fn out(&self) -> u64 {
        self.threads.saturating_mul(self.depth).saturating_mul(self.block.next_multiple_of(SLOT))
    }
}

/// The first tables, pairs and bursts, and anything that is only to be seen to work.
const QUEUE: Effort = Effort::new(9, 100_000);
const BURST: Effort = Effort::new(9, 40_000);
/// Where jobs share CPUs: turns in which each has its CPU many times.
const SHARED: Effort = Effort::new(7, 500_000);
const QUICK: Effort = Effort::new(1, 2000);

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Bytes of each pool.
    pub(crate) pool: u64,
    pub(crate) cpus: u64,
    /// Of the pools that have some.
    pub(crate) areas: u64,
    /// Whether jobs are more than CPUs, and locks spin.
    pub(crate) oversubscribed: bool,
    /// Of the first tables.
    pub(crate) iodepth: u64,
    pub(crate) block: u64,
    /// Whether this is too short for figures.
    pub(crate) quick: bool,
    pub(crate) cases: Vec<Case>,
    /// Cases that need more than half of the pool.
    pub(crate) left_out: Vec<Case>,
}

impl Plan {
    /// What `args` ask for on a machine with so many CPUs.
    ///
    /// # Errors
    ///
    /// What cannot be done, and what can.
    pub(crate) fn new(args: &SwiotlbArgs, cpus: u64) -> Result<Self, Failed> {
        let (pool, block, iodepth) = (args.pool.bytes(), args.block.bytes(), args.iodepth);
        let crowd = args.jobs.iter().find(|jobs| **jobs > cpus).filter(|_| !args.oversubscribe);
        if let Some(&jobs) = crowd {
            // They measure how long jobs wait that hold a lock and no CPU.
            return Err(Failed::new(format_args!(
                "--jobs {jobs} is more than the CPUs, of which there are {cpus}: --oversubscribe \
                 measures that"
            )));
        }
        if !block.is_multiple_of(SECTOR) || !(SECTOR..=MOST_BLOCK).contains(&block) {
            return Err(Failed::new(format_args!(
                "--block {block} cannot be measured: whole sectors of 512 bytes, up to 256K, the \
                 longest slot of vanilla"
            )));
        }
        if !pool.is_multiple_of(MIB) || !POOL_MIB.contains(&(pool / MIB)) {
            return Err(Failed::new(format_args!(
                "--pool {pool} cannot be measured: whole MiB, from 1M to 4G"
            )));
        }
        let (queue_jobs, burst_jobs) = match sorted(&args.jobs) {
            jobs if args.oversubscribe => {
                let jobs = if jobs.is_empty() { sorted(&[1, CROWD * cpus]) } else { jobs };
                (jobs, Vec::new())
            }
            jobs if jobs.is_empty() => (sorted(&[1, cpus.min(USUAL_JOBS)]), doubling(cpus)),
            jobs => (jobs.clone(), jobs),
        };
        let most_jobs = if args.oversubscribe { queue_jobs.last().copied() } else { None };
        let areas = args.areas.or(most_jobs).unwrap_or(cpus).min(MAX_AREAS as u64);
        let queues = queues(&queue_jobs, iodepth, block);
        if let Some(case) = queues.iter().find(|case| case.out() > pool / 2) {
            let (jobs, needed) = (case.threads, case.out().saturating_mul(2).div_ceil(MIB));
            let [block, pool] = [block, pool].map(ByteSize::new);
            return Err(Failed::new(format_args!(
                "--jobs {jobs} with {iodepth} buffers of {block} each out take more than half of \
                 a pool of {pool}: --pool {needed}M is enough"
            )));
        }
        let (fitting, left_out) =
            bursts(&burst_jobs).into_iter().partition(|case| case.out() <= pool / 2);
        let cases = [queues, fitting].concat();
        let (quick, oversubscribed) = (args.quick, args.oversubscribe);
        Ok(Self { pool, cpus, areas, oversubscribed, iodepth, block, quick, cases, left_out })
    }

    /// The patches of the series that a case is measured with, each alone and all together, by
    /// their names.
    pub(crate) fn patches(&self, case: &Case) -> Vec<(&'static str, Patches)> {
        if case.order != Order::Queue || case.fill != Fill::Copy {
            return Vec::new();
        }
        let areas = usize::try_from(self.areas).unwrap_or(MAX_AREAS);
        let (lock, bitmap, latest) = (Patches { areas, ..Patches::NONE }, true, true);
        let all = [
            lock,
            Patches { bitmap, ..Patches::NONE },
            Patches { latest, ..Patches::NONE },
            Patches { areas, bitmap, latest },
        ];
        PATCHES.into_iter().zip(all).collect()
    }

    /// How long a case is measured.
    pub(crate) fn effort(&self, case: &Case) -> Effort {
        match case.order {
            _ if self.quick => QUICK,
            _ if self.oversubscribed => SHARED,
            Order::Queue => QUEUE,
            Order::Burst => BURST,
        }
    }
}

/// 1, 2, 4 and so on, and the last one however it is.
fn doubling(last: u64) -> Vec<u64> {
    let powers = (0..u64::BITS).map(|lg2| 1 << lg2);
    powers.take_while(|&number| number < last).chain([last]).collect()
}

/// The load of fio.
fn queues(jobs: &[u64], depth: u64, block: u64) -> Vec<Case> {
    let case = |name, label, direction, fill| {
        let (order, copies) = (Order::Queue, true);
        Case { name, label, threads: 1, block, depth, order, direction, fill, copies }
    };
    let cases = [
        case("read", "read", Direction::FromDevice, Fill::Copy),
        case("write", "write", Direction::ToDevice, Fill::Copy),
        case("read-overwritten", "read, overwritten", Direction::FromDevice, Fill::Overwritten),
    ];
    jobs.iter().flat_map(|&threads| cases.map(|case| Case { threads, ..case })).collect()
}

/// Pairs and bursts.
fn bursts(jobs: &[u64]) -> Vec<Case> {
    let case = |name, label, depth, block, copies| {
        let (order, direction, fill) = (Order::Burst, Direction::FromDevice, Fill::Copy);
        Case { name, label, threads: 1, block, depth, order, direction, fill, copies }
    };
    let cases = [
        case("pair", "pair", 1, 4096, true),
        case("burst-64", "burst of 64", 64, 4096, true),
        case("burst-4096", "burst of 4096", 4096, 4096, true),
        case("pair-64k", "pair of 64K", 1, 65536, true),
        case("pair-uncopied", "pair", 1, 4096, false),
        case("burst-64-uncopied", "burst of 64", 64, 4096, false),
        case("burst-4096-uncopied", "burst of 4096", 4096, 4096, false),
        case("pair-64k-uncopied", "pair of 64K", 1, 65536, false),
    ];
    let of = |case: Case| jobs.iter().map(move |&threads| Case { threads, ..case });
    cases.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> SwiotlbArgs {
        SwiotlbArgs {
            jobs: Vec::new(),
            oversubscribe: false,
            areas: None,
            iodepth: 256,
            block: ByteSize::new(4096),
            pool: ByteSize::new(64 * MIB),
            quick: false,
        }
    }

    fn is_refused(args: &SwiotlbArgs, cpus: u64, words: &str) {
        let error = Plan::new(args, cpus).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }

    fn jobs(cpus: u64, order: Order) -> Vec<u64> {
        let plan = Plan::new(&args(), cpus).unwrap();
        let cases = plan.cases.iter().filter(|case| case.order == order);
        sorted(&cases.map(|case| case.threads).collect::<Vec<_>>())
    }

    #[test]
    fn there_are_never_more_jobs_than_cpus() {
        for (cpus, queue, burst) in [
            (1, &[1][..], &[1][..]),
            (2, &[1, 2], &[1, 2]),
            (4, &[1, 4], &[1, 2, 4]),
            (6, &[1, 4], &[1, 2, 4, 6]),
            (16, &[1, 4], &[1, 2, 4, 8, 16]),
        ] {
            assert_eq!(jobs(cpus, Order::Queue), queue, "{cpus} CPUs");
            assert_eq!(jobs(cpus, Order::Burst), burst, "{cpus} CPUs");
        }
        let asked = SwiotlbArgs { jobs: vec![2, 9, 1], ..args() };
        is_refused(&asked, 8, "--jobs 9 is more than the CPUs, of which there are 8");
        // Unless that is what is wanted: then it is all that is measured.
        let plan = Plan::new(&SwiotlbArgs { oversubscribe: true, ..asked }, 8).unwrap();
        assert!(plan.cases.iter().all(|case| case.order == Order::Queue) && plan.areas == 9);
        let plan = Plan::new(&SwiotlbArgs { oversubscribe: true, ..args() }, 2).unwrap();
        assert_eq!((plan.cases.last().map(|case| case.threads), plan.areas), (Some(8), 8));
        let plan = Plan::new(&SwiotlbArgs { areas: Some(3), ..args() }, 2).unwrap();
        assert_eq!(plan.areas, 3);
    }

    #[test]
    fn each_patch_of_the_series_is_measured_alone_and_with_the_others() {
        let plan = Plan::new(&SwiotlbArgs { areas: Some(4), ..args() }, 2).unwrap();
        let patches = plan.patches(&plan.cases[0]);
        let set = |patches: Patches| {
            [patches.areas == 4, patches.bitmap, patches.latest].map(u8::from).iter().sum::<u8>()
        };
        assert_eq!(patches.iter().map(|patch| patch.0).collect::<Vec<_>>(), PATCHES);
        assert_eq!(patches.iter().map(|patch| set(patch.1)).collect::<Vec<_>>(), [1, 1, 1, 3]);
        let measured = plan.cases.iter().filter(|case| !plan.patches(case).is_empty());
        let names: Vec<_> = measured.map(|case| (case.name, case.threads)).collect();
        assert_eq!(names, [("read", 1), ("write", 1), ("read", 2), ("write", 2)]);
    }

    #[test]
    fn what_would_fill_the_pool_is_left_out_or_refused() {
        let plan = Plan::new(&args(), 4).unwrap();
        let left: Vec<_> = plan.left_out.iter().map(|case| (case.name, case.threads)).collect();
        assert_eq!(left, [("burst-4096", 4), ("burst-4096-uncopied", 4)]);
        let wide = SwiotlbArgs { iodepth: 4096, jobs: vec![3], ..args() };
        is_refused(&wide, 4, "--pool 96M is enough");
        assert!(Plan::new(&SwiotlbArgs { pool: ByteSize::new(96 * MIB), ..wide }, 4).is_ok());
        // Slots are whole ones.
        let small = SwiotlbArgs { block: ByteSize::new(512), iodepth: 16385, ..args() };
        is_refused(&small, 1, "more than half of a pool");
        let most = SwiotlbArgs { block: ByteSize::new(MOST_BLOCK), iodepth: u64::MAX, ..args() };
        is_refused(&most, 1, "more than half of a pool");
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for block in [0, 1, 513, MOST_BLOCK + 512] {
            let asked = SwiotlbArgs { block: ByteSize::new(block), ..args() };
            is_refused(&asked, 1, &format!("--block {block} cannot be measured"));
        }
        for pool in [0, MIB / 2, MIB + 4096, 4097 * MIB] {
            let asked = SwiotlbArgs { pool: ByteSize::new(pool), ..args() };
            is_refused(&asked, 1, &format!("--pool {pool} cannot be measured"));
        }
    }

    #[test]
    fn every_row_has_a_name_of_its_own() {
        let plan = Plan::new(&args(), 16).unwrap();
        let all = plan.cases.iter().chain(&plan.left_out);
        let mut names: Vec<_> = all.map(|case| (case.name, case.threads)).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
