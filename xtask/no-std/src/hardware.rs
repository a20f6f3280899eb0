//! The drivers' hardware where there is no operating system: memory that hardware sees as the CPU
//! does, at the same addresses.

use alloc::alloc::{Layout, alloc_zeroed};
use core::ptr::NonNull;
use core::slice;
use core::sync::atomic::AtomicU64;

use dmaspan::platform::Flag;
use dmaspan::{DmaAddr, PhysAddr};
use dmaspan_drivers::{Again, Host, NoMemory, Structure};
use dmaspan_nvme::access::SharedMemory;

/// Zeroed words that are never given back.
pub struct Words(&'static [AtomicU64]);

impl Words {
    /// As many bytes, a multiple of 8, aligned.
    pub fn new(bytes: u64, align: u64) -> Option<Self> {
        let (bytes, align) = (usize::try_from(bytes).ok()?, usize::try_from(align).ok()?);
        let layout = Layout::from_size_align(bytes.max(8), align.max(8)).ok()?;
        // SAFETY: the layout has a size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?.cast::<AtomicU64>();
        // SAFETY: the memory is as large, aligned, zeroed, and this value's for ever.
        Some(Self(unsafe { slice::from_raw_parts(start.as_ptr(), bytes / 8) }))
    }

    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    pub fn start(&self) -> NonNull<u8> {
        NonNull::from(self.0).cast()
    }
}

// SAFETY: 1. The words are the memory at their address, which nobody else was given. 2. The
// hardware here is a CPU.
unsafe impl Structure for Words {
    fn paddr(&self) -> PhysAddr {
        PhysAddr::new(self.address())
    }

    fn words(&self) -> &[AtomicU64] {
        self.0
    }
}

// SAFETY: as for `Structure`.
unsafe impl SharedMemory for Words {
    fn addr(&self) -> DmaAddr {
        DmaAddr::new(self.address())
    }

    fn words(&self) -> &[AtomicU64] {
        self.0
    }
}

/// Memory, a lock and little patience.
pub struct Bare;

// SAFETY: `Words` are as large and as aligned as asked for; what lies too high is refused.
unsafe impl Host for Bare {
    type Lock = Flag;
    type Structure = Words;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<Words, NoMemory> {
        let refused = NoMemory { lg2_size, max_paddr };
        let bytes = 1u64.checked_shl(lg2_size).ok_or(refused)?;
        let words = Words::new(bytes, bytes).ok_or(refused)?;
        let fits =
            words.address().checked_add(bytes - 1).is_some_and(|last| last <= max_paddr.get());
        if fits { Ok(words) } else { Err(refused) }
    }

    fn again(&self, polls: u32) -> Again {
        if polls < 100 { Again::Poll } else { Again::GiveUp }
    }
}
