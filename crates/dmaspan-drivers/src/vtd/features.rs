//! The driver reads here which features the hardware has.

use dmaspan::io_pgtable::{VtdSs, X86_64};
use dmaspan::{Coherency, lg2};

use super::Mode;

/// Says what an IOMMU has, by its capability registers (11.4.2 and 11.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VtdFeatures {
    /// The capability register.
    pub capability: u64,
    /// The extended capability register.
    pub extended: u64,
}

impl VtdFeatures {
    const fn cap(&self, bit: u32) -> bool {
        self.capability >> bit & 1 != 0
    }

    const fn ecap(&self, bit: u32) -> bool {
        self.extended >> bit & 1 != 0
    }

    /// A field of the capability register.
    fn field(&self, low: u32, bits: u32) -> u32 {
        u32::try_from(self.capability >> low & lg2::mask(bits.min(31))).unwrap_or(0)
    }

    /// The largest number that a domain can have (ND).
    pub fn last_domain(&self) -> u16 {
        let bits = (4 + 2 * self.field(0, 3)).min(16);
        u16::try_from(lg2::mask(bits)).unwrap_or(u16::MAX)
    }

    /// Returns whether the second stage can have that many levels: 3, 4 or 5 (SAGAW).
    pub fn second_stage_levels(&self, levels: u32) -> bool {
        matches!(levels, 3..=5) && self.cap(8 + levels - 2)
    }

    /// Whether the second stage can have any number of levels.
    pub(super) fn has_widths(&self) -> bool {
        (3..=5).any(|levels| self.second_stage_levels(levels))
    }

    /// The leaf sizes of the second stage, bit n for 2^n bytes (SSLPS).
    pub fn second_stage_sizes(&self) -> u64 {
        let (two, one) = (u64::from(self.cap(34)), u64::from(self.cap(35)));
        VtdSs::PAGE_SIZES & (1 << 12 | two << 21 | one << 30)
    }

    /// The leaf sizes of the first stage, bit n for 2^n bytes (FS1GP).
    pub fn first_stage_sizes(&self) -> u64 {
        X86_64::PAGE_SIZES & (1 << 12 | 1 << 21 | u64::from(self.cap(56)) << 30)
    }

    /// Returns whether the first stage can have 5 levels (FS5LP).
    pub const fn first_stage_5_levels(&self) -> bool {
        self.cap(60)
    }

    /// Returns whether hardware, or rather software in its place, caches absent entries (CM).
    pub const fn caching_mode(&self) -> bool {
        self.cap(7)
    }

    /// Returns whether stores are held in a buffer that must be flushed (RWBF).
    pub const fn write_buffer(&self) -> bool {
        self.cap(4)
    }

    /// log2 of the most pages that one command can name (PSI and MAMV); `None` where hardware only
    /// forgets whole domains.
    pub fn most_pages_lg2(&self) -> Option<u32> {
        self.cap(39).then(|| self.field(48, 6))
    }

    /// Returns whether memory below 4 GiB, and above, can be protected from all devices (PLMR and
    /// PHMR).
    pub const fn protected_memory(&self) -> [bool; 2] {
        [self.cap(5), self.cap(6)]
    }

    /// Returns whether an invalidation can complete the writes and the reads that were let through
    /// before (DWD and DRD).
    pub const fn drains(&self) -> bool {
        self.cap(54) && self.cap(55)
    }

    /// The offset of the fault records, and how many there are (FRO and NFR).
    pub fn fault_records(&self) -> (u64, u32) {
        (u64::from(self.field(24, 10)) * 16, self.field(40, 8) + 1)
    }

    /// Returns whether there is a queue of invalidations (QI).
    pub const fn queued_invalidation(&self) -> bool {
        self.ecap(1)
    }

    /// Returns whether interrupts can go to CPUs with an APIC ID of 32 bits (EIM).
    pub const fn extended_interrupts(&self) -> bool {
        self.ecap(4)
    }

    /// Returns whether accesses can pass untranslated (PT).
    pub const fn pass_through(&self) -> bool {
        self.ecap(6)
    }

    /// Returns whether leaves can force accesses to snoop (SC).
    pub const fn snoop_control(&self) -> bool {
        self.ecap(7)
    }

    /// Returns whether there is scalable mode (SMTS).
    pub const fn scalable(&self) -> bool {
        self.ecap(43)
    }

    /// Returns whether scalable mode's second stage marks what it uses and writes (SSADS).
    pub const fn second_stage_dirty(&self) -> bool {
        self.ecap(45)
    }

    /// Returns whether scalable mode has the second stage (SSTS).
    pub const fn scalable_second_stage(&self) -> bool {
        self.ecap(46)
    }

    /// Returns whether scalable mode has the first stage (FSTS).
    pub const fn first_stage(&self) -> bool {
        self.ecap(47)
    }

    /// Returns whether entries can forbid instruction fetches: requests for such are told apart
    /// (ERS).
    pub const fn execute_requests(&self) -> bool {
        self.ecap(30)
    }

    /// Returns whether walks see the CPU's caches: C in legacy mode, SMPWC in scalable mode.
    pub const fn walks(&self, mode: Mode) -> Coherency {
        let snooped = match mode {
            Mode::Legacy => self.ecap(0),
            Mode::Scalable => self.ecap(48),
        };
        if snooped { Coherency::Coherent } else { Coherency::NonCoherent }
    }
}
