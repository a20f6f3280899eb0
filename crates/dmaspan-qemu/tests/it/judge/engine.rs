//! Domains, devices and models, and what is asked of them in turn.

use std::collections::{BTreeMap, VecDeque};
use std::env;
use std::fmt::{self, Debug};
use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, Format};
use dmaspan::iommu::{
    Attachment, FaultHandler, FaultReport, FaultResponse, Port, Prepared, Target,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, lg2};
use dmaspan_qemu::{Buffer, Edu, TestDev};
use dmaspan_sim::model::IntervalModel;
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

use crate::judge::operations::Operation;
use crate::judge::planted::Spoil;
use crate::judge::rig::{COPIER, DomainOf, Rig, WRITERS};

/// log2 of the memory that is mapped.
const MEMORY_LG2: u32 = 30;
/// For the tables of both domains.
const TABLES: u64 = 120 << 20;
/// As many operations are told with a disagreement.
const REMEMBERED: usize = 6;
/// The index of the copier's stream.
pub(crate) const COPIES: usize = WRITERS.len();
/// The seed where none is given.
const OURS: u64 = 0xd3a5_9a4e;
/// So many operations of it reach leaves of all sizes.
const ENOUGH: u64 = 10_000;
const OPERATIONS: &str = "DMASPAN_JUDGE_OPERATIONS";
const SEED: &str = "DMASPAN_JUDGE_SEED";

/// Two of the three say different things, or one says what cannot be.
pub(crate) struct Disagreement(pub(crate) String);

impl fmt::Debug for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Disagreement {
    /// Its first line.
    pub(crate) fn summary(&self) -> &str {
        self.0.lines().next().unwrap_or_default()
    }
}

pub(crate) type Judged<T = ()> = Result<T, Disagreement>;

/// Fails with what differs.
macro_rules! agree {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err($crate::judge::engine::Disagreement(format!($($what)+)));
        }
    };
}
pub(crate) use agree;

/// Faults as they were reported to a stream.
#[derive(Default)]
pub(crate) struct Heard(Mutex<Vec<FaultReport>>);

impl Heard {
    pub(crate) fn take(&self) -> Vec<FaultReport> {
        std::mem::take(&mut self.0.lock())
    }
}

impl FaultHandler for Heard {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}

/// A device's stream.
pub(crate) struct Stream<P: Port> {
    pub(crate) attachment: Attachment<P>,
    pub(crate) id: u32,
    /// Of which domain, if any.
    pub(crate) to: Option<usize>,
    pub(crate) heard: Arc<Heard>,
}

/// A domain and what it should say.
pub(crate) struct Side<R: Rig> {
    pub(crate) domain: Arc<DomainOf<R>>,
    pub(crate) model: IntervalModel,
}

/// The judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judges {
    /// The interval map, the walker and the hardware.
    All,
    /// Hardware, by the interval map.
    HardwareAlone,
}

/// The judge.
pub(crate) struct Judge<R: Rig> {
    pub(crate) judges: Judges,
    /// What is done to the leaf of each place that was mapped.
    pub(crate) spoil: Option<Spoil>,
    pub(crate) rng: Rng,
    pub(crate) sides: [Side<R>; 2],
    pub(crate) streams: Vec<Stream<R::Port>>,
    pub(crate) writers: Vec<TestDev>,
    pub(crate) copier: Edu,
    /// What is judged of the domains' apertures.
    pub(crate) aperture: IovaRange,
    /// Where addresses are chosen.
    pub(crate) windows: Vec<IovaRange>,
    /// Leaf sizes of which there is room for one, log2.
    pub(crate) sizes: Vec<u32>,
    /// What is mapped: all of it may be written.
    pub(crate) memory: Buffer,
    /// Where the copier writes what it read, by the same address in both domains.
    pub(crate) mailbox: Buffer,
    pub(crate) mailbox_iova: Iova,
    /// Addresses that were used lately.
    pub(crate) warm: VecDeque<Iova>,
    log: VecDeque<String>,
    /// What is done next, if that is settled.
    pub(crate) next: Option<Operation>,
    /// How often a device reached memory through a leaf of each size, log2.
    pub(crate) reached: BTreeMap<u32, u64>,
    /// A device is at memory: what is found, its access shows.
    pub(crate) in_access: bool,
    pub(crate) done: u64,
    seed: u64,
    pub(crate) tables: Arena,
    pub(crate) rig: R,
}

impl<R: Rig> Judge<R> {
    pub(crate) fn new(rig: R, seed: u64) -> Self {
        let pci = rig.pci();
        let ram = pci.machine().ram();
        let tables = ram.arena(TABLES).expect("there is room");
        let memory = ram.reserve(lg2::size(MEMORY_LG2)).expect("there is room");
        let granule = lg2::size(R::Format::GRANULE_LG2);
        let mailbox = ram.allocate(granule).expect("there is room");
        let geometry = rig.format().geometry();
        let reach = IovaRange::new(Iova::new(0), Iova::new(R::REACH)).expect("it goes up");
        let aperture = geometry.aperture.intersection(reach).expect("some is in reach");
        let middle = aperture.start().get() + aperture.len_less_one() / 4 * 3;
        let mailbox_iova = Iova::new(lg2::align_down(middle, MEMORY_LG2));
        let sides = [(); 2].map(|()| {
            let domain = rig.domain(&tables);
            let span = Span::new(mailbox.paddr(), granule).expect("it is not empty");
            #[expect(unsafe_code, reason = "a device is let at the mailbox")]
            // SAFETY: 1. Nobody else uses the domain. 2. The mailbox is reached by atomics alone,
            // and lives longer than the streams.
            let mapped = unsafe { domain.map_spans(mailbox_iova, &[span], Prot::READ_WRITE) };
            mapped.expect("nothing is mapped there");
            Side { domain, model: IntervalModel::new() }
        });
        let stream = |slot| {
            let port = rig.port(slot);
            let heard = Arc::new(Heard::default());
            port.faults().set(Some(Arc::clone(&heard) as Arc<dyn FaultHandler>));
            let attachment = Attachment::new(port).ok().expect("hardware answers");
            let id = dmaspan_qemu::Pci::requester(slot);
            Stream { attachment, id, to: None, heard }
        };
        let streams = WRITERS.into_iter().chain([COPIER]).map(stream).collect();
        let sizes = (R::Format::GRANULE_LG2..=MEMORY_LG2)
            .filter(|&lg2| geometry.page_sizes & lg2::size(lg2) != 0);
        Self {
            judges: Judges::All,
            spoil: None,
            rng: Rng::new(seed),
            sides,
            streams,
            writers: WRITERS.map(|slot| TestDev::new(pci, slot).expect("it is there")).into(),
            copier: Edu::new(pci, COPIER).expect("it is there"),
            windows: windows(aperture),
            aperture,
            sizes: sizes.collect(),
            memory,
            mailbox,
            mailbox_iova,
            warm: VecDeque::new(),
            log: VecDeque::new(),
            next: None,
            reached: BTreeMap::new(),
            in_access: false,
            done: 0,
            seed,
            tables,
            rig,
        }
    }

    /// Does as many operations, and judges each.
    pub(crate) fn run(&mut self, operations: u64) -> Judged {
        for _ in 0..operations {
            self.step().map_err(|Disagreement(what)| {
                let log: Vec<_> = self.log.iter().map(|line| format!("  {line}\n")).collect();
                let (name, done, seed) = (R::NAME, self.done, self.seed);
                Disagreement(format!(
                    "{name}: {what}\nafter operation {done} of seed {seed:#x}; the last were\n{}\
                     {SEED}={seed:#x} {OPERATIONS}={} replays it",
                    log.concat(),
                    done + 1
                ))
            })?;
            self.done += 1;
        }
        Ok(())
    }

    /// Remembers an operation for a disagreement.
    pub(crate) fn note(&mut self, what: &impl Debug) {
        if self.log.len() == REMEMBERED {
            self.log.pop_front();
        }
        self.log.push_back(format!("{}: {what:?}", self.done));
    }

    /// What the format grants to whom asks for `prot`.
    pub(crate) fn granted(&self, prot: Prot) -> Prot {
        let format = self.sides[0].domain.format();
        let template = format.template(0, R::Format::GRANULE_LG2, prot);
        format.prot(0, format.leaf(template, PhysAddr::new(0)))
    }

    /// Gives a stream a domain, or none.
    pub(crate) fn attach(&mut self, stream: usize, to: Option<usize>) -> Judged {
        let target = match to {
            None => Target::Blocked,
            Some(side) => Target::Paging(Prepared::new(Arc::clone(&self.sides[side].domain))),
        };
        let stream = &mut self.streams[stream];
        let switched = stream.attachment.replace(target);
        stream.to = to;
        switched.map_err(|error| Disagreement(format!("not attached: {error}")))
    }
}

/// The start and the end of the aperture, and the border of a table in the middle.
fn windows(aperture: IovaRange) -> Vec<IovaRange> {
    let bytes = lg2::size(MEMORY_LG2 + 1);
    let (first, last) = (aperture.start().get(), aperture.last().get());
    let middle = lg2::align_down(first + aperture.len_less_one() / 2, MEMORY_LG2);
    let at = |start| IovaRange::from_len(Iova::new(start), bytes).ok();
    [first, last - (bytes - 1), middle - bytes / 2].into_iter().filter_map(at).collect()
}

/// A number of the environment, hexadecimal or not.
fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    Some(parsed.unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Judges as many operations as the environment says.
pub(crate) fn judge<R: Rig>() {
    let Some(rig) = R::start() else { return };
    let seed = number(SEED).unwrap_or(OURS);
    let operations = number(OPERATIONS).unwrap_or(ENOUGH);
    let mut judge = Judge::new(rig, seed);
    if let Err(disagreement) = judge.run(operations) {
        panic!("{disagreement:?}");
    }
    println!("{}: {operations} operations; DMA by leaf {:?}", R::NAME, judge.reached);
    let missed = judge.sizes.iter().find(|lg2| !judge.reached.contains_key(lg2));
    let may_miss = operations < ENOUGH || seed != OURS;
    assert!(may_miss || missed.is_none(), "no DMA through a leaf of 2^{missed:?}");
}
