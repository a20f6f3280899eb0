//! [`Attrs`] are what a driver asks of a single mapping beyond its direction.

use super::domain::Flush;
use crate::swiotlb::Fill;

/// Says whether the CPU's caches, and the slot of a bounced buffer, follow a map and an unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum CpuSync {
    /// They do: the device sees what the CPU wrote before the map, and the CPU what the device
    /// wrote before the unmap.
    #[default]
    Sync,
    /// The driver says by [`sync_for_device`](super::Device::sync_for_device) and
    /// [`sync_for_cpu`](super::Device::sync_for_cpu) what is to be seen, and when
    /// (`DMA_ATTR_SKIP_CPU_SYNC`). A slot is filled by the map all the same, so that a device never
    /// reads what was in it before; the unmap copies nothing.
    Skip,
}

/// Says which accesses of a device are permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Privilege {
    /// All.
    #[default]
    Any,
    /// Only privileged ones, where the format of the tables tells them apart
    /// (`DMA_ATTR_PRIVILEGED`).
    Privileged,
}

/// Says how a buffer is mapped. By default it is mapped as its domain says, synced, for all
/// accesses.
///
/// ```
/// use dmaspan::dma::{Attrs, CpuSync, Flush};
///
/// let attrs = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
/// assert_eq!(attrs.sync, CpuSync::Sync);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Attrs {
    /// When hardware is told about the unmap; `None` for what the domain does. The unmap of what is
    /// bounced, and that of an untrusted device, is strict whatever is said here.
    pub flush: Option<Flush>,
    /// Whether map and unmap sync the buffer.
    pub sync: CpuSync,
    /// Which accesses are permitted.
    pub privilege: Privilege,
    /// Whether slots are filled by the map. They need not be where the device
    /// [overwrites](Fill::Overwritten) what is mapped: it only writes, and how many bytes it wrote
    /// is said by [`unmap_written`](super::Device::unmap_written), which ends every such mapping,
    /// bounced or not. Nothing else of a slot reaches the buffer. The slots of a device that is
    /// [not trusted](super::Trust::Untrusted) are filled all the same: it may say that it wrote
    /// more than it did, and read what it is only to write.
    pub fill: Fill,
}
