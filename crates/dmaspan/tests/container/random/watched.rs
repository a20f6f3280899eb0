//! A pinner that looks whether devices reach what is unpinned.

use std::collections::BTreeMap;
use std::sync::Arc;

use dmaspan::pin::{Dirty, Kind, PinFailed, Pinner, SpanSink};
use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::fault::Faulty;
use dmaspan_sim::memory::{SimPin, SimPinner, SimSpace};
use parking_lot::Mutex;

use super::views::View;
use crate::common::as_inner;

/// What to look at.
#[derive(Default)]
pub(crate) struct Watch {
    /// All domains that hardware may use.
    pub(crate) views: Mutex<Vec<Arc<dyn View>>>,
    /// For the address of each frame the IOVAs that may lead there.
    pub(crate) leading: Mutex<BTreeMap<u64, Vec<u64>>>,
}

impl Watch {
    /// A frame that devices reach keeps as many pins as they have ways to it.
    fn check(&self, pinner: &SimPinner, span: Span) {
        let memory = pinner.memory();
        let leading = self.leading.lock();
        let first = span.paddr().get();
        for frame in (first..=span.last().get()).step_by(1 << memory.granule_lg2()) {
            let Some(iovas) = leading.get(&frame) else { continue };
            let pins = memory.pins(PhysAddr::new(frame)).unwrap();
            for view in self.views.lock().iter() {
                let leads =
                    |iova: &&u64| view.translate(**iova).is_some_and(|leaf| leaf.paddr == frame);
                let ways = iovas.iter().filter(leads).count();
                assert!(
                    ways < usize::try_from(pins).unwrap(),
                    "{frame:#x} loses a pin of {pins} while devices have {ways} ways to it"
                );
            }
        }
    }
}

pub(crate) struct Watched {
    pub(crate) inner: Faulty<SimPinner>,
    pub(crate) watch: Arc<Watch>,
}

// SAFETY: pins and spans are the inner pinner's.
unsafe impl Pinner for Watched {
    type Address = PhysAddr;
    type Space = Arc<SimSpace>;
    type Pin = SimPin;
    type Error = <Faulty<SimPinner> as Pinner>::Error;

    fn pin(
        &self,
        space: &Arc<SimSpace>,
        range: UserRange,
        prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<SimPin, PinFailed<SimPin, Self::Error>> {
        self.inner.pin(space, range, prot, sink)
    }

    fn unpin(
        &self,
        promise: Promise<'_>,
        pin: &mut SimPin,
        spans: &[Span],
        kind: Kind,
        dirty: Dirty,
    ) {
        for span in spans {
            if kind == Kind::Memory {
                self.watch.check(self.inner.inner(), *span);
            }
            self.inner.unpin(promise, pin, &[*span], kind, dirty);
        }
    }

    as_inner!(inner: release space_id counts copies errno);
}
