//! Little-endian numbers in bytes.

/// The number of 16 bits at an offset.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number of 32 bits at an offset.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number of 64 bits at an offset.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Puts bytes at an offset, as far as there is room.
pub(crate) fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    for (byte, &new) in bytes.iter_mut().skip(at).zip(what) {
        *byte = new;
    }
}
