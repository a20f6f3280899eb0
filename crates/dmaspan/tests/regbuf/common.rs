//! Memory, its users, and what buffers of it must look like.

use std::sync::Arc;

use dmaspan::regbuf::{Buffer, BufferRequest, Pinned, Registry};
use dmaspan::{Account, PhysAddr, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
pub(crate) use dmaspan_sim::rng::Rng;

pub(crate) const BASE: u64 = 1 << 32;
pub(crate) const USER: u64 = 0x7f00_0000_0000;

pub(crate) type Of<P> = Registry<Pinned<P>>;

pub(crate) fn size(value: u64) -> usize {
    value.try_into().unwrap()
}

pub(crate) fn user(start: u64, len: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(start), len).unwrap()
}

/// What bytes of a buffer a range is.
pub(crate) fn part(buffer: UserRange, offset: u64, len: u64) -> UserRange {
    user(buffer.start().get() + offset, len)
}

pub(crate) fn span(start: u64, len: u64) -> Span {
    Span::new(PhysAddr::new(start), len).unwrap()
}

/// One user of some memory, who may have `limit` bytes pinned.
pub(crate) struct World {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) space: Arc<SimSpace>,
    pub(crate) account: Arc<Account>,
    pub(crate) page_lg2: u32,
}

impl World {
    pub(crate) fn new(bytes: u64, page_lg2: u32) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(BASE), bytes, page_lg2).unwrap());
        Self::of(memory, Account::unlimited())
    }

    pub(crate) fn of(memory: Arc<SimMemory>, account: Arc<Account>) -> Self {
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let page_lg2 = memory.granule_lg2();
        Self { memory, space, account, page_lg2 }
    }

    pub(crate) fn with_limit(self, limit: u64) -> Self {
        Self { account: Account::new(limit), ..self }
    }

    pub(crate) fn page(&self) -> u64 {
        1 << self.page_lg2
    }

    /// Memory of the user's: blocks by their first page of the memory and how many pages.
    pub(crate) fn map_blocks(&self, blocks: &[(u64, u64)]) -> UserRange {
        let page = self.page();
        let spans: Vec<_> =
            blocks.iter().map(|(first, count)| span(BASE + first * page, count * page)).collect();
        spans.iter().for_each(|span| self.memory.allocate_at(*span).unwrap());
        self.space.map(UserAddr::new(USER), &spans).unwrap()
    }

    pub(crate) fn map_folios(&self, orders: &[u32], seed: u64) -> UserRange {
        let folios = self.memory.allocate_folios(orders, seed).unwrap();
        self.space.map(UserAddr::new(USER), &folios).unwrap()
    }

    pub(crate) fn pinner(&self) -> SimPinner {
        SimPinner::new(Arc::clone(&self.memory))
    }

    pub(crate) fn source(&self) -> Pinned<SimPinner> {
        let (space, account) = (Arc::clone(&self.space), Arc::clone(&self.account));
        Pinned::new(Arc::new(self.pinner()), space, account, self.page_lg2)
    }

    pub(crate) fn registry(&self) -> Of<SimPinner> {
        Registry::new(self.source())
    }

    pub(crate) fn buffer(&self, user: UserRange) -> Buffer<PhysAddr> {
        self.source().buffer(user, Prot::READ_WRITE).unwrap()
    }

    /// Where each page under a range is: the list that Linux had before it coalesced.
    pub(crate) fn page_list(&self, user: UserRange) -> Vec<u64> {
        let first = user.start().get() >> self.page_lg2;
        let last = user.last().get() >> self.page_lg2;
        let frame = |page| self.space.frame_at(UserAddr::new(page << self.page_lg2)).unwrap().0;
        (first..=last).map(|page| frame(page).get()).collect()
    }

    /// The longest contiguous pieces of a range, by a walk through its pages.
    pub(crate) fn runs(&self, user: UserRange) -> Vec<Span> {
        let mut runs: Vec<Span> = Vec::new();
        let mut at = user.start().get();
        for page in self.page_list(user) {
            let inside = at & (self.page() - 1);
            let len = (self.page() - inside).min(user.last().get() - at + 1);
            let next = span(page + inside, len);
            at = at.wrapping_add(len);
            match runs.last_mut().and_then(|last| Some((last.join(next)?, last))) {
                Some((joined, last)) => *last = joined,
                None => runs.push(next),
            }
        }
        runs
    }

    pub(crate) fn assert_idle(&self) {
        assert_eq!((self.memory.pinned_frames(), self.account.used()), (0, 0));
        assert_eq!(self.memory.violations(), []);
    }
}

/// Part of pieces, by a walk through them from the first on.
pub(crate) fn walk(pieces: &[Span], mut offset: u64, mut len: u64) -> Vec<Span> {
    let mut found = Vec::new();
    for piece in pieces {
        if len == 0 {
            break;
        }
        if offset >= piece.len() {
            offset -= piece.len();
            continue;
        }
        let rest = (piece.len() - offset).min(len);
        found.push(span(piece.paddr().get() + offset, rest));
        (offset, len) = (0, len - rest);
    }
    assert_eq!(len, 0);
    found
}

pub(crate) fn requests(users: &[UserRange]) -> Vec<BufferRequest> {
    users.iter().map(|user| BufferRequest::new(*user)).collect()
}
