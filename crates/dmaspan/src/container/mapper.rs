//! Spans are mapped as a pinner finds them, a batch at a time.

use core::slice;

use super::alignment::{PlacedSpan, second_leaf};
use super::domains::Domains;
use super::error::Error;
use super::map::{Mapped, prot_of};
use super::mapping::Runs;
use super::paging::Refused;
use crate::account::{Charge, OverLimit};
use crate::addr::{Address, Iova};
use crate::iommu;
use crate::pin::{Kind, SpanSink, Stopped};
use crate::prot::Prot;
use crate::range::{IovaRange, UserRange};
use crate::span::{Span, SpanBuf};

/// How many bytes are pinned at most before a caller is asked whether it still wants them, and what
/// a pinner pushes at once more.
const CANCEL_BYTES: u64 = 1 << 30;

/// Why no more spans are wanted.
pub(super) enum Failure {
    Refused(Refused),
    OverLimit(OverLimit),
    Cancelled,
    NoRoom,
}

/// Maps spans as the pinner finds them, a batch at a time.
pub(super) struct Mapper<'a> {
    domains: &'a Domains,
    /// Pinned, and not mapped yet; all of one kind.
    pub(super) buf: SpanBuf<'a>,
    pub(super) kind: Kind,
    /// The charge for what is mapped, and perhaps for more of the range; and what is mapped.
    charge: &'a mut Charge,
    runs: &'a mut Runs,
    /// Where the buffer's first span goes: behind what is mapped, modulo 2^64.
    at: Iova,
    range: IovaRange,
    user: UserRange,
    prot: Prot,
    pub(super) found: Mapped,
    /// The size of the second smallest leaves: shorter spans are not looked at.
    second_leaf: u64,
    cancelled: &'a dyn Fn() -> bool,
    /// Bytes of the buffer's spans, and of those that were in it when the caller was asked last.
    buffered: u64,
    asked: u64,
    pub(super) failure: Option<Failure>,
}

impl<'a> Mapper<'a> {
    pub(super) fn new(
        domains: &'a Domains,
        buf: SpanBuf<'a>,
        (range, user, prot): (IovaRange, UserRange, Prot),
        (charge, runs): (&'a mut Charge, &'a mut Runs),
        cancelled: &'a dyn Fn() -> bool,
    ) -> Self {
        Self {
            domains,
            buf,
            kind: Kind::Memory,
            charge,
            runs,
            at: range.start(),
            range,
            user,
            prot,
            second_leaf: second_leaf(domains.page_sizes),
            found: Mapped::default(),
            cancelled,
            buffered: 0,
            asked: 0,
            failure: None,
        }
    }

    /// Bytes that are mapped.
    pub(super) fn mapped(&self) -> u64 {
        self.at.get().wrapping_sub(self.range.start().get())
    }

    /// Maps what is left and settles the account for all.
    ///
    /// # Errors
    ///
    /// Why it is taken back; nothing where the mapper has that as its failure, or not all of the
    /// range was found.
    #[inline(always)]
    pub(super) fn end<E: core::error::Error>(&mut self) -> Result<(), Option<Error<E>>> {
        let Self { user, range, domains, .. } = *self;
        if self.flush().is_err() || !self.complete() {
            return Err(None);
        }
        self.settle(user).map_err(|source| Error::OverLimit { user, source })?;
        domains.announce(range).map_err(|source| {
            let source = iommu::Error::Hardware { range, source };
            Error::Map { user: user.start(), source }
        })?;
        Ok(())
    }

    /// Charges what turned out to be memory, and nothing else.
    #[inline(always)]
    fn settle(&mut self, user: UserRange) -> Result<(), OverLimit> {
        let bytes = self.charge.bytes();
        if bytes == self.found.memory && bytes == self.mapped() {
            // All is memory, and all of it is charged.
            return Ok(());
        }
        self.charge.settle(self.runs.memory(user))
    }

    fn complete(&self) -> bool {
        self.at == self.range.last().wrapping_add(1)
    }

    /// The bytes of all spans so far.
    pub(super) fn found(&self) -> u64 {
        self.mapped().saturating_add(self.buffered)
    }

    /// Maps all spans in the buffer.
    #[inline(always)]
    fn flush(&mut self) -> Result<(), Stopped> {
        self.map_first(self.buf.len(), self.buffered)?;
        self.keep(None)
    }

    /// Maps all spans in a full buffer but the last, which the next one may still join: so the
    /// leaves do not depend on the size of the batches. A batch of one span has no other.
    fn make_room(&mut self) -> Result<(), Stopped> {
        let Some((open, closed)) = self.buf.spans().split_last() else { return Err(Stopped) };
        let (open, closed) = (*open, closed.len());
        if closed == 0 {
            return self.flush();
        }
        self.map_first(closed, self.buffered - open.len())?;
        self.keep(Some(open))
    }

    /// Takes what is mapped out of the buffer, all but the span that may still grow.
    #[inline(always)]
    fn keep(&mut self, open: Option<Span>) -> Result<(), Stopped> {
        self.buf.clear();
        self.buffered = open.map_or(0, Span::len);
        self.asked = self.buffered;
        open.map_or(Ok(()), |open| self.buf.push(open).map_err(|_| Stopped))
    }

    /// Maps the first spans of the buffer, of so many bytes, and leaves them in it.
    #[inline]
    fn map_first(&mut self, count: usize, bytes: u64) -> Result<(), Stopped> {
        let left = self.range.last().get().wrapping_sub(self.at.get());
        let found = self.buffered;
        let exceeds = found > 0 && (self.complete() || found - 1 > left);
        if self.failure.is_some() || exceeds {
            return Err(Stopped);
        }
        let spans = &self.buf.spans()[..count];
        if bytes == 0 {
            return Ok(());
        }
        let failure = if (self.cancelled)() {
            Failure::Cancelled
        } else if let Err(over) = charge_found(self.charge, spans, self.kind) {
            Failure::OverLimit(over)
        } else if self.runs.push(bytes, self.kind).is_err() {
            Failure::NoRoom
        } else if let Err(refused) = self.domains.map(self.at, spans, prot_of(self.prot, self.kind))
        {
            self.runs.pop(bytes);
            Failure::Refused(refused)
        } else {
            self.count(count, bytes);
            self.at = self.at.wrapping_add(bytes);
            return Ok(());
        };
        self.failure = Some(failure);
        Err(Stopped)
    }
}

impl Mapper<'_> {
    /// Puts spans into the buffer, and maps what is in it when it is full. Returns how many it
    /// took.
    #[inline(always)]
    fn take<A: Address>(&mut self, spans: &[Span<A>], kind: Kind) -> usize {
        if kind != self.kind && self.flush().is_err() {
            return 0;
        }
        self.kind = kind;
        let mut taken = 0;
        loop {
            if self.buffered - self.asked >= CANCEL_BYTES && self.ask().is_err() {
                return taken;
            }
            let (more, bytes) = self.buf.extend(&spans[taken..]);
            self.buffered = self.buffered.saturating_add(bytes);
            taken += more;
            if taken == spans.len() || self.make_room().is_err() {
                return taken;
            }
        }
    }

    /// Asks the caller whether it still wants what is pinned.
    #[cold]
    fn ask(&mut self) -> Result<(), Stopped> {
        if (self.cancelled)() {
            self.failure = Some(Failure::Cancelled);
            return Err(Stopped);
        }
        self.asked = self.buffered;
        Ok(())
    }

    /// Counts the first spans of the buffer, of so many bytes, and looks whether other addresses
    /// would have given them larger leaves.
    #[inline(always)]
    fn count(&mut self, count: usize, bytes: u64) {
        let spans = &self.buf.spans()[..count];
        self.found.add(spans, bytes, self.kind);
        let mut iova = self.at;
        for span in spans {
            if span.len() >= self.second_leaf {
                let user = self.user.start().wrapping_add(iova.get() - self.range.start().get());
                let place = PlacedSpan { user, iova, span: *span, kind: self.kind };
                let sizes = self.domains.page_sizes;
                if !place.is_best(sizes) {
                    self.found.better = self.found.better.max(place.better(sizes));
                }
            }
            iova = iova.wrapping_add(span.len());
        }
    }
}

/// Charges spans before they are mapped, where it is known only then how much that is.
#[inline(always)]
fn charge_found(charge: &mut Charge, spans: &[Span], kind: Kind) -> Result<(), OverLimit> {
    match kind {
        Kind::Memory => charge.found(spans),
        Kind::Mmio => Ok(()),
    }
}

impl<A: Address> SpanSink<A> for Mapper<'_> {
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        if self.take(slice::from_ref(&span), kind) == 1 { Ok(()) } else { Err(Stopped) }
    }

    fn push_all(&mut self, spans: &[Span<A>], kind: Kind) -> usize {
        self.take(spans, kind)
    }
}
