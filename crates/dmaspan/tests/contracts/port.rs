//! `Port` and `DriverOps`: hooks of streams and of domains that fail and panic, and domains that
//! are another one at each call.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, TableRoot};
use dmaspan::iommu::soft::{SoftDevice, SoftStream};
use dmaspan::iommu::{
    Attachment, Domain, DomainOf, DriverOps, Event, FaultAccess, FaultHook, HardwareError,
    Incompatible, Invalidation, IommuOps, PagingDomain, Port, Prepared, ReservedRegions, SoftIommu,
    Target,
};
use dmaspan::platform::Flag;
use dmaspan::{Iova, IovaRange, PhysAddr, Promise, Prot, Span};
use parking_lot::Mutex;

use crate::common::{BITS, Books, Format, PAGE, Script, at_every_call, table};

type Soft = SoftIommu<Format, Arena>;
type SoftDomain<O> = Domain<Format, Arena, O>;

/// Memory that goes when its domains have gone.
struct Memory(Arc<Books>, Vec<Span>);

impl Drop for Memory {
    fn drop(&mut self) {
        self.1.iter().for_each(|span| self.0.take_back(*span, Prot::READ_WRITE));
    }
}

/// Two domains, either of which it says that it is.
struct Either<O: DriverOps<Driver = Soft, Address = PhysAddr>> {
    domains: [SoftDomain<O>; 2],
    script: Arc<Script>,
    // Behind the domains.
    memory: Memory,
}

impl<O: DriverOps<Driver = Soft, Address = PhysAddr>> Either<O> {
    fn new(books: &Arc<Books>, script: &Arc<Script>, ops: &dyn Fn(Soft) -> O) -> Option<Self> {
        let made = [(); 2].map(|()| {
            let (table, _) = table();
            let soft = SoftIommu::over(&table);
            script.run(|| Domain::new(table, ops(soft)).ok()).flatten()
        });
        let [Some(first), Some(second)] = made else { return None };
        let domains = [first, second];
        let memory = Memory(Arc::clone(books), Vec::new());
        let mut either = Self { domains, script: Arc::clone(script), memory };
        for (domain, page) in either.domains.iter().zip([2, 3]) {
            let span = books.fresh(0, 2 * PAGE);
            books.grant(span, Prot::READ_WRITE);
            either.memory.1.push(span);
            let iova = Iova::new(page * PAGE);
            // SAFETY: nothing is mapped there, and the memory stays while the domain does.
            let map = || unsafe { domain.map_spans(iova, &[span], Prot::READ_WRITE) };
            let _ = script.run(|| map().map_err(drop));
        }
        Some(either)
    }
}

impl<O: DriverOps<Driver = Soft, Address = PhysAddr>> PagingDomain for Either<O> {
    type Format = Format;
    type Memory = Arena;
    type Ops = O;

    fn domain(&self) -> &SoftDomain<O> {
        &self.domains[usize::from(self.script.any() % 2 == 1)]
    }
}

/// A stream of software, and where it is hostile.
struct Hooks<O: DriverOps<Driver = Soft, Address = PhysAddr>> {
    stream: SoftStream<Either<O>>,
    script: Option<Arc<Script>>,
}

const PLANTED: HardwareError = HardwareError { what: "planted", status: 0 };

impl<O: DriverOps<Driver = Soft, Address = PhysAddr>> Hooks<O> {
    fn turn(&self) -> Result<(), HardwareError> {
        let fails = self.script.as_ref().is_some_and(|script| script.turn());
        if fails { Err(PLANTED) } else { Ok(()) }
    }
}

// SAFETY: `Ok` comes from the software's own stream, and what fails has done all of it or nothing.
unsafe impl<O: DriverOps<Driver = Soft, Address = PhysAddr> + 'static> Port for Hooks<O> {
    type Paging = Either<O>;
    type Lock = Flag;

    fn reserved_regions(&self) -> &ReservedRegions {
        let _ = self.turn();
        self.stream.reserved_regions()
    }

    fn faults(&self) -> &FaultHook<Flag> {
        self.stream.faults()
    }

    fn accepts(&self, domain: &DomainOf<Either<O>>) -> Result<(), Incompatible> {
        self.turn().map_err(|_| Incompatible { what: "planted" })?;
        self.stream.accepts(domain)
    }

    fn passes(&self) -> bool {
        self.turn().is_ok()
    }

    fn block(&self) -> Result<(), HardwareError> {
        self.turn()?;
        self.stream.block()?;
        self.turn()
    }

    fn translate(&self, domain: &DomainOf<Either<O>>) -> Result<(), HardwareError> {
        self.turn()?;
        self.stream.translate(domain)?;
        self.turn()
    }
}

/// A stream goes from domain to domain, some of which go.
fn switch<O: DriverOps<Driver = Soft, Address = PhysAddr> + 'static>(
    script: &Arc<Script>,
    ops: &dyn Fn(Soft) -> O,
    of_port: Option<&Arc<Script>>,
) {
    let books = Arc::new(Books::default());
    let stream = SoftStream::<Either<O>>::new(5, ReservedRegions::new());
    let device: Arc<Mutex<SoftDevice<Format>>> = Arc::new(Mutex::new(stream.device()));
    let seen = (Arc::clone(&books), Arc::clone(&device));
    let look = move || {
        let mut device = seen.1.lock();
        for page in 0..(1 << BITS) / PAGE {
            if let Ok(paddr) = device.probe(Iova::new(page * PAGE), FaultAccess::Write) {
                seen.0.count(paddr);
            }
        }
    };
    script.on_look(look.clone());
    let hooks = Hooks { stream, script: of_port.cloned() };
    let Some(Ok(attachment)) = script.run(|| Attachment::new(hooks)) else { return };
    let mut last = None;
    for n in 0..3 {
        let Some(domains) = Either::new(&books, script, ops) else { continue };
        let domains = Arc::new(domains);
        let target = Target::Paging(Prepared::new(Arc::clone(&domains)));
        let attached = script.run(|| match n {
            0 => attachment.attach(target),
            _ => attachment.replace(target),
        });
        look();
        assert!(!script.is_quiet() || attached == Some(Ok(())));
        // The one before goes, unless the attachment has it.
        let _ = script.run(|| drop(last.replace(domains)));
        look();
    }
    assert!(!script.is_quiet() || books.reached() > 0);
    let _ = script.run(|| attachment.detach());
    look();
    let _ = script.run(|| drop(last));
    look();
    let _ = script.run(|| drop(attachment));
    look();
    assert!(!script.is_quiet() || books.granted() == 0);
}

#[test]
fn a_hostile_port_leaves_its_stream_at_no_memory_of_a_domain_that_went() {
    at_every_call(|script| switch(script, &|soft| soft, Some(script)));
}

/// Hooks of a driver that panic behind what they passed on.
struct Wraps(Soft, Arc<Script>);

// SAFETY: everything is the software's own answer.
unsafe impl IommuOps for Wraps {
    type Address = PhysAddr;

    fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError> {
        self.0.begin(promise, root).inspect(|()| self.1.step_after())
    }

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        self.0.invalidate(what).inspect(|()| self.1.step_after())
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.0.sync_map(range).inspect(|()| self.1.step_after())
    }

    fn root_changed(
        &self,
        promise: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        self.0.root_changed(promise, current).inspect(|()| self.1.step_after())
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.0.detach().inspect(|()| self.1.step_after())
    }

    fn observe(&self, _event: &Event<'_>) {
        let _ = self.1.turn();
    }

    fn max_ranges(&self) -> usize {
        self.0.max_ranges()
    }
}

// SAFETY: it is always the same, and was asked first.
unsafe impl DriverOps for Wraps {
    type Driver = Soft;

    fn driver(&self) -> &Soft {
        let _ = self.1.step();
        &self.0
    }
}

#[test]
fn hostile_driver_ops_leave_a_stream_at_no_memory_of_a_domain_that_went() {
    at_every_call(|script| switch(script, &|soft| Wraps(soft, Arc::clone(script)), None));
}
