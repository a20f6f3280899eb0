//! Accesses to bytes that devices, other threads and other processes use at the same time.
//!
//! **Each byte is accessed alone.** To the language, all functions here are loops of relaxed
//! accesses to [`AtomicU8`], in any number of threads: so no two accesses to a byte have different
//! sizes, wherever ranges begin and end, and none of them races. Aligned words were the other
//! choice. Their edges hold bytes of others: a masked exchange of a word writes those back, where a
//! neighbour may be plain memory of somebody who knows of no atomics, and a device does not take
//! part in the exchange.
//!
//! **The CPU takes more bytes at once**, by assembly, into which the compiler does not look. On
//! x86-64 a copy of 64 bytes and more is its string instruction (with ERMS and FSRM nothing is
//! faster: Intel 64 and IA-32 Architectures Optimization Reference Manual, 3.7.6); on Arm and
//! RISC-V it is blocks of several registers (DDI 0487, C6.2: an LDP of SIMD registers has any
//! alignment); shorter ones are words. Each such access is one that its bytes alone could have
//! been, since caches are coherent byte by byte: so it is what the loop says. Miri, which knows no
//! assembly, runs the loop itself.
//!
//! A [number](Scalar) is read or written by one instruction, as devices expect of descriptors; one
//! of 64 bits by two on a CPU of 32. So is what a copy has left of 2, 4 or 8 bytes where both sides
//! are at multiples of that, or on x86-64 and AArch64 where the written one is: who looks at the
//! tag of a completion that was copied sees all of its number. For CPUs that have no assembly here,
//! copies are the loop, and a number is an atomic of its size: what is read and written there as a
//! number by several threads is not to be copied at the same time.
//!
//! A byte that is read is one that the memory has had. Nothing here orders other accesses: that
//! takes the barrier with which a driver tells its device, or a [`fence`].
#![expect(unsafe_code, reason = "memory that devices and other threads use is accessed here")]

use core::fmt;
use core::ptr;
// Not loom's, which are no plain bytes.
use core::sync::atomic::{AtomicU8, Ordering, fence};

/// A number that one access reads or writes, in the byte order of the CPU: `u8`, `u16`, `u32` or
/// `u64`.
pub trait Scalar: Copy + fmt::Debug + Send + Sync + 'static + sealed::Sealed {}

mod sealed {
    /// # Safety
    ///
    /// Any bytes are a value, and all bytes of a value are written.
    pub unsafe trait Sealed: Sized {
        /// # Safety
        ///
        /// As of [`load`](super::load).
        unsafe fn load(at: *const Self) -> Self;

        /// # Safety
        ///
        /// As of [`store`](super::store).
        unsafe fn store(at: *mut Self, value: Self);
    }
}

/// Reads a number.
///
/// # Safety
///
/// The number at `at` is aligned and readable, and nobody has a reference that permits others to
/// write it, but to atomic bytes.
#[inline(always)]
pub unsafe fn load<S: Scalar>(at: *const S) -> S {
    // SAFETY: the caller's promise.
    unsafe { S::load(at) }
}

/// Writes a number.
///
/// # Safety
///
/// The number at `at` is aligned and writable, and nobody has a reference to it but to atomic
/// bytes.
#[inline(always)]
pub unsafe fn store<S: Scalar>(at: *mut S, value: S) {
    // SAFETY: the caller's promise.
    unsafe { S::store(at, value) }
}

/// Copies `len` bytes, the first ones first.
///
/// # Safety
///
/// `len` bytes are readable at `from` and writable at `to`. Nobody has a reference to what is
/// written, nor one to what is read that permits others to write it, but to atomic bytes. Devices
/// may read and write both meanwhile, and other threads may do so by the functions of this module.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { fill::<false>(from, to, len) }
}

/// Writes `len` zeros.
///
/// # Safety
///
/// As for what [`copy`] writes.
#[inline]
pub unsafe fn clear(to: *mut u8, len: usize) {
    // SAFETY: the caller's promise. Zeros are not read.
    unsafe { fill::<true>(to, to, len) }
}

/// Copies, or writes zeros where it `CLEARS`.
///
/// # Safety
///
/// As of [`copy`]; where it clears, nothing is read.
#[inline(always)]
unsafe fn fill<const CLEARS: bool>(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while at < len {
        // They lie within what the caller has promised, but as addresses they need no proof.
        let (source, target, left) = (from.wrapping_add(at), to.wrapping_add(at), len - at);
        let is_block = left >= BLOCK && may_be::<Word>(source, target);
        let block = if is_block {
            // SAFETY: so many bytes of what the caller promised are left, and words may begin
            // there.
            unsafe { cpu::block::<CLEARS>(source, target, left) }
        } else {
            0
        };
        at += if block > 0 {
            block
        } else if left >= size_of::<Word>() && may_be::<Word>(source, target) {
            // SAFETY: so many of the promised bytes are left, and this CPU takes them at once.
            unsafe { number::<CLEARS, Word>(source.cast(), target.cast()) }
        } else if left >= 4 && may_be::<u32>(source, target) {
            // SAFETY: as above.
            unsafe { number::<CLEARS, u32>(source.cast(), target.cast()) }
        } else if left >= 2 && may_be::<u16>(source, target) {
            // SAFETY: as above.
            unsafe { number::<CLEARS, u16>(source.cast(), target.cast()) }
        } else {
            // SAFETY: `at < len`: one byte of the promised ones is left.
            unsafe { number::<CLEARS, u8>(source, target) }
        };
    }
}

/// Whether this CPU takes a number's bytes at once here.
#[inline(always)]
fn may_be<S: Scalar>(from: *const u8, to: *mut u8) -> bool {
    (from.addr() | to.addr()).is_multiple_of(cpu::ALIGN.min(size_of::<S>()))
}

/// Copies or clears a number, and returns how many bytes it has.
///
/// # Safety
///
/// As of [`fill`] for these bytes, where the CPU takes them at once.
#[inline(always)]
unsafe fn number<const CLEARS: bool, S: Scalar + Default>(from: *const S, to: *mut S) -> usize {
    // SAFETY: the caller's promise.
    let value = if CLEARS { S::default() } else { unsafe { load(from) } };
    // SAFETY: the caller's promise.
    unsafe { store(to, value) };
    size_of::<S>()
}

/// Copies bytes out of shared memory, as many as `into` has.
///
/// # Safety
///
/// As for what [`copy`] reads.
#[inline]
pub unsafe fn read(from: *const u8, into: &mut [u8]) {
    // SAFETY: those read are the caller's promise; those written are borrowed exclusively.
    unsafe { copy(from, into.as_mut_ptr(), into.len()) }
}

/// Copies bytes into shared memory, as many as `from` has.
///
/// # Safety
///
/// As for what [`copy`] writes.
#[inline]
pub unsafe fn write(from: &[u8], to: *mut u8) {
    if cfg!(miri) {
        // Nobody writes what is borrowed: it is no memory of atomics.
        for (at, &byte) in from.iter().enumerate() {
            // SAFETY: it is one of the bytes that the caller promised.
            unsafe { store(to.wrapping_add(at), byte) };
        }
    } else {
        // SAFETY: those written are the caller's promise; those read are borrowed.
        unsafe { copy(from.as_ptr(), to, from.len()) }
    }
}

/// Eight bytes of shared memory at a multiple of eight, as a number in the CPU's byte order: what
/// drivers keep their queues in. Reads and writes of it may run beside all of this module's.
///
/// An order other than [`Relaxed`](Ordering::Relaxed) is a [`fence`] of that order, behind a load
/// and before a store.
///
/// ```
/// use std::sync::atomic::Ordering;
///
/// use dmaspan::bytes::SharedWord;
///
/// let word = SharedWord::default();
/// word.store(7, Ordering::Release);
/// assert_eq!(word.load(Ordering::Acquire), 7);
/// ```
#[derive(Debug, Default)]
#[repr(C, align(8))]
pub struct SharedWord([AtomicU8; 8]);

impl SharedWord {
    /// Reads it.
    #[inline]
    pub fn load(&self, order: Ordering) -> u64 {
        // SAFETY: it is aligned, and borrowed as atomic bytes.
        let value = unsafe { load(ptr::from_ref(&self.0).cast()) };
        if order != Ordering::Relaxed {
            fence(order);
        }
        value
    }

    /// Writes it.
    #[inline]
    pub fn store(&self, value: u64, order: Ordering) {
        if order != Ordering::Relaxed {
            fence(order);
        }
        // SAFETY: it is aligned, and borrowed as atomic bytes, which may be written.
        unsafe { store(ptr::from_ref(&self.0).cast_mut().cast(), value) };
    }
}

/// What a copy takes at once.
#[cfg(target_pointer_width = "64")]
type Word = u64;
/// What a copy takes at once.
#[cfg(not(target_pointer_width = "64"))]
type Word = u32;
/// The bytes of a block; on x86-64 how many its string instructions need to be as fast as words.
const BLOCK: usize = 64;

/// Implements numbers: how each is read, and how it is written.
macro_rules! numbers {
    ($($number:ident: |$at:ident| $load:expr, |$to:ident, $value:ident| $store:expr;)*) => {$(
        impl Scalar for $number {}
        // SAFETY: it is a number without padding.
        unsafe impl sealed::Sealed for $number {
            #[inline(always)]
            unsafe fn load($at: *const Self) -> Self {
                $load
            }

            #[inline(always)]
            unsafe fn store($to: *mut Self, $value: Self) {
                $store
            }
        }
    )*};
}

/// Numbers by one instruction each: the register that it takes, and the instructions.
#[cfg(all(
    any(
        all(any(target_arch = "x86_64", target_arch = "aarch64"), target_pointer_width = "64"),
        target_arch = "riscv64",
        target_arch = "arm"
    ),
    not(miri)
))]
macro_rules! instructions {
    ($($number:ident, $register:ident, $load:literal, $store:literal;)*) => {
        numbers! {$(
            $number: |at| {
                let value;
                // SAFETY: it reads the number that the caller promises, and changes no flag and no
                // stack.
                unsafe {
                    asm!($load, at = in(reg) at, value = lateout($register) value,
                         options(nostack, preserves_flags, readonly));
                }
                value
            }, |at, value| {
                // SAFETY: it writes the number that the caller promises, and changes no flag and no
                // stack.
                unsafe {
                    asm!($store, at = in(reg) at, value = in($register) value,
                         options(nostack, preserves_flags));
                }
            };
        )*}
    };
}

/// Words at any address, and the string instructions.
#[cfg(all(target_arch = "x86_64", target_pointer_width = "64", not(miri)))]
mod cpu {
    use core::arch::asm;

    use super::{Scalar, sealed};

    instructions! {
        u8, reg_byte, "mov {value}, byte ptr [{at}]", "mov byte ptr [{at}], {value}";
        u16, reg, "mov {value:x}, word ptr [{at}]", "mov word ptr [{at}], {value:x}";
        u32, reg, "mov {value:e}, dword ptr [{at}]", "mov dword ptr [{at}], {value:e}";
        u64, reg, "mov {value}, qword ptr [{at}]", "mov qword ptr [{at}], {value}";
    }

    /// Words may begin anywhere.
    pub(super) const ALIGN: usize = 1;

    /// Copies or clears all bytes that are left, and returns how many.
    ///
    /// # Safety
    ///
    /// As of [`fill`](super::fill), for a block and more, where words may begin.
    #[inline(always)]
    pub(super) unsafe fn block<const CLEARS: bool>(
        from: *const u8,
        to: *mut u8,
        left: usize,
    ) -> usize {
        if CLEARS {
            // SAFETY: 1. It writes `left` bytes, which the caller has promised, upwards: the
            // direction flag is clear before assembly and stays so. 2. It changes the two registers
            // that are named, no flag and no stack; `al` it only reads. 3. As below.
            unsafe {
                asm!("rep stosb", inout("rcx") left => _, inout("rdi") to => _, in("al") 0u8,
                     options(nostack, preserves_flags));
            }
        } else {
            // SAFETY: 1. It reads and writes `left` bytes, as above. 2. It changes the three
            // registers that are named, no flag and no stack. 3. Whatever it takes at once, each
            // byte is read and written as by itself: no thread sees what a loop of bytes could not
            // have done.
            unsafe {
                asm!("rep movsb", inout("rcx") left => _, inout("rsi") from => _,
                     inout("rdi") to => _, options(nostack, preserves_flags));
            }
        }
        left
    }
}

/// Words at any address, and blocks by registers that a kernel may not have.
#[cfg(all(target_arch = "aarch64", target_pointer_width = "64", not(miri)))]
mod cpu {
    use core::arch::asm;

    use super::{BLOCK, Scalar, sealed};

    instructions! {
        u8, reg, "ldrb {value:w}, [{at}]", "strb {value:w}, [{at}]";
        u16, reg, "ldrh {value:w}, [{at}]", "strh {value:w}, [{at}]";
        u32, reg, "ldr {value:w}, [{at}]", "str {value:w}, [{at}]";
        u64, reg, "ldr {value:x}, [{at}]", "str {value:x}, [{at}]";
    }

    /// Words may begin anywhere.
    pub(super) const ALIGN: usize = 1;

    /// Copies a block where the CPU has registers for it, or clears one, and returns how many bytes
    /// that was.
    ///
    /// # Safety
    ///
    /// As of [`fill`](super::fill), for a block and more, where words may begin.
    #[inline(always)]
    pub(super) unsafe fn block<const CLEARS: bool>(
        from: *const u8,
        to: *mut u8,
        _left: usize,
    ) -> usize {
        if CLEARS {
            // SAFETY: 1. It writes a block, which the caller has promised, and changes no register,
            // flag or stack. 2. As below.
            unsafe {
                asm!("stp xzr, xzr, [{to}]", "stp xzr, xzr, [{to}, #16]",
                     "stp xzr, xzr, [{to}, #32]", "stp xzr, xzr, [{to}, #48]",
                     to = in(reg) to, options(nostack, preserves_flags));
            }
            return BLOCK;
        }
        if cfg!(not(target_feature = "neon")) {
            let _ = from;
            return 0;
        }
        // SAFETY: 1. It reads and writes a block, which the caller has promised, and changes the
        // registers that are named, no flag and no stack. 2. Each byte is read and written as by
        // itself: no thread sees what a loop of bytes could not have done.
        #[cfg(target_feature = "neon")]
        unsafe {
            asm!("ldp {a:q}, {b:q}, [{from}]", "ldp {c:q}, {d:q}, [{from}, #32]",
                 "stp {a:q}, {b:q}, [{to}]", "stp {c:q}, {d:q}, [{to}, #32]",
                 a = out(vreg) _, b = out(vreg) _, c = out(vreg) _, d = out(vreg) _,
                 from = in(reg) from, to = in(reg) to, options(nostack, preserves_flags));
        }
        BLOCK
    }
}

/// Aligned words and blocks of them: machines may be slow with others.
#[cfg(all(target_arch = "riscv64", not(miri)))]
mod cpu {
    use core::arch::asm;

    use super::{BLOCK, Scalar, sealed};

    instructions! {
        u8, reg, "lbu {value}, 0({at})", "sb {value}, 0({at})";
        u16, reg, "lhu {value}, 0({at})", "sh {value}, 0({at})";
        u32, reg, "lwu {value}, 0({at})", "sw {value}, 0({at})";
        u64, reg, "ld {value}, 0({at})", "sd {value}, 0({at})";
    }

    /// Words begin at multiples of this.
    pub(super) const ALIGN: usize = size_of::<super::Word>();

    /// Copies or clears a block of aligned words, and returns how many bytes that was.
    ///
    /// # Safety
    ///
    /// As of [`fill`](super::fill), for a block and more, where words may begin.
    #[inline(always)]
    pub(super) unsafe fn block<const CLEARS: bool>(
        from: *const u8,
        to: *mut u8,
        _left: usize,
    ) -> usize {
        if CLEARS {
            // SAFETY: 1. It writes a block, which the caller has promised, and changes no register,
            // flag or stack. 2. As below.
            unsafe {
                asm!("sd zero, 0({to})", "sd zero, 8({to})", "sd zero, 16({to})",
                     "sd zero, 24({to})", "sd zero, 32({to})", "sd zero, 40({to})",
                     "sd zero, 48({to})", "sd zero, 56({to})",
                     to = in(reg) to, options(nostack, preserves_flags));
            }
        } else {
            // SAFETY: 1. It reads and writes a block, which the caller has promised, and changes
            // the registers that are named, no flag and no stack. 2. Each byte is read and written
            // as by itself: no thread sees what a loop of bytes could not have done.
            unsafe {
                asm!("ld {a}, 0({from})", "ld {b}, 8({from})",
                     "ld {c}, 16({from})", "ld {d}, 24({from})",
                     "sd {a}, 0({to})", "sd {b}, 8({to})", "sd {c}, 16({to})", "sd {d}, 24({to})",
                     "ld {a}, 32({from})", "ld {b}, 40({from})",
                     "ld {c}, 48({from})", "ld {d}, 56({from})",
                     "sd {a}, 32({to})", "sd {b}, 40({to})", "sd {c}, 48({to})", "sd {d}, 56({to})",
                     a = out(reg) _, b = out(reg) _, c = out(reg) _, d = out(reg) _,
                     from = in(reg) from, to = in(reg) to, options(nostack, preserves_flags));
            }
        }
        BLOCK
    }
}

/// Numbers alone: on Arm of 32 bits by instructions, of which one of 64 bits takes two, with
/// aligned words; elsewhere as atomics, and for Miri as bytes.
#[cfg(any(
    miri,
    not(any(
        all(any(target_arch = "x86_64", target_arch = "aarch64"), target_pointer_width = "64"),
        target_arch = "riscv64"
    ))
))]
mod cpu {
    #[cfg(all(target_arch = "arm", not(miri)))]
    use core::arch::asm;
    #[cfg(any(not(target_arch = "arm"), miri))]
    use core::sync::atomic::{AtomicU8, Ordering};
    #[cfg(not(any(target_arch = "arm", miri)))]
    use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

    use super::{Scalar, sealed};

    #[cfg(all(target_arch = "arm", not(miri)))]
    instructions! {
        u8, reg, "ldrb {value}, [{at}]", "strb {value}, [{at}]";
        u16, reg, "ldrh {value}, [{at}]", "strh {value}, [{at}]";
        u32, reg, "ldr {value}, [{at}]", "str {value}, [{at}]";
    }

    /// Numbers by several of smaller ones.
    #[cfg(any(target_arch = "arm", miri))]
    macro_rules! parts {
        ($($number:ident, $part:ident;)*) => {
            numbers! {$(
                $number: |at| {
                    let mut bytes = [0; size_of::<Self>()];
                    let (parts, _) = bytes.as_chunks_mut::<{ size_of::<$part>() }>();
                    for (n, part) in parts.iter_mut().enumerate() {
                        // SAFETY: it is a part of the number that the caller promises.
                        let value = unsafe { super::load(at.cast::<$part>().wrapping_add(n)) };
                        *part = value.to_ne_bytes();
                    }
                    Self::from_ne_bytes(bytes)
                }, |at, value| {
                    let (bytes, at) = (value.to_ne_bytes(), at.cast::<$part>());
                    for (n, part) in bytes.as_chunks().0.iter().enumerate() {
                        // SAFETY: it is a part of the number that the caller promises.
                        unsafe { super::store(at.wrapping_add(n), $part::from_ne_bytes(*part)) };
                    }
                };
            )*}
        };
    }

    /// As a device is to see them: by one access.
    #[cfg(any(not(target_arch = "arm"), miri))]
    macro_rules! atomics {
        ($($number:ident, $atomic:ident;)*) => {
            numbers! {$(
                // SAFETY: the caller promises the number.
                $number: |at| unsafe { $atomic::from_ptr(at.cast_mut()) }.load(Ordering::Relaxed),
                |at, value| {
                    // SAFETY: the caller promises the number.
                    unsafe { $atomic::from_ptr(at) }.store(value, Ordering::Relaxed);
                };
            )*}
        };
    }

    #[cfg(any(not(target_arch = "arm"), miri))]
    atomics! { u8, AtomicU8; }
    #[cfg(not(any(target_arch = "arm", miri)))]
    atomics! { u16, AtomicU16; u32, AtomicU32; u64, AtomicU64; }
    #[cfg(miri)]
    parts! { u16, u8; u32, u8; u64, u8; }
    #[cfg(all(target_arch = "arm", not(miri)))]
    parts! { u64, u32; }

    /// Words begin at multiples of this; 0 where bytes are accessed alone.
    pub(super) const ALIGN: usize =
        if cfg!(all(target_arch = "arm", not(miri))) { size_of::<super::Word>() } else { 0 };

    /// Nothing is taken at once.
    ///
    /// # Safety
    ///
    /// None.
    pub(super) unsafe fn block<const CLEARS: bool>(
        _from: *const u8,
        _to: *mut u8,
        _left: usize,
    ) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_zeros_are_exact_at_every_alignment() {
        // Under Miri each byte takes its time.
        const MOST: usize = if cfg!(miri) { 20 } else { 200 };
        const ROOM: usize = MOST + 20;
        let source: [u8; ROOM] = core::array::from_fn(|n| n.to_le_bytes()[0] | 1);
        for (from, to) in (0..9).flat_map(|from| (0..9).map(move |to| (from, to))) {
            for len in 0..MOST {
                let (mut shared, mut back) = ([0xa4; ROOM], [0xa4; ROOM]);
                let (bytes, start) = (&source[from..from + len], shared[to..].as_mut_ptr());
                // SAFETY: there are as many, which nobody else uses.
                unsafe { write(bytes, start) };
                // SAFETY: as above.
                unsafe { copy(start, back[from..].as_mut_ptr(), len) };
                let mut read_back = [0; ROOM];
                // SAFETY: as above.
                unsafe { read(start, &mut read_back[..len]) };
                let beside = |all: &[u8; ROOM], at: usize| {
                    all[..at] == [0xa4; ROOM][..at] && all[at + len..] == [0xa4; ROOM][at + len..]
                };
                assert_eq!((&shared[to..to + len], &back[from..from + len]), (bytes, bytes));
                assert_eq!(&read_back[..len], bytes);
                assert!(beside(&shared, to) && beside(&back, from), "{from} {to} {len}");
                let start = shared[to..].as_mut_ptr();
                // SAFETY: as above.
                unsafe { clear(start, len) };
                assert!(shared[to..to + len] == [0; ROOM][..len] && beside(&shared, to));
            }
        }
    }

    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(any(miri, loom))))]
    #[test]
    fn a_number_that_is_copied_is_seen_whole() {
        extern crate std;
        use core::sync::atomic::AtomicBool;

        fn check<S: Scalar + PartialEq>(values: [S; 2], at: usize) {
            let word = SharedWord::default();
            let pointer = || word.0[at..].as_ptr().cast_mut();
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for value in (0..200_000).map(|n| values[n % 2]) {
                        let from = ptr::from_ref(&value).cast();
                        // SAFETY: the number lies in the word, as atomic bytes.
                        unsafe { copy(from, pointer().cast(), size_of::<S>()) };
                    }
                    is_over.store(true, Ordering::Relaxed);
                });
                while !is_over.load(Ordering::Relaxed) {
                    // SAFETY: as above, and it is aligned.
                    let seen = unsafe { load(pointer().cast::<S>()) };
                    assert!(values.contains(&seen), "{seen:?}");
                }
            });
        }

        check([0, u16::MAX], 2);
        check([0, u32::MAX], 4);
        check([0, u64::MAX], 0);
    }

    #[test]
    fn numbers_are_in_memory_in_the_order_of_the_cpu() {
        fn check<S: Scalar + PartialEq>(value: S, bytes: &[u8]) {
            let mut memory = [0xa4_u64; 3];
            let at = memory[1..].as_mut_ptr().cast::<S>();
            // SAFETY: there is an aligned number, which nobody else uses.
            unsafe { store(at, value) };
            // SAFETY: as above.
            assert_eq!(unsafe { load(at) }, value);
            assert_eq!(&memory[1].to_ne_bytes()[..bytes.len()], bytes);
            assert_eq!((memory[0], memory[2]), (0xa4, 0xa4));
            let behind = &memory[1].to_ne_bytes()[bytes.len()..];
            assert_eq!(behind, &0xa4_u64.to_ne_bytes()[bytes.len()..]);
        }
        check(0x81_u8, &[0x81]);
        check(0x8123_u16, &0x8123_u16.to_ne_bytes());
        check(0x8123_4567_u32, &0x8123_4567_u32.to_ne_bytes());
        check(0x8123_4567_89ab_cdef_u64, &0x8123_4567_89ab_cdef_u64.to_ne_bytes());
        let word = SharedWord::default();
        word.store(7, Ordering::Release);
        assert_eq!((word.load(Ordering::Acquire), size_of::<SharedWord>()), (7, 8));
    }
}
