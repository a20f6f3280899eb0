//! A pinner of one's own, and a registry of buffers over it.
//!
//! A kernel or a hypervisor knows where a guest's pages are. Its pinner keeps them there while a
//! device may use them, by a count for each frame, and pushes them as spans.

// ANCHOR: head
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex};

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::regbuf::{BufferRequest, Pinned, Registry};
use dmaspan::{Account, Direction, Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};

const PAGE: u64 = 4096;
// ANCHOR_END: head

/// A page of the guest has no frame.
#[derive(Debug)]
struct NoFrame(UserAddr);

impl fmt::Display for NoFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the guest has no page at {}", self.0)
    }
}

impl Error for NoFrame {}

// ANCHOR: pinner
/// Where a guest's pages are, and how often each is pinned: one that is, does not move.
#[derive(Default)]
struct Guest {
    frames: BTreeMap<u64, PhysAddr>,
    pins: Mutex<BTreeMap<PhysAddr, usize>>,
}

impl Guest {
    fn unpin_frames(&self, spans: &[Span]) {
        let mut pins = self.pins.lock().unwrap();
        for span in spans {
            for page in 0..span.len() / PAGE {
                let frame = span.paddr().wrapping_add(page * PAGE);
                let count = pins.get_mut(&frame).expect("what is unpinned was pinned");
                *count -= 1;
                if *count == 0 {
                    pins.remove(&frame);
                }
            }
        }
    }
}

#[expect(unsafe_code, reason = "a pinner promises that pinned memory stays")]
// SAFETY: a frame with a pin is not moved or freed by this program, which never does so, and no
// reference to a guest's memory exists. Spans are pushed page by page, in the order of the range.
unsafe impl Pinner for Guest {
    type Space = ();
    type Address = PhysAddr;
    /// The counts say all.
    type Pin = ();
    type Error = NoFrame;

    fn pin(
        &self,
        _space: &(),
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<(), PinFailed<(), NoFrame>> {
        let first = range.start().get() / PAGE;
        for page in first..=range.last().get() / PAGE {
            let found = self.frames.get(&page).ok_or(NoFrame(UserAddr::new(page * PAGE)));
            let pushed = found.map_err(PinError::Failed).and_then(|&frame| {
                let span = Span::new(frame, PAGE).expect("a page does not wrap");
                *self.pins.lock().unwrap().entry(frame).or_default() += 1;
                let pushed = sink.push(span, Kind::Memory);
                pushed.inspect_err(|_| self.unpin_frames(&[span])).map_err(PinError::from)
            });
            // What was pushed before stays pinned until the caller, behind a sync, unpins it.
            pushed.map_err(|error| PinFailed {
                range,
                error,
                pin: (page > first).then_some(()),
            })?;
        }
        Ok(())
    }

    fn unpin(&self, _: Promise<'_>, _: &mut (), spans: &[Span], _: Kind, _: Dirty) {
        self.unpin_frames(spans);
    }

    fn release(&self, _: Promise<'_>, (): ()) {}

    fn space_id(&self, _space: &()) -> u64 {
        0
    }

    fn read(&self, _space: &(), at: UserAddr, _bytes: &mut [u8]) -> Result<(), NoFrame> {
        Err(NoFrame(at)) // for emulated devices, of which there is none
    }

    fn write(&self, _space: &(), at: UserAddr, _bytes: &[u8]) -> Result<(), NoFrame> {
        Err(NoFrame(at))
    }

    fn errno(&self, _error: &NoFrame) -> Errno {
        Errno::EFAULT
    }
}
// ANCHOR_END: pinner

// ANCHOR: registry
fn main() -> Result<(), Box<dyn Error>> {
    // Eight pages, of which the last four lie apart, each below the one before.
    let frame =
        |n: u64| PhysAddr::new(if n < 4 { 0x8000_0000 + n * PAGE } else { (20 - n) * PAGE });
    let frames = (0..8).map(|n| (n, frame(n))).collect();
    let guest = Arc::new(Guest { frames, ..Guest::default() });
    let account = Account::new(6 * PAGE);
    let mut registry = Registry::new(Pinned::new(Arc::clone(&guest), (), account.clone(), 12));

    let buffer =
        |start, len| UserRange::from_len(UserAddr::new(start), len).map(BufferRequest::new);
    registry.register(&[buffer(0x1800, 4 * PAGE)?])?;
    println!(
        "{} pages pinned, {} charged",
        guest.pins.lock().unwrap().len(),
        account.used() / PAGE
    );
    println!("an I/O of 0x1000 bytes at 0x2000 is");
    for span in registry.get(0)?.import(0x2000, 0x1000, Direction::FromDevice)? {
        println!("  {span}");
    }
    registry.unregister()?;

    for refused in [buffer(0, 7 * PAGE)?, buffer(7 * PAGE, 2 * PAGE)?] {
        println!("refused: {}", registry.register(&[refused]).unwrap_err());
    }
    println!("{} pages pinned, {} charged", guest.pins.lock().unwrap().len(), account.used());
    Ok(())
}
// ANCHOR_END: registry
