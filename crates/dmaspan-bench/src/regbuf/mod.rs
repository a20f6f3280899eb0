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
pub(crate) mod report;
mod timing;
mod work;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::models::regbuf_before::{Coalescing, RegisteredBefore, RingBefore, UserBefore};
use crate::models::replay::Replay;
use dmaspan::pin::Pinner;
use dmaspan::regbuf::{BufferRequest, Pinned, Registry};
use dmaspan::{Account, PhysAddr};

use args::RegbufArgs;
use dmaspan_cli::machine::Machine;
use dmaspan_cli::progress::Progress;
use ground::{Folios, Ground};
use plan::{Case, Frames, PAGE};
pub(crate) use plan::{Plan, UsageError};
use report::{Counts, Report, Row, Setting};
use timing::{Measured, Series};
use work::{ByPage, BySegment, Lists, RegbufBenchError, Way};

/// More than any case charges.
const LIMIT: u64 = 1 << 50;

/// Which case could not be measured, and why.
#[derive(Debug, thiserror::Error)]
#[error("{case}: {source}")]
pub(crate) struct CaseFailed {
    case: &'static str,
    source: RegbufBenchError,
}

/// What `args` ask for on this machine.
///
/// # Errors
///
/// [`UsageError`] where that cannot be done.
pub(crate) fn plan(args: &RegbufArgs) -> Result<Plan, UsageError> {
    Plan::new(args, &Machine::read())
}

/// Measures what is planned.
///
/// # Errors
///
/// [`CaseFailed`] for the first case in which a way refused, or both differ.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> Result<Report, CaseFailed> {
    let mut rows = Vec::new();
    for case in &plan.cases {
        let name = case.name.name();
        progress.begin(format!("registered buffers: {name}"), u64::from(plan.effort.runs) + 1);
        let row = measure_case(plan, case, progress);
        rows.push(row.map_err(|source| CaseFailed { case: name, source })?);
    }
    progress.clear();
    Ok(Report::new(plan, rows))
}

fn measure_case(plan: &Plan, case: &Case, progress: &Progress) -> Result<Row, RegbufBenchError> {
    let mut setting = Setting::default();
    if plan.frames == Frames::Machine {
        let real = ground::real(case, plan.effort.kernel_runs());
        setting.kernel_ns = real.kernel_ns;
        match real.ground {
            Ok(ground) => {
                setting.not_huge = ground.not_huge;
                return measure(plan, case, &ground, setting, progress);
            }
            Err(why) => setting.why_model = Some(why.to_string()),
        }
    }
    setting.is_model = true;
    measure(plan, case, &ground::model(case)?, setting, progress)
}

/// Measures a case both ways, in turn, over the same frames.
fn measure<P: Pinner<Address = PhysAddr> + 'static>(
    plan: &Plan,
    case: &Case,
    ground: &Ground<P>,
    setting: Setting,
    progress: &Progress,
) -> Result<Row, RegbufBenchError> {
    let mut before = Before::new(ground);
    let mut now = Now::new(ground)?;
    let (mut old, mut new) = (Measured::default(), Measured::default());
    let turn = plan.effort.turn;
    for _ in 0..plan.effort.runs {
        old.register.passes(turn, 1, || before.registering())?;
        new.register.passes(turn, 1, || now.registering())?;
    }
    let mut keep = |coalescing| before.register(coalescing);
    let pages = keep(Coalescing::None)?;
    let single = keep(Coalescing::SingleHugepage)?;
    let linux72 = keep(Coalescing::SameFolios)?;
    now.register()?;
    let node = now.registry.get(0).map_err(refused)?;
    let counts = Counts::new(&pages, &single, &linux72, node);

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

    let (mut folio, mut stores) = (Series::default(), Series::default());
    let mut places = vec![0; entries];
    for _ in 0..plan.effort.runs {
        old.import.turn(turn, &imports, |io| by_page.import(io))?;
        new.import.turn(turn, &imports, |io| by_segment.import(io))?;
        old.scatter.turn(turn, &ios, |io| by_page.scatter(io))?;
        new.scatter.turn(turn, &ios, |io| by_segment.scatter(io))?;
        folio.turn(turn, &ios, |io| by_folio.scatter(io))?;
        old.sgl.turn(turn, &ios, |io| by_page.sgl(io))?;
        new.sgl.turn(turn, &ios, |io| by_segment.sgl(io))?;
        old.prp.turn(turn, &ios, |io| by_page.prp(io))?;
        new.prp.turn(turn, &ios, |io| by_segment.prp(io))?;
        stores.turn(turn, &ios, |io| {
            work::store(io, &mut places);
            Ok(())
        })?;
        progress.advance(1);
    }
    let row = Row::new(case, ground.memory, setting, counts, [&old, &new], [&folio, &stores]);
    [pages, single, linux72].into_iter().for_each(|buffer| before.end(buffer));
    Ok(row)
}

fn refused(error: impl std::fmt::Display) -> RegbufBenchError {
    RegbufBenchError::Registry(error.to_string())
}

/// Registering as Linux does.
struct Before<'a, P: Pinner> {
    ground: &'a Ground<P>,
    ring: RingBefore<&'a Folios>,
}

impl<'a, P: Pinner> Before<'a, P> {
    fn new(ground: &'a Ground<P>) -> Self {
        let ring = RingBefore::new(Arc::new(UserBefore::new(LIMIT)), &ground.folios);
        Self { ground, ring }
    }

    fn register(&mut self, coalescing: Coalescing) -> Result<RegisteredBefore, RegbufBenchError> {
        Ok(self.ring.register(self.ground.user, &self.ground.pages, coalescing)?)
    }

    fn end(&mut self, buffer: RegisteredBefore) {
        self.ring.unregister(buffer);
    }

    /// Registers page by page, says how long that took, and ends it.
    fn registering(&mut self) -> Result<Duration, RegbufBenchError> {
        let begin = Instant::now();
        let buffer = self.register(Coalescing::None)?;
        let took = begin.elapsed();
        self.end(buffer);
        Ok(took)
    }
}

/// Registering as dmaspan does.
struct Now<P: Pinner + 'static> {
    registry: Registry<Pinned<Replay<P>>>,
    request: BufferRequest,
}

impl<P: Pinner + 'static> Now<P> {
    fn new(ground: &Ground<P>) -> Result<Self, RegbufBenchError> {
        let (replay, space) = (Arc::clone(&ground.replay), ground.space.clone());
        let source = Pinned::new(replay, space, Account::new(LIMIT), PAGE.ilog2());
        let mut registry = Registry::new(source);
        registry.register_sparse(1).map_err(refused)?;
        Ok(Self { registry, request: BufferRequest::new(ground.user) })
    }

    fn register(&mut self) -> Result<(), RegbufBenchError> {
        self.registry.update(0, &[self.request]).map(|_| ()).map_err(refused)
    }

    /// Registers, says how long that took, and ends it.
    fn registering(&mut self) -> Result<Duration, RegbufBenchError> {
        let begin = Instant::now();
        self.register()?;
        let took = begin.elapsed();
        self.registry.update(0, &[BufferRequest::VACANT]).map_err(refused)?;
        Ok(took)
    }
}
