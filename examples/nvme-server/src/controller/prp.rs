//! The guest's memory that a command names (NVM Express Base Specification 2.0, section 4.1.1).

use dmaspan::Prot;

use super::command::{Command, Status};
use crate::bytes::u64_at;
use crate::memory::{GuestMemory, Piece};

/// The only size of memory pages (`CC.MPS` of 0).
const PAGE: u64 = 4096;
/// How often memory may go while a command gets hold of it.
const ATTEMPTS: u32 = 64;
/// Bytes of an entry.
const ENTRY: u64 = 8;

/// Holds the `len` bytes of a command, in order; pages that follow one another are one piece. All
/// of them are held before any is used, so a command whose memory is not there does nothing.
///
/// # Errors
///
/// How the command ends: an entry within a page, or memory that is not the device's.
pub(super) fn hold<'m>(
    dma: &'m GuestMemory,
    command: &Command,
    len: u64,
    access: Prot,
) -> Result<Vec<Piece<'m>>, Status> {
    let pieces = pieces(dma, command, len)?;
    for _ in 0..ATTEMPTS {
        let mut held = Vec::with_capacity(pieces.len());
        let mut missing = None;
        for &(address, len) in &pieces {
            match dma.hold(address, len, access) {
                // Some of it cannot be reached.
                Ok(piece) if piece.slices(0, len).is_err() => return Err(Status::DATA_TRANSFER),
                Ok(piece) => held.push(piece),
                Err(_) => {
                    missing = Some((address, len));
                    break;
                }
            }
        }
        let Some((address, len)) = missing else { return Ok(held) };
        // The client may wait for what is held, before it maps what is missing.
        drop(held);
        drop(dma.hold_settled(address, len, access).map_err(|_| Status::DATA_TRANSFER)?);
    }
    Err(Status::DATA_TRANSFER)
}

/// Where the bytes are.
fn pieces(dma: &GuestMemory, command: &Command, len: u64) -> Result<Vec<(u64, u64)>, Status> {
    let (prp1, prp2) = (command.prp1(), command.prp2());
    if !prp1.is_multiple_of(4) {
        return Err(Status::PRP_OFFSET);
    }
    let first = (PAGE - prp1 % PAGE).min(len);
    let mut pieces = vec![(prp1, first)];
    let left = len - first;
    if left == 0 {
        return Ok(pieces);
    }
    if left <= PAGE {
        push(&mut pieces, prp2, left)?;
        return Ok(pieces);
    }
    list(dma, prp2, left, &mut pieces)?;
    Ok(pieces)
}

/// Reads lists of entries for `left` bytes.
fn list(
    dma: &GuestMemory,
    mut at: u64,
    mut left: u64,
    pieces: &mut Vec<(u64, u64)>,
) -> Result<(), Status> {
    while left > 0 {
        if !at.is_multiple_of(ENTRY) {
            return Err(Status::PRP_OFFSET);
        }
        let room = (PAGE - at % PAGE) / ENTRY;
        let wanted = left.div_ceil(PAGE);
        let entries = room.min(wanted);
        let mut bytes = vec![0; usize::try_from(entries * ENTRY).unwrap_or_default()];
        let held = dma.hold_settled(at, entries * ENTRY, Prot::READ);
        let held = held.map_err(|_| Status::DATA_TRANSFER)?;
        held.read(0, &mut bytes).map_err(|_| Status::DATA_TRANSFER)?;
        let mut entries = (0..bytes.len()).step_by(8).filter_map(|at| u64_at(&bytes, at));
        // The last entry of a page leads to the next page, where that is not the end.
        let data = if wanted > room { room - 1 } else { wanted };
        for entry in entries.by_ref().take(usize::try_from(data).unwrap_or_default()) {
            let len = left.min(PAGE);
            push(pieces, entry, len)?;
            left -= len;
        }
        if let Some(next) = entries.next() {
            // It begins with a page: a list of one entry, which leads to itself, would never end.
            if !next.is_multiple_of(PAGE) {
                return Err(Status::PRP_OFFSET);
            }
            at = next;
        }
    }
    Ok(())
}

/// Adds a page, to the last piece where it follows that.
fn push(pieces: &mut Vec<(u64, u64)>, address: u64, len: u64) -> Result<(), Status> {
    if !address.is_multiple_of(PAGE) {
        return Err(Status::PRP_OFFSET);
    }
    match pieces.last_mut() {
        Some((last, so_far)) if last.checked_add(*so_far) == Some(address) => *so_far += len,
        _ => pieces.push((address, len)),
    }
    Ok(())
}
