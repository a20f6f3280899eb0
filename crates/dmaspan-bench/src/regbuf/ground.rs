//! The memory of a case: this machine's, pinned, or a model's.

use std::sync::Arc;

use crate::models::regbuf_before::FolioBefore;
use crate::models::replay::{Replay, not_pinned};
use crate::models::simulated::{USER_AT, no_memory, placed, room_for, simulated};
use dmaspan::pin::{PinFailed, Pinner};
use dmaspan::{HostAddr, PhysAddr, Prot, Span, lg2};
use dmaspan_linux::{LinuxPinner, Memory, MemoryKind, PinMethod};
use dmaspan_sim::memory::{AllocError, SimMemory, SimPinner};

use super::args::RegbufCase;
use super::plan::{Case, HUGE, MOST_KERNEL_RUNS, PAGE, Plan};
use crate::failed::Failed;
use dmaspan_cli::hold::HeldPages;
use dmaspan_cli::size::ByteSize;
use dmaspan_cli::stats::median;

/// log2 of the bytes of a huge page, and of its pages.
const HUGE_LG2: u32 = 21;
const HUGE_ORDER: u32 = 9;
/// Of the room that a huge page of the model has for itself: it is the second of four.
const APART_ORDER: u32 = HUGE_ORDER + 2;
/// The pages that all is counted in, as bytes of memory.
const PAGE_LEN: usize = 4096;
/// How many pages a huge one has.
const HUGE_PAGES: usize = 512;
/// By which the model scatters; any number.
const SEED: u64 = 7;

/// Memory, pinned, page by page and by span.
pub(crate) struct Ground {
    /// Declared first, so that it is gone before what it uses.
    pub(crate) replay: Arc<Replay>,
    /// Where each page is.
    pub(crate) pages: Vec<PhysAddr>,
    pub(crate) folios: Folios,
    /// What pages it has.
    pub(crate) memory: &'static str,
    /// Bytes that should be in huge pages and are not.
    pub(crate) not_huge: u64,
    /// Whether frames are those of a model, and why, where nobody asked for that.
    pub(crate) is_model: bool,
    pub(crate) why_model: Option<String>,
    /// What this machine's kernel took to register the memory as a buffer of an io_uring, where it
    /// did.
    pub(crate) kernel_ns: Option<u64>,
    /// Declared last: the pool is lowered when its pages are back.
    _held: Option<HeldPages>,
}

impl Ground {
    /// What `replay` has pinned, pages of this kind.
    fn new(case: &Case, replay: Replay, memory: &'static str, held: Option<HeldPages>) -> Self {
        let of = |span: &Span| (span.start().get()..=span.last().get()).step_by(PAGE_LEN);
        let pages: Vec<_> = replay.spans().iter().flat_map(of).map(PhysAddr::new).collect();
        let folios = Folios::new(&pages, |block| may_be_huge(case.name, block));
        let not_huge = wanted_huge(case).saturating_sub(folios.bytes());
        Self {
            replay: Arc::new(replay),
            pages,
            folios,
            memory,
            not_huge,
            is_model: false,
            why_model: None,
            kernel_ns: None,
            _held: held,
        }
    }
}

/// The memory of a case: this machine's, which is registered on the way, or a model's
/// where it cannot be used.
///
/// # Errors
///
/// Where there is not enough.
pub(crate) fn ground(case: &Case, plan: &Plan) -> Result<Ground, Failed> {
    let (mut kernel_ns, mut why_model) = (None, None);
    if !plan.model {
        let runs = plan.effort.rounds.min(MOST_KERNEL_RUNS);
        let counts = counts_pages_of(MemoryKind::Base.page_size());
        match counts.and_then(|()| real(case, runs, &mut kernel_ns)) {
            Ok(ground) => return Ok(Ground { kernel_ns, ..ground }),
            Err(why) => why_model = Some(why.to_string()),
        }
    }
    Ok(Ground { is_model: true, why_model, kernel_ns, ..model(case)? })
}

/// Whether the memory of a kernel with such pages can be counted, page by page.
fn counts_pages_of(page: u64) -> Result<(), Failed> {
    if page == PAGE {
        return Ok(());
    }
    let (page, counted) = (ByteSize::new(page), ByteSize::new(PAGE));
    Err(Failed::new(format_args!("this kernel has pages of {page}, and {counted} are counted")))
}

/// Which pages are in huge ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folios {
    /// The number of the first block of memory that is one, by [`HUGE`].
    first: u64,
    /// For it and the following ones.
    huge: Vec<bool>,
}

impl Folios {
    /// Those of memory of which the blocks of [`HUGE`] that `may_be` names can be huge pages, and
    /// are where they lie so.
    fn new(pages: &[PhysAddr], may_be: impl Fn(usize) -> bool) -> Self {
        let is_huge = |block: &[PhysAddr]| {
            lg2::is_aligned(block[0].get(), HUGE_LG2)
                && block.windows(2).all(|pair| pair[1].get() == pair[0].get() + PAGE)
        };
        let blocks = pages.as_chunks::<HUGE_PAGES>().0.iter().enumerate();
        let huge = blocks.filter(|(number, block)| may_be(*number) && is_huge(*block));
        let numbers: Vec<u64> = huge.map(|(_, block)| block[0].get() >> HUGE_LG2).collect();
        let first = numbers.iter().min().copied().unwrap_or(0);
        let index = |number: u64| usize::try_from(number - first).unwrap_or(usize::MAX);
        let count = numbers.iter().max().map_or(0, |last| index(*last) + 1);
        let mut huge = vec![false; count];
        numbers.iter().for_each(|number| huge[index(*number)] = true);
        Self { first, huge }
    }

    /// Bytes of all.
    fn bytes(&self) -> u64 {
        self.huge.iter().filter(|huge| **huge).map(|_| HUGE).sum()
    }

    /// That of a page.
    #[inline]
    pub(crate) fn of(&self, page: PhysAddr) -> FolioBefore {
        let number = (page.get() >> HUGE_LG2).wrapping_sub(self.first);
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        if self.huge.get(number).copied().unwrap_or(false) {
            let head = PhysAddr::new(lg2::align_down(page.get(), HUGE_LG2));
            FolioBefore { head, order: HUGE_ORDER }
        } else {
            FolioBefore { head: page, order: 0 }
        }
    }
}

/// Whether a block of [`HUGE`] of a case can be a huge page.
fn may_be_huge(case: RegbufCase, block: usize) -> bool {
    match case {
        RegbufCase::FourHuge | RegbufCase::Thp | RegbufCase::Hugetlb => true,
        RegbufCase::Base => false,
        RegbufCase::Mixed => block.is_multiple_of(2),
    }
}

/// How many bytes of a case should be in huge pages.
fn wanted_huge(case: &Case) -> u64 {
    let blocks = 0..usize::try_from(case.bytes / HUGE).unwrap_or(usize::MAX);
    blocks.filter(|block| may_be_huge(case.name, *block)).map(|_| HUGE).sum()
}

/// The memory of a case on this machine.
fn real(case: &Case, runs: u32, kernel_ns: &mut Option<u64>) -> Result<Ground, Failed> {
    let mut of = |kind| {
        let mut held = HeldPages::for_memory(kind, case.bytes)?;
        let memory = Memory::new(kind, case.bytes)?;
        if let Some(held) = &mut held {
            held.mapped();
        }
        pinned(case, memory, held, runs, kernel_ns)
    };
    let Some(kind) = kind_of(case.name) else {
        return pinned(case, Memory::striped(case.bytes)?, None, runs, kernel_ns);
    };
    of(kind).or_else(|why| match case.name {
        RegbufCase::FourHuge => of(MemoryKind::Thp),
        _ => Err(why),
    })
}

/// What memory a case is about; none, of two kinds.
fn kind_of(case: RegbufCase) -> Option<MemoryKind> {
    match case {
        RegbufCase::FourHuge | RegbufCase::Hugetlb => Some(MemoryKind::Hugetlb2M),
        RegbufCase::Base => Some(MemoryKind::Base),
        RegbufCase::Thp => Some(MemoryKind::Thp),
        RegbufCase::Mixed => None,
    }
}

/// What two kinds in turn are called.
const TWO_KINDS: &str = "thp and base";

/// Pins memory, and says how long the kernel takes for that.
fn pinned(
    case: &Case,
    memory: Memory,
    held: Option<HeldPages>,
    runs: u32,
    kernel_ns: &mut Option<u64>,
) -> Result<Ground, Failed> {
    let memory = Arc::new(memory);
    let user = memory.user_range();
    // What the kernel takes is the same without frame numbers.
    let any = LinuxPinner::<HostAddr>::new()?;
    let registered = registered_ns(&any, &memory, runs)?;
    *kernel_ns = (any.method() == PinMethod::IoUring).then_some(registered);
    let pinner = LinuxPinner::new()?;
    let replay = Replay::new(pinner, Arc::clone(&memory), user, Prot::READ_WRITE)?;
    let kind = match case.name {
        RegbufCase::Mixed => TWO_KINDS,
        _ => memory.kind().name(),
    };
    let ground = Ground::new(case, replay, kind, held);
    if case.name == RegbufCase::FourHuge && ground.not_huge > 0 {
        let [found, wanted] = [case.bytes - ground.not_huge, case.bytes].map(ByteSize::new);
        return Err(Failed::new(format_args!(
            "the kernel found {found} of transparent huge pages of {wanted}"
        )));
    }
    Ok(ground)
}

/// What the kernel takes to pin memory: the median.
fn registered_ns(
    pinner: &LinuxPinner<HostAddr>,
    memory: &Arc<Memory>,
    runs: u32,
) -> Result<u64, Failed> {
    let user = memory.user_range();
    let mut times = Vec::new();
    for _ in 0..runs {
        pinner.reset_stats();
        let mut spans = Vec::new();
        match pinner.pin(memory, user, Prot::READ_WRITE, &mut spans) {
            Ok(pin) => pinner.give_back(pin),
            Err(PinFailed { error, pin, .. }) => {
                pin.into_iter().for_each(|pin| pinner.give_back(pin));
                return Err(not_pinned(error, user));
            }
        }
        times.push(pinner.stats().pin_ns);
    }
    Ok(median(&times))
}

/// The memory of a case in a model.
fn model(case: &Case) -> Result<Ground, Failed> {
    let (memory, space) = simulated(room_for(case.bytes))?;
    let spans = apart(&memory, case).map_err(no_memory)?;
    let user = placed(space.map(USER_AT, &spans), case.bytes)?;
    let replay = Replay::new(SimPinner::new(memory), space, user, Prot::READ_WRITE);
    let replay = replay.map_err(Failed::at("simulated pins"))?;
    let kind = kind_of(case.name).map_or(TWO_KINDS, MemoryKind::name);
    Ok(Ground::new(case, replay, kind, None))
}

/// Huge pages and base pages of a model, wherever, and none of them beside another.
fn apart(memory: &SimMemory, case: &Case) -> Result<Vec<Span>, AllocError> {
    let huge = wanted_huge(case);
    let count = usize::try_from(huge / HUGE).unwrap_or(usize::MAX);
    let blocks = memory.allocate_folios(&vec![APART_ORDER; count], SEED)?;
    // No block wraps.
    let second = |block: Span| Span::new(block.start().wrapping_add(HUGE), HUGE).ok();
    let folios: Vec<Span> = blocks.into_iter().filter_map(second).collect();
    if huge == case.bytes {
        return Ok(folios);
    }
    let base = memory.allocate_scattered(case.bytes - huge, SEED)?;
    if huge == 0 {
        return Ok(base);
    }
    let blocks = folios.into_iter().zip(base.chunks(HUGE_PAGES));
    Ok(blocks.flat_map(|(folio, pages)| [&[folio], pages].concat()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_of_larger_pages_is_not_counted_as_small_ones() {
        assert_eq!(counts_pages_of(PAGE), Ok(()));
        for page in [16 << 10, 64 << 10] {
            let why = counts_pages_of(page).unwrap_err().to_string();
            assert!(why.ends_with("KiB, and 4 KiB are counted"), "{why}");
        }
    }

    #[test]
    fn pages_of_a_model_are_neighbours_of_none() {
        for name in [RegbufCase::Base, RegbufCase::Thp, RegbufCase::Mixed] {
            let ground = model(&Case { name, bytes: GIB }).unwrap();
            let ends = ground.pages.iter().map(|page| page.get() + PAGE);
            let next = ground.pages.iter().skip(1).map(|page| page.get());
            let touching = ends.zip(next).filter(|(end, next)| end == next).count();
            let huge = usize::try_from(ground.folios.bytes() / HUGE).unwrap();
            assert_eq!(touching, huge * (HUGE_PAGES - 1), "{name:?}");
        }
    }

    #[test]
    fn folios_of_a_model_are_huge_where_the_case_says() {
        for (name, huge) in [(RegbufCase::Base, 0), (RegbufCase::Thp, 4), (RegbufCase::Mixed, 2)] {
            let case = Case { name, bytes: 4 * HUGE };
            let ground = model(&case).unwrap();
            assert_eq!(ground.folios.bytes(), huge * HUGE, "{name:?}");
            assert_eq!(ground.pages.len(), 2048);
            for (number, page) in ground.pages.iter().enumerate() {
                let folio = ground.folios.of(*page);
                let is_huge = may_be_huge(name, number / HUGE_PAGES);
                assert_eq!(folio.order, if is_huge { HUGE_ORDER } else { 0 });
                let behind = if is_huge { (number % HUGE_PAGES) as u64 * PAGE } else { 0 };
                assert_eq!(folio.head.get() + behind, page.get());
            }
        }
    }
}
