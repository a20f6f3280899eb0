#![doc = include_str!("../README.md")]
#![no_std]

extern crate alloc;

mod copied;
mod mapped;
mod transport;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ptr::{NonNull, with_exposed_provenance_mut};

use dmaspan::dma::{Device, Error};
use dmaspan::swiotlb::{Pool, PoolMemory};
use dmaspan::{Direction, DmaAddr, Platform};
use lock_api::{Mutex, RawMutex};
pub use transport::BehindIommu;
pub use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE};

use copied::Copied;
use mapped::Mapped;

const PAGE: u64 = PAGE_SIZE as u64;

/// Finds the physical address of a buffer. `None` where it has no contiguous one.
type Find = fn(NonNull<[u8]>) -> Option<u64>;

/// Finds registers by their address on the bus and their length.
type Registers = dyn Fn(u64, usize) -> Option<NonNull<u8>> + Send;

/// How a device comes to queues and buffers.
trait Reach: Send {
    /// Zeroed memory that begins at a page, and its address, which is not 0.
    fn alloc(&mut self, len: u64) -> Result<(u64, NonNull<u8>), Error>;

    fn dealloc(&mut self, addr: DmaAddr) -> Result<(), Error>;

    /// The address of a buffer, which is not 0.
    ///
    /// # Safety
    ///
    /// As of [`Hal::share`].
    #[expect(unsafe_code, reason = "it declares the contract of `Hal`")]
    unsafe fn share(
        &mut self,
        buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<DmaAddr, Error>;

    /// Takes a buffer back, once no device reaches it.
    ///
    /// # Safety
    ///
    /// As of [`Hal::unshare`]; what was not shared is refused.
    #[expect(unsafe_code, reason = "it declares the contract of `Hal`")]
    unsafe fn unshare(
        &mut self,
        addr: DmaAddr,
        buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<(), Error>;

    /// Whether hardware has forgotten all that was taken back.
    fn is_forgotten(&mut self) -> bool;
}

/// A device, as the functions of a [`Hal`] use it, which have no `self`.
pub struct VirtioDma {
    reach: Box<dyn Reach>,
    refused: fn(Error),
    registers: Option<Box<Registers>>,
    usage: VirtioUsage,
}

/// How much a device has, and how much was refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtioUsage {
    /// Buffers that are shared now: those that remain once the driver is dropped are leaks.
    pub buffers: usize,
    /// Pieces of coherent memory that are allocated now.
    pub queues: usize,
    /// Calls that were refused: a buffer that could not be mapped, or was unshared twice, or queues
    /// for which there was no memory, or which were not given back.
    pub refused: usize,
}

impl fmt::Debug for VirtioDma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtioDma").field("usage", &self.usage).finish_non_exhaustive()
    }
}

impl VirtioDma {
    /// A device, the physical address of a buffer, and what is told of refusals. Queues are the
    /// device's coherent memory: it needs some, see [`Device::with_coherent`].
    ///
    /// # Safety
    ///
    /// The bytes of each buffer for which `find` returns an address are at it, contiguous, and stay
    /// there for as long as the buffer is shared.
    ///
    /// # Context
    ///
    /// `refused` runs where a driver shares and unshares, without a lock.
    #[expect(unsafe_code, reason = "it declares a contract")]
    pub unsafe fn new(device: Device, find: Find, refused: fn(Error)) -> Self {
        Self::by(Box::new(Mapped::new(device, find)), refused)
    }

    /// A device that reaches a pool and nothing else, as in a process that has it by VFIO: queues
    /// are leases of the pool, and buffers, which may be any memory, are copied to and from leases.
    /// The pool's addresses are those that the device uses: a `MappedBounce` of `dmaspan-linux`.
    ///
    /// An unshare leaves the slot within the device's reach, and the buffer out of it.
    ///
    /// # Context
    ///
    /// As [`new`](Self::new).
    pub fn copying<M, P>(pool: Arc<Pool<M, P>>, refused: fn(Error)) -> Self
    where
        M: PoolMemory<Address = DmaAddr> + 'static,
        P: Platform + 'static,
    {
        Self::by(Box::new(Copied::new(pool)), refused)
    }

    fn by(reach: Box<dyn Reach>, refused: fn(Error)) -> Self {
        Self { reach, refused, registers: None, usage: VirtioUsage::default() }
    }

    /// The same, whose registers are not mapped where they are on the bus: `find` gets the address
    /// of some, as a BAR has it, and their length, and returns where they are mapped.
    ///
    /// # Safety
    ///
    /// What `find` returns is a pointer to as many bytes of these registers, for as long as `find`
    /// exists, and the program's alone.
    ///
    /// # Context
    ///
    /// `find` runs under the lock of the `Hal`, as it is one thread's at a time, and must not call
    /// that.
    ///
    /// # Panics
    ///
    /// A transport that asks for registers for which `find` returns `None` panics: a `Hal` cannot
    /// refuse them.
    #[must_use]
    #[expect(unsafe_code, reason = "it declares a contract")]
    pub unsafe fn with_registers(
        mut self,
        find: impl Fn(u64, usize) -> Option<NonNull<u8>> + Send + 'static,
    ) -> Self {
        self.registers = Some(Box::new(find));
        self
    }

    fn alloc(&mut self, pages: usize) -> Result<(u64, NonNull<u8>), Error> {
        let queue = self.reach.alloc((pages as u64).saturating_mul(PAGE))?;
        self.usage.queues += 1;
        Ok(queue)
    }

    fn dealloc(&mut self, addr: DmaAddr) -> Result<(), Error> {
        let done = self.reach.dealloc(addr);
        // One that hardware does not forget is kept, and the driver's no more.
        self.usage.queues -= usize::from(!matches!(done, Err(Error::NotMapped { .. })));
        done
    }

    /// # Safety
    ///
    /// As of [`Hal::share`].
    #[expect(unsafe_code, reason = "it passes the contract of `Hal` on")]
    unsafe fn share(&mut self, buffer: NonNull<[u8]>, direction: Direction) -> Result<u64, Error> {
        if buffer.is_empty() {
            return Err(Error::NotSingle { pieces: 0 });
        }
        // SAFETY: the caller promises the same.
        let addr = unsafe { self.reach.share(buffer, direction) }?;
        self.usage.buffers += 1;
        Ok(addr.get())
    }

    /// # Safety
    ///
    /// As of [`Hal::unshare`].
    #[expect(unsafe_code, reason = "it passes the contract of `Hal` on")]
    unsafe fn unshare(
        &mut self,
        addr: DmaAddr,
        buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<(), Error> {
        // SAFETY: the caller promises the same.
        let done = unsafe { self.reach.unshare(addr, buffer, direction) };
        // Shared no more, once hardware has forgotten it.
        let is_gone = matches!(done, Ok(()) | Err(Error::Quarantined { .. }));
        self.usage.buffers -= usize::from(is_gone);
        done
    }
}

/// The place of a [`VirtioDma`] in a static, for [`hal!`].
#[derive(Debug)]
pub struct VirtioSlot<L: RawMutex>(Mutex<L, Option<VirtioDma>>);

impl<L: RawMutex> Default for VirtioSlot<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L: RawMutex> VirtioSlot<L> {
    /// An empty one.
    pub const fn new() -> Self {
        Self(Mutex::const_new(L::INIT, None))
    }

    /// Fills the slot.
    ///
    /// # Errors
    ///
    /// What was to be put in, where the slot is full.
    pub fn attach(&self, dma: VirtioDma) -> Result<(), VirtioDma> {
        let mut slot = self.0.lock();
        if slot.is_some() {
            return Err(dma);
        }
        *slot = Some(dma);
        Ok(())
    }

    /// What the device has.
    pub fn usage(&self) -> VirtioUsage {
        self.with(|dma| dma.usage).unwrap_or_default()
    }

    /// A driver holds its queues exclusively, so that nobody waits for the lock but where one
    /// device has several drivers.
    fn with<R>(&self, run: impl FnOnce(&mut VirtioDma) -> R) -> Option<R> {
        self.0.lock().as_mut().map(run)
    }

    /// Does what may be refused, and tells of that without the lock.
    ///
    /// # Errors
    ///
    /// Whether hardware was not seen to forget what is refused.
    fn try_with<R>(&self, run: impl FnOnce(&mut VirtioDma) -> Result<R, Error>) -> Result<R, bool> {
        let done = self.with(|dma| {
            let done = run(dma).map_err(|error| (error, dma.refused));
            dma.usage.refused += usize::from(done.is_err());
            done
        });
        done.ok_or(false)?.map_err(|(error, refused)| {
            let is_reached = matches!(error, Error::Quarantined { .. });
            refused(error);
            is_reached
        })
    }

    /// The same of a buffer. A driver takes it back whatever the answer is, so that where hardware
    /// was not seen to forget it, this waits until a flush succeeds: nothing else keeps it whole.
    fn try_buffer<R>(&self, run: impl FnOnce(&mut VirtioDma) -> Result<R, Error>) -> Option<R> {
        let done = self.try_with(run);
        while matches!(done, Err(true)) && self.with(|dma| dma.reach.is_forgotten()) == Some(false)
        {
            core::hint::spin_loop();
        }
        done.ok()
    }

    /// [`Hal::dma_alloc`]; the address is 0 where there is no memory or no device.
    pub fn dma_alloc(&self, pages: usize) -> (u64, NonNull<u8>) {
        self.try_with(|dma| dma.alloc(pages)).unwrap_or((0, NonNull::dangling()))
    }

    /// [`Hal::dma_dealloc`]. The answer is always 0: a queue that hardware was not seen to forget
    /// is kept, and counted as refused.
    ///
    /// # Safety
    ///
    /// As of [`Hal::dma_dealloc`]: nobody uses the pointer to the queue at `addr` any more.
    #[expect(unsafe_code, reason = "it declares the contract of `Hal`")]
    pub unsafe fn dma_dealloc(&self, addr: u64) -> i32 {
        let _ = self.try_with(|dma| dma.dealloc(DmaAddr::new(addr)));
        0
    }

    /// [`Hal::mmio_phys_to_virt`].
    ///
    /// # Panics
    ///
    /// Where the registers are nowhere, as [`VirtioDma::with_registers`] says.
    pub fn registers(&self, paddr: u64, len: usize) -> NonNull<u8> {
        let found = self.with(|dma| match &dma.registers {
            Some(find) => find(paddr, len),
            None => one_to_one(paddr),
        });
        // Before there is a device, they are where they are.
        let found = found.unwrap_or_else(|| one_to_one(paddr));
        found.unwrap_or_else(|| panic!("no registers are mapped at {paddr:#x}, of {len:#x} bytes"))
    }

    /// [`Hal::share`].
    ///
    /// # Safety
    ///
    /// As of [`Hal::share`]: the buffer is left to the device until [`unshare`](Self::unshare).
    #[expect(unsafe_code, reason = "it declares the contract of `Hal`")]
    pub unsafe fn share(&self, buffer: NonNull<[u8]>, direction: BufferDirection) -> u64 {
        // SAFETY: the caller promises the same.
        let share = |dma: &mut VirtioDma| unsafe { dma.share(buffer, way(direction)) };
        self.try_buffer(share).unwrap_or(DmaAddr::REFUSED.get())
    }

    /// [`Hal::unshare`].
    ///
    /// # Safety
    ///
    /// As of [`Hal::unshare`]: the buffer is as it was shared, unless it is refused.
    #[expect(unsafe_code, reason = "it declares the contract of `Hal`")]
    pub unsafe fn unshare(&self, addr: u64, buffer: NonNull<[u8]>, direction: BufferDirection) {
        let addr = DmaAddr::new(addr);
        // SAFETY: the caller promises the same.
        self.try_buffer(|dma| unsafe { dma.unshare(addr, buffer, way(direction)) });
    }
}

/// Registers that are mapped where they are on the bus.
fn one_to_one(paddr: u64) -> Option<NonNull<u8>> {
    NonNull::new(with_exposed_provenance_mut(usize::try_from(paddr).ok()?))
}

fn way(direction: BufferDirection) -> Direction {
    match direction {
        BufferDirection::DriverToDevice => Direction::ToDevice,
        BufferDirection::DeviceToDriver => Direction::FromDevice,
        BufferDirection::Both => Direction::Bidirectional,
    }
}

/// Makes a unit type that is the [`Hal`] of one device: its name, and the lock around the device.
///
/// The type has `attach`, which takes a [`VirtioDma`] and gives a second one back, and `usage`.
/// Registers of a transport on PCI are taken to be mapped where they are, unless the device says
/// otherwise ([`VirtioDma::with_registers`]).
#[macro_export]
macro_rules! hal {
    ($(#[$meta:meta])* $vis:vis struct $name:ident: $lock:ty;) => {
        $(#[$meta])*
        #[derive(Debug)]
        $vis struct $name;

        impl $name {
            fn slot() -> &'static $crate::VirtioSlot<$lock> {
                static SLOT: $crate::VirtioSlot<$lock> = $crate::VirtioSlot::new();
                &SLOT
            }

            /// Hands the device over, before a driver is made.
            $vis fn attach(
                dma: $crate::VirtioDma,
            ) -> ::core::result::Result<(), $crate::VirtioDma> {
                Self::slot().attach(dma)
            }

            /// What the device has.
            $vis fn usage() -> $crate::VirtioUsage {
                Self::slot().usage()
            }
        }

        #[allow(unsafe_code, reason = "the promise of a `Hal`")]
        // SAFETY: queues are coherent memory, zeroed, aligned and nobody else's until given back.
        unsafe impl $crate::Hal for $name {
            fn dma_alloc(
                pages: usize,
                _direction: $crate::BufferDirection,
            ) -> (u64, ::core::ptr::NonNull<u8>) {
                Self::slot().dma_alloc(pages)
            }

            unsafe fn dma_dealloc(
                paddr: u64,
                _vaddr: ::core::ptr::NonNull<u8>,
                _pages: usize,
            ) -> i32 {
                // SAFETY: the caller promises the same.
                unsafe { Self::slot().dma_dealloc(paddr) }
            }

            unsafe fn mmio_phys_to_virt(paddr: u64, size: usize) -> ::core::ptr::NonNull<u8> {
                Self::slot().registers(paddr, size)
            }

            unsafe fn share(
                buffer: ::core::ptr::NonNull<[u8]>,
                direction: $crate::BufferDirection,
            ) -> u64 {
                // SAFETY: the caller promises the same.
                unsafe { Self::slot().share(buffer, direction) }
            }

            unsafe fn unshare(
                paddr: u64,
                buffer: ::core::ptr::NonNull<[u8]>,
                direction: $crate::BufferDirection,
            ) {
                // SAFETY: the caller promises the same.
                unsafe { Self::slot().unshare(paddr, buffer, direction) }
            }
        }
    };
}
