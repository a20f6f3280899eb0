//! A space that answers as a kernel does, fails when it is told to, and says what it was asked.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use dmaspan::space::{DmaSpace, Limits};
use dmaspan::{Errno, Iova, IovaRange, Label, Prot, UserRange};
use dmaspan_linux::plan::MmioSpace;
use dmaspan_linux::{Memory, MemoryKind};

pub(crate) const RW: Prot = Prot::READ_WRITE;

/// What the space refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused(pub(crate) Errno);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refused {}

/// One mapping, which keeps the memory as a pin does.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) iova: IovaRange,
    pub(crate) memory: Arc<Memory>,
    pub(crate) user: UserRange,
    pub(crate) prot: Prot,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) entries: BTreeMap<u64, Entry>,
    pub(crate) map_calls: u64,
    pub(crate) unmap_calls: u64,
    /// Which map fails, counted from now; 1 is the next one.
    pub(crate) failing_map: Option<u64>,
    /// Whether that one panics.
    pub(crate) panics: bool,
    /// Which unmaps fail.
    pub(crate) failing_unmaps: Vec<u64>,
    /// Whether unmapping says that nothing was there.
    pub(crate) is_forgetful: bool,
    /// Whether it does not say what is mapped.
    pub(crate) is_silent: bool,
    pub(crate) limits: Option<Limits>,
}

#[derive(Debug, Default)]
pub(crate) struct Kernel {
    state: Mutex<State>,
}

/// The kernel's own page, which all memory is made of: 4 KiB on x86.
pub(crate) fn page_size() -> u64 {
    MemoryKind::Base.page_size()
}

/// The leaf that is a table of pages: 2 MiB where they are of 4 KiB.
pub(crate) fn m2() -> u64 {
    page_size() << 9
}

/// The leaf above it: 1 GiB, or the next one that the planner counts on.
pub(crate) fn g1() -> u64 {
    (m2() << 9).min(1 << 30)
}

/// What x86 has: leaves of three sizes, 48 bits, without the addresses of interrupts.
pub(crate) fn x86() -> Limits {
    let range = |start, last| IovaRange::new(Iova::new(start), Iova::new(last)).unwrap();
    let apertures = vec![range(0, 0xfedf_ffff), range(0xfef0_0000, (1 << 48) - 1)];
    Limits { apertures, page_sizes: page_size() | m2() | g1(), mappings_left: Some(65_535) }
}

pub(crate) fn memory(pages: u64) -> Arc<Memory> {
    Arc::new(Memory::new(MemoryKind::Base, pages * page_size()).unwrap())
}

/// A file of at least so many bytes, of which nothing is allocated, that begins where a leaf can.
pub(crate) fn file(len: u64) -> Arc<Memory> {
    let len = len.next_multiple_of(MemoryKind::Memfd.leaf_size());
    let small = Memory::new(MemoryKind::Memfd, page_size()).unwrap();
    let file = std::fs::File::from(small.file().unwrap().0.try_clone_to_owned().unwrap());
    file.set_len(len).unwrap();
    Arc::new(Memory::from_file(file, 0, len).unwrap())
}

impl Kernel {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        let kernel = Self::default();
        kernel.state().limits = Some(limits);
        Arc::new(kernel)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn entries(&self) -> Vec<Entry> {
        self.state().entries.values().cloned().collect()
    }

    /// Whether nothing is mapped.
    pub(crate) fn is_empty(&self) -> bool {
        self.state().entries.is_empty()
    }
}

/// Whether this call is the one that fails.
fn counts_down(failing: &mut Option<u64>) -> bool {
    *failing = failing.map(|left| left - 1);
    failing.take_if(|left| *left == 0).is_some()
}

impl DmaSpace for Kernel {
    type Memory = Arc<Memory>;
    type Error = Refused;

    fn map_labelled(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        _label: Label,
    ) -> Result<(), Refused> {
        let mut state = self.state();
        state.map_calls += 1;
        if counts_down(&mut state.failing_map) {
            let panics = state.panics;
            drop(state);
            assert!(!panics, "as it was told to");
            return Err(Refused(Errno::ENOMEM));
        }
        let limits = state.limits.clone().unwrap();
        let len = user.checked_len().unwrap();
        if !(user.start().get() | iova.get() | len).is_multiple_of(limits.granule()) {
            return Err(Refused(Errno::EINVAL));
        }
        assert!(memory.user_range().covers(user));
        assert!(memory.is_populated() || memory.kind() == MemoryKind::Adopted);
        let iova = IovaRange::from_len(iova, len).map_err(|error| Refused(error.errno()))?;
        if !limits.apertures.iter().any(|aperture| aperture.covers(iova)) {
            return Err(Refused(Errno::EINVAL));
        }
        let before = state.entries.range(..=iova.last().get()).next_back();
        if before.is_some_and(|(_, entry)| entry.iova.last() >= iova.start()) {
            return Err(Refused(Errno::EEXIST));
        }
        if limits.mappings_left == Some(u64::try_from(state.entries.len()).unwrap()) {
            return Err(Refused(Errno::ENOSPC));
        }
        let memory = Arc::clone(memory);
        state.entries.insert(iova.start().get(), Entry { iova, memory, user, prot });
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Refused> {
        let mut state = self.state();
        state.unmap_calls += 1;
        state.failing_unmaps.iter_mut().for_each(|left| *left -= 1);
        let before = state.failing_unmaps.len();
        state.failing_unmaps.retain(|left| *left > 0);
        if state.failing_unmaps.len() < before {
            return Err(Refused(Errno::EIO));
        }
        let touched: Vec<_> = state
            .entries
            .values()
            .filter(|entry| entry.iova.intersection(range).is_some())
            .collect();
        if touched.iter().any(|entry| !range.covers(entry.iova)) {
            return Err(Refused(Errno::EINVAL));
        }
        let starts: Vec<_> = touched.iter().map(|entry| entry.iova.start().get()).collect();
        let mut bytes = 0;
        for start in starts {
            bytes += state.entries.remove(&start).unwrap().iova.checked_len().unwrap();
        }
        Ok(if state.is_forgetful { 0 } else { bytes })
    }

    fn mapped_in(&self, range: IovaRange) -> Option<IovaRange> {
        let state = self.state();
        let mut entries = state.entries.values().map(|entry| entry.iova);
        entries.find(|mapped| !state.is_silent && mapped.intersection(range).is_some())
    }

    fn limits(&self) -> Limits {
        let state = self.state();
        let mut limits = state.limits.clone().unwrap();
        let made = u64::try_from(state.entries.len()).unwrap();
        limits.mappings_left = limits.mappings_left.map(|most| most - made);
        limits
    }

    fn errno(&self, error: &Refused) -> Errno {
        error.0
    }
}

/// A memory stands in for the registers of a device.
impl MmioSpace for Kernel {
    type Bar = Arc<Memory>;

    fn bar_range(bar: &Arc<Memory>, offsets: Range<u64>) -> Result<UserRange, Refused> {
        let len = offsets.end.saturating_sub(offsets.start);
        bar.sub_range(offsets.start, len).map_err(|error| Refused(error.errno()))
    }

    fn map_bar(
        &self,
        bar: &Arc<Memory>,
        offsets: Range<u64>,
        iova: Iova,
        prot: Prot,
    ) -> Result<(), Refused> {
        self.map(bar, Self::bar_range(bar, offsets)?, iova, prot)
    }
}
