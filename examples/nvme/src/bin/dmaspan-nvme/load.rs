//! Random I/O at depth, through either side of the bench.

use std::error::Error;
use std::hint;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dmaspan::bytes::SharedWord;
use dmaspan_nvme::Transfer;

use crate::counting;
use crate::latency::Latencies;

/// Why it failed, in one line.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

/// Something that does I/O with numbered regions of memory.
pub(crate) trait Lane {
    /// Enters an I/O of a region, which has none, and of the blocks from `lba` on. The controller
    /// is told when [`reap`](Self::reap) is called next, at the latest.
    fn submit(&mut self, region: u16, lba: u64) -> Result<(), Failure>;

    /// Has the controller begin what was entered, and says which regions' I/O has ended.
    fn reap(&mut self, ended: impl FnMut(u16)) -> Result<(), Failure>;

    /// Asks the controller whether it still works.
    fn check(&self) -> Result<(), Failure>;
}

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// After so many I/Os.
    Count(u64),
    /// After so long.
    Time(Duration),
}

/// What a turn does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Which way.
    pub(crate) transfer: Transfer,
    /// The bytes of an I/O.
    pub(crate) bytes: u64,
    /// log2 of the bytes of a block of the disk.
    pub(crate) block_lg2: u32,
    /// How many are in flight, each with its region.
    pub(crate) regions: u16,
    /// When to stop.
    pub(crate) until: Until,
    /// Which places of the disk are chosen.
    pub(crate) seed: u64,
}

/// Memory of a turn, as words.
#[derive(Clone, Copy)]
pub(crate) struct Words<'m> {
    /// Of the regions, one behind the other.
    pub(crate) regions: &'m [SharedWord],
    /// What the disk has, from its start on.
    pub(crate) disk: &'m [SharedWord],
}

/// What a turn took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// How many I/Os.
    pub(crate) count: u64,
    /// How long.
    pub(crate) time: Duration,
    /// How often it allocated.
    pub(crate) allocations: u64,
}

/// One of so many I/Os is timed, so that looking at the clock is no part of the others.
const SAMPLE: u64 = 16;
/// How often nothing is found before the clock is looked at.
const LOOK: u32 = 1 << 20;
/// How long an I/O may take.
const LIMIT: Duration = Duration::from_secs(30);

/// What is known of a region.
#[derive(Clone, Copy)]
struct Region {
    /// Where its I/O is on the disk, in words.
    at: usize,
    /// When it began, if it is timed.
    began: Option<Instant>,
}

impl Load {
    /// Does I/O, checks each read, and keeps what was written in mind.
    ///
    /// A region has places on the disk of its own, so no two I/Os in flight are of one block.
    pub(crate) fn run(
        &self,
        lane: &mut impl Lane,
        words: Words<'_>,
        latencies: &mut Latencies,
    ) -> Result<Turn, Failure> {
        let mut random = Random(self.seed);
        let mut regions = vec![Region { at: 0, began: None }; usize::from(self.regions)];
        // Regions without an I/O.
        let mut idle: Vec<u16> = (0..self.regions).rev().collect();
        let places = words.disk.len() / self.words() / regions.len();
        if places == 0 {
            return Err(
                "--span is too small for --depth I/Os at once: raise it or lower --depth".into()
            );
        }
        let (mut begun, mut ended, mut wrong) = (0_u64, 0_u64, 0_u64);
        let (mut polls, mut waits_since) = (0_u32, None);
        let allocated = counting::allocations();
        let start = Instant::now();
        loop {
            while self.goes_on(begun, start)
                && let Some(region) = idle.pop()
            {
                let place = usize::try_from(random.below(places as u64))? * regions.len();
                let at = (place + usize::from(region)) * self.words();
                self.prepare(words, region, at, random.0);
                let began = begun.is_multiple_of(SAMPLE).then(Instant::now);
                regions[usize::from(region)] = Region { at, began };
                lane.submit(region, (at as u64 * 8) >> self.block_lg2)?;
                begun += 1;
            }
            if ended == begun {
                break;
            }
            let before = ended;
            lane.reap(|region| {
                let Region { at, began } = regions[usize::from(region)];
                if let Some(began) = began {
                    latencies.add(began.elapsed());
                }
                wrong += u64::from(!self.is_right(words, region, at));
                idle.push(region);
                ended += 1;
            })?;
            if ended > before {
                (polls, waits_since) = (0, None);
                continue;
            }
            hint::spin_loop();
            polls += 1;
            if polls.is_multiple_of(LOOK) {
                lane.check()?;
                let since = *waits_since.get_or_insert_with(Instant::now);
                if since.elapsed() > LIMIT {
                    return Err("the controller did not complete an I/O in time".into());
                }
            }
        }
        let time = start.elapsed();
        let allocations = counting::allocations() - allocated;
        if wrong > 0 {
            return Err(format!("{wrong} of {ended} reads returned other data than before").into());
        }
        Ok(Turn { count: ended, time, allocations })
    }

    fn goes_on(&self, begun: u64, start: Instant) -> bool {
        match self.until {
            Until::Count(count) => begun < count,
            Until::Time(time) => !begun.is_multiple_of(SAMPLE) || start.elapsed() < time,
        }
    }

    fn words(&self) -> usize {
        usize::try_from(self.bytes / 8).unwrap_or(usize::MAX)
    }

    /// The first and the last word of a region, and those of its place on the disk.
    fn ends<'m>(
        &self,
        words: Words<'m>,
        region: u16,
        at: usize,
    ) -> [(&'m SharedWord, &'m SharedWord); 2] {
        let first = usize::from(region) * self.words();
        [0, self.words() - 1].map(|n| (&words.regions[first + n], &words.disk[at + n]))
    }

    /// Before a read the region has what the disk does not; before a write, something new.
    #[inline]
    fn prepare(&self, words: Words<'_>, region: u16, at: usize, new: u64) {
        for (here, there) in self.ends(words, region, at) {
            match self.transfer {
                Transfer::Read => {
                    here.store(!there.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                Transfer::Write => {
                    here.store(new, Ordering::Relaxed);
                    there.store(new, Ordering::Relaxed);
                }
            }
        }
    }

    #[inline]
    fn is_right(&self, words: Words<'_>, region: u16, at: usize) -> bool {
        let same = |(here, there): (&SharedWord, &SharedWord)| {
            here.load(Ordering::Relaxed) == there.load(Ordering::Relaxed)
        };
        self.ends(words, region, at).into_iter().all(same)
    }
}

/// Numbers that look random: SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    /// One below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        // The upper half of the product is below the bound.
        u64::try_from((u128::from(z) * u128::from(bound)) >> 64).unwrap_or(0)
    }
}
