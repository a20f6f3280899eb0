//! Mapping what is linked in a reservation, and telling hardware.

use super::{Reservation, Settled, State, slots_at};
use crate::addr::Iova;
use crate::dma::attrs::Privilege;
use crate::dma::bounce::BouncePool;
use crate::dma::device::Device;
use crate::dma::domain::Translation;
use crate::dma::error::Error;
use crate::dma::links::whole;
use crate::dma::memory::Piece;
use crate::dma::slots::STRETCHES;
use crate::dma::stage::{FEW, STAGE, Stage};
use crate::iommu::Event;
use crate::lg2;
use crate::promise::Promise;
use crate::span::SpanBuf;

impl<T: Translation, B: BouncePool> Device<T, B> {
    /// Maps everything that was linked, and tells hardware. Before this returns, the device must
    /// not use it.
    ///
    /// Pieces whose granules follow each other are mapped by one call of the page table, which is
    /// why they wait for this. Linux's `dma_iova_link` (drivers/iommu/dma-iommu.c) maps each at
    /// once.
    ///
    /// # Errors
    ///
    /// [`Error::Foreign`], and [`Error::Withdrawn`] after an announcement that took everything
    /// away. [`Error::Domain`] where there is no memory for page tables: all pieces stay linked,
    /// those that were announced before stay the device's, and a later call maps the others.
    /// [`Error::Domain`] or [`Error::Quarantined`] where hardware does not answer: nothing of the
    /// reservation is mapped any more. It can be unlinked and destroyed, for the memory's sake; to
    /// link and to announce is [`Error::Withdrawn`] from then on.
    ///
    /// # Context
    ///
    /// As [`map_single_with`](Self::map_single_with): page tables may be allocated, and it waits
    /// for hardware where that caches absent entries.
    #[inline(always)]
    #[track_caller]
    pub fn announce(&self, reservation: &mut Reservation<T, B>) -> Result<(), Error> {
        let range = self.own_mapped(reservation)?;
        self.translation.observe(&Event::Mapping { range, by: self.caller() });
        let (torn, settled) = (self.may_be_torn(), reservation.settled);
        reservation.settled = Settled::No;
        let mapped = match reservation.linked() - reservation.mapped() {
            0 => Ok(()),
            _ if !reservation.bounced.is_empty() => self.map_stretches(reservation),
            1 => self.map_last(reservation),
            2..=FEW => self.map_links::<FEW>(reservation),
            _ => self.map_links::<STAGE>(reservation),
        };
        let told = match mapped {
            Ok(()) => self.translation.announce(Promise::kept(), range).inspect_err(|_| {
                reservation.state = State::Withdrawn;
            }),
            // What is mapped of them stays so for the next call.
            Err(error) => Err(error),
        };
        torn.ended();
        reservation.settled = settled;
        told.map_err(|error| reservation.unsettled_by(error))
    }

    /// Maps the last link, unless it is mapped. All others are.
    #[inline(always)]
    #[track_caller]
    fn map_last(&self, reservation: &mut Reservation<T, B>) -> Result<(), Error> {
        let Reservation { addr, links, direction, .. } = reservation;
        let granule = lg2::mask(self.translation.granule_lg2());
        if let Some(link) = links.all_mut().last_mut().filter(|link| !link.is_mapped) {
            let Piece { span, via } = link.piece();
            self.observe_bytes(Iova::new(addr.get() + link.offset), span.len());
            let prot = self.prot(via, *direction, Privilege::Any);
            let (start, whole) = (link.start(*addr, granule), whole(span, granule));
            self.translation.map(Promise::kept(), start, &[whole], prot)?;
            link.is_mapped = true;
        }
        reservation.set_mapped(reservation.linked());
        Ok(())
    }

    /// Maps the links that are not mapped yet, by as few calls of the table as there are gaps,
    /// changes of permissions and `N` runs of memory. None is bounced.
    #[inline(never)]
    #[track_caller]
    fn map_links<const N: usize>(&self, reservation: &mut Reservation<T, B>) -> Result<(), Error> {
        let (addr, mut at) = (reservation.addr, reservation.mapped());
        let granule = lg2::mask(self.translation.granule_lg2());
        let mut room = SpanBuf::room::<N>();
        let links = reservation.links.all_mut();
        while let Some(first) = links.get(at) {
            let mut behind = at + 1;
            if !first.is_mapped {
                let (start, Piece { span, via }) = (first.start(addr, granule), first.piece());
                let mut spans = SpanBuf::new(&mut room);
                // It is pushed when it is known what joins it.
                let mut last = whole(span, granule);
                let mut end = start.wrapping_add(last.len());
                for link in &links[behind..] {
                    let piece = link.piece();
                    let next = whole(piece.span, granule);
                    if link.start(addr, granule) != end || piece.via != via || link.is_mapped {
                        break;
                    }
                    if let Some(joined) = last.join(next) {
                        last = joined;
                    } else if spans.len() + 1 < N {
                        let _ = spans.push_apart(last);
                        last = next;
                    } else {
                        break;
                    }
                    end = end.wrapping_add(next.len());
                    behind += 1;
                }
                // There is room for it.
                let _ = spans.push_apart(last);
                let run = &mut links[at..behind];
                for link in &*run {
                    self.observe_bytes(Iova::new(addr.get() + link.offset), link.len());
                }
                let prot = self.prot(via, reservation.direction, Privilege::Any);
                self.translation.map(Promise::kept(), start, spans.spans(), prot)?;
                run.iter_mut().for_each(|link| link.is_mapped = true);
            }
            at = behind;
        }
        reservation.set_mapped(at);
        Ok(())
    }

    /// The same where pieces are bounced: their slots are mapped, and what lies between.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn map_stretches(&self, reservation: &mut Reservation<T, B>) -> Result<(), Error> {
        let (addr, direction) = (reservation.addr, reservation.direction);
        let granule = lg2::mask(self.translation.granule_lg2());
        let mut room = SpanBuf::room::<STAGE>();
        let mut stage = Stage::new(&*self.translation, &mut room);
        let mut stretches = SpanBuf::room::<STRETCHES>();
        while reservation.mapped() < reservation.linked() {
            let (mapped, bounced) = (reservation.mapped(), &reservation.bounced);
            let links = &mut reservation.links.all_mut()[mapped..];
            let mut staged = 0;
            for link in &*links {
                let (Piece { span, via }, start) = (link.piece(), link.start(addr, granule));
                if !link.is_mapped {
                    let slots = slots_at(bounced, link.offset);
                    let wholes = self.wholes(span, slots, &mut stretches)?;
                    if !stage.put(start, wholes, self.prot(via, direction, Privilege::Any)) {
                        break;
                    }
                    self.observe_bytes(Iova::new(addr.get() + link.offset), span.len());
                }
                staged += 1;
            }
            stage.map()?;
            links[..staged].iter_mut().for_each(|link| link.is_mapped = true);
            reservation.set_mapped(mapped + staged);
        }
        Ok(())
    }
}
