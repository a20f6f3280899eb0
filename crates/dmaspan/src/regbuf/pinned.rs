//! [`Pinned`] is a source of buffers: it pins their memory, and charges an account.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use lock_api::Mutex;

use super::buffer::{Buffer, Keep};
use super::builder::{BuildError, SegmentsBuilder};
use super::error::PinBufferError;
use super::segments::Segments;
use super::source::{Owner, Source};
use crate::account::{Account, Charge, OverLimit};
use crate::addr::{Address, UserAddr};
use crate::error::Errno;
use crate::lg2;
use crate::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use crate::platform::Flag;
use crate::promise::Promise;
use crate::prot::Prot;
use crate::range::UserRange;
use crate::span::{Span, SpanBuf};

/// Pins the memory of one address space and charges it to one owner.
///
/// What a program wants that only needs memory pinned until it drops a guard, a user-space driver
/// for its queues say, is [`buffer`](Self::buffer): the guard is the [`Buffer`] that it returns.
///
/// ```
/// use std::sync::Arc;
///
/// use dmaspan::regbuf::Pinned;
/// use dmaspan::{Account, HostAddr, Prot};
/// use dmaspan_linux::{LinuxPinner, Memory, MemoryKind};
///
/// let memory = Arc::new(Memory::new(MemoryKind::Base, 0x4000)?);
/// // `LinuxPinner::<PhysAddr>` has the addresses of hardware, and needs privileges for that.
/// let pinner = Arc::new(LinuxPinner::<HostAddr>::new()?);
/// let pinned = Pinned::new(pinner, Arc::clone(&memory), Account::unlimited(), 12);
/// let buffer = pinned.buffer(memory.user_range(), Prot::READ_WRITE)?;
/// assert_eq!(buffer.segments().len(), 0x4000);
/// drop(buffer); // unpins
/// Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// What is pinned and charged are the whole pages under a buffer. Unless its account counts
/// [mappings](crate::account::Counting::Mappings), each byte of them is charged once as long as any
/// buffer has it: of this registry or of others with the same account, clones included. The charge
/// goes with the buffer, whoever drops it last.
///
/// Unlike Linux, which charges whole huge pages, once for each ring (`hpage_acct` of
/// io_uring/rsrc.c), and loses track where a buffer was cloned.
pub struct Pinned<P: Pinner> {
    pinner: Arc<P>,
    space: P::Space,
    account: Arc<Account>,
    page_lg2: u32,
}

impl<P: Pinner> Pinned<P> {
    /// Memory of `space`, pinned in pages of `2^page_lg2` bytes and charged to `account`. An owner
    /// without a limit has an [unlimited](Account::unlimited) one.
    ///
    /// Pages are as large as the pinner's, or larger: then more is pinned and charged than is
    /// needed, and a buffer is refused where not all of its pages is there to be pinned. With
    /// smaller ones, less would be charged than is pinned.
    pub fn new(pinner: Arc<P>, space: P::Space, account: Arc<Account>, page_lg2: u32) -> Self {
        Self { pinner, space, account, page_lg2: page_lg2.min(63) }
    }

    /// The account that is charged.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Pins `user` for devices that access it as `access` says: what [`Source::buffer`] does,
    /// without the trait. The buffer says where the memory is, and unpins it and gives the charge
    /// back when its last reference is dropped.
    ///
    /// # Errors
    ///
    /// [`PinBufferError`]. Then nothing is pinned or charged.
    ///
    /// # Context
    ///
    /// Pins, which may sleep, and allocates.
    pub fn buffer(
        &self,
        user: UserRange,
        access: Prot,
    ) -> Result<Buffer<P::Address>, PinBufferError<P::Error>>
    where
        P: 'static,
    {
        let pages = self.pages(user);
        let access = access & Prot::READ_WRITE;
        let before = user.start().get() - pages.start().get();
        let behind = pages.last().get() - user.last().get();
        // Where it stays from now on.
        let mut pin = Box::new(Pin {
            pinner: Arc::clone(&self.pinner),
            pin: Mutex::new(None),
            charge: self.account.charge_none(&*self.pinner, &self.space),
            dirty: Dirty::after(access),
            around: Around { before, behind },
        });
        let mut segments = pin.pin(&self.space, pages, access)?;
        segments.narrow(before, behind);
        let got = segments.len();
        Buffer::kept(segments, user, access, pin).map_err(|_| PinBufferError::Pinned { user, got })
    }

    /// The whole pages under a range.
    fn pages(&self, user: UserRange) -> UserRange {
        let start = lg2::align_down(user.start().get(), self.page_lg2);
        let last = user.last().get() | lg2::mask(self.page_lg2);
        UserRange::new(UserAddr::new(start), UserAddr::new(last)).unwrap_or(user)
    }
}

impl<P: Pinner + 'static> Source for Pinned<P> {
    type Addr = P::Address;
    type Error = PinBufferError<P::Error>;

    fn buffer(&self, user: UserRange, access: Prot) -> Result<Buffer<P::Address>, Self::Error> {
        Self::buffer(self, user, access)
    }

    fn owner(&self) -> Owner<'_> {
        let space = self.pinner.space_id(&self.space);
        Owner { account: Some(&self.account), space, device: None }
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        error.errno()
    }
}

/// Bytes that are pinned for a buffer and not of it: those of its pages before and behind it.
#[derive(Clone, Copy, Debug)]
struct Around {
    before: u64,
    behind: u64,
}

/// What a buffer keeps. Dropped without an end it leaks the pin and gives back the charge.
struct Pin<P: Pinner> {
    pinner: Arc<P>,
    /// In a lock as a pin need not be `Sync`; it is never waited for.
    pin: Mutex<Flag, Option<P::Pin>>,
    charge: Charge,
    dirty: Dirty,
    around: Around,
}

/// How many spans are unpinned at once: they are on the stack.
const BATCH: usize = 32;

impl<P: Pinner> Pin<P> {
    /// Charges and pins whole pages. Nothing is pinned after an error.
    fn pin(
        &mut self,
        space: &P::Space,
        pages: UserRange,
        access: Prot,
    ) -> Result<Segments<P::Address>, PinBufferError<P::Error>> {
        let over = |over| PinBufferError::OverLimit { user: pages, over };
        self.charge.start(&*self.pinner, space, pages).map_err(over)?;
        let expected = pages.checked_len().unwrap_or(0);
        let mut sink = Sink { builder: SegmentsBuilder::expecting(expected), stopped: None };
        let error = match self.pinner.pin(space, pages, access, &mut sink) {
            Ok(pin) => {
                *self.pin.get_mut() = Some(pin);
                None
            }
            Err(PinFailed { error, pin, .. }) => {
                *self.pin.get_mut() = pin;
                Some(error)
            }
        };
        let segments = match self.found(error, &mut sink, pages) {
            Ok(segments) => segments,
            Err(error) => {
                let mut spans = sink.builder.spans();
                self.unpin(|take| in_batches(|room| fill_with(&mut spans, room), take));
                return Err(error);
            }
        };
        if let Err(error) = self.charge_found(pages, &segments) {
            let mut spans = segments.iter();
            self.unpin(|take| in_batches(|room| spans.fill(room), take));
            return Err(over(error));
        }
        Ok(segments)
    }

    /// The segments of what was pinned, or why it is not what was asked for.
    fn found(
        &self,
        error: Option<PinError<P::Error>>,
        sink: &mut Sink<P::Address>,
        pages: UserRange,
    ) -> Result<Segments<P::Address>, PinBufferError<P::Error>> {
        let segments = |error| PinBufferError::Segments { user: pages, error };
        match (sink.stopped, error) {
            (Some(Why::NotMemory), _) => Err(PinBufferError::NotMemory { user: pages }),
            (Some(Why::Build(error)), _) => Err(segments(error)),
            (None, Some(PinError::Failed(error))) => {
                let errno = self.pinner.errno(&error);
                Err(PinBufferError::Pinner { user: pages, error, errno })
            }
            // A pinner that says that its sink stopped it, which did not.
            (None, Some(PinError::Stopped)) => Err(PinBufferError::Pinned { user: pages, got: 0 }),
            (None, None) => match sink.builder.len() {
                got if pages.checked_len() != Some(got) => {
                    Err(PinBufferError::Pinned { user: pages, got })
                }
                _ => sink.builder.build().map_err(segments),
            },
        }
    }

    /// Charges what was pinned, as far as that was not known before.
    fn charge_found(
        &mut self,
        pages: UserRange,
        segments: &Segments<P::Address>,
    ) -> Result<(), OverLimit> {
        if self.charge.counts_frames() {
            let mut charged = Ok(());
            let charge = &mut |spans: &[Span]| {
                if charged.is_ok() {
                    charged = self.charge.found(spans);
                }
            };
            // In the order in which the account keeps them, so that what is looked at for one is in
            // a cache for the next; or, without memory for that, in their own.
            let mut sorted = Vec::new();
            if sorted.try_reserve_exact(segments.count()).is_ok() {
                sorted.extend(segments.iter().map(Span::output));
                sorted.sort_unstable_by_key(|span: &Span| span.start());
                let mut sorted = sorted.into_iter();
                in_batches(|room| fill_with(&mut sorted, room), charge);
            } else {
                let mut spans = segments.iter().map(Span::output);
                in_batches(|room| fill_with(&mut spans, room), charge);
            }
            charged?;
        }
        self.charge.settle([pages])
    }

    /// Unpins everything, all of which is passed to what the closure gets.
    #[inline(always)]
    fn unpin(&mut self, all: impl FnOnce(&mut dyn FnMut(&[Span<P::Address>]))) {
        let Some(mut pin) = self.pin.get_mut().take() else { return };
        all(&mut |spans| {
            self.pinner.unpin(Promise::kept(), &mut pin, spans, Kind::Memory, self.dirty);
        });
        self.pinner.release(Promise::kept(), pin);
    }
}

/// Passes on what `fill` puts into room, until it leaves some.
fn in_batches<A: Address>(
    mut fill: impl FnMut(&mut [Span<A>]) -> usize,
    take: &mut dyn FnMut(&[Span<A>]),
) {
    let mut room = SpanBuf::room::<BATCH>();
    let mut filled = BATCH;
    while filled == BATCH {
        filled = fill(&mut room);
        if filled > 0 {
            take(room.get(..filled).unwrap_or_default());
        }
    }
}

/// Puts what comes into room, and returns how much that is.
fn fill_with<A>(spans: &mut impl Iterator<Item = Span<A>>, room: &mut [Span<A>]) -> usize {
    room.iter_mut().zip(spans).map(|(place, span)| *place = span).count()
}

impl<P: Pinner> Keep<P::Address> for Pin<P> {
    fn end(&mut self, segments: &Segments<P::Address>) {
        let Around { before, behind } = self.around;
        let mut spans = segments.widened(before, behind);
        // One needs no room.
        match spans.single() {
            Some(span) => self.unpin(|take| take(&[span])),
            None => self.unpin(|take| in_batches(|room| spans.fill(room), take)),
        }
    }
}

/// Takes what is pinned, if it is memory.
struct Sink<A: Address> {
    builder: SegmentsBuilder<A>,
    stopped: Option<Why>,
}

#[derive(Clone, Copy, Debug)]
enum Why {
    NotMemory,
    Build(BuildError),
}

impl<A: Address> SpanSink<A> for Sink<A> {
    #[inline]
    fn push(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        if kind == Kind::Memory && self.builder.push_quickly(span) {
            return Ok(());
        }
        self.push_other(span, kind)
    }
}

impl<A: Address> Sink<A> {
    #[inline(never)]
    fn push_other(&mut self, span: Span<A>, kind: Kind) -> Result<(), Stopped> {
        let result = match kind {
            Kind::Memory => self.builder.push_other(span).map_err(Why::Build),
            Kind::Mmio => Err(Why::NotMemory),
        };
        result.map_err(|why| {
            self.stopped = Some(why);
            Stopped
        })
    }
}

impl<P: Pinner> fmt::Debug for Pinned<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { account, page_lg2, .. } = self;
        let mut fields = f.debug_struct("Pinned");
        fields.field("account", account).field("page_lg2", page_lg2).finish_non_exhaustive()
    }
}
