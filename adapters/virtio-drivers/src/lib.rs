#![doc = include_str!("../README.md")]
#![no_std]

extern crate alloc;

mod transport;

use alloc::collections::BTreeMap;
use core::fmt;
use core::ptr::NonNull;

use dmaspan::dma::{Attrs, Coherent, Device, Error, Flush, RawMemory};
use dmaspan::dma::{Piece, Unmapped};
use dmaspan::{Direction, DmaAddr, PhysAddr, Span};
use lock_api::{Mutex, RawMutex};
pub use transport::BehindIommu;
pub use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE};

/// The address of what could not be mapped: it leads nowhere, with an IOMMU and without one.
const NOWHERE: u64 = !0xfff;

/// Finds the physical address of a buffer. `None` where it has no contiguous one.
type Find = fn(NonNull<[u8]>) -> Option<u64>;

/// A device, as the functions of a [`Hal`] use it, which have no `self`.
pub struct VirtioDma {
    device: Device,
    find: Find,
    refused: fn(Error),
    queues: BTreeMap<u64, Coherent>,
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
    /// `refused` runs where a driver shares and unshares, and must not call the `Hal`.
    #[expect(unsafe_code, reason = "it declares a contract")]
    pub unsafe fn new(device: Device, find: Find, refused: fn(Error)) -> Self {
        let (queues, usage) = (BTreeMap::new(), VirtioUsage::default());
        Self { device, find, refused, queues, usage }
    }

    fn refuse(&mut self, error: Error) {
        self.usage.refused += 1;
        (self.refused)(error);
    }

    fn alloc(&mut self, pages: usize) -> Option<(u64, NonNull<u8>)> {
        let page = PAGE_SIZE as u64;
        let len = (pages as u64).saturating_mul(page);
        let queue = match self.device.alloc(len, page) {
            Ok(queue) => queue,
            Err(error) => {
                self.refuse(error);
                return None;
            }
        };
        let (addr, start) = (queue.addr(), queue.as_ptr());
        if addr.get() == 0 {
            self.give_back(queue);
            self.refuse(Error::NotMapped { addr });
            return None;
        }
        self.queues.insert(addr.get(), queue);
        self.usage.queues += 1;
        Some((addr.get(), start))
    }

    fn give_back(&mut self, queue: Coherent) {
        if let Err(failed) = self.device.free(queue) {
            self.refuse(failed.into());
        }
    }

    fn dealloc(&mut self, addr: u64) {
        match self.queues.remove(&addr) {
            Some(queue) => {
                self.usage.queues -= 1;
                self.give_back(queue);
            }
            None => self.refuse(Error::NotMapped { addr: DmaAddr::new(addr) }),
        }
    }

    /// Maps a buffer. The next release of virtio-drivers says here whether the device is behind an
    /// IOMMU, which the [`Device`] knows already.
    fn share(&mut self, buffer: NonNull<[u8]>, direction: Direction) -> Result<u64, Error> {
        let len = buffer.len() as u64;
        let paddr = (self.find)(buffer).map(PhysAddr::new);
        let span = paddr.and_then(|paddr| Span::new(paddr, len).ok());
        let piece = Piece::memory(span.ok_or(Error::NotSingle { pieces: 0 })?);
        #[expect(unsafe_code, reason = "a buffer of a driver")]
        // SAFETY: the bytes are there and stay until `unshare`, as `new` was promised; the driver
        // leaves them to the device meanwhile, as `Hal::share` wants.
        let memory = unsafe { RawMemory::new(piece) };
        let attrs = Attrs { flush: Some(Flush::Strict), ..Attrs::default() };
        let mapping = self.device.map_single_with(memory.into(), direction, attrs)?;
        let addr = mapping.addr();
        if addr.get() == 0 {
            let _unmapped = self.device.unmap(mapping)?;
            return Err(Error::NotMapped { addr });
        }
        if let Err(failed) = self.device.into_raw(mapping) {
            if let Some(mapping) = failed.mapping {
                let _unmapped = self.device.unmap(mapping)?;
            }
            return Err(failed.error);
        }
        self.usage.buffers += 1;
        Ok(addr.get())
    }

    fn unshare(&mut self, addr: u64, len: u64, direction: Direction) {
        match self.device.unmap_raw(DmaAddr::new(addr), len, direction) {
            Ok(Unmapped::Released(_) | Unmapped::Queued) => self.usage.buffers -= 1,
            Err(error) => {
                // Shared no more, once hardware has forgotten it.
                self.usage.buffers -= usize::from(matches!(error, Error::Quarantined { .. }));
                self.refuse_buffer(error);
            }
        }
    }

    /// Refuses a buffer. A driver takes it back whatever the answer is, so that where hardware was
    /// not seen to forget it, this waits until a flush succeeds: nothing else keeps it whole.
    fn refuse_buffer(&mut self, error: Error) {
        let is_reached = matches!(error, Error::Quarantined { .. });
        self.refuse(error);
        while is_reached && self.device.flush().is_err() {
            core::hint::spin_loop();
        }
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

    /// [`Hal::dma_alloc`]; the address is 0 where there is no memory or no device.
    pub fn dma_alloc(&self, pages: usize) -> (u64, NonNull<u8>) {
        self.with(|dma| dma.alloc(pages)).flatten().unwrap_or((0, NonNull::dangling()))
    }

    /// [`Hal::dma_dealloc`]. The answer is always 0: a queue that hardware was not seen to forget
    /// is kept, and counted as refused.
    pub fn dma_dealloc(&self, addr: u64) -> i32 {
        self.with(|dma| dma.dealloc(addr));
        0
    }

    /// [`Hal::share`].
    ///
    /// # Safety
    ///
    /// As of [`Hal::share`]: the buffer is left to the device until [`unshare`](Self::unshare).
    #[expect(unsafe_code, reason = "it declares the contract of `Hal`")]
    pub unsafe fn share(&self, buffer: NonNull<[u8]>, direction: BufferDirection) -> u64 {
        let share = |dma: &mut VirtioDma| {
            dma.share(buffer, way(direction)).unwrap_or_else(|error| {
                dma.refuse_buffer(error);
                NOWHERE
            })
        };
        self.with(share).unwrap_or(NOWHERE)
    }

    /// [`Hal::unshare`].
    pub fn unshare(&self, addr: u64, buffer: NonNull<[u8]>, direction: BufferDirection) {
        self.with(|dma| dma.unshare(addr, buffer.len() as u64, way(direction)));
    }
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
/// Registers of a transport on PCI are taken to be mapped where they are.
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
                Self::slot().dma_dealloc(paddr)
            }

            unsafe fn mmio_phys_to_virt(paddr: u64, _size: usize) -> ::core::ptr::NonNull<u8> {
                let pointer = ::core::ptr::with_exposed_provenance_mut(paddr as usize);
                ::core::ptr::NonNull::new(pointer).expect("registers are not at 0")
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
                Self::slot().unshare(paddr, buffer, direction);
            }
        }
    };
}
