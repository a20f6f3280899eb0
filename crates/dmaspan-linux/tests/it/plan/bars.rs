//! Registers of a device are mapped as memory is: planned beside it, owned and given back.

use std::ops::Range;
use std::sync::{Arc, Weak};

use dmaspan::{Errno, Iova, IovaRange, Prot};
use dmaspan_linux::Memory;
use dmaspan_linux::plan::{MapError, Mapper, NotUnmapped, PlanError, Region};

use crate::plan::kernel::{Kernel, RW, Refused, file, m2, memory, page_size, x86};

fn rig() -> (Arc<Kernel>, Mapper<Kernel>) {
    let kernel = Kernel::new(x86());
    (kernel.clone(), Mapper::shared(kernel).unwrap())
}

fn iovas(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

#[test]
fn a_bar_and_regions_get_different_iovas_in_either_order() {
    let (kernel, mapper) = rig();
    let (registers, buffers) = (memory(4), memory(4));
    let bar = mapper.map_bar(&registers, page_size()..3 * page_size(), None, RW).unwrap();
    let mapped = mapper.map([Region::whole(&buffers, RW)]).unwrap();
    let second = mapper.map_bar(&registers, 0..4 * page_size(), None, Prot::READ).unwrap();
    assert_eq!(kernel.entries().len(), 3);
    assert_eq!(
        (bar.range().checked_len(), bar.offsets()),
        (Some(2 * page_size()), page_size()..3 * page_size())
    );
    assert!(Arc::ptr_eq(bar.bar(), &registers));
    assert_eq!(mapper.mapped_bytes(), 10 * page_size());
    let entry = kernel.entries().into_iter().find(|entry| entry.iova == bar.range()).unwrap();
    assert_eq!(
        (entry.user, entry.prot),
        (registers.sub_range(page_size(), 2 * page_size()).unwrap(), RW)
    );
    drop(entry);
    // What is at certain IOVAs is in the way of what asks for them.
    let error = mapper.map([Region::whole(&buffers, RW).at(bar.iova())]).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::InUse { .. })), "{error}");
    let error = mapper.map_bar(&registers, 0..page_size(), mapped.iova(0), RW).unwrap_err();
    assert!(matches!(error, MapError::Plan(PlanError::InUse { .. })), "{error}");
    bar.unmap().unwrap();
    drop((mapped, second));
    assert!(kernel.is_empty());
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
    assert_eq!(Arc::strong_count(&registers), 1);
}

#[test]
fn a_large_bar_is_planned_for_large_leaves() {
    let (_, mapper) = rig();
    let small = mapper.map([Region::whole(&memory(1), RW)]).unwrap();
    let registers = file(4 * m2());
    let bar = mapper.map_bar(&registers, 0..4 * m2(), None, RW).unwrap();
    assert_eq!(bar.iova().get() % m2(), registers.user_range().start().get() % m2());
    drop((small, bar));
}

#[test]
fn iovas_of_a_bar_are_free_again_when_it_is_unmapped_and_not_before() {
    let (_, mapper) = rig();
    let at = Some(Iova::new(8 * m2()));
    let registers = memory(2);
    let bar = mapper.map_bar(&registers, 0..page_size(), at, RW).unwrap();
    assert_eq!(bar.range(), iovas(8 * m2(), page_size()));
    let taken = || mapper.map_bar(&registers, 0..page_size(), at, RW);
    assert!(taken().is_err());
    drop(bar);
    drop(taken().unwrap());
    std::mem::forget(taken().unwrap());
    assert!(taken().is_err());
    assert_eq!(mapper.mapped_bytes(), page_size());
}

#[test]
fn what_is_no_part_of_a_bar_or_cannot_be_mapped_is_refused_before_the_space_is_asked() {
    let (kernel, mapper) = rig();
    let registers = memory(4);
    let backward = Range { start: 2 * page_size(), end: page_size() };
    for offsets in [
        0..0,
        5 * page_size()..6 * page_size(),
        page_size()..5 * page_size(),
        backward,
        0..u64::MAX,
    ] {
        let error = mapper.map_bar(&registers, offsets, None, RW).unwrap_err();
        assert!(matches!(error, MapError::Bar { source: Refused(Errno::EFAULT) }), "{error}");
        assert_eq!(error.to_string(), Refused(Errno::EFAULT).to_string());
        assert_eq!(mapper.errno(&error), Errno::EFAULT);
    }
    let plan = |offsets, iova, prot| match mapper.map_bar(&registers, offsets, iova, prot) {
        Err(MapError::Plan(error)) => error,
        other => panic!("{other:?}"),
    };
    let none = plan(0..page_size(), None, Prot::empty());
    assert!(matches!(none, PlanError::NoAccess { .. }), "{none}");
    let uneven = plan(8..page_size(), None, RW);
    assert!(matches!(uneven, PlanError::Unaligned { .. }), "{uneven}");
    let wraps = plan(0..4 * page_size(), Some(Iova::new(page_size().wrapping_neg())), RW);
    assert!(matches!(wraps, PlanError::Wraps { .. }), "{wraps}");
    let outside = plan(0..2 * page_size(), Some(Iova::new(0xfee0_0000 - page_size())), RW);
    let missing = format!("0xfee00000..={:#x} of ", 0xfee0_0000 + page_size() - 1);
    assert!(outside.to_string().contains(&missing), "{outside}");
    kernel.state().limits.as_mut().unwrap().mappings_left = Some(0);
    let full = plan(0..page_size(), None, RW);
    assert_eq!(full, PlanError::TooManyMaps { needed: 1, left: 0 });
    assert_eq!(kernel.state().map_calls, 0);
    assert_eq!(Arc::strong_count(&registers), 1);
}

#[test]
fn a_bar_that_is_refused_leaves_nothing_behind() {
    let (kernel, mapper) = rig();
    let registers = memory(1);
    let at = Some(Iova::new(m2()));
    kernel.state().failing_map = Some(1);
    let error = mapper.map_bar(&registers, 0..page_size(), at, RW).unwrap_err();
    let MapError::Refused { user, iova, source } = error else { panic!("{error}") };
    assert_eq!((user, iova), (registers.user_range(), iovas(m2(), page_size())));
    assert_eq!(source, Refused(Errno::ENOMEM));
    assert_eq!((mapper.mapped_bytes(), Arc::strong_count(&registers)), (0, 1));
    mapper.map_bar(&registers, 0..page_size(), at, RW).unwrap().unmap().unwrap();
}

#[test]
fn a_bar_that_is_not_unmapped_is_tried_again_and_then_kept_for_ever() {
    let (kernel, mapper) = rig();
    let at = Some(Iova::new(m2()));
    let lost = |registers: Arc<Memory>| -> Weak<Memory> {
        let weak = Arc::downgrade(&registers);
        drop(registers);
        kernel.state().entries.clear();
        weak
    };
    for forgetful in [false, true] {
        // By `unmap`, and again.
        let registers = memory(1);
        let bar = mapper.map_bar(&registers, 0..page_size(), at, RW).unwrap();
        kernel.state().failing_unmaps = vec![1];
        let still = bar.unmap().unwrap_err();
        assert_eq!((still.bytes, mapper.mapped_bytes()), (page_size(), page_size()));
        assert!(matches!(still.source, NotUnmapped::Refused { .. }));
        let says = format!("{} KiB remain mapped: unmapping {:#x}", page_size() >> 10, m2());
        assert!(still.to_string().contains(&says), "{still}");
        still.left.unmap().unwrap();
        assert_eq!(Arc::strong_count(&registers), 1);

        // By a drop.
        let leaked = mapper.leaked_bytes();
        let registers = memory(1);
        let iova = Iova::new(if forgetful { 2 * m2() } else { 4 * m2() });
        let bar = mapper.map_bar(&registers, 0..page_size(), Some(iova), RW).unwrap();
        kernel.state().is_forgetful = forgetful;
        kernel.state().failing_unmaps = if forgetful { Vec::new() } else { vec![1] };
        drop(bar);
        kernel.state().is_forgetful = false;
        assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, leaked + page_size()));
        assert!(lost(registers).upgrade().is_some());
        let again = memory(1);
        assert!(mapper.map_bar(&again, 0..page_size(), Some(iova), RW).is_err());
    }
    let registers = memory(1);
    let bar = mapper.map_bar(&registers, 0..page_size(), at, RW).unwrap();
    assert_eq!(bar.leak(), page_size());
    assert!(lost(registers).upgrade().is_some());
}
