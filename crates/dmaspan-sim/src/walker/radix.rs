//! The formats share this: the way down, and the words of their registers.

use dmaspan::{Iova, PhysAddr, Prot, lg2};

use super::check::Checked;
use super::{
    Access, EntryUpdate, Fault, FaultKind, Shareability, TableLink, TableStep, TableWords,
    Translated, WalkPath, Walker, block_around,
};

/// A bit of a register, or an optional feature of hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Switch {
    /// The bit is 0; the feature is not there.
    #[default]
    Off,
    /// The bit is 1.
    On,
}

impl Switch {
    /// `bits` where the switch is on.
    pub(super) fn select(self, bits: u64) -> u64 {
        match self {
            Self::On => bits,
            Self::Off => 0,
        }
    }
}

/// As whom a device accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Requester {
    /// As a user process.
    #[default]
    User,
    /// As the operating system.
    Supervisor,
}

/// The reason why register values describe no tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRegister {
    /// A field has a value that is reserved, or asks for something that the walker does not do.
    #[error("{field} is {value:#x}, which is reserved or not supported")]
    Reserved {
        /// The field's name in the manual.
        field: &'static str,
        /// Its value, or the bits that should be 0.
        value: u64,
    },
    /// The root table's address is not aligned.
    #[error("the root {root:#x} is not aligned to 2^{align_lg2} bytes")]
    Root {
        /// The address.
        root: u64,
        /// log2 of the alignment.
        align_lg2: u32,
    },
}

impl BadRegister {
    /// Refuses the value of a field where it is `unusable`.
    #[expect(clippy::fn_params_excessive_bools, reason = "it is what the caller found")]
    pub(super) fn refuse(unusable: bool, field: &'static str, value: u64) -> Result<(), Self> {
        if unusable { Err(Self::Reserved { field, value }) } else { Ok(()) }
    }

    /// Refuses a root that is not aligned.
    pub(super) fn refuse_misaligned(root: u64, align_lg2: u32) -> Result<(), Self> {
        if lg2::is_aligned(root, align_lg2) { Ok(()) } else { Err(Self::Root { root, align_lg2 }) }
    }
}

/// What an entry leads to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next {
    Table { table: u64, level: u8, inherited: u64 },
    Leaf(Leaf),
}

/// What the format's own code says of a leaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaf {
    /// Where the address leads.
    pub(super) paddr: u64,
    /// log2 of what all entries that share this leaf cover.
    pub(super) group_lg2: u32,
    pub(super) prot: Prot,
    pub(super) clean: bool,
    pub(super) attributes: u8,
    pub(super) shareability: Shareability,
    /// The entry as hardware leaves it behind this access.
    pub(super) marked: u64,
}

/// A format whose levels resolve some bits of the address each.
pub(super) trait Radix: Checked {
    /// log2 of what one entry of a table at `level` covers.
    fn entry_lg2(&self, level: u8) -> u32;

    /// log2 of what a whole table at `level` covers, where it resolves all of its bits.
    fn table_lg2(&self, level: u8) -> u32;

    /// Returns what an entry leads to.
    fn decode(&self, step: &TableStep, iova: Iova, access: Access) -> Result<Next, FaultKind>;

    /// Returns what [`Walker::root`] does.
    fn start(&self, iova: Iova, access: Access) -> Result<TableLink, Fault>;

    /// Returns what [`Walker::permits`] does.
    fn allows(&self, prot: Prot, access: Access) -> bool {
        prot.contains(access.needs())
    }

    /// Whether a leaf with `prot` is one that this access writes through.
    fn writes(&self, prot: Prot, access: Access) -> bool {
        access == Access::Write && self.allows(prot, access)
    }
}

impl<R: Radix> Walker for R {
    fn root(&self, iova: Iova, access: Access) -> Result<TableLink, Fault> {
        self.start(iova, access)
    }

    fn walk_from(
        &self,
        tables: &dyn TableWords,
        from: TableLink,
        iova: Iova,
        access: Access,
        path: &mut WalkPath,
    ) -> Result<Translated, Fault> {
        let mut link = from;
        loop {
            let level = link.level;
            let fault = |kind| Fault { kind, level, iova, access };
            let step = read_step(self, tables, link, iova).map_err(fault)?;
            path.push(step);
            match self.decode(&step, iova, access).map_err(fault)? {
                Next::Table { table, level, inherited } => {
                    // A table of a lower level than the next translates only the low addresses of
                    // its block.
                    let block = block_around(iova, step.entry_lg2.min(self.table_lg2(level)));
                    link = TableLink { table: PhysAddr::new(table), block, level, inherited };
                }
                Next::Leaf(leaf) => {
                    return Ok(translation(&step, leaf, iova));
                }
            }
        }
    }

    fn permits(&self, prot: Prot, access: Access) -> bool {
        self.allows(prot, access)
    }
}

/// Reads the entry for `iova` in the table of `link`.
pub(super) fn read_step<R: Radix>(
    format: &R,
    tables: &dyn TableWords,
    link: TableLink,
    iova: Iova,
) -> Result<TableStep, FaultKind> {
    let entry_lg2 = format.entry_lg2(link.level);
    let index = (iova.get() & lg2::mask(format.table_lg2(link.level))) >> entry_lg2;
    // Table addresses have 56 bits at most and an index 14.
    let entry_paddr = link.table.wrapping_add(index << R::ENTRY_LG2_BYTES);
    let entry = format.read_entry(tables, entry_paddr).map_err(FaultKind::ExternalAbort)?;
    Ok(TableStep { link, entry_lg2, entry_paddr, entry })
}

/// The root table, where it translates the address.
pub(super) fn root(link: TableLink, iova: Iova, access: Access) -> Result<TableLink, Fault> {
    if link.block.contains(iova) {
        Ok(link)
    } else {
        Err(Fault { kind: FaultKind::Translation, level: link.level, iova, access })
    }
}

fn translation(step: &TableStep, leaf: Leaf, iova: Iova) -> Translated {
    let (old, new) = (step.entry, leaf.marked);
    Translated {
        iova,
        paddr: PhysAddr::new(leaf.paddr),
        leaf: block_around(iova, step.entry_lg2),
        leaf_lg2: step.entry_lg2,
        group: block_around(iova, leaf.group_lg2),
        group_lg2: leaf.group_lg2,
        level: step.link.level,
        prot: leaf.prot,
        clean: leaf.clean,
        attributes: leaf.attributes,
        shareability: leaf.shareability,
        update: (old != new).then_some(EntryUpdate { entry_paddr: step.entry_paddr, old, new }),
        step: *step,
    }
}

/// `kind` where any of `bits` is set.
pub(super) fn must_be_zero(bits: u64) -> Result<(), FaultKind> {
    if bits == 0 { Ok(()) } else { Err(FaultKind::Reserved) }
}

/// Bits `high..=low`.
pub(super) const fn bits(high: u32, low: u32) -> u64 {
    lg2::mask(high + 1) & !lg2::mask(low)
}
const _: () = assert!(bits(51, 12) == 0xf_ffff_ffff_f000 && bits(63, 63) == 1 << 63);
