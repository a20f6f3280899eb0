//! Several threads map into one space.

use std::thread;

use dmaspan::space::Limits;
use dmaspan::{Iova, IovaRange};
use dmaspan_linux::plan::{MapError, Mapper, PlanError, Region};

use crate::plan::kernel::{Kernel, RW, memory, page_size, x86};

#[test]
fn threads_never_get_the_same_iovas_and_always_get_what_is_free() {
    // Room for exactly what all threads have at once.
    let apertures = vec![IovaRange::from_len(Iova::new(page_size()), 4 * 6 * page_size()).unwrap()];
    let kernel = Kernel::new(Limits { apertures, ..x86() });
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let mapper = mapper.clone();
            scope.spawn(move || {
                let memories = [memory(1), memory(1), memory(1)];
                let own = Iova::new((1 + 12 + 3 * thread) * page_size());
                for round in 0..2000 {
                    let planned = Region::whole(&memories[round % 3], RW);
                    // Half of the room is for those that are placed by hand, and the other for
                    // those that are not; the space refuses whatever is mapped twice.
                    let held = mapper.map([planned.clone().at(own)]);
                    let some = mapper.map(memories.iter().map(|of| Region::whole(of, RW)));
                    for result in [held, some] {
                        match result {
                            Ok(mapped) => mapped.unmap().unwrap(),
                            Err(MapError::Plan(error)) => assert!(is_full(&error), "{error}"),
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
        }
    });
    assert!(kernel.is_empty());
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
    // Nothing is lost: all of it is free.
    let all = memory(24);
    mapper.map([Region::whole(&all, RW).at(Iova::new(page_size()))]).unwrap().unmap().unwrap();
}

fn is_full(error: &PlanError) -> bool {
    matches!(error, PlanError::InUse { .. } | PlanError::NoRoom { .. })
}

#[test]
fn a_fixed_place_that_was_freed_is_free_at_once() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel).unwrap();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let mapper = mapper.clone();
            scope.spawn(move || {
                let memory = memory(1);
                let at = Iova::new((thread * 16) << 20);
                for _ in 0..2000 {
                    // Ranges of the others go through the same caches meanwhile.
                    let fixed = mapper.map([Region::whole(&memory, RW).at(at)]).unwrap();
                    let other = mapper.map([Region::whole(&memory, RW)]).unwrap();
                    fixed.unmap().unwrap();
                    other.unmap().unwrap();
                }
            });
        }
    });
}
