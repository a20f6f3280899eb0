//! A [`Namespace`] is the blocks of a controller.

use crate::error::Error;
use crate::spec::NamespaceInfo;

/// log2 of the smallest block: smaller formats are not in use (NVM Command Set Specification 1.0,
/// section 4.1.5.1, LBA Format, `LBADS`).
const MIN_BLOCK_LG2: u32 = 9;
/// log2 of the largest that is taken for one.
const MAX_BLOCK_LG2: u32 = 31;

/// A namespace: blocks of one size, numbered from 0.
///
/// Only queues of the controller that was asked for it take it: how many bytes a command transfers
/// is the size of the blocks that this controller has, and what a buffer has to have room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// The controller, by its number among all.
    controller: u64,
    id: u32,
    blocks: u64,
    block_lg2: u32,
}

impl Namespace {
    pub(crate) fn new(controller: u64, id: u32, info: &NamespaceInfo) -> Result<Self, Error> {
        let NamespaceInfo { blocks, block_lg2, metadata } = *info;
        if blocks == 0 {
            return Err(Error::NoNamespace { id });
        }
        if !(MIN_BLOCK_LG2..=MAX_BLOCK_LG2).contains(&block_lg2) || metadata != 0 {
            return Err(Error::BlockFormat { id, block_lg2, metadata });
        }
        Ok(Self { controller, id, blocks, block_lg2 })
    }

    /// Its number.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Returns how many blocks it has.
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The size of a block, in bytes.
    pub const fn block_bytes(&self) -> u64 {
        1 << self.block_lg2
    }

    /// Refuses a namespace of another controller.
    #[inline]
    pub(crate) fn check_owner(&self, controller: u64) -> Result<(), Error> {
        if self.controller == controller { Ok(()) } else { Err(Error::Foreign) }
    }

    /// How many blocks so many bytes are, all of which it has from `lba` on.
    #[inline]
    pub(crate) fn count(&self, lba: u64, bytes: u64) -> Result<u64, Error> {
        let block = self.block_bytes();
        if bytes == 0 || !bytes.is_multiple_of(block) {
            return Err(Error::NotBlocks { bytes, block });
        }
        let count = bytes >> self.block_lg2;
        let blocks = self.blocks;
        match lba.checked_add(count) {
            Some(end) if end <= blocks => Ok(count),
            _ => Err(Error::Blocks { lba, count, blocks }),
        }
    }
}
