//! The runtime of a program where nothing else provides it: an entry point, a panic handler, an
//! allocator and the memory functions that compiled code calls.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::panic::PanicInfo;
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The exit code of a panic.
const PANICKED: u32 = 101;
const HEAP_BYTES: usize = 1 << 20;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
core::arch::global_asm!(
    // The kernel enters with the stack aligned to 16 bytes; a function expects a return address on
    // it.
    ".globl _start",
    "_start:",
    "xor %ebp, %ebp",
    "call {start}",
    "ud2",
    start = sym start,
    options(att_syntax),
);

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
extern "C" fn start() -> ! {
    exit(crate::run())
}

/// Links everything that runs elsewhere, and stops.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
// SAFETY: no other item of the program has this name.
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    exit(crate::run())
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn exit(code: u32) -> ! {
    // SAFETY: `exit_group` (231, arch/x86/entry/syscalls/syscall_64.tbl) takes an exit code and
    // does not return.
    unsafe { core::arch::asm!("syscall", in("eax") 231, in("edi") code, options(noreturn)) }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn exit(code: u32) -> ! {
    loop {
        core::hint::black_box(code);
    }
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    exit(PANICKED)
}

/// Gives memory out once and never again.
struct Bump {
    heap: UnsafeCell<[u8; HEAP_BYTES]>,
    used: AtomicUsize,
}

// SAFETY: bytes of the heap are only reached through what `alloc` gave out, each once.
unsafe impl Sync for Bump {}

#[global_allocator]
static HEAP: Bump = Bump { heap: UnsafeCell::new([0; HEAP_BYTES]), used: AtomicUsize::new(0) };

// SAFETY: what `alloc` returns is null, or lies in the heap, is aligned and overlaps nothing that
// was returned before: `used` only grows, past each allocation.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let base = self.heap.get().cast::<u8>();
        let mut start = 0;
        let fits = |used: usize| {
            let unaligned = base.addr().checked_add(used)?;
            start = unaligned.checked_next_multiple_of(layout.align())? - base.addr();
            start.checked_add(layout.size()).filter(|&end| end <= HEAP_BYTES)
        };
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => base.wrapping_add(start),
            Err(_) => ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

/// What the compiled `alloc` names for unwinding. Panics abort here, so nobody calls it.
// SAFETY: no other item of the program has this name.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// What the C library has elsewhere.
///
/// Loops over volatile accesses, since the compiler would make plain ones calls of these very
/// functions.
mod memory {
    /// # Safety
    ///
    /// As C's: `to` and `from` have `bytes` bytes and do not overlap.
    // SAFETY: no other item of the program has this name, and it is what the compiler expects of
    // it.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        for at in 0..bytes {
            // SAFETY: both places lie in what the caller promises.
            unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
        }
        to
    }

    /// # Safety
    ///
    /// As C's: `to` and `from` have `bytes` bytes.
    // SAFETY: as for `memcpy`.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, bytes: usize) -> *mut u8 {
        for step in 0..bytes {
            let at = if to.addr() < from.addr() { step } else { bytes - 1 - step };
            // SAFETY: both places lie in what the caller promises, and no byte is written before it
            // is read.
            unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
        }
        to
    }

    /// # Safety
    ///
    /// As C's: `to` has `bytes` bytes.
    // SAFETY: as for `memcpy`.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, value: i32, bytes: usize) -> *mut u8 {
        for at in 0..bytes {
            // SAFETY: the place lies in what the caller promises. C converts the value to a byte.
            unsafe { to.add(at).write_volatile(value.to_le_bytes()[0]) };
        }
        to
    }

    /// # Safety
    ///
    /// As C's: `one` and `other` have `bytes` bytes.
    // SAFETY: as for `memcpy`.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, bytes: usize) -> i32 {
        for at in 0..bytes {
            // SAFETY: both places lie in what the caller promises.
            let (one, other) =
                unsafe { (one.add(at).read_volatile(), other.add(at).read_volatile()) };
            if one != other {
                return i32::from(one) - i32::from(other);
            }
        }
        0
    }

    /// # Safety
    ///
    /// As `memcmp`.
    // SAFETY: as for `memcpy`.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, bytes: usize) -> i32 {
        // SAFETY: the caller promises what `memcmp` asks for.
        unsafe { memcmp(one, other, bytes) }
    }
}
