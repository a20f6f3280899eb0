//! A device's way to its translation, and the place of its [raw](super::raw) mappings: direct where
//! the type of the translation is known, and by one indirect call for a whole map or unmap where it
//! is not.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::panic::Location;

use super::any::{AnyMemory, AnyTranslation};
use super::attrs::Attrs;
use super::bounce::BouncePool;
use super::device::{Device, Place};
use super::domain::translation::{Known, Sealed};
use super::error::Error;
use super::single::{Mapping, Refused, UnmapFailed, Unmapped};
use crate::prot::Direction;
use crate::sharded_map::ShardedMap;

/// In how many parts, with a lock each, a device keeps what was turned into addresses.
const PARTS: usize = 16;

type Mapped<T, B> = Result<Mapping<T, B>, Refused<<T as Sealed>::Memory>>;
type Ended<T, B> = Result<Unmapped<<T as Sealed>::Memory>, UnmapFailed<T, B>>;

/// How a device with a translation and a pool reaches them.
pub trait Reach<T: Sealed, B: BouncePool>: Send + Sync + Sized {
    /// `false` where it is known that nothing is translated.
    const MAY_TRANSLATE: bool = true;

    /// Maps memory of one piece, by default attributes: most maps, which look at none.
    #[track_caller]
    fn map(device: &Device<T, B>, memory: T::Memory, direction: Direction) -> Mapped<T, B>;

    /// Maps memory of one piece.
    #[track_caller]
    fn map_with(
        device: &Device<T, B>,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> Mapped<T, B>;

    /// Ends a mapping of this device, of which so many bytes are to be seen by the CPU.
    #[track_caller]
    fn end(device: &Device<T, B>, mapping: &mut Mapping<T, B>, written: u64) -> Ended<T, B>;

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
    const MAY_TRANSLATE: bool = T::TRANSLATES;

    #[inline(always)]
    #[track_caller]
    fn map(device: &Device<T, B>, memory: T::Memory, direction: Direction) -> Mapped<T, B> {
        Self::map_with(device, memory, direction, Attrs::default())
    }

    #[inline(always)]
    #[track_caller]
    fn map_with(
        device: &Device<T, B>,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
    ) -> Mapped<T, B> {
        device.map_by(&*device.translation, memory, direction, attrs, Location::caller())
    }

    #[inline(always)]
    #[track_caller]
    fn end(device: &Device<T, B>, mapping: &mut Mapping<T, B>, written: u64) -> Ended<T, B> {
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
    fn map(
        &self,
        device: &Device<AnyTranslation, B>,
        memory: AnyMemory,
        direction: Direction,
        place: Place,
    ) -> Mapped<AnyTranslation, B>;

    fn map_with(
        &self,
        device: &Device<AnyTranslation, B>,
        memory: AnyMemory,
        direction: Direction,
        attrs: Attrs,
        place: Place,
    ) -> Mapped<AnyTranslation, B>;

    fn end(
        &self,
        device: &Device<AnyTranslation, B>,
        mapping: &mut AnyMapping<B>,
        written: u64,
        place: Place,
    ) -> Ended<AnyTranslation, B>;

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
    fn map(
        &self,
        device: &Device<AnyTranslation, B>,
        memory: AnyMemory,
        direction: Direction,
        place: Place,
    ) -> Mapped<AnyTranslation, B> {
        device.map_by(&*self.translation, memory, direction, Attrs::default(), place)
    }

    fn map_with(
        &self,
        device: &Device<AnyTranslation, B>,
        memory: AnyMemory,
        direction: Direction,
        attrs: Attrs,
        place: Place,
    ) -> Mapped<AnyTranslation, B> {
        device.map_by(&*self.translation, memory, direction, attrs, place)
    }

    fn end(
        &self,
        device: &Device<AnyTranslation, B>,
        mapping: &mut AnyMapping<B>,
        written: u64,
        place: Place,
    ) -> Ended<AnyTranslation, B> {
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
    fn map(
        device: &Device<AnyTranslation, B>,
        memory: AnyMemory,
        direction: Direction,
    ) -> Mapped<AnyTranslation, B> {
        device.reach.0.map(device, memory, direction, Location::caller())
    }

    #[inline(always)]
    #[track_caller]
    fn map_with(
        device: &Device<AnyTranslation, B>,
        memory: AnyMemory,
        direction: Direction,
        attrs: Attrs,
    ) -> Mapped<AnyTranslation, B> {
        device.reach.0.map_with(device, memory, direction, attrs, Location::caller())
    }

    #[inline(always)]
    #[track_caller]
    fn end(
        device: &Device<AnyTranslation, B>,
        mapping: &mut AnyMapping<B>,
        written: u64,
    ) -> Ended<AnyTranslation, B> {
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
