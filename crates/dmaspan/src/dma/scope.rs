//! A buffer is mapped here while a closure runs, and unmapped at its end.

use core::fmt;

use super::attrs::Attrs;
use super::bounce::BouncePool;
use super::device::Device;
use super::domain::{Flush, Translation};
use super::error::Error;
use super::memory::DmaMemory as _;
use super::single::{Mapping, Refused, UnmapFailed, Unmapped};
use crate::prot::Direction;
use crate::swiotlb::Fill;

/// A buffer was not mapped for a closure, or hardware did not forget it behind the closure.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct ScopeFailed<H, R> {
    /// The reason.
    pub error: Error,
    /// What was to be mapped; `None` where it is in quarantine.
    pub memory: Option<H>,
    /// What the closure returned; `None` where it did not run.
    pub result: Option<R>,
}

impl<H, R> From<ScopeFailed<H, R>> for Error {
    /// The reason alone. The memory, which no device reaches, and the result are dropped.
    #[cold]
    fn from(failed: ScopeFailed<H, R>) -> Self {
        failed.error
    }
}

impl<H, R> fmt::Debug for ScopeFailed<H, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (memory, result) = (self.memory.is_some(), self.result.is_some());
        f.debug_struct("ScopeFailed")
            .field("error", &self.error)
            .field("has_memory", &memory)
            .field("has_result", &result)
            .finish()
    }
}

/// Unmaps where a closure does not return.
struct Scope<'a, T: Translation, B: BouncePool> {
    device: &'a Device<T, B>,
    mapping: Option<Mapping<T, B>>,
}

impl<T: Translation, B: BouncePool> Drop for Scope<'_, T, B> {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping.take() {
            // Where that fails the memory is in quarantine.
            drop(self.device.unmap(mapping));
        }
    }
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Maps memory while `run` runs, and gives it back. The unmap is strict: no device reaches the
    /// memory afterwards. It is unmapped, and dropped, also where `run` panics.
    ///
    /// # Errors
    ///
    /// [`ScopeFailed`]: what [`map_single_with`](Self::map_single_with) refuses, before `run`, and
    /// [`Error::Unreported`] for what the device [overwrites](Fill::Overwritten), since nobody says
    /// here how much it wrote; or [`Error::Quarantined`] behind it.
    ///
    /// # Context
    ///
    /// As [`map_single_with`](Self::map_single_with), and waits for hardware at the end.
    #[track_caller]
    pub fn with_mapped<R>(
        &self,
        memory: T::Memory,
        direction: Direction,
        attrs: Attrs,
        run: impl FnOnce(&Mapping<T, B>) -> R,
    ) -> Result<(T::Memory, R), ScopeFailed<T::Memory, R>> {
        if attrs.fill == Fill::Overwritten {
            let bytes = memory.pieces().iter().map(|piece| piece.span.len());
            let error = Error::Unreported { len: bytes.fold(0, u64::saturating_add) };
            return Err(ScopeFailed { error, memory: Some(memory), result: None });
        }
        let attrs = Attrs { flush: Some(Flush::Strict), ..attrs };
        let mapping = self
            .map_single_with(memory, direction, attrs)
            .map_err(|Refused { error, memory }| ScopeFailed { error, memory, result: None })?;
        let addr = mapping.addr();
        let mut scope = Scope { device: self, mapping: Some(mapping) };
        let result = scope.mapping.as_ref().map(run);
        #[expect(clippy::manual_map, reason = "a closure would be the caller that is named")]
        let unmapped = match scope.mapping.take() {
            Some(mapping) => Some(self.unmap(mapping)),
            None => None,
        };
        match (unmapped, result) {
            (Some(Ok(Unmapped::Released(memory))), Some(result)) => Ok((memory, result)),
            (Some(Err(UnmapFailed { error, .. })), result) => {
                Err(ScopeFailed { error, memory: None, result })
            }
            // Never: the mapping was there, and a strict unmap releases.
            (_, result) => {
                Err(ScopeFailed { error: Error::NotMapped { addr }, memory: None, result })
            }
        }
    }
}
