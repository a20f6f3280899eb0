//! A transaction goes through this: stream mapping, the stages, faults.

use std::cell::Cell;

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};

use super::bank::{AnyWalker, BankType};
use super::behaviour::SmmuCounters;
use super::refused::{GlobalFault, RefusedTransaction, Response, Why};
use super::spec::{cr0, fsr, gfsr, sctlr};
use super::stall::Transaction;
use super::state::{Route, State};
use super::tlb::{Space, Tag, Tlb};
use crate::iotlb::Hit;
use crate::iotlb::leaves::CachedLeaf;
use crate::walker::arm_lpae::AccessPrivilege;
use crate::walker::{Access, Fault, FaultKind, NotATable, TableWords, WalkPath, block_around};

/// The answer of one stage, or of both.
#[derive(Clone, Copy, Debug)]
struct Output {
    paddr: u64,
    /// log2 of the block around the address that the answer is for.
    lg2: u32,
    prot: Prot,
}

impl Output {
    /// No translation: everything up to the top.
    fn identity(at: Iova) -> Self {
        Self { paddr: at.get(), lg2: 64, prot: Prot::READ_WRITE }
    }
}

/// A fault of a translation, before it is recorded.
#[derive(Clone, Copy, Debug)]
enum Failed {
    Global { fault: GlobalFault, nested: u32 },
    Context(ContextFault),
}

#[derive(Clone, Copy, Debug)]
struct ContextFault {
    bank: usize,
    fault: Fault,
    /// What SMMU_CBn_FAR gets.
    far: Iova,
    /// Of a nested context: the bank of stage 1.
    stage1_bank: usize,
    /// FSYNR0.S1PTWF, where stage 2 translated the address of a table of stage 1.
    walk: u32,
}

/// Whether a fault that is outstanding keeps a transaction from being processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    /// It does, unless HUPCF is 1.
    Waits,
    /// It does not: the transaction is the one that SMMU_CBn_RESUME retries.
    Retried,
}

/// Tables of stage 1, whose addresses stage 2 translates. Nothing of that is cached.
struct ThroughStage2<'a> {
    tables: &'a dyn TableWords,
    walker: Option<&'a AnyWalker>,
    fault: Cell<Option<Fault>>,
}

impl ThroughStage2<'_> {
    fn at(&self, ipa: PhysAddr) -> Result<PhysAddr, NotATable> {
        let Some(walker) = self.walker else { return Ok(ipa) };
        let walked = walker.as_dyn().walk(self.tables, Iova::new(ipa.get()), Access::Read);
        walked.map(|leaf| leaf.paddr).map_err(|fault| {
            self.fault.set(Some(fault));
            NotATable::Outside { paddr: ipa }
        })
    }
}

impl TableWords for ThroughStage2<'_> {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        self.tables.read_u64(self.at(paddr)?)
    }

    fn read_u32(&self, paddr: PhysAddr) -> Result<u32, NotATable> {
        self.tables.read_u32(self.at(paddr)?)
    }
}

/// One stage of a translation: from the TLB, or by a walk of which everything is kept.
fn stage(
    (tlb, counters): (&mut Tlb, &mut SmmuCounters),
    walker: &AnyWalker,
    tag: Tag,
    tables: &dyn TableWords,
    at: Iova,
    access: Access,
) -> Result<Output, Fault> {
    let (block_lg2, leaf) = if let Some(cached) = tlb.leaf(tag, at) {
        counters.hits += 1;
        cached
    } else {
        counters.walks += 1;
        let from = match tlb.link(tag, at) {
            Some(link) => {
                counters.walks_from_link += 1;
                link
            }
            None => walker.as_dyn().root(at, access)?,
        };
        let mut path = WalkPath::new();
        let walked = walker.as_dyn().walk_from(tables, from, at, access, &mut path);
        tlb.keep_path(tag, from, &path);
        let found = walked?;
        let leaf = CachedLeaf {
            paddr: lg2::align_down(found.paddr.get(), found.group_lg2),
            prot: found.prot,
            level: found.level,
            clean: false,
            entry_lg2: walker.entry_lg2(&found),
        };
        let space = if walker.is_global(&found) { Space::Global } else { tag.space };
        tlb.keep_leaf(Tag { space, ..tag }, at, found.group_lg2, leaf);
        (found.group_lg2, leaf)
    };
    if !walker.as_dyn().permits(leaf.prot, access) {
        let kind = FaultKind::Permission;
        return Err(Fault { kind, level: leaf.level, iova: at, access });
    }
    let paddr = leaf.paddr | (at.get() & lg2::mask(block_lg2));
    Ok(Output { paddr, lg2: block_lg2, prot: leaf.prot })
}

impl State {
    /// Translates a transaction, or refuses it and records why (IHI 0062, "Transaction
    /// processing").
    pub(super) fn transact(
        &mut self,
        tables: &dyn TableWords,
        transaction: Transaction,
        behind: Behind,
    ) -> Result<Hit, RefusedTransaction> {
        if self.cr0 & cr0::CLIENTPD != 0 {
            return Ok(self.bypass(transaction.iova));
        }
        let (bank, privilege) = match self.route(transaction.stream) {
            Ok(Route::Bypass) => return Ok(self.bypass(transaction.iova)),
            Ok(Route::Bank(bank, privilege)) => (bank, privilege),
            Err(fault) => return Err(self.refuse_global(transaction, fault, 0)),
        };
        let registers = &self.banks[bank];
        let outstanding = registers.fsr & (fsr::FAULTS | fsr::SS) != 0;
        if outstanding && registers.sctlr & sctlr::HUPCF == 0 && behind == Behind::Waits {
            self.counters.behind_fault += 1;
            return Err(self.refuse(transaction, bank, Why::Outstanding { bank }));
        }
        let output = match self.context(tables, bank, transaction, privilege) {
            Ok(output) => output,
            Err(Failed::Global { fault, nested }) => {
                return Err(self.refuse_global(transaction, fault, nested));
            }
            Err(Failed::Context(failed)) => {
                self.record_context(transaction, privilege, &failed);
                let why = Why::Context { bank: failed.bank, fault: failed.fault };
                return Err(self.refuse(transaction, failed.bank, why));
            }
        };
        let block = match output.lg2 {
            64 => to_the_top(transaction.iova),
            block_lg2 => block_around(transaction.iova, block_lg2),
        };
        Ok(Hit { paddr: PhysAddr::new(output.paddr), block, prot: output.prot })
    }

    fn bypass(&mut self, iova: Iova) -> Hit {
        self.counters.bypassed += 1;
        let paddr = PhysAddr::new(iova.get());
        Hit { paddr, block: to_the_top(iova), prot: Prot::READ_WRITE }
    }

    /// What the contexts of a bank make of a transaction, by SMMU_CBARn.TYPE.
    fn context(
        &mut self,
        tables: &dyn TableWords,
        bank: usize,
        transaction: Transaction,
        privilege: AccessPrivilege,
    ) -> Result<Output, Failed> {
        let kind = self.banks[bank].kind();
        if !self.has_stages(kind) {
            self.counters.misconfigured += 1;
            return Err(Failed::Global { fault: GlobalFault::InvalidContext, nested: 0 });
        }
        let va = self.banks[bank].extended(transaction.iova, self.config.upstream_bits);
        let access = transaction.access;
        match kind {
            BankType::Two => self.stage2(tables, bank, bank, va, va, access),
            BankType::OneBypass | BankType::OneFault => {
                let through = ThroughStage2 { tables, walker: None, fault: Cell::new(None) };
                let output = self.stage1(&through, bank, bank, va, access, privilege)?;
                if kind == BankType::OneBypass {
                    return Ok(output);
                }
                let nested = gfsr::SYNR0_NESTED;
                Err(Failed::Global { fault: GlobalFault::InvalidContext, nested })
            }
            BankType::Nested => {
                let second = self.banks[bank].stage2_bank();
                let invalid = match self.banks.get(second).map(|bank| bank.kind()) {
                    None => Some(GlobalFault::UnimplementedContextBank),
                    Some(BankType::Two) => None,
                    Some(_) => Some(GlobalFault::InvalidContext),
                };
                if let Some(fault) = invalid {
                    return Err(Failed::Global { fault, nested: gfsr::SYNR0_NESTED });
                }
                let enabled = self.banks[second].sctlr & sctlr::M != 0;
                let walker = self.banks[second].stage2(&self.config).filter(|_| enabled);
                let walker = walker.as_ref();
                let through = ThroughStage2 { tables, walker, fault: Cell::new(None) };
                let one = self.stage1(&through, bank, second, va, access, privilege)?;
                let ipa = Iova::new(one.paddr);
                let two = self.stage2(tables, second, bank, va, ipa, access)?;
                Ok(Output { lg2: one.lg2.min(two.lg2), ..two })
            }
        }
    }

    fn stage1(
        &mut self,
        through: &ThroughStage2<'_>,
        bank: usize,
        second: usize,
        va: Iova,
        access: Access,
        privilege: AccessPrivilege,
    ) -> Result<Output, Failed> {
        let registers = &self.banks[bank];
        if registers.sctlr & sctlr::M == 0 {
            return Ok(Output::identity(va));
        }
        let tag = Tag { vmid: self.vmid(bank), space: Space::One(registers.asid()) };
        let failed = |bank_of_fault, fault, walk| {
            let stage1_bank = if bank_of_fault == bank { 0 } else { bank };
            Failed::Context(ContextFault { bank: bank_of_fault, fault, far: va, stage1_bank, walk })
        };
        let Some(walker) = registers.stage1(&self.config, va, privilege) else {
            return Err(failed(bank, self.misconfigured(va, access), 0));
        };
        let caches = (&mut self.tlb, &mut self.counters);
        stage(caches, &walker, tag, through, va, access).map_err(|fault| {
            match through.fault.take() {
                Some(of_table) => failed(second, of_table, fsr::SYNR0_S1PTWF),
                None => failed(bank, fault, 0),
            }
        })
    }

    fn stage2(
        &mut self,
        tables: &dyn TableWords,
        bank: usize,
        first: usize,
        far: Iova,
        ipa: Iova,
        access: Access,
    ) -> Result<Output, Failed> {
        let registers = &self.banks[bank];
        if registers.sctlr & sctlr::M == 0 {
            return Ok(Output::identity(ipa));
        }
        let stage1_bank = if first == bank { 0 } else { first };
        let failed =
            |fault| Failed::Context(ContextFault { bank, fault, far, stage1_bank, walk: 0 });
        let tag = Tag { vmid: self.vmid(bank), space: Space::Two };
        let Some(walker) = registers.stage2(&self.config) else {
            return Err(failed(self.misconfigured(ipa, access)));
        };
        let caches = (&mut self.tlb, &mut self.counters);
        stage(caches, &walker, tag, tables, ipa, access).map_err(failed)
    }

    /// The fault where registers describe no tables.
    fn misconfigured(&mut self, iova: Iova, access: Access) -> Fault {
        self.counters.misconfigured += 1;
        Fault { kind: FaultKind::Translation, level: 0, iova, access }
    }

    /// Records a context fault (IHI 0062, "SMMU_CBn_FSR, Fault Status Register"). One that finds
    /// another is only MULTI.
    fn record_context(
        &mut self,
        transaction: Transaction,
        privilege: AccessPrivilege,
        failed: &ContextFault,
    ) {
        self.counters.context_faults += 1;
        let registers = &mut self.banks[failed.bank];
        if registers.fsr & fsr::FAULTS != 0 {
            registers.fsr |= fsr::MULTI;
            return;
        }
        let fault = failed.fault;
        let (bit, walk) = match fault.kind {
            FaultKind::Translation | FaultKind::Reserved => (fsr::TF, 0),
            FaultKind::AccessFlag => (fsr::AFF, 0),
            FaultKind::Permission => (fsr::PF, 0),
            FaultKind::AddressSize => (fsr::ASF, 0),
            FaultKind::ExternalAbort(_) => (fsr::EF, fsr::SYNR0_PTWF),
        };
        registers.fsr = registers.fsr & fsr::SS | bit | registers.format();
        registers.far = failed.far.get();
        let wnr = match transaction.access {
            Access::Read => 0,
            Access::Write => fsr::SYNR0_WNR,
        };
        let pnu = match privilege {
            AccessPrivilege::Unprivileged => 0,
            AccessPrivilege::Privileged => fsr::SYNR0_PNU,
        };
        let stage1_bank = u32::try_from(failed.stage1_bank).unwrap_or_default() << 16;
        let level = u32::from(fault.level);
        registers.fsynr0 = stage1_bank | walk | failed.walk | wnr | pnu | level;
        registers.frsynra = transaction.stream.into();
        if registers.kind() == BankType::Two {
            registers.ipafar = lg2::align_down(fault.iova.get(), 12);
        }
    }

    /// What a device gets from a bank that refuses: an abort or nothing, or a stall.
    fn refuse(&mut self, transaction: Transaction, bank: usize, why: Why) -> RefusedTransaction {
        let stalls_allowed = self.cr0 & cr0::STALLD == 0;
        let registers = &mut self.banks[bank];
        let response = if registers.sctlr & sctlr::CFCFG != 0 && stalls_allowed {
            registers.fsr |= fsr::SS;
            Response::Stalled(registers.stalls.stall(bank, transaction))
        } else if registers.sctlr & sctlr::CFRE != 0 {
            Response::Aborted
        } else {
            Response::Ignored
        };
        refused(transaction, why, response)
    }

    /// Ends a stalled transaction.
    pub(super) fn terminated(&self, transaction: Transaction, bank: usize) -> RefusedTransaction {
        let reported = self.banks[bank].sctlr & sctlr::CFRE != 0;
        let response = if reported { Response::Aborted } else { Response::Ignored };
        refused(transaction, Why::Terminated { bank }, response)
    }

    fn refuse_global(
        &mut self,
        transaction: Transaction,
        fault: GlobalFault,
        nested: u32,
    ) -> RefusedTransaction {
        self.record_global(fault, transaction, nested);
        let reported = self.cr0 & cr0::GFRE != 0;
        let response = if reported { Response::Aborted } else { Response::Ignored };
        refused(transaction, Why::Global(fault), response)
    }
}

fn refused(transaction: Transaction, why: Why, response: Response) -> RefusedTransaction {
    let Transaction { stream, iova, access } = transaction;
    RefusedTransaction { stream, iova, access, why, response }
}

fn to_the_top(iova: Iova) -> IovaRange {
    IovaRange::new(iova, Iova::new(u64::MAX)).unwrap_or(IovaRange::point(iova))
}
