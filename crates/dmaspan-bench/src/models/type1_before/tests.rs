use dmaspan::Errno;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config};

use super::*;
use dmaspan_sim::memory::Rights;

const TABLES: PhysAddr = PhysAddr::new(1 << 40);
const IOVA: Iova = Iova::new(0x8000_0000);
const USER: UserAddr = UserAddr::new(0x7f00_0000_0000);

struct Rig {
    memory: Arc<SimMemory>,
    space: SimSpace,
    type1: Type1Before<ArmLpaeS1<12>>,
}

fn rig(limit: u64) -> Rig {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(0x4000_0000), 64 << 20, 12).unwrap());
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let type1 = Type1Before::new(format, TABLES, 4 << 20, Arc::clone(&memory), limit).unwrap();
    Rig { space: SimSpace::new(Arc::clone(&memory)), memory, type1 }
}

impl Rig {
    /// Maps frames for the user and for the device.
    fn map(&self, frames: &[Span]) -> Result<UserRange, Type1Error> {
        let user = self.space.map(USER, frames).unwrap();
        self.type1.map(&self.space, user, IOVA, Prot::READ_WRITE).map(|()| user)
    }

    fn range(&self, user: UserRange) -> IovaRange {
        IovaRange::from_len(IOVA, user.checked_len().unwrap()).unwrap()
    }

    /// Whether nothing is left of any mapping.
    fn check_nothing(&self) {
        assert_eq!((self.type1.mappings(), self.type1.locked_bytes()), (0, 0));
        assert_eq!(self.type1.census().total(), 0);
        assert_eq!(self.memory.pinned_frames(), 0);
        assert_eq!(self.memory.violations(), []);
    }
}

#[test]
fn scattered_pages_are_mapped_pinned_and_unpinned_one_by_one() {
    let rig = rig(u64::MAX);
    // More than an array, and more than a sync.
    let frames = rig.memory.allocate_scattered(1100 * PAGE, 1).unwrap();
    let user = rig.map(&frames).unwrap();
    for (n, frame) in (0u64..).zip(&frames) {
        assert_eq!(rig.type1.iova_to_phys(IOVA.wrapping_add(n * PAGE)), Some(frame.paddr()));
        assert_eq!(rig.memory.pins(frame.paddr()), Some(1));
    }
    assert_eq!(rig.type1.locked_bytes(), 1100 * PAGE);
    assert_eq!(rig.type1.unmap(rig.range(user)), Ok(1100 * PAGE));
    assert_eq!(rig.type1.lookups(), Lookups { cpu: 1100, iommu: 2199 });
    assert_eq!(rig.memory.is_dirty(frames[7].paddr()), Some(true));
    rig.check_nothing();
}

#[test]
fn a_large_folio_is_one_leaf_and_still_one_step_for_each_page() {
    let rig = rig(u64::MAX);
    let folios = [9, 9].map(|order| rig.memory.allocate_folio(order).unwrap().span());
    let user = rig.map(&folios).unwrap();
    assert_eq!(rig.type1.census().count(21), 2);
    assert_eq!(rig.type1.unmap(rig.range(user)), Ok(4 << 20));
    assert_eq!(rig.type1.lookups(), Lookups { cpu: 2, iommu: 1024 });
    rig.check_nothing();
}

#[test]
fn a_pfnmap_is_followed_page_by_page_whatever_its_leaves_and_not_charged() {
    let rig = rig(0);
    let bar = Span::new(PhysAddr::new(0x20_0000_0000), 4 << 20).unwrap();
    let user = rig.space.map_device(USER, bar, Rights::ReadWrite).unwrap();
    rig.type1.map(&rig.space, user, IOVA, Prot::READ_WRITE).unwrap();
    assert_eq!(
        rig.type1.iova_to_phys(IOVA.wrapping_add(0x1234)),
        Some(bar.paddr().wrapping_add(0x1234))
    );
    assert_eq!((rig.type1.census().total(), rig.type1.locked_bytes()), (2, 0));
    assert_eq!(rig.type1.unmap(rig.range(user)), Ok(4 << 20));
    assert_eq!(rig.type1.lookups(), Lookups { cpu: 1024, iommu: 1024 });
    rig.check_nothing();
}

#[test]
fn memory_and_a_pfnmap_side_by_side_are_runs_of_their_own() {
    let rig = rig(u64::MAX);
    let frames = rig.memory.allocate(3 * PAGE, 12).unwrap();
    let bar = Span::new(PhysAddr::new(0x20_0000_0000), 5 * PAGE).unwrap();
    rig.space.map(USER, &[frames]).unwrap();
    rig.space.map_device(USER.wrapping_add(3 * PAGE), bar, Rights::ReadWrite).unwrap();
    rig.space.map(USER.wrapping_add(8 * PAGE), &[frames]).unwrap();
    let user = UserRange::from_len(USER, 11 * PAGE).unwrap();
    rig.type1.map(&rig.space, user, IOVA, Prot::READ_WRITE).unwrap();
    assert_eq!(rig.type1.iova_to_phys(IOVA.wrapping_add(3 * PAGE)), Some(bar.paddr()));
    assert_eq!(rig.type1.iova_to_phys(IOVA.wrapping_add(8 * PAGE)), Some(frames.paddr()));
    assert_eq!(rig.type1.locked_bytes(), 6 * PAGE);
    assert_eq!(rig.type1.unmap(rig.range(user)), Ok(11 * PAGE));
    rig.check_nothing();
}

#[test]
fn what_fails_on_the_way_leaves_nothing_behind() {
    let rig = rig(600 * PAGE);
    let frames = rig.memory.allocate_scattered(700 * PAGE, 1).unwrap();
    let error = rig.map(&frames).unwrap_err();
    assert_eq!(error, Type1Error::OverLimit { limit: 600 * PAGE });
    rig.check_nothing();
    let whole = rig.memory.allocate(700 * PAGE, 12).unwrap();
    assert_eq!(rig.map(&[whole]), Err(error));
    rig.check_nothing();
    // A hole behind the frames.
    rig.space.unmap(UserRange::from_len(USER.wrapping_add(550 * PAGE), 150 * PAGE).unwrap());
    let user = UserRange::from_len(USER, 600 * PAGE).unwrap();
    let error = rig.type1.map(&rig.space, user, IOVA, Prot::READ_WRITE).unwrap_err();
    assert_eq!(error, Type1Error::Fault { at: USER.wrapping_add(550 * PAGE) });
    rig.check_nothing();
}

#[test]
fn a_pfnmap_that_may_only_be_read_is_refused_for_writing() {
    let rig = rig(u64::MAX);
    let bar = Span::new(PhysAddr::new(0x20_0000_0000), 4 * PAGE).unwrap();
    let user = rig.space.map_device(USER, bar, Rights::ReadOnly).unwrap();
    let error = rig.type1.map(&rig.space, user, IOVA, Prot::READ_WRITE).unwrap_err();
    assert_eq!((error, error.errno()), (Type1Error::Fault { at: USER }, Errno::EFAULT));
    assert_eq!(rig.type1.map(&rig.space, user, IOVA, Prot::READ), Ok(()));
}

#[test]
fn mappings_are_neither_overlapped_nor_cut() {
    let rig = rig(u64::MAX);
    let frames = rig.memory.allocate(4 * PAGE, 12).unwrap();
    let user = rig.map(&[frames]).unwrap();
    let existing = rig.range(user);
    let part = UserRange::from_len(USER, PAGE).unwrap();
    let again = rig.type1.map(&rig.space, part, IOVA.wrapping_add(3 * PAGE), Prot::READ);
    assert!(matches!(again, Err(Type1Error::Exists { existing: e, .. }) if e == existing));
    let cut = IovaRange::from_len(IOVA.wrapping_add(PAGE), PAGE).unwrap();
    let error = rig.type1.unmap(cut).unwrap_err();
    assert_eq!(error, Type1Error::Bisects { range: cut, mapping: existing });
    assert_eq!(rig.type1.unmap(existing), Ok(4 * PAGE));
    assert_eq!(rig.type1.unmap(existing), Ok(0));
    rig.check_nothing();
}
