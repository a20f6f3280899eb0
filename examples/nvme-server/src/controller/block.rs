//! Commands of I/O queues (NVM Command Set Specification 1.0, section 3).

use dmaspan::Prot;

use super::command::{Command, Status};
use super::prp;
use crate::disk::{BLOCK_LG2, Disk, Failed};
use crate::memory::GuestMemory;

/// log2 of the largest transfer in pages of 4 KiB, as Identify says it.
pub(super) const MDTS: u8 = 5;
const MOST_BLOCKS: u64 = (4096 << MDTS) >> BLOCK_LG2;
/// The only namespace, and the number that means all of them.
pub(super) const NAMESPACE: u32 = 1;
const ALL: u32 = u32::MAX;
/// Force Unit Access, of dword 12.
const FUA: u32 = 1 << 30;

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;

/// Does a command to its end.
///
/// # Errors
///
/// How it ends instead.
pub(super) fn execute(command: &Command, dma: &GuestMemory, disk: &Disk) -> Result<(), Status> {
    let is_flush = command.opcode() == FLUSH;
    match command.namespace() {
        NAMESPACE => {}
        ALL if is_flush => {}
        _ => return Err(Status::INVALID_NAMESPACE),
    }
    if command.is_unusual() {
        return Err(Status::INVALID_FIELD);
    }
    match command.opcode() {
        FLUSH => disk.flush().map_err(|_| Status::WRITE_FAULT),
        WRITE => {
            transfer(command, dma, disk, Prot::READ)?;
            if command.dword(12) & FUA != 0 {
                disk.flush().map_err(|_| Status::WRITE_FAULT)?;
            }
            Ok(())
        }
        READ => transfer(command, dma, disk, Prot::WRITE),
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// Moves blocks between the disk and the guest's memory, which is held for `access`.
fn transfer(command: &Command, dma: &GuestMemory, disk: &Disk, access: Prot) -> Result<(), Status> {
    let (first, count) = command.blocks();
    if count > MOST_BLOCKS {
        return Err(Status::INVALID_FIELD);
    }
    let bytes = disk.bytes(first, count).ok_or(Status::OUT_OF_RANGE)?;
    let mut offset = bytes.start;
    for held in prp::hold(dma, command, bytes.end - bytes.start, access)? {
        let (moved, fault) = match access.contains(Prot::WRITE) {
            true => (disk.read(&held, offset), Status::READ_FAULT),
            false => (disk.write(&held, offset), Status::WRITE_FAULT),
        };
        moved.map_err(|failed| match failed {
            Failed::Memory => Status::DATA_TRANSFER,
            Failed::Disk => fault,
        })?;
        offset += held.len();
    }
    Ok(())
}
