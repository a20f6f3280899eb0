//! A stream takes only domains that the hardware can walk.

use std::sync::Arc;

use dmaspan::container::{Attach, Error, Interrupts};
use dmaspan::io_pgtable::{
    Arena, DirtyTracking, ExecuteDisable, PageTable, SnoopControl, VtdSs, VtdSsConfig, X86_64,
    X86_64Config,
};
use dmaspan::iommu::{Attachment, Domain, Port as _, RegionKind, ReservedRegions};
use dmaspan::{Account, Coherency, Container, Errno, Iova, IovaRange, PhysAddr, Prot, UserAddr};
use dmaspan_drivers::vtd::{Mode, Stage, VtdFormat, VtdOps, VtdStream};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::fake::{Fake, Iommu, domain, start};
use crate::host::FakeHost;
use crate::liar::{self, Liar};

type Tables<F> = Domain<F, Arena, VtdOps<Fake, FakeHost>>;

fn with(cap: u64, ecap: u64, mode: Mode) -> Arc<Iommu> {
    let fake = Fake::new();
    fake.state().cap &= !cap;
    fake.state().ecap &= !ecap;
    start(&fake, mode).expect("it starts")
}

/// Why a stream of `iommu` cannot have tables of this format.
fn refusal<F: VtdFormat<Word = u64>>(
    iommu: &Arc<Iommu>,
    format: F,
    stage: Stage,
) -> Option<&'static str> {
    let arena = Arena::new(PhysAddr::new(0x1_0000_0000), 1 << 20);
    let table = PageTable::new(format, arena).expect("there is room");
    let ops = iommu.ops(stage).expect("there is a number");
    let domain = Domain::new(table, ops).expect("it is empty");
    let port: VtdStream<Tables<F>, _, _> =
        iommu.stream(8, ReservedRegions::new()).expect("nobody has it");
    let refused = port.accepts(&domain).err().map(|refused| refused.what);
    assert_eq!(port.translate(&domain).is_ok(), refused.is_none());
    port.block().expect("it answers");
    refused
}

fn second(iommu: &Arc<Iommu>, config: VtdSsConfig) -> Option<&'static str> {
    refusal(iommu, VtdSs::new(config).expect("there is such a table"), Stage::Second)
}

fn first(iommu: &Arc<Iommu>, config: X86_64Config) -> Option<&'static str> {
    refusal(iommu, X86_64::new(config).expect("there is such a table"), Stage::First)
}

#[test]
fn second_stage_tables_that_the_hardware_does_not_walk_are_refused() {
    let all = with(0, 0, Mode::Scalable);
    let config = all.second_stage_config().expect("it has one");
    for input_bits in [39, 48, 57] {
        assert_eq!(second(&all, VtdSsConfig { input_bits, ..config }), None);
    }
    for walks in [Coherency::Coherent, Coherency::NonCoherent] {
        assert_eq!(second(&all, VtdSsConfig { walks, ..config }), None);
    }
    let wide = VtdSsConfig { output_bits: 40, ..config };
    assert_eq!(second(&all, wide), Some("its physical addresses have more bits than the IOMMU's"));
    let marks = VtdSsConfig { dirty: DirtyTracking::Hardware, ..config };
    assert_eq!(second(&all, marks), Some("the IOMMU sets no dirty bits"));

    for (levels, bit) in [(39, 9), (48, 10), (57, 11)] {
        let lacks = with(1 << bit, 0, Mode::Legacy);
        let config = VtdSsConfig { input_bits: levels, ..config };
        assert_eq!(second(&lacks, config), Some("the IOMMU walks no tables of so many levels"));
    }
    for bit in [34, 35] {
        let lacks = with(1 << bit, 0, Mode::Legacy);
        let refused = second(&lacks, VtdSsConfig { page_sizes: None, ..config });
        assert_eq!(refused, Some("the IOMMU does not have leaves of all these sizes"));
        assert_eq!(second(&lacks, lacks.second_stage_config().expect("it has one")), None);
    }
    let no_snoops = with(0, 1 << 7, Mode::Legacy);
    for snoop in [SnoopControl::Cached, SnoopControl::Forced] {
        let refused = second(&no_snoops, VtdSsConfig { snoop, ..config });
        assert_eq!(refused, Some("the IOMMU has no snoop control"));
    }
    assert_eq!(second(&no_snoops, no_snoops.second_stage_config().expect("it has one")), None);
    // C of legacy mode and SMPWC of scalable mode: the arena's tables are in the CPU's caches.
    for (mode, bit) in [(Mode::Legacy, 0), (Mode::Scalable, 48)] {
        let refused = second(&with(0, 1 << bit, mode), config);
        assert_eq!(
            refused,
            Some("its tables are in the CPU's caches, which the IOMMU does not see")
        );
    }
}

#[test]
fn first_stage_tables_that_the_hardware_does_not_walk_are_refused() {
    let all = with(0, 0, Mode::Scalable);
    let config = all.first_stage_config().expect("it has one");
    assert_eq!(first(&all, config), None);
    let five = X86_64Config { input_bits: 57, ..config };
    assert_eq!(first(&all, five), Some("the IOMMU walks no tables of so many levels"));
    let fetches = X86_64Config { execute_disable: ExecuteDisable::Enabled, ..config };
    assert_eq!(first(&all, fetches), Some("the IOMMU does not tell instruction fetches apart"));
    // The hardware would take the bit for one of the address.
    let encrypts = X86_64Config { encryption_bit: Some(45), ..config };
    assert_eq!(first(&all, encrypts), Some("the IOMMU has no encryption bit"));
    let no_gigabytes = with(1 << 56, 0, Mode::Scalable);
    let refused = first(&no_gigabytes, X86_64Config { page_sizes: None, ..config });
    assert_eq!(refused, Some("the IOMMU does not have leaves of all these sizes"));
    assert_eq!(first(&no_gigabytes, no_gigabytes.first_stage_config().expect("it has one")), None);
    assert!(with(0, 0, Mode::Legacy).ops(Stage::First).is_err());
    assert!(with(0, 1 << 47, Mode::Scalable).ops(Stage::First).is_err());
    assert!(with(0, 1 << 46, Mode::Scalable).ops(Stage::Second).is_err());
}

#[test]
fn hooks_of_another_stage_or_another_iommu_are_refused() {
    let [one, other] = [0, 1].map(|_| with(0, 0, Mode::Scalable));
    let format = VtdSs::new(one.second_stage_config().expect("it has one")).expect("it fits");
    let refused = refusal(&one, format, Stage::First);
    assert_eq!(refused, Some("its hooks and its tables are of different stages"));
    let foreign = domain(&other).expect("there is a number");
    let port: VtdStream<crate::fake::Tables, _, _> =
        one.stream(8, ReservedRegions::new()).expect("nobody has it");
    let refused = port.accepts(&foreign).expect_err("it is refused");
    assert_eq!(refused.what, "it belongs to another IOMMU");
    assert!(port.translate(&foreign).is_err());
}

#[test]
fn a_domain_that_lies_is_attached_as_the_one_that_fits_or_refused() {
    for mode in [Mode::Legacy, Mode::Scalable] {
        let [fake, other] = [0, 1].map(|_| Fake::new());
        let [iommu, another] = [&fake, &other].map(|fake| start(fake, mode).expect("it starts"));
        let domain_at = |iommu: &Arc<Iommu>, base| {
            let config = iommu.second_stage_config().expect("it has one");
            let table =
                PageTable::new(VtdSs::new(config).expect("it fits"), Arena::new(base, 4096));
            let ops = iommu.ops(Stage::Second).expect("there is a number");
            Arc::new(Domain::new(table.expect("there is room"), ops).expect("it is empty"))
        };
        let ours = domain_at(&iommu, PhysAddr::new(0x1_0000_0000));
        let theirs = domain_at(&another, PhysAddr::new(0x2_0000_0000));
        let port: VtdStream<Liar<_, _, _>, _, _> =
            iommu.stream(8, ReservedRegions::new()).expect("nobody has it");
        let stream = Attachment::new(port).expect("it is blocked");
        let tables = theirs.root().get() >> 12;
        liar::attach(&stream, [&ours, &theirs], || fake.reaches(8, mode) == Some(tables));
    }
}

#[test]
fn nothing_is_mapped_where_writes_of_devices_are_interrupts() {
    let iommu = with(0, 0, Mode::Legacy);
    let port: VtdStream<crate::fake::Tables, _, _> =
        iommu.stream(8, ReservedRegions::new()).expect("nobody has it");
    let [region] = port.reserved_regions().as_slice() else { panic!("one region") };
    let (start, last) = (Iova::new(0xfee0_0000), Iova::new(0xfeef_ffff));
    assert_eq!(
        (region.range, region.kind),
        (IovaRange::new(start, last).unwrap(), RegionKind::Msi)
    );

    let memory = SimMemory::new(PhysAddr::new(0), 1 << 20, 12).expect("a memory");
    let memory = Arc::new(memory);
    let frames = memory.allocate(0x1000, 12).expect("there is room");
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let user = space.map(UserAddr::new(0x1_0000), &[frames]).expect("there is room");
    let container: Container<_, parking_lot::RawMutex> =
        Container::new(SimPinner::new(memory), Account::new(1 << 20));
    let attach = || {
        let domain = Arc::into_inner(domain(&iommu).expect("there is a number"));
        let how = Attach::new(Interrupts::Isolated).regions(port.reserved_regions().clone());
        container.attach(domain.expect("nobody else has it"), how)
    };
    // Before there is a domain, and then with it.
    for first in [0xfee0_0000, 0xfeef_f000].map(Iova::new) {
        container.map(&space, user, first, Prot::READ_WRITE).expect("nothing is known yet");
        let refused = attach().expect_err("it is mapped there");
        assert!(matches!(refused, Error::MappedReserved { .. }), "{refused}");
        container.unmap_all().expect("it is idle");
    }
    attach().expect("nothing is mapped");
    for inside in [0xfee0_0000, 0xfee8_0000, 0xfeef_f000].map(Iova::new) {
        let refused = container.map(&space, user, inside, Prot::READ_WRITE);
        let refused = refused.expect_err("it is reserved");
        assert_eq!(refused.errno(|_| Errno::EFAULT), Errno::EINVAL);
    }
    for beside in [0xfedf_f000, 0xfef0_0000].map(Iova::new) {
        container.map(&space, user, beside, Prot::READ_WRITE).expect("it is free");
    }
}
