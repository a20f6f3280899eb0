//! The n-th fallible step fails, for every n: everything is as before.

use dmaspan::Iova;
use dmaspan::io_pgtable::{Arena, PageTable};
use dmaspan::iommu::{Domain, IommuOps};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;

use crate::common::{PROT, arena, for_all_granules, format, range, span, walker};

for_all_granules!(a_domain_survives_a_failure_of_every_step);

/// A domain over a simulated IOMMU, with faults in its tables and its invalidations.
pub(crate) type FaultyDomain<const G: u32> = Domain<
    dmaspan::io_pgtable::ArmLpaeS1<G>,
    Faulty<Arena>,
    Faulty<Iotlb<dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker, Arena>>,
>;

pub(crate) fn faulty_domain<const G: u32>(
    faults: &Faults,
) -> (FaultyDomain<G>, Arena, Iotlb<dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker, Arena>) {
    let memory = arena();
    let table = PageTable::new(format::<G>(48, 48), Faulty::new(memory.clone(), faults)).unwrap();
    let iotlb = Iotlb::new(walker(table.format(), table.root()), memory.clone());
    let domain = Domain::new(table, Faulty::new(iotlb.clone(), faults)).unwrap();
    (domain, memory, iotlb)
}

fn a_domain_survives_a_failure_of_every_step<const G: u32>() {
    let faults = Faults::none();
    let (domain, memory, iotlb) = faulty_domain::<G>(&faults);
    let g = 1u64 << G;
    // A neighbour in the same table, and a collision behind it that is found late.
    // SAFETY: nobody else uses the domain, and its device touches no memory.
    unsafe { domain.map_spans(Iova::new(0), &[span(0, g)], PROT) }.unwrap();
    // SAFETY: as above.
    unsafe { domain.map_spans(Iova::new(64 * g), &[span(0, g)], PROT) }.unwrap();
    let tables = memory.tables();
    let mut done = 0;
    let steps = faults.sweep(|n| {
        for (iova, len) in [(g, 4 * g), (g, 64 * g)] {
            let spans = [span(g, g), span(4 * g, len - g)];
            // SAFETY: as above.
            match unsafe { domain.map_spans(Iova::new(iova), &spans, PROT) } {
                Ok(()) => {
                    assert_eq!(len, 4 * g, "the other one collides");
                    let mut room = dmaspan::SpanBuf::room::<4>();
                    let mut buf = dmaspan::SpanBuf::new(&mut room);
                    // SAFETY: as above.
                    let unsynced = unsafe { domain.unmap(range(iova, len), &mut buf) }.unwrap();
                    assert_eq!(buf.spans(), spans);
                    if let Err(failed) = unsynced.sync() {
                        // SAFETY: the gather is this domain's.
                        let again = unsafe { domain.sync(failed.gather) };
                        assert!(again.is_ok(), "step {n}: only once");
                    }
                    done += 1;
                }
                Err(failed) => {
                    // Taken back, and where that was not confirmed the caller is told.
                    if let Some(gather) = failed.unsynced {
                        // SAFETY: the gather is this domain's.
                        assert!(unsafe { domain.sync(gather) }.is_ok());
                    }
                }
            }
            assert_eq!(memory.tables(), tables, "step {n}");
            assert_eq!(iotlb.stale_leaves(range(0, 1 << 40)), []);
        }
    });
    assert!(steps >= 3 && done > 0, "{steps} steps, {done} times through");
}

#[test]
fn the_injected_invalidation_failure_reaches_the_hooks() {
    let faults = Faults::none();
    let (domain, ..) = faulty_domain::<12>(&faults);
    faults.arm(1);
    assert!(domain.ops().sync_map(range(0, 4096)).is_err());
}
