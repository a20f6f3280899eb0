//! `Pinner`: pins that end in the middle, kinds that alternate, numbers that nobody may rely on,
//! and device memory that goes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dmaspan::account::Counting;
use dmaspan::container::{Attach, Interrupts};
use dmaspan::iommu::Domain;
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::regbuf::Pinned;
use dmaspan::{
    Account, Container, Errno, Iova, IovaRange, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
};
use parking_lot::Mutex;

use crate::common::{Books, PAGE, Script, at_every_call, table};

const RW: Prot = Prot::READ_WRITE;

#[derive(Debug, thiserror::Error)]
#[error("planted")]
struct Planted;

struct Pins {
    books: Arc<Books>,
    script: Arc<Script>,
    /// Device memory that may be mapped, until all of it goes.
    devices: Mutex<Vec<Span>>,
    has_gone: AtomicBool,
}

type Failed = PinFailed<(), Planted>;

// SAFETY: frames are nobody else's until they are unpinned, and numbers. Device memory goes when it
// was revoked. Spans cover the range, and spaces are one.
unsafe impl Pinner for Pins {
    type Space = ();
    type Address = PhysAddr;
    type Pin = ();
    type Error = Planted;

    fn pin(
        &self,
        (): &(),
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<(), Failed> {
        let pages = range.checked_len().unwrap() / PAGE;
        for page in 0..pages {
            let pin = (page > 0).then_some(());
            if self.script.turn() {
                return Err(PinFailed { range, error: PinError::Failed(Planted), pin });
            }
            let span = self.books.fresh(0, PAGE);
            let is_device = page % 3 == 2 && !self.has_gone.load(Ordering::Relaxed);
            let kind = if is_device { Kind::Mmio } else { Kind::Memory };
            self.books.grant(span, RW);
            if is_device {
                self.devices.lock().push(span);
            }
            let pushed = match page % 2 {
                0 => sink.push(span, kind),
                _ => (sink.push_all(&[span], kind) == 1).then_some(()).ok_or(Stopped),
            };
            if let Err(stopped) = pushed {
                if !is_device {
                    self.books.take_back(span, RW);
                }
                return Err(PinFailed { range, error: stopped.into(), pin });
            }
        }
        let _ = self.script.turn();
        Ok(())
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), spans: &[Span], kind: Kind, _dirty: Dirty) {
        self.script.turn_in_lock();
        if kind == Kind::Memory {
            spans.iter().for_each(|span| self.books.take_back(*span, RW));
        }
        self.script.turn_in_lock();
    }

    fn release(&self, _: Promise<'_>, (): ()) {
        self.script.turn_in_lock();
    }

    fn space_id(&self, (): &()) -> u64 {
        self.script.turn_in_lock();
        3
    }

    fn chargeable(&self, (): &(), _range: UserRange) -> u64 {
        let _ = self.script.turn();
        self.script.any() >> 1
    }

    fn knows_frames(&self) -> bool {
        let _ = self.script.turn();
        self.script.any().is_multiple_of(2)
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Planted> {
        let _ = self.script.turn();
        Err(Planted)
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Planted> {
        let _ = self.script.turn();
        Err(Planted)
    }

    fn errno(&self, _: &Planted) -> Errno {
        let _ = self.script.turn();
        Errno::EIO
    }
}

fn user(page: u64, pages: u64) -> UserRange {
    UserRange::from_len(UserAddr::new(page * PAGE), pages * PAGE).unwrap()
}

fn iovas(page: u64, pages: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

#[test]
fn a_hostile_pinner_leaves_no_device_at_what_was_unpinned_or_revoked() {
    for counting in [Counting::Frames, Counting::Ranges, Counting::Mappings] {
        at_every_call(|script| {
            let (books, (table, tlb)) = (Arc::new(Books::default()), table());
            let looks = (Arc::clone(&books), tlb.clone());
            script.on_look(move || looks.0.look(&looks.1));
            let pins = Pins {
                books: Arc::clone(&books),
                script: Arc::clone(script),
                devices: Mutex::default(),
                has_gone: AtomicBool::new(false),
            };
            let account = Account::with_counting(u64::MAX, counting);
            let container = Container::<_, parking_lot::RawMutex>::new(pins, account);
            let domain = Domain::new(table, tlb.clone()).unwrap();
            container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
            let container = Arc::new(container);
            let weak = Arc::downgrade(&container);
            script.on_reenter(move || {
                let Some(container) = weak.upgrade() else { return };
                let _ = container.map(&(), user(60, 1), Iova::new(30 * PAGE), RW);
                let _ = container.unmap(iovas(30, 1));
            });
            let look = || books.look(&tlb);
            for (page, pages) in [(0, 4), (5, 1), (8, 7)] {
                let iova = Iova::new(page * PAGE);
                let _ = script.run(|| container.map(&(), user(page, pages), iova, RW));
                look();
            }
            assert!(!script.is_quiet() || books.reached() > 0);
            let _ = script.run(|| container.read(Iova::new(0), &mut [0; 8]));
            let _ = script.run(|| container.unmap(iovas(0, 5)));
            look();
            if let Some(Ok(_)) = script.run(|| container.revoke(&(), user(0, 64))) {
                let pins = container.pinner();
                pins.has_gone.store(true, Ordering::Relaxed);
                let devices = std::mem::take(&mut *pins.devices.lock());
                devices.iter().for_each(|span| books.take_back(*span, RW));
            }
            look();
            let _ = script.run(|| container.map(&(), user(20, 3), Iova::new(20 * PAGE), RW));
            look();
            let _ = script.run(|| container.unmap_all());
            look();
            assert!(!script.is_quiet() || books.granted() == 0, "all was given back");
            let _ = script.run(|| drop(container));
            look();
        });
    }
}

#[test]
fn a_hostile_pinner_gets_back_what_a_registered_buffer_pinned_at_most_once() {
    at_every_call(|script| {
        let books = Arc::new(Books::default());
        let pins = Pins {
            books: Arc::clone(&books),
            script: Arc::clone(script),
            devices: Mutex::default(),
            has_gone: AtomicBool::new(true),
        };
        let pinned = Pinned::new(Arc::new(pins), (), Account::new(u64::MAX), 12);
        let buffer = script.run(|| pinned.buffer(user(3, 5), RW));
        if let Some(Ok(buffer)) = buffer {
            let held = buffer.segments().iter().map(|span| span.len() / PAGE).sum::<u64>();
            assert!(books.granted() as u64 >= held, "the buffer keeps what it has");
            let _ = script.run(|| drop(buffer));
        }
        assert!(!script.is_quiet() || books.granted() == 0);
    });
}
