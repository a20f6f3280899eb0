//! An [`Account`] charges an owner for pinned memory, against a limit. Containers and sources of
//! registered buffers call it before they pin.
//!
//! An account is one owner, of any number of containers and other users of pinned memory. It holds
//! ranges, each for as long as the [`Charge`] that brought it, and counts each byte that they cover
//! once.
//!
//! # How it locks
//!
//! An account locks by a flag, on which callers spin: containers of different locks share an
//! account, so it cannot have the lock of one of them. Under the flag it allocates and frees
//! nothing and calls nobody: a charge allocates its memory before, and frees what it leaves
//! afterwards. A charge costs a walk down a balanced tree for each end of its ranges.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::{fmt, mem, slice};

use lock_api::Mutex;

use crate::error::Errno;
use crate::ledger::{Change, Ledger, Spare, Stretch};
use crate::pin::Pinner;
use crate::platform::Flag;
use crate::range::UserRange;
use crate::span::Span;

/// A charge does not fit under the limit. Nothing was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes do not fit: {used} of {limit} bytes are charged")]
pub struct OverLimit {
    /// Bytes asked for, without those that were charged already.
    pub asked: u64,
    /// Bytes charged already.
    pub used: u64,
    /// Bytes that may be charged at most.
    pub limit: u64,
}

impl OverLimit {
    /// `ENOMEM`, as `vfio_lock_acct` for more than `RLIMIT_MEMLOCK`.
    pub const fn errno(&self) -> Errno {
        Errno::ENOMEM
    }
}

/// Says how an account counts memory that is pinned more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Counting {
    /// A byte of a user's address space once, however many mappings and containers pin it.
    ///
    /// An owner who puts other memory behind addresses while they are pinned, and pins them again,
    /// has both pinned and one charged. Where that matters, count otherwise.
    #[default]
    Ranges,
    /// Every mapping by itself, as type1 (drivers/vfio/vfio_iommu_type1.c, `vfio_lock_acct` for
    /// each `vfio_dma`): for front ends that must refuse exactly where Linux does.
    Mappings,
    /// A frame once, whatever addresses it is pinned through. What pins must
    /// [know frames](Pinner::knows_frames), or else ranges are counted; all that do and charge one
    /// account give addresses of the same physical memory. It costs memory for each span.
    Frames,
}

/// An account knows what one owner has pinned, and may pin.
pub struct Account {
    limit: u64,
    counting: Counting,
    totals: Mutex<Flag, Totals>,
}

#[derive(Default)]
struct Totals {
    /// The bytes of all charges that name no ranges, and all that the ranges cover.
    used: u64,
    users: Ledger,
    frames: Ledger,
}

impl Account {
    /// An account with nothing charged, for at most `limit` bytes, which counts
    /// [ranges](Counting::Ranges).
    pub fn new(limit: u64) -> Arc<Self> {
        Self::with_counting(limit, Counting::default())
    }

    /// An account with nothing charged, for at most `limit` bytes.
    pub fn with_counting(limit: u64, counting: Counting) -> Arc<Self> {
        Arc::new(Self { limit, counting, totals: Mutex::default() })
    }

    /// An account of an owner with a privilege, who has no limit (as with `CAP_IPC_LOCK`): it only
    /// counts [ranges](Counting::Ranges). It is one of `u64::MAX` bytes.
    pub fn unlimited() -> Arc<Self> {
        Self::new(u64::MAX)
    }

    /// Bytes charged now.
    pub fn used(&self) -> u64 {
        self.totals.lock().used
    }

    /// Bytes that may be charged at most.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns what it counts.
    pub fn counting(&self) -> Counting {
        self.counting
    }

    /// Charges `bytes` whatever they are, until the [`Charge`] is dropped.
    ///
    /// # Errors
    ///
    /// [`OverLimit`] where that is more than is left.
    ///
    /// ```
    /// use dmaspan::Account;
    ///
    /// let account = Account::new(0x3000);
    /// let charge = account.charge(0x2000)?;
    /// assert!(account.charge(0x2000).is_err());
    /// drop(charge);
    /// assert_eq!(account.used(), 0);
    /// Ok::<(), dmaspan::account::OverLimit>(())
    /// ```
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, OverLimit> {
        let mut charge = self.charge_nothing();
        charge.grow(bytes)?;
        Ok(charge)
    }

    /// Charges `user` of `space`, which is about to be pinned, as far as it can be told: by
    /// [`chargeable`](Pinner::chargeable), and not where frames are counted.
    ///
    /// What is pinned is passed to [`Charge::found`] before it is used, and to [`Charge::settle`]
    /// when all is known. Where part of a range is a device's, two callers at once may both be
    /// charged for the same bytes until then.
    ///
    /// # Errors
    ///
    /// [`OverLimit`] where that is more than is left.
    #[inline(always)]
    pub fn charge_pin<P: Pinner>(
        self: &Arc<Self>,
        pinner: &P,
        space: &P::Space,
        user: UserRange,
    ) -> Result<Charge, OverLimit> {
        let mut charge = self.charge_none(pinner, space);
        charge.start(pinner, space, user)?;
        Ok(charge)
    }

    /// A charge of nothing, for what is pinned of `space`.
    #[inline(always)]
    pub(crate) fn charge_none<P: Pinner>(self: &Arc<Self>, pinner: &P, space: &P::Space) -> Charge {
        let by = match self.counting {
            Counting::Mappings => By::Mappings,
            Counting::Frames if pinner.knows_frames() => By::Frames,
            Counting::Ranges | Counting::Frames => By::Ranges { space: pinner.space_id(space) },
        };
        Charge { account: Arc::clone(self), by, held: Held::NOTHING }
    }

    /// A charge of nothing, to [`grow`](Charge::grow).
    pub(crate) fn charge_nothing(self: &Arc<Self>) -> Charge {
        Charge { account: Arc::clone(self), by: By::Mappings, held: Held::NOTHING }
    }

    /// How many bytes of a part are charged.
    fn charged(&self, part: Part) -> u64 {
        let mut spare = Spare::for_ranges(1);
        let mut totals = self.totals.lock();
        totals.ledger(part).lend(&mut spare);
        let new = totals.change(Change::Add, part);
        totals.change(Change::Take, part);
        totals.ledger(part).give_back(&mut spare);
        part.range.len() - new
    }

    /// Charges `new` instead of `old`, which is charged: what both cover needs no room twice.
    ///
    /// # Context
    ///
    /// Allocates only for `new`.
    #[inline(always)]
    fn exchange(&self, old: &Held, new: &Held) -> Result<(), OverLimit> {
        if let (Held::Bytes(less), Held::Bytes(more)) = (old, new) {
            return self.totals.lock().exchange(self.limit, (*more).into(), (*less).into());
        }
        self.exchange_ranges(old, new)
    }

    #[inline(never)]
    fn exchange_ranges(&self, old: &Held, new: &Held) -> Result<(), OverLimit> {
        let (_, parts) = new.bytes_and_parts();
        // Before the lock, and so dropped behind it.
        let mut spare = Spare::for_ranges(parts.len());
        let mut totals = self.totals.lock();
        parts.iter().for_each(|part| totals.ledger(*part).lend(&mut spare));
        let more = totals.change_all(Change::Add, new);
        let less = totals.change_all(Change::Take, old);
        let exchanged = totals.exchange(self.limit, more, less);
        let gone = if exchanged.is_ok() {
            old
        } else {
            totals.change_all(Change::Add, old);
            totals.change_all(Change::Take, new);
            new
        };
        let (_, parts) = gone.bytes_and_parts();
        parts.iter().for_each(|part| totals.ledger(*part).give_back(&mut spare));
        exchanged
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, counting, .. } = self;
        let mut fields = f.debug_struct("Account");
        fields.field("limit", limit).field("used", &self.used()).field("counting", counting);
        fields.finish_non_exhaustive()
    }
}

impl Totals {
    /// Counts bytes that come and bytes that go, if that fits.
    #[inline(always)]
    fn exchange(&mut self, limit: u64, more: u128, less: u128) -> Result<(), OverLimit> {
        let used = self.used;
        let after = u128::from(used) + more - less;
        if let Ok(after) = u64::try_from(after)
            && after <= limit.max(used)
        {
            self.used = after;
            return Ok(());
        }
        let asked = u64::try_from(after - u128::from(used)).unwrap_or(u64::MAX);
        Err(OverLimit { asked, used, limit })
    }

    /// Adds or takes all, and returns how many bytes that is.
    fn change_all(&mut self, change: Change, held: &Held) -> u128 {
        let (bytes, parts) = held.bytes_and_parts();
        let parts = parts.iter().map(|part| u128::from(self.change(change, *part)));
        u128::from(bytes) + parts.sum::<u128>()
    }

    fn change(&mut self, change: Change, part: Part) -> u64 {
        self.ledger(part).change(change, part.range)
    }

    fn ledger(&mut self, part: Part) -> &mut Ledger {
        match part.of {
            Of::User => &mut self.users,
            Of::Frames => &mut self.frames,
        }
    }
}

/// How a charge is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Ranges { space: u64 },
    Mappings,
    Frames,
}

/// Of what a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    User,
    Frames,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    of: Of,
    range: Stretch,
}

/// `None` for a whole space, of 2^64 bytes.
fn user_part(space: u64, user: UserRange) -> Option<Part> {
    let range = Stretch::new(space, user.start().get(), user.last().get())?;
    Some(Part { of: Of::User, range })
}

/// What a charge holds. Most hold a range at most, which needs no memory of its own.
#[derive(Debug, PartialEq, Eq)]
enum Held {
    /// Bytes that are counted by themselves.
    Bytes(u64),
    One(Part),
    Many(Vec<Part>),
}

impl Held {
    const NOTHING: Self = Self::Bytes(0);

    #[inline]
    fn of(parts: impl IntoIterator<Item = Part>) -> Self {
        let mut held = Self::NOTHING;
        parts.into_iter().for_each(|part| held.push(part));
        held
    }

    /// The bytes that are counted by themselves, and the ranges.
    fn bytes_and_parts(&self) -> (u64, &[Part]) {
        match self {
            Self::Bytes(bytes) => (*bytes, &[]),
            Self::One(part) => (0, slice::from_ref(part)),
            Self::Many(parts) => (0, parts),
        }
    }

    /// Holds one more, and no bytes.
    #[inline]
    fn push(&mut self, part: Part) {
        match self {
            Self::Bytes(_) => *self = Self::One(part),
            Self::One(first) => *self = Self::Many(vec![*first, part]),
            Self::Many(parts) => parts.push(part),
        }
    }
}

/// A charge to an [`Account`], which dropping it gives back.
///
/// # Context
///
/// Dropping it neither fails nor allocates.
#[derive(Debug)]
#[must_use = "dropping a charge gives it back"]
pub struct Charge {
    account: Arc<Account>,
    by: By,
    held: Held,
}

impl Charge {
    /// Returns how many bytes the charge is for, those included that are charged once together with
    /// others.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        let len = |part: &Part| part.range.len();
        let (bytes, parts) = self.held.bytes_and_parts();
        parts.iter().map(len).fold(bytes, u64::saturating_add)
    }

    /// The account that is charged.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Whether [`found`](Self::found) charges anything.
    pub(crate) fn counts_frames(&self) -> bool {
        self.by == By::Frames
    }

    /// Charges memory that was pinned, before it is used; nothing, unless frames are counted.
    ///
    /// # Errors
    ///
    /// [`OverLimit`] where that is more than is left. Then none of `spans` is charged.
    #[inline(always)]
    pub fn found(&mut self, spans: &[Span]) -> Result<(), OverLimit> {
        if self.by == By::Frames { self.found_frames(spans) } else { Ok(()) }
    }

    #[inline(never)]
    fn found_frames(&mut self, spans: &[Span]) -> Result<(), OverLimit> {
        let before = self.held.bytes_and_parts().1.len();
        // One by one, so that nobody waits long for the account.
        for span in spans {
            let (start, last) = (span.paddr().get(), span.last().get());
            let Some(range) = Stretch::new(0, start, last) else { continue };
            let part = Part { of: Of::Frames, range };
            if let Err(over) = self.account.exchange(&Held::NOTHING, &Held::One(part)) {
                self.give_back(before);
                return Err(over);
            }
            self.held.push(part);
        }
        Ok(())
    }

    /// Puts the charge right, `memory` being all of what was pinned that is memory; nothing, where
    /// frames are counted.
    ///
    /// # Errors
    ///
    /// [`OverLimit`] where that is more than is left. Then the charge is as it was.
    #[inline]
    pub fn settle(&mut self, memory: impl IntoIterator<Item = UserRange>) -> Result<(), OverLimit> {
        let memory = memory.into_iter();
        let held = match self.by {
            By::Frames => return Ok(()),
            By::Ranges { space } => Held::of(memory.filter_map(|user| user_part(space, user))),
            By::Mappings => {
                let len = |user: UserRange| user.checked_len().unwrap_or(u64::MAX);
                let bytes = memory.map(len).fold(0, u64::saturating_add);
                Held::Bytes(bytes)
            }
        };
        if held == self.held { Ok(()) } else { self.hold(held) }
    }

    /// [`settle`](Self::settle) for memory that has other addresses now, `memory` of `space`.
    pub(crate) fn settle_in<P: Pinner>(
        &mut self,
        pinner: &P,
        space: &P::Space,
        memory: impl Iterator<Item = UserRange>,
    ) -> Result<(), OverLimit> {
        let by = match self.by {
            By::Ranges { .. } => By::Ranges { space: pinner.space_id(space) },
            other => other,
        };
        let before = mem::replace(&mut self.by, by);
        self.settle(memory).inspect_err(|_| self.by = before)
    }

    /// Charges so many more bytes, in a charge that holds nothing but bytes.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), OverLimit> {
        let (held, _) = self.held.bytes_and_parts();
        self.hold(Held::Bytes(held.saturating_add(bytes)))
    }

    /// Charges what is about to be pinned, as [`Account::charge_pin`].
    #[inline(always)]
    pub(crate) fn start<P: Pinner>(
        &mut self,
        pinner: &P,
        space: &P::Space,
        user: UserRange,
    ) -> Result<(), OverLimit> {
        let memory = pinner.chargeable(space, user);
        let held = match self.by {
            By::Frames => return Ok(()),
            By::Mappings => Held::Bytes(memory),
            By::Ranges { space } => match user_part(space, user) {
                Some(part) if memory >= part.range.len() => Held::One(part),
                // Which part is memory is not known: if it is what is charged already, at best
                // that much is not.
                Some(part) => Held::Bytes(memory.saturating_sub(self.account.charged(part))),
                None => Held::Bytes(memory),
            },
        };
        self.hold(held)
    }

    /// Holds this instead.
    #[inline(always)]
    fn hold(&mut self, held: Held) -> Result<(), OverLimit> {
        self.account.exchange(&self.held, &held)?;
        self.held = held;
        Ok(())
    }

    /// Gives all parts back but the first `keep`.
    #[inline(never)]
    fn give_back(&mut self, keep: usize) {
        match &mut self.held {
            Held::One(part) if keep == 0 => {
                self.account.give_back(*part);
                self.held = Held::NOTHING;
            }
            Held::Many(parts) => {
                let parts = parts.drain(keep..).rev();
                parts.for_each(|part| self.account.give_back(part));
            }
            Held::Bytes(_) | Held::One(_) => {}
        }
    }
}

impl Account {
    fn give_back(&self, part: Part) {
        // Before the lock, and so dropped behind it.
        let mut spare = Spare::default();
        let mut totals = self.totals.lock();
        totals.used -= totals.change(Change::Take, part);
        totals.ledger(part).give_back(&mut spare);
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        match self.held {
            Held::Bytes(0) => {}
            Held::Bytes(bytes) => self.account.totals.lock().used -= bytes,
            Held::One(_) | Held::Many(_) => self.give_back(0),
        }
    }
}
