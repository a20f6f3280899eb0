//! A copier and the memory that it copies.
#![expect(unsafe_code, reason = "memory that a device writes is promised")]

use std::sync::Arc;

use dmaspan::dma::{BouncePool, Device, DmaMemory, Piece, RawMemory, Translation};
use dmaspan::platform::OneThread;
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{Direction, DmaAddr, Span};
use dmaspan_qemu::{Buffer, Edu, Machine, Ram, RamPool};
use dmaspan_sim::bus::Bus as _;

use crate::iommus::Memory;

/// Where the copier is.
pub(crate) const SLOT: u8 = 5;
pub(crate) const EDU: &str = "edu,addr=5";
/// Where its addresses end.
pub(crate) const END: u64 = 1 << 28;
/// So much RAM that the upper half begins there on a PC.
pub(crate) const RAM: u64 = 2 * END;
/// The bytes of a window.
pub(crate) const WINDOW: u64 = 0x8000;

pub(crate) type PoolOf = Arc<Pool<RamPool, OneThread>>;

pub(crate) fn pool(ram: &Ram) -> PoolOf {
    let memory = RamPool::new(ram, 0x1_0000).unwrap();
    Arc::new(Pool::new(memory, PoolConfig::new(1), OneThread).unwrap())
}

/// Memory to copy from and to, and what should be in it.
pub(crate) struct Window {
    machine: Machine,
    /// Kept for as long as the machine runs, since a device may be told of it.
    _buffer: Arc<Buffer>,
    pub(crate) span: Span,
    pub(crate) expected: Vec<u8>,
}

impl Window {
    /// The window at `offset` of a buffer, filled with `content`.
    pub(crate) fn new(
        machine: &Machine,
        buffer: &Arc<Buffer>,
        offset: u64,
        content: Vec<u8>,
    ) -> Self {
        let len = content.len() as u64;
        let span = Span::new(buffer.paddr().wrapping_add(offset), len).unwrap();
        assert!(span.last() <= buffer.span().last());
        machine.ram().write(span.paddr(), &content).unwrap();
        let (machine, buffer) = (machine.clone(), Arc::clone(buffer));
        Self { machine, _buffer: buffer, span, expected: content }
    }

    /// A part of it.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Span {
        Span::new(self.span.paddr().wrapping_add(offset), len).unwrap()
    }

    pub(crate) fn expected(&mut self, offset: u64, len: u64) -> &mut [u8] {
        let at = |n| usize::try_from(n).unwrap();
        &mut self.expected[at(offset)..at(offset + len)]
    }

    /// All of it is as it should be.
    pub(crate) fn check(&self) {
        let mut found = vec![0; self.expected.len()];
        self.machine.ram().read(self.span.paddr(), &mut found).unwrap();
        let wrong = found.iter().zip(&self.expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "of {}", self.span);
    }
}

/// Memory of a window, for a device.
pub(crate) fn memory(span: Span) -> Memory {
    // SAFETY: the window that it is of is kept as long as the machine runs, and is reached by
    // atomics alone.
    Box::new(unsafe { RawMemory::new(Piece::memory(span)) })
}

/// Several pieces of windows.
pub(crate) struct Pieces(pub(crate) Vec<Piece>);

// SAFETY: the windows are kept as long as the machine runs, and are reached by atomics alone.
unsafe impl DmaMemory for Pieces {
    fn pieces(&self) -> &[Piece] {
        &self.0
    }
}

/// A mapping, as a test looks at it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) addr: DmaAddr,
    pub(crate) bounced: bool,
}

/// Has the copier read a span.
pub(crate) fn read<T, B>(edu: &mut Edu, device: &Device<T, B>, span: Span) -> Seen
where
    T: Translation<Memory = Memory>,
    B: BouncePool,
{
    let mapping = device.map_single(memory(span), Direction::ToDevice).unwrap();
    let seen = Seen { addr: mapping.addr(), bounced: mapping.is_bounced() };
    edu.read(mapping.addr().get(), span.len());
    drop(device.unmap(mapping).unwrap());
    seen
}

/// Has the copier write the first `written` bytes of a span.
pub(crate) fn write<T, B>(edu: &mut Edu, device: &Device<T, B>, span: Span, written: u64) -> Seen
where
    T: Translation<Memory = Memory>,
    B: BouncePool,
{
    let mapping = device.map_single(memory(span), Direction::FromDevice).unwrap();
    let seen = Seen { addr: mapping.addr(), bounced: mapping.is_bounced() };
    edu.write(mapping.addr().get(), written);
    drop(device.unmap(mapping).unwrap());
    seen
}
