//! A mapping owns its memory.

use std::sync::Arc;

use dmaspan::{Iova, Prot};
use dmaspan_linux::plan::{MappedRegions, Mapper, Region};
use dmaspan_linux::{Memory, MemoryKind};

use crate::plan::kernel::{Kernel, RW, m2, memory, page_size, x86};

#[test]
fn one_region_is_one_call_and_no_more() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(512);
    let mapped = mapper.map([Region::whole(&memory, RW)]).unwrap();
    let entry = &kernel.entries()[0];
    assert_eq!((entry.user, entry.prot), (memory.user_range(), RW));
    assert!(Arc::ptr_eq(&entry.memory, &memory));
    assert_eq!(Some(entry.iova.start()), mapped.iova(0));
    assert_eq!((mapped.iova(1), mapped.bytes()), (None, 512 * page_size()));
    assert_eq!(mapper.mapped_bytes(), 512 * page_size());
    mapped.unmap().unwrap();
    let state = kernel.state();
    assert_eq!((state.map_calls, state.unmap_calls, state.entries.len()), (1, 1, 0));
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
}

#[test]
fn addresses_of_the_user_are_translated() {
    let mapper = Mapper::shared(Kernel::new(x86())).unwrap();
    let [first, second] = [memory(4), memory(4)];
    let regions = [
        Region::part(&first, page_size(), 2 * page_size(), RW).unwrap().at(Iova::new(8 * m2())),
        Region::whole(&second, Prot::READ).at(Iova::new(m2())),
    ];
    let mapped = mapper.map(regions).unwrap();
    let at = |memory: &Arc<Memory>, offset| memory.user_range().start().wrapping_add(offset);
    assert_eq!(
        (mapped.iova(0), mapped.iova(1)),
        (Some(Iova::new(8 * m2())), Some(Iova::new(m2())))
    );
    assert_eq!(mapped.translate(at(&first, page_size() + 5)), Some(Iova::new(8 * m2() + 5)));
    assert_eq!(
        mapped.translate(at(&first, 3 * page_size() - 1)),
        Some(Iova::new(8 * m2() + 2 * page_size() - 1))
    );
    assert_eq!(mapped.translate(at(&first, 0)), None);
    assert_eq!(mapped.translate(at(&first, 3 * page_size())), None);
    assert_eq!(
        mapped.translate(at(&second, 4 * page_size() - 1)),
        Some(Iova::new(m2() + 4 * page_size() - 1))
    );
}

#[test]
fn an_address_that_is_mapped_more_than_once_is_translated_to_the_lowest_iova() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(64);
    // A long one around many others, at IOVAs in another order than their memory.
    let part = |first, pages, iova: u64| {
        let region = Region::part(&memory, first * page_size(), pages * page_size(), RW).unwrap();
        region.at(Iova::new(iova * page_size()))
    };
    let shuffled = |n: u64| 200 + n * 7 % 32 * 4;
    let short = (0..32).map(|n| part(2 * n, 1, shuffled(n)));
    let regions = [part(8, 40, 400), part(8, 40, 100)].into_iter().chain(short);
    let mapped = mapper.map(regions).unwrap();
    let wanted = |page: u64, around: u64| {
        let own = page.is_multiple_of(2).then(|| shuffled(page / 2));
        let around = (8..48).contains(&page).then(|| around + page - 8);
        own.into_iter().chain(around).min().map(|iova| Iova::new(iova * page_size() + 5))
    };
    let user = |page| memory.user_range().start().wrapping_add(page * page_size() + 5);
    let check = |mapped: &MappedRegions<_>, around| {
        for page in 0..64 {
            assert_eq!(mapped.translate(user(page)), wanted(page, around), "{page} {around}");
            assert_eq!(mapped.plan().translate(user(page)), wanted(page, 100), "{page}");
        }
        assert_eq!(mapped.translate(user(64)), None);
    };
    check(&mapped, 100);
    // The lowest is unmapped, and all others stay.
    kernel.state().failing_unmaps = (2..=34).collect();
    let left = mapped.unmap().unwrap_err().left;
    check(&left, 400);
    left.unmap().unwrap();
}

#[test]
fn memory_lives_as_long_as_it_is_mapped() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(4);
    let weak = Arc::downgrade(&memory);
    let mapped = mapper.map([Region::whole(&memory, RW)]).unwrap();
    drop((memory, mapper));
    assert!(weak.upgrade().is_some());
    drop(mapped);
    assert!(weak.upgrade().is_none());
    assert!(kernel.is_empty());
}

#[test]
fn what_is_forgotten_stays_mapped_and_is_never_freed() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(4);
    let weak = Arc::downgrade(&memory);
    let region = || Region::whole(&weak.upgrade().unwrap(), RW).at(Iova::new(0));
    std::mem::forget(mapper.map([region()]).unwrap());
    drop(memory);
    // Even if the space forgets it.
    kernel.state().entries.clear();
    assert!(weak.upgrade().is_some());
    assert_eq!(mapper.mapped_bytes(), 4 * page_size());
    assert!(mapper.map([region()]).is_err(), "its IOVAs are never used again");
}

#[test]
fn a_scope_unmaps_also_when_it_panics() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let memory = memory(4);
    let region = || [Region::whole(&memory, RW)];
    let bytes = mapper.scope(region(), |mapped| (mapped.bytes(), kernel.entries().len())).unwrap();
    assert_eq!(bytes, (4 * page_size(), 1));
    assert!(kernel.is_empty());
    let unwinding = std::panic::AssertUnwindSafe(|| mapper.scope(region(), |_| panic!("work")));
    assert!(std::panic::catch_unwind(unwinding).is_err());
    assert!(kernel.is_empty());
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn neighbours_of_one_owner_are_unmapped_at_once() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let [first, second, third] = [memory(4), memory(4), memory(4)];
    let at =
        |memory: &Arc<Memory>, page| Region::whole(memory, RW).at(Iova::new(page * page_size()));
    let beside = mapper.map([at(&third, 8)]).unwrap();
    let mapped = mapper.map([at(&second, 4), at(&first, 0), at(&third, 32)]).unwrap();
    mapped.unmap().unwrap();
    assert_eq!(kernel.state().unmap_calls, 2);
    assert_eq!(kernel.entries().len(), 1);
    drop(beside);
    assert!(kernel.is_empty());
}

#[test]
fn adopted_memory_is_populated_before_it_is_mapped() {
    let mapper = Mapper::shared(Kernel::new(x86())).unwrap();
    let first = Memory::new(MemoryKind::Memfd, 64 * page_size()).unwrap();
    let (fd, offset) = first.file().unwrap();
    let file = std::fs::File::from(fd.try_clone_to_owned().unwrap());
    file.set_len(128 * page_size()).unwrap();
    let memory = Memory::from_file(file.try_clone().unwrap(), offset, 128 * page_size()).unwrap();
    let memory = Arc::new(memory);
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
    assert_eq!(blocks(), 64 * page_size());
    let part = Region::part(&memory, 64 * page_size(), 8 * page_size(), RW).unwrap();
    let mapped = mapper.map([part]).unwrap();
    assert_eq!((blocks(), memory.is_populated()), (72 * page_size(), false));
    let all = mapper.map([Region::whole(&memory, RW)]).unwrap();
    assert_eq!((blocks(), memory.is_populated()), (128 * page_size(), true));
    drop((mapped, all));
}
