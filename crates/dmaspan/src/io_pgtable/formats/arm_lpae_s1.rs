//! Arm's 64-bit translation tables (VMSAv8-64), stage 1, with granules of 4K, 16K and 64K.
//!
//! Source: Arm Architecture Reference Manual for A-profile, DDI 0487, chapter D8 "The AArch64
//! Virtual Memory System Architecture": D8.3 "Translation table descriptor formats", D8.2
//! "Translation process", and the registers TCR_EL1, TTBR0_EL1 and MAIR_EL1 in D24. The SMMU's
//! context descriptor takes the same values (IHI 0070, 5.4).
//!
//! Level 0 here is the manual's level 3.

use super::{ConfigError, Half};
use crate::addr::{Iova, PhysAddr};
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, Leaf, sizes_within, tree_of};
use crate::io_pgtable::memory::TableShape;
use crate::lg2;
use crate::prot::{Coherency, Prot};
use crate::range::IovaRange;

/// Bit 0: the descriptor is valid (D8.3.1).
const VALID: u64 = 1 << 0;
/// Bit 1: a table above level 0, a page at level 0; a block has it clear (D8.3.1).
const TABLE_OR_PAGE: u64 = 1 << 1;
/// Bits 4:2: which attribute of MAIR (D8.3.2).
const ATTR_SHIFT: u32 = 2;
const ATTR_MASK: u64 = 0b111 << ATTR_SHIFT;
/// Bit 6, AP\[1\]: unprivileged accesses are permitted (D8.4.1).
const AP_UNPRIVILEGED: u64 = 1 << 6;
/// Bit 7, AP\[2\]: writes are not permitted (D8.4.1).
const AP_READ_ONLY: u64 = 1 << 7;
/// Bits 9:8: shareability (D8.5.2).
const SH_OUTER: u64 = 0b10 << 8;
const SH_INNER: u64 = 0b11 << 8;
/// Bit 10, AF: accessed; a clear one makes hardware fault or set it (D8.5.1).
const ACCESSED: u64 = 1 << 10;
/// Bit 11, nG: belongs to one ASID.
const NOT_GLOBAL: u64 = 1 << 11;
/// Bit 52: one of a group of contiguous descriptors (D8.7.1).
const CONTIGUOUS: u64 = 1 << 52;
/// Bits 54:53, UXN and PXN: no instruction fetches (D8.4.3).
const EXECUTE_NEVER: u64 = 0b11 << 53;

/// Bit 55: for software, in tables and leaves (D8.3.1).
const SOFTWARE: u64 = 1 << 55;

/// What the descriptors' attribute indices mean in MAIR: 0 normal non-cacheable, 1 normal
/// write-back, 2 device nGnRE, 3 normal inner non-cacheable and outer write-back.
const MAIR: u64 = 0x44 | 0xff << 8 | 0x04 << 16 | 0xf4 << 24;
const ATTR_NON_CACHEABLE: u64 = 0 << ATTR_SHIFT;
const ATTR_WRITE_BACK: u64 = 1 << ATTR_SHIFT;
const ATTR_DEVICE: u64 = 2 << ATTR_SHIFT;

/// What distinguishes one stage-1 table from another.
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
        }
    }
}

/// The values of the registers that a stage-1 table goes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArmS1Registers {
    /// TTBR0_EL1 or TTBR1_EL1, by the half; the ASID is the driver's to add.
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
    pub const PAGE_SIZES: u64 = match G {
        12 => 1 << 12 | 1 << 21 | 1 << 30,
        14 => 1 << 14 | 1 << 25,
        // Blocks of 4T need 52 output bits.
        _ => 1 << 16 | 1 << 29 | 1 << 42,
    };

    /// Leaves that are a group of contiguous descriptors (D8.7.1): 16 of them with 4K; 128 pages or
    /// 32 blocks with 16K; 32 with 64K.
    pub const CONTIGUOUS_SIZES: u64 = match G {
        12 => 1 << 16 | 1 << 25 | 1 << 34,
        14 => 1 << 21 | 1 << 30,
        _ => 1 << 21 | 1 << 34,
    };

    /// Bits 47 down to the granule's.
    const ADDRESS: u64 = lg2::mask(48) & !lg2::mask(G);

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
        if !matches!(G, 12 | 14 | 16) {
            let supported = "2^12, 2^14 and 2^16";
            return Err(ConfigError::Granule { granule_lg2: G, supported });
        }
        let most = if G == 16 { 52 } else { 48 };
        if !(25..=most).contains(&input_bits) {
            let supported = if G == 16 { "25 to 52" } else { "25 to 48" };
            return Err(ConfigError::InputBits { input_bits, supported });
        }
        if ips(output_bits).is_none() || output_bits > most {
            let supported = "32, 36, 40, 42, 44, 48, and 52 with the 64K granule";
            return Err(ConfigError::OutputBits { output_bits, supported });
        }
        // Without 52-bit addresses the 64K granule has no blocks of 4T.
        let singles = Self::PAGE_SIZES & if output_bits == 52 { u64::MAX } else { lg2::mask(42) };
        let supported = sizes_within::<Self>(singles | Self::CONTIGUOUS_SIZES, input_bits);
        let asked = config.page_sizes.unwrap_or(sizes_within::<Self>(singles, input_bits));
        if asked & !supported != 0 || asked & lg2::size(G) == 0 {
            return Err(ConfigError::PageSizes { page_sizes: asked, supported });
        }
        Ok(Self { config, page_sizes: asked })
    }

    /// The register values for a table whose root is at `root`.
    ///
    /// TCR's fields by half: TxSZ, EPDx, IRGNx, ORGNx, SHx and TGx at bits 0 to 15 or 16 to 31, IPS
    /// at bits 34:32.
    pub fn registers(&self, root: PhysAddr) -> ArmS1Registers {
        let (cacheable, shareable) = match self.config.walks {
            Coherency::Coherent => (0b01, 0b11),
            Coherency::NonCoherent => (0b00, 0b10),
        };
        let walks = cacheable << 8 | cacheable << 10 | shareable << 12;
        let size = u64::from(64 - self.config.input_bits);
        let (half, other_disabled, granule) = match self.config.half {
            Half::Lower => (0, 1 << 23, granule_field(G, [0b00, 0b10, 0b01])),
            Half::Upper => (16, 1 << 7, granule_field(G, [0b10, 0b01, 0b11])),
        };
        let ips = ips(self.config.output_bits).unwrap_or(0);
        ArmS1Registers {
            ttbr: ttbr_address(root.get(), self.config.output_bits),
            tcr: (size | walks | granule << 14) << half | other_disabled | ips << 32,
            mair: MAIR,
        }
    }

    /// An address as a descriptor has it. With 64K, bits 51:48 are in bits 15:12 (D8.3.1).
    #[inline(always)]
    const fn encode(paddr: u64) -> u64 {
        if G == 16 { paddr & Self::ADDRESS | (paddr >> 36) & 0xf000 } else { paddr }
    }

    #[inline(always)]
    const fn decode_address(descriptor: u64) -> u64 {
        let high = if G == 16 { (descriptor & 0xf000) << 36 } else { 0 };
        descriptor & Self::ADDRESS | high
    }

    /// All bits of a descriptor that are its address.
    const ADDRESS_BITS: u64 = Self::ADDRESS | if G == 16 { 0xf000 } else { 0 };

    /// The highest level that has leaves: with 16K there is only one level of blocks (D8.3.1).
    const TOP_LEAF: u32 = if G == 14 { 1 } else { 2 };

    /// log2 of the entries of a contiguous group at `level`.
    #[inline(always)]
    const fn contiguous_lg2(level: u32) -> u32 {
        match (G, level) {
            (12, _) => 4,
            (14, 0) => 7,
            _ => 5,
        }
    }
}

// SAFETY: a link is VALID | TABLE_OR_PAGE with the table's address, which `decode_address` takes
// out again; no leaf above level 0 has both bits, and no walk asks for a table at level 0.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl<const G: u32> Format for ArmLpaeS1<G> {
    type Word = u64;
    const GRANULE_LG2: u32 = G;
    const LG2_ENTRIES: u32 = G - 3;
    const GROUPS: Groups = Groups::Consecutive;
    const WRITTEN_BACK: u64 = SOFTWARE;

    fn geometry(&self) -> Geometry {
        let input_bits = self.config.input_bits;
        let (top_level, root_lg2_entries) = tree_of::<Self>(input_bits);
        let last = lg2::mask(input_bits);
        let (start, last) = match self.config.half {
            Half::Lower => (0, last),
            Half::Upper => (!last, u64::MAX),
        };
        let max_paddr = PhysAddr::new(lg2::mask(self.config.output_bits));
        let root_size = root_lg2_entries + 3;
        // TTBR's address has at least 64 bytes' alignment (D24, TTBR0_EL1.BADDR).
        let root = TableShape { lg2_size: root_size, lg2_align: root_size.max(6), max_paddr };
        Geometry {
            aperture: IovaRange::new(Iova::new(start), Iova::new(last))
                .unwrap_or(IovaRange::point(Iova::new(start))),
            output_bits: self.config.output_bits,
            top_level,
            page_sizes: self.page_sizes,
            root,
            table: TableShape { lg2_size: G, lg2_align: G, max_paddr },
        }
    }

    #[inline(always)]
    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        let kind = if level == 0 { TABLE_OR_PAGE } else { 0 };
        let contiguous = if lg2 > Self::shift(level) { CONTIGUOUS } else { 0 };
        let write = if prot.contains(Prot::WRITE) { 0 } else { AP_READ_ONLY };
        let privilege = if prot.contains(Prot::PRIV) { 0 } else { AP_UNPRIVILEGED };
        let execute = if prot.contains(Prot::NOEXEC) { EXECUTE_NEVER } else { 0 };
        let memory = if prot.contains(Prot::MMIO) {
            ATTR_DEVICE | SH_OUTER
        } else if prot.contains(Prot::CACHE) {
            ATTR_WRITE_BACK | SH_INNER
        } else {
            ATTR_NON_CACHEABLE | SH_OUTER
        };
        VALID | kind | contiguous | write | privilege | execute | memory | ACCESSED | NOT_GLOBAL
    }

    #[inline(always)]
    fn leaf(&self, template: u64, paddr: PhysAddr) -> u64 {
        template | Self::encode(paddr.get())
    }

    #[inline(always)]
    fn advance(&self, leaf: u64, bytes: u64) -> u64 {
        if G == 16 {
            // Bits 51:48 of the address do not follow bits 47:16 in the descriptor.
            let paddr = Self::decode_address(leaf).wrapping_add(bytes);
            return leaf & !Self::ADDRESS_BITS | Self::encode(paddr);
        }
        leaf.wrapping_add(bytes)
    }

    #[inline(always)]
    fn link(&self, _level: u32, table: PhysAddr) -> u64 {
        Self::encode(table.get()) | TABLE_OR_PAGE | VALID
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u64) -> Entry {
        let paddr = PhysAddr::new(Self::decode_address(word));
        match (word & (VALID | TABLE_OR_PAGE), level) {
            (0b11, 1..) => Entry::Table(paddr),
            (0b11, 0) | (0b01, 1..) if level <= Self::TOP_LEAF => {
                let group = if word & CONTIGUOUS != 0 { Self::contiguous_lg2(level) } else { 0 };
                Entry::Leaf(Leaf { paddr, lg2: Self::shift(level) + group })
            }
            _ if word == 0 => Entry::Empty,
            _ => Entry::Invalid,
        }
    }

    #[inline(always)]
    fn table_of(&self, _level: u32, word: u64) -> Option<PhysAddr> {
        let is_table = word & (VALID | TABLE_OR_PAGE) == VALID | TABLE_OR_PAGE;
        is_table.then(|| PhysAddr::new(Self::decode_address(word)))
    }

    #[inline(always)]
    fn is_single(&self, level: u32, word: u64) -> bool {
        let kind = if level == 0 { VALID | TABLE_OR_PAGE } else { VALID };
        word & (VALID | TABLE_OR_PAGE | CONTIGUOUS) == kind
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, leaf & AP_READ_ONLY == 0);
        prot.set(Prot::PRIV, leaf & AP_UNPRIVILEGED == 0);
        prot.set(Prot::NOEXEC, leaf & EXECUTE_NEVER != 0);
        prot.set(Prot::CACHE, leaf & ATTR_MASK == ATTR_WRITE_BACK);
        prot.set(Prot::MMIO, leaf & ATTR_MASK == ATTR_DEVICE);
        prot
    }
}

/// TCR_EL1.IPS for a number of output bits.
const fn ips(output_bits: u32) -> Option<u64> {
    Some(match output_bits {
        32 => 0,
        36 => 1,
        40 => 2,
        42 => 3,
        44 => 4,
        48 => 5,
        52 => 6,
        _ => return None,
    })
}

/// One of the values for 4K, 16K and 64K.
const fn granule_field(granule_lg2: u32, values: [u64; 3]) -> u64 {
    match granule_lg2 {
        12 => values[0],
        14 => values[1],
        _ => values[2],
    }
}

/// TTBR's address field: with 52 output bits, address bits 51:48 are in bits 5:2.
const fn ttbr_address(root: u64, output_bits: u32) -> u64 {
    if output_bits == 52 { root & lg2::mask(48) | (root >> 46) & 0b11_1100 } else { root }
}
