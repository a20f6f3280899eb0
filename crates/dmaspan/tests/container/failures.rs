//! The n-th fallible step fails, for every n: everything is as before.

use std::sync::Arc;

use dmaspan::{Iova, IovaRange, PhysAddr, Prot, UserAddr, UserRange};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::memory::{Holes, SimMemory, SimPinner, SimSpace};

use crate::common::{PROT, faulty_domain, for_all_granules};

for_all_granules!(a_container_survives_a_failure_of_every_step);

const USER: u64 = 0x7f00_0000_0000;

fn a_container_survives_a_failure_of_every_step<const G: u32>() {
    let faults = Faults::none();
    for holes in [Holes::FoundFirst, Holes::FoundOnTheWay] {
        let (domain, memory, _iotlb) = faulty_domain::<G>(&faults);
        let bytes = 1600u64 << G;
        let physical = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 4 * bytes, G).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&physical)));
        // More spans than a batch has, so that some are mapped when a later step fails.
        let spans = physical.allocate_scattered(bytes, 7).unwrap();
        assert!(spans.len() > 300);
        let user = space.map(UserAddr::new(USER), &spans).unwrap();
        let hole = UserRange::new(user.start(), user.last().wrapping_add(1 << G)).unwrap();
        let account = dmaspan::Account::new(u64::MAX);
        let pinner = Faulty::new(SimPinner::new(Arc::clone(&physical)).with_holes(holes), &faults);
        let container = dmaspan::Container::<_, parking_lot::RawMutex>::with_domain(
            pinner,
            domain,
            Arc::clone(&account),
        );
        let neighbour = space
            .map(UserAddr::new(1 << 30), &physical.allocate_scattered(1 << G, 9).unwrap())
            .unwrap();
        let first = Iova::new(3 << G);
        container.map(&space, neighbour, first, Prot::READ).unwrap();
        let tables = memory.tables();
        let before = (container.census(), physical.pinned_frames(), account.used());
        let mut through = 0;
        let steps = faults.sweep(|n| {
            let iova = Iova::new(9 << G);
            if container.map(&space, user, iova, PROT).is_ok() {
                through += 1;
                let range = IovaRange::from_len(iova, bytes).unwrap();
                let stays = faults.disarm();
                assert_eq!(container.unmap(range).unwrap(), bytes);
                if stays == dmaspan_sim::fault::Fired::No {
                    faults.arm(1 << 30);
                }
            }
            assert!(container.map(&space, hole, Iova::new(1 << 44), PROT).is_err(), "a hole");
            let now = (container.census(), physical.pinned_frames(), account.used());
            // An invalidation that fails while a map is taken back keeps its memory for ever; every
            // other step leaves nothing.
            if container.mappings() == 1 {
                assert_eq!(now, before, "step {n}");
                assert_eq!(memory.tables(), tables, "step {n}");
            }
            assert_eq!(physical.violations(), [], "step {n}");
        });
        assert!(steps > 300, "{steps} steps");
        assert!(through > 0);
        drop(container);
        assert_eq!(physical.violations(), []);
    }
}
