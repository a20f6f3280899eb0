//! `TableMemory`: tables that are not there, and panics at every step that a walker takes.

use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool};
use dmaspan::io_pgtable::{
    Arena, ArenaList, Fresh, NoTables, TableAddr, TableMemory, TableShape, Word,
};
use dmaspan::iommu::{Domain, flush_queue};
use dmaspan::platform::OneThread;
use dmaspan::{Coherency, PhysAddr, Promise};

use crate::common::{
    BITS, Books, Ends, Format, Owned, Script, Tlb, at_every_call, once, play, table_in,
};

struct Tables(Arena, Arc<Script>);

// SAFETY: all tables are the arena's.
unsafe impl<W: Word> TableMemory<W> for Tables
where
    Arena: TableMemory<W, List = ArenaList>,
{
    type List = ArenaList;

    fn reserve(&self, shape: TableShape, count: usize) -> Result<ArenaList, NoTables> {
        if self.1.turn() {
            return Err(NoTables { asked: count });
        }
        TableMemory::<W>::reserve(&self.0, shape, count)
    }

    fn take(
        &self,
        promise: Promise<'_>,
        shape: TableShape,
        list: &mut ArenaList,
    ) -> Option<Fresh<'_, W>> {
        if self.1.turn() { None } else { self.0.take(promise, shape, list) }
    }

    fn coherency(&self) -> Coherency {
        TableMemory::<W>::coherency(&self.0)
    }

    fn publish(&self, fresh: Fresh<'_, W>) {
        let _ = self.1.turn();
        self.0.publish(fresh);
        let _ = self.1.turn();
    }

    fn entries(&self, table: &TableAddr) -> &[W::Atomic] {
        let _ = self.1.step();
        TableMemory::<W>::entries(&self.0, table)
    }

    fn written(&self, promise: Promise<'_>, entries: &[W::Atomic]) {
        let _ = self.1.turn();
        TableMemory::<W>::written(&self.0, promise, entries);
    }

    fn retire(&self, list: &mut ArenaList, table: TableAddr) {
        let _ = self.1.turn();
        TableMemory::<W>::retire(&self.0, list, table);
    }

    fn append(&self, promise: Promise<'_>, list: &mut ArenaList, other: ArenaList) {
        let _ = self.1.turn();
        TableMemory::<W>::append(&self.0, promise, list, other);
    }

    fn free(&self, promise: Promise<'_>, shape: TableShape, list: ArenaList) {
        let _ = self.1.turn();
        TableMemory::<W>::free(&self.0, promise, shape, list);
        let _ = self.1.turn();
    }
}

#[test]
fn a_hostile_table_memory_leaves_no_device_at_memory_that_went_nor_walks_freed_tables() {
    for flush in [Flush::Strict, Flush::Lazy] {
        at_every_call(|script| {
            let books = Arc::new(Books::default());
            let arena = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
            let tables = Tables(arena.clone(), Arc::clone(script));
            let made = script.run(|| table_in(tables, &arena));
            let Some(Some((table, tlb))) = made else { return };
            // Hardware walks nothing before.
            let Some(Ok(domain)) = script.run(|| Domain::new(table, tlb.clone())) else { return };
            let looks = (Arc::clone(&books), tlb.clone());
            script.on_look(move || looks.0.look(&looks.1));
            let queue = flush_queue::Config { entries: 2, max_age: u64::MAX };
            let config = DmaConfig { flush, queue, ..DmaConfig::new(1) };
            type Dma = DmaDomain<Format, Tables, Tlb, OneThread, Owned>;
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
            assert!(!script.is_quiet() || (books.reached() > 0 && books.granted() == 0));
            let _ = script.run(|| drop(device));
            look();
        });
    }
}
