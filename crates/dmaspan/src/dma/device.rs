//! [`Device`] is what drivers call: it knows the limits of a device, and what it can reach.

use alloc::sync::Arc;
use core::fmt;
use core::panic::Location;

use super::any::AnyTranslation;
use super::bounce::{Bounce, BouncePool};
use super::coherent::Coherents;
use super::domain::translation::{Known, Sealed};
use super::domain::{Flush, Translation};
use super::error::Error;
use super::reach::Typed;
use crate::addr::Iova;
use crate::iommu::Event;
use crate::label::{Caller, Label};
use crate::lg2;
use crate::platform::{Id, Identity};
use crate::prot::Coherency;
use crate::range::IovaRange;

/// Says what a device can address.
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
        let last = lg2::mask(bits);
        Self { last, keep_bits: 0, boundary: Some(1 << 32), max_segment: 1 << 16 }
    }
}

/// Says whether a device is known to leave alone what it was not given, and to report the truth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trust {
    /// It may see the rest of the granules that its buffers lie in, and what was in slots that it
    /// is to overwrite.
    Trusted,
    /// It sees nothing but its buffers: granules at their ends that they share with others are
    /// bounced, and no unmap is lazy. That takes a translation: where there is none it sees all
    /// memory. Slots are [filled](super::Attrs::fill) whatever is asked for, with a translation and
    /// without.
    Untrusted,
}

/// Says what a device is like, for [`Device`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// What it can address, and what segments it takes.
    pub limits: DeviceLimits,
    /// Whether it may see more than it was given, and is believed.
    pub trust: Trust,
    /// Whether its accesses see the CPU's caches.
    pub coherency: Coherency,
    /// When its buffers are bounced.
    pub bounce: Bounce,
    /// How observers of its domain and logs name it; nothing else depends on it.
    pub name: Option<&'static str>,
}

impl DeviceConfig {
    /// A trusted, coherent device with addresses of so many bits, bounced as needed.
    pub const fn bits(bits: u32) -> Self {
        Self {
            limits: DeviceLimits::bits(bits),
            trust: Trust::Trusted,
            coherency: Coherency::Coherent,
            bounce: Bounce::AsNeeded,
            name: None,
        }
    }

    /// The same device, with a name for [observers](crate::iommu::Observer) and logs.
    #[must_use]
    pub const fn named(self, name: &'static str) -> Self {
        Self { name: Some(name), ..self }
    }
}

/// Where a caller is. An indirect call hands it on, since `#[track_caller]` does not.
pub(super) type Place = &'static Location<'static>;

/// What memory a device is let at that is within its reach, as its configuration and its
/// translation say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    /// Any.
    Free,
    /// Whole granules.
    Granules,
    /// The pool's.
    Pool,
}

/// A device that memory is mapped for.
///
/// `T` is what translates its addresses, and `B` where memory is bounced that it cannot use. Plain
/// `Device` is one where both are of [any type](Self::erased), as is the memory that it maps; plain
/// [`Mapping`](super::Mapping)s and the like are its. Any number of threads share a device; its
/// mappings can be ended by another thread than made them.
///
/// Dropped, it leaves its mappings as they are; they can never be ended.
pub struct Device<T: Translation = AnyTranslation, B: BouncePool = <T as Sealed>::Pool> {
    pub(super) translation: Arc<T>,
    pub(super) pool: B,
    pub(super) config: DeviceConfig,
    pub(super) policy: Policy,
    /// How it comes to its translation, with the mappings that it keeps itself.
    pub(super) reach: T::Reach<B>,
    pub(super) coherents: Coherents,
    identity: Identity,
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// A device whose addresses `translation` translates, or lets through.
    ///
    /// # Errors
    ///
    /// [`Error::Mask`] where it reaches no IOVA, or neither memory nor a slot of the pool where
    /// nothing is translated, or no slot where all is bounced; [`Error::NoPool`] where all is
    /// bounced and there are no slots at all; [`Error::Limit`] for limits that cannot be kept;
    /// [`Error::NoRecords`] where there is no memory.
    pub fn new(translation: Arc<T>, pool: B, config: DeviceConfig) -> Result<Self, Error>
    where
        T: Known<Reach<B> = Typed<T, B>>,
    {
        let reach = Typed::new().ok_or(Error::NoRecords)?;
        Self::reaching(translation, reach, pool, config)
    }

    /// [`new`](Self::new), which reaches its translation so.
    pub(super) fn reaching(
        translation: Arc<T>,
        reach: T::Reach<B>,
        pool: B,
        config: DeviceConfig,
    ) -> Result<Self, Error> {
        let DeviceLimits { last, keep_bits, boundary, max_segment } = config.limits;
        let granule = lg2::size(translation.granule_lg2());
        let lowest = translation.aperture().start().get();
        let is_direct = translation.direct_memory().is_some();
        let slots = pool.reach().filter(|_| is_direct).map(|slots| slots.paddr().get());
        let reached = match (slots, config.bounce) {
            (Some(slots), Bounce::Always) => slots,
            (Some(slots), Bounce::AsNeeded) => slots.min(lowest),
            (None, _) => lowest,
        };
        if config.bounce == Bounce::Always && pool.reach().is_none() {
            return Err(Error::NoPool);
        }
        if last < reached.saturating_add(granule - 1) {
            return Err(Error::Mask { last, lowest: reached });
        }
        if keep_bits & keep_bits.wrapping_add(1) != 0 {
            let limit = lg2::mask(keep_bits.ilog2());
            return Err(Error::Limit { what: "alignment bits", value: keep_bits, limit });
        }
        // Low bits of an address are the same behind a translation, up to those of its granule.
        if keep_bits > granule - 1 && !is_direct {
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
        let policy = match (config.bounce, config.trust) {
            (Bounce::Always, _) => Policy::Pool,
            (Bounce::AsNeeded, Trust::Untrusted) if !is_direct => Policy::Granules,
            (Bounce::AsNeeded, _) => Policy::Free,
        };
        let (coherents, identity) = (Coherents::default(), Identity::new());
        Ok(Self { translation, pool, config, policy, reach, coherents, identity })
    }

    /// Returns what translates its addresses: for a timer that flushes, say, or for another device.
    pub fn translation(&self) -> &Arc<T> {
        &self.translation
    }

    /// Returns what it is like.
    pub fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Returns how many bytes can be mapped at once whatever memory they are
    /// (`dma_max_mapping_size`): what a slot can have where any of it may be bounced whole, and
    /// otherwise what the device can address. 0 where some memory cannot be mapped at all.
    ///
    /// Where only ends are bounced, a longer buffer than that has a slot for each end.
    pub fn max_mapping_len(&self) -> u64 {
        let DeviceLimits { last, keep_bits, .. } = self.config.limits;
        let aperture = self.translation.aperture();
        let reached = last.min(aperture.last().get());
        let all = reached.saturating_sub(aperture.start().get()).saturating_add(1);
        let slot = || self.pool.max_len(&self.slot_request(keep_bits));
        match (self.policy, self.translation.direct_memory()) {
            (Policy::Free, None) => all,
            (Policy::Free, Some(memory)) if memory.last().get() <= last => all,
            (_, Some(_)) => slot(),
            (Policy::Pool, None) => slot().min(all),
            (Policy::Granules, None) => {
                let granule = lg2::size(self.translation.granule_lg2());
                // The longest without a whole granule lies in two, whatever bits are kept.
                let in_two = self.pool.max_len(&self.slot_request(0)) >= 2 * (granule - 1);
                let longest = if in_two { all } else { slot() };
                // The shortest with two ends has a granule between them.
                match self.pool.granules(granule) {
                    0 | 1 => longest.min(granule + 1),
                    _ => longest,
                }
            }
        }
    }

    /// Returns where the ends of a list's pieces have to lie for them to become one segment: at
    /// multiples of so many bytes. `None` where no pieces become one (`dma_get_merge_boundary` +
    /// 1).
    pub fn merge_boundary(&self) -> Option<u64> {
        (!self.is_direct()).then(|| lg2::size(self.translation.granule_lg2()))
    }

    /// Whether nothing is translated.
    #[inline(always)]
    pub(super) fn is_direct(&self) -> bool {
        self.translation.direct_memory().is_some()
    }

    /// The device's name, and the place in its driver that called the function which calls this.
    #[inline(always)]
    #[track_caller]
    pub(super) fn caller(&self) -> Caller {
        self.caller_at(Location::caller())
    }

    #[inline(always)]
    pub(super) fn caller_at(&self, place: Place) -> Caller {
        Caller { device: self.config.name, label: Label::Place(place) }
    }

    /// Says that `len` bytes from `iova` on are a buffer's, of the granules that are mapped there
    /// next.
    #[inline(always)]
    pub(super) fn observe_bytes(&self, iova: Iova, len: u64) {
        if let Ok(range) = IovaRange::from_len(iova, len) {
            let granule_lg2 = self.translation.granule_lg2();
            self.translation.observe(&Event::Bytes { range, granule_lg2 });
        }
    }

    /// What tells it from others.
    #[inline(always)]
    pub(super) fn id(&self) -> Id {
        self.identity.id()
    }

    /// How an unmap is flushed of what is not bounced.
    #[inline(always)]
    pub(super) fn flush_as(&self, wish: Option<Flush>) -> Flush {
        self.flush_by(&*self.translation, wish)
    }

    /// The same, by the device's translation, whatever is known of its type.
    #[inline(always)]
    pub(super) fn flush_by<D: Sealed>(&self, translation: &D, wish: Option<Flush>) -> Flush {
        match self.config.trust {
            Trust::Trusted => wish.unwrap_or_else(|| translation.flush_mode()),
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
