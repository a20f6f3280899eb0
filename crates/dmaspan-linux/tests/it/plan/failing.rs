//! All or nothing, whichever map or unmap fails.

use std::sync::{Arc, Weak};

use dmaspan::{Errno, Iova};
use dmaspan_linux::plan::{MapError, Mapper, NotUnmapped, Region, ScopeError};
use dmaspan_linux::{Memory, MemoryKind};

use crate::plan::kernel::{Kernel, RW, Refused, memory, page_size, x86};

const MAPS: u64 = 6;

/// Memories of which each is a map of its own, and no map has a neighbour.
struct Rig {
    kernel: Arc<Kernel>,
    mapper: Mapper<Kernel>,
    memories: Vec<Arc<Memory>>,
}

impl Rig {
    fn new() -> Self {
        let kernel = Kernel::new(x86());
        let mapper = Mapper::shared(kernel.clone()).unwrap();
        Self { kernel, mapper, memories: (1..=MAPS).map(memory).collect() }
    }

    fn at(n: u64) -> Iova {
        Iova::new(0x100_0000 * n)
    }

    fn regions(&self) -> Vec<Region> {
        let region = |(n, memory)| Region::whole(memory, RW).at(Self::at(n));
        (0..).zip(&self.memories).map(region).collect()
    }

    fn weak(&mut self) -> Vec<Weak<Memory>> {
        self.memories.drain(..).map(|memory| Arc::downgrade(&memory)).collect()
    }

    /// Whether the n-th region's IOVAs are free.
    fn is_free(&self, n: u64) -> bool {
        let page = memory(1);
        self.mapper.plan([Region::whole(&page, RW).at(Self::at(n))]).is_ok()
    }
}

#[test]
fn the_nth_map_fails_and_nothing_is_left() {
    for n in 1..=MAPS {
        let rig = Rig::new();
        rig.kernel.state().failing_map = Some(n);
        let error = rig.mapper.map(rig.regions()).unwrap_err();
        assert_eq!(rig.mapper.errno(&error), Errno::ENOMEM);
        let text = error.to_string();
        assert!(text.ends_with(&Refused(Errno::ENOMEM).to_string()), "{text}");
        let MapError::Refused { user, iova, source } = error else { panic!("{error}") };
        let failed = &rig.memories[usize::try_from(n - 1).unwrap()];
        assert_eq!((user, iova.start()), (failed.user_range(), Rig::at(n - 1)));
        assert_eq!(source, Refused(Errno::ENOMEM));
        assert!(rig.kernel.is_empty());
        assert_eq!(rig.kernel.state().map_calls, n);
        assert!(rig.memories.iter().all(|memory| Arc::strong_count(memory) == 1));
        assert_eq!((rig.mapper.mapped_bytes(), rig.mapper.leaked_bytes()), (0, 0));
        // All IOVAs are free again.
        rig.mapper.map(rig.regions()).unwrap().unmap().unwrap();
    }
}

#[test]
fn taking_back_fails_and_what_stays_is_leaked_and_said() {
    for n in 2..=MAPS {
        for failing in 1..n {
            let mut rig = Rig::new();
            rig.kernel.state().failing_map = Some(n);
            rig.kernel.state().failing_unmaps = vec![failing];
            let error = rig.mapper.map(rig.regions()).unwrap_err();
            let MapError::LeftBehind { leaked, why, source, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!((*source, *leaked), (Refused(Errno::ENOMEM), failing * page_size()));
            assert!(matches!(why, NotUnmapped::Refused { range, .. }
                if range.start() == Rig::at(failing - 1)));
            let text = error.to_string();
            assert!(text.contains("remain mapped"), "{text}");
            assert!(text.contains(&source.to_string()), "{text}");
            assert!(text.ends_with(&Refused(Errno::EIO).to_string()), "{text}");
            assert_eq!((rig.mapper.mapped_bytes(), rig.mapper.leaked_bytes()), (0, *leaked));
            let weak = rig.weak();
            // The device's side may be gone; the memory is not freed even then.
            rig.kernel.state().entries.clear();
            for (at, memory) in (0..).zip(weak) {
                let is_leaked = at == failing - 1;
                assert_eq!(memory.upgrade().is_some(), is_leaked);
                assert_eq!(rig.is_free(at), !is_leaked);
            }
        }
    }
}

#[test]
fn the_nth_unmap_fails_and_is_tried_again() {
    for n in 1..=MAPS {
        let rig = Rig::new();
        let mapped = rig.mapper.map(rig.regions()).unwrap();
        rig.kernel.state().failing_unmaps = vec![n];
        let unmapped = mapped.unmap().unwrap_err();
        assert!(matches!(&unmapped.source, NotUnmapped::Refused { range, source }
            if range.start() == Rig::at(n - 1) && *source == Refused(Errno::EIO)));
        assert_eq!(
            (unmapped.left.bytes(), rig.mapper.mapped_bytes()),
            (n * page_size(), n * page_size())
        );
        assert_eq!(rig.kernel.entries().len(), 1);
        for region in 0..MAPS {
            let iova = unmapped.left.iova(usize::try_from(region).unwrap());
            assert_eq!(iova, (region == n - 1).then_some(Rig::at(region)));
            let user = rig.memories[usize::try_from(region).unwrap()].user_range().start();
            assert_eq!(unmapped.left.translate(user), iova);
            assert_eq!(rig.is_free(region), region != n - 1);
        }
        unmapped.left.unmap().unwrap();
        assert!(rig.kernel.is_empty());
        assert_eq!((rig.mapper.mapped_bytes(), rig.mapper.leaked_bytes()), (0, 0));
        assert!(rig.memories.iter().all(|memory| Arc::strong_count(memory) == 1));
    }
}

#[test]
fn the_nth_unmap_of_a_drop_fails_and_that_is_leaked() {
    for n in 1..=MAPS {
        let mut rig = Rig::new();
        let mapped = rig.mapper.map(rig.regions()).unwrap();
        rig.kernel.state().failing_unmaps = vec![n];
        drop(mapped);
        assert_eq!(rig.kernel.entries().len(), 1);
        assert_eq!((rig.mapper.mapped_bytes(), rig.mapper.leaked_bytes()), (0, n * page_size()));
        let weak = rig.weak();
        rig.kernel.state().entries.clear();
        for (at, memory) in (0..).zip(weak) {
            assert_eq!(memory.upgrade().is_some(), at == n - 1);
            assert_eq!(rig.is_free(at), at != n - 1);
        }
    }
}

#[test]
fn all_unmaps_fail_and_all_is_leaked() {
    let rig = Rig::new();
    let mapped = rig.mapper.map(rig.regions()).unwrap();
    // Once by `unmap`, and once more when what is left is dropped.
    rig.kernel.state().failing_unmaps = (1..=2 * MAPS).collect();
    let unmapped = mapped.unmap().unwrap_err();
    let says = format!("{} KiB remain mapped", 21 * (page_size() >> 10));
    assert!(unmapped.to_string().contains(&says), "{unmapped}");
    assert!(unmapped.to_string().contains(&unmapped.source.to_string()), "{unmapped}");
    assert_eq!(rig.mapper.leaked_bytes(), 0);
    drop(unmapped);
    assert_eq!(rig.mapper.leaked_bytes(), 21 * page_size());
    assert_eq!(rig.kernel.entries().len(), usize::try_from(MAPS).unwrap());
}

#[test]
fn a_space_that_unmaps_less_than_was_mapped_is_not_believed() {
    let mut rig = Rig::new();
    let mapped = rig.mapper.map(rig.regions()).unwrap();
    rig.kernel.state().is_forgetful = true;
    let unmapped = mapped.unmap().unwrap_err();
    assert!(matches!(unmapped.source, NotUnmapped::Short { unmapped: 0, .. }));
    drop(unmapped);
    assert_eq!(rig.mapper.leaked_bytes(), 21 * page_size());
    assert!(rig.weak().iter().all(|memory| memory.upgrade().is_some()));
    assert!(!rig.is_free(0));
}

#[test]
fn a_scope_whose_end_fails_leaks_and_says_so() {
    let rig = Rig::new();
    rig.kernel.state().failing_unmaps = vec![2];
    let error = rig.mapper.scope(rig.regions(), |_| ()).unwrap_err();
    let ScopeError::Unmap { leaked, source } = error else { panic!("{error}") };
    assert_eq!(leaked, 2 * page_size());
    assert!(matches!(source, NotUnmapped::Refused { .. }));
    assert_eq!(rig.mapper.leaked_bytes(), 2 * page_size());
    rig.kernel.state().failing_map = Some(1);
    let error = rig.mapper.scope([Region::whole(&memory(1), RW)], |_| panic!("not mapped"));
    assert!(matches!(error.unwrap_err(), ScopeError::Map(MapError::Refused { .. })));
}

#[test]
fn memory_without_pages_is_refused_before_it_is_mapped() {
    let rig = Rig::new();
    let first = Memory::new(MemoryKind::Memfd, 8 * page_size()).unwrap();
    let file = std::fs::File::from(first.file().unwrap().0.try_clone_to_owned().unwrap());
    let short = Arc::new(Memory::from_file(file.try_clone().unwrap(), 0, 8 * page_size()).unwrap());
    file.set_len(page_size()).unwrap();
    let regions = [Region::whole(&rig.memories[0], RW), Region::whole(&short, RW)];
    let error = rig.mapper.map(regions).unwrap_err();
    assert!(matches!(error, MapError::Populate(_)), "{error}");
    assert_eq!(rig.mapper.errno(&error), Errno::EFAULT);
    assert_eq!(rig.kernel.state().map_calls, 0);
    assert_eq!(Arc::strong_count(&short), 1);
}
