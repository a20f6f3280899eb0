//! How a device reaches its translation, and where it keeps [raw](super::raw) mappings: directly
//! where the type of the translation is known, and by one indirect call for a whole map or unmap
//! where it is not.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::panic::Location;

use super::any::{AnyMemory, AnyTranslation};
use super::bounce::BouncePool;
use super::device::{Device, DeviceConfig, Place};
use super::domain::translation::{Known, PlaceFailed, Sealed};
use super::error::Error;
use super::single::{Mapping, Unmapped};
use crate::addr::DmaAddr;
use crate::iommu::iova::Iovas;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::sharded_map::ShardedMap;
use crate::span::Span;

/// In how many parts, with a lock each, a device keeps what was turned into addresses.
const PARTS: usize = 16;

type Placed = Result<(Iovas, DmaAddr), PlaceFailed>;
type Ended<T> = Result<Unmapped<<T as Sealed>::Memory>, Error>;

/// How a device with a translation and a pool reaches them.
pub trait Reach<T: Sealed, B: BouncePool>: Send + Sync + Sized {
    /// Maps the granules of a span: see [`Sealed::place`].
    #[track_caller]
    fn place(device: &Device<T, B>, span: Span, prot: Prot) -> Placed;

    /// Ends a mapping of this device, of which so many bytes are to be seen by the CPU.
    #[track_caller]
    fn end(device: &Device<T, B>, mapping: &mut Mapping<T, B>, written: u64) -> Ended<T>;

    /// Keeps a mapping by its address, if there is memory. Where nothing is translated, several can
    /// have one address.
    fn insert(&self, key: u64, mapping: Mapping<T, B>) -> Result<(), Mapping<T, B>>;

    /// Takes out what `check` agrees to: see [`ShardedMap::remove_if`].
    fn remove_if(
        &self,
        key: u64,
        check: impl Fn(&Mapping<T, B>) -> Result<(), Error>,
    ) -> Option<Result<Mapping<T, B>, Error>>;

    /// Looks at what `check` agrees to, which stays meanwhile.
    fn look_if<R>(
        &self,
        key: u64,
        check: impl Fn(&Mapping<T, B>) -> Result<(), Error>,
        look: impl FnOnce(&Mapping<T, B>) -> R,
    ) -> Option<Result<R, Error>>;
}

/// What a device keeps whose translation has a known type.
pub struct Typed<T: Known, B: BouncePool>(ShardedMap<T::Platform, Mapping<T, B>>);

impl<T: Known, B: BouncePool> Typed<T, B> {
    /// Nothing yet; `None` where there is no memory.
    pub(super) fn new() -> Option<Self> {
        ShardedMap::new(PARTS).map(Self)
    }
}

impl<T: Known<Reach<B> = Self>, B: BouncePool> Reach<T, B> for Typed<T, B> {
    #[inline(always)]
    #[track_caller]
    fn place(device: &Device<T, B>, span: Span, prot: Prot) -> Placed {
        let (translation, config) = (&device.translation, &device.config);
        translation.place(Promise::kept(), config, span, prot, Location::caller())
    }

    #[inline(always)]
    #[track_caller]
    fn end(device: &Device<T, B>, mapping: &mut Mapping<T, B>, written: u64) -> Ended<T> {
        device.end_by(&*device.translation, mapping, written, Location::caller())
    }

    fn insert(&self, key: u64, mapping: Mapping<T, B>) -> Result<(), Mapping<T, B>> {
        self.0.insert(key, mapping)
    }

    fn remove_if(
        &self,
        key: u64,
        check: impl Fn(&Mapping<T, B>) -> Result<(), Error>,
    ) -> Option<Result<Mapping<T, B>, Error>> {
        self.0.remove_if(key, check)
    }

    fn look_if<R>(
        &self,
        key: u64,
        check: impl Fn(&Mapping<T, B>) -> Result<(), Error>,
        look: impl FnOnce(&Mapping<T, B>) -> R,
    ) -> Option<Result<R, Error>> {
        self.0.look_if(key, check, look)
    }
}

impl<T: Known, B: BouncePool> fmt::Debug for Typed<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Typed").finish_non_exhaustive()
    }
}

type AnyMapping<B> = Mapping<AnyTranslation, B>;

/// A translation as a device reaches it that does not know its type.
trait Erased<B: BouncePool>: Send + Sync {
    fn place(&self, config: &DeviceConfig, span: Span, prot: Prot, caller: Place) -> Placed;

    fn end(
        &self,
        device: &Device<AnyTranslation, B>,
        mapping: &mut AnyMapping<B>,
        written: u64,
        place: Place,
    ) -> Ended<AnyTranslation>;

    fn insert(&self, key: u64, mapping: AnyMapping<B>) -> Result<(), AnyMapping<B>>;

    fn remove_if(
        &self,
        key: u64,
        check: &dyn Fn(&AnyMapping<B>) -> Result<(), Error>,
    ) -> Option<Result<AnyMapping<B>, Error>>;

    fn look_if(
        &self,
        key: u64,
        check: &dyn Fn(&AnyMapping<B>) -> Result<(), Error>,
        look: &mut dyn FnMut(&AnyMapping<B>),
    ) -> Option<Result<(), Error>>;
}

/// What is behind [`Erased`].
struct Concrete<D: Known, B: BouncePool> {
    translation: Arc<D>,
    raw: ShardedMap<D::Platform, AnyMapping<B>>,
}

impl<D: Known<Memory = AnyMemory>, B: BouncePool> Erased<B> for Concrete<D, B> {
    fn place(&self, config: &DeviceConfig, span: Span, prot: Prot, caller: Place) -> Placed {
        self.translation.place(Promise::kept(), config, span, prot, caller)
    }

    fn end(
        &self,
        device: &Device<AnyTranslation, B>,
        mapping: &mut AnyMapping<B>,
        written: u64,
        place: Place,
    ) -> Ended<AnyTranslation> {
        device.end_by(&*self.translation, mapping, written, place)
    }

    fn insert(&self, key: u64, mapping: AnyMapping<B>) -> Result<(), AnyMapping<B>> {
        self.raw.insert(key, mapping)
    }

    fn remove_if(
        &self,
        key: u64,
        check: &dyn Fn(&AnyMapping<B>) -> Result<(), Error>,
    ) -> Option<Result<AnyMapping<B>, Error>> {
        self.raw.remove_if(key, check)
    }

    fn look_if(
        &self,
        key: u64,
        check: &dyn Fn(&AnyMapping<B>) -> Result<(), Error>,
        look: &mut dyn FnMut(&AnyMapping<B>),
    ) -> Option<Result<(), Error>> {
        self.raw.look_if(key, check, look)
    }
}

/// What a device keeps that does not know the type of its translation.
pub struct Indirect<B: BouncePool>(Box<dyn Erased<B>>);

impl<B: BouncePool + 'static> Indirect<B> {
    /// To be reached by a translation; `None` where there is no memory.
    pub(super) fn new<D: Known<Memory = AnyMemory> + 'static>(translation: Arc<D>) -> Option<Self> {
        let raw = ShardedMap::new(PARTS)?;
        Some(Self(Box::new(Concrete { translation, raw })))
    }
}

impl<B: BouncePool> Reach<AnyTranslation, B> for Indirect<B> {
    #[inline(always)]
    #[track_caller]
    fn place(device: &Device<AnyTranslation, B>, span: Span, prot: Prot) -> Placed {
        device.reach.0.place(&device.config, span, prot, Location::caller())
    }

    #[inline(always)]
    #[track_caller]
    fn end(
        device: &Device<AnyTranslation, B>,
        mapping: &mut AnyMapping<B>,
        written: u64,
    ) -> Ended<AnyTranslation> {
        device.reach.0.end(device, mapping, written, Location::caller())
    }

    fn insert(&self, key: u64, mapping: AnyMapping<B>) -> Result<(), AnyMapping<B>> {
        self.0.insert(key, mapping)
    }

    fn remove_if(
        &self,
        key: u64,
        check: impl Fn(&AnyMapping<B>) -> Result<(), Error>,
    ) -> Option<Result<AnyMapping<B>, Error>> {
        self.0.remove_if(key, &check)
    }

    fn look_if<R>(
        &self,
        key: u64,
        check: impl Fn(&AnyMapping<B>) -> Result<(), Error>,
        look: impl FnOnce(&AnyMapping<B>) -> R,
    ) -> Option<Result<R, Error>> {
        let (mut look, mut seen) = (Some(look), None);
        let looked = self.0.look_if(key, &check, &mut |mapping| {
            seen = look.take().map(|look| look(mapping));
        })?;
        looked.map(|()| seen).transpose()
    }
}

impl<B: BouncePool> fmt::Debug for Indirect<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Indirect").finish_non_exhaustive()
    }
}
