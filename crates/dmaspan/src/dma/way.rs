//! A device's way to a piece: translated, by its own address, or by way of slots.

use super::bounce::BouncePool;
use super::device::{Device, Policy, Trust};
use super::domain::Translation;
use super::domain::translation::Sealed;
use super::error::Error;
use super::memory::{Piece, Via};
use crate::lg2;
use crate::span::Span;

/// How a device comes to a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Through translations.
    Translated,
    /// By the piece's own address.
    Straight,
    /// By way of slots, all of it or its ends, translated or not.
    Bounced,
}

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Which way a device comes to a piece.
    #[inline(always)]
    pub(super) fn way(&self, piece: Piece) -> Result<Way, Error> {
        self.way_by(&*self.translation, piece)
    }

    /// The same, by the device's translation, whatever is known of its type.
    #[inline(always)]
    pub(super) fn way_by<D: Sealed>(&self, translation: &D, piece: Piece) -> Result<Way, Error> {
        let Piece { span, via } = piece;
        // Most pieces of most devices.
        if self.policy == Policy::Free {
            if translation.direct_memory().is_some() {
                if span.last().get() <= self.config.limits.last {
                    return Ok(Way::Straight);
                }
            } else if via != Via::Bus {
                return Ok(Way::Translated);
            }
        }
        self.other_way(span, via)
    }

    /// Whether any piece of memory may have to be bounced.
    #[inline(always)]
    pub(super) fn may_bounce(&self) -> bool {
        self.policy != Policy::Free
    }

    fn other_way(&self, span: Span, via: Via) -> Result<Way, Error> {
        let last = self.config.limits.last;
        let is_near = span.last().get() <= last;
        if via == Via::Bus {
            return if is_near {
                Ok(Way::Straight)
            } else {
                Err(Error::PeerUnreachable { span, last })
            };
        }
        let (own, is_its) = match self.is_direct() {
            true => (Way::Straight, is_near),
            false => (Way::Translated, true),
        };
        let is_its = is_its
            && match self.policy {
                Policy::Free => true,
                Policy::Granules => self.is_granular(span),
                Policy::Pool => self.is_pooled(span),
            };
        match via {
            _ if is_its => Ok(own),
            Via::Memory => Ok(Way::Bounced),
            Via::HostBridge | Via::Bus => Err(Error::NotMemory { span }),
        }
    }

    /// Whether a span is whole granules.
    #[inline(always)]
    fn is_granular(&self, span: Span) -> bool {
        let ends = span.paddr().get() | span.len();
        lg2::is_aligned(ends, self.translation.granule_lg2())
    }

    /// Whether a device that sees nothing but the pool sees a span.
    #[cold]
    fn is_pooled(&self, span: Span) -> bool {
        let is_shared = self.config.trust == Trust::Untrusted && !self.is_granular(span);
        !is_shared && self.pool.owns(span)
    }
}
