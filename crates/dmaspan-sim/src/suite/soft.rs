//! The core's software IOMMU over the format's tables, judged by the walker.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use dmaspan::io_pgtable::{DirtyBitmap, Format, Gap, PageTable};
use dmaspan::iommu::soft::{AccessFailed, SoftDevice, SoftIommu};
use dmaspan::iommu::{Domain, FaultAccess, FaultReason};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, lg2};

use super::rig::Rig;
use super::space::{Space, range, span};
use super::tree::{PROT, arena, marks_of};
use super::{Subject, each, each_with_marks, share};
use crate::model::without;
use crate::rng::Rng;
use crate::walker::{Access, FaultKind, TableWords, Translated, Walker};
use dmaspan::io_pgtable::Arena;

/// The IOMMU on trial.
type Soft<S> = SoftIommu<<S as Subject>::Format, Arena>;

/// A device model behind it.
type Model<S> = SoftDevice<<S as Subject>::Format, Arena>;

/// A domain whose hooks are a software IOMMU.
struct Behind<S: Subject> {
    rig: Rig<S, Arena, Soft<S>>,
    format: S::Format,
}

impl<S: Subject> Behind<S> {
    fn new(format: S::Format) -> Self {
        let arena = arena();
        let table = PageTable::<_, _>::new(format.clone(), arena.clone()).unwrap();
        let space = Space::of(&format);
        // As long as it takes: threads of these cases may have to wait for a CPU.
        let iommu = SoftIommu::over(&table).waiting_by(|_| {
            thread::yield_now();
            true
        });
        let domain = Domain::new(table, iommu).unwrap();
        Self { rig: Rig { domain, arena, space }, format }
    }

    fn device(&self) -> Model<S> {
        self.rig.domain.ops().device(7)
    }

    /// What hardware finds that has nothing cached, or why it refuses.
    fn walk(&self, iova: Iova, access: Access) -> Result<Translated, FaultKind> {
        let (root, level) = self.rig.domain.root_and_level();
        let beyond = level < self.rig.space.top_level
            && (iova.get() - self.rig.space.aperture.start().get()) >> S::Format::shift(level + 1)
                != 0;
        if beyond {
            return Err(FaultKind::Translation);
        }
        let walker = S::walker(&self.format, root, level);
        walker.walk(&self.rig.arena, iova, access).map_err(|fault| fault.kind)
    }

    /// The device and the walker say the same of one address.
    #[track_caller]
    fn agree(&self, device: &mut Model<S>, iova: Iova, access: FaultAccess) {
        let walks = match access {
            FaultAccess::Write => Access::Write,
            _ => Access::Read,
        };
        let found = translate(device, IovaRange::point(iova), access);
        let walked = self.walk(iova, walks);
        match (&found, &walked) {
            (Ok(spans), Ok(walked)) => {
                assert_eq!(spans.as_slice(), [Span::new(walked.paddr, 1).unwrap()], "{iova}");
                // Of a group any entry may have the mark.
                let marked = !walked.clean || walked.group_lg2 != walked.leaf_lg2;
                assert!(walks == Access::Read || marked, "a write at {iova} left no mark");
            }
            (Err(FaultReason::Translation), Err(FaultKind::Translation)) => {}
            (Err(FaultReason::Permission), Err(FaultKind::Permission)) => {}
            _ => panic!("at {iova} the device finds {found:?}, and the walker {walked:?}"),
        }
    }
}

/// The spans that an access has, each where the one before ended, or why it is refused.
fn translate<S: Format>(
    device: &mut SoftDevice<S, Arena>,
    range: IovaRange,
    access: FaultAccess,
) -> Result<Vec<Span>, FaultReason>
where
    Arena: dmaspan::io_pgtable::TableMemory<S::Word>,
{
    let mut spans = Vec::new();
    let done = device.access(range, access, |span| {
        spans.push(span);
        Ok::<_, ()>(())
    });
    match done {
        Ok(()) => Ok(spans),
        Err(AccessFailed::Fault(fault)) => Err(fault.reason),
        Err(other) => panic!("{other:?}"),
    }
}

/// What random operations work on.
struct World<S: Subject> {
    behind: Behind<S>,
    devices: [Model<S>; 2],
    rng: Rng,
    window: IovaRange,
    chunk: u64,
    prots: Vec<Prot>,
    mapped: Vec<IovaRange>,
}

impl<S: Subject> World<S> {
    const CHUNKS: u64 = 16;

    fn new(format: S::Format, seed: u64) -> Self {
        let some = [Prot::READ, Prot::READ_WRITE, Prot::READ_WRITE | Prot::CACHE];
        let prots = some.into_iter().filter(|&prot| !format.refuses(prot)).collect();
        let behind = Behind::<S>::new(format);
        let chunk = lg2::size(behind.rig.space.chunk());
        let bytes = Self::CHUNKS * chunk;
        let start = match seed % 2 {
            0 => behind.rig.space.aperture.start().get(),
            _ => behind.rig.space.aperture.last().get() - (bytes - 1),
        };
        let mut devices = [behind.device(), behind.device()];
        // One that forgets most of what it finds, and one that keeps it all.
        devices[0].set_places(2).unwrap();
        devices[1].set_places(4096).unwrap();
        let rng = Rng::new(seed);
        let window = range(start, bytes);
        Self { behind, devices, rng, window, chunk, prots, mapped: Vec::new() }
    }

    fn prot(&mut self) -> Prot {
        self.prots[self.rng.index(self.prots.len())]
    }

    fn map(&mut self) {
        let granule = self.behind.rig.space.granule();
        let offset = self.rng.below(self.chunk / granule) * granule * self.rng.below(2);
        let iova = self.window.start().get() + self.rng.below(Self::CHUNKS) * self.chunk + offset;
        let (mut spans, mut bytes) = (Vec::new(), 0);
        for _ in 0..=self.rng.below(3) {
            let len = match self.rng.below(3) {
                0 => granule * (1 + self.rng.below(5)),
                1 => self.chunk,
                _ => self.chunk / 2 + granule * self.rng.below(9),
            };
            let len = lg2::align_down(len, self.behind.rig.space.granule_lg2).max(granule);
            let within = (iova.wrapping_add(bytes)) & (self.chunk - 1);
            spans.push(span(self.rng.below(8) * 2 * self.chunk + within, len));
            bytes += len;
        }
        let Some(last) = iova.checked_add(bytes - 1) else { return };
        let all = IovaRange::new(Iova::new(iova), Iova::new(last)).unwrap();
        let is_taken = |mapped: &IovaRange| mapped.intersection(all).is_some();
        if self.window.covers(all) && !self.mapped.iter().any(is_taken) {
            let prot = self.prot();
            self.behind.rig.map(iova, &spans, prot).unwrap();
            self.mapped.push(all);
        }
    }

    /// Unmaps some mappings or parts of them. The devices look for them once more before the sync.
    #[expect(unsafe_code, reason = "one thread works on the domain")]
    fn unmap(&mut self) -> Vec<IovaRange> {
        let mut gather = self.behind.rig.domain.gather();
        let mut gone = Vec::new();
        for _ in 0..=self.rng.below(12) {
            if self.mapped.is_empty() {
                break;
            }
            let whole = self.mapped.swap_remove(self.rng.index(self.mapped.len()));
            let range = if self.rng.below(2) == 0 {
                whole
            } else {
                self.behind.rig.part_of(whole, &mut self.rng)
            };
            self.mapped.extend(without(whole, range));
            self.behind.rig.unmap_into(range, &mut gather);
            gone.push(range);
            for device in &mut self.devices {
                let _ = translate(device, range, FaultAccess::Read);
            }
        }
        // SAFETY: it was gathered from this domain.
        let _synced = unsafe { self.behind.rig.domain.sync(gather) }.unwrap();
        gone
    }

    #[expect(unsafe_code, reason = "one thread works on the domain")]
    fn protect(&mut self) {
        if !self.mapped.is_empty() {
            let (range, prot) = (self.mapped[self.rng.index(self.mapped.len())], self.prot());
            // SAFETY: nobody else works on the domain; its devices reach no memory.
            unsafe { self.behind.rig.domain.protect(range, prot, Gap::Accept) }.unwrap();
        }
    }

    /// Both devices agree with the walker at the ends of all that is and was mapped, at some
    /// addresses between, and on accesses to all of it.
    fn check(&mut self, gone: &[IovaRange]) {
        for range in self.mapped.iter().chain(gone) {
            let above = range.len_less_one();
            let inside = (0..4).map(|_| self.rng.next() % above.saturating_add(1).max(1));
            let offsets: Vec<u64> = inside.chain([0, above]).collect();
            let access = [FaultAccess::Read, FaultAccess::Write][self.rng.index(2)];
            for device in &mut self.devices {
                for &offset in &offsets {
                    self.behind.agree(device, range.start().wrapping_add(offset), access);
                }
                for iova in
                    [range.start().get().checked_sub(1).map(Iova::new), range.last().checked_add(1)]
                {
                    if let Some(iova) = iova.filter(|iova| self.window.contains(*iova)) {
                        self.behind.agree(device, iova, access);
                    }
                }
            }
        }
        for &range in &self.mapped {
            for device in &mut self.devices {
                let mut at = range.start();
                for span in translate(device, range, FaultAccess::Read).unwrap() {
                    for offset in [0, self.rng.next() % span.len(), span.len() - 1] {
                        let iova = at.wrapping_add(offset);
                        let walked = self.behind.walk(iova, Access::Read).unwrap();
                        assert_eq!(walked.paddr, span.paddr().wrapping_add(offset), "{iova}");
                    }
                    at = at.wrapping_add(span.len());
                }
                assert_eq!(at, range.last().wrapping_add(1));
            }
        }
    }
}

/// Whatever was mapped, unmapped by gathers, split and protected, a device model reaches exactly
/// what hardware would, and nothing that was unmapped and synced, although it looked for all of it
/// in between.
pub fn software_iommus_translate_as_the_walker_does<S: Subject>() {
    each::<S>(|format| {
        for seed in 0..share::<S>(40) {
            let mut world = World::<S>::new(format.clone(), seed);
            for _ in 0..24 {
                let mut gone = Vec::new();
                match world.rng.below(8) {
                    0..4 => world.map(),
                    4..7 => gone = world.unmap(),
                    _ => world.protect(),
                }
                world.check(&gone);
            }
        }
    });
}

/// Contiguous memory, mapped by leaves of as many sizes as it takes, is one miss and one span in
/// the IOTLB, wherever a device comes to it first.
pub fn a_software_iommu_finds_a_whole_span_in_one_walk<S: Subject>() {
    each::<S>(|format| {
        let behind = Behind::<S>::new(format);
        let space = &behind.rig.space;
        let (granule, chunk) = (space.granule(), lg2::size(space.chunk()));
        let start = space.aperture.start().get() + chunk - granule;
        let bytes = 3 * chunk + 2 * granule;
        behind.rig.map(start, &[span(chunk - granule, bytes)], PROT).unwrap();
        let all = range(start, bytes);
        for first in [0, granule - 1, chunk + 5, bytes / 2, bytes - granule, bytes - 1] {
            let mut device = behind.device();
            let begin = IovaRange::point(Iova::new(start + first));
            // What is written is kept as far as it is marked.
            let access = match behind.format.tracks_dirty() {
                true => FaultAccess::Read,
                false => FaultAccess::Write,
            };
            translate(&mut device, begin, access).unwrap();
            let kept: Vec<_> = device.cached().iter().map(|run| (run.range, run.paddr)).collect();
            assert_eq!(kept, [(all, PhysAddr::new(chunk - granule))], "from byte {first:#x} on");
            let spans = translate(&mut device, all, access).unwrap();
            assert_eq!(spans, [span(chunk - granule, bytes)]);
            assert_eq!(device.misses(), 1);
        }
    });
}

/// Each leaf that a device model writes is reported dirty, and no other; a write behind the read of
/// the marks is reported again.
#[expect(unsafe_code, reason = "one thread works on the domain")]
pub fn a_software_iommu_marks_what_it_writes<S: Subject>() {
    each_with_marks::<S>(|format| {
        let behind = Behind::<S>::new(format);
        let granule = behind.rig.space.granule();
        let start = behind.rig.space.aperture.start().get();
        // Pages of which no two are contiguous.
        let spans: Vec<Span> = (0..64).map(|n| span(2 * n * granule, granule)).collect();
        behind.rig.map(start, &spans, PROT).unwrap();
        let all = range(start, 64 * granule);
        let mut device = behind.device();
        let mut words = Vec::new();
        let mut marks = |expected: u64| {
            let mut bitmap: DirtyBitmap<'_> = marks_of(&mut words, all, granule);
            // SAFETY: nobody else works on the domain.
            unsafe { behind.rig.domain.read_and_clear_dirty(all, &mut bitmap) }.unwrap();
            assert_eq!(words, [expected]);
        };
        translate(&mut device, all, FaultAccess::Read).unwrap();
        marks(0);
        for _ in 0..2 {
            translate(&mut device, range(start + 3 * granule + 5, 1), FaultAccess::Write).unwrap();
            translate(&mut device, range(start + 9 * granule - 1, 2), FaultAccess::Write).unwrap();
            translate(&mut device, range(start + 3 * granule, 1), FaultAccess::Write).unwrap();
            marks(1 << 3 | 1 << 8 | 1 << 9);
        }
        translate(&mut device, all, FaultAccess::Write).unwrap();
        marks(u64::MAX);
        marks(0);
    });
}

/// A device model that has seen a small tree finds what is mapped beyond it, and nothing of it once
/// it is unmapped.
pub fn a_software_iommu_follows_a_tree_that_grows<S: Subject>() {
    each::<S>(|format| {
        let first = format.first_top_level();
        let behind = Behind::<S>::new(format);
        let granule = behind.rig.space.granule();
        let mut device = behind.device();
        let mut pages = vec![behind.rig.space.aperture.start().get()];
        pages.extend(behind.rig.space.beyond(first + 1));
        for (n, &page) in (1u64..).zip(&pages) {
            behind.agree(&mut device, Iova::new(page), FaultAccess::Read);
            behind.rig.map(page, &[span(n * granule, granule)], PROT).unwrap();
            for &page in &pages {
                behind.agree(&mut device, Iova::new(page), FaultAccess::Read);
            }
        }
        for &page in pages.iter().rev() {
            behind.rig.unmap(range(page, granule)).unwrap();
            for &page in &pages {
                behind.agree(&mut device, Iova::new(page), FaultAccess::Read);
            }
        }
    });
}

/// Threads map, unmap and reuse memory while device models access it: none is in the middle of an
/// access to memory whose unmap was synced.
pub fn device_models_use_nothing_behind_a_sync<S: Subject>() {
    const PIECES: u64 = 4;
    const FRAMES: u64 = 16;
    each::<S>(|format| {
        let behind = &Behind::<S>::new(format);
        let granule = behind.rig.space.granule();
        let start = behind.rig.space.aperture.start().get();
        // Whether each frame is a device's.
        let lent: Vec<AtomicBool> = (0..PIECES * FRAMES).map(|_| AtomicBool::default()).collect();
        let (lent, done) = (&lent, &AtomicBool::new(false));
        thread::scope(|scope| {
            for seed in 0..2 {
                let mut device = behind.device();
                scope.spawn(move || {
                    let mut rng = Rng::new(seed);
                    while !done.load(Ordering::Relaxed) {
                        let at = start + rng.below(PIECES * FRAMES) * granule;
                        let _ = device.access(range(at, granule), FaultAccess::Read, |span| {
                            let frame = usize::try_from(span.paddr().get() / granule).unwrap();
                            for _ in 0..8 {
                                assert!(lent[frame].load(Ordering::SeqCst), "frame {frame}");
                            }
                            Ok::<_, ()>(())
                        });
                        thread::yield_now();
                    }
                });
            }
            let mappers: Vec<_> = (0..PIECES)
                .map(|piece| {
                    scope.spawn(move || {
                        let mut rng = Rng::new(100 + piece);
                        for _ in 0..share::<S>(64) {
                            let count = 1 + rng.below(FRAMES);
                            let first = piece * FRAMES;
                            let frames =
                                (first..first + count).map(|n| usize::try_from(n).unwrap());
                            let spans = [span(first * granule, count * granule)];
                            for frame in frames.clone() {
                                lent[frame].store(true, Ordering::SeqCst);
                            }
                            let iova = start + first * granule;
                            behind.rig.map(iova, &spans, PROT).unwrap();
                            thread::yield_now();
                            behind.rig.unmap(range(iova, count * granule)).unwrap();
                            for frame in frames {
                                lent[frame].store(false, Ordering::SeqCst);
                            }
                        }
                    })
                })
                .collect();
            for mapper in mappers {
                mapper.join().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

/// Tables that something else wrote: links to anywhere, loops, and words that no format writes.
/// Every walk ends, and an access gets an answer.
pub fn a_software_iommu_ends_every_walk_of_hostile_tables<S: Subject>() {
    each::<S>(|format| {
        for seed in 0..share::<S>(60) {
            let mut rng = Rng::new(seed);
            let behind = Behind::<S>::new(format.clone());
            let (space, arena) = (&behind.rig.space, &behind.rig.arena);
            let (start, granule) = (space.aperture.start().get(), space.granule());
            let chunk = lg2::size(space.chunk());
            for n in 0..4 {
                let page = start + n * chunk + rng.below(3) * granule;
                behind.rig.map(page, &[span(n * chunk, granule)], PROT).unwrap();
            }
            let words: Vec<(PhysAddr, u64)> = (0..1 << 15)
                .map(|n| PhysAddr::new(0x4000_0000 + 8 * n))
                .filter_map(|at| Some((at, arena.read_u64(at).ok()?)))
                .collect();
            let written: Vec<_> = words.iter().filter(|(_, word)| *word != 0).collect();
            for _ in 0..200 {
                let (at, old) = words[rng.index(words.len())];
                let (at, old) =
                    if rng.below(4) == 0 { *written[rng.index(written.len())] } else { (at, old) };
                let (_, other) = *written[rng.index(written.len())];
                let new = match rng.below(4) {
                    0 => rng.next(),
                    1 => other ^ 1 << rng.below(64),
                    _ => other,
                };
                let _ = arena.exchange_u64(at, old, new);
            }
            let mut device = behind.device();
            for _ in 0..100 {
                let at = start + rng.below(5 * chunk);
                let len = 1 + rng.below(3 * chunk);
                let access = [FaultAccess::Read, FaultAccess::Write][rng.index(2)];
                let _ = translate(&mut device, range(at, len), access);
                let anywhere = start + rng.next() % space.aperture.len_less_one();
                let _ = translate(&mut device, IovaRange::point(Iova::new(anywhere)), access);
            }
        }
    });
}
