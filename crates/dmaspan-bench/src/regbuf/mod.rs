//! `dmaspan-bench regbuf`: what a registered buffer costs, page by page and by segment.
//!
//! ```text
//! plan (cases) ──► ground (pinned memory, or a model) ──► runs of both ways ──► report
//!                             work: BufferBefore, Registry ─┘ └─ check: the same bytes?
//! ```

pub(crate) mod args;
mod check;
mod ground;
mod plan;
mod report;
mod timing;
mod work;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dmaspan::regbuf::{BufferRequest, Pinned, Registry};
use dmaspan::{Account, PhysAddr};
use dmaspan_cli::progress::Progress;

use ground::Ground;
pub(crate) use plan::Plan;
use plan::{Case, PAGE};
use timing::{Measured, passes, turn};
use work::{BY_SEGMENT, ByPage, BySegment, Lists};

use crate::args::name_of;
use crate::failed::Failed;
use crate::models::regbuf_before::{
    Coalescing, FolioBefore, RegisteredBefore, RingBefore, UserBefore,
};
use crate::models::replay::Replay;
use crate::report::{Fields, Report};
use crate::time::Series;

/// More than any case charges.
const LIMIT: u64 = 1 << 50;

/// Measures what is planned.
///
/// # Errors
///
/// For the first case in which a way refused, or both differ.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, Failed> {
    let mut rows = Vec::new();
    for case in &plan.cases {
        let name = name_of(&case.name);
        progress.begin(format!("registered buffers: {name}"), u64::from(plan.effort.rounds) + 1);
        rows.push(measure(plan, case, progress).map_err(Failed::at(name))?);
    }
    Ok(report::report(plan, rows))
}

/// Measures a case both ways, in turn, over the same frames.
fn measure(plan: &Plan, case: &Case, progress: &Progress) -> Result<Fields, Failed> {
    let ground = &ground::ground(case, plan)?;
    let ring = RingBefore::new(Arc::new(UserBefore::new(LIMIT)), |page| ground.folios.of(page));
    let mut before = Before { ground, ring };
    let mut now = Now::new(ground)?;
    let (mut old, mut new) = (Measured::default(), Measured::default());
    let length = plan.effort.turn;
    for _ in 0..plan.effort.rounds {
        passes(&mut old.register, length, 1, || before.registering())?;
        passes(&mut new.register, length, 1, || now.registering())?;
    }
    let mut keep = |coalescing| before.register(coalescing);
    let pages = keep(Coalescing::None)?;
    let single = keep(Coalescing::SingleHugepage)?;
    let linux72 = keep(Coalescing::SameFolios)?;
    now.register()?;
    let node = now.registry.get(0).map_err(Failed::at(BY_SEGMENT))?;
    let counts = report::counts([&pages, &single, &linux72], node);

    let entries = usize::try_from(case.io_bytes() / PAGE).unwrap_or(usize::MAX) + 1;
    let mut lists = Lists::new(entries);
    let mut by_page = ByPage::new(&pages, entries);
    let mut by_folio = ByPage::new(&linux72, entries);
    let mut by_segment = BySegment::new(node, entries, &mut lists)?;
    let (ios, imports) = (case.ios(), case.imports());
    check::imports(&by_page, &by_segment, &imports)?;
    check::imports(&by_folio, &by_segment, &imports)?;
    check::descriptors(&mut by_page, &mut by_segment, &ios)?;
    progress.advance(1);

    let counted = [by_page.scatter(ios[0])?, by_segment.scatter(ios[0])?];
    let (mut folio, mut stores) = (Series::default(), Series::default());
    let mut places = vec![0; entries];
    for _ in 0..plan.effort.rounds {
        turn(&mut old.import, length, &imports, |io| by_page.import(io))?;
        turn(&mut new.import, length, &imports, |io| by_segment.import(io))?;
        turn(&mut old.scatter, length, &ios, |io| by_page.scatter(io))?;
        turn(&mut new.scatter, length, &ios, |io| by_segment.scatter(io))?;
        turn(&mut folio, length, &ios, |io| by_folio.scatter(io))?;
        turn(&mut old.sgl, length, &ios, |io| by_page.sgl(io))?;
        turn(&mut new.sgl, length, &ios, |io| by_segment.sgl(io))?;
        turn(&mut old.prp, length, &ios, |io| by_page.prp(io))?;
        turn(&mut new.prp, length, &ios, |io| by_segment.prp(io))?;
        turn(&mut stores, length, &ios, |io| {
            work::store(io, &mut places);
            Ok(())
        })?;
        progress.advance(1);
    }
    let row = report::row(case, ground, counts, [&old, &new], [&folio, &stores], counted);
    [pages, single, linux72].into_iter().for_each(|buffer| before.end(buffer));
    Ok(row)
}

/// Registering as Linux does.
struct Before<'a, F> {
    ground: &'a Ground,
    ring: RingBefore<F>,
}

impl<F: Fn(PhysAddr) -> FolioBefore> Before<'_, F> {
    fn register(&mut self, coalescing: Coalescing) -> Result<RegisteredBefore, Failed> {
        let ground = self.ground;
        let registered = self.ring.register(ground.replay.range(), &ground.pages, coalescing);
        registered.map_err(Failed::at("by page"))
    }

    fn end(&mut self, buffer: RegisteredBefore) {
        self.ring.unregister(buffer);
    }

    /// Registers page by page, says how long that took, and ends it.
    fn registering(&mut self) -> Result<Duration, Failed> {
        let begin = Instant::now();
        let buffer = self.register(Coalescing::None)?;
        let took = begin.elapsed();
        self.end(buffer);
        Ok(took)
    }
}

/// Registering as dmaspan does.
struct Now {
    registry: Registry<Pinned<Replay>>,
    request: BufferRequest,
}

impl Now {
    fn new(ground: &Ground) -> Result<Self, Failed> {
        let replay = Arc::clone(&ground.replay);
        let source = Pinned::new(replay, (), Account::new(LIMIT), PAGE.ilog2());
        let mut registry = Registry::new(source);
        registry.register_sparse(1).map_err(Failed::at(BY_SEGMENT))?;
        Ok(Self { registry, request: BufferRequest::new(ground.replay.range()) })
    }

    fn register(&mut self) -> Result<(), Failed> {
        self.registry.update(0, &[self.request]).map(|_| ()).map_err(Failed::at(BY_SEGMENT))
    }

    /// Registers, says how long that took, and ends it.
    fn registering(&mut self) -> Result<Duration, Failed> {
        let begin = Instant::now();
        self.register()?;
        let took = begin.elapsed();
        self.registry.update(0, &[BufferRequest::VACANT]).map_err(Failed::at(BY_SEGMENT))?;
        Ok(took)
    }
}
