//! This checks whether a device reaches exactly what was mapped for it, and nothing after the
//! unmap.

use std::iter;

use dmaspan::iommu::FaultAccess;
use dmaspan::iommu::soft::{AccessFailed, Bus, BusError};
use dmaspan::{Iova, IovaRange};
use dmaspan_linux::FrameAddress;
use dmaspan_linux::Memory;
use dmaspan_linux::mem::{AccessError, CheckError};

use crate::soft_iommu::Device;

/// How many bytes a device reads or writes at once.
const CHUNK: u64 = 1 << 20;

/// How many times each byte is passed over, for those who show how far it is.
pub(crate) const PASSES: u64 = 4;

/// What was found where something else should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Mismatch {
    /// The device's access failed.
    #[error("at iova {iova}: {source}")]
    Refused {
        /// Where.
        iova: Iova,
        /// Why.
        source: AccessFailed<BusError>,
    },
    /// The CPU does not find what the device wrote.
    #[error("at iova {iova} the device wrote {expected:#x} and the CPU sees {found:#x}")]
    CpuSees {
        /// Where.
        iova: Iova,
        /// What the device wrote.
        expected: u64,
        /// What the CPU read.
        found: u64,
    },
    /// The device does not find what the CPU wrote.
    #[error("at iova {iova} the CPU wrote {expected:#x} and the device reads {found:#x}")]
    DeviceReads {
        /// Where.
        iova: Iova,
        /// What the CPU wrote.
        expected: u64,
        /// What the device read.
        found: u64,
    },
    /// The memory has not so many bytes.
    #[error("at iova {iova} the CPU was refused: {source}")]
    NoMemory {
        /// Where.
        iova: Iova,
        /// Why.
        source: AccessError,
    },
}

/// What a check of data found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    /// Bytes that the device wrote and the CPU saw, and the other way round.
    pub(crate) bytes: u64,
    /// The first that was not as it should be.
    pub(crate) mismatch: Option<Mismatch>,
}

/// Addresses that translate and should not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stale {
    /// How many translations there are: reads and writes of each page count.
    pub(crate) translations: u64,
    /// The first page.
    pub(crate) first: Option<Iova>,
}

/// The writer of a word: the two patterns have no word in common, so that none passes for the
/// other.
#[derive(Clone, Copy, Debug)]
enum Writer {
    Device,
    Cpu,
}

/// What is written for the word at an address: a bijection of the address, so that no other address
/// has the same word, whatever way it is reached.
fn pattern(writer: Writer, iova: u64) -> u64 {
    let seed = match writer {
        Writer::Device => 1 << 63,
        Writer::Cpu => 0,
    };
    // Odd multiplications and shifted exclusive ors can be undone.
    let product = (iova | seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 29)
}

/// What is mapped: `range`, whose memory begins `offset` bytes behind the start of `memory`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapped<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) offset: u64,
    pub(crate) range: IovaRange,
}

impl Mapped<'_> {
    /// Writes every byte as the device and reads it as the CPU, then the other way round. `advance`
    /// is told of bytes passed over.
    pub(crate) fn check<A: FrameAddress, const G: u32>(
        &self,
        device: &mut Device<A, G>,
        bus: &impl Bus<A>,
        advance: &dyn Fn(u64),
    ) -> Checked {
        let mut bytes = 0;
        let mismatch = self.passes(device, bus, &mut bytes, advance).err();
        Checked { bytes, mismatch }
    }

    /// The passes of a check, as many as [`PASSES`], and how many bytes the last one found right.
    fn passes<A: FrameAddress, const G: u32>(
        &self,
        device: &mut Device<A, G>,
        bus: &impl Bus<A>,
        checked: &mut u64,
        advance: &dyn Fn(u64),
    ) -> Result<(), Mismatch> {
        let word = |writer, iova: Iova| move |n| pattern(writer, iova.get() + 8 * n);
        let mut buf = Vec::new();
        self.chunks(advance, |_, len, iova| {
            buf.clear();
            buf.extend((0..len / 8).map(word(Writer::Device, iova)).flat_map(u64::to_ne_bytes));
            device.write(bus, iova, &buf).map_err(|source| refused(iova, source))
        })?;
        self.chunks(advance, |at, len, iova| {
            let (offset, expected) = (self.offset + at, word(Writer::Device, iova));
            self.memory.check_words(offset, len, expected).map_err(|error| match error {
                CheckError::Differs { offset, expected, found } => {
                    let iova = self.iova(offset - self.offset);
                    Mismatch::CpuSees { iova, expected, found }
                }
                CheckError::Access(source) => Mismatch::NoMemory { iova, source },
                _ => Mismatch::NoMemory { iova, source: AccessError::Misaligned { offset, len } },
            })
        })?;
        self.chunks(advance, |at, len, iova| {
            let written = self.memory.fill_words(self.offset + at, len, word(Writer::Cpu, iova));
            written.map_err(|source| Mismatch::NoMemory { iova, source })
        })?;
        self.chunks(advance, |at, len, iova| {
            buf.resize(usize::try_from(len).unwrap_or(0), 0);
            device.read(bus, iova, &mut buf).map_err(|source| refused(iova, source))?;
            let (words, _) = buf.as_chunks::<8>();
            for (n, found) in (0..).zip(words) {
                let (expected, found) = (word(Writer::Cpu, iova)(n), u64::from_ne_bytes(*found));
                if found != expected {
                    *checked += 8 * n;
                    let iova = self.iova(at + 8 * n);
                    return Err(Mismatch::DeviceReads { iova, expected, found });
                }
            }
            *checked += len;
            Ok(())
        })
    }

    /// Calls `f` with the distance from the start, the length and the IOVA of each chunk.
    fn chunks(
        &self,
        advance: &dyn Fn(u64),
        mut f: impl FnMut(u64, u64, Iova) -> Result<(), Mismatch>,
    ) -> Result<(), Mismatch> {
        let bytes = self.range.checked_len().unwrap_or(u64::MAX);
        let mut at = 0;
        while at < bytes {
            let len = CHUNK.min(bytes - at);
            f(at, len, self.iova(at))?;
            advance(len);
            at += len;
        }
        Ok(())
    }

    fn iova(&self, at: u64) -> Iova {
        self.range.start().wrapping_add(at)
    }
}

/// The first byte that the device could not access, of an access that began at `iova`.
fn refused(iova: Iova, source: AccessFailed<BusError>) -> Mismatch {
    let iova = match source {
        AccessFailed::Fault(fault) => fault.range.start(),
        AccessFailed::Stopped { iova, .. } => iova,
        _ => iova,
    };
    Mismatch::Refused { iova, source }
}

/// Tries to read and to write every page of `page_bytes` in `range`, none of which is mapped.
pub(crate) fn stale<A: FrameAddress, const G: u32>(
    device: &mut Device<A, G>,
    range: IovaRange,
    page_bytes: u64,
) -> Stale {
    let mut stale = Stale::default();
    for (iova, access) in accesses(range, page_bytes) {
        if translate(device, iova, access).is_ok() {
            stale.translations += 1;
            stale.first = stale.first.or(Some(iova));
        }
    }
    stale
}

/// Lets a device reach every page of `page_bytes` in `range`, so that the IOTLB holds them all.
///
/// # Errors
///
/// [`Mismatch::Refused`] for the first page that is not mapped.
pub(crate) fn touch<A: FrameAddress, const G: u32>(
    device: &mut Device<A, G>,
    range: IovaRange,
    page_bytes: u64,
) -> Result<(), Mismatch> {
    accesses(range, page_bytes).try_for_each(|(iova, access)| {
        translate(device, iova, access).map_err(|source| refused(iova, source))
    })
}

/// An access to one byte, of which nothing comes.
fn translate<A: FrameAddress, const G: u32>(
    device: &mut Device<A, G>,
    iova: Iova,
    access: FaultAccess,
) -> Result<(), AccessFailed<BusError>> {
    device.access(IovaRange::point(iova), access, |_| Ok(()))
}

/// A read and a write of the first address of each page of `page_bytes` in `range`.
fn accesses(range: IovaRange, page_bytes: u64) -> impl Iterator<Item = (Iova, FaultAccess)> {
    let next = move |iova: &Iova| iova.checked_add(page_bytes);
    let pages = iter::successors(Some(range.start()), next);
    let pages = pages.take_while(move |iova| range.contains(*iova));
    pages.flat_map(|iova| [FaultAccess::Read, FaultAccess::Write].map(|access| (iova, access)))
}

#[cfg(test)]
mod tests;
