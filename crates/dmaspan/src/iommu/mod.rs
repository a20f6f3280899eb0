//! Domains: page tables that devices use, and what must happen before anything of them is released.
//!
//! The order is *unmap, sync, release*, and it is in the types: a page table gives what was taken
//! away as [`Retired`](crate::io_pgtable::Retired), a [`Gather`] collects any number of those,
//! [`Domain::sync`] makes hardware forget them and gives a [`Synced`], and only against that are
//! pins and IOVAs released. Detached tables are freed by the sync itself.

mod attach;
mod direct;
mod domain;
mod fault;
pub mod flush_queue;
mod gather;
pub mod iova;
mod ops;
mod reserved;
mod rewrite;

pub use attach::{
    AllMemory, AttachError, AttachedTo, Attachment, Incompatible, NotBlocked, PagingDomain, Port,
    Prepared, Target,
};
pub use direct::{DirectError, DirectFailed};
pub use domain::{Domain, Error, MapFailed, Unsynced};
pub use fault::{
    FaultAccess, FaultHandler, FaultHook, FaultReason, FaultReport, FaultResponse, FaultState,
};
pub use gather::{Gather, SyncFailed, Synced};
pub use ops::{HardwareError, Invalidation, IommuOps, Scope, Tables};
pub use reserved::{RegionError, RegionKind, Relaxable, ReservedRegion, ReservedRegions};
