//! Tables in frames of a kernel's page allocator, which gives freed frames to others at once.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use dmaspan::dma::{
    Device, DeviceConfig, DmaConfig, DmaDomain, DmaMemory, FrameMemory, NoPool, RawMemory,
};
use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpaeS2, ArmLpaeS2Config, ArmV7s, ArmV7sConfig, Format, FrameAlloc,
    FrameTables, PageTable, TableShape, X86_64, X86_64Config,
};
use dmaspan::iommu::{Domain, SoftIommu};
use dmaspan::platform::{Flag, OneThread};
use dmaspan::{Coherency, Iova, IovaRange, PhysAddr, Promise, Prot, Span, SpanBuf, lg2};
use dmaspan_sim::model::IntervalModel;
use dmaspan_sim::rng::Rng;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::{Access, NotATable, TableWords, WalkPath, Walker};
use parking_lot::Mutex;

use crate::common::{PROT, free, range, span};
use crate::formats::amd_v1::Amd;
use crate::formats::arm_lpae_s2::ArmS2;
use crate::formats::arm_v7s::ShortDescriptors;
use crate::formats::x86_64::FirstStage;

/// The memory of a machine, and its page allocator.
#[derive(Clone)]
pub(crate) struct Machine(Arc<Frames>);

struct Frames {
    memory: NonNull<u8>,
    coherency: Coherency,
    state: Mutex<State>,
    /// Words written back to memory, where hardware does not see caches.
    written_back: AtomicU64,
}

#[derive(Default)]
struct State {
    unused: u64,
    /// By size, as log2.
    free: BTreeMap<u32, Vec<u64>>,
    /// Tables of which size are where.
    tables: BTreeMap<u64, u32>,
    /// The most that were out at a time.
    most: usize,
}

pub(crate) const BASE: u64 = 0x1000_0000;
pub(crate) const BYTES: u64 = 32 << 20;

fn layout() -> Layout {
    Layout::from_size_align(usize::try_from(BYTES).unwrap(), 1 << 21).unwrap()
}

// SAFETY: the memory is the machine's, and reached by who has been given a part of it.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Machine {
    pub(crate) fn new(coherency: Coherency) -> Self {
        // SAFETY: the size is not 0.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout()) }).unwrap();
        let state = Mutex::default();
        Self(Arc::new(Frames { memory, coherency, state, written_back: AtomicU64::new(0) }))
    }

    /// Frames that are out, and the most that ever were.
    pub(crate) fn out(&self) -> (usize, usize) {
        let state = self.0.state.lock();
        (state.tables.len(), state.most)
    }

    pub(crate) fn take(&self, lg2: u32) -> Option<u64> {
        let mut state = self.0.state.lock();
        if let Some(frame) = state.free.get_mut(&lg2).and_then(Vec::pop) {
            return Some(frame);
        }
        let frame = lg2::align_up(state.unused, lg2)?;
        state.unused = frame.checked_add(lg2::size(lg2)).filter(|end| *end <= BYTES)?;
        Some(frame)
    }

    pub(crate) fn put(&self, frame: u64, lg2: u32) {
        self.scribble(frame, lg2, 0xee);
        self.0.state.lock().free.entry(lg2).or_default().push(frame);
    }

    /// What the CPU finds at `at`.
    pub(crate) fn bytes(&self, at: PhysAddr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = self.pointer(at);
        assert!(at.get() - BASE + len as u64 <= BYTES);
        // SAFETY: it is within the memory, and no other thread writes it.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut bytes[..]).cast(), len) };
        bytes
    }

    /// Writes there, as the CPU or a device.
    pub(crate) fn write(&self, at: PhysAddr, bytes: &[u8]) {
        let to = self.pointer(at);
        assert!(at.get() - BASE + bytes.len() as u64 <= BYTES);
        // SAFETY: as above, and no other thread reads it.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// What another user of the memory does with frames that are its own.
    pub(crate) fn scribble(&self, frame: u64, lg2: u32, byte: u8) {
        let (at, len) = (self.pointer(PhysAddr::new(BASE + frame)), 1 << lg2);
        // SAFETY: the frame is in no table, and nobody else's.
        unsafe { at.write_bytes(byte, len) };
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it, and nobody has a part of it.
        unsafe { dealloc(self.memory.as_ptr(), layout()) }
    }
}

// SAFETY: 1. A frame is out once, and zeroed or written. 2. The pointer leads to the machine's
// memory.
unsafe impl FrameAlloc for Machine {
    type Lock = Flag;

    fn allocate(&self, shape: TableShape) -> Option<PhysAddr> {
        let lg2 = shape.lg2_size.max(shape.lg2_align);
        let frame = self.take(lg2)?;
        if BASE + frame + lg2::mask(lg2) > shape.max_paddr.get() {
            self.put(frame, lg2);
            return None;
        }
        let mut state = self.0.state.lock();
        state.tables.insert(frame, lg2);
        state.most = state.most.max(state.tables.len());
        Some(PhysAddr::new(BASE + frame))
    }

    fn free(&self, _promise: Promise<'_>, frames: PhysAddr, shape: TableShape) {
        let frame = frames.get() - BASE;
        let lg2 = self.0.state.lock().tables.remove(&frame).expect("freed once");
        assert_eq!(lg2, shape.lg2_size.max(shape.lg2_align));
        self.put(frame, lg2);
    }

    fn pointer(&self, paddr: PhysAddr) -> NonNull<u8> {
        let offset = usize::try_from(paddr.get() - BASE).unwrap();
        assert!((offset as u64) < BYTES, "{paddr}");
        // SAFETY: it is within the memory.
        unsafe { self.0.memory.add(offset) }
    }

    fn coherency(&self) -> Coherency {
        self.0.coherency
    }

    fn write_back(&self, _start: NonNull<u8>, len: usize) {
        self.0.written_back.fetch_add(len as u64 / 4, Ordering::Relaxed);
    }
}

/// As hardware reads it, which never reads a frame that is no table.
impl TableWords for Machine {
    fn read_u64(&self, paddr: PhysAddr) -> Result<u64, NotATable> {
        let offset = paddr.get().wrapping_sub(BASE);
        let state = self.0.state.lock();
        let table = state.tables.range(..=offset).next_back();
        if table.is_none_or(|(&frame, &lg2)| offset - frame >= lg2::size(lg2)) {
            return Err(NotATable::Freed { paddr });
        }
        let word = self.pointer(paddr).cast::<AtomicU64>();
        // SAFETY: it is a word of a table, which stays one under the lock.
        Ok(unsafe { word.as_ref() }.load(Ordering::Acquire))
    }
}

type Memory = Arc<FrameTables<Machine>>;
type Table<S> = PageTable<<S as Subject>::Format, Memory>;

fn make<S: Subject>(format: S::Format, coherency: Coherency) -> (Table<S>, Machine) {
    let machine = Machine::new(coherency);
    let memory = Arc::new(FrameTables::new(machine.clone()));
    (PageTable::new(format, memory).unwrap(), machine)
}

/// The table, hardware and the model say the same of `at`.
fn check<S: Subject>(table: &Table<S>, machine: &Machine, model: &IntervalModel, at: Iova) {
    let expected = model.lookup(at).map(|(paddr, _)| paddr);
    assert_eq!(table.iova_to_phys(at), expected, "{at}");
    let (root, top) = table.root_and_level();
    let walker = S::walker(table.format(), root, top);
    let Ok(root) = walker.root(at, Access::Read) else { return assert_eq!(expected, None) };
    let mut path = WalkPath::new();
    let found = walker.walk_from(machine, root, at, Access::Read, &mut path);
    assert_eq!(found.ok().map(|found| found.paddr), expected, "{at}, as hardware finds it");
}

/// Maps and unmaps at random in 64 MiB, with the sync of each unmap at once. Each frame that goes
/// back is somebody else's from then on, who writes to it.
fn churn<S: Subject>(format: S::Format, coherency: Coherency) {
    let (mut table, machine) = make::<S>(format, coherency);
    let mut model = IntervalModel::new();
    let mut rng = Rng::new(7);
    let page = lg2::size(S::Format::GRANULE_LG2);
    let window = range(0x1000_0000, 64 << 20);
    for _ in 0..400 {
        let pages = if rng.below(3) == 0 { 1 + rng.below(1500) } else { 1 + rng.below(20) };
        let at = window.start().get() + rng.below((64 << 20) / page - pages) * page;
        let part = range(at, pages * page);
        if rng.below(2) == 0 {
            let spans = [span((1 << 24) + rng.below(4000) * page, pages * page)];
            if table.whole().map_spans(Iova::new(at), &spans, PROT).is_ok() {
                model.map(Iova::new(at), &spans, granted(table.format(), PROT)).unwrap();
            }
        } else {
            for run in model.runs(part) {
                if unmap::<S>(&mut table, run.iova) {
                    model.unmap(run.iova);
                }
            }
        }
        let at = Iova::new(window.start().get() + rng.below(64 << 20));
        check::<S>(&table, &machine, &model, at);
        check::<S>(&table, &machine, &model, Iova::new(part.start().get()));
        // The owner of frames writes to them meanwhile.
        let frames: Vec<_> = (0..4).filter_map(|_| machine.take(12)).collect();
        for frame in frames {
            machine.scribble(frame, 12, 0x55);
            machine.put(frame, 12);
        }
    }
    let found: Vec<_> = table.walk(window).map(|run| (run.range, run.paddr)).collect();
    let expected: Vec<_> = model.runs(window).iter().map(|run| (run.iova, run.paddr)).collect();
    assert_eq!(found, expected);
    for run in model.runs(window) {
        assert!(unmap::<S>(&mut table, run.iova), "whole leaves");
    }
    let aperture = table.geometry().aperture;
    let retired = table.whole().reclaim(aperture).unwrap();
    free(&table, retired);
    let (out, most) = machine.out();
    assert!(most > 4 && out <= 2, "{out} of {most} frames are still out");
    let written_back = machine.0.written_back.load(Ordering::Relaxed);
    assert_eq!(written_back > 0, coherency == Coherency::NonCoherent);
    drop(table);
    assert_eq!(machine.out().0, 0);
}

/// What the format grants to whom asks for `prot`.
fn granted<F: Format>(format: &F, prot: Prot) -> Prot {
    let leaf = format.leaf(format.template(0, F::GRANULE_LG2, prot), PhysAddr::new(0));
    format.prot(0, leaf)
}

/// Whether it was unmapped, and not a part of a leaf.
fn unmap<S: Subject>(table: &mut Table<S>, range: IovaRange) -> bool {
    let mut spans = vec![Span::new(PhysAddr::new(0), 1).unwrap(); 64];
    let mut buf = SpanBuf::new(&mut spans);
    let Ok(unmapped) = table.whole().unmap(range, &mut buf) else { return false };
    assert!(unmapped.rest.is_none());
    free(table, unmapped.retired);
    true
}

/// [`churn`], of hardware that sees caches and of such that does not.
fn churn_both<S: Subject>(format: S::Format) {
    churn::<S>(format.clone(), Coherency::Coherent);
    churn::<S>(format, Coherency::NonCoherent);
}

fn arm_v7s() -> ArmV7s {
    ArmV7s::new(ArmV7sConfig::new(32, 32)).unwrap()
}

pub(crate) fn x86() -> X86_64 {
    X86_64::new(X86_64Config::new(48, 48)).unwrap()
}

fn amd() -> AmdV1 {
    AmdV1::new(AmdV1Config::new(40, 48)).unwrap()
}

#[test]
fn tables_of_1k_share_frames_that_go_back_to_the_allocator() {
    churn_both::<ShortDescriptors>(arm_v7s());
}

#[test]
fn tables_below_a_concatenated_root_go_back_to_the_allocator() {
    // 16 tables side by side, in one piece of 64 KiB.
    churn_both::<ArmS2<12>>(ArmLpaeS2::new(ArmLpaeS2Config::new(43, 44)).unwrap());
}

#[test]
fn tables_of_a_frame_each_go_back_to_the_allocator() {
    churn_both::<FirstStage>(x86());
}

#[test]
fn tables_of_a_tree_that_grows_go_back_to_the_allocator() {
    churn_both::<Amd>(amd());
}

/// Two threads map and unmap whole tables, whose frames a third one takes and writes to, while the
/// table is walked: everything that a walk shows is at its distance from the start.
fn beside_others<S: Subject>(format: S::Format) {
    let (table, machine) = make::<S>(format, Coherency::Coherent);
    let done = AtomicBool::new(false);
    let part = |n: u64| range(n << 22, 4 << 20);
    thread::scope(|scope| {
        let (table, machine, done) = (&table, &machine, &done);
        let workers = [1u64, 3].map(|n| {
            scope.spawn(move || {
                // SAFETY: no other thread has this range.
                let owned = unsafe { table.claim(part(n)) };
                for _ in 0..150 {
                    // Pages alone, so that there are tables.
                    let pages = part(n).len_less_one() / 4096 + 1;
                    for at in (0..pages).map(|page| (n << 22) + page * 4096) {
                        let page = [span(at, 4096)];
                        owned.map_spans(Iova::new(at), &page, PROT).unwrap();
                    }
                    let unmapped = owned.unmap_pages(part(n).start(), 4096, pages);
                    assert_eq!(unmapped.result, Ok(()));
                    free(table, unmapped.retired);
                }
            })
        });
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                let frames: Vec<_> = (0..6).filter_map(|_| machine.take(12)).collect();
                for frame in frames {
                    machine.scribble(frame, 12, 0x41);
                    machine.put(frame, 12);
                }
            }
        });
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                for run in table.walk(range(0, 1 << 25)) {
                    assert_eq!(run.paddr.get(), run.range.start().get(), "{run:?}");
                }
                let at = Iova::new((1 << 22) + 0x7123);
                assert!(table.iova_to_phys(at).is_none_or(|paddr| paddr.get() == at.get()));
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(table);
    assert_eq!(machine.out().0, 0, "frames that waited for a walk are missing");
}

#[test]
fn walks_read_no_frame_that_went_back() {
    beside_others::<FirstStage>(x86());
    beside_others::<ShortDescriptors>(arm_v7s());
    beside_others::<Amd>(amd());
}

#[test]
fn coherent_memory_of_a_kernel_is_of_its_frames_and_goes_back_to_them() {
    let machine = Arc::new(Machine::new(Coherency::Coherent));
    let tables = Arc::new(FrameTables::new(Arc::clone(&machine)));
    let table = PageTable::new(x86(), tables).unwrap();
    let iommu = SoftIommu::over(&table);
    let domain = Domain::new(table, iommu).unwrap();
    let domain = DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap();
    let domain: Arc<DmaDomain<_, _, _, _, RawMemory>> = Arc::new(domain);
    let device = |config| Device::new(Arc::clone(&domain), NoPool, config).unwrap();
    let source = Arc::new(FrameMemory::new(Arc::clone(&machine)));
    let driver = device(DeviceConfig::bits(40)).with_coherent(source.clone());
    // With the tables, which stay.
    driver.free(driver.alloc(0x2001, 1).unwrap()).unwrap();
    let (tables, _) = machine.out();

    let mut three = driver.alloc(0x2001, 1).unwrap();
    let frames: Vec<_> = three.pieces().iter().map(|piece| piece.span).collect();
    let [frames] = frames[..] else { panic!("{frames:?}") };
    assert_eq!((frames.len(), frames.paddr().get() % 0x4000), (0x3000, 0));
    assert_eq!(three.read::<u8>(0x2000).unwrap(), 0, "what was in the frames is gone");
    three.write(8, 7_u64).unwrap();
    let at = machine.pointer(frames.paddr().wrapping_add(8)).cast::<u64>();
    // SAFETY: nobody writes it meanwhile.
    assert_eq!(unsafe { at.read_volatile() }, 7);
    driver.free(three).unwrap();
    assert_eq!(machine.out().0, tables);

    for len in [BYTES * 2, u64::MAX >> 25] {
        let error = driver.alloc(len, 1).unwrap_err().to_string();
        assert!(error.contains("the kernel has no such frames free"), "{error}");
    }
    let uncached = DeviceConfig { coherency: Coherency::NonCoherent, ..DeviceConfig::bits(40) };
    let error = device(uncached).with_coherent(source).alloc(8, 8).unwrap_err().to_string();
    assert!(error.contains("direct map is cached"), "{error}");
    assert_eq!(machine.out().0, tables);
}
