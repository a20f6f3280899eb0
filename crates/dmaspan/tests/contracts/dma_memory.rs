//! `DmaMemory` and `FromRegistered`: memory that panics when it is asked where it is or dropped,
//! and calls back.

use std::cell::RefCell;
use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, Flush, FromRegistered, NoPool, Piece,
    Registered,
};
use dmaspan::io_pgtable::Arena;
use dmaspan::iommu::{Domain, flush_queue};
use dmaspan::platform::OneThread;
use dmaspan::regbuf::{Buffer, Keep, Segments, SegmentsBuilder};
use dmaspan::{PhysAddr, Prot, UserAddr, UserRange};

use crate::common::{
    BITS, Books, Ends, Format, Owned, PAGE, Script, Tlb, at_every_call, once, play, table,
};

/// Memory of a driver of its own, or of a registered buffer.
enum Memory {
    Owned(Owned),
    Registered(Registered, Arc<Script>),
}

// SAFETY: either promised, and is dropped with this.
unsafe impl DmaMemory for Memory {
    fn pieces(&self) -> &[Piece] {
        match self {
            Self::Owned(owned) => owned.pieces(),
            Self::Registered(registered, script) => {
                let _ = script.turn();
                registered.pieces()
            }
        }
    }
}

std::thread_local! {
    /// The script of the buffers that this thread maps.
    static SCRIPT: RefCell<Option<Arc<Script>>> = const { RefCell::new(None) };
}

// SAFETY: it owns the buffer.
unsafe impl FromRegistered for Memory {
    fn from_registered(registered: Registered) -> Self {
        let script = SCRIPT.with_borrow(Clone::clone).unwrap();
        let memory = Self::Registered(registered, Arc::clone(&script));
        let _ = script.turn();
        memory
    }
}

type Dma = DmaDomain<Format, Arena, Tlb, OneThread, Memory>;

fn device(flush: Flush) -> (Arc<Device<Dma>>, Tlb) {
    let (table, tlb) = table();
    let domain = Domain::new(table, tlb.clone()).unwrap();
    let queue = flush_queue::Config { entries: 2, max_age: u64::MAX };
    let config = DmaConfig { flush, queue, ..DmaConfig::new(1) };
    let domain = Arc::new(Dma::new(domain, config, OneThread).unwrap());
    (Arc::new(Device::new(domain, NoPool, DeviceConfig::bits(BITS)).unwrap()), tlb)
}

fn watch(script: &Script, device: &Arc<Device<Dma>>, books: &Arc<Books>, tlb: &Tlb) {
    let looks = (Arc::clone(books), tlb.clone());
    script.on_look(move || looks.0.look(&looks.1));
    let (weak, owner) = (Arc::downgrade(device), Arc::clone(books));
    script.on_reenter(move || {
        let Some(device) = weak.upgrade() else { return };
        once(&device, Memory::Owned(Owned::new(&owner, &[(0, PAGE)], Ends::Seen, None)));
    });
}

#[test]
fn hostile_dma_memory_is_reached_by_no_device_behind_its_end() {
    for flush in [Flush::Strict, Flush::Lazy] {
        at_every_call(|script| {
            let (books, (device, tlb)) = (Arc::new(Books::default()), device(flush));
            watch(script, &device, &books, &tlb);
            let look = || books.look(&tlb);
            let memory =
                |pieces: &[_]| Memory::Owned(Owned::new(&books, pieces, Ends::Seen, Some(script)));
            play(&device, script, &memory, &look);
            assert!(!script.is_quiet() || (books.reached() > 0 && books.granted() == 0));
            let _ = script.run(|| drop(device));
            look();
        });
    }
}

/// Keeps the memory of a buffer.
struct Kept(Option<Owned>, Arc<Script>);

impl Keep<PhysAddr> for Kept {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {
        self.0 = None;
        let _ = !std::thread::panicking() && self.1.turn();
    }
}

#[test]
fn a_hostile_from_registered_keeps_buffers_from_devices_when_they_went() {
    at_every_call(|script| {
        SCRIPT.set(Some(Arc::clone(script)));
        let (books, (device, tlb)) = (Arc::new(Books::default()), device(Flush::Strict));
        watch(script, &device, &books, &tlb);
        let look = || books.look(&tlb);
        for access in [Prot::READ_WRITE, Prot::READ] {
            let owned = Owned::new(&books, &[(0, 2 * PAGE), (0, PAGE)], Ends::Seen, None);
            let mut builder = SegmentsBuilder::new();
            owned.pieces().iter().for_each(|piece| builder.push(piece.span).unwrap());
            let user = UserRange::from_len(UserAddr::new(0), 3 * PAGE).unwrap();
            let (segments, keep) =
                (builder.build().unwrap(), Kept(Some(owned), Arc::clone(script)));
            // SAFETY: it is memory while it is kept.
            let buffer = unsafe { Buffer::new(segments, user, Prot::READ_WRITE, Box::new(keep)) };
            let buffer = Arc::new(buffer.unwrap());
            let mapped = script.run(|| device.map_buffer(Arc::clone(&buffer), access));
            look();
            let _ = script.run(|| drop(buffer));
            look();
            assert!(!script.is_quiet() || books.reached() > 0);
            let _ = script.run(|| drop(mapped));
            look();
        }
        assert!(!script.is_quiet() || books.granted() == 0);
        let _ = script.run(|| device.flush());
        look();
    });
}
