//! The core's page tables, in every format that an SMMUv2 has, walked by its model with the
//! registers that the formats ask for.
//!
//! The driver here does the least that is right: everything of the bank goes with each
//! invalidation.

use std::sync::Arc;

use dmaspan::io_pgtable::{
    Arena, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmLpaeS2Config,
    ArmV7s, ArmV7sConfig, Format, Half, PageTable,
};
use dmaspan::iommu::{Domain, HardwareError, Invalidation, IommuOps};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_sim::smmu_v2::{Behaviour, Smmu, SmmuConfig, SyncCompletion, Why};
use dmaspan_sim::walker::{Access, FaultKind};

const STREAM: u16 = 3;
const BANK: u64 = 2;
const ASID: u64 = 0x21;
const VMID: u32 = 7;
/// Bank 2 behind the 16 pages of the global space.
const BANK_AT: u64 = 0x1_2000;

/// What a format wants to be in the registers of its bank.
#[derive(Clone, Copy, Default)]
struct Wanted {
    /// TYPE of SMMU_CBAR2.
    kind: u32,
    va64: u32,
    tcr: u32,
    tcr2: u32,
    ttbr: [u64; 2],
    contextidr: u32,
    mair: [u32; 2],
}

fn program(smmu: &Smmu<Arena>, wanted: &Wanted) {
    smmu.write32(0x1000 + BANK * 4, wanted.kind << 16 | VMID);
    smmu.write32(0x1800 + BANK * 4, wanted.va64);
    smmu.write32(BANK_AT + 0x30, wanted.tcr);
    smmu.write64(BANK_AT + 0x20, wanted.ttbr[0]);
    if wanted.kind == 1 {
        smmu.write32(BANK_AT + 0x10, wanted.tcr2);
        smmu.write64(BANK_AT + 0x28, wanted.ttbr[1]);
        smmu.write32(BANK_AT + 0x34, wanted.contextidr);
        smmu.write32(BANK_AT + 0x38, wanted.mair[0]);
        smmu.write32(BANK_AT + 0x3c, wanted.mair[1]);
    }
    // CFIE, CFRE, AFE, TRE and M.
    smmu.write32(BANK_AT, 0x67);
    smmu.write32(0xc00, 2);
    smmu.write32(0x800, 1 << 31 | u32::from(STREAM));
    // USFCFG, GFIE and GFRE.
    smmu.write32(0, 1 << 10 | 1 << 2 | 1 << 1);
}

struct Driver {
    smmu: Arc<Smmu<Arena>>,
}

#[expect(unsafe_code, reason = "the trait is a promise about hardware, kept as said below")]
// SAFETY: `Ok` is returned after everything of the VMID was invalidated and the global sync, which
// waits for accesses in flight, has completed.
unsafe impl IommuOps for Driver {
    type Address = PhysAddr;

    fn invalidate(&self, _what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.smmu.write32(0x64, VMID);
        self.smmu.write32(0x70, 0);
        match (0..100).any(|_| self.smmu.read32(0x74) & 1 == 0) {
            true => Ok(()),
            false => Err(HardwareError { what: "the sync did not complete", status: 1 }),
        }
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.smmu.write32(0x800, 0);
        self.smmu.write32(0x64, VMID);
        self.smmu.write32(0x70, 0);
        let _ = (0..100).any(|_| self.smmu.read32(0x74) & 1 == 0);
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        1
    }
}

type Rig<F> = (Arc<Smmu<Arena>>, Domain<F, Arena, Driver>);

fn rig<F: Format>(format: F, wanted: impl Fn(&F, PhysAddr) -> Wanted) -> Rig<F>
where
    Arena: dmaspan::io_pgtable::TableMemory<F::Word>,
{
    let arena = Arena::new(PhysAddr::new(0x4000_0000), 8 << 20);
    let table = PageTable::new(format, arena.clone()).unwrap();
    let wanted = wanted(table.format(), table.root());
    let smmu = Arc::new(Smmu::new(SmmuConfig::default(), arena).unwrap());
    program(&smmu, &wanted);
    let domain = Domain::new(table, Driver { smmu: Arc::clone(&smmu) }).unwrap();
    (smmu, domain)
}

fn access(smmu: &Smmu<Arena>, iova: u64, access: Access) -> Result<u64, FaultKind> {
    let outcome = smmu.access(STREAM, Iova::new(iova), access);
    // FSR, so that the next access is looked at.
    smmu.write32(BANK_AT + 0x58, u32::MAX);
    outcome.map(|hit| hit.paddr.get()).map_err(|refused| match refused.why {
        Why::Context { bank: 2, fault } => fault.kind,
        why => panic!("{why:?}"),
    })
}

/// Maps `len` bytes to be read and as many to be read only behind them, tries them, and unmaps.
fn translates<F: Format>((smmu, domain): &Rig<F>, iova: u64, len: u64)
where
    Arena: dmaspan::io_pgtable::TableMemory<F::Word>,
{
    let (writable, read_only) = (0x8000_0000, 0x9000_0000);
    for (at, to, prot) in [(iova, writable, Prot::READ_WRITE), (iova + len, read_only, Prot::READ)]
    {
        let span = Span::new(PhysAddr::new(to), len).unwrap();
        #[expect(unsafe_code, reason = "maps memory that there is none of")]
        // SAFETY: the addresses are made up, and one thread maps.
        unsafe { domain.map_spans(Iova::new(at), &[span], prot) }.unwrap();
    }
    let bus = |iova: u64| iova & ((1 << 49) - 1);
    for offset in [0, len / 2, len - 1] {
        assert_eq!(access(smmu, bus(iova + offset), Access::Write), Ok(writable + offset));
        let behind = bus(iova + len + offset);
        assert_eq!(access(smmu, behind, Access::Read), Ok(read_only + offset));
        assert_eq!(access(smmu, behind, Access::Write), Err(FaultKind::Permission));
    }
    let unmapped = bus(iova.wrapping_sub(1));
    assert_eq!(access(smmu, unmapped, Access::Read), Err(FaultKind::Translation));

    let mut room = [Span::new(PhysAddr::new(0), 1).unwrap(); 8];
    let mut buf = SpanBuf::new(&mut room);
    let range = IovaRange::from_len(Iova::new(iova), 2 * len).unwrap();
    #[expect(unsafe_code, reason = "unmaps memory that there is none of")]
    // SAFETY: one thread unmaps.
    let unsynced = unsafe { domain.unmap(range, &mut buf) }.unwrap();
    // Not yet forgotten.
    assert_eq!(access(smmu, bus(iova), Access::Read), Ok(writable));
    let _synced = unsynced.sync().unwrap();
    for at in [iova, iova + len, iova + 2 * len - 1] {
        assert_eq!(access(smmu, bus(at), Access::Read), Err(FaultKind::Translation));
    }
    assert_eq!((smmu.cached_leaves(), smmu.pending_invalidations()), (0, 0));
    let counters = smmu.counters();
    assert_eq!((counters.misconfigured, counters.global_faults), (0, 0));
    assert_eq!((counters.undefined_reads, counters.undefined_writes), (0, 0));
}

/// The lower and the upper half of a register.
fn halves(word: u64) -> [u32; 2] {
    [word & 0xffff_ffff, word >> 32].map(|half| u32::try_from(half).unwrap())
}

fn stage1<const G: u32>(half: Half) -> Rig<ArmLpaeS1<G>> {
    let config = ArmLpaeS1Config { half, ..ArmLpaeS1Config::new(48, 48) };
    rig(ArmLpaeS1::<G>::new(config).unwrap(), |format, root| {
        let registers = format.registers(root);
        let [tcr, tcr_high] = halves(registers.tcr);
        let with_asid = ASID << 48 | registers.ttbr;
        let (a1, ttbr) = match half {
            Half::Lower => (0, [with_asid, 0]),
            Half::Upper => (1 << 22, [0, with_asid]),
        };
        // SEP 0b111 and AS; the upper half of TCR is IPS.
        let tcr2 = 7 << 15 | 1 << 4 | tcr_high;
        let mair = halves(registers.mair);
        Wanted { kind: 1, va64: 1, tcr: tcr | a1, tcr2, ttbr, mair, ..Default::default() }
    })
}

fn stage2<const G: u32>() -> Rig<ArmLpaeS2<G>> {
    rig(ArmLpaeS2::<G>::new(ArmLpaeS2Config::new(42, 44)).unwrap(), |format, root| {
        let registers = format.registers(root);
        let [vtcr, _] = halves(registers.vtcr);
        Wanted { va64: 1, tcr: vtcr, ttbr: [registers.vttbr, 0], ..Default::default() }
    })
}

#[test]
fn stage_1_of_every_granule_translates() {
    for iova in [0x10_0000, 0x7f_4000_0000] {
        translates(&stage1::<12>(Half::Lower), iova, 0x3000);
        translates(&stage1::<12>(Half::Lower), iova << 9, 4 << 20);
        translates(&stage1::<14>(Half::Lower), iova << 4, 0x8000);
        translates(&stage1::<14>(Half::Lower), iova << 8, 64 << 20);
        translates(&stage1::<16>(Half::Lower), iova << 4, 0x3_0000);
    }
}

#[test]
fn stage_1_of_the_upper_half_translates() {
    let at = 0xffff_8000_4000_0000;
    translates(&stage1::<12>(Half::Upper), at, 0x3000);
    translates(&stage1::<14>(Half::Upper), at, 0x8000);
    translates(&stage1::<16>(Half::Upper), at, 0x3_0000);
}

#[test]
fn stage_2_of_every_granule_translates() {
    for iova in [0x10_0000, 0xf_4000_0000] {
        translates(&stage2::<12>(), iova, 0x3000);
        translates(&stage2::<12>(), iova << 2, 0x3000);
        translates(&stage2::<14>(), iova, 0x8000);
        translates(&stage2::<16>(), iova, 0x3_0000);
    }
}

#[test]
fn long_descriptors_of_aarch32_translate() {
    let first = ArmLpae32S1::new(ArmLpaeS1Config::new(32, 40));
    let wanted = |format: &ArmLpae32S1, root| {
        let registers = format.registers(root);
        let mair = [registers.mair0, registers.mair1];
        let ttbr = [ASID << 48 | registers.ttbr0, 0];
        Wanted { kind: 1, tcr: registers.ttbcr, ttbr, mair, ..Default::default() }
    };
    translates(&rig(first.unwrap(), wanted), 0xfff0_0000, 0x3000);
    let second = ArmLpae32S2::new(ArmLpaeS2Config::new(40, 40));
    let wanted = |format: &ArmLpae32S2, root| {
        let registers = format.registers(root);
        Wanted { tcr: registers.vtcr, ttbr: [registers.vttbr, 0], ..Default::default() }
    };
    translates(&rig(second.unwrap(), wanted), 0xff_fff0_0000, 0x3000);
}

#[test]
fn short_descriptors_translate() {
    for (iova, len) in [(0x8_0000, 0x3000), (0x1000_0000, 3 << 20)] {
        let format = ArmV7s::new(ArmV7sConfig::new(32, 32)).unwrap();
        let rig = rig(format, |format, root| {
            let registers = format.registers(root);
            Wanted {
                kind: 1,
                tcr: registers.tcr,
                ttbr: [registers.ttbr.into(), 0],
                contextidr: 0x21,
                mair: [registers.prrr, registers.nmrr],
                ..Default::default()
            }
        });
        translates(&rig, iova, len);
    }
}

#[test]
fn a_sync_that_never_completes_is_an_error_and_the_entry_stays() {
    let (smmu, domain) = stage1::<12>(Half::Lower);
    let span = Span::new(PhysAddr::new(0x8000_0000), 0x1000).unwrap();
    #[expect(unsafe_code, reason = "maps memory that there is none of")]
    // SAFETY: the addresses are made up, and one thread maps.
    unsafe { domain.map_spans(Iova::new(0), &[span], Prot::READ) }.unwrap();
    assert_eq!(access(&smmu, 0, Access::Read), Ok(0x8000_0000));
    smmu.set_behaviour(Behaviour { sync: SyncCompletion::Never, ..Default::default() });
    let mut room = [span; 1];
    let range = IovaRange::from_len(Iova::new(0), 0x1000).unwrap();
    let mut buf = SpanBuf::new(&mut room);
    #[expect(unsafe_code, reason = "unmaps memory that there is none of")]
    // SAFETY: one thread unmaps.
    let failed = unsafe { domain.unmap(range, &mut buf) }.unwrap().sync().unwrap_err();
    assert_eq!(access(&smmu, 0, Access::Read), Ok(0x8000_0000));
    smmu.set_behaviour(Behaviour::default());
    #[expect(unsafe_code, reason = "the gather is this domain's")]
    // SAFETY: it comes from the unmap above.
    let _synced = unsafe { domain.sync(failed.gather) }.unwrap();
    assert_eq!(access(&smmu, 0, Access::Read), Err(FaultKind::Translation));
}
