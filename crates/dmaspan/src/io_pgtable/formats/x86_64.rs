//! x86-64's tables of 4 and 5 levels, as VT-d's first stage and AMD's guest translation read them.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3A, section 4.5
//! "4-Level Paging and 5-Level Paging"; Intel VT-d Architecture Specification, D51397, sections 3.6
//! "First-Stage Translation", 9.6 "Scalable-Mode PASID Table Entry" and 9.7 "First-Stage Paging
//! Entries"; AMD64 Architecture Programmer's Manual, volume 2, 24593, sections 5.3 "Long-Mode Page
//! Translation" and 7.10 "Secure Memory Encryption"; AMD I/O Virtualization Technology (IOMMU)
//! Specification, 48882, sections 2.2.2.1 "Device Table Entry Format" and 2.2.6 "I/O Page Tables
//! for Guest Translations".
//!
//! Level 0 here is the manuals' PTE, level 4 their PML5E. There are no write-only entries.

use super::{ConfigError, DirtyTracking, Half, config, manuals};
use crate::addr::PhysAddr;
use crate::io_pgtable::format::{Entry, Format, Geometry, Groups, Leaf, sizes_within, tree_of};
use crate::io_pgtable::manual::Manual;
use crate::lg2;
use crate::prot::Prot;

#[cfg(test)]
mod tests;

/// Bit 0, P: the entry is present (SDM 4.5.4).
const PRESENT: u64 = 1 << 0;
/// Bit 1, R/W: writes are permitted (SDM 4.6).
const WRITE: u64 = 1 << 1;
/// Bit 2, U/S: accesses without privilege are permitted, as all are that come without PASID
/// (SDM 4.6, VT-d 3.6.1).
const USER: u64 = 1 << 2;
/// Bits 3 and 4, PWT and PCD: with bit 7 or 12, PAT, the index of a memory type. 0 is write-back
/// and 3 uncacheable from reset on (SDM 4.9.2 and the MSR IA32_PAT).
const WRITE_THROUGH: u64 = 1 << 3;
const CACHE_DISABLE: u64 = 1 << 4;
/// Bit 5, A: hardware used the entry (SDM 4.8).
const ACCESSED: u64 = 1 << 5;
/// Bit 6, D: hardware wrote through the leaf (SDM 4.8).
const DIRTY: u64 = 1 << 6;
/// Bit 7, PS: a leaf above level 0; at level 0 it is PAT (SDM 4.5.4).
const PAGE_SIZE: u64 = 1 << 7;
/// Bits 51:12: the address of the table or the memory (SDM 4.5.4).
const ADDRESS: u64 = lg2::mask(52) & !lg2::mask(12);
/// Bit 52: ignored by hardware (SDM 4.5.4), available to software (APM 5.3.3).
const SOFTWARE: u64 = 1 << 52;
/// Bit 63, XD or NX: no instruction fetches; reserved where not enabled (SDM 4.6, APM 5.6.1).
const EXECUTE_DISABLE: u64 = 1 << 63;

/// The highest level that has leaves: 1 GiB (SDM 4.5.4).
const TOP_LEAF: u32 = 2;

/// Says whether leaves can forbid instruction fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecuteDisable {
    /// They cannot: [`Prot::NOEXEC`] changes nothing.
    Absent,
    /// They can: VT-d's NXE is set, or AMD's extended feature NXSup.
    Enabled,
}

/// Says what distinguishes one table from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X86_64Config {
    /// Bits of input addresses, sign included: 48 for 4 levels, 57 for 5.
    pub input_bits: u32,
    /// Which half of the sign-extended input addresses. The lower is all there is where hardware
    /// does not extend them, as AMD's for accesses without PASID.
    pub half: Half,
    /// Bits of physical addresses: 32 to 52.
    pub output_bits: u32,
    /// The leaf sizes to use, bit n for 2^n bytes; `None` for 4K, 2M and 1G. The latter is for
    /// hardware that has it (VT-d's capability FS1GP).
    pub page_sizes: Option<u64>,
    /// Whether [`Prot::NOEXEC`] has a bit.
    pub execute_disable: ExecuteDisable,
    /// Whether leaves start clean, for hardware to set D. All of VT-d's does; AMD's does where the
    /// extended feature HDSup says so and the device's HAD field asks for it.
    pub dirty: DirtyTracking,
    /// The bit of an entry that says that its memory is encrypted (AMD's C-bit), above the output
    /// bits. Set in all entries but those of [`Prot::MMIO`].
    pub encryption_bit: Option<u32>,
}

impl X86_64Config {
    /// A table for the lower half with all leaf sizes that uses no optional bit.
    pub const fn new(input_bits: u32, output_bits: u32) -> Self {
        Self {
            input_bits,
            half: Half::Lower,
            output_bits,
            page_sizes: None,
            execute_disable: ExecuteDisable::Absent,
            dirty: DirtyTracking::Off,
            encryption_bit: None,
        }
    }
}

/// The parts of hardware's structures that a table determines. All other bits are 0 and the
/// driver's to add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X86_64Registers {
    /// Bits 191:128 of a scalable-mode PASID-table entry (VT-d 9.6): FSPTPTR in 191:140, NXE in
    /// 133, FSPM in 131:130. Privileged accesses need SRE besides.
    pub pasid_entry: u64,
    /// An entry of AMD's GCR3 table, a guest CR3 (48882, 2.2.6): the root in 51:12, V in 0.
    pub gcr3_entry: u64,
    /// Bits 191:128 of AMD's device table entry (48882, 2.2.2.1): GuestPagingMode in 183:182. Its
    /// GLX is the levels of the GCR3 table, not of this one.
    pub device_table_entry: u64,
}

/// x86-64's tables.
#[derive(Clone, Debug)]
pub struct X86_64 {
    config: X86_64Config,
    page_sizes: u64,
    /// The bits of an entry that are its address.
    address: u64,
    /// The encryption bit, or nothing.
    encrypted: u64,
}

impl X86_64 {
    /// The leaves that the architecture has (SDM 4.5.4).
    pub const PAGE_SIZES: u64 = 1 << 12 | 1 << 21 | 1 << 30;

    /// A format with this configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] where the architecture has no such table.
    ///
    /// ```
    /// use dmaspan::io_pgtable::{Half, X86_64, X86_64Config};
    ///
    /// let config = X86_64Config { half: Half::Upper, ..X86_64Config::new(57, 52) };
    /// assert!(X86_64::new(config).is_ok());
    /// assert!(X86_64::new(X86_64Config { input_bits: 39, ..config }).is_err());
    /// ```
    pub fn new(config: X86_64Config) -> Result<Self, ConfigError> {
        let X86_64Config { input_bits, output_bits, .. } = config;
        if !matches!(input_bits, 48 | 57) {
            return Err(ConfigError::InputBits { input_bits, supported: "48 and 57" });
        }
        if !(32..=52).contains(&output_bits) {
            return Err(ConfigError::OutputBits { output_bits, supported: "32 to 52" });
        }
        let supported = sizes_within::<Self>(Self::PAGE_SIZES, input_bits);
        let page_sizes =
            config::page_sizes(config.page_sizes, supported, supported, Self::GRANULE_LG2)?;
        let encrypted = match config.encryption_bit {
            Some(bit) if bit < output_bits || bit > 51 => {
                let what = "the encryption bit is between the output bits and bit 51";
                return Err(ConfigError::Unsupported { what });
            }
            Some(bit) => lg2::size(bit),
            None => 0,
        };
        Ok(Self { config, page_sizes, address: ADDRESS & !encrypted, encrypted })
    }

    /// Returns what hardware is told of a table whose root is at `root`.
    pub fn registers(&self, root: PhysAddr) -> X86_64Registers {
        // FSPM and GuestPagingMode: 00b for 4 levels, 01b for 5.
        let mode = u64::from(self.config.input_bits == 57);
        let no_execute = u64::from(self.config.execute_disable == ExecuteDisable::Enabled);
        X86_64Registers {
            pasid_entry: root.get() | no_execute << (133 - 128) | mode << (130 - 128),
            gcr3_entry: root.get() | self.encrypted | 1,
            device_table_entry: mode << (182 - 128),
        }
    }

    /// D where hardware sets it.
    #[inline(always)]
    fn mark(&self) -> u64 {
        if self.tracks_dirty() { DIRTY } else { 0 }
    }
}

// SAFETY: 1. a link is PRESENT without PAGE_SIZE, and its address bits are the table's, the
// encryption bit aside; SOFTWARE is none of them. 2. Leaves above level 0 have PAGE_SIZE, no walk
// asks for a table at level 0, and A and D are not looked at. 3. Nothing changes a value.
#[expect(unsafe_code, reason = "the promise of a format")]
unsafe impl Format for X86_64 {
    type Word = u64;
    const GRANULE_LG2: u32 = 12;
    const LG2_ENTRIES: u32 = 9;
    const GROUPS: Groups = Groups::Consecutive;
    const WRITTEN_BACK: u64 = SOFTWARE;

    fn manual(&self) -> Manual {
        manuals::X86_64
    }

    fn geometry(&self) -> Geometry {
        let X86_64Config { input_bits, half, output_bits, .. } = self.config;
        // The top input bit is the sign.
        let aperture = half.aperture(input_bits - 1);
        let tree = tree_of::<Self>(input_bits);
        Geometry::of_tree::<Self>(aperture, output_bits, self.page_sizes, tree)
    }

    #[inline(always)]
    fn template(&self, level: u32, _lg2: u32, prot: Prot) -> u64 {
        // Without tracking, D is set before hardware has to. A leaf that is not writable never has
        // it: the CPU's shadow stacks look like that.
        let write = if prot.contains(Prot::WRITE) { WRITE | (DIRTY & !self.mark()) } else { 0 };
        let user = if prot.contains(Prot::PRIV) { 0 } else { USER };
        let no_fetch = self.config.execute_disable == ExecuteDisable::Enabled;
        let execute = if no_fetch && prot.contains(Prot::NOEXEC) { EXECUTE_DISABLE } else { 0 };
        // DMA is coherent on these systems: memory is write-back, with CACHE or not. Device
        // registers are neither cached nor behind the memory's encryption.
        let memory =
            if prot.contains(Prot::MMIO) { CACHE_DISABLE | WRITE_THROUGH } else { self.encrypted };
        let kind = if level == 0 { 0 } else { PAGE_SIZE };
        PRESENT | write | user | execute | memory | kind | ACCESSED
    }

    #[inline(always)]
    fn link(&self, _level: u32, table: PhysAddr) -> u64 {
        table.get() | PRESENT | WRITE | USER | ACCESSED | self.encrypted
    }

    #[inline(always)]
    fn decode(&self, level: u32, word: u64) -> Entry {
        let paddr = PhysAddr::new(word & self.address);
        if word & PRESENT == 0 {
            return if word == 0 { Entry::Empty } else { Entry::Invalid };
        }
        match (word & PAGE_SIZE != 0, level) {
            // At level 0 the bit is PAT, which is never set.
            (false, 0) | (true, 1..=TOP_LEAF) => {
                Entry::Leaf(Leaf { paddr, lg2: Self::shift(level) })
            }
            (false, _) => Entry::Table(paddr),
            (true, _) => Entry::Invalid,
        }
    }

    #[inline(always)]
    fn table_of(&self, _level: u32, word: u64) -> Option<PhysAddr> {
        let is_table = word & (PRESENT | PAGE_SIZE) == PRESENT;
        is_table.then(|| PhysAddr::new(word & self.address))
    }

    #[inline(always)]
    fn is_single(&self, level: u32, word: u64) -> bool {
        let kind = if level == 0 { PRESENT } else { PRESENT | PAGE_SIZE };
        level <= TOP_LEAF && word & (PRESENT | PAGE_SIZE) == kind
    }

    #[inline(always)]
    fn prot(&self, _level: u32, leaf: u64) -> Prot {
        let mut prot = Prot::READ;
        prot.set(Prot::WRITE, leaf & WRITE != 0);
        prot.set(Prot::PRIV, leaf & USER == 0);
        prot.set(Prot::NOEXEC, leaf & EXECUTE_DISABLE != 0);
        prot.set(Prot::MMIO, leaf & CACHE_DISABLE != 0);
        prot.set(Prot::CACHE, leaf & CACHE_DISABLE == 0);
        prot
    }

    #[inline(always)]
    fn tracks_dirty(&self) -> bool {
        self.config.dirty == DirtyTracking::Hardware
    }

    #[inline(always)]
    fn is_dirty(&self, leaf: u64) -> bool {
        leaf & self.mark() != 0
    }

    #[inline(always)]
    fn clean(&self, leaf: u64) -> u64 {
        leaf & !self.mark()
    }

    #[inline(always)]
    fn dirtied(&self, leaf: u64) -> u64 {
        leaf | self.mark()
    }
}
