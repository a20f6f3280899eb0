//! The controller: its registers, and the threads that do its commands.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use dmaspan_linux::client::ClientEvent;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::disk::Disk;
use crate::memory::GuestMemory;

mod admin;
mod block;
mod command;
mod prp;
mod state;
mod worker;

use state::{MOST_ENTRIES, State};
pub(crate) use state::{Mastering, VECTORS};

/// How long BAR 0 is: registers, doorbells from 0x1000 on, and the tables of MSI-X, which a client
/// keeps.
pub(crate) const BAR_BYTES: u64 = 0x4000;
const DOORBELLS: u64 = 0x1000;
/// Registers (NVM Express Base Specification 2.0, section 3.1.3).
const CC: u64 = 0x14;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
/// Queues of so many entries, in one piece; 10 s to become ready; the NVM command set.
const CAP: u64 = (MOST_ENTRIES as u64 - 1) | 1 << 16 | 20 << 24 | 1 << 37;

/// Counts of what a controller has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Commands of I/O queues.
    pub commands: u64,
    /// Those of them that failed.
    pub failed: u64,
}

/// There are commands that do not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Busy;

/// What the threads share.
#[derive(Debug)]
struct Shared {
    dma: Arc<GuestMemory>,
    disk: Disk,
    state: Mutex<State>,
    /// There is work, or the end.
    begun: Condvar,
    /// A command has ended.
    ended: Condvar,
    commands: AtomicU64,
    failed: AtomicU64,
}

/// An NVMe controller with threads of its own, which end when it is dropped.
///
/// A thread that stands for the guest reads and writes registers; none of that waits for the disk.
#[derive(Debug)]
pub struct Controller {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Controller {
    /// A controller over a disk that does up to `threads` commands at once, by memory of `dma`.
    ///
    /// # Errors
    ///
    /// Of a thread that cannot be started.
    pub fn new(dma: Arc<GuestMemory>, disk: Disk, threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            dma,
            disk,
            state: Mutex::new(State::new()),
            begun: Condvar::new(),
            ended: Condvar::new(),
            commands: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let mut controller = Self { shared, workers: Vec::new() };
        for _ in 0..threads.max(1) {
            let shared = Arc::clone(&controller.shared);
            let worker = thread::Builder::new().name("nvme".to_owned());
            controller.workers.push(worker.spawn(move || worker::run(&shared))?);
        }
        Ok(controller)
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        let Shared { commands, failed, .. } = &*self.shared;
        Counts {
            commands: commands.load(Ordering::Relaxed),
            failed: failed.load(Ordering::Relaxed),
        }
    }

    /// Reads BAR 0; bytes behind its end are 0.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.shared.state.lock();
        let register = |at: u64| match at {
            0x00 => CAP,
            0x08 => u64::from(admin::VERSION),
            0x10 => u64::from(state.cc) << 32,
            0x18 => u64::from(state.csts()) << 32,
            0x20 => u64::from(state.aqa) << 32,
            ASQ => state.asq,
            ACQ => state.acq,
            _ => 0,
        };
        for (at, byte) in (offset..).zip(data) {
            let lane = at % 8;
            let bytes = register(at - lane).to_le_bytes();
            *byte = usize::try_from(lane).ok().and_then(|lane| bytes.get(lane)).map_or(0, |b| *b);
        }
    }

    /// Writes BAR 0: a register of 4 bytes or of 8. Others are written for nothing, as hardware has
    /// it.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        if let Ok(value) = data.try_into() {
            self.write32(offset, u32::from_le_bytes(value));
        } else if let (8, Some((low, high))) = (data.len(), data.split_first_chunk()) {
            self.write32(offset, u32::from_le_bytes(*low));
            if let Ok(high) = high.try_into() {
                self.write32(offset.saturating_add(4), u32::from_le_bytes(high));
            }
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        let mut state = self.shared.state.lock();
        let low = |old: u64| old & !u64::from(u32::MAX) | u64::from(value);
        let high = |old: u64| old & u64::from(u32::MAX) | u64::from(value) << 32;
        match offset {
            CC => state.configure(value),
            AQA => state.aqa = value,
            ASQ => state.asq = low(state.asq),
            0x2c => state.asq = high(state.asq),
            ACQ => state.acq = low(state.acq),
            0x34 => state.acq = high(state.acq),
            DOORBELLS..0x2000 if offset.is_multiple_of(4) => {
                let queue = u16::try_from((offset - DOORBELLS) / 8).unwrap_or(u16::MAX);
                match offset % 8 {
                    0 => state.submitted(queue, value),
                    _ => state.completed(queue, value),
                }
            }
            _ => {}
        }
        drop(state);
        self.shared.begun.notify_all();
        self.shared.ended.notify_all();
    }

    /// Says which eventfds signal vectors from `start` on; `None` signals nothing.
    pub(crate) fn set_vectors(&self, start: usize, eventfds: Vec<Option<ClientEvent>>) {
        let mut state = self.shared.state.lock();
        for (vector, eventfd) in state.vectors.iter_mut().skip(start).zip(eventfds) {
            *vector = eventfd.map(Arc::new);
        }
    }

    /// Makes the function a master of its bus, or takes that from it: then its commands are waited
    /// for, for `bound` at most, and others wait until it is one again.
    ///
    /// # Errors
    ///
    /// [`Busy`]: some of them may still reach memory.
    pub(crate) fn set_mastering(&self, mastering: Mastering, bound: Duration) -> Result<(), Busy> {
        let mut state = self.shared.state.lock();
        state.mastering = mastering;
        match mastering {
            Mastering::Off => self.wait_idle(state, bound),
            Mastering::On => {
                self.shared.begun.notify_all();
                Ok(())
            }
        }
    }

    /// Resets the controller and waits for the commands that it does, for `bound` at most.
    ///
    /// # Errors
    ///
    /// [`Busy`]: some of them may still reach memory.
    pub(crate) fn reset(&self, bound: Duration) -> Result<(), Busy> {
        let mut state = self.shared.state.lock();
        state.reset();
        self.shared.ended.notify_all();
        self.wait_idle(state, bound)
    }

    fn wait_idle(&self, mut state: MutexGuard<'_, State>, bound: Duration) -> Result<(), Busy> {
        let deadline = Instant::now().checked_add(bound);
        while state.running > 0 {
            let Some(deadline) = deadline.filter(|deadline| *deadline > Instant::now()) else {
                return Err(Busy);
            };
            self.shared.ended.wait_until(&mut state, deadline);
        }
        Ok(())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_stopped = true;
        state.reset();
        drop(state);
        self.shared.begun.notify_all();
        self.shared.ended.notify_all();
        for worker in self.workers.drain(..) {
            // One that panicked has said so.
            let _ = worker.join();
        }
    }
}
