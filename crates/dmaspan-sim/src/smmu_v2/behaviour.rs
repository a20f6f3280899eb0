//! This chooses what an SMMU does where the architecture leaves it a choice, and what a broken one
//! does.

/// When a sync completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncCompletion {
    /// Its status reads as active so many times; the next read completes it. With 0 the write of
    /// the sync does.
    AfterPolls(u32),
    /// Not at all, nor do those in progress meanwhile. One that is begun so does not recover; the
    /// next one covers what it would have.
    Never,
}

/// When an invalidation takes effect. The architecture promises no more than that it has when the
/// sync behind it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TakesEffect {
    /// When a sync completes it. Catches who reuses memory before that.
    #[default]
    AtSync,
    /// When it is written, and not again by the sync. Catches who changes the tables after it.
    AtOnce,
}

/// Says what reads of registers return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Reads {
    /// The registers.
    #[default]
    Registers,
    /// Ones, as from a bus on which nothing answers.
    Ones,
    /// Random bits.
    Random,
}

/// Says what an [`Smmu`](super::Smmu) does, to be changed at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Behaviour {
    /// When a sync completes. After one poll by default.
    pub sync: SyncCompletion,
    /// When an invalidation takes effect.
    pub invalidations: TakesEffect,
    /// What reads return.
    pub reads: Reads,
    /// How many more times a fault that is cleared comes back at once, with another address.
    pub storm: u64,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            sync: SyncCompletion::AfterPolls(1),
            invalidations: TakesEffect::AtSync,
            reads: Reads::Registers,
            storm: 0,
        }
    }
}

/// Says what registers hold after a reset whose reset values the architecture leaves UNKNOWN: all
/// but SMMU_sCR0 and the identification registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ResetValues {
    /// Zeros.
    #[default]
    Zero,
    /// Random bits of this seed.
    Random(u64),
}

/// Says how many commands of each kind were accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Commands {
    /// SMMU_CBn_TLBIVA.
    pub by_va: u64,
    /// SMMU_CBn_TLBIVAA.
    pub by_va_all_asids: u64,
    /// SMMU_CBn_TLBIVAL.
    pub by_va_last: u64,
    /// SMMU_CBn_TLBIVAAL.
    pub by_va_all_asids_last: u64,
    /// SMMU_CBn_TLBIASID.
    pub by_asid: u64,
    /// SMMU_CBn_TLBIALL.
    pub all_of_bank: u64,
    /// SMMU_CBn_TLBIIPAS2.
    pub by_ipa: u64,
    /// SMMU_CBn_TLBIIPAS2L.
    pub by_ipa_last: u64,
    /// SMMU_TLBIVMID.
    pub by_vmid: u64,
    /// SMMU_TLBIALLNSNH.
    pub all: u64,
    /// SMMU_TLBIALLH.
    pub all_hyp: u64,
}

impl Commands {
    /// All of them.
    pub fn total(&self) -> u64 {
        let by_address = self.by_va + self.by_va_all_asids + self.by_ipa;
        let last = self.by_va_last + self.by_va_all_asids_last + self.by_ipa_last;
        let of_space = self.by_asid + self.all_of_bank + self.by_vmid;
        by_address + last + of_space + self.all + self.all_hyp
    }
}

/// Says what an [`Smmu`](super::Smmu) did so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SmmuCounters {
    /// Reads of what is no register that can be read, or with the wrong width.
    pub undefined_reads: u64,
    /// Writes of what is no register that can be written, or with the wrong width. They were
    /// ignored.
    pub undefined_writes: u64,
    /// Invalidations.
    pub commands: Commands,
    /// Writes of SMMU_CBn_TLBSYNC.
    pub bank_syncs: u64,
    /// Writes of SMMU_sTLBGSYNC.
    pub global_syncs: u64,
    /// Reads of SMMU_CBn_TLBSTATUS and SMMU_sTLBGSTATUS.
    pub status_reads: u64,
    /// Transactions that passed without a translation.
    pub bypassed: u64,
    /// Translations by a cached leaf, one for each stage.
    pub hits: u64,
    /// Translations by a walk, one for each stage.
    pub walks: u64,
    /// Walks that began at a cached table.
    pub walks_from_link: u64,
    /// Transactions to a context whose registers describe no tables, or a context that is not
    /// implemented.
    pub misconfigured: u64,
    /// Faults recorded in SMMU_sGFSR, as MULTI where one was there.
    pub global_faults: u64,
    /// Faults recorded in SMMU_CBn_FSR, as MULTI where one was there.
    pub context_faults: u64,
    /// Transactions refused because a fault of their context was outstanding.
    pub behind_fault: u64,
}
