//! A script says what a hostile implementer does at which call, and books say what devices may
//! reach.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable, TableMemory};
use dmaspan::{Iova, PhysAddr, Prot, Span};
use dmaspan_sim::iotlb::{Iotlb, IotlbConfig};
use dmaspan_sim::walker::Access;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

pub(crate) const PAGE: u64 = 4096;
/// All addresses that devices of these tests have.
pub(crate) const BITS: u32 = 18;

pub(crate) type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
pub(crate) type Format = ArmLpaeS1<12>;

/// What happens at one call of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incident {
    /// The call fails, if it can.
    Fail,
    /// It panics.
    Panic,
    /// It calls what called it, on other memory.
    Reenter,
}

type Hook = Box<dyn Fn() + Send + Sync>;

/// What a hostile implementer does.
#[derive(Default)]
pub(crate) struct Script {
    at: Option<(u64, Incident)>,
    calls: AtomicU64,
    is_in_hook: AtomicBool,
    /// Looks at what devices reach: at each call.
    look: Mutex<Option<Arc<Hook>>>,
    reenter: Mutex<Option<Arc<Hook>>>,
}

impl Script {
    pub(crate) fn on_look(&self, look: impl Fn() + Send + Sync + 'static) {
        *self.look.lock() = Some(Arc::new(Box::new(look)));
    }

    pub(crate) fn on_reenter(&self, reenter: impl Fn() + Send + Sync + 'static) {
        *self.reenter.lock() = Some(Arc::new(Box::new(reenter)));
    }

    /// The hooks know the objects that know the script.
    pub(crate) fn forget_hooks(&self) {
        (*self.look.lock(), *self.reenter.lock()) = (None, None);
    }

    fn call(&self, hook: &Mutex<Option<Arc<Hook>>>) {
        let hook = hook.lock().clone();
        if let Some(hook) = hook.filter(|_| !self.is_in_hook.swap(true, Ordering::Relaxed)) {
            hook();
            self.is_in_hook.store(false, Ordering::Relaxed);
        }
    }

    /// Every method of an implementer begins with this. Whether it is to fail.
    pub(crate) fn turn(&self) -> bool {
        if self.is_in_hook.load(Ordering::Relaxed) {
            return false;
        }
        self.call(&self.look);
        let call = 1 + self.calls.fetch_add(1, Ordering::Relaxed);
        let incident = self.at.and_then(|(at, incident)| (at == call).then_some(incident));
        assert!(incident != Some(Incident::Panic), "planted");
        if incident == Some(Incident::Reenter) {
            self.call(&self.reenter);
        }
        incident == Some(Incident::Fail)
    }

    /// A number that an implementer is free to choose: another at each call.
    pub(crate) fn any(&self) -> u64 {
        let call = self.calls.load(Ordering::Relaxed);
        [0, 1, 2, 3, PAGE, u64::MAX][usize::try_from(call % 6).unwrap()]
    }

    /// What a panic that was planted leaves; `None` then.
    pub(crate) fn run<R>(&self, run: impl FnOnce() -> R) -> Option<R> {
        let result = catch_unwind(AssertUnwindSafe(run));
        if let Err(panic) = &result {
            let text = panic.downcast_ref::<&str>();
            assert_eq!(text, Some(&"planted"), "a panic of the library's own");
        }
        result.ok()
    }
}

/// Plays a scenario without an incident, and then with each incident at each call of it. The
/// scenario says whether all has ended that was begun.
pub(crate) fn at_every_call(scenario: impl Fn(&Arc<Script>)) {
    let quiet = Arc::new(Script::default());
    scenario(&quiet);
    let calls = quiet.calls.load(Ordering::Relaxed);
    assert!(calls > 0, "the implementer was asked");
    for incident in [Incident::Fail, Incident::Panic, Incident::Reenter] {
        for nth in 1..=calls {
            let script = Arc::new(Script { at: Some((nth, incident)), ..Script::default() });
            // A message of the scenario's own says where.
            println!("{incident:?} at call {nth} of {calls}");
            scenario(&script);
            script.forget_hooks();
        }
    }
}

/// What devices may reach, by frame: how often for reads, and how often for writes too.
#[derive(Debug, Default)]
pub(crate) struct Books {
    frames: Mutex<BTreeMap<u64, [u64; 2]>>,
}

impl Books {
    fn each(&self, span: Span, prot: Prot, change: impl Fn(u64) -> u64) {
        let mut frames = self.frames.lock();
        let (first, last) = (span.paddr().get() / PAGE, span.last().get() / PAGE);
        for frame in first..=last {
            let [reads, writes] = frames.entry(frame).or_default();
            *reads = change(*reads);
            if prot.contains(Prot::WRITE) {
                *writes = change(*writes);
            }
        }
    }

    pub(crate) fn grant(&self, span: Span, prot: Prot) {
        self.each(span, prot, |count| count + 1);
    }

    /// The memory is freed, or another's, where this was the last.
    pub(crate) fn take_back(&self, span: Span, prot: Prot) {
        self.each(span, prot, |count| count.checked_sub(1).expect("it was granted"));
    }

    /// Whether a device may write there, or read.
    pub(crate) fn permits(&self, paddr: PhysAddr, access: Access) -> bool {
        let [reads, writes] =
            self.frames.lock().get(&(paddr.get() / PAGE)).copied().unwrap_or_default();
        if access == Access::Write { writes > 0 } else { reads > 0 }
    }

    /// How many frames are granted.
    pub(crate) fn granted(&self) -> usize {
        self.frames.lock().values().filter(|[reads, _]| *reads > 0).count()
    }

    /// A device uses all that it reaches, which its IOTLB knows from then on.
    pub(crate) fn look(&self, tlb: &Tlb) {
        for iova in (0..1 << BITS).step_by(4096) {
            for access in [Access::Read, Access::Write] {
                let hit = tlb.translate(Iova::new(iova), access);
                let paddr = hit.ok().map(|hit| hit.paddr);
                let is_bad = paddr.is_some_and(|paddr| !self.permits(paddr, access));
                assert!(!is_bad, "{access:?} of {iova:#x} reaches {paddr:?}");
            }
        }
    }
}

pub(crate) fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

/// A table of memory that is to be tried, and hardware that walks it and forgets nothing by itself.
pub(crate) fn table_in<M: TableMemory<u64>>(
    memory: M,
    tables: &Arena,
) -> (PageTable<Format, M>, Tlb) {
    let format = Format::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, memory).unwrap();
    let registers = table.format().registers(table.root());
    let walker = ArmLpaeS1Walker::new(registers.into()).unwrap();
    let tlb = Iotlb::with_config(walker, tables.clone(), IotlbConfig::default());
    (table, tlb)
}

pub(crate) fn table() -> (PageTable<Format, Arena>, Tlb) {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    table_in(tables.clone(), &tables)
}
