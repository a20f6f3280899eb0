//! Arm's 64-bit translation tables (VMSAv8-64), stage 1, with granules of 4K, 16K and 64K.
//!
//! Source: Arm Architecture Reference Manual for A-profile, DDI 0487, chapter D8 "The AArch64
//! Virtual Memory System Architecture": D8.3 "Translation table descriptor formats", D8.2
//! "Translation process", and the registers TCR_EL1, TTBR0_EL1 and MAIR_EL1 in D24. The context
//! descriptor of an SMMUv3 has the fields of TCR and MAIR as they are here, most of them in other
//! places, and the address of the root in TTB0 or TTB1 (IHI 0070, 5.4). That is not always
//! [`ArmS1Registers::ttbr`]: with 52 bits TTBR has the upper ones in bits 5:2.
//!
//! Level 0 here is the manual's level 3.

use super::arm_lpae::{
    ACCESSED, DIRTY_MODIFIER, Descriptor, ORGN_WRITE_BACK, SH_INNER, SH_OUTER, SOFTWARE,
    base_address, granule_field, long_descriptors, output_size, walk_fields,
};
use super::{BreakBeforeMake, ConfigError, DirtyTracking, Half, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, tree_of};
use crate::io_pgtable::manual::Manual;
use crate::prot::{Coherency, Prot};

/// Bits 4:2: which attribute of MAIR (D8.3.2).
const ATTR_SHIFT: u32 = 2;
const ATTR_MASK: u64 = 0b111 << ATTR_SHIFT;
/// Bit 6, AP\[1\]: unprivileged accesses are permitted (D8.4.1).
const AP_UNPRIVILEGED: u64 = 1 << 6;
/// Bit 7, AP\[2\]: writes are not permitted (D8.4.1).
const AP_READ_ONLY: u64 = 1 << 7;
/// Bit 11, nG: belongs to one ASID.
const NOT_GLOBAL: u64 = 1 << 11;
/// Bits 54:53, UXN and PXN: no instruction fetches (D8.4.3).
const EXECUTE_NEVER: u64 = 0b11 << 53;

/// What the descriptors' attribute indices mean in MAIR: 0 normal non-cacheable, 1 normal
/// write-back, 2 device nGnRE, 3 normal inner non-cacheable and outer write-back.
const MAIR: u64 = 0x44 | 0xff << 8 | 0x04 << 16 | 0xf4 << 24;
const ATTR_NON_CACHEABLE: u64 = 0 << ATTR_SHIFT;
const ATTR_WRITE_BACK: u64 = 1 << ATTR_SHIFT;
const ATTR_DEVICE: u64 = 2 << ATTR_SHIFT;

/// Says what distinguishes one stage-1 table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmLpaeS1Config {
    /// Bits of input addresses: 25 to 48, and to 52 with the 64K granule.
    pub input_bits: u32,
    /// Bits of physical addresses: 32, 36, 40, 42, 44, 48, and 52 with the 64K granule.
    pub output_bits: u32,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for the granule and the blocks.
    /// Contiguous groups ([`ArmLpaeS1::CONTIGUOUS_SIZES`]) are for hardware that has them.
    pub page_sizes: Option<u64>,
    /// Which half of the input space.
    pub half: Half,
    /// Whether hardware's walks see the CPU's caches.
    pub walks: Coherency,
    /// Whether non-coherent walks may use a cache further out.
    pub outer_walks: OuterWalks,
    /// Whether hardware manages dirty state (FEAT_HAFDBS, D8.5).
    pub dirty: DirtyTracking,
    /// How leaves of different sizes replace each other (D8, "Using break-before-make when
    /// updating translation table entries").
    pub break_before_make: BreakBeforeMake,
}

impl ArmLpaeS1Config {
    /// A table for the lower half with coherent walks and leaves that are single descriptors.
    pub const fn new(input_bits: u32, output_bits: u32) -> Self {
        Self {
            input_bits,
            output_bits,
            page_sizes: None,
            half: Half::Lower,
            walks: Coherency::Coherent,
            outer_walks: OuterWalks::AsInner,
            dirty: DirtyTracking::Off,
            break_before_make: BreakBeforeMake::Needed,
        }
    }
}

/// Says which outer cacheability walks have, as Linux's `IO_PGTABLE_QUIRK_ARM_OUTER_WBWA`
/// (include/linux/io-pgtable.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OuterWalks {
    /// That of the inner one.
    AsInner,
    /// Write-back and write-allocate, although the inner one is non-cacheable: a system cache that
    /// the CPU's write-backs go to.
    WriteBack,
}

/// The values of the registers that a stage-1 table goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmS1Registers {
    /// TTBR0_EL1 or TTBR1_EL1, by the half; the ASID is the driver's to add. With 52 output bits,
    /// bits 51:48 of the root's address are in bits 5:2.
    pub ttbr: u64,
    /// TCR_EL1 with walks through the other half disabled.
    pub tcr: u64,
    /// MAIR_EL1.
    pub mair: u64,
}

/// Arm's 64-bit stage 1 with a granule of `2^GRANULE_LG2` bytes: 12, 14 or 16.
#[derive(Clone, Debug)]
pub struct ArmLpaeS1<const GRANULE_LG2: u32> {
    config: ArmLpaeS1Config,
    page_sizes: u64,
}

impl<const G: u32> ArmLpaeS1<G> {
    /// Leaves that are one descriptor each: pages, and blocks where the granule has them (D8.3.1).
    pub const PAGE_SIZES: u64 = Descriptor::<G>::PAGE_SIZES;

    /// Leaves that are a group of contiguous descriptors (D8.7.1): 16 of them with 4K; 128 pages or
    /// 32 blocks with 16K; 32 with 64K.
    pub const CONTIGUOUS_SIZES: u64 = Descriptor::<G>::CONTIGUOUS_SIZES;

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};
    ///
    /// assert!(ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).is_ok());
    /// assert!(ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(52, 48)).is_err());
    /// ```
    pub fn new(config: ArmLpaeS1Config) -> Result<Self, ConfigError> {
        let ArmLpaeS1Config { input_bits, output_bits, .. } = config;
        Descriptor::<G>::check(input_bits, output_bits)?;
        if (config.walks, config.outer_walks) == (Coherency::Coherent, OuterWalks::WriteBack) {
            let what = "coherent walks are outer write-back anyway";
            return Err(ConfigError::Unsupported { what });
        }
        let (top_level, _) = tree_of::<Self>(input_bits);
        let page_sizes = Descriptor::<G>::page_sizes::<Self>(
            config.page_sizes,
            input_bits,
            output_bits,
            top_level,
        )?;
        Ok(Self { config, page_sizes })
    }

    /// The register values for a table whose root is at `root`.
    ///
    /// TCR's fields by half: TxSZ, EPDx, IRGNx, ORGNx, SHx and TGx at bits 0 to 15 or 16 to 31; IPS
    /// at bits 34:32, HA and HD at bits 39 and 40.
    pub fn registers(&self, root: PhysAddr) -> ArmS1Registers {
        let size = u64::from(64 - self.config.input_bits);
        let (half, other_disabled, granule) = match self.config.half {
            Half::Lower => (0, 1 << 23, granule_field(G, [0b00, 0b10, 0b01])),
            Half::Upper => (16, 1 << 7, granule_field(G, [0b10, 0b01, 0b11])),
        };
        let output_size = output_size(self.config.output_bits).unwrap_or(0);
        // Hardware manages dirty state only where it manages the access flag too.
        let managed = if self.tracks_dirty() { 0b11 << 39 } else { 0 };
        let walked = (size | self.walk_fields() | granule << 14) << half | other_disabled;
        ArmS1Registers {
            ttbr: base_address(root, self.config.output_bits),
            tcr: walked | output_size << 32 | managed,
            mair: MAIR,
        }
    }

    /// IRGN0, ORGN0 and SH0 of TCR_EL1 and TTBCR.
    pub(super) const fn walk_fields(&self) -> u64 {
        let outer = match self.config.outer_walks {
            OuterWalks::AsInner => 0,
            OuterWalks::WriteBack => ORGN_WRITE_BACK,
        };
        walk_fields(self.config.walks) | outer
    }

    /// Returns what it was made with: a driver compares it with what hardware walks.
    pub const fn config(&self) -> &ArmLpaeS1Config {
        &self.config
    }
}

// SAFETY: a link is VALID | TABLE_OR_PAGE with the table's address, which `Descriptor::address`
// takes out again; no leaf above level 0 has both bits, hardware's AF and AP are neither, and no
// walk asks for a table at level 0.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl<const G: u32> Format for ArmLpaeS1<G> {
    long_descriptors!(G);

    fn manual(&self) -> Manual {
        manuals::arm_s1(G)
    }

    fn geometry(&self) -> Geometry {
        let ArmLpaeS1Config { input_bits, output_bits, half, .. } = self.config;
        let aperture = half.aperture(input_bits);
        // TTBR's address has at least 64 bytes' alignment (D24, TTBR0_EL1.BADDR).
        let tree = tree_of::<Self>(input_bits);
        Geometry::of_tree::<Self>(aperture, output_bits, self.page_sizes, tree)
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        let kind = Descriptor::<G>::leaf(level, lg2, Self::shift(level));
        let write = match (prot.contains(Prot::WRITE), self.config.dirty) {
            (false, _) => AP_READ_ONLY,
            (true, DirtyTracking::Off) => 0,
            // Writable-clean: hardware clears the bit at the first write.
            (true, DirtyTracking::Hardware) => DIRTY_MODIFIER | AP_READ_ONLY,
        };
        let privilege = if prot.contains(Prot::PRIV) { 0 } else { AP_UNPRIVILEGED };
        let execute = if prot.contains(Prot::NOEXEC) { EXECUTE_NEVER } else { 0 };
        let memory = if prot.contains(Prot::MMIO) {
            ATTR_DEVICE | SH_OUTER
        } else if prot.contains(Prot::CACHE) {
            ATTR_WRITE_BACK | SH_INNER
        } else {
            ATTR_NON_CACHEABLE | SH_OUTER
        };
        kind | write | privilege | execute | memory | ACCESSED | NOT_GLOBAL
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, leaf & AP_READ_ONLY == 0 || leaf & DIRTY_MODIFIER != 0);
        prot.set(Prot::PRIV, leaf & AP_UNPRIVILEGED == 0);
        prot.set(Prot::NOEXEC, leaf & EXECUTE_NEVER != 0);
        prot.set(Prot::CACHE, leaf & ATTR_MASK == ATTR_WRITE_BACK);
        prot.set(Prot::MMIO, leaf & ATTR_MASK == ATTR_DEVICE);
        prot
    }

    /// Writable-dirty is DBM with AP\[2\] clear (D8.5, "Hardware management of dirty state").
    #[inline(always)]
    fn is_dirty(&self, leaf: u64) -> bool {
        leaf & (DIRTY_MODIFIER | AP_READ_ONLY) == DIRTY_MODIFIER
    }

    #[inline(always)]
    fn clean(&self, leaf: u64) -> u64 {
        leaf | read_only_if_managed(leaf)
    }

    #[inline(always)]
    fn dirtied(&self, leaf: u64) -> u64 {
        leaf & !read_only_if_managed(leaf)
    }
}

/// AP\[2\] where the leaf has DBM: the bit that hardware changes, if it may.
#[inline(always)]
const fn read_only_if_managed(leaf: u64) -> u64 {
    leaf >> (DIRTY_MODIFIER.ilog2() - AP_READ_ONLY.ilog2()) & AP_READ_ONLY
}

#[cfg(test)]
mod tests {
    use super::super::arm_lpae::tests::{reads_back, writes_are_seen};
    use super::*;

    /// Stage 1 reads whatever it writes, and a device's registers are not cached.
    fn granted(mut prot: Prot) -> Prot {
        prot.set(Prot::CACHE, prot.contains(Prot::CACHE) && !prot.contains(Prot::MMIO));
        prot | Prot::READ
    }

    fn with_groups<const G: u32>(config: ArmLpaeS1Config) -> ArmLpaeS1<G> {
        let singles = ArmLpaeS1::<G>::new(config).unwrap().page_sizes;
        let page_sizes = Some(singles | ArmLpaeS1::<G>::CONTIGUOUS_SIZES);
        ArmLpaeS1::new(ArmLpaeS1Config { page_sizes, ..config }).unwrap()
    }

    fn reads_back_of<const G: u32>(bits: u32) {
        let config = ArmLpaeS1Config::new(bits, bits);
        let dirty = DirtyTracking::Hardware;
        for config in [config, ArmLpaeS1Config { dirty, ..config }] {
            let format = with_groups::<G>(config);
            reads_back(&format, granted);
        }
        // The first write clears AP[2], bit 7 (D8.5).
        let format = with_groups::<G>(ArmLpaeS1Config { dirty, ..config });
        writes_are_seen(&format, |leaf| leaf & !(1 << 7));
    }

    #[test]
    fn what_is_encoded_reads_back_and_hardware_marks_writes() {
        reads_back_of::<12>(48);
        reads_back_of::<14>(48);
        reads_back_of::<16>(48);
        reads_back_of::<16>(52);
    }

    #[test]
    fn writable_leaves_start_clean_where_hardware_marks_them() {
        let dirty = DirtyTracking::Hardware;
        let config = ArmLpaeS1Config { dirty, ..ArmLpaeS1Config::new(48, 48) };
        let format = ArmLpaeS1::<12>::new(config).unwrap();
        let page = |prot| format.leaf(format.template(0, 12, prot), PhysAddr::new(0x5000));
        // 0b11, AttrIndx 1 in bits 4:2, AP[1] bit 6, AP[2] bit 7, SH 0b11 in bits 9:8, AF bit 10,
        // nG bit 11, DBM bit 51.
        let clean = page(Prot::READ_WRITE | Prot::CACHE);
        assert_eq!(clean, 0x0008_0000_0000_5fc7);
        assert!(format.is_dirty(0x0008_0000_0000_5f47));
        // Without DBM a write faults, or none is noted.
        let read_only = page(Prot::READ | Prot::CACHE);
        assert_eq!(read_only, 0x5fc7);
        assert_eq!(format.clean(0x5f47), 0x5f47);
        assert!(!format.is_dirty(0x5f47) && !format.is_dirty(read_only));
        assert!(!ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap().tracks_dirty());
    }

    #[test]
    fn tcr_enables_dirty_state_and_outer_caches() {
        let base = ArmLpaeS1Config::new(48, 48);
        let tcr = |config| {
            ArmLpaeS1::<12>::new(config).map(|format| format.registers(PhysAddr::new(0)).tcr)
        };
        // T0SZ 16, IRGN0 and ORGN0 0b01 (0x500), SH0 0b11 (0x3000), EPD1 bit 23, IPS 0b101 in bits
        // 34:32, HA bit 39 and HD bit 40 (0x180 in the high word).
        let dirty = DirtyTracking::Hardware;
        assert_eq!(tcr(ArmLpaeS1Config { dirty, ..base }), Ok(0x185_0080_3510));
        // IRGN0 0b00, ORGN0 0b01, SH0 0b10.
        let (walks, outer_walks) = (Coherency::NonCoherent, OuterWalks::WriteBack);
        let outer = ArmLpaeS1Config { walks, outer_walks, ..base };
        assert_eq!(tcr(outer), Ok(0x5_0080_2410));
        // In the upper half the same fields are 16 bits higher, with TG1 0b10 and EPD0 bit 7.
        let half = Half::Upper;
        assert_eq!(tcr(ArmLpaeS1Config { half, ..outer }), Ok(0x5_a410_0080));
        let coherent = tcr(ArmLpaeS1Config { outer_walks, ..base });
        assert!(matches!(coherent, Err(ConfigError::Unsupported { .. })));
    }

    #[test]
    fn leaves_larger_than_what_the_outputs_reach_are_refused() {
        let page_sizes = Some(1 << 12 | 1 << 34);
        let group = ArmLpaeS1Config { page_sizes, ..ArmLpaeS1Config::new(48, 36) };
        assert!(ArmLpaeS1::<12>::new(group).is_ok());
        let refused = ArmLpaeS1::<12>::new(ArmLpaeS1Config { output_bits: 32, ..group });
        assert!(matches!(refused, Err(ConfigError::PageSizes { .. })));
    }

    #[test]
    fn sizes_change_by_break_before_make_but_with_feat_bbm() {
        let config = ArmLpaeS1Config::new(48, 48);
        assert!(ArmLpaeS1::<12>::new(config).unwrap().needs_break());
        let break_before_make = BreakBeforeMake::NotNeeded;
        let config = ArmLpaeS1Config { break_before_make, ..config };
        assert!(!ArmLpaeS1::<12>::new(config).unwrap().needs_break());
    }
}
