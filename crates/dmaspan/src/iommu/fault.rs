//! The IOMMU refused the access of a device: a driver reports that here to a [`FaultHandler`].

use alloc::sync::Arc;
use core::fmt;

use lock_api::{Mutex, RawMutex};

use crate::addr::Iova;
use crate::atomic::{AtomicU64, Ordering};
use crate::log;

/// Says what a device tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultAccess {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To fetch an instruction.
    Execute,
}

/// The reason why an access was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultReason {
    /// The stream is blocked: it has no domain.
    Blocked,
    /// Nothing is mapped there, or no tables reach there.
    Translation,
    /// What is mapped there does not permit the access.
    Permission,
    /// The tables are wrong, or could not be read.
    Tables,
    /// Something else, by the hardware's own number.
    Other(u32),
}

/// Says what becomes of an access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultState {
    /// It has ended already: the handler only hears of it.
    Ended,
    /// Hardware holds it until it is told what to do.
    Stalled,
}

/// An access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FaultReport {
    /// Whose: the number by which the hardware tells streams apart.
    pub stream: u32,
    /// The address that the device used.
    pub iova: Iova,
    /// What it tried.
    pub access: FaultAccess,
    /// Why that was refused.
    pub reason: FaultReason,
    /// Whether there is something to decide.
    pub state: FaultState,
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stream, iova, access, reason, .. } = self;
        let access = match access {
            FaultAccess::Read => "a read",
            FaultAccess::Write => "a write",
            FaultAccess::Execute => "an instruction fetch",
        };
        write!(f, "stream {stream:#x} was refused {access} of {iova}, because ")?;
        match reason {
            FaultReason::Blocked => f.write_str("the stream is blocked"),
            FaultReason::Translation => f.write_str("nothing is mapped there"),
            FaultReason::Permission => f.write_str("what is mapped there does not permit it"),
            FaultReason::Tables => f.write_str("the tables are wrong or could not be read"),
            FaultReason::Other(code) => write!(f, "of the hardware's reason {code:#x}"),
        }
    }
}

/// Says what is to become of an access that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultResponse {
    /// It ends with an error, as far as the bus can say so.
    Terminate,
    /// It is tried again, since the handler removed the reason.
    Retry,
}

/// Hears of faults.
pub trait FaultHandler: Send + Sync {
    /// A device was refused an access. [`FaultResponse::Retry`] is followed only for an access that
    /// is [stalled](FaultState::Stalled).
    ///
    /// # Context
    ///
    /// Interrupts may be off: it neither waits nor allocates, and neither changes the [`FaultHook`]
    /// that calls it nor attaches or detaches the stream. One hook calls it for one fault at a
    /// time; a handler that several have is called concurrently.
    fn fault(&self, report: &FaultReport) -> FaultResponse;
}

/// A driver reports here the faults of a stream or of a domain, whatever its hardware tells apart.
///
/// Without a handler every access is terminated and counted (Linux: `iommu_set_fault_handler` and
/// `report_iommu_fault`, which says `ENOSYS` where there is none).
pub struct FaultHook<L> {
    handler: Mutex<L, Option<Arc<dyn FaultHandler>>>,
    reported: AtomicU64,
    unhandled: AtomicU64,
}

impl<L: RawMutex> FaultHook<L> {
    /// A hook without a handler.
    pub fn new() -> Self {
        Self {
            handler: Mutex::new(None),
            reported: AtomicU64::new(0),
            unhandled: AtomicU64::new(0),
        }
    }

    /// Sets the handler, or takes it away, and returns the one before, which does not run any more.
    pub fn set(&self, handler: Option<Arc<dyn FaultHandler>>) -> Option<Arc<dyn FaultHandler>> {
        core::mem::replace(&mut *self.handler.lock(), handler)
    }

    /// Tells the handler, and says what to do. For drivers.
    ///
    /// # Context
    ///
    /// May run in an interrupt, if the lock keeps interrupts off. Does not allocate. Waits for
    /// other faults of the same hook.
    pub fn report(&self, report: &FaultReport) -> FaultResponse {
        self.reported.fetch_add(1, Ordering::Relaxed);
        // Under the lock, so that a handler that `set` has returned does not run any more.
        let response = match &*self.handler.lock() {
            Some(handler) => handler.fault(report),
            None => {
                self.unhandled.fetch_add(1, Ordering::Relaxed);
                log::warn!("{report}, and nobody handles its faults");
                FaultResponse::Terminate
            }
        };
        match report.state {
            FaultState::Stalled => response,
            FaultState::Ended => FaultResponse::Terminate,
        }
    }

    /// Returns how many faults were reported.
    pub fn reported(&self) -> u64 {
        self.reported.load(Ordering::Relaxed)
    }

    /// Returns how many of them nobody heard of, since there was no handler.
    pub fn unhandled(&self) -> u64 {
        self.unhandled.load(Ordering::Relaxed)
    }
}

impl<L: RawMutex> Default for FaultHook<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L> fmt::Debug for FaultHook<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultHook")
            .field("reported", &self.reported.load(Ordering::Relaxed))
            .field("unhandled", &self.unhandled.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}
