//! A pool's memory to which nobody copies: what slots alone cost.

use dmaspan::swiotlb::{HostRefused, InSlot, PoolMemory, Room, Transfer};
use dmaspan::{Promise, Span};

/// Memory whose [copies](PoolMemory::copy) are left out. It is no use for anything but measuring
/// how long it takes to find and release slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uncopied<M>(pub(crate) M);

#[expect(unsafe_code, reason = "the promises are those of the memory inside")]
// SAFETY: all memory is that of `M`, which promises the same of it, and what is not copied touches
// nothing.
unsafe impl<M: PoolMemory> PoolMemory for Uncopied<M> {
    type Address = M::Address;

    fn spans(&self) -> &[Span<M::Address>] {
        self.0.spans()
    }

    #[inline]
    fn copy(&self, _transfer: Transfer<M::Address>) {}

    fn zero(&self, bytes: InSlot<M::Address>) {
        self.0.zero(bytes);
    }

    fn read(&self, bytes: InSlot<M::Address>, into: &mut [u8]) {
        self.0.read(bytes, into);
    }

    fn write(&self, bytes: InSlot<M::Address>, from: &[u8]) {
        self.0.write(bytes, from);
    }

    fn allocate(&self, room: Room) -> Option<Span<M::Address>> {
        self.0.allocate(room)
    }

    fn free(&self, promise: Promise<'_>, span: Span<M::Address>) {
        self.0.free(promise, span);
    }

    fn share(&self, promise: Promise<'_>, span: Span<M::Address>) -> Result<(), HostRefused> {
        self.0.share(promise, span)
    }

    fn unshare(&self, promise: Promise<'_>, span: Span<M::Address>) -> Result<(), HostRefused> {
        self.0.unshare(promise, span)
    }

    fn pressed(&self) {
        self.0.pressed();
    }
}
