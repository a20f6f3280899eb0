//! Copies between memory of this process that devices, other threads and other processes use
//! meanwhile: by [`dmaspan::bytes`], at the addresses that a pool was told.
//!
//! No reference to such memory is made but to atomic bytes. On x86-64 no later write of the caller
//! is seen before a copy; elsewhere that takes the barrier with which a driver tells its device.

#![expect(unsafe_code, reason = "copies between addresses")]

use std::ptr;

use dmaspan::HostAddr;
use dmaspan::bytes::{clear, copy};
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
    //    none but to atomic bytes, and for originals it was promised.
    unsafe { copy(from, to, length(transfer.len())) };
}

/// Writes zeros to the bytes of a slot.
#[inline]
pub(crate) fn zero(bytes: &InSlot<HostAddr>) {
    let to = pointer(bytes.span().start());
    // SAFETY:
    // 1. The bytes are of a slot that is held: writable memory of this process.
    // 2. To slots of this crate's memory nobody has a reference but to atomic bytes.
    unsafe { clear(to, length(bytes.span().len())) };
}

/// Copies the bytes of a slot out, as many as `into` has at most.
#[inline]
pub(crate) fn read(bytes: &InSlot<HostAddr>, into: &mut [u8]) {
    let len = into.len().min(length(bytes.span().len()));
    // SAFETY:
    // 1. The bytes read are of a slot that is held: readable memory of this process.
    unsafe { dmaspan::bytes::read(pointer(bytes.span().start()), &mut into[..len]) };
}

/// Copies bytes into a slot, as many as it has at most.
#[inline]
pub(crate) fn write(bytes: &InSlot<HostAddr>, from: &[u8]) {
    let len = from.len().min(length(bytes.span().len()));
    // SAFETY:
    // 1. The bytes written are of a slot that is held: writable memory of this process, to which
    //    nobody has a reference but to atomic bytes.
    unsafe { dmaspan::bytes::write(&from[..len], pointer(bytes.span().start())) };
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

#[cfg(test)]
mod tests {
    use super::*;

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
