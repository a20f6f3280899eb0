//! Memory that a program shares with its devices.

use std::sync::Arc;

use dmaspan::space::Limits;
use dmaspan::{Errno, Iova};
use dmaspan_linux::mem::MemoryError;
use dmaspan_linux::plan::{MapError, Mapper, NotUnmapped, PlanError};

use crate::plan::kernel::{Kernel, RW, Refused, m2, page_size, x86};

fn rig() -> (Arc<Kernel>, Mapper<Kernel>) {
    let kernel = Kernel::new(x86());
    (kernel.clone(), Mapper::shared(kernel).unwrap())
}

#[test]
fn memory_is_one_map_zeroed_aligned_and_within_what_the_device_addresses() {
    let kernel = Kernel::new(x86());
    let limit = Iova::new(u64::from(u32::MAX));
    let mapper = Mapper::with_limit(kernel.clone(), limit).unwrap();
    let mut all = Vec::new();
    for (len, align) in [
        (1, 1),
        (page_size(), page_size()),
        (3 * page_size(), 16 * page_size()),
        (page_size() + 1, m2()),
        (m2(), 8),
        (5, 1 << 24),
    ] {
        let memory = mapper.alloc(len, align).unwrap();
        assert!(memory.len() >= len && memory.len().is_multiple_of(page_size()), "{len:#x}");
        assert_eq!(memory.iova().get() % align, 0);
        assert!(memory.range().last() <= limit);
        memory.memory().check_words(0, memory.len(), |_| 0).unwrap();
        let entry = kernel.entries().into_iter().find(|e| e.iova == memory.range()).unwrap();
        assert_eq!((entry.user, entry.prot), (memory.memory().user_range(), RW));
        all.push(memory);
    }
    assert_eq!(kernel.entries().len(), all.len());
    assert_eq!(mapper.mapped_bytes(), all.iter().map(|memory| memory.len()).sum::<u64>());
    all.pop().unwrap().unmap().unwrap();
    drop(all);
    assert!(kernel.is_empty());
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
}

#[test]
fn an_iommu_with_large_pages_gets_large_pages() {
    let kernel = Kernel::new(Limits { page_sizes: 64 << 10, ..x86() });
    let mapper = Mapper::shared(kernel).unwrap();
    let memory = mapper.alloc(1, 1).unwrap();
    assert_eq!((memory.len(), memory.iova().get() % (64 << 10)), (64 << 10, 0));
}

#[test]
fn what_cannot_be_allocated_is_refused_before_the_space_is_asked() {
    let (kernel, mapper) = rig();
    for align in [0, 3, page_size() + 1, u64::MAX] {
        let error = mapper.alloc(page_size(), align).unwrap_err();
        let MapError::Plan(error) = error else { panic!("{error}") };
        assert_eq!(error, PlanError::Alignment { align });
        assert!(error.to_string().contains("not a power of two"), "{error}");
    }
    let error = mapper.alloc(0, 1).unwrap_err();
    assert!(matches!(error, MapError::Memory(MemoryError::Empty { .. })), "{error}");
    assert_eq!(mapper.errno(&error), Errno::EINVAL);
    for len in [u64::MAX, 1 << 60] {
        let error = mapper.alloc(len, 1).unwrap_err();
        assert!(matches!(error, MapError::Memory(MemoryError::TooMuch { .. })), "{error}");
    }
    // An alignment at which no address is.
    let error = mapper.alloc(page_size(), 1 << 63).unwrap_err();
    assert!(matches!(error, MapError::Memory(_) | MapError::Plan(PlanError::NoRoom { .. })));
    assert_eq!(kernel.state().map_calls, 0);
}

#[test]
fn memory_is_freed_when_it_is_unmapped_and_kept_for_ever_where_it_is_not() {
    let (kernel, mapper) = rig();
    kernel.state().failing_map = Some(1);
    let error = mapper.alloc(page_size(), 1).unwrap_err();
    let MapError::Refused { source: Refused(Errno::ENOMEM), .. } = error else { panic!("{error}") };
    assert_eq!(mapper.mapped_bytes(), 0);

    let memory = mapper.alloc(page_size(), 1).unwrap();
    let weak = Arc::downgrade(memory.memory());
    kernel.state().failing_unmaps = vec![1];
    let still = memory.unmap().unwrap_err();
    assert!(matches!(still.source, NotUnmapped::Refused { .. }));
    assert!(weak.upgrade().is_some());
    still.left.unmap().unwrap();
    assert!(weak.upgrade().is_none());

    let memory = mapper.alloc(page_size(), 1).unwrap();
    let (weak, iova) = (Arc::downgrade(memory.memory()), memory.iova());
    kernel.state().failing_unmaps = vec![1];
    drop(memory);
    kernel.state().entries.clear();
    assert!(weak.upgrade().is_some());
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, page_size()));
    assert_ne!(mapper.alloc(page_size(), 1).unwrap().iova(), iova);

    let memory = mapper.alloc(page_size(), 1).unwrap();
    let weak = Arc::downgrade(memory.memory());
    std::mem::forget(memory);
    kernel.state().entries.clear();
    assert!(weak.upgrade().is_some());
    assert_eq!(mapper.alloc(2 * page_size(), 1).unwrap().leak(), 2 * page_size());
}
