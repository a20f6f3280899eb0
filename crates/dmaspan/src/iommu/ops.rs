//! [`IommuOps`] are the hooks by which a domain tells hardware what changed. Drivers implement
//! them.

use core::fmt;

use super::event::Event;
use crate::addr::{Address, PhysAddr};
use crate::io_pgtable::TableRoot;
use crate::promise::Promise;
use crate::range::IovaRange;

/// Hardware did not do what it was told in the time it had, or said that it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} (status {status:#x})")]
pub struct HardwareError {
    /// What was waited for or went wrong, lower-case.
    pub what: &'static str,
    /// The register or status word that says so; 0 where there is none.
    pub status: u64,
}

/// Says where translations were taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope<'a> {
    /// In these ranges and nowhere else.
    Ranges(&'a [IovaRange]),
    /// In more ranges than [`IommuOps::max_ranges`] or than a [`Gather`](super::Gather) has places
    /// for: forget everything about the domain.
    All,
}

impl fmt::Display for Scope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("anything of the domain"),
            Self::Ranges([]) => f.write_str("its walks"),
            Self::Ranges([first, more @ ..]) => {
                write!(f, "{first}")?;
                more.iter().try_for_each(|range| write!(f, ", {range}"))
            }
        }
    }
}

/// Says what hardware must forget before anything that was unmapped may be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalidation<'a> {
    /// Where.
    pub scope: Scope<'a>,
    /// The sizes of the leaves taken away, bit n for 2^n bytes, and of a contiguous group that of
    /// the group. In ranges, hardware need not forget leaves of another size: commands may name a
    /// level (IHI 0070, 4.4.1, TTL), or one address for each leaf of the smallest size.
    pub leaf_sizes: u64,
    /// Whether tables were taken away too: then cached walks must be forgotten, not only leaves.
    pub tables: Tables,
}

/// Says whether an invalidation concerns page tables besides leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// All tables are still in place.
    Kept,
    /// Tables were detached: hardware may hold walks that lead into them.
    Detached,
}

/// The invalidation hooks of an IOMMU driver, for one domain.
///
/// # Safety
///
/// Memory is freed on the strength of these:
///
/// 1. When [`invalidate`](Self::invalidate) returns `Ok`, no device of the domain uses a
///    translation of a [named size](Invalidation::leaf_sizes), or a cached walk where tables were
///    [detached](Tables::Detached), in the scope that the tables did not have any more when it was
///    called, and every access made through one has completed. The hook orders the CPU's stores to
///    the tables before the invalidation (on Arm, DSB before TLBI).
/// 2. When [`detach`](Self::detach) returns `Ok`, no device walks the domain's tables any more, and
///    none uses anything that was read from them.
/// 3. When [`root_changed`](Self::root_changed) returns `Ok`, hardware walks from a root that was
///    current during the call. Where [`begin`](Self::begin) fails, hardware walks none of its
///    tables.
/// 4. What the tables translate to, devices access as addresses of [`Address`](Self::Address) and
///    of no other kind.
///
/// Where stores to the tables are not ordered before the access that starts a device,
/// [`sync_map`](Self::sync_map) orders them; a mapping is announced through it before it is used.
#[expect(unsafe_code, reason = "a contract about what devices reach; nothing here is unsafe")]
pub unsafe trait IommuOps: Send + Sync {
    /// What the addresses are that come out of a translation: [`PhysAddr`] for hardware, and for a
    /// device of software what it reaches memory by. Memory is mapped by a
    /// [`Pinner`](crate::pin::Pinner) of the same alone.
    type Address: Address;

    /// The domain of these hooks begins, over the table whose root this is. The domain calls it
    /// once, before anything is mapped; hardware that walks tables in the process, as
    /// [`SoftIommu`](super::SoftIommu) does, walks none before. Its caller promises that the hooks
    /// are called for this table from now on. Hooks that wrap others pass it on.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where these cannot be the hooks of that table; there is no domain then.
    fn begin(&self, _promise: Promise<'_>, _root: &TableRoot) -> Result<(), HardwareError> {
        Ok(())
    }

    /// Makes hardware forget, and waits until it has.
    ///
    /// # Context
    ///
    /// May run with interrupts off and concurrently with itself. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where completion was not seen in bounded time. What was to be forgotten
    /// may be in use: the caller frees nothing of it.
    #[track_caller]
    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError>;

    /// Tells hardware that caches absent or less permissive entries that `range` was mapped.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where completion was not seen in bounded time; the mapping is taken back.
    #[track_caller]
    fn sync_map(&self, _range: IovaRange) -> Result<(), HardwareError> {
        Ok(())
    }

    /// The tree has a new root, above the old one: hardware that walks the old one translates no
    /// address beyond its reach. Called before a mapping that needs the new root is used.
    ///
    /// `current` gives the root and its level, 0 for that of the smallest leaves, at any time. As
    /// the hook may run concurrently with itself, it asks under the lock under which it programs
    /// hardware, so that a newer root is never replaced by an older one. Its caller promises that
    /// this is the domain's own root, whose tables stay while hardware walks them.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where hardware does not take it, which is what a driver without this hook
    /// says; the mapping is taken back.
    fn root_changed(
        &self,
        _promise: Promise<'_>,
        _current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        Err(HardwareError { what: "this driver cannot change the root of its tables", status: 0 })
    }

    /// Takes the domain's tables away from hardware for good, and waits until it has let go.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where that was not seen in bounded time; the tables are never freed.
    #[track_caller]
    fn detach(&self) -> Result<(), HardwareError>;

    /// Is told what the domain does; nothing depends on it. For tools that watch, as the sanitizer
    /// of `dmaspan-sim` does: a driver leaves it out, and then it costs nothing.
    ///
    /// # Context
    ///
    /// As [`invalidate`](Self::invalidate).
    #[inline(always)]
    #[track_caller]
    fn observe(&self, _event: &Event<'_>) {}

    /// Returns how many ranges are worth naming. With more, and with more than
    /// [`Gather::MAX_RANGES`](super::Gather::MAX_RANGES), [`Scope::All`] is asked for.
    fn max_ranges(&self) -> usize;
}

/// Hooks that are those of a driver, or of a wrapper around them: what a driver's streams ask of a
/// domain that they are attached to, so that tools can stand between domain and driver.
///
/// # Safety
///
/// [`driver`](Self::driver) is always the same value, and whatever the domain asks of these hooks,
/// that value was asked before they answer, and they answer as it did: hardware is programmed by
/// what it says of itself.
#[expect(unsafe_code, reason = "a contract about what hardware is told; nothing here is unsafe")]
pub unsafe trait DriverOps: IommuOps {
    /// The driver's own type.
    type Driver: IommuOps<Address = Self::Address>;

    /// The driver's own hooks.
    fn driver(&self) -> &Self::Driver;
}
