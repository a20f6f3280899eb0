//! [`PoolConfig`] says what a pool is to be like.

use super::error::Error;

/// How many areas a chunk can have at most: as many locks are held at once for a run that is as
/// long as the chunk.
pub const MAX_AREAS: usize = 128;

/// Says whether what was in a slot is overwritten when it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Wipe {
    /// No: a reader of the pool's memory could read it while the slot was held, too. Nothing of it
    /// shows in the next holder's slot.
    #[default]
    Never,
    /// With zeros, so that secrets live no longer than their transfer, and that nothing of them
    /// reaches an original if a device says that it [overwrote](super::Fill::Overwritten) more than
    /// it did. It costs a write of every byte.
    Release,
}

/// Says how a pool gets larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// How many bytes [`Pool::grow`](super::Pool::grow) adds, rounded up to whole slots.
    pub step: u64,
    /// How many bytes there may be beyond those that the pool began with, memory for single
    /// requests included.
    pub limit: u64,
    /// The last address of what [`Pool::grow`](super::Pool::grow) adds: that of the device which
    /// reaches least. Memory for a single request is where its device reaches it.
    pub last: u64,
}

impl Growth {
    /// Growth by `step` up to `limit` bytes, anywhere.
    pub const fn new(step: u64, limit: u64) -> Self {
        Self { step, limit, last: u64::MAX }
    }
}

/// Says what a pool is to be like, for [`Pool`](super::Pool).
///
/// ```
/// use dmaspan::swiotlb::PoolConfig;
///
/// // Slots of 4 KiB and four areas.
/// let config = PoolConfig { slot_bytes: 4096, ..PoolConfig::new(4) };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// How large a slot is, the smallest piece that is given out: a power of two, 2048 by default
    /// (`IO_TLB_SIZE`).
    pub slot_bytes: u64,
    /// In how many areas each span of memory is divided, with a lock each: as many as CPUs use the
    /// pool at a time, up to [`MAX_AREAS`]. More are as many as that, 0 is 1.
    pub areas: usize,
    /// Whether slots are wiped.
    pub wipe: Wipe,
    /// Whether the pool grows.
    pub growth: Option<Growth>,
}

impl PoolConfig {
    /// Slots of 2 KiB, so many areas, nothing wiped, no growth.
    pub const fn new(areas: usize) -> Self {
        Self { slot_bytes: 2048, areas, wipe: Wipe::Never, growth: None }
    }

    /// log2 of the size of a slot.
    pub(super) fn slot_lg2(&self) -> Result<u32, Error> {
        let bytes = self.slot_bytes;
        if bytes.is_power_of_two() && (1 << 6..=1 << 30).contains(&bytes) {
            return Ok(bytes.ilog2());
        }
        Err(Error::SlotSize { bytes })
    }
}
