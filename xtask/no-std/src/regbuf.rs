//! Registered buffers of a kernel that pins nothing, as its memory never moves.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink};
use dmaspan::regbuf::descriptors::{ScatterEntry, SegmentLimits};
use dmaspan::regbuf::{BufferRequest, Pinned, Registry};
use dmaspan::{Account, Direction, Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};

const PAGE: u64 = 4096;
const PAGE_LG2: u32 = 12;

/// Every other page, backwards: none touches the next.
struct Apart;

/// Nothing else fails.
#[derive(Debug)]
struct Untouchable;

impl fmt::Display for Untouchable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no program reads or writes here")
    }
}

impl core::error::Error for Untouchable {}

// SAFETY: there is no device, and no memory at these addresses.
unsafe impl Pinner for Apart {
    type Address = PhysAddr;
    type Space = ();
    type Pin = ();
    type Error = Untouchable;

    fn pin(
        &self,
        (): &(),
        range: UserRange,
        _prot: Prot,
        sink: &mut dyn SpanSink,
    ) -> Result<(), PinFailed<(), Untouchable>> {
        let first = range.start().get() / PAGE;
        for page in first..=range.last().get() / PAGE {
            let failed = |error| PinFailed { range, error, pin: (page > first).then_some(()) };
            let paddr = PhysAddr::new((1 << 40) - 2 * page * PAGE);
            let span = Span::new(paddr, PAGE).map_err(|_| failed(PinError::Stopped))?;
            sink.push(span, Kind::Memory).map_err(|stopped| failed(stopped.into()))?;
        }
        Ok(())
    }

    fn unpin(&self, _: Promise<'_>, (): &mut (), _spans: &[Span], _kind: Kind, _dirty: Dirty) {}

    fn release(&self, _: Promise<'_>, (): ()) {}

    fn space_id(&self, (): &()) -> u64 {
        0
    }

    fn read(&self, (): &(), _at: UserAddr, _bytes: &mut [u8]) -> Result<(), Untouchable> {
        Err(Untouchable)
    }

    fn write(&self, (): &(), _at: UserAddr, _bytes: &[u8]) -> Result<(), Untouchable> {
        Err(Untouchable)
    }

    fn errno(&self, _error: &Untouchable) -> Errno {
        Errno::EFAULT
    }
}

/// Registers a buffer, makes entries of a part of it that is in flight, and takes it away. `None`
/// where anything is not as it should be.
pub fn exercise() -> Option<()> {
    let account = Account::new(64 * PAGE);
    let source = Pinned::new(Arc::new(Apart), (), Arc::clone(&account), PAGE_LG2);
    let mut registry = Registry::new(source);
    let user = UserRange::from_len(UserAddr::new(PAGE + 100), 60 * PAGE).ok()?;
    registry.register(&[BufferRequest::new(user), BufferRequest::VACANT]).ok()?;
    let too_much = UserRange::from_len(UserAddr::new(0), 65 * PAGE).ok()?;
    registry.update(1, &[BufferRequest::new(too_much)]).is_err().then_some(())?;
    let node = registry.get(0).ok()?.clone();
    registry.unregister().ok()?;
    let import = node.import(PAGE, 3 * PAGE, Direction::FromDevice).ok()?;
    let mut entries = Vec::from([ScatterEntry::default(); 4]);
    let count = SegmentLimits::default().write(import, &mut entries).ok()?;
    let bytes: u64 = entries.iter().map(|entry| u64::from(entry.len)).sum();
    let is_right = (count, bytes, account.used()) == (4, 3 * PAGE, 61 * PAGE);
    drop(node);
    (is_right && account.used() == 0).then_some(())
}
