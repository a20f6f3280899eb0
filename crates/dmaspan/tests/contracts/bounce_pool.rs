//! `BouncePool`: slots that are not there, limits that change, and fewer or more slots than were
//! asked for.

use std::sync::Arc;

use dmaspan::dma::{
    Bounce, BouncePool, Device, DeviceConfig, DmaConfig, DmaDomain, Flush, Original, SlotRequest,
    To, Trust,
};
use dmaspan::io_pgtable::Arena;
use dmaspan::iommu::Domain;
use dmaspan::platform::OneThread;
use dmaspan::{Prot, Span};

use crate::common::{
    BITS, Books, Ends, Format, Owned, PAGE, Script, Tlb, at_every_call, once, play, span, table,
};

/// What [`BouncePool::take_all`] does that says that it has taken all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum All {
    AsAsked,
    Fewer,
    More,
}

struct Slots(Arc<Books>, Arc<Script>, All);

/// A slot, and its granules.
#[derive(Debug)]
struct Slot {
    span: Span,
    whole: Span,
}

impl Slots {
    fn slot(&self, original: &Original, request: &SlotRequest) -> Slot {
        let low = original.span().paddr().get() & request.keep_bits;
        let span = self.0.fresh(low, original.span().len());
        let first = span.paddr().get() / PAGE * PAGE;
        let whole = self::span(first, (span.last().get() | (PAGE - 1)) - first + 1);
        self.0.grant(whole, Prot::READ_WRITE);
        Slot { span, whole }
    }
}

// SAFETY: 1., 2. Each slot has frames of its own, and is where its original is in them. 3. Nothing
// is copied: the memory is numbers. 4. The pool says of no memory that it is its own.
unsafe impl BouncePool for Slots {
    type Slot = Slot;

    fn take(&self, original: Original, request: &SlotRequest) -> Option<Slot> {
        (!self.1.turn()).then(|| self.slot(&original, request))
    }

    fn take_all(
        &self,
        originals: impl Iterator<Item = Original>,
        request: &SlotRequest,
        slots: &mut Vec<Slot>,
    ) -> bool {
        if self.1.turn() {
            return false;
        }
        let originals: Vec<Original> = originals.collect();
        let count = originals.len() - usize::from(self.2 == All::Fewer);
        slots.extend(originals[..count].iter().map(|original| self.slot(original, request)));
        if self.2 == All::More {
            slots.push(self.slot(&originals[0], request));
        }
        true
    }

    fn release(&self, slot: Slot) {
        let _ = self.1.turn();
        self.0.take_back(slot.whole, Prot::READ_WRITE);
        let _ = self.1.turn();
    }

    fn quarantine(&self, _slot: Slot) {
        let _ = self.1.turn();
    }

    fn span(&self, slot: &Slot) -> Span {
        let _ = self.1.turn();
        slot.span
    }

    fn copy(&self, _slot: &Slot, _offset: u64, _len: u64, _to: To) {
        let _ = self.1.turn();
    }

    fn reach(&self) -> Option<Span> {
        (!self.1.turn()).then(|| span(self.1.any(), 1))
    }

    fn max_len(&self, _request: &SlotRequest) -> u64 {
        let _ = self.1.turn();
        self.1.any()
    }

    fn granules(&self, _granule: u64) -> u64 {
        let _ = self.1.turn();
        self.1.any()
    }
}

#[test]
fn a_hostile_bounce_pool_shows_devices_nothing_but_slots_that_are_held() {
    let (always, seen) = (Bounce::Always, Ends::Bounced);
    for (bounce, trust, seen, all) in [
        (always, Trust::Trusted, seen, All::AsAsked),
        (always, Trust::Trusted, seen, All::Fewer),
        (always, Trust::Trusted, seen, All::More),
        // Their ends are bounced one by one.
        (Bounce::AsNeeded, Trust::Untrusted, Ends::Others, All::AsAsked),
    ] {
        at_every_call(|script| {
            let (books, (table, tlb)) = (Arc::new(Books::default()), table());
            let looks = (Arc::clone(&books), tlb.clone());
            script.on_look(move || looks.0.look(&looks.1));
            let domain = Domain::new(table, tlb.clone()).unwrap();
            let config = DmaConfig { flush: Flush::Lazy, ..DmaConfig::new(1) };
            type Dma = DmaDomain<Format, Arena, Tlb, OneThread, Owned>;
            let domain = Arc::new(Dma::new(domain, config, OneThread).unwrap());
            let slots = Slots(Arc::clone(&books), Arc::clone(script), all);
            let config = DeviceConfig { bounce, trust, ..DeviceConfig::bits(BITS) };
            let device = script.run(|| Device::new(domain, slots, config));
            let Some(Ok(device)) = device else { return };
            let device = Arc::new(device);
            let (weak, owner) = (Arc::downgrade(&device), Arc::clone(&books));
            script.on_reenter(move || {
                let Some(device) = weak.upgrade() else { return };
                once(&device, Owned::new(&owner, &[(0x10, PAGE)], seen, None));
            });
            let look = || books.look(&tlb);
            let memory = |pieces: &[_]| Owned::new(&books, pieces, seen, None);
            play(&device, script, &memory, &look);
            assert!(!script.is_quiet() || books.reached() > 0);
            let is_all = all != All::AsAsked || books.granted() == 0;
            assert!(!script.is_quiet() || is_all, "all was given back");
        });
    }
}
