//! A [`Recorder`] keeps who mapped what in a domain.

mod sorted;

use core::fmt;

use lock_api::{Mutex, RawMutex};

use super::event::Event;
use super::observer::Observer;
use crate::addr::Iova;
use crate::label::Caller;
use crate::list::{self, Picture, Rights};
use crate::prot::Prot;
use crate::range::IovaRange;
use sorted::{Placed, Sorted};

/// A mapping that a [`Recorder`] knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedBy {
    /// Where it is, in whole granules.
    pub range: IovaRange,
    /// What the device may do.
    pub prot: Prot,
    /// The caller that mapped it; `None` where nobody named one, as direct users of a
    /// [`Domain`](super::Domain) do not.
    pub by: Option<Caller>,
    /// Which map of the recorder it was, counted from 1.
    pub number: u64,
}

impl Placed for MappedBy {
    fn range(&self) -> IovaRange {
        self.range
    }

    fn at(&self, range: IovaRange) -> Self {
        Self { range, ..*self }
    }
}

/// The caller that is about to map.
#[derive(Clone, Copy)]
struct Asked {
    range: IovaRange,
    by: Caller,
    number: u64,
}

impl Placed for Asked {
    fn range(&self) -> IovaRange {
        self.range
    }

    fn at(&self, range: IovaRange) -> Self {
        Self { range, ..*self }
    }
}

/// Keeps who mapped what in a domain, for whoever debugs it: which device's driver, and from which
/// line.
///
/// A domain keeps no record of a mapping but its tables. A recorder [observes](super::Observed) the
/// domain and keeps one for each mapping, which it lists while the domain is used:
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::dma::{Device, DeviceConfig, DmaConfig, DmaDomain, NoPool, Piece, RawMemory};
/// use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
/// use dmaspan::iommu::soft::SoftIommu;
/// use dmaspan::iommu::{Domain, Observed, Recorder};
/// use dmaspan::platform::OneThread;
/// use dmaspan::{Direction, PhysAddr, Span};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
///     let table = PageTable::new(ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?, tables)?;
///     let driver = SoftIommu::over(&table);
///
///     let who = Arc::new(Recorder::<parking_lot::RawMutex>::new());
///     let domain = Domain::new(table, Observed::new(driver, Arc::clone(&who)))?;
///     let domain = Arc::new(DmaDomain::new(domain, DmaConfig::new(1), OneThread)?);
///     let nic = Device::new(domain, NoPool, DeviceConfig::bits(32).named("nic0"))?;
///
///     let packet = Piece::memory(Span::new(PhysAddr::new(0x8000_0200), 1500)?);
///     // SAFETY: the memory is this program's, and no device writes it.
///     let packet = unsafe { RawMemory::new(packet) };
///     let mapped = nic.map_single(packet, Direction::ToDevice)?;
///
///     let found: Vec<_> = who.list().collect();
///     assert_eq!(found.len(), 1);
///     assert_eq!(found[0].by.and_then(|by| by.device), Some("nic0"));
///     print!("{}", who.dump()); // 0xfffff000..=0xffffffff r-x- #1 nic0 at src/main.rs:27:18
///
///     let _memory = nic.unmap(mapped)?;
///     assert_eq!(who.list().count(), 0);
///     Ok(())
/// }
/// ```
///
/// It knows what it was told of: what was mapped before it observed the domain is missing. Parts of
/// a mapping that were unmapped are gone from its record.
pub struct Recorder<L> {
    state: Mutex<L, State>,
}

#[derive(Default)]
struct State {
    mapped: Sorted<MappedBy>,
    asked: Sorted<Asked>,
    numbers: u64,
    missed: u64,
}

impl<L: RawMutex> Recorder<L> {
    /// A recorder that knows nothing.
    pub fn new() -> Self {
        Self { state: Mutex::new(State::default()) }
    }

    /// What is mapped, by IOVA. The records are read in steps: what is mapped or unmapped
    /// meanwhile may be among them or not.
    ///
    /// # Context
    ///
    /// Takes the recorder's lock for a few records at a time, and holds none while one is looked
    /// at. Allocates nothing.
    pub fn list(&self) -> impl Iterator<Item = MappedBy> {
        self.list_in(IovaRange::ALL)
    }

    /// What is mapped in a part of the space; see [`list`](Self::list).
    pub fn list_in(&self, range: IovaRange) -> impl Iterator<Item = MappedBy> {
        list::in_steps(Some(range.start()), move |from, step| {
            let state = self.state.lock();
            let mut last = None;
            for record in state.mapped.from(from) {
                if record.range.start() > range.last() {
                    return None;
                }
                last = Some(record.range.last());
                if !step.push(*record) {
                    break;
                }
            }
            last?.checked_add(1)
        })
    }

    /// The caller that mapped what is at an address.
    ///
    /// # Context
    ///
    /// As [`list`](Self::list).
    pub fn find(&self, iova: Iova) -> Option<MappedBy> {
        self.list_in(IovaRange::point(iova)).next()
    }

    /// Returns how many records are missing, because there was no memory for them.
    pub fn missed(&self) -> u64 {
        self.state.lock().missed
    }

    /// A picture for people: a line for each mapping.
    ///
    /// # Context
    ///
    /// As [`list`](Self::list).
    pub fn dump(&self) -> impl fmt::Display {
        Picture(|f: &mut fmt::Formatter<'_>| {
            for MappedBy { range, prot, by, number } in self.list() {
                write!(f, "{range} {} #{number} ", Rights(prot))?;
                match by {
                    Some(by) => writeln!(f, "{by}")?,
                    None => writeln!(f, "by nobody who said so")?,
                }
            }
            match self.missed() {
                0 => Ok(()),
                missed => writeln!(f, "{missed} more had no memory for a record"),
            }
        })
    }
}

impl State {
    /// Notes that somebody is about to map.
    fn ask(&mut self, range: IovaRange, by: Caller) {
        self.forget_asked(range);
        self.numbers += 1;
        let asked = Asked { range, by, number: self.numbers };
        self.missed += u64::from(self.asked.insert(asked).is_err());
    }

    fn forget_asked(&mut self, range: IovaRange) {
        // One that has no memory to be cut is forgotten as a whole.
        let _ = self.asked.remove(range);
    }

    fn map(&mut self, range: IovaRange, prot: Prot) {
        let asked = self.asked.from(range.start()).next().copied();
        let asked = asked.filter(|asked| asked.range.covers(range));
        if asked.is_some_and(|asked| asked.range == range) {
            self.forget_asked(range);
        }
        let number = asked.map(|asked| asked.number).unwrap_or_else(|| {
            self.numbers += 1;
            self.numbers
        });
        self.unmap(range);
        let record = MappedBy { range, prot, by: asked.map(|asked| asked.by), number };
        // One map that comes in parts is one mapping.
        let before = range.start().get().checked_sub(1).map(Iova::new);
        let before = before.and_then(|at| self.mapped.from(at).next()).copied();
        let before = before.filter(|before| MappedBy { range, ..*before } == record);
        if let Some(whole) = before.and_then(|before| before.range.join(range)) {
            self.mapped.extend_to(whole);
        } else {
            self.missed += u64::from(self.mapped.insert(record).is_err());
        }
    }

    fn unmap(&mut self, range: IovaRange) {
        self.missed += u64::from(self.mapped.remove(range).is_err());
    }

    fn protect(&mut self, range: IovaRange, prot: Prot) {
        self.missed += u64::from(self.mapped.change(range, |record| record.prot = prot).is_err());
    }
}

impl<L: RawMutex + Send + Sync> Observer for Recorder<L> {
    /// Takes the recorder's lock, and allocates now and then: the lock and the allocator are such
    /// as may be used wherever memory is mapped in the domain.
    fn event(&self, event: &Event<'_>) {
        let mut state = self.state.lock();
        match *event {
            Event::Mapping { range, by } => state.ask(range, by),
            Event::Mapped { range, spans, prot } if !spans.is_empty() => state.map(range, prot),
            Event::Unmapping { range, .. } => state.forget_asked(range),
            Event::Unmapped { range, leaf_sizes, .. } if leaf_sizes != 0 => state.unmap(range),
            Event::Rewritten { range, prot: Some(prot) } => state.protect(range, prot),
            _ => {}
        }
    }
}

impl<L: RawMutex> Default for Recorder<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L: RawMutex> fmt::Debug for Recorder<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Recorder");
        if let Some(state) = self.state.try_lock() {
            debug.field("mappings", &state.mapped.len()).field("missed", &state.missed);
        }
        debug.finish_non_exhaustive()
    }
}
