//! `UserTables`: page tables that change between a look-up and a pin.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::container::{Attach, Interrupts};
use dmaspan::follow::{FaultIn, LeafError, LeafPinner, UserLeaf, UserTables};
use dmaspan::iommu::Domain;
use dmaspan::pin::{Dirty, Kind, PinError, Pinner, SpanSink, Stopped};
use dmaspan::{
    Account, Container, Errno, Iova, IovaRange, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
};
use parking_lot::Mutex;

use crate::common::{Books, PAGE, Script, at_every_call, table};

const RW: Prot = Prot::READ_WRITE;
/// Pages of the user, and of a leaf at first.
const PAGES: u64 = 4;

#[derive(Debug, thiserror::Error)]
#[error("planted")]
struct Planted;

/// What the tables say of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    frame: u64,
    prot: Prot,
    kind: Kind,
    /// Another process has it too, until either of them writes it.
    is_shared: bool,
}

/// What happens to the tables meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    /// Its content is in other frames now.
    Moves,
    /// Another thread calls fork(2).
    Forks,
    /// mprotect(2).
    WriteProtected,
    /// The address leads to registers at the same number.
    BecomesDevice,
    /// The same frames by smaller leaves.
    Splits,
    /// munmap(2).
    Goes,
    /// All of it, one after the other.
    Any,
}

struct User {
    pages: Mutex<BTreeMap<u64, Page>>,
    /// Pages of a leaf.
    leaf: AtomicU64,
    next_frame: AtomicU64,
    change: Mutex<Change>,
    pins: Mutex<BTreeMap<u64, u64>>,
    books: Books,
    script: Arc<Script>,
    turns: AtomicU64,
}

impl User {
    fn new(change: Change, script: &Arc<Script>) -> Arc<Self> {
        let page = |n| {
            let frame = 0x8_0000 + n;
            (n, Page { frame, prot: RW, kind: Kind::Memory, is_shared: false })
        };
        Arc::new(Self {
            pages: Mutex::new((0..PAGES).map(page).collect()),
            leaf: PAGES.into(),
            next_frame: 0x9_0000.into(),
            change: Mutex::new(change),
            pins: Mutex::default(),
            books: Books::default(),
            script: Arc::clone(script),
            turns: AtomicU64::new(0),
        })
    }

    fn is_pinned(&self, frame: u64) -> bool {
        self.pins.lock().get(&frame).is_some_and(|pins| *pins > 0)
    }

    /// As a kernel does, of no page that is pinned: those are neither moved nor shared.
    fn change(&self, change: Change) {
        let mut pages = self.pages.lock();
        let free = |page: &&mut Page| !self.is_pinned(page.frame);
        match change {
            Change::Nothing => {}
            Change::Moves => {
                let first = self.next_frame.fetch_add(PAGES, Ordering::Relaxed);
                for (n, page) in pages.iter_mut() {
                    if !self.is_pinned(page.frame) {
                        *page = Page { frame: first + n, is_shared: false, ..*page };
                    }
                }
            }
            Change::Forks => pages.values_mut().filter(free).for_each(|page| {
                page.is_shared = page.kind == Kind::Memory;
            }),
            Change::WriteProtected => pages.values_mut().for_each(|page| page.prot = Prot::READ),
            Change::BecomesDevice => {
                pages.values_mut().filter(free).for_each(|page| page.kind = Kind::Mmio);
            }
            Change::Splits => self.leaf.store(1, Ordering::Relaxed),
            Change::Goes => pages.retain(|_, page| self.is_pinned(page.frame)),
            Change::Any => {
                drop(pages);
                let turn = self.turns.fetch_add(1, Ordering::Relaxed);
                self.leaf.store(1 + turn % 3, Ordering::Relaxed);
                self.change(match turn % 3 {
                    0 => Change::Forks,
                    1 => Change::Moves,
                    _ => Change::Nothing,
                });
            }
        }
    }

    /// The longest leaf from `at` on, as pages of it are alike and follow each other.
    fn leaf_at(&self, at: UserAddr) -> Option<UserLeaf> {
        let pages = self.pages.lock();
        let leaf = self.leaf.load(Ordering::Relaxed);
        let at = at.get() / PAGE;
        let page = *pages.get(&at)?;
        let follows = |n: &u64| {
            let next = Page { frame: page.frame + n, ..page };
            pages.get(&(at + n)) == Some(&next)
        };
        let len = (0..leaf - at % leaf).take_while(follows).count() as u64;
        let user = UserRange::from_len(UserAddr::new(at * PAGE), len * PAGE).unwrap();
        let prot = if page.is_shared { Prot::READ } else { page.prot };
        let start = PhysAddr::new(page.frame * PAGE);
        Some(UserLeaf { user, start, kind: page.kind, prot })
    }

    fn frames(frames: Span) -> impl Iterator<Item = u64> {
        frames.paddr().get() / PAGE..=frames.last().get() / PAGE
    }
}

/// A type of these tests' own.
#[derive(Clone)]
struct Tables(Arc<User>);

// SAFETY: frames are pinned while the tables have the whole leaf, for an access that it permits,
// and never where another process has them, too. While they are pinned they stay the user's. They
// are numbers, to which nothing refers. Nobody takes device memory away.
unsafe impl UserTables for Tables {
    type Space = ();
    type Address = PhysAddr;
    type Error = Planted;

    fn leaf(&self, (): &(), at: UserAddr) -> Option<UserLeaf> {
        if self.0.script.turn() {
            return None;
        }
        let leaf = self.0.leaf_at(at);
        // Another thread comes in between.
        let mut change = self.0.change.lock();
        let once = if *change == Change::Any { Change::Any } else { Change::Nothing };
        let change = std::mem::replace(&mut *change, once);
        self.0.change(change);
        leaf
    }

    fn pin(&self, (): &(), leaf: &UserLeaf, at: UserAddr, frames: Span, access: Prot) -> bool {
        let fails = self.0.script.turn();
        let is_shared =
            self.0.pages.lock().values().any(|page| {
                page.is_shared && User::frames(frames).any(|frame| frame == page.frame)
            });
        // The leaf may begin before the part.
        let now = self.0.leaf_at(leaf.user.start());
        if fails || is_shared || now != Some(*leaf) || !leaf.prot.contains(access) {
            return false;
        }
        assert_eq!(leaf.kind, Kind::Memory);
        assert_eq!(
            frames.paddr().get() - leaf.start.get(),
            at.get() - leaf.user.start().get(),
            "the part is of the leaf"
        );
        let mut pins = self.0.pins.lock();
        User::frames(frames).for_each(|frame| *pins.entry(frame).or_default() += 1);
        self.0.books.grant(frames, RW);
        true
    }

    fn unpin(&self, _: Promise<'_>, frames: Span, _dirty: Dirty) {
        self.0.script.turn_in_lock();
        self.0.books.take_back(frames, RW);
        let mut pins = self.0.pins.lock();
        for frame in User::frames(frames) {
            *pins.get_mut(&frame).unwrap() -= 1;
        }
    }

    fn fault_in(&self, (): &(), at: UserAddr, prot: Prot) -> Result<FaultIn, Planted> {
        if self.0.script.turn() {
            return Err(Planted);
        }
        let mut pages = self.0.pages.lock();
        let page = pages.get_mut(&(at.get() / PAGE)).filter(|page| page.prot.contains(prot));
        let Some(page) = page else { return Ok(FaultIn::Refused) };
        if page.is_shared {
            // The other one keeps the old frame.
            page.frame = self.0.next_frame.fetch_add(1, Ordering::Relaxed);
            page.is_shared = false;
        }
        Ok(FaultIn::LookAgain)
    }

    fn space_id(&self, (): &()) -> u64 {
        7
    }

    fn memory_bytes(&self, (): &(), _range: UserRange) -> u64 {
        let _ = self.0.script.turn();
        self.0.script.any()
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Planted> {
        Err(Planted)
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Planted> {
        Err(Planted)
    }

    fn errno(&self, _: &Planted) -> Errno {
        let _ = self.0.script.turn();
        Errno::EIO
    }
}

/// Keeps spans as they come.
#[derive(Default)]
struct Spans(Vec<(Span, Kind)>);

impl SpanSink for Spans {
    fn push(&mut self, span: Span, kind: Kind) -> Result<(), Stopped> {
        self.0.push((span, kind));
        Ok(())
    }
}

fn whole() -> UserRange {
    UserRange::from_len(UserAddr::new(0), PAGES * PAGE).unwrap()
}

#[test]
fn a_device_gets_what_the_tables_say_when_it_is_pinned_whatever_changed_after_the_look_up() {
    for wanted in [Prot::READ, RW] {
        for change in [
            Change::Nothing,
            Change::Moves,
            Change::Forks,
            Change::WriteProtected,
            Change::BecomesDevice,
            Change::Splits,
            Change::Goes,
        ] {
            let user = User::new(change, &Arc::default());
            let pinner = LeafPinner::new(Tables(Arc::clone(&user)));
            let mut spans = Spans::default();
            let result = pinner.pin(&(), whole(), wanted, &mut spans);
            let frames = spans.0.iter().flat_map(|(span, _)| User::frames(*span));
            let frames: Vec<u64> = frames.collect();
            let now: Vec<u64> = user.pages.lock().values().map(|page| page.frame).collect();
            let first = match change {
                Change::Moves | Change::Forks => 0x9_0000,
                _ => 0x8_0000,
            };
            let (at, range) = (UserAddr::new(0), whole());
            match (change, result) {
                (Change::Goes, Err(failed)) => {
                    assert!(matches!(failed.error, PinError::Failed(LeafError::Hole { .. })));
                }
                (Change::WriteProtected, Err(failed)) if wanted == RW => {
                    let PinError::Failed(LeafError::Access { permitted, .. }) = failed.error else {
                        panic!("{failed}")
                    };
                    assert_eq!((failed.range, permitted), (range, Prot::READ), "{at}");
                }
                (Change::WriteProtected, Ok(_)) if wanted == RW => panic!("it may only be read"),
                (Change::Goes, Ok(_)) => panic!("nothing is there"),
                (_, Err(failed)) => panic!("{change:?}: {failed}"),
                (_, Ok(pin)) => {
                    let expected: Vec<u64> = (first..first + PAGES).collect();
                    assert_eq!((&frames, &now), (&expected, &expected), "{change:?} {wanted:?}");
                    let is_device = change == Change::BecomesDevice;
                    let pinned = if is_device { 0 } else { PAGES * PAGE };
                    assert_eq!(pin.pinned(), pinned, "{change:?}");
                    for (span, kind) in spans.0 {
                        assert_eq!(kind == Kind::Mmio, is_device);
                        let is_pinned = User::frames(span).all(|frame| user.is_pinned(frame));
                        assert_ne!(is_pinned, is_device, "{change:?}");
                    }
                }
            }
            let old = (0x8_0000..0x8_0000 + PAGES).filter(|frame| user.is_pinned(*frame)).count();
            let is_old = !matches!(change, Change::Moves | Change::Forks);
            assert!(is_old || old == 0, "{change:?}: what another process has was pinned");
        }
    }
}

#[test]
fn a_hostile_user_tables_gives_no_device_what_is_not_pinned() {
    at_every_call(|script| {
        let user = User::new(Change::Any, script);
        let (table, tlb) = table();
        let domain = Domain::new(table, tlb.clone()).unwrap();
        let pinner = LeafPinner::new(Tables(Arc::clone(&user)));
        let container = Container::<_, parking_lot::RawMutex>::new(pinner, Account::unlimited());
        container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
        let container = Arc::new(container);
        let (seen, looks) = (Arc::clone(&user), tlb.clone());
        script.on_look(move || seen.books.look(&looks));
        let weak = Arc::downgrade(&container);
        script.on_reenter(move || {
            let Some(container) = weak.upgrade() else { return };
            let page = UserRange::from_len(UserAddr::new(PAGE), PAGE).unwrap();
            let iova = Iova::new(0x2_0000);
            let _ = container.map(&(), page, iova, RW);
            let _ = container.unmap(IovaRange::from_len(iova, PAGE).unwrap());
        });
        for round in 0..2 {
            let _ = script.run(|| container.map(&(), whole(), Iova::new(0x1_0000 * round), RW));
            user.books.look(&tlb);
        }
        let _ =
            script.run(|| container.unmap(IovaRange::from_len(Iova::new(0), 0x1_0000).unwrap()));
        user.books.look(&tlb);
        let _ = script.run(|| container.unmap_all());
        user.books.look(&tlb);
    });
}
