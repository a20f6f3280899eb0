//! A device, and what it can reach.

use alloc::sync::Arc;
use core::fmt;

use super::bounce::{BouncePool, NoPool};
use super::domain::{Flush, Translation};
use super::error::Error;
use crate::platform::{Id, Identity};
use crate::prot::Coherency;

/// What a device can address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The last address that the device and its bus can use: 2^bits - 1 (`dma_mask`).
    pub last: u64,
    /// Low bits of addresses that a device needs unchanged (`min_align_mask`).
    pub keep_bits: u64,
    /// No segment of a list crosses a multiple of this power of two (`seg_boundary_mask` + 1);
    /// `None` where that does not matter.
    pub boundary: Option<u64>,
    /// The longest segment of a list, in bytes (`max_seg_size`).
    pub max_segment: u64,
}

impl DeviceLimits {
    /// A device with addresses of so many bits, and Linux's defaults: segments of up to 64 KiB that
    /// do not cross 4 GiB.
    pub const fn bits(bits: u32) -> Self {
        let last = crate::lg2::mask(bits);
        Self { last, keep_bits: 0, boundary: Some(1 << 32), max_segment: 1 << 16 }
    }
}

/// Whether a device is known not to look at what it was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trust {
    /// It may see the rest of the granules that its buffers lie in.
    Trusted,
    /// It sees nothing but its buffers: what shares a granule with others is bounced, and no unmap
    /// is lazy.
    Untrusted,
}

/// What a device is like, for [`Device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// What it can address.
    pub limits: DeviceLimits,
    /// Whether it may see more than it was given.
    pub trust: Trust,
    /// Whether its accesses see the CPU's caches.
    pub coherency: Coherency,
}

impl DeviceConfig {
    /// A trusted, coherent device with addresses of so many bits.
    pub const fn bits(bits: u32) -> Self {
        Self {
            limits: DeviceLimits::bits(bits),
            trust: Trust::Trusted,
            coherency: Coherency::Coherent,
        }
    }
}

/// A device that memory is mapped for.
///
/// `T` is what translates its addresses, and `B` where memory is bounced that it cannot use.
pub struct Device<T: Translation, B: BouncePool = NoPool> {
    pub(super) translation: Arc<T>,
    pub(super) pool: B,
    pub(super) config: DeviceConfig,
    identity: Identity,
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// A device whose addresses `translation` translates.
    ///
    /// # Errors
    ///
    /// [`Error::Mask`] where it reaches no IOVA, and [`Error::Limit`] for limits that cannot be
    /// kept.
    pub fn new(translation: Arc<T>, pool: B, config: DeviceConfig) -> Result<Self, Error> {
        let DeviceLimits { last, keep_bits, boundary, max_segment } = config.limits;
        let granule = crate::lg2::size(translation.granule_lg2());
        let lowest = translation.aperture().start().get();
        if last < lowest.saturating_add(granule - 1) {
            return Err(Error::Mask { last, lowest });
        }
        if keep_bits > granule - 1 {
            let limit = granule - 1;
            return Err(Error::Limit { what: "alignment bits", value: keep_bits, limit });
        }
        if let Some(boundary) = boundary.filter(|b| !b.is_power_of_two() || *b < granule) {
            return Err(Error::Limit { what: "a boundary", value: boundary, limit: granule });
        }
        if max_segment < granule {
            let value = max_segment;
            return Err(Error::Limit { what: "segments", value, limit: granule });
        }
        Ok(Self { translation, pool, config, identity: Identity::new() })
    }

    /// What it is like.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// What tells it from others.
    pub(super) fn id(&self) -> Id {
        self.identity.id()
    }

    /// How an unmap is flushed that does not say.
    pub(super) fn flush(&self) -> Flush {
        match self.config.trust {
            Trust::Trusted => self.translation.flush_mode(),
            Trust::Untrusted => Flush::Strict,
        }
    }
}

impl<T: Translation, B: BouncePool> Drop for Device<T, B> {
    fn drop(&mut self) {
        // Mappings that are still out must never fit another device.
        self.identity.keep();
    }
}

impl<T: Translation, B: BouncePool> fmt::Debug for Device<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("config", &self.config).finish_non_exhaustive()
    }
}
