//! Arithmetic on powers of two, written by their logarithm.
//!
//! Page sizes, table sizes and alignments are powers of two everywhere in this crate; a `lg2` is at
//! most 63. Each helper proves itself where it stands.

/// `2^lg2`, in bytes or in whatever the caller counts.
#[inline(always)]
pub const fn size(lg2: u32) -> u64 {
    1 << lg2
}
const _: () = assert!(size(0) == 1 && size(12) == 4096 && size(63) == 1 << 63);

/// The `lg2` low bits set: the largest offset inside a block of `2^lg2`. `lg2` may be 64.
#[inline(always)]
pub const fn mask(lg2: u32) -> u64 {
    if lg2 >= 64 { u64::MAX } else { size(lg2) - 1 }
}
const _: () = assert!(mask(0) == 0 && mask(12) == 0xfff && mask(64) == u64::MAX);

/// Returns whether `value` is a multiple of `2^lg2`.
#[inline(always)]
pub const fn is_aligned(value: u64, lg2: u32) -> bool {
    value & mask(lg2) == 0
}
const _: () = assert!(is_aligned(0, 63) && is_aligned(0x3000, 12) && !is_aligned(0x3800, 12));

/// `value` rounded down to a multiple of `2^lg2`.
#[inline(always)]
pub const fn align_down(value: u64, lg2: u32) -> u64 {
    value & !mask(lg2)
}
const _: () = assert!(align_down(0x1fff, 12) == 0x1000 && align_down(u64::MAX, 64) == 0);

/// `value` rounded up to a multiple of `2^lg2`, or `None` where that is `2^64`.
#[inline(always)]
pub const fn align_up(value: u64, lg2: u32) -> Option<u64> {
    match value.checked_add(mask(lg2)) {
        Some(sum) => Some(align_down(sum, lg2)),
        None => None,
    }
}
const _: () = assert!(matches!(align_up(0x1001, 12), Some(0x2000)));
const _: () = assert!(matches!(align_up(0x1000, 12), Some(0x1000)));
const _: () = assert!(align_up(u64::MAX, 12).is_none());

/// The largest `lg2` whose power is not above `value`; 0 for 0.
#[inline(always)]
pub const fn floor(value: u64) -> u32 {
    (value | 1).ilog2()
}
const _: () = assert!(floor(0) == 0 && floor(1) == 0 && floor(4095) == 11 && floor(4096) == 12);

/// The alignment of `value`: the largest `lg2` that divides it; 64 for 0.
#[inline(always)]
pub const fn alignment(value: u64) -> u32 {
    value.trailing_zeros()
}
const _: () = assert!(alignment(0) == 64 && alignment(0x3000) == 12);
