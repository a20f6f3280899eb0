//! Two threads that change what one stream is attached to: one after the other, and no domain ends
//! while hardware uses it.

use std::sync::Arc;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::PageTable;
use dmaspan::iommu::{
    AttachError, AttachedTo, Attachment, Domain, DomainOf, FaultHook, HardwareError, Invalidation,
    IommuOps, PagingDomain, Port, Prepared, ReservedRegions, Target,
};
use dmaspan::platform::Flag;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use crate::tables::Tables;
use crate::tiny::{TOP, Tiny};

/// What hardware uses: the number of a domain, or this. `Relaxed`, so that nobody gets an order
/// from it.
type Uses = Arc<AtomicU32>;
const NOTHING: u32 = 0;

/// The hooks of the domain with that number.
struct NoTlb(u32);

// SAFETY: there are no devices.
unsafe impl IommuOps for NoTlb {
    type Address = PhysAddr;

    fn invalidate(&self, _: &Invalidation<'_>) -> Result<(), HardwareError> {
        Ok(())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        1
    }
}

/// A domain with a number, that must not be in use when it ends.
struct Numbered {
    domain: Domain<Tiny<TOP>, Tables, NoTlb>,
    uses: Uses,
}

impl PagingDomain for Numbered {
    type Format = Tiny<TOP>;
    type Memory = Tables;
    type Ops = NoTlb;

    fn domain(&self) -> &Domain<Tiny<TOP>, Tables, NoTlb> {
        &self.domain
    }
}

impl Numbered {
    fn number(&self) -> u32 {
        self.domain.ops().0
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let used = self.uses.fetch_add(0, Ordering::Relaxed);
            assert_ne!(used, self.number(), "hardware uses what ends");
        }
    }
}

/// A stream whose hardware takes its time.
struct Stream {
    uses: Uses,
    regions: ReservedRegions,
    faults: FaultHook<Flag>,
    /// How many hooks are running.
    inside: AtomicU32,
}

impl Stream {
    fn set(&self, uses: u32) -> Result<(), HardwareError> {
        assert_eq!(self.inside.fetch_add(1, Ordering::Relaxed), 0, "one hook at a time");
        self.uses.swap(uses, Ordering::Relaxed);
        self.inside.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

// SAFETY: there are no accesses.
unsafe impl Port for Stream {
    type Paging = Numbered;
    type Lock = Flag;

    fn reserved_regions(&self) -> &ReservedRegions {
        &self.regions
    }

    fn faults(&self) -> &FaultHook<Flag> {
        &self.faults
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.set(NOTHING)
    }

    fn translate(&self, domain: &DomainOf<Numbered>) -> Result<(), HardwareError> {
        self.set(domain.ops().0)
    }
}

struct Rig {
    stream: Attachment<Stream>,
    uses: Uses,
}

impl Rig {
    fn domain(&self, number: u32) -> Target<Numbered> {
        let table = PageTable::new(Tiny, Tables::new()).unwrap();
        let domain = Domain::new(table, NoTlb(number)).unwrap();
        let uses = Arc::clone(&self.uses);
        Target::Paging(Prepared::new(Arc::new(Numbered { domain, uses })))
    }
}

/// Runs two changes of a stream that has domain 1, in every way; domains 2 and 3 are theirs. What
/// it has in the end is what hardware uses.
fn race(work: [fn(&Rig, Target<Numbered>); 2]) {
    loom::model(move || {
        let uses = Uses::default();
        let port = Stream {
            uses: Arc::clone(&uses),
            regions: ReservedRegions::new(),
            faults: FaultHook::new(),
            inside: AtomicU32::new(0),
        };
        let stream = Attachment::new(port).ok().unwrap();
        let rig = loom::sync::Arc::new(Rig { stream, uses });
        rig.stream.attach(rig.domain(1)).unwrap();
        let targets = (rig.domain(2), rig.domain(3));
        let other = loom::sync::Arc::clone(&rig);
        let [here, there] = work;
        let thread = thread::spawn(move || there(&other, targets.1));
        here(&rig, targets.0);
        thread.join().unwrap();
        let has = rig.stream.domain().map_or(NOTHING, |domain| domain.number());
        assert_eq!(rig.uses.load(Ordering::Relaxed), has);
        let blocked = rig.stream.attached_to() == AttachedTo::Blocked;
        assert_eq!(blocked, has == NOTHING);
    });
}

fn replace(rig: &Rig, target: Target<Numbered>) {
    rig.stream.replace(target).unwrap();
}

fn detach(rig: &Rig, _: Target<Numbered>) {
    rig.stream.detach().unwrap();
}

fn attach(rig: &Rig, target: Target<Numbered>) {
    if let Err(error) = rig.stream.attach(target) {
        assert_eq!(error, AttachError::Attached { to: AttachedTo::Paging });
    }
}

#[test]
fn two_that_replace_a_domain_take_turns() {
    race([replace, replace]);
}

#[test]
fn a_domain_that_is_replaced_beside_a_detach_ends_when_it_is_not_used() {
    race([replace, detach]);
}

#[test]
fn a_stream_is_attached_after_a_detach_or_not_at_all() {
    race([attach, detach]);
}
