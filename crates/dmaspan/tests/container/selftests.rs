//! Cases of Linux's selftests of iommufd and of VFIO (tools/testing/selftests/iommu/iommufd.c and
//! vfio) that are about the container itself.

use std::sync::Arc;

use dmaspan::container::{Attach, Error, Interrupts};
use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, Arena, ArmLpaeS1, ArmLpaeS1Config, ArmV7s, ArmV7sConfig, Format, Half,
    PageTable, Riscv, RiscvConfig, RiscvMode, RiscvStage, TableMemory, VtdSs, VtdSsConfig, X86_64,
    X86_64Config,
};
use dmaspan::iommu::Domain;
use dmaspan::{
    Account, Container, DmaSpace as _, Errno, Iova, PhysAddr, Prot, Span, UserAddr, UserRange, lg2,
};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{Holes, MapOptions, Rights, SimMemory, SimPinner, SimSpace};
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::arm_v7s::{ArmV7sWalkRegisters, ArmV7sWalker, SCTLR_AFE, SCTLR_TRE};
use dmaspan_sim::walker::riscv::{self, RiscvWalker};
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use dmaspan_sim::walker::x86_64::{X86_64WalkRegisters, X86Walker};
use dmaspan_sim::walker::{Access, Requester, Switch, Walker};

use crate::common::{PROT, range};

const PAGE: u64 = 4096;
const USER: u64 = 0x7f00_0000_0000;
/// Below 4 GiB, so that every format can lead there.
const MEMORY: u64 = 1 << 30;

type Tried = Container<SimPinner, parking_lot::RawMutex>;
type Tlb<W> = Iotlb<W, Arena>;

struct World {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    account: Arc<Account>,
    container: Tried,
}

impl World {
    fn new() -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(MEMORY), 64 << 20, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let account = Account::new(u64::MAX);
        let container = Tried::new(SimPinner::new(Arc::clone(&memory)), Arc::clone(&account));
        Self { memory, space, account, container }
    }

    /// Pages that are no spans together.
    fn scattered(&self, at: u64, pages: u64) -> (UserRange, Vec<PhysAddr>) {
        let spans = self.memory.allocate_scattered(pages * PAGE, at).unwrap();
        let frames = spans.iter().flat_map(|span| frames(*span)).collect();
        (self.space.map(UserAddr::new(at), &spans).unwrap(), frames)
    }

    fn attach<F: Format, W: Walker + Send + Sync + 'static>(
        &self,
        format: F,
        walker: impl FnOnce(&F, PhysAddr, u32) -> W,
    ) -> (Tlb<W>, Arena)
    where
        Arena: TableMemory<F::Word>,
    {
        let tables = Arena::new(PhysAddr::new(0x1000_0000), 64 << 20);
        let table = PageTable::new(format, tables.clone()).unwrap();
        let (root, level) = table.root_and_level();
        let iotlb = Iotlb::new(walker(table.format(), root, level), tables.clone());
        let domain = Domain::new(table, iotlb.clone()).unwrap();
        self.container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
        (iotlb, tables)
    }

    /// Nothing is mapped, pinned or charged.
    fn assert_empty(&self) {
        assert_eq!((self.container.mappings(), self.container.census().total()), (0, 0));
        assert_eq!((self.memory.pinned_frames(), self.account.used()), (0, 0));
        assert_eq!(self.memory.violations(), []);
    }
}

fn frames(span: Span) -> impl Iterator<Item = PhysAddr> {
    (0..span.len()).step_by(4096).map(move |offset| span.paddr().wrapping_add(offset))
}

fn found<W: Walker>(iotlb: &Tlb<W>, iova: u64) -> Option<PhysAddr> {
    iotlb.walker().walk(iotlb.tables(), Iova::new(iova), Access::Read).ok().map(|leaf| leaf.paddr)
}

fn user(at: u64, pages: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(at), pages * PAGE).unwrap()
}

/// With all levels from the start: the hardware of these tests keeps the root that it has.
fn amd(bits: u32) -> AmdV1 {
    let first_levels = (bits - 12).div_ceil(9);
    AmdV1::new(AmdV1Config { first_levels, ..AmdV1Config::new(bits, 48) }).unwrap()
}

fn amd_walker(format: &AmdV1, root: PhysAddr, level: u32) -> AmdV1Walker {
    let dte = format.registers(root, level).dte;
    AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap()
}

fn arm_walker(format: &ArmLpaeS1<12>, root: PhysAddr, _level: u32) -> ArmLpaeS1Walker {
    ArmLpaeS1Walker::new(format.registers(root).into()).unwrap()
}

fn arm_v7s_walker(format: &ArmV7s, root: PhysAddr, _level: u32) -> ArmV7sWalker {
    let registers = format.registers(root);
    ArmV7sWalker::new(ArmV7sWalkRegisters {
        ttbr: registers.ttbr,
        ttbcr: registers.tcr,
        prrr: registers.prrr,
        nmrr: registers.nmrr,
        sctlr: SCTLR_TRE | SCTLR_AFE,
        ..Default::default()
    })
    .unwrap()
}

fn riscv_walker(format: &Riscv, root: PhysAddr, _level: u32) -> RiscvWalker {
    RiscvWalker::new(riscv::RiscvWalkRegisters {
        stage: riscv::RiscvRoot::First { fsc: format.registers(root).atp },
        updates: Switch::Off,
        svnapot: Switch::On,
        svpbmt: Switch::On,
        requester: Requester::User,
        sum: Switch::Off,
    })
    .unwrap()
}

fn vtd_walker(format: &VtdSs, root: PhysAddr, _level: u32) -> VtdSsWalker {
    let [entry, _] = format.registers(root).pasid_entry;
    VtdSsWalker::new(VtdSsWalkRegisters {
        ssptptr: entry & !lg2::mask(12),
        aw: u8::try_from(entry >> 2 & 0b111).unwrap(),
        ssade: Switch::Off,
        host_lg2: format.geometry().output_bits,
        sslps: 0b11,
        snoop_control: Switch::Off,
    })
    .unwrap()
}

fn x86_walker(format: &X86_64, root: PhysAddr, _level: u32) -> X86Walker {
    let entry = format.registers(root).pasid_entry;
    X86Walker::new(X86_64WalkRegisters {
        root: entry & !lg2::mask(12),
        levels: if entry >> 2 & 0b11 == 1 { 5 } else { 4 },
        physical_lg2: format.geometry().output_bits,
        encryption_mask: 0,
        pat: X86_64WalkRegisters::PAT_AT_RESET,
        nxe: Switch::Off,
        wp: Switch::On,
        pages_1g: Switch::On,
        updates: Switch::Off,
        requester: Requester::User,
    })
    .unwrap()
}

/// Maps the last page that a format translates, and the pages around it.
fn reaches_the_last_page<F: Format, W: Walker + Send + Sync + 'static>(
    name: &str,
    format: F,
    walker: impl FnOnce(&F, PhysAddr, u32) -> W,
) where
    Arena: TableMemory<F::Word>,
{
    let world = World::new();
    let last = format.geometry().aperture.last().get();
    let (iotlb, tables) = world.attach(format, walker);
    let empty = tables.tables();
    let (_, frames) = world.scattered(USER, 4);
    let top = last - (PAGE - 1);
    let map = |iova, pages| {
        let user = user(USER, pages);
        world.container.map(&world.space, user, Iova::new(iova), PROT)
    };
    // Behind the last page there is nothing, and addresses do not begin anew.
    for (iova, pages) in [(top, 2), (top - PAGE, 4)] {
        let error = map(iova, pages).unwrap_err();
        let wraps = last == u64::MAX;
        let expected = if wraps { Errno::EOVERFLOW } else { Errno::EINVAL };
        assert_eq!(world.container.errno(&error), expected, "{name}: {error}");
        world.assert_empty();
        assert_eq!(found(&iotlb, 0), None, "{name}");
    }
    for unmap in [
        |world: &World, range| world.container.unmap(range).unwrap(),
        |world: &World, _| world.container.unmap_all().unwrap(),
    ] {
        for pages in 1..=3 {
            let first = last - (pages * PAGE - 1);
            map(first, pages).unwrap();
            for page in 0..pages {
                let frame = frames[usize::try_from(page).unwrap()];
                assert_eq!(found(&iotlb, first + page * PAGE), Some(frame), "{name}");
            }
            let byte = frames[usize::try_from(pages - 1).unwrap()].wrapping_add(PAGE - 1);
            assert_eq!(found(&iotlb, last), Some(byte), "{name}");
            assert_eq!(found(&iotlb, first - 1), None, "{name}");
            let mapped = range(first, pages * PAGE);
            assert_eq!(unmap(&world, mapped), pages * PAGE, "{name}");
            assert_eq!((found(&iotlb, last), tables.tables()), (None, empty), "{name}");
            world.assert_empty();
        }
    }
}

#[test]
fn map_limits_at_the_last_page_of_every_format() {
    for bits in [39, 48, 64] {
        reaches_the_last_page("AMD v1", amd(bits), amd_walker);
    }
    for half in [Half::Lower, Half::Upper] {
        let config = ArmLpaeS1Config { half, ..ArmLpaeS1Config::new(48, 48) };
        reaches_the_last_page("Arm", ArmLpaeS1::<12>::new(config).unwrap(), arm_walker);
        for bits in [48, 57] {
            let config = X86_64Config { half, ..X86_64Config::new(bits, 52) };
            reaches_the_last_page("x86-64", X86_64::new(config).unwrap(), x86_walker);
        }
        for mode in [RiscvMode::Sv39, RiscvMode::Sv57] {
            let stage = RiscvStage::First(half);
            let config = RiscvConfig { stage, ..RiscvConfig::new(mode, 56) };
            reaches_the_last_page("RISC-V", Riscv::new(config).unwrap(), riscv_walker);
        }
    }
    for bits in [39, 48, 57] {
        let format = VtdSs::new(VtdSsConfig::new(bits, 46)).unwrap();
        reaches_the_last_page("VT-d", format, vtd_walker);
    }
    let format = ArmV7s::new(ArmV7sConfig::new(32, 32)).unwrap();
    reaches_the_last_page("Armv7", format, arm_v7s_walker);
}

/// Leaves of AMD's format, which has every power of two: the largest that fit, one by one.
fn largest_leaves(iova: u64, paddr: u64, len: u64) -> Vec<(u32, u64)> {
    let mut counts = [0; 64];
    let mut at = 0;
    while at < len {
        let address = (iova + at) | (paddr + at);
        let fits = |lg2: &u32| lg2::is_aligned(address, *lg2) && 1 << *lg2 <= len - at;
        let lg2 = (12..40).rev().find(fits).unwrap();
        counts[usize::try_from(lg2).unwrap()] += 1;
        at += 1 << lg2;
    }
    (0..64).zip(counts).filter(|(_, count)| *count > 0).collect()
}

#[test]
fn all_aligns_are_mapped_by_the_largest_leaves_and_another_domain_comes_and_goes() {
    const PAGES: u64 = 40;
    let world = World::new();
    let (iotlb, tables) = world.attach(amd(48), amd_walker);
    let empty = tables.tables();
    let span = world.memory.allocate(64 * PAGE, 18).unwrap();
    world.space.map(UserAddr::new(USER), &[span]).unwrap();
    let sizes = ArmLpaeS1::<12>::PAGE_SIZES | ArmLpaeS1::<12>::CONTIGUOUS_SIZES;
    for (start, end) in
        (0..PAGES).flat_map(|start| (start + 1..=PAGES).map(move |end| (start, end)))
    {
        // The same offset in the largest leaf, and another one.
        for skew in [0, 3] {
            let (iova, pages) = ((1 << 30) + (start + skew) * PAGE, end - start);
            let user = user(USER + start * PAGE, pages);
            world.container.map(&world.space, user, Iova::new(iova), PROT).unwrap();
            let paddr = span.paddr().wrapping_add(start * PAGE);
            let leaves: Vec<_> = world.container.census().sizes().collect();
            assert_eq!(leaves, largest_leaves(iova, paddr.get(), pages * PAGE), "{start}..{end}");
            let config =
                ArmLpaeS1Config { page_sizes: Some(sizes), ..ArmLpaeS1Config::new(48, 48) };
            let (arm, _) = world.attach(ArmLpaeS1::<12>::new(config).unwrap(), arm_walker);
            for page in 0..=pages {
                let expected = (page < pages).then(|| paddr.wrapping_add(page * PAGE));
                assert_eq!(found(&iotlb, iova + page * PAGE), expected, "{start}..{end}");
                assert_eq!(found(&arm, iova + page * PAGE), expected, "{start}..{end}");
            }
            let another = world.container.info().domains[1];
            world.container.detach(another).unwrap();
            for (page, frame) in (0..).zip(frames(span)) {
                let pins = u32::from((start..end).contains(&page));
                assert_eq!(world.memory.pins(frame), Some(pins), "{start}..{end}");
            }
            let mapped = range(iova, pages * PAGE);
            assert_eq!(world.container.unmap(mapped).unwrap(), pages * PAGE);
            assert_eq!(tables.tables(), empty);
            world.assert_empty();
        }
    }
}

#[test]
fn mappings_of_all_sizes_are_unmapped_in_any_order() {
    const MAPPINGS: u64 = 61;
    let world = World::new();
    let (iotlb, tables) = world.attach(amd(48), amd_walker);
    let empty = tables.tables();
    // One to nine pages each, over several tables; some touch.
    let place = |n: u64| (n * 61 * PAGE, 1 + n * 7 % 9);
    for step in [1, 7, 23, 60] {
        let spans: Vec<_> = (0..MAPPINGS)
            .map(|n| {
                let (iova, pages) = place(n);
                let (user, frames) = world.scattered(USER + (n << 20), pages);
                let iova = Iova::new(iova);
                world.container.map(&world.space, user, iova, PROT).unwrap();
                (user, frames)
            })
            .collect();
        // All steps are prime to the number of mappings.
        for done in 0..MAPPINGS {
            let gone = |n: u64| (0..=done).any(|done| (5 + done * step) % MAPPINGS == n);
            let (iova, pages) = place((5 + done * step) % MAPPINGS);
            assert_eq!(world.container.unmap(range(iova, pages * PAGE)).unwrap(), pages * PAGE);
            let mut left = 0;
            for (n, (_, frames)) in (0..).zip(&spans) {
                for (page, frame) in (0..).zip(frames) {
                    let expected = (!gone(n)).then_some(*frame);
                    assert_eq!(found(&iotlb, place(n).0 + page * PAGE), expected);
                    left += u64::from(!gone(n));
                }
            }
            assert_eq!(world.memory.pinned_frames(), left);
        }
        assert_eq!(tables.tables(), empty);
        world.assert_empty();
        for (user, frames) in spans {
            world.space.unmap(user);
            let page = |frame: &PhysAddr| Span::new(*frame, PAGE).unwrap();
            world.memory.free(&frames.iter().map(page).collect::<Vec<_>>());
        }
    }
}

#[test]
fn memory_that_ends_half_way_is_a_bad_address_and_its_first_half_is_not() {
    for holes in [Holes::FoundFirst, Holes::FoundOnTheWay] {
        let World { memory, space, account, .. } = World::new();
        let pinner = SimPinner::new(Arc::clone(&memory)).with_holes(holes);
        let container = Tried::new(pinner, Arc::clone(&account));
        let world = World { memory, space, account, container };
        let (_, tables) = world.attach(amd(48), amd_walker);
        let empty = tables.tables();
        world.scattered(USER, 600);
        let iova = Iova::new(1 << 30);
        // None of it, half of it, and all but one page.
        for (at, pages) in [(USER - 600 * PAGE, 600), (USER, 1200), (USER - PAGE, 601)] {
            let error = world.container.map(&world.space, user(at, pages), iova, PROT).unwrap_err();
            assert_eq!(world.container.errno(&error), Errno::EFAULT, "{error}");
            world.assert_empty();
            assert_eq!(tables.tables(), empty);
        }
        world.container.map(&world.space, user(USER, 600), iova, PROT).unwrap();
        assert_eq!(world.container.unmap_all().unwrap(), 600 * PAGE);
        world.assert_empty();
    }
}

#[test]
fn ro_unshare_memory_that_may_only_be_read_is_mapped_for_reading() {
    let world = World::new();
    let (iotlb, _) = world.attach(amd(48), amd_walker);
    let span = world.memory.allocate(8 * PAGE, 12).unwrap();
    let options = MapOptions { rights: Rights::ReadOnly, ..MapOptions::default() };
    let user = world.space.map_with(UserAddr::new(USER), &[span], options).unwrap();
    let iova = Iova::new(1 << 30);
    for prot in [Prot::READ_WRITE, Prot::WRITE] {
        let error = world.container.map(&world.space, user, iova, prot).unwrap_err();
        assert!(matches!(error, Error::Pin { user: named, .. } if named == user), "{error}");
        assert_eq!(world.container.errno(&error), Errno::EFAULT);
        world.assert_empty();
    }
    world.container.map(&world.space, user, iova, Prot::READ).unwrap();
    let walk = |access| iotlb.walker().walk(iotlb.tables(), iova, access);
    assert_eq!(walk(Access::Read).unwrap().paddr, span.paddr());
    assert!(walk(Access::Write).is_err());
    assert_eq!(world.container.unmap_all().unwrap(), 8 * PAGE);
    // Nobody can have written it.
    assert_eq!(world.memory.is_dirty(span.paddr()), Some(false));
    world.assert_empty();
}

#[test]
fn mmio_full_partial_and_misaligned_bars_are_mapped() {
    const BAR: u64 = 4 << 20;
    let world = World::new();
    let (iotlb, tables) = world.attach(amd(48), amd_walker);
    let empty = tables.tables();
    let bar = Span::new(PhysAddr::new(1 << 40), BAR).unwrap();
    let misaligned = USER + (1 << 30) + PAGE;
    for at in [USER, misaligned] {
        world.space.map_device_with(UserAddr::new(at), bar, MapOptions::default()).unwrap();
        // All of it, its first page, its last one, a page in the middle, and all but the first.
        for (offset, len) in
            [(0, BAR), (0, PAGE), (BAR - PAGE, PAGE), (BAR / 2, PAGE), (PAGE, BAR - PAGE)]
        {
            let iova = (1 << 40) + offset;
            let user = UserRange::from_len(UserAddr::new(at + offset), len).unwrap();
            let mapped = world.container.map(&world.space, user, Iova::new(iova), PROT).unwrap();
            assert_eq!((mapped.memory, mapped.mmio), (0, len));
            assert_eq!(world.account.used(), 0, "device memory is not charged");
            for at in [0, len / 2, len - 1] {
                let expected = bar.paddr().wrapping_add(offset + at);
                assert_eq!(found(&iotlb, iova + at), Some(expected));
            }
            assert_eq!(found(&iotlb, iova + len), None);
            assert_eq!(world.container.unmap(range(iova, len)).unwrap(), len);
            assert_eq!(tables.tables(), empty);
            world.assert_empty();
        }
        // More than the BAR has.
        let user = UserRange::from_len(UserAddr::new(at), BAR + PAGE).unwrap();
        let error = world.container.map(&world.space, user, Iova::new(0), PROT).unwrap_err();
        assert_eq!(world.container.errno(&error), Errno::EFAULT, "{error}");
        world.assert_empty();
    }
}

#[test]
fn auto_destroy_a_dropped_container_leaves_nothing() {
    let world = World::new();
    let (_, first) = world.attach(amd(48), amd_walker);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let (_, second) = world.attach(format, arm_walker);
    for n in 0..10 {
        let (user, _) = world.scattered(USER + (n << 30), 1 + 60 * n);
        world.container.map(&world.space, user, Iova::new(n << 30), PROT).unwrap();
    }
    let bar = Span::new(PhysAddr::new(1 << 40), 8 * PAGE).unwrap();
    let user = world.space.map_device(UserAddr::new(1 << 20), bar, Rights::ReadWrite).unwrap();
    world.container.map(&world.space, user, Iova::new(1 << 40), PROT).unwrap();
    assert!(world.account.used() > 0);
    let World { container, memory, account, .. } = world;
    drop(container);
    assert_eq!((memory.pinned_frames(), account.used(), memory.violations()), (0, 0, vec![]));
    assert_eq!((first.tables(), second.tables()), (0, 0));
}
