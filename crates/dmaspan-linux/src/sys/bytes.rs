//! Copies between memory that devices, other threads and other processes use meanwhile.
//!
//! No reference to such memory is made. On x86-64 it is read and written by the CPU's own string
//! instructions, which the compiler does not look into: with ERMS and FSRM (Intel 64 and IA-32
//! Architectures Optimization Reference Manual, 3.7.6) nothing is faster at the sizes of bounce
//! slots. On Arm and RISC-V it is by blocks of several registers (DDI 0487, C6.2, LDP of SIMD
//! registers, whose addresses have any alignment), and elsewhere, also for Miri, which knows no
//! assembly, by volatile words. Whichever it is, a byte that is read is one that the memory has
//! had. On x86-64 no later write of the caller is seen before a copy; elsewhere that takes the
//! barrier with which a driver tells its device.

#![expect(unsafe_code, reason = "copies between addresses")]

#[cfg(any(
    all(target_arch = "x86_64", not(miri)),
    target_arch = "aarch64",
    target_arch = "riscv64"
))]
use std::arch::asm;
use std::ptr;

use dmaspan::HostAddr;
use dmaspan::swiotlb::{InSlot, Transfer};

/// Copies as told.
#[inline]
pub(crate) fn transfer(transfer: &Transfer<HostAddr>) {
    let (from, to) = (pointer(transfer.source()), pointer(transfer.target()));
    // SAFETY:
    // 1. One side is of a slot that is held, the other of an original that was promised, and so
    //    both are memory of this process, readable and writable, of so many bytes (the contract of
    //    `Transfer`).
    // 2. Nobody has a reference that the copy breaks: to slots of this crate's memory there is
    //    none but to atomic words, and for originals it was promised.
    unsafe { copy(from, to, length(transfer.len())) };
}

/// Writes zeros to the bytes of a slot.
#[inline]
pub(crate) fn zero(bytes: &InSlot<HostAddr>) {
    let to = pointer(bytes.span().start());
    // SAFETY:
    // 1. The bytes are of a slot that is held: writable memory of this process.
    // 2. To slots of this crate's memory nobody has a reference but to atomic words.
    unsafe { clear(to, length(bytes.span().len())) };
}

/// Copies the bytes of a slot out, as many as `into` has at most.
#[inline]
pub(crate) fn read(bytes: &InSlot<HostAddr>, into: &mut [u8]) {
    let len = into.len().min(length(bytes.span().len()));
    // SAFETY:
    // 1. The bytes read are of a slot that is held: readable memory of this process.
    // 2. Those written are of `into`, which is borrowed exclusively and has so many.
    unsafe { copy(pointer(bytes.span().start()), into.as_mut_ptr(), len) };
}

/// Copies bytes into a slot, as many as it has at most.
#[inline]
pub(crate) fn write(bytes: &InSlot<HostAddr>, from: &[u8]) {
    let len = from.len().min(length(bytes.span().len()));
    // SAFETY:
    // 1. The bytes read are of `from`, which is borrowed and has so many.
    // 2. Those written are of a slot that is held: writable memory of this process, to which
    //    nobody has a reference but to atomic words.
    unsafe { copy(from.as_ptr(), pointer(bytes.span().start()), len) };
}

/// What is at an address of this process, whose provenance somebody has exposed.
#[inline]
fn pointer(addr: HostAddr) -> *mut u8 {
    // This crate is for 64 bits.
    ptr::with_exposed_provenance_mut(length(addr.get()))
}

/// The same number: this crate is for 64 bits.
#[inline]
fn length(bytes: u64) -> usize {
    bytes.try_into().unwrap_or(usize::MAX)
}

/// Copies `len` bytes, the first ones first.
///
/// # Safety
///
/// `len` bytes are readable at `from` and writable at `to`. Nobody has a reference to what is
/// written, nor one to what is read that permits others to write it, other than those that
/// permit anybody to do so at any time. Others may read and write both meanwhile.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY:
    // 1. It reads and writes `len` bytes, which the caller has promised, upwards: the direction
    //    flag is clear before assembly and stays so.
    // 2. It changes the three registers that are named, no flag and no stack.
    unsafe {
        asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Writes `len` zeros.
///
/// # Safety
///
/// As for what [`copy`] writes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(super) unsafe fn clear(to: *mut u8, len: usize) {
    // SAFETY:
    // 1. It writes `len` bytes, which the caller has promised, upwards: the direction flag is
    //    clear before assembly and stays so.
    // 2. It changes the two registers that are named, no flag and no stack; `al` it only reads.
    unsafe {
        asm!(
            "rep stosb",
            inout("rcx") len => _,
            inout("rdi") to => _,
            in("al") 0u8,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(any(miri, not(target_arch = "x86_64")))]
pub(super) use words::{clear, copy};

/// Blocks of several registers, by instructions that the compiler does not look into.
#[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
mod block {
    use super::asm;

    pub(super) const BYTES: usize = 64;

    /// Whether blocks may be copied between these. Machines of RISC-V may be slow with words that
    /// are not aligned.
    #[inline]
    pub(super) fn may_copy(from: *const u8, to: *const u8) -> bool {
        cfg!(target_arch = "aarch64") || (from.addr() | to.addr()).is_multiple_of(8)
    }

    /// Copies a block.
    ///
    /// # Safety
    ///
    /// As for so many bytes of [`copy`](super::copy), with [`may_copy`].
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8) {
        // SAFETY:
        // 1. It reads and writes a block, which the caller has promised, and changes the registers
        //    that are named, no flag and no stack.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            asm!(
                "ldp {a:q}, {b:q}, [{from}]",
                "ldp {c:q}, {d:q}, [{from}, #32]",
                "stp {a:q}, {b:q}, [{to}]",
                "stp {c:q}, {d:q}, [{to}, #32]",
                a = out(vreg) _, b = out(vreg) _, c = out(vreg) _, d = out(vreg) _,
                from = in(reg) from, to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
        // SAFETY:
        // 1. As above; the words are aligned.
        #[cfg(target_arch = "riscv64")]
        unsafe {
            asm!(
                "ld {a}, 0({from})", "ld {b}, 8({from})",
                "ld {c}, 16({from})", "ld {d}, 24({from})",
                "sd {a}, 0({to})", "sd {b}, 8({to})", "sd {c}, 16({to})", "sd {d}, 24({to})",
                "ld {a}, 32({from})", "ld {b}, 40({from})",
                "ld {c}, 48({from})", "ld {d}, 56({from})",
                "sd {a}, 32({to})", "sd {b}, 40({to})", "sd {c}, 48({to})", "sd {d}, 56({to})",
                a = out(reg) _, b = out(reg) _, c = out(reg) _, d = out(reg) _,
                from = in(reg) from, to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
    }

    /// Writes a block of zeros.
    ///
    /// # Safety
    ///
    /// As for what [`copy`] writes.
    #[inline]
    pub(super) unsafe fn clear(to: *mut u8) {
        // SAFETY:
        // 1. It writes a block, which the caller has promised, and changes no register, flag or
        //    stack.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            asm!(
                "stp xzr, xzr, [{to}]", "stp xzr, xzr, [{to}, #16]",
                "stp xzr, xzr, [{to}, #32]", "stp xzr, xzr, [{to}, #48]",
                to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
        // SAFETY:
        // 1. As above; the words are aligned.
        #[cfg(target_arch = "riscv64")]
        unsafe {
            asm!(
                "sd zero, 0({to})", "sd zero, 8({to})", "sd zero, 16({to})", "sd zero, 24({to})",
                "sd zero, 32({to})", "sd zero, 40({to})", "sd zero, 48({to})", "sd zero, 56({to})",
                to = in(reg) to,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// By volatile words, for any CPU, and by blocks where it has such.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
mod words {
    #[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
    use super::block;

    /// The bytes of a word.
    const WORD: usize = size_of::<u64>();

    /// Copies `len` bytes, the first ones first.
    ///
    /// # Safety
    ///
    /// `len` bytes are readable at `from` and writable at `to`. Nobody has a reference to what is
    /// written, nor one to what is read that permits others to write it, other than those that
    /// permit anybody to do so at any time. Others may read and write both meanwhile.
    #[inline]
    pub(in crate::sys) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let is_aligned = (from.addr() ^ to.addr()).is_multiple_of(WORD);
        let mut at = 0;
        while at < len {
            // They lie within what the caller has promised, but as addresses they need no proof.
            let (source, target) = (from.wrapping_add(at), to.wrapping_add(at));
            #[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
            if len - at >= block::BYTES && block::may_copy(source, target) {
                // SAFETY:
                // 1. The block is of the bytes readable at `from` and writable at `to`, and may be
                //    copied.
                unsafe { block::copy(source, target) };
                at += block::BYTES;
                continue;
            }
            if is_aligned && target.addr().is_multiple_of(WORD) && len - at >= WORD {
                // SAFETY:
                // 1. The word is aligned, as the target is, and of the bytes readable at `from`.
                let word = unsafe { source.cast::<u64>().read_volatile() };
                // SAFETY:
                // 1. The word is aligned, and of the bytes writable at `to`.
                unsafe { target.cast::<u64>().write_volatile(word) };
                at += WORD;
            } else {
                // SAFETY:
                // 1. `at < len`: the byte is one of those readable at `from`.
                let byte = unsafe { source.read_volatile() };
                // SAFETY:
                // 1. `at < len`: the byte is one of those writable at `to`.
                unsafe { target.write_volatile(byte) };
                at += 1;
            }
        }
    }

    /// Writes `len` zeros.
    ///
    /// # Safety
    ///
    /// As for what [`copy`] writes.
    #[inline]
    pub(in crate::sys) unsafe fn clear(to: *mut u8, len: usize) {
        let mut at = 0;
        while at < len {
            let target = to.wrapping_add(at);
            #[cfg(any(target_arch = "aarch64", target_arch = "riscv64"))]
            if len - at >= block::BYTES && block::may_copy(target, target) {
                // SAFETY:
                // 1. The block is of the bytes writable at `to`, and may be written.
                unsafe { block::clear(target) };
                at += block::BYTES;
                continue;
            }
            if target.addr().is_multiple_of(WORD) && len - at >= WORD {
                // SAFETY:
                // 1. The word is aligned, and of the bytes writable at `to`.
                unsafe { target.cast::<u64>().write_volatile(0) };
                at += WORD;
            } else {
                // SAFETY:
                // 1. `at < len`: the byte is one of those writable at `to`.
                unsafe { target.write_volatile(0) };
                at += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length to 140, from every offset to every offset; some of them under Miri, which is
    /// hundreds of times slower.
    fn check(copy: unsafe fn(*const u8, *mut u8, usize), clear: unsafe fn(*mut u8, usize)) {
        let source: Vec<u8> = (1..=160).collect();
        let (offsets, lengths) = if cfg!(miri) { (4, 23) } else { (1, 1) };
        let offsets = (0..9).step_by(offsets);
        for (from, to, len) in offsets
            .clone()
            .flat_map(|from| offsets.clone().map(move |to| (from, to)))
            .flat_map(|(from, to)| (0..140).step_by(lengths).map(move |len| (from, to, len)))
        {
            let mut target = [0xa5; 160];
            let (wanted, start) = (&source[from..from + len], target[to..].as_mut_ptr());
            // SAFETY:
            // 1. Both have at least 160 - 8 bytes from there on, which nobody else uses.
            unsafe { copy(wanted.as_ptr(), start, len) };
            assert_eq!(&target[to..to + len], wanted);
            assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xa5));
            let start = target[to..].as_mut_ptr();
            // SAFETY:
            // 1. The target has at least 160 - 8 bytes from there on, which nobody else uses.
            unsafe { clear(start, len) };
            let mut cleared = [0xa5; 160];
            cleared[to..to + len].fill(0);
            assert_eq!(target, cleared);
        }
    }

    #[test]
    fn copies_and_zeros_are_exact_at_every_alignment() {
        check(copy, clear);
    }

    #[test]
    fn words_are_exact_at_every_alignment() {
        check(words::copy, words::clear);
    }

    /// `bounce:N` or `memcpy:N`; `cargo xtask cross copies` counts the instructions.
    #[test]
    fn a_page_is_copied_as_often_as_the_environment_says() {
        let asked = std::env::var("DMASPAN_COPIES").unwrap_or_else(|_| "bounce:1".to_owned());
        let (by, times) = asked.split_once(':').unwrap();
        let (source, mut target) = ([7u64; 512], [0u64; 512]);
        let from = source.as_ptr().cast::<u8>();
        for _ in 0..times.parse().unwrap() {
            let to = std::hint::black_box(target.as_mut_ptr().cast::<u8>());
            let len = std::hint::black_box(4096);
            match by {
                // SAFETY:
                // 1. Both are pages of this test, and nobody else uses them.
                "bounce" => unsafe { copy(from, to, len) },
                // SAFETY:
                // 1. As above; they do not overlap.
                _ => unsafe { ptr::copy_nonoverlapping(from, to, len) },
            }
        }
        assert_eq!(target, source);
    }
}
