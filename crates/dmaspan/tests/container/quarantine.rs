//! Hardware that does not answer, and pinners that do not keep to what they say.

use std::sync::Arc;

use dmaspan::container::Error;
use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::{
    Account, Container, Errno, Iova, PhysAddr, Promise, Prot, Span, UserAddr, UserRange,
};
use dmaspan_sim::fault::Faults;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};

use crate::common::{PROT, faulty_domain, for_all_granules};

for_all_granules!(
    a_mapping_that_hardware_was_not_told_about_is_taken_back,
    a_failed_map_whose_memory_a_device_may_use_keeps_it,
    pinners_that_find_too_much_or_too_little_are_refused,
);

fn a_mapping_that_hardware_was_not_told_about_is_taken_back<const G: u32>() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 << G, G).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let spans = memory.allocate_scattered(8 << G, 1).unwrap();
    let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
    let (domain, tables, iotlb) = faulty_domain::<G>(&Faults::none());
    let account = Account::new(u64::MAX);
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(SimPinner::new(Arc::clone(&memory)), domain, Arc::clone(&account));
    iotlb.fail_next_sync_maps(1);
    let error = container.map(&space, user, Iova::new(0), PROT).unwrap_err();
    assert!(matches!(error, Error::Map { .. }), "{error}");
    assert_eq!((memory.pinned_frames(), account.used(), tables.tables()), (0, 0, 1));
    assert_eq!(memory.violations(), []);
}

fn a_failed_map_whose_memory_a_device_may_use_keeps_it<const G: u32>() {
    let memory = Arc::new(SimMemory::new(PhysAddr::new(1 << 40), 64 << G, G).unwrap());
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    let spans = memory.allocate_scattered(8 << G, 1).unwrap();
    let user = space.map(UserAddr::new(1 << 32), &spans).unwrap();
    let (domain, _, iotlb) = faulty_domain::<G>(&Faults::none());
    let account = Account::new(u64::MAX);
    let container: Container<_, parking_lot::RawMutex> =
        Container::with_domain(SimPinner::new(Arc::clone(&memory)), domain, Arc::clone(&account));
    iotlb.fail_next_sync_maps(1);
    iotlb.fail_next_invalidations(u64::MAX);
    assert!(container.map(&space, user, Iova::new(0), PROT).is_err());
    assert_eq!((memory.pinned_frames(), account.used()), (8, 8 << G));
    assert_eq!(container.mappings(), 1);
    let error = container.map(&space, user, Iova::new(0), PROT).unwrap_err();
    assert!(matches!(error, Error::Quarantined { .. }), "{error}");
    assert_eq!(container.errno(&error), Errno::EBUSY);
    assert_eq!(account.used(), 8 << G, "a refused map is not charged");
    iotlb.fail_next_invalidations(0);
    container.map(&space, user, Iova::new(0), PROT).unwrap();
    assert_eq!((memory.pinned_frames(), account.used()), (8, 8 << G), "each once");
    assert_eq!(memory.violations(), []);
}

use dmaspan::DmaSpace as _;

type Said = Result<(), PinFailed<(), std::convert::Infallible>>;

/// Pushes what it likes for a range, all of it one batch after the other, and then says what it
/// likes.
pub(crate) struct Liar<F> {
    pub(crate) pushes: F,
    pub(crate) says: fn(UserRange) -> Said,
}

// SAFETY: the spans are of no memory, and no device of these tests touches them.
unsafe impl<F: Fn(u64) -> Vec<(Span, Kind)> + Send + Sync> Pinner for Liar<F> {
    type Address = PhysAddr;
    type Space = ();
    type Pin = ();
    type Error = std::convert::Infallible;

    fn pin(&self, (): &(), range: UserRange, _prot: Prot, sink: &mut dyn SpanSink) -> Said {
        for (span, kind) in (self.pushes)(range.checked_len().unwrap()) {
            let stopped = |_| PinFailed { range, error: PinError::Stopped, pin: Some(()) };
            sink.push(span, kind).map_err(stopped)?;
        }
        (self.says)(range)
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), _spans: &[Span], _kind: Kind, _dirty: Dirty) {}

    fn release(&self, _: Promise<'_>, (): ()) {}

    fn space_id(&self, (): &()) -> u64 {
        0
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Self::Error> {
        Ok(())
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Self::Error> {
        Ok(())
    }

    fn errno(&self, error: &Self::Error) -> Errno {
        match *error {}
    }
}

fn pinners_that_find_too_much_or_too_little_are_refused<const G: u32>() {
    let g = 1i64 << G;
    for bytes_more in [-4 * g, -2 * g, 2 * g, 64 * g] {
        // Contiguous twice, of another length than the range has.
        let pushes = move |len: u64| {
            let step = len.saturating_add_signed(bytes_more) / 2;
            let at = |n: u64| PhysAddr::new((1 << 30) + n * 4 * step);
            (0..2).map(|n| (Span::new(at(n), step).unwrap(), Kind::Memory)).collect()
        };
        let liar = Liar { pushes, says: |_| Ok(()) };
        let (domain, tables, _) = faulty_domain::<G>(&Faults::none());
        let account = Account::new(u64::MAX);
        let container: Container<_, parking_lot::RawMutex> =
            Container::with_domain(liar, domain, Arc::clone(&account));
        let user = UserRange::from_len(UserAddr::new(0), 8 << G).unwrap();
        let error = container.map(&(), user, Iova::new(0), PROT).unwrap_err();
        let Error::PinnedLen { user: named, found } = error else { panic!("{error}") };
        assert_eq!(named, user);
        assert_eq!(i128::from(found), i128::from((8 << G) + bytes_more));
        assert_eq!((account.used(), container.mappings(), tables.tables()), (0, 0, 1));
    }
}
