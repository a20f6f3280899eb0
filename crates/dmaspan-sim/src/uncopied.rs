//! A pool's memory to which nobody copies: what slots alone cost.

use dmaspan::Span;
use dmaspan::swiotlb::{HostRefused, InSlot, PoolMemory, Room, Transfer};

/// Memory whose [copies](PoolMemory::copy) are left out. It is no use for anything but measuring
/// how long it takes to find and release slots.
#[derive(Clone, Copy, Debug)]
pub struct Uncopied<M>(pub M);

#[expect(unsafe_code, reason = "the promises are those of the memory inside")]
// SAFETY: all memory is that of `M`, which promises the same of it, and what is not copied touches
// nothing.
unsafe impl<M: PoolMemory> PoolMemory for Uncopied<M> {
    fn spans(&self) -> &[Span] {
        self.0.spans()
    }

    #[inline]
    fn copy(&self, _transfer: Transfer) {}

    fn zero(&self, bytes: InSlot) {
        self.0.zero(bytes);
    }

    fn read(&self, bytes: InSlot, into: &mut [u8]) {
        self.0.read(bytes, into);
    }

    fn write(&self, bytes: InSlot, from: &[u8]) {
        self.0.write(bytes, from);
    }

    fn allocate(&self, room: Room) -> Option<Span> {
        self.0.allocate(room)
    }

    fn free(&self, span: Span) {
        self.0.free(span);
    }

    fn share(&self, span: Span) -> Result<(), HostRefused> {
        self.0.share(span)
    }

    fn unshare(&self, span: Span) -> Result<(), HostRefused> {
        self.0.unshare(span)
    }

    fn pressed(&self) {
        self.0.pressed();
    }
}
