//! A script says what a hostile implementer does at which call, and books say what devices may
//! reach.

use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};

use dmaspan::dma::{BouncePool, Device, DmaMemory, Piece, ReserveRequest, Segment, Translation};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable, TableMemory};
use dmaspan::{Direction, Iova, PhysAddr, Prot, Span};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use dmaspan_sim::walker::{Access, FaultKind, TableWords};
use parking_lot::Mutex;

pub(crate) const PAGE: u64 = 4096;
/// At how many calls an incident happens.
const MOST: u64 = 100;
/// All addresses that devices of these tests have.
pub(crate) const BITS: u32 = 17;

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
    /// Whether nothing goes wrong.
    pub(crate) fn is_quiet(&self) -> bool {
        self.at.is_none()
    }

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
        self.step()
    }

    /// As [`turn`](Self::turn), where it may not call back, since a lock is held. It cannot fail.
    pub(crate) fn turn_in_lock(&self) {
        if !self.is_in_hook.swap(true, Ordering::Relaxed) {
            let look = self.look.lock().clone();
            look.into_iter().for_each(|look| look());
            self.is_in_hook.store(false, Ordering::Relaxed);
            let call = 1 + self.calls.fetch_add(1, Ordering::Relaxed);
            assert!(self.at != Some((call, Incident::Panic)), "planted");
        }
    }

    /// A [`turn`](Self::turn) behind what cannot fail any more.
    pub(crate) fn step_after(&self) {
        let _ = self.turn();
    }

    /// As [`turn`](Self::turn), where nothing can have changed since the last look.
    pub(crate) fn step(&self) -> bool {
        if self.is_in_hook.load(Ordering::Relaxed) {
            return false;
        }
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
    static QUIET: Once = Once::new();
    // What is planted is no news.
    QUIET.call_once(|| {
        let tell = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if panic.payload().downcast_ref::<&str>() != Some(&"planted") {
                tell(panic);
            }
        }));
    });
    let quiet = Arc::new(Script::default());
    scenario(&quiet);
    let calls = quiet.calls.load(Ordering::Relaxed);
    assert!(calls > 0, "the implementer was asked");
    // Of very many calls, which are alike, these.
    let step = usize::try_from(calls.div_ceil(MOST)).unwrap();
    for incident in [Incident::Fail, Incident::Panic, Incident::Reenter] {
        for nth in (1..=calls).step_by(step) {
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
    next: AtomicU64,
    /// How often a device came to memory.
    reached: AtomicU64,
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

    /// Frames that nobody had before, the first at this offset in its frame: where they begin.
    pub(crate) fn fresh(&self, offset: u64, len: u64) -> Span {
        let frames = (offset + len).div_ceil(PAGE) + 1;
        let first = 0x8_0000 + self.next.fetch_add(frames, Ordering::Relaxed);
        span(first * PAGE + offset, len)
    }

    /// A device came there for a write.
    pub(crate) fn count(&self, paddr: PhysAddr) {
        assert!(self.permits(paddr, Access::Write), "a device reaches {paddr}");
        self.reached.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn reached(&self) -> u64 {
        self.reached.load(Ordering::Relaxed)
    }

    /// How many frames are granted.
    pub(crate) fn granted(&self) -> usize {
        self.frames.lock().values().filter(|[reads, _]| *reads > 0).count()
    }

    /// A device uses all that it reaches, which its IOTLB knows from then on.
    pub(crate) fn look<T: TableWords>(&self, tlb: &Iotlb<ArmLpaeS1Walker, T>) {
        for iova in (0..1 << BITS).step_by(4096) {
            // What may not be written may yet be read.
            for access in [Access::Write, Access::Read] {
                match tlb.translate(Iova::new(iova), access) {
                    Ok(hit) => {
                        let paddr = hit.paddr;
                        assert!(self.permits(paddr, access), "{access:?} of {iova:#x}: {paddr}");
                        self.reached.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                    Err(fault) => {
                        let is_walk = matches!(fault.kind, FaultKind::ExternalAbort(_));
                        assert!(!is_walk, "{fault}: hardware walks what is no table");
                        if fault.kind != FaultKind::Permission {
                            break;
                        }
                    }
                }
            }
        }
    }
}

pub(crate) fn span(paddr: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(paddr), len).unwrap()
}

pub(crate) fn format() -> Format {
    Format::new(ArmLpaeS1Config::new(48, 48)).unwrap()
}

/// Hardware that walks a table from its root, and forgets nothing by itself.
pub(crate) fn hardware<T: TableWords>(root: PhysAddr, tables: T) -> Iotlb<ArmLpaeS1Walker, T> {
    let registers = format().registers(root);
    Iotlb::new(ArmLpaeS1Walker::new(registers.into()).unwrap(), tables)
}

/// A table of memory that is to be tried, with its hardware.
pub(crate) fn table_in<M: TableMemory<u64>>(
    memory: M,
    tables: &Arena,
) -> Option<(PageTable<Format, M>, Tlb)> {
    let table = PageTable::new(format(), memory).ok()?;
    let root = table.root();
    Some((table, hardware(root, tables.clone())))
}

pub(crate) fn table() -> (PageTable<Format, Arena>, Tlb) {
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    table_in(tables.clone(), &tables).unwrap()
}

/// Where a piece begins in its first frame, and its bytes.
pub(crate) type Piecewise = (u64, u64);

/// Memory that devices may reach while it exists.
pub(crate) struct Owned {
    pieces: Vec<Piece>,
    granted: Vec<Span>,
    books: Arc<Books>,
    /// Where it is hostile.
    script: Option<Arc<Script>>,
}

/// Says what devices may see of the frames that a buffer begins and ends in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    Seen,
    /// They are others', too.
    Others,
    /// They may not see the buffer at all.
    Bounced,
}

impl Owned {
    pub(crate) fn new(
        books: &Arc<Books>,
        pieces: &[Piecewise],
        ends: Ends,
        script: Option<&Arc<Script>>,
    ) -> Self {
        let spans: Vec<Span> = pieces.iter().map(|(at, len)| books.fresh(*at, *len)).collect();
        let seen = |span: &Span| match ends {
            Ends::Seen => Some(*span),
            Ends::Bounced => None,
            Ends::Others => {
                let first = span.paddr().get().next_multiple_of(PAGE);
                let end = (span.last().get() + 1) / PAGE * PAGE;
                (first < end).then(|| self::span(first, end - first))
            }
        };
        let granted: Vec<Span> = spans.iter().filter_map(seen).collect();
        granted.iter().for_each(|span| books.grant(*span, Prot::READ_WRITE));
        let pieces = spans.into_iter().map(Piece::memory).collect();
        Self { pieces, granted, books: Arc::clone(books), script: script.cloned() }
    }
}

// SAFETY: nobody touches the memory, which is numbers. Others never get them.
unsafe impl DmaMemory for Owned {
    fn pieces(&self) -> &[Piece] {
        self.script.as_ref().map(|script| script.turn());
        &self.pieces
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let granted = std::mem::take(&mut self.granted);
        granted.iter().for_each(|span| self.books.take_back(*span, Prot::READ_WRITE));
        // A drop while a panic unwinds may not panic.
        if !std::thread::panicking() {
            self.script.as_ref().map(|script| script.turn());
        }
    }
}

/// Uses a device as drivers do, and looks at what it reaches between any two calls.
pub(crate) fn play<T: Translation, B: BouncePool>(
    device: &Device<T, B>,
    script: &Script,
    memory: &dyn Fn(&[Piecewise]) -> T::Memory,
    look: &dyn Fn(),
) {
    let both = Direction::Bidirectional;
    let mut mappings = Vec::new();
    for piece in [(0, PAGE), (0x123, 700), (0xf00, 3 * PAGE)] {
        if let Some(Ok(mapping)) = script.run(|| device.map_single(memory(&[piece]), both)) {
            mappings.push(mapping);
        }
        look();
    }
    let mut segments = [Segment::default(); 8];
    let pieces = [(0x10, 200), (0, 2 * PAGE), (0x800, 0x1000)];
    let list = script.run(|| device.map_list(memory(&pieces), both, &mut segments));
    look();
    let (len, pieces) = (4 * PAGE, 2);
    let request = ReserveRequest { len, offset: 0, pieces, direction: both };
    let mut reservation = script.run(|| device.reserve(request).ok()).flatten();
    if let Some(reservation) = &mut reservation {
        for offset in [0, 2 * PAGE] {
            let _ = script.run(|| device.link(reservation, offset, memory(&[(0, PAGE)])));
        }
        let _ = script.run(|| device.announce(reservation));
        look();
        let _ = script.run(|| device.unlink(reservation, 0, PAGE, &mut drop));
        look();
    }
    if let Some(reservation) = reservation {
        let _ = script.run(|| device.destroy(reservation, drop).map_err(drop));
        look();
    }
    for mapping in &mappings {
        let _ = script.run(|| device.sync_for_cpu(mapping, 0, 1));
        let _ = script.run(|| device.sync_for_device(mapping, 0, 1));
    }
    for mapping in mappings {
        let _ = script.run(|| device.unmap(mapping).map(drop));
        look();
    }
    if let Some(Ok(list)) = list {
        let _ = script.run(|| device.unmap_list(list).map(drop));
        look();
    }
    for _ in 0..2 {
        let _ = script.run(|| device.flush());
        look();
    }
}

/// Maps memory and ends it, for a hook that calls back.
pub(crate) fn once<T: Translation, B: BouncePool>(device: &Device<T, B>, memory: T::Memory) {
    if let Ok(mapping) = device.map_single(memory, Direction::ToDevice) {
        let _ = device.unmap(mapping).map(drop);
    }
}
