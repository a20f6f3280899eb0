//! `IommuOps`: hooks that fail, panic, map and unmap, and count their ranges anew at each call.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool};
use dmaspan::io_pgtable::{Arena, TableRoot};
use dmaspan::iommu::{Domain, Event, HardwareError, Invalidation, IommuOps, flush_queue};
use dmaspan::platform::OneThread;
use dmaspan::{IovaRange, PhysAddr, Promise};

use crate::common::{
    BITS, Books, Ends, Format, Owned, Script, Tlb, at_every_call, once, play, table,
};

struct Hooks(Tlb, Arc<Script>);

const PLANTED: HardwareError = HardwareError { what: "planted", status: 0 };

impl Hooks {
    fn turn(&self) -> Result<(), HardwareError> {
        if self.1.turn() { Err(PLANTED) } else { Ok(()) }
    }
}

// SAFETY: `Ok` comes from the simulated hardware alone.
unsafe impl IommuOps for Hooks {
    type Address = PhysAddr;

    fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError> {
        self.turn()?;
        self.0.begin(promise, root)?;
        let _ = self.1.turn();
        Ok(())
    }

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.turn()?;
        self.0.invalidate(what)?;
        // What was done is not said.
        self.turn()
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.turn()?;
        self.0.sync_map(range)
    }

    fn root_changed(
        &self,
        promise: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        self.turn()?;
        self.0.root_changed(promise, current)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.turn()?;
        self.0.detach()
    }

    fn observe(&self, _event: &Event<'_>) {
        let _ = self.1.turn();
    }

    fn max_ranges(&self) -> usize {
        let _ = self.1.turn();
        usize::try_from(self.1.any()).unwrap()
    }
}

#[test]
fn hostile_iommu_ops_leave_no_device_at_memory_that_went() {
    for flush in [Flush::Strict, Flush::Lazy] {
        at_every_call(|script| {
            let (books, (table, tlb)) = (Arc::new(Books::default()), table());
            let looks = (Arc::clone(&books), tlb.clone());
            script.on_look(move || looks.0.look(&looks.1));
            let hooks = Hooks(tlb.clone(), Arc::clone(script));
            let domain = match script.run(|| Domain::new(table, hooks)) {
                Some(Ok(domain)) => domain,
                // Nothing walks the tables.
                Some(Err(_)) => return,
                None => return books.look(&tlb),
            };
            let queue = flush_queue::Config { entries: 2, max_age: u64::MAX };
            let config = DmaConfig { flush, queue, ..DmaConfig::new(1) };
            type Dma = DmaDomain<Format, Arena, Hooks, OneThread, Owned>;
            let domain = script.run(|| Dma::new(domain, config, OneThread));
            let Some(Ok(domain)) = domain else { return };
            let device = Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(BITS)).unwrap();
            let device = Arc::new(device);
            let (weak, owner) = (Arc::downgrade(&device), Arc::clone(&books));
            script.on_reenter(move || {
                let Some(device) = weak.upgrade() else { return };
                once(&device, Owned::new(&owner, &[(0, 0x1000)], Ends::Seen, None));
            });
            let look = || books.look(&tlb);
            let memory = |pieces: &[_]| Owned::new(&books, pieces, Ends::Seen, None);
            play(&device, script, &memory, &look);
            assert!(!script.is_quiet() || books.reached() > 0);
            assert!(!script.is_quiet() || books.granted() == 0, "all was given back");
            let _ = script.run(|| drop(device));
            look();
        });
    }
}
