//! Several domains, of which some mark what is written.

use dmaspan::Iova;
use dmaspan::container::{Attach, DirtyRead, DomainId, Error, Interrupts};
use dmaspan::io_pgtable::Arena;
use dmaspan_sim::fault::Faults;
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

use super::{Hardware, NONE, World, bits, words_for};
use crate::common::{faulty_domain, for_all_granules, marking_domain};

for_all_granules!(
    what_is_written_through_any_domain_is_reported,
    a_domain_that_marks_nothing_makes_all_dirty_until_it_is_gone,
    a_sync_that_fails_in_one_domain_loses_nothing,
);

fn attach<const G: u32>(
    world: &World,
    hardware: Hardware,
) -> (DomainId, Iotlb<ArmLpaeS1Walker, Arena>) {
    let (domain, _, iotlb) = match hardware {
        Hardware::Marks => marking_domain::<G>(&Faults::none()),
        Hardware::DoesNot => faulty_domain::<G>(&Faults::none()),
    };
    (world.container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap(), iotlb)
}

fn write(world: &World, iotlb: &Iotlb<ArmLpaeS1Walker, Arena>, page: u64) {
    iotlb.translate(Iova::new(page * world.g), Access::Write).unwrap();
}

fn syncs(iotlb: &Iotlb<ArmLpaeS1Walker, Arena>) -> u64 {
    iotlb.counters().invalidations_by_range + iotlb.counters().invalidations_of_all
}

fn what_is_written_through_any_domain_is_reported<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 2048);
    world.map(world.scattered(300, 1), 0);
    let others = [(); 2].map(|()| attach::<G>(&world, Hardware::Marks).1);
    world.container.start_dirty().unwrap();
    world.map(world.scattered(300, 2), 500);
    let write_all = || {
        for page in [0, 6, 299, 503] {
            world.write(page);
        }
        for page in [3, 6, 502] {
            write(&world, &others[0], page);
        }
        write(&world, &others[1], 799);
    };
    let all = [0, 3, 6, 299, 502, 503, 799];
    write_all();
    assert_eq!(world.get(0, 1000, DirtyRead::Keep), all);
    let before = others.each_ref().map(syncs);
    assert_eq!(world.get(0, 1000, DirtyRead::Clear), all);
    assert_eq!(others.each_ref().map(syncs), before.map(|syncs| syncs + 1));
    assert_eq!(world.get(0, 1000, DirtyRead::Clear), NONE);
    write_all();
    let mut words = vec![0; words_for(1000)];
    world.container.unmap_dirty(world.pages(0, 1000), world.g, &mut words).unwrap();
    assert_eq!(bits(&words), all);
    assert_eq!(world.memory.pinned_frames(), 0);
    assert_eq!(world.memory.violations(), []);
}

fn a_domain_that_marks_nothing_makes_all_dirty_until_it_is_gone<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 64);
    world.map(world.scattered(4, 1), 2);
    world.container.start_dirty().unwrap();
    assert_eq!(world.get(0, 8, DirtyRead::Clear), NONE);
    let (id, iotlb) = attach::<G>(&world, Hardware::DoesNot);
    for how in [DirtyRead::Clear, DirtyRead::Clear, DirtyRead::Keep] {
        assert_eq!(world.get(0, 8, how), [2, 3, 4, 5]);
    }
    write(&world, &iotlb, 3);
    world.container.detach(id).unwrap();
    // What was written through it cannot be asked any more.
    assert_eq!(world.get(0, 8, DirtyRead::Clear), [2, 3, 4, 5]);
    assert_eq!(world.get(0, 8, DirtyRead::Clear), NONE);
    world.write(5);
    assert_eq!(world.get(0, 8, DirtyRead::Clear), [5]);
}

fn a_sync_that_fails_in_one_domain_loses_nothing<const G: u32>() {
    let world = World::new::<G>(Hardware::Marks, 64);
    world.map(world.scattered(4, 1), 0);
    let (_, other) = attach::<G>(&world, Hardware::Marks);
    world.container.start_dirty().unwrap();
    let both = [&world.iotlb, &other];
    for failing in both {
        both.iter().for_each(|iotlb| write(&world, iotlb, 2));
        failing.fail_next_invalidations(1);
        let mut words = [0];
        let read =
            world.container.dirty_bitmap(world.pages(0, 4), world.g, &mut words, DirtyRead::Clear);
        assert!(matches!(read, Err(Error::MarksUnsynced { .. })));
        assert_eq!(words, [0b100]);
        both.iter().for_each(|iotlb| write(&world, iotlb, 2));
        assert_eq!(world.get(0, 4, DirtyRead::Clear), [2]);
        assert_eq!(world.get(0, 4, DirtyRead::Clear), NONE);
    }
}
