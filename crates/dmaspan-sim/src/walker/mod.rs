//! Table walkers written from the manuals, not from an encoder.
//!
//! A walker reads tables word by word through [`TableWords`] and answers as hardware with the same
//! registers would: a [`Translated`] or a [`Fault`]. It shares no code with the page tables of the
//! core, so that a misread manual shows as a disagreement between the two.
//!
//! Levels are numbered as the manual of the format numbers them, since faults report them.
//!
//! A walk is cut in two for the sake of walk caches: [`Walker::root`] says where it begins, and
//! [`Walker::walk_from`] goes on from any table that an earlier walk found. A walk leaves what it
//! found on its way in a [`WalkPath`], also where it ends in a fault: hardware may keep valid links
//! that lead to an invalid entry.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, NotInTree};
use dmaspan::{Iova, IovaRange, PhysAddr, Promise, Prot, lg2};

pub mod amd_v1;
pub mod arm_lpae;
pub mod arm_v7s;
mod check;
#[cfg(test)]
mod hostile;
mod image;
pub mod mock;
mod radix;
pub mod riscv;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod vtd_ss;
pub mod x86_64;

pub use check::{BadTable, Checked};
pub use image::TableImage;
pub use radix::{BadRegister, Requester, Switch};

/// The reason why a word cannot be read from, or written to, a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum NotATable {
    /// No table memory is at this address, or the address is not that of a word.
    #[error("no table memory at {paddr}")]
    Outside {
        /// The word's address.
        paddr: PhysAddr,
    },
    /// The address lies in a table that was freed.
    #[error("the table at {paddr} was freed")]
    Freed {
        /// The word's address.
        paddr: PhysAddr,
    },
    /// The tables cannot be updated by hardware.
    #[error("the table at {paddr} cannot be updated")]
    ReadOnly {
        /// The word's address.
        paddr: PhysAddr,
    },
}

/// The words that a walker reads: the memory that table pointers lead to, as the hardware sees it.
pub trait TableWords {
    /// The little-endian word at `paddr`, read with one access.
    ///
    /// # Errors
    ///
    /// [`NotATable`] where hardware would read something that is no table of this domain.
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable>;

    /// The little-endian word of 32 bits at `paddr`, read with one access. Half of the word around
    /// it, unless the tables have a way of their own.
    ///
    /// # Errors
    ///
    /// [`NotATable`], as [`read_u64`](Self::read_u64).
    fn read_u32(&self, paddr: PhysAddr) -> Result<u32, NotATable> {
        if !lg2::is_aligned(paddr.get(), 2) {
            return Err(NotATable::Outside { paddr });
        }
        let around = PhysAddr::new(lg2::align_down(paddr.get(), 3));
        let [a, b, c, d, e, f, g, h] = self.read_u64(around)?.to_le_bytes();
        let half = if around == paddr { [a, b, c, d] } else { [e, f, g, h] };
        Ok(u32::from_le_bytes(half))
    }

    /// Replaces the word at `paddr` by `new` where it is `old`, in one atomic access, and returns
    /// the word found. For hardware that updates access flags and dirty bits.
    ///
    /// # Errors
    ///
    /// [`NotATable`]; tables that implement only reading answer [`NotATable::ReadOnly`].
    fn exchange_u64(&self, paddr: PhysAddr, _old: u64, _new: u64) -> Result<u64, NotATable> {
        Err(NotATable::ReadOnly { paddr })
    }
}

/// Pointers to tables lead to the same.
macro_rules! through {
    ($($pointer:ty),+) => { $(
        impl<T: TableWords + ?Sized> TableWords for $pointer {
            fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
                (**self).read_u64(paddr)
            }

            fn read_u32(&self, paddr: PhysAddr) -> Result<u32, NotATable> {
                (**self).read_u32(paddr)
            }

            fn exchange_u64(
                &self,
                paddr: PhysAddr,
                old: u64,
                new: u64,
            ) -> Result<u64, NotATable> {
                (**self).exchange_u64(paddr, old, new)
            }
        }
    )+ };
}

through!(&T, Box<T>, Arc<T>);

/// The arena of a process, read as hardware would read it. Where words of a table have 32 bits, two
/// beside each other are accessed one after the other; where they have 64, a half is one's.
impl TableWords for Arena {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        match self.load(paddr) {
            Err(NotInTree::OtherWord { .. }) => {
                let [low, high] = halves(paddr).map(|at| self.load::<u32>(at));
                Ok(u64::from(low?) | u64::from(high?) << 32)
            }
            word => Ok(word?),
        }
    }

    fn read_u32(&self, paddr: PhysAddr) -> Result<u32, NotATable> {
        match self.load(paddr) {
            Err(NotInTree::OtherWord { .. }) => {
                let around = PhysAddr::new(lg2::align_down(paddr.get(), 3));
                let word = self.load::<u64>(around)? >> (8 * (paddr.get() & 4));
                Ok(u32::try_from(word & 0xffff_ffff).unwrap_or(0))
            }
            word => Ok(word?),
        }
    }

    #[expect(unsafe_code, reason = "hardware's marks")]
    fn exchange_u64(&self, paddr: PhysAddr, old: u64, new: u64) -> Result<u64, NotATable> {
        // SAFETY: the walkers, which stand in for hardware, set accessed flags and dirty bits.
        let promise = || unsafe { Promise::new() };
        match self.exchange(promise(), paddr, old, new) {
            Err(NotInTree::OtherWord { .. }) => {
                let found = self.read_u64(paddr)?;
                if found == old {
                    for (at, shift) in halves(paddr).into_iter().zip([0, 32]) {
                        let half =
                            |word: u64| u32::try_from(word >> shift & 0xffff_ffff).unwrap_or(0);
                        self.exchange(promise(), at, half(old), half(new))?;
                    }
                }
                Ok(found)
            }
            word => Ok(word?),
        }
    }
}

/// Where the halves of a word of 64 bits are.
fn halves(paddr: PhysAddr) -> [PhysAddr; 2] {
    [paddr, PhysAddr::new(paddr.get() | 4)]
}

impl From<NotInTree> for NotATable {
    fn from(error: NotInTree) -> Self {
        match error {
            NotInTree::Freed { paddr } => Self::Freed { paddr },
            NotInTree::Outside { paddr } => Self::Outside { paddr },
            // Whatever else there may be is nothing that a walker can read.
            _ => Self::Outside { paddr: PhysAddr::new(u64::MAX) },
        }
    }
}

/// Says what a device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

impl Access {
    /// The permission that the access needs.
    pub(crate) const fn needs(self) -> Prot {
        match self {
            Self::Read => Prot::READ,
            Self::Write => Prot::WRITE,
        }
    }
}

/// Says what kind of fault ended a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// Nothing is mapped, or the address is outside what the tables can map.
    Translation,
    /// The entry's access flag is clear and hardware does not set it.
    AccessFlag,
    /// The entry does not permit the access.
    Permission,
    /// A table or output address, or the table base, is larger than the configured size.
    AddressSize,
    /// The entry has reserved bits or values that hardware refuses: also a large page that is not
    /// aligned.
    Reserved,
    /// A table could not be read.
    ExternalAbort(NotATable),
}

/// A translation that hardware would refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind:?} fault at level {level}: {access:?} of iova {iova}")]
pub struct Fault {
    /// What kind.
    pub kind: FaultKind,
    /// The level whose entry is to blame, in the numbering of the format's manual.
    pub level: u8,
    /// The address that the device used.
    pub iova: Iova,
    /// What the device did.
    pub access: Access,
}

/// The agents that can see writes to a page, as its entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shareability {
    /// Only the observer itself.
    NonShareable,
    /// The encoding is reserved.
    Reserved,
    /// The outer shareable domain.
    Outer,
    /// The inner shareable domain.
    Inner,
}

/// A table that a walk found, with all that is needed to go on from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLink {
    /// Where the table is.
    pub table: PhysAddr,
    /// Everything that it translates.
    pub block: IovaRange,
    /// Its level.
    pub level: u8,
    /// What the upper levels took away from everything below them, in the bits of the format.
    pub inherited: u64,
}

/// One entry that a walk read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableStep {
    /// The table that it is in.
    pub link: TableLink,
    /// log2 of the bytes that one entry of this table covers.
    pub entry_lg2: u32,
    /// Where the entry is.
    pub entry_paddr: PhysAddr,
    /// The entry, in the lower half where entries have 32 bits.
    pub entry: u64,
}

/// How many levels a walk can have at most.
pub const MAX_LEVELS: usize = 6;

/// The entries that a walk read, from the table where it began.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct WalkPath {
    steps: [Option<TableStep>; MAX_LEVELS],
    len: usize,
}

impl WalkPath {
    /// An empty path.
    pub const fn new() -> Self {
        Self { steps: [None; MAX_LEVELS], len: 0 }
    }

    /// The steps, in order.
    pub fn iter(&self) -> impl Iterator<Item = &TableStep> + '_ {
        self.steps.iter().flatten()
    }

    /// The entry at which the walk ended.
    pub fn last(&self) -> Option<&TableStep> {
        self.steps[..self.len].last()?.as_ref()
    }

    /// Returns how many entries were read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no entry was read.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a step. A walk deeper than [`MAX_LEVELS`] keeps its first steps.
    pub fn push(&mut self, step: TableStep) {
        if let Some(place) = self.steps.get_mut(self.len) {
            *place = Some(step);
            self.len += 1;
        }
    }
}

impl std::fmt::Debug for WalkPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A change that hardware makes to the leaf's entry before it uses it: the access flag, dirty
/// state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryUpdate {
    /// Where the entry is.
    pub entry_paddr: PhysAddr,
    /// What the walk read there.
    pub old: u64,
    /// What hardware writes there.
    pub new: u64,
}

/// Says what an address translates to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translated {
    /// The address that was translated.
    pub iova: Iova,
    /// What it translates to.
    pub paddr: PhysAddr,
    /// Everything that the leaf's own entry covers.
    pub leaf: IovaRange,
    /// log2 of the leaf's size.
    pub leaf_lg2: u32,
    /// Everything that an IOTLB may cover with one entry: the leaf, or its contiguous group.
    pub group: IovaRange,
    /// log2 of the group's size; `leaf_lg2` where there is no group.
    pub group_lg2: u32,
    /// The level of the leaf.
    pub level: u8,
    /// What is permitted. `CACHE` and `MMIO` follow from the memory attributes.
    pub prot: Prot,
    /// Whether the first write makes hardware mark the entry dirty: it was not written yet.
    pub clean: bool,
    /// The memory attributes, as the format's attribute register has them, or the entry where there
    /// is no such register.
    pub attributes: u8,
    /// The shareability that the entry says.
    pub shareability: Shareability,
    /// What hardware writes into the entry for this access, where it writes.
    pub update: Option<EntryUpdate>,
    /// The leaf's own entry.
    pub step: TableStep,
}

/// A format's table walk.
pub trait Walker {
    /// Returns where the walk for `iova` begins: the root table.
    ///
    /// # Errors
    ///
    /// [`Fault`] where the address is out of reach of the tables, or the registers disable them.
    fn root(&self, iova: Iova, access: Access) -> Result<TableLink, Fault>;

    /// Goes on from the table `from`, whose block has `iova`, to the leaf.
    ///
    /// Does not ask whether the leaf permits the access, because hardware may cache leaves that do
    /// not: see [`permits`](Self::permits). Every entry that was read is added to `path`.
    ///
    /// # Errors
    ///
    /// [`Fault`] of every kind but [`FaultKind::Permission`].
    fn walk_from(
        &self,
        tables: &dyn TableWords,
        from: TableLink,
        iova: Iova,
        access: Access,
        path: &mut WalkPath,
    ) -> Result<Translated, Fault>;

    /// Returns whether a leaf with these permissions permits the access.
    fn permits(&self, prot: Prot, access: Access) -> bool;

    /// The whole translation, as a device's access gets it when nothing is cached.
    ///
    /// # Errors
    ///
    /// [`Fault`].
    fn walk(
        &self,
        tables: &dyn TableWords,
        iova: Iova,
        access: Access,
    ) -> Result<Translated, Fault> {
        let root = self.root(iova, access)?;
        let translation = self.walk_from(tables, root, iova, access, &mut WalkPath::new())?;
        if self.permits(translation.prot, access) {
            Ok(translation)
        } else {
            Err(Fault { kind: FaultKind::Permission, level: translation.level, iova, access })
        }
    }
}

/// The aligned block of `2^lg2` addresses that has `iova`.
pub(crate) fn block_around(iova: Iova, lg2: u32) -> IovaRange {
    let start = lg2::align_down(iova.get(), lg2);
    let last = start | lg2::mask(lg2);
    // `last` is `start` with more bits set, so it is not below.
    IovaRange::new(Iova::new(start), Iova::new(last))
        .unwrap_or_else(|| unreachable!("{last:#x} is {start:#x} with bits set"))
}
