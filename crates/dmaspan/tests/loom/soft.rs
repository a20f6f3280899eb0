//! A device model that does one access after the other, beside unmaps and syncs: none uses what was
//! unmapped once the sync of that has returned, and every sync returns.

use dmaspan::iommu::soft::{SoftDevice, SoftIommu};
use dmaspan::iommu::{Domain, FaultAccess};
use loom::sync::atomic::{AtomicBool, Ordering};

use super::*;

type Iommu = SoftIommu<Tiny<TOP>, Tables>;
type SoftDomain = Domain<Tiny<TOP>, Tables, Iommu>;

/// A domain with pages 0 and 1, and whether the memory of each is the device's.
struct Lent {
    domain: SoftDomain,
    pages: [AtomicBool; 2],
}

impl Lent {
    fn unmap_and_take(&self, page: u64) {
        let mut room = SpanBuf::room::<1>();
        // SAFETY: each test hands every page to one thread.
        let unsynced = unsafe { self.domain.unmap(pages(page, 1), &mut SpanBuf::new(&mut room)) };
        assert!(unsynced.unwrap().sync().is_ok());
        // Nothing but the sync orders this behind the accesses.
        self.pages[usize::try_from(page).unwrap()].store(false, Ordering::Relaxed);
    }

    /// Does an access to each page in turn, to memory that is the device's as long as it lasts.
    fn use_all(&self, device: &mut SoftDevice<Tiny<TOP>, Tables>) {
        for (page, lent) in (0..).zip(&self.pages) {
            let _ = device.access(pages(page, 1), FaultAccess::Read, |_| {
                assert!(lent.load(Ordering::Relaxed), "page {page} was taken away");
                Ok::<_, ()>(())
            });
        }
    }
}

/// Runs `work` of two threads beside a device model, with at most so many changes of the thread
/// that nothing asks for.
fn beside_a_device(work: [fn(&Lent); 2], preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let memory = Tables::new();
        let table = PageTable::new(Tiny, memory.clone()).unwrap();
        let iommu = Iommu::over(&table).waiting_by(|_| {
            thread::yield_now();
            true
        });
        let domain = Domain::new(table, iommu.clone()).unwrap();
        let span = Span::new(paddr(0), 2 * PAGE).unwrap();
        // SAFETY: as above.
        unsafe { domain.map_spans(Iova::new(0), &[span], Prot::READ_WRITE) }.unwrap();
        let mut device = iommu.device(1);
        let lent = Arc::new(Lent { domain, pages: [true; 2].map(AtomicBool::new) });
        let [here, there] = work;
        let threads = [
            thread::spawn({
                let lent = Arc::clone(&lent);
                move || lent.use_all(&mut device)
            }),
            thread::spawn({
                let lent = Arc::clone(&lent);
                move || there(&lent)
            }),
        ];
        here(&lent);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_sync_returns_behind_the_access_that_used_what_it_took_away() {
    beside_a_device([|lent| lent.unmap_and_take(1), |_| ()], 3);
}

#[test]
fn two_syncs_have_a_busy_device_forget_both() {
    beside_a_device([|lent| lent.unmap_and_take(0), |lent| lent.unmap_and_take(1)], 2);
}
