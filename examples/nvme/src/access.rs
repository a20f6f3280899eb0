//! The driver takes this from outside: registers, memory that both sides see, buffers and time.

use alloc::boxed::Box;
use core::error::Error;
use core::sync::atomic::AtomicU64;
use core::time::Duration;

use dmaspan::DmaAddr;
use dmaspan::regbuf::Buffer;

/// Lets the driver reach one controller: over VFIO, in a kernel, or in an emulator.
///
/// # Safety
///
/// While the value exists,
///
/// 1. nothing else operates the controller: what it was told by the driver it does, and no more.
///    Whoever has the value, or [`Controller::access`](crate::Controller::access), can write
///    registers too: code that is not trusted with that has neither, or the controller reaches
///    nothing but what is mapped for it, as behind an IOMMU, and is used by atomics alone;
/// 2. [`buffer`](Self::buffer) gives a buffer only if its addresses are mapped for this controller
///    for as long as the value that was passed, or any clone of it, exists; and
/// 3. [`Memory`](Self::Memory) keeps the contract of [`SharedMemory`].
#[expect(
    unsafe_code,
    reason = "a contract about memory that a device uses; nothing is unsafe here"
)]
pub unsafe trait Access {
    /// Memory for queues and for lists of pages.
    type Memory: SharedMemory;
    /// A registered buffer, which a command in flight holds a clone of: an `Arc` or a
    /// [`Node`](dmaspan::regbuf::Node), so that a clone is a reference and allocates nothing.
    type Buffer: Clone;

    /// Returns how many bytes of registers there are. The driver asks for no others, and for each
    /// at a multiple of its size.
    fn registers_len(&self) -> u64;

    /// Reads a register of 32 bits. Where the device is gone, that is all ones.
    fn read32(&self, offset: u64) -> u32;

    /// Reads a register of 64 bits.
    fn read64(&self, offset: u64) -> u64;

    /// Writes a register of 32 bits. The controller sees stores to shared memory that came before.
    fn write32(&self, offset: u64, value: u32);

    /// Writes a register of 64 bits, ordered likewise.
    fn write64(&self, offset: u64, value: u64);

    /// So many bytes of shared memory or more, at a multiple of `align` for the controller. Called
    /// while the driver starts and while it makes queues, never by I/O.
    ///
    /// # Errors
    ///
    /// Why there is none.
    fn allocate(&self, bytes: u64, align: u64) -> Result<Self::Memory, AllocateError>;

    /// The buffer as this controller reaches it; `None` where it is mapped for another one.
    fn buffer<'b>(&self, buffer: &'b Self::Buffer) -> Option<&'b Buffer<DmaAddr>>;

    /// Waits a little before the driver looks again for what should happen within `limit`, and for
    /// which it has looked `polls` times. It has to give up at some number of polls.
    fn pause(&self, polls: u32, limit: Duration) -> Pause;

    /// How many interrupt vectors the controller can signal. Without any, queues are polled.
    fn vectors(&self) -> u16 {
        0
    }

    /// Waits until the controller has signalled a vector since the last time that somebody waited
    /// for it, no longer than `limit`. It may end earlier for no reason.
    fn wait(&self, vector: u16, limit: Duration) {
        let _ = (vector, limit);
    }
}

/// The reason why there is no shared memory.
pub type AllocateError = Box<dyn Error + Send + Sync>;

/// Says whether to look again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// There is time left.
    Again,
    /// It took too long: the driver looks once more and then reports it.
    GiveUp,
}

/// Memory that the program and the controller see alike, coherently.
///
/// # Safety
///
/// Until the value is dropped, also after it was moved, [`words`](Self::words) is the same memory,
/// nobody else's, which the controller may read and write as it likes, and
/// finds contiguous from [`addr`](Self::addr) on.
#[expect(
    unsafe_code,
    reason = "a contract about memory that a device uses; nothing is unsafe here"
)]
pub unsafe trait SharedMemory {
    /// Returns where the controller finds the first word.
    fn addr(&self) -> DmaAddr;

    /// The words. Those that the controller reads or writes are little-endian.
    fn words(&self) -> &[AtomicU64];
}
