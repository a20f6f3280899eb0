//! What is measured: the cases, and how long.

use std::time::Duration;

use dmaspan::Direction;
use dmaspan::swiotlb::Fill;

use super::args::SwiotlbArgs;
use dmaspan_cli::size::ByteSize;

const MIB: u64 = 1 << 20;

/// The sizes of pools.
const POOL_MIB: std::ops::RangeInclusive<u64> = 1..=4096;
/// The sizes of blocks: whole sectors, up to the longest slot that vanilla has.
const SECTOR: u64 = 512;
const MOST_BLOCK: u64 = 256 << 10;
/// Slots are multiples of this.
const SLOT: u64 = 2048;

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

/// Whether pools copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    /// They do.
    Made,
    /// They do not: what is left are the slots.
    LeftOut,
}

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
    pub(crate) copies: Copies,
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

/// How long each case is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Effort {
    /// How many times each pool has its turn.
    pub(crate) rounds: u32,
    /// How long a turn is.
    pub(crate) turn: Duration,
}

impl Effort {
    /// Of the first tables.
    const QUEUE: Self = Self { rounds: 9, turn: Duration::from_millis(100) };
    const BURST: Self = Self { rounds: 9, turn: Duration::from_millis(40) };
    const QUICK: Self = Self { rounds: 1, turn: Duration::from_millis(2) };
}

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Bytes of each pool.
    pub(crate) pool: u64,
    pub(crate) cpus: u64,
    /// Of the first tables.
    pub(crate) iodepth: u64,
    pub(crate) block: u64,
    /// Whether this is too short for figures.
    pub(crate) quick: bool,
    pub(crate) cases: Vec<Case>,
    /// Cases that need more than half of the pool.
    pub(crate) left_out: Vec<Case>,
}

/// What the command line asks for and cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UsageError {
    /// More jobs than CPUs measure how long jobs wait that hold a lock and no CPU.
    #[error("--jobs {jobs} is more than the CPUs, of which there are {cpus}")]
    Jobs {
        /// How many were asked for.
        jobs: u64,
        /// How many there can be.
        cpus: u64,
    },
    /// No such blocks.
    #[error(
        "--block {block} cannot be measured: whole sectors of 512 bytes, up to 256K, the longest \
         slot of vanilla"
    )]
    Block {
        /// The bytes asked for.
        block: u64,
    },
    /// No such pools.
    #[error("--pool {pool} cannot be measured: whole MiB, from 1M to 4G")]
    Pool {
        /// The bytes asked for.
        pool: u64,
    },
    /// Too many buffers for the pool.
    #[error(
        "--jobs {jobs} with {iodepth} buffers of {} each out take more than half of a pool of {}: \
         --pool {needed}M is enough",
        ByteSize::new(*block), ByteSize::new(*pool)
    )]
    Full {
        /// How many jobs.
        jobs: u64,
        /// How many buffers each.
        iodepth: u64,
        /// Of how many bytes.
        block: u64,
        /// The bytes of the pool.
        pool: u64,
        /// How many MiB it should have.
        needed: u64,
    },
}

impl Plan {
    /// What `args` ask for on a machine with so many CPUs.
    ///
    /// # Errors
    ///
    /// [`UsageError`] where that cannot be done.
    pub(crate) fn new(args: &SwiotlbArgs, cpus: u64) -> Result<Self, UsageError> {
        let (pool, block, iodepth) = (args.pool.bytes(), args.block.bytes(), args.iodepth);
        if let Some(&jobs) = args.jobs.iter().find(|jobs| **jobs > cpus) {
            return Err(UsageError::Jobs { jobs, cpus });
        }
        if !block.is_multiple_of(SECTOR) || !(SECTOR..=MOST_BLOCK).contains(&block) {
            return Err(UsageError::Block { block });
        }
        if !pool.is_multiple_of(MIB) || !POOL_MIB.contains(&(pool / MIB)) {
            return Err(UsageError::Pool { pool });
        }
        let (queue_jobs, burst_jobs) = match sorted(&args.jobs) {
            jobs if jobs.is_empty() => (sorted(&[1, cpus.min(USUAL_JOBS)]), doubling(cpus)),
            jobs => (jobs.clone(), jobs),
        };
        let queues = queues(&queue_jobs, iodepth, block);
        if let Some(case) = queues.iter().find(|case| case.out() > pool / 2) {
            let (jobs, needed) = (case.threads, case.out().saturating_mul(2).div_ceil(MIB));
            return Err(UsageError::Full { jobs, iodepth, block, pool, needed });
        }
        let (fitting, left_out) =
            bursts(&burst_jobs).into_iter().partition(|case| case.out() <= pool / 2);
        let cases = [queues, fitting].concat();
        Ok(Self { pool, cpus, iodepth, block, quick: args.quick, cases, left_out })
    }

    /// How long a case is measured.
    pub(crate) fn effort(&self, case: &Case) -> Effort {
        match case.order {
            _ if self.quick => Effort::QUICK,
            Order::Queue => Effort::QUEUE,
            Order::Burst => Effort::BURST,
        }
    }
}

fn sorted(jobs: &[u64]) -> Vec<u64> {
    let mut jobs = jobs.to_vec();
    jobs.sort_unstable();
    jobs.dedup();
    jobs
}

/// 1, 2, 4 and so on, and the last one however it is.
fn doubling(last: u64) -> Vec<u64> {
    let mut numbers: Vec<u64> =
        (0..u64::BITS).map(|lg2| 1 << lg2).take_while(|&number| number < last).collect();
    numbers.push(last);
    numbers
}

/// The load of fio.
fn queues(jobs: &[u64], iodepth: u64, block: u64) -> Vec<Case> {
    let case = |name, label, direction, fill| Case {
        name,
        label,
        threads: 1,
        block,
        depth: iodepth,
        order: Order::Queue,
        direction,
        fill,
        copies: Copies::Made,
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
    let case = |[made, left_out]: [&'static str; 2], label, depth, block| {
        [(made, Copies::Made), (left_out, Copies::LeftOut)].map(|(name, copies)| Case {
            name,
            label,
            threads: 1,
            block,
            depth,
            order: Order::Burst,
            direction: Direction::FromDevice,
            fill: Fill::Copy,
            copies,
        })
    };
    let cases = [
        case(["pair", "pair-uncopied"], "pair", 1, 4096),
        case(["burst-64", "burst-64-uncopied"], "burst of 64", 64, 4096),
        case(["burst-4096", "burst-4096-uncopied"], "burst of 4096", 4096, 4096),
        case(["pair-64k", "pair-64k-uncopied"], "pair of 64K", 1, 65536),
    ];
    let of = |kind: usize| {
        cases
            .iter()
            .flat_map(move |pair| jobs.iter().map(move |&threads| Case { threads, ..pair[kind] }))
    };
    of(0).chain(of(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmaspan_cli::options::OutputFormat;

    fn args() -> SwiotlbArgs {
        SwiotlbArgs {
            jobs: Vec::new(),
            iodepth: 256,
            block: ByteSize::new(4096),
            pool: ByteSize::new(64 * MIB),
            quick: false,
            format: OutputFormat::Table,
        }
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
        assert_eq!(Plan::new(&asked, 8), Err(UsageError::Jobs { jobs: 9, cpus: 8 }));
    }

    #[test]
    fn what_would_fill_the_pool_is_left_out_or_refused() {
        let plan = Plan::new(&args(), 4).unwrap();
        let left: Vec<_> = plan.left_out.iter().map(|case| (case.name, case.threads)).collect();
        assert_eq!(left, [("burst-4096", 4), ("burst-4096-uncopied", 4)]);
        let wide = SwiotlbArgs { iodepth: 4096, jobs: vec![3], ..args() };
        let error = Plan::new(&wide, 4).unwrap_err();
        assert!(matches!(error, UsageError::Full { needed: 96, .. }), "{error}");
        assert!(Plan::new(&SwiotlbArgs { pool: ByteSize::new(96 * MIB), ..wide }, 4).is_ok());
        // Slots are whole ones.
        let small = SwiotlbArgs { block: ByteSize::new(512), iodepth: 16385, ..args() };
        assert!(matches!(Plan::new(&small, 1), Err(UsageError::Full { .. })));
        let most = SwiotlbArgs { block: ByteSize::new(MOST_BLOCK), iodepth: u64::MAX, ..args() };
        assert!(matches!(Plan::new(&most, 1), Err(UsageError::Full { .. })));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for block in [0, 1, 513, MOST_BLOCK + 512] {
            let asked = SwiotlbArgs { block: ByteSize::new(block), ..args() };
            assert_eq!(Plan::new(&asked, 1), Err(UsageError::Block { block }));
        }
        for pool in [0, MIB / 2, MIB + 4096, 4097 * MIB] {
            let asked = SwiotlbArgs { pool: ByteSize::new(pool), ..args() };
            assert_eq!(Plan::new(&asked, 1), Err(UsageError::Pool { pool }));
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
