//! `Format`: entries that panic when they are read or made, and permissions that are refused.

use std::fmt;
use std::sync::Arc;

use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, Flush, NoPool};
use dmaspan::io_pgtable::{self, Arena, Entry, Geometry, Groups, Manual, PageTable};
use dmaspan::iommu::{Domain, flush_queue};
use dmaspan::platform::OneThread;
use dmaspan::{PhysAddr, Prot};

use crate::common::{
    BITS, Books, Ends, Format, Owned, Script, Tlb, at_every_call, format, hardware, once, play,
};

/// The format of all these tests.
struct Hostile(Format, Arc<Script>);

impl fmt::Debug for Hostile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

macro_rules! asks {
    ($(fn $name:ident(&self $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => { $(
        fn $name(&self $(, $argument: $type)*) -> $result {
            let _ = self.1.step();
            self.0.$name($($argument),*)
        }
    )* };
}

// SAFETY: all entries are the inner format's.
unsafe impl io_pgtable::Format for Hostile {
    type Word = u64;

    const GRANULE_LG2: u32 = <Format as io_pgtable::Format>::GRANULE_LG2;
    const LG2_ENTRIES: u32 = <Format as io_pgtable::Format>::LG2_ENTRIES;
    const GROUPS: Groups = <Format as io_pgtable::Format>::GROUPS;
    const WRITTEN_BACK: u64 = <Format as io_pgtable::Format>::WRITTEN_BACK;
    const DIRTY: u64 = <Format as io_pgtable::Format>::DIRTY;

    fn refuses(&self, prot: Prot) -> bool {
        self.1.step() || self.0.refuses(prot)
    }

    asks! {
        fn geometry(&self) -> Geometry;
        fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64;
        fn leaf(&self, template: u64, paddr: PhysAddr) -> u64;
        fn advance(&self, leaf: u64, bytes: u64) -> u64;
        fn link(&self, level: u32, table: PhysAddr) -> u64;
        fn decode(&self, level: u32, word: u64) -> Entry;
        fn table_of(&self, level: u32, word: u64) -> Option<PhysAddr>;
        fn is_single(&self, level: u32, word: u64) -> bool;
        fn prot(&self, level: u32, leaf: u64) -> Prot;
        fn tracks_dirty(&self) -> bool;
        fn manual(&self) -> Manual;
        fn needs_break(&self) -> bool;
        fn breaks_to_change(&self) -> bool;
    }
}

#[test]
fn a_hostile_format_leaves_no_device_at_memory_that_went_nor_walks_freed_tables() {
    for flush in [Flush::Strict, Flush::Lazy] {
        at_every_call(|script| {
            let books = Arc::new(Books::default());
            let arena = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
            let hostile = Hostile(format(), Arc::clone(script));
            let table = script.run(|| PageTable::new(hostile, arena.clone()));
            let Some(Ok(table)) = table else { return };
            let tlb = hardware(table.root(), arena);
            let Some(Ok(domain)) = script.run(|| Domain::new(table, tlb.clone())) else { return };
            let queue = flush_queue::Config { entries: 2, max_age: u64::MAX };
            let config = DmaConfig { flush, queue, ..DmaConfig::new(1) };
            type Dma = DmaDomain<Hostile, Arena, Tlb, OneThread, Owned>;
            let domain = script.run(|| Dma::new(domain, config, OneThread));
            let Some(Ok(domain)) = domain else { return };
            let device =
                script.run(|| Device::new(Arc::new(domain), NoPool, DeviceConfig::bits(BITS)));
            let Some(Ok(device)) = device else { return };
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
