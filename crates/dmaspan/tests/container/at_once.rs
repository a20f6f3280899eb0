//! Spans that a pinner pushes many at a time.

use dmaspan::container::{Attach, Error, Interrupts};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::{
    Account, Container, Errno, Iova, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::iotlb::Iotlb;
use parking_lot::Mutex;

use crate::common::{PROT, range, walker};

const PAGE: u64 = 4096;
const USER: u64 = 0x7f00_0000_0000;

/// A pinner that has spans already, and pushes as many at a time as it is told.
struct Ready {
    spans: Vec<Span>,
    at_once: usize,
    taken: Mutex<Vec<Span>>,
    unpinned: Mutex<Vec<Span>>,
}

impl Ready {
    fn new(spans: Vec<Span>, at_once: usize) -> Self {
        Self { spans, at_once, taken: Mutex::default(), unpinned: Mutex::default() }
    }

    fn user(&self) -> UserRange {
        let bytes = self.spans.iter().map(|span| span.len()).sum();
        UserRange::from_len(UserAddr::new(USER), bytes).unwrap()
    }
}

#[derive(Debug, thiserror::Error)]
#[error("no bytes are copied here")]
struct NotCopied;

// SAFETY: no device of these tests uses memory. The spans are numbers.
unsafe impl Pinner for Ready {
    type Address = PhysAddr;
    type Space = ();
    type Pin = ();
    type Error = NotCopied;

    fn pin(
        &self,
        _space: &(),
        _range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<(), PinFailed<(), NotCopied>> {
        for spans in self.spans.chunks(self.at_once) {
            let taken = sink.push_all(spans, Kind::Memory);
            self.taken.lock().extend(&spans[..taken]);
            if taken < spans.len() {
                let range = self.user();
                return Err(PinFailed { range, error: PinError::Stopped, pin: Some(()) });
            }
        }
        Ok(())
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), spans: &[Span], _: Kind, _: Dirty) {
        self.unpinned.lock().extend(spans);
    }

    fn release(&self, _: Promise<'_>, (): ()) {}

    fn space_id(&self, (): &()) -> u64 {
        0
    }

    fn read(&self, (): &(), _: UserAddr, _: &mut [u8]) -> Result<(), NotCopied> {
        Err(NotCopied)
    }

    fn write(&self, (): &(), _: UserAddr, _: &[u8]) -> Result<(), NotCopied> {
        Err(NotCopied)
    }

    fn errno(&self, _: &NotCopied) -> Errno {
        Errno::EFAULT
    }
}

type Mapping<const BATCH: usize> = Container<Ready, parking_lot::RawMutex, BATCH>;

fn container<const BATCH: usize>(pinner: Ready, table_bytes: u64) -> Mapping<BATCH> {
    let memory = Arena::new(PhysAddr::new(0x4000_0000), table_bytes);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, memory.clone()).unwrap();
    let iotlb = Iotlb::new(walker(&table), memory);
    let domain = Domain::new(table, iotlb).unwrap();
    let container = Mapping::of_batch(pinner, Account::new(u64::MAX));
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    container
}

/// Pages of which three in four are neighbours of the one before.
fn pages(count: u64) -> Vec<Span> {
    let page = |n| PhysAddr::new((n + n / 4 * 16) * PAGE);
    (0..count).map(|n| Span::new(page(n), PAGE).unwrap()).collect()
}

fn bytes(spans: &[Span]) -> u64 {
    spans.iter().map(|span| span.len()).sum()
}

#[test]
fn spans_that_are_pushed_at_once_become_the_mapping_that_single_ones_become() {
    fn check<const BATCH: usize>() {
        let censuses = [1, 2, 3, 64, 65, 1000].map(|at_once| {
            let container = container::<BATCH>(Ready::new(pages(1000), at_once), 64 << 20);
            let user = container.pinner().user();
            container.map(&(), user, Iova::new(0), PROT).unwrap();
            let census: Vec<_> = container.census().sizes().collect();
            assert_eq!(container.unmap(range(0, 1000 * PAGE)).unwrap(), 1000 * PAGE);
            let unpinned = container.pinner().unpinned.lock();
            assert_eq!(bytes(&unpinned), 1000 * PAGE);
            assert!(unpinned.iter().zip(unpinned.iter().skip(1)).all(|(one, next)| one != next));
            census
        });
        assert!(censuses.iter().all(|census| *census == censuses[0]), "{censuses:?}");
    }
    check::<1>();
    check::<2>();
    check::<64>();
}

#[test]
fn a_mapping_that_fails_among_spans_pushed_at_once_gives_back_those_that_it_took_and_no_others() {
    for at_once in [1, 63, 1024, 4096] {
        // Memory for four tables alone: the second 2 MiB have none.
        let spans = (0..4096).map(|n| Span::new(PhysAddr::new(n * 2 * PAGE), PAGE).unwrap());
        let pinner = Ready::new(spans.collect(), at_once);
        let container = container::<64>(pinner, 4 * PAGE);
        let user = container.pinner().user();
        let error = container.map(&(), user, Iova::new(0), PROT).unwrap_err();
        assert!(matches!(error, Error::Map { .. }), "{error}");
        let Ready { taken, unpinned, .. } = container.pinner();
        let taken = bytes(&taken.lock());
        assert!((512 * PAGE..1024 * PAGE).contains(&taken), "{at_once}: {taken}");
        assert_eq!(bytes(&unpinned.lock()), taken, "{at_once}");
        assert_eq!((container.mappings(), container.account().used()), (0, 0));
    }
}
