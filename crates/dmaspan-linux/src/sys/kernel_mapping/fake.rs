//! A kernel that maps nothing and does what a test wants.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

use dmaspan::{Errno, Iova, IovaRange, Prot};

use super::{Kernel, LockedBy, NOTHING, Source};
use crate::os;

/// What a request does, from the first one on; those behind the last succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// What it is asked for.
    Yes,
    /// Nothing.
    Fail(Errno),
    /// An unmap says that it unmapped a byte less.
    Short,
    /// An unmap takes so many mappings away, those with the lowest addresses, and fails.
    Part(usize, Errno),
}

/// Mappings, by the first IOVA.
#[derive(Debug, Default)]
struct State {
    areas: BTreeMap<u64, (IovaRange, Source)>,
    maps: Vec<Answer>,
    unmaps: Vec<Answer>,
    /// Whether requests that map wait, and how many do.
    held: bool,
    waiting: u32,
}

/// The kernel.
#[derive(Debug)]
pub(crate) struct Fake {
    /// Tables of different kernels have no numbers for each other.
    kernel: u32,
    id: u32,
    /// Whether it maps files; ENOTTY says that it does not.
    files: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

static TABLES: AtomicU32 = AtomicU32::new(1);

impl Fake {
    /// A table of kernel 0.
    pub(crate) fn new() -> Self {
        Self::of(0)
    }

    pub(crate) fn of(kernel: u32) -> Self {
        let id = TABLES.fetch_add(1, Ordering::Relaxed);
        let files = AtomicBool::new(false);
        Self { kernel, id, files, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// What the next requests do, the first one first.
    pub(crate) fn answer(&self, maps: &[Answer], unmaps: &[Answer]) {
        let mut state = self.lock();
        state.maps = maps.iter().rev().copied().collect();
        state.unmaps = unmaps.iter().rev().copied().collect();
    }

    /// What is mapped.
    pub(crate) fn areas(&self) -> Vec<(IovaRange, Source)> {
        self.lock().areas.values().copied().collect()
    }

    /// Lets it map files.
    pub(crate) fn map_files(&self) {
        self.files.store(true, Ordering::Relaxed);
    }

    /// Maps what the table does not know of.
    pub(crate) fn plant(&self, range: IovaRange) {
        let theirs = (range, Source::File { fd: -1, offset: 0 });
        self.lock().areas.insert(range.start().get(), theirs);
    }

    /// Lets requests wait that come in now.
    pub(crate) fn hold(&self) {
        self.lock().held = true;
    }

    /// Lets them go on.
    pub(crate) fn go_on(&self) {
        self.lock().held = false;
        self.changed.notify_all();
    }

    /// Waits until so many requests wait.
    pub(crate) fn wait_for(&self, waiting: u32) {
        let state = self.lock();
        drop(self.changed.wait_while(state, |state| state.waiting < waiting).unwrap());
    }

    fn pass(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |state| state.held).unwrap();
        state.waiting -= 1;
        state
    }
}

// SAFETY: there is no device.
unsafe impl Kernel for Fake {
    const MAP: &'static str = "map";
    const UNMAP: &'static str = "unmap";

    fn request(source: Source) -> &'static str {
        match source {
            Source::User(_) => Self::MAP,
            Source::File { .. } => "map a file",
            Source::Table { .. } => "copy",
        }
    }

    unsafe fn map(&self, source: Source, range: IovaRange, _: Prot) -> Result<(), Errno> {
        let mut state = self.pass();
        if let Some(Answer::Fail(errno)) = state.maps.pop() {
            return Err(errno);
        }
        let overlaps = state.areas.values().any(|(area, _)| area.intersection(range).is_some());
        assert!(!overlaps, "the table let {range} through, where something is mapped");
        state.areas.insert(range.start().get(), (range, source));
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, Errno> {
        let mut state = self.pass();
        let answer = state.unmaps.pop();
        if let Some(Answer::Fail(errno)) = answer {
            return Err(errno);
        }
        if let Some(Answer::Part(count, errno)) = answer {
            let inside = state.areas.range(range.start().get()..=range.last().get()).take(count);
            let inside: Vec<u64> = inside.map(|(&start, _)| start).collect();
            state.areas.retain(|start, _| !inside.contains(start));
            return Err(errno);
        }
        let mut bytes = 0;
        state.areas.retain(|_, (area, _)| {
            let inside = range.covers(*area);
            assert!(inside || area.intersection(range).is_none(), "{range} bisects {area}");
            bytes += if inside { area.checked_len().unwrap_or(u64::MAX) } else { 0 };
            !inside
        });
        // As iommufd has it; type 1 says that it was 0 bytes.
        if bytes == 0 && self.id.is_multiple_of(2) {
            return Err(NOTHING);
        }
        Ok(if answer == Some(Answer::Short) { bytes - 1 } else { bytes })
    }

    fn locked_by(&self) -> LockedBy {
        LockedBy::Process
    }

    fn maps_files(&self) -> bool {
        self.files.load(Ordering::Relaxed)
    }

    fn cannot_map_file(&self, errno: Errno) -> bool {
        self.files.fetch_and(errno != os::ENOTTY, Ordering::Relaxed);
        [os::ENOTTY, Errno::EINVAL].contains(&errno)
    }

    fn table(&self, by: &Self) -> Option<u32> {
        (self.kernel == by.kernel).then_some(self.id)
    }
}

/// A range of IOVAs.
pub(crate) fn iovas(start: u64, last: u64) -> IovaRange {
    IovaRange::new(Iova::new(start), Iova::new(last)).unwrap()
}
