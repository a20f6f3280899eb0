//! The blocks of the disk: a file.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::Path;

use dmaspan_linux::client::{self, ClientMemory};

/// log2 of a block's size.
pub(crate) const BLOCK_LG2: u32 = 9;

/// A file whose bytes are the blocks of a disk.
#[derive(Debug)]
pub struct Disk {
    file: File,
    blocks: u64,
}

impl Disk {
    /// The disk whose blocks are the bytes of `file`, as many as there are whole blocks.
    ///
    /// # Errors
    ///
    /// Of the file; `InvalidInput` where it has no whole block.
    pub fn new(file: File) -> io::Result<Self> {
        let blocks = file.metadata()?.len() >> BLOCK_LG2;
        if blocks == 0 {
            let why = "the file is shorter than a block of 512 bytes: make it longer";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        Ok(Self { file, blocks })
    }

    /// The same of the file of a name.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::new(OpenOptions::new().read(true).write(true).open(path)?)
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Another descriptor of the same file.
    ///
    /// # Errors
    ///
    /// Of dup(2).
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, blocks: self.blocks })
    }

    /// Where blocks are in the file; `None` where the disk has not all of them.
    pub(crate) fn bytes(&self, first: u64, count: u64) -> Option<Range<u64>> {
        let end = first.checked_add(count).filter(|end| *end <= self.blocks)?;
        Some(first << BLOCK_LG2..end << BLOCK_LG2)
    }

    pub(crate) fn read(&self, to: &ClientMemory, offset: u64) -> Result<(), Failed> {
        moved(to, client::read_file(to, 0..to.len(), &self.file, offset))
    }

    pub(crate) fn write(&self, from: &ClientMemory, offset: u64) -> Result<(), Failed> {
        moved(from, client::write_file(from, 0..from.len(), &self.file, offset))
    }

    pub(crate) fn flush(&self) -> Result<(), Failed> {
        self.file.sync_data().map_err(|_| Failed::Disk)
    }
}

/// Says on which side a transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The guest's memory.
    Memory,
    /// The file.
    Disk,
}

fn moved(
    memory: &ClientMemory,
    moved: Result<u64, client::HeldFileError<dmaspan::Iova>>,
) -> Result<(), Failed> {
    match moved {
        Ok(bytes) if bytes == memory.len() => Ok(()),
        // Pages of the client's file that are gone, or memory that is none.
        Err(client::HeldFileError::Held(_)) => Err(Failed::Memory),
        Err(error) if error.errno() == dmaspan::Errno::EFAULT => Err(Failed::Memory),
        Ok(_) | Err(_) => Err(Failed::Disk),
    }
}
