//! The formats that both sides have, and random configurations of them.

pub(crate) mod amd_v1;
pub(crate) mod lpae;
pub(crate) mod lpae_32;
pub(crate) mod riscv;
pub(crate) mod v7s;
pub(crate) mod vtd_ss;
pub(crate) mod x86_64;

use dmaspan::io_pgtable::{ConfigError, DirtyTracking, Format, Half, Word};
use dmaspan::{Coherency, PhysAddr, Prot, lg2};
use dmaspan_sim::rng::Rng;

use crate::differences::{Expected, Met};
use crate::linux::{Config, Kind};
use crate::memory::{self, View};

/// Entries of tables from numbers.
pub(crate) trait Bits: Word {
    /// The word that these bits are; those above its width are dropped.
    fn of(bits: u64) -> Self;
}

impl Bits for u64 {
    fn of(bits: u64) -> Self {
        bits
    }
}

impl Bits for u32 {
    fn of(bits: u64) -> Self {
        let [a, b, c, d, ..] = bits.to_le_bytes();
        Self::from_le_bytes([a, b, c, d])
    }
}

/// A random configuration, as far as formats have something in common.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// What Linux's side is opened with.
    pub(crate) linux: Config,
    pub(crate) half: Half,
    /// Whether hardware tracks what it writes, on both sides.
    pub(crate) dirty: bool,
    /// What only this side, or only this format, is told.
    pub(crate) variant: u32,
}

impl Setup {
    /// Tables of the lower half for so many bits of addresses, in and out, with some of these page
    /// sizes, anywhere in memory.
    pub(crate) fn new(
        rng: &mut Rng,
        kind: Kind,
        sizes: u64,
        (input_bits, output_bits): (u32, u32),
        walks: Coherency,
    ) -> Self {
        let linux = Config {
            kind,
            features: 0,
            page_sizes: some_sizes(rng, sizes),
            input_bits,
            output_bits,
            walks,
            top_level: 0,
            tables: place(rng, output_bits),
            encrypted: 0,
        };
        Self { linux, half: Half::Lower, dirty: false, variant: 0 }
    }

    /// Whether hardware does not see the CPU's caches.
    pub(crate) fn non_coherent(&self) -> bool {
        self.linux.walks == Coherency::NonCoherent
    }

    /// Whether hardware tracks what it writes.
    pub(crate) fn tracking(&self) -> DirtyTracking {
        if self.dirty { DirtyTracking::Hardware } else { DirtyTracking::Off }
    }

    /// The view of its tables that is compared: what hardware sees.
    pub(crate) fn view(&self) -> View {
        if self.non_coherent() { View::Hardware } else { View::Cpu }
    }

    /// Whether a bit of the features is set.
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.linux.features & feature != 0
    }
}

/// What Linux's side says of its root.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Root {
    /// Its address.
    pub(crate) paddr: u64,
    /// Its level, where Linux says so.
    pub(crate) level: Option<u32>,
}

/// What a leaf was asked for with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) prot: Prot,
    /// Whether nobody asked what hardware wrote there since it was mapped.
    pub(crate) fresh: bool,
}

/// A value of a register on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Register {
    pub(crate) name: &'static str,
    /// What Linux's side comes to.
    pub(crate) theirs: u64,
    pub(crate) ours: u64,
}

/// What there is to say of a root.
pub(crate) struct Told<'a, F> {
    pub(crate) setup: &'a Setup,
    pub(crate) format: &'a F,
    /// Where this side's is, and its level.
    pub(crate) at: (PhysAddr, u32),
    /// What Linux said of its own.
    pub(crate) root: &'a [u64],
    pub(crate) met: &'a mut Met,
}

/// A format that was made, or why not.
pub(crate) type Made<S> = Result<<S as Subject>::Format, ConfigError>;

/// A format that both sides have.
pub(crate) trait Subject {
    type Format: Format<Word: Bits> + Clone;

    /// Its name in the result.
    const NAME: &'static str;
    /// Whether Linux's side has calls for pages of one size.
    const HAS_PAGES: bool;
    /// The bit that Linux sets in links that it wrote back.
    const SOFTWARE_BIT: u64 = 0;
    /// Whether Linux reports a dirty leaf of several entries without its last one.
    const DIRTY_LACKS_LAST: bool = false;

    /// A random configuration.
    fn setup(rng: &mut Rng) -> Setup;

    /// The format, with these page sizes or all. `root` is what Linux said of its own.
    fn format(setup: &Setup, page_sizes: Option<u64>, root: &[u64]) -> Made<Self>;

    /// Whether Linux has such a table although this side refuses it.
    fn refuses(_setup: &Setup, _root: &[u64]) -> bool {
        false
    }

    /// log2 of the smallest size that is in the list of differences, where one side alone has it.
    /// io-pgtable, which has calls for pages, offers all sizes that the granule has: also those as
    /// large as all that a table translates, and those beyond memory. Generic_pt has none as large
    /// as half of what a table translates, nor as all of memory.
    fn first_listed_size(setup: &Setup) -> u32 {
        let Config { input_bits, output_bits, .. } = setup.linux;
        let beyond_memory = output_bits + u32::from(Self::HAS_PAGES);
        beyond_memory.min(input_bits - u32::from(!Self::HAS_PAGES))
    }

    /// Where Linux's root is. Generic_pt, which has no calls for pages, was told its level.
    fn root(setup: &Setup, root: &[u64]) -> Root {
        let level = (!Self::HAS_PAGES).then_some(setup.linux.top_level);
        Root { paddr: root[0], level }
    }

    /// The registers of this side's root, and what Linux says of the same.
    fn registers(told: Told<'_, Self::Format>) -> Vec<Register>;

    /// Applies the differences that a leaf of Linux may have.
    fn leaf(_setup: &Setup, _asked: Asked, _expected: &mut Expected<'_>) {}

    /// The same for a link.
    fn link(_setup: &Setup, _expected: &mut Expected<'_>) {}
}

/// One of some.
pub(crate) fn one_of<T: Copy>(rng: &mut Rng, some: &[T]) -> T {
    some[rng.index(some.len())]
}

/// Whether to, `percent` times of 100.
pub(crate) fn chance(rng: &mut Rng, percent: u64) -> bool {
    rng.below(100) < percent
}

/// One of the widths that matter, or any.
pub(crate) fn width(rng: &mut Rng, usual: &[u32], least: u32, most: u32) -> u32 {
    let usual: Vec<u32> =
        usual.iter().copied().filter(|bits| (least..=most).contains(bits)).collect();
    if !usual.is_empty() && chance(rng, 40) {
        return one_of(rng, &usual);
    }
    let above = rng.below(u64::from(most - least) + 1);
    least + u32::try_from(above).unwrap_or(0)
}

/// Whether hardware's walks see the CPU's caches, as they do most often.
pub(crate) fn any_walks(rng: &mut Rng) -> Coherency {
    if chance(rng, 60) { Coherency::Coherent } else { Coherency::NonCoherent }
}

/// Some of `all` sizes, the smallest among them.
fn some_sizes(rng: &mut Rng, all: u64) -> u64 {
    let smallest = all & all.wrapping_neg();
    match rng.below(4) {
        0 | 1 => all,
        2 => smallest,
        _ => all & rng.next() | smallest,
    }
}

/// A place for tables below `2^bits`, a multiple of 2 MiB and not 0.
pub(crate) fn place(rng: &mut Rng, bits: u32) -> u64 {
    let places = (lg2::mask(bits) - memory::BYTES * 2) >> 21;
    if chance(rng, 25) { places << 21 } else { (1 + rng.below(places)) << 21 }
}
