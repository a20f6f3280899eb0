//! The RAM of a machine: memory that the test and QEMU share.
#![expect(unsafe_code, reason = "memory that another process writes is mapped here")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::dma::{DmaMemory, Piece};
use dmaspan::io_pgtable::Arena;
use dmaspan::{PhysAddr, Span, lg2};
use dmaspan_sim::bus::{Bus, BusError};
use parking_lot::Mutex;

const ACCESS: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// What the mapping is aligned to: the largest table.
const ALIGN: usize = 2 << 20;
/// What firmware and a PC's old devices have a claim on.
const RESERVED: u64 = 2 << 20;
/// log2 of the largest piece that is handed out.
const LARGEST_LG2: u32 = 30;
/// log2 of the smallest.
const SMALLEST_LG2: u32 = 6;

/// There is not so much RAM left in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the machine has no {bytes:#x} bytes of RAM left in one piece")]
pub struct NoRam {
    /// What was asked for.
    pub bytes: u64,
}

/// The RAM of a machine. Clones are the same memory.
#[derive(Clone, Debug)]
pub struct Ram(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    file: File,
    mapping: Mapping,
    base: PhysAddr,
    bytes: u64,
    free: Mutex<Free>,
}

/// What is not handed out.
#[derive(Debug)]
struct Free {
    /// The offset behind which nothing was ever handed out.
    unused: u64,
    /// Offsets of pieces that came back or were passed over, by log2 of their size.
    pieces: Vec<Vec<u64>>,
}

#[derive(Debug)]
struct Mapping {
    /// A multiple of [`ALIGN`], as an arena needs.
    start: NonNull<u8>,
    bytes: usize,
    /// All addresses that were taken for it.
    taken: NonNull<u8>,
    taken_bytes: usize,
}

// SAFETY: the pointer is to a mapping that all threads may use; it is used for atomic accesses
// alone, and by arenas, each of which has a piece of its own.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length by `Mapping::new`, and nothing borrows from it:
        // words borrow from a `Ram`, and an arena keeps one.
        unsafe { libc::munmap(self.taken.as_ptr().cast(), self.taken_bytes) };
    }
}

impl Mapping {
    /// All of a file of that length. The system aligns mappings to pages alone, so more addresses
    /// are taken than it needs.
    fn new(file: &File, bytes: usize) -> io::Result<Self> {
        let taken_bytes = bytes.checked_add(ALIGN).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which nothing may access, at an address of the system's choice.
        let taken =
            unsafe { libc::mmap(ptr::null_mut(), taken_bytes, libc::PROT_NONE, flags, -1, 0) };
        let some = NonNull::new(taken.cast::<u8>()).filter(|_| taken != libc::MAP_FAILED);
        let taken = some.ok_or_else(io::Error::last_os_error)?;
        let to_alignment = taken.addr().get().wrapping_neg() % ALIGN;
        // SAFETY: the offset is below `ALIGN`, and the mapping is longer.
        let start = unsafe { taken.add(to_alignment) };
        let mapping = Self { start, bytes, taken, taken_bytes };
        let (at, flags) = (start.as_ptr().cast(), libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: it replaces a part of the mapping above, which nobody knows of yet.
        let mapped = unsafe { libc::mmap(at, bytes, ACCESS, flags, file.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(mapping) }
    }
}

impl Ram {
    /// Memory of that size, zeroed, which the machine finds at `base`.
    pub(crate) fn new(base: PhysAddr, bytes: u64) -> io::Result<Self> {
        let file = shared_file(bytes)?;
        let len = usize::try_from(bytes).map_err(io::Error::other)?;
        let mapping = Mapping::new(&file, len)?;
        let pieces = vec![Vec::new(); LARGEST_LG2 as usize + 1];
        let free = Mutex::new(Free { unused: RESERVED, pieces });
        Ok(Self(Arc::new(Shared { file, mapping, base, bytes, free })))
    }

    /// Where another process of this user finds the file.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", process::id(), self.0.file.as_raw_fd())
    }

    /// Where it begins.
    pub fn base(&self) -> PhysAddr {
        self.0.base
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// All of it, in words of 8 bytes, little-endian.
    pub fn words(&self) -> &[AtomicU64] {
        let words = self.0.mapping.bytes / 8;
        // SAFETY: the mapping is as long, aligned to pages, lives as long as `self`, and all access
        // to it is atomic. Arenas fill tables of theirs by plain stores before anybody else knows
        // where these are.
        unsafe { std::slice::from_raw_parts(self.0.mapping.start.as_ptr().cast(), words) }
    }

    /// The words at `paddr`; none where they are not all RAM or `paddr` is no multiple of 8.
    pub fn words_at(&self, paddr: PhysAddr, bytes: u64) -> &[AtomicU64] {
        let offset = paddr.get().wrapping_sub(self.0.base.get());
        let end = offset.checked_add(bytes).filter(|_| lg2::is_aligned(offset, 3));
        let range = end.and_then(|end| {
            Some(usize::try_from(offset / 8).ok()?..usize::try_from(end / 8).ok()?)
        });
        range.and_then(|range| self.words().get(range)).unwrap_or_default()
    }

    /// Zeroed memory, aligned to its size rounded up to a power of two, at most 1 GiB.
    ///
    /// # Errors
    ///
    /// [`NoRam`].
    pub fn allocate(&self, bytes: u64) -> Result<Buffer, NoRam> {
        let buffer = self.reserve(bytes)?;
        buffer.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        Ok(buffer)
    }

    /// Memory as of [`allocate`](Self::allocate) with whatever was in it: the system backs no page
    /// of it that nobody touches.
    ///
    /// # Errors
    ///
    /// [`NoRam`].
    pub fn reserve(&self, bytes: u64) -> Result<Buffer, NoRam> {
        let refused = NoRam { bytes };
        let size = bytes.checked_next_power_of_two().ok_or(refused)?;
        let size_lg2 = size.trailing_zeros().max(SMALLEST_LG2);
        let fits = size_lg2 <= LARGEST_LG2;
        let offset = fits.then(|| self.take(size_lg2)).flatten().ok_or(refused)?;
        let paddr = self.0.base.wrapping_add(offset);
        let piece = Piece::memory(Span::new(paddr, bytes).map_err(|_| refused)?);
        Ok(Buffer { ram: self.clone(), piece, lg2_size: size_lg2 })
    }

    /// An arena for page tables in as much of the RAM, and 2 MiB more. It is never given back.
    ///
    /// # Errors
    ///
    /// [`NoRam`].
    pub fn arena(&self, bytes: u64) -> Result<Arena, NoRam> {
        let refused = NoRam { bytes };
        let with_rest = bytes.checked_add(2 << 20).ok_or(refused)?;
        let lg2_size = with_rest.checked_next_power_of_two().ok_or(refused)?.trailing_zeros();
        let offset = self.0.free.lock().take_unused(lg2_size.max(22), self.0.bytes);
        let offset = offset.ok_or(refused)?;
        let base = self.0.base.wrapping_add(offset);
        let offset = usize::try_from(offset).map_err(|_| refused)?;
        // SAFETY: `take` gives offsets within the mapping.
        let memory = unsafe { self.0.mapping.start.add(offset) };
        let keep = Box::new(self.clone());
        // SAFETY: 1. The piece was never handed out and is never again; it is mapped until the last
        // `Ram` is dropped. 2. It is zeroed, as all of the file was at first.
        let arena = unsafe { Arena::over(memory, base, with_rest, keep) };
        arena.ok_or(refused)
    }

    /// The offset of a piece that is nobody's.
    fn take(&self, lg2_size: u32) -> Option<u64> {
        let mut free = self.0.free.lock();
        free.take_piece(lg2_size).or_else(|| free.take_unused(lg2_size, self.0.bytes))
    }
}

impl Free {
    /// A piece that came back or was passed over, cut to size.
    fn take_piece(&mut self, lg2_size: u32) -> Option<u64> {
        let larger = (lg2_size..=LARGEST_LG2).find(|&lg2| !self.of(lg2).is_empty())?;
        let offset = self.of(larger).pop()?;
        for lg2 in lg2_size..larger {
            self.of(lg2).push(offset + lg2::size(lg2));
        }
        Some(offset)
    }

    /// A piece that was never handed out.
    fn take_unused(&mut self, lg2_size: u32, bytes: u64) -> Option<u64> {
        let offset = lg2::align_up(self.unused, lg2_size)?;
        let end = offset.checked_add(lg2::size(lg2_size)).filter(|&end| end <= bytes)?;
        let mut passed_over = self.unused;
        while passed_over < offset {
            let lg2 = passed_over.trailing_zeros();
            self.of(lg2).push(passed_over);
            passed_over += lg2::size(lg2);
        }
        self.unused = end;
        Some(offset)
    }

    fn of(&mut self, lg2: u32) -> &mut Vec<u64> {
        &mut self.pieces[lg2.min(LARGEST_LG2) as usize]
    }
}

impl Bus for Ram {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        for (at, byte) in (0..).zip(buf) {
            let paddr = paddr.wrapping_add(at);
            let word = self.word_around(paddr)?.load(Ordering::Acquire);
            *byte = word.to_ne_bytes()[(paddr.get() % 8) as usize];
        }
        Ok(())
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        for (at, &byte) in (0..).zip(buf) {
            let paddr = paddr.wrapping_add(at);
            let with = |word: u64| {
                let mut bytes = word.to_ne_bytes();
                bytes[(paddr.get() % 8) as usize] = byte;
                Some(u64::from_ne_bytes(bytes))
            };
            // A device may write the other bytes meanwhile.
            let word = self.word_around(paddr)?;
            let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, with);
        }
        Ok(())
    }
}

impl Ram {
    fn word_around(&self, paddr: PhysAddr) -> Result<&AtomicU64, BusError> {
        let around = PhysAddr::new(lg2::align_down(paddr.get(), 3));
        self.words_at(around, 8).first().ok_or(BusError::Nobody { paddr })
    }
}

/// A piece of a machine's RAM, given back on drop.
#[derive(Debug)]
pub struct Buffer {
    ram: Ram,
    piece: Piece,
    lg2_size: u32,
}

impl Buffer {
    /// Where it is.
    pub fn paddr(&self) -> PhysAddr {
        self.piece.span.paddr()
    }

    /// All of it.
    pub fn span(&self) -> Span {
        self.piece.span
    }

    /// Its words of 8 bytes.
    pub fn words(&self) -> &[AtomicU64] {
        self.ram.words_at(self.paddr(), lg2::size(self.lg2_size))
    }

    /// The word with that index; 0 behind the end.
    pub fn word(&self, index: usize) -> u64 {
        self.words().get(index).map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    /// Sets the word with that index; nothing behind the end.
    pub fn set_word(&self, index: usize, value: u64) {
        if let Some(word) = self.words().get(index) {
            word.store(value.to_le(), Ordering::Release);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let offset = self.paddr().get().wrapping_sub(self.ram.0.base.get());
        self.ram.0.free.lock().of(self.lg2_size).push(offset);
    }
}

// SAFETY: the piece is the buffer's until it is dropped, and is reached by atomic accesses alone.
unsafe impl DmaMemory for Buffer {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

/// A file of memory that has no name.
fn shared_file(bytes: u64) -> io::Result<File> {
    // SAFETY: the name is a string that ends with 0.
    let fd = unsafe { libc::memfd_create(c"dmaspan-qemu".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_are_had_wherever_the_system_maps_the_ram() {
        let rams: Vec<_> =
            (1..32).map(|n| Ram::new(PhysAddr::new(0), (15 + n) << 20).unwrap()).collect();
        for ram in &rams {
            assert_eq!(ram.words().as_ptr().addr() % ALIGN, 0);
            assert!(ram.arena(1 << 20).is_ok());
        }
    }
}
