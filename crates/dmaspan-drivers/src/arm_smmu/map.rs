//! The stream map: which streams have an entry, and where it leads.

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::features::{Has, SmmuV2Features, StreamMapping};
use super::registers::Registers;
use super::spec::{gr0, s2cr, smr};
use crate::error::Error;
use crate::faults::ClaimedStream;
use crate::mmio::Mmio;

/// Stream IDs: those that are `id` in all bits that `mask` does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ids {
    pub(super) id: u32,
    pub(super) mask: u32,
}

impl Ids {
    fn contain(self, id: u32) -> bool {
        (self.id ^ id) & !self.mask == 0
    }

    /// Whether some stream is of both.
    fn meet(self, other: Self) -> bool {
        (self.id ^ other.id) & !(self.mask | other.mask) == 0
    }
}

/// Where accesses of a stream go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Nowhere, and all that went elsewhere has completed.
    Blocked,
    /// To the addresses that they name.
    Pass,
    /// Through a context bank.
    Bank(u32),
}

/// An entry that is somebody's.
struct Entry<L> {
    ids: Ids,
    claimed: Arc<ClaimedStream<L>>,
    /// `None` while hardware has not said that it left the former one.
    route: Option<Route>,
}

/// The entries, by their number.
pub(super) struct StreamMap<L> {
    entries: Box<[Option<Entry<L>>]>,
    mapping: StreamMapping,
    last_stream: u32,
    wide_streams: Has,
}

impl<L> StreamMap<L> {
    pub(super) fn new(features: &SmmuV2Features) -> Self {
        let SmmuV2Features { entries, mapping, last_stream, wide_streams, .. } = *features;
        let entries = (0..entries).map(|_| None).collect();
        Self { entries, mapping, last_stream, wide_streams }
    }

    /// Gives streams an entry of their own, which lets nothing through, and returns its number.
    pub(super) fn claim<R: Mmio>(
        &mut self,
        registers: &Registers<R>,
        ids: Ids,
        claimed: Arc<ClaimedStream<L>>,
    ) -> Result<u32, Error> {
        let Ids { id, mask } = ids;
        let mask_bits = match self.mapping {
            StreamMapping::Indexed => 0,
            StreamMapping::Matched { mask_bits } => mask_bits,
        };
        if mask & !mask_bits != 0 {
            let (value, limit) = (mask.into(), mask_bits.into());
            return Err(Error::Config { what: "the mask of stream IDs", value, limit });
        }
        if id > self.last_stream {
            return Err(Error::NoStream { stream: id, last: self.last_stream });
        }
        if let Some(other) = self.entries.iter().flatten().find(|entry| entry.ids.meet(ids)) {
            return Err(Error::Claimed { stream: other.ids.id });
        }
        let free = match self.mapping {
            StreamMapping::Indexed => usize::try_from(id).ok(),
            StreamMapping::Matched { .. } => self.entries.iter().position(Option::is_none),
        };
        let limit = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        let no_entry = Error::NoIds { what: "entries of the stream map", limit };
        let index = free.ok_or(no_entry)?;
        let entry = u32::try_from(index).map_err(|_| no_entry)?;
        let place = self.entries.get_mut(index).ok_or(no_entry)?;
        *place = Some(Entry { ids, claimed, route: Some(Route::Blocked) });
        registers.write_entry(gr0::S2CR, entry, s2cr::FAULT);
        if let StreamMapping::Matched { .. } = self.mapping {
            let valid = match self.wide_streams {
                Has::Yes => 0,
                Has::No => smr::VALID,
            };
            registers.write_entry(gr0::SMR, entry, mask << smr::MASK_SHIFT | id | valid);
            registers.write_entry(gr0::S2CR, entry, s2cr::FAULT | self.valid());
        }
        Ok(entry)
    }

    /// Takes an entry back, unless hardware may let something through it: then it stays claimed.
    pub(super) fn release<R: Mmio>(&mut self, registers: &Registers<R>, entry: u32) {
        let Some(place) = self.entries.get_mut(entry as usize) else { return };
        if place.as_ref().is_some_and(|taken| taken.route == Some(Route::Blocked)) {
            *place = None;
            // With extended IDs this makes it invalid; until then no ID of others may be in it.
            registers.write_entry(gr0::S2CR, entry, s2cr::FAULT);
            if let StreamMapping::Matched { .. } = self.mapping {
                registers.write_entry(gr0::SMR, entry, 0);
            }
        }
    }

    /// Sends the accesses of an entry elsewhere, by one write. What was sent before may be on its
    /// way still, so the route is not known until [`arrived`](Self::arrived); returns the former
    /// one, if that is known.
    pub(super) fn send<R: Mmio>(
        &mut self,
        registers: &Registers<R>,
        entry: u32,
        route: Route,
    ) -> Option<Route> {
        let valid = self.valid();
        let taken = self.entries.get_mut(entry as usize)?.as_mut()?;
        registers.write_entry(gr0::S2CR, entry, value(route) | valid);
        taken.route.take()
    }

    /// Whether hardware has that route for the entry.
    pub(super) fn has<R: Mmio>(registers: &Registers<R>, entry: u32, route: Route) -> bool {
        let bits = match route {
            Route::Bank(_) => s2cr::TYPE_MASK | s2cr::BANK_MASK,
            Route::Blocked | Route::Pass => s2cr::TYPE_MASK,
        };
        registers.read_entry(gr0::S2CR, entry) & bits == value(route)
    }

    /// Nothing goes another way any more.
    pub(super) fn arrived(&mut self, entry: u32, route: Route) {
        if let Some(Some(taken)) = self.entries.get_mut(entry as usize) {
            taken.route = Some(route);
        }
    }

    /// Whose stream that is.
    pub(super) fn owner(&self, id: u32) -> Option<&Arc<ClaimedStream<L>>> {
        let entry = self.entries.iter().flatten().find(|entry| entry.ids.contain(id));
        entry.map(|entry| &entry.claimed)
    }

    /// Whether an entry leads to that bank. Where that is not known hardware is asked.
    pub(super) fn reaches<R: Mmio>(&self, registers: &Registers<R>, bank: u32) -> bool {
        let to = Route::Bank(bank);
        (0..).zip(&self.entries).any(|(index, entry)| match entry {
            Some(Entry { route: Some(route), .. }) => *route == to,
            Some(Entry { route: None, .. }) => Self::has(registers, index, to),
            None => false,
        })
    }

    /// What makes an entry valid that says so in S2CR.
    const fn valid(&self) -> u32 {
        match self.wide_streams {
            Has::Yes => s2cr::EXIDVALID,
            Has::No => 0,
        }
    }
}

/// The register of an entry with that route.
const fn value(route: Route) -> u32 {
    match route {
        Route::Blocked => s2cr::FAULT,
        Route::Pass => s2cr::BYPASS,
        Route::Bank(bank) => s2cr::TRANSLATION | bank & s2cr::BANK_MASK,
    }
}

/// Lets nothing through by an entry, whatever it was.
pub(super) fn block_entries<R: Mmio>(registers: &Registers<R>, features: &SmmuV2Features) {
    for entry in 0..features.entries {
        registers.write_entry(gr0::S2CR, entry, s2cr::FAULT);
    }
}

/// Has the entries match no stream. They let nothing through, and neither has a stream without one
/// anything.
pub(super) fn clear_entries<R: Mmio>(registers: &Registers<R>, features: &SmmuV2Features) {
    if let StreamMapping::Matched { .. } = features.mapping {
        for entry in 0..features.entries {
            registers.write_entry(gr0::SMR, entry, 0);
        }
    }
}

/// Finds out which bits of IDs and masks the entries have, by writing them: hardware keeps only
/// those. Each alone, since bits of the ID that the mask has may be lost (Linux:
/// `arm_smmu_test_smr_masks`). The entry is not valid meanwhile.
pub(super) fn probe<R: Mmio>(registers: &Registers<R>, features: &mut SmmuV2Features) {
    if features.mapping == StreamMapping::Indexed {
        return;
    }
    let kept = |value| {
        registers.write_entry(gr0::SMR, 0, value);
        registers.read_entry(gr0::SMR, 0)
    };
    let last = features.last_stream;
    features.last_stream = kept(last) & smr::ID_MASK & last;
    let mask_bits = kept(last << smr::MASK_SHIFT) >> smr::MASK_SHIFT & last;
    features.mapping = StreamMapping::Matched { mask_bits };
    registers.write_entry(gr0::SMR, 0, 0);
}
