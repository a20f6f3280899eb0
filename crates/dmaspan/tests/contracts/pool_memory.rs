//! `PoolMemory`: more, less and other memory than was asked for, and hosts that refuse.

use std::sync::Arc;

use dmaspan::dma::{Bounce, Device, DeviceConfig, DmaConfig, DmaDomain, Flush};
use dmaspan::io_pgtable::Arena;
use dmaspan::iommu::Domain;
use dmaspan::platform::OneThread;
use dmaspan::swiotlb::{
    Growth, HostRefused, InSlot, Pool, PoolConfig, PoolMemory, Room, SlotRequest, Transfer,
};
use dmaspan::{PhysAddr, Promise, Prot, Span};

use crate::common::{
    BITS, Books, Ends, Format, Owned, PAGE, Script, Tlb, at_every_call, once, play, table,
};

const RW: Prot = Prot::READ_WRITE;

struct Memory {
    books: Arc<Books>,
    script: Arc<Script>,
    spans: Vec<Span>,
}

impl Memory {
    fn new(books: &Arc<Books>, script: &Arc<Script>) -> Self {
        let spans = vec![books.fresh(0, 2 * PAGE), books.fresh(0, PAGE)];
        spans.iter().for_each(|span| books.grant(*span, RW));
        Self { books: Arc::clone(books), script: Arc::clone(script), spans }
    }
}

// SAFETY: what it gives are frames of its own, until they are freed or it is dropped. Nothing is
// copied: the memory is numbers, to which no pointers lead.
unsafe impl PoolMemory for Memory {
    type Address = PhysAddr;

    fn spans(&self) -> &[Span] {
        let _ = self.script.turn();
        &self.spans
    }

    fn can_copy(&self, _original: Span) -> bool {
        !self.script.turn()
    }

    fn copy(&self, _transfer: Transfer) {
        let _ = self.script.turn();
    }

    fn zero(&self, _bytes: InSlot) {
        let _ = self.script.turn();
    }

    fn read(&self, _bytes: InSlot, _into: &mut [u8]) {
        let _ = self.script.turn();
    }

    fn write(&self, _bytes: InSlot, _from: &[u8]) {
        let _ = self.script.turn();
    }

    fn allocate(&self, room: Room) -> Option<Span> {
        if self.script.turn() {
            return None;
        }
        let len = match self.script.any() {
            0 => room.bytes + PAGE,
            1 => room.bytes.div_ceil(2),
            _ => room.bytes,
        };
        let offset = if self.script.any() == 2 { 0x800 } else { 0 };
        let span = self.books.fresh(offset, len);
        self.books.grant(span, RW);
        Some(span)
    }

    fn free(&self, _promise: Promise<'_>, span: Span) {
        let _ = self.script.turn();
        self.books.take_back(span, RW);
        let _ = self.script.turn();
    }

    fn share(&self, _promise: Promise<'_>, _span: Span) -> Result<(), HostRefused> {
        if self.script.turn() { Err(HostRefused) } else { Ok(()) }
    }

    fn unshare(&self, _promise: Promise<'_>, _span: Span) -> Result<(), HostRefused> {
        if self.script.turn() { Err(HostRefused) } else { Ok(()) }
    }

    fn pressed(&self) {
        let _ = self.script.turn();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.spans.iter().for_each(|span| self.books.take_back(*span, RW));
    }
}

#[test]
fn a_hostile_pool_memory_is_reached_by_no_device_when_it_was_freed() {
    at_every_call(|script| {
        let (books, (table, tlb)) = (Arc::new(Books::default()), table());
        let looks = (Arc::clone(&books), tlb.clone());
        script.on_look(move || looks.0.look(&looks.1));
        let growth = Growth::new(4 * PAGE, 32 * PAGE);
        let config = PoolConfig { growth: Some(growth), ..PoolConfig::new(2) };
        let pool = script.run(|| Pool::new(Memory::new(&books, script), config, OneThread));
        let Some(Ok(pool)) = pool else { return };
        let pool = Arc::new(pool);
        let domain = Domain::new(table, tlb.clone()).unwrap();
        let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(1) };
        type Dma = DmaDomain<Format, Arena, Tlb, OneThread, Owned>;
        let domain = Arc::new(Dma::new(domain, config, OneThread).unwrap());
        let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(BITS) };
        let device = script.run(|| Device::new(domain, Arc::clone(&pool), config));
        let Some(Ok(device)) = device else { return };
        let device = Arc::new(device);
        let (weak, owner) = (Arc::downgrade(&device), Arc::clone(&books));
        script.on_reenter(move || {
            let Some(device) = weak.upgrade() else { return };
            once(&device, Owned::new(&owner, &[(0x10, PAGE)], Ends::Bounced, None));
        });
        let look = || books.look(&tlb);
        let memory = |pieces: &[_]| Owned::new(&books, pieces, Ends::Bounced, None);
        for _ in 0..3 {
            let _ = script.run(|| pool.grow());
        }
        play(&device, script, &memory, &look);
        let lease = script.run(|| pool.lease(PAGE, &SlotRequest::default()));
        let _ = script.run(|| lease.map(|lease| lease.map(|lease| lease.write(0, &[1]))));
        let _ = script.run(|| pool.shrink());
        look();
        play(&device, script, &memory, &look);
        assert!(!script.is_quiet() || books.reached() > 0);
        let _ = script.run(|| drop(device));
        let _ = script.run(|| pool.shrink());
        let _ = script.run(|| drop(pool));
        look();
        assert!(!script.is_quiet() || books.granted() == 0, "all was given back");
    });
}
