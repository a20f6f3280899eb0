//! From a registered buffer to what devices read: scatter-gather entries, NVMe PRPs, virtio chains.
//!
//! A driver registers its memory once. An I/O imports a range of it, which allocates nothing, and
//! descriptors are made straight from the spans of the import. Here the buffer is given by its
//! spans; a `Registry` makes such buffers of pinned memory.

// ANCHOR: head
use std::error::Error;

use dmaspan::regbuf::SegmentsBuilder;
use dmaspan::regbuf::descriptors::{
    Chain, ListPage, MemoryPageSize, ScatterEntry, SegmentLimits, SplitDescriptor,
};
use dmaspan::{DmaAddr, Span};

/// The pages that an NVMe controller counts in.
const PAGE: usize = 4096;
// ANCHOR_END: head

fn span(at: u64, len: u64) -> Result<Span<DmaAddr>, Box<dyn Error>> {
    Ok(Span::new(DmaAddr::new(at), len)?)
}

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: buffer
    // 6 MiB: two pages of 2 MiB that touch, and one elsewhere. The first two become one segment.
    let mut builder = SegmentsBuilder::new();
    for start in [0x8000_0000, 0x8020_0000, 0x9_0000_0000] {
        builder.push(span(start, 2 << 20)?)?;
    }
    let buffer = builder.build()?;
    println!("{:#x} bytes in {} segments", buffer.len(), buffer.count());

    // An I/O of 1 MiB and a bit, which goes over both.
    let io = buffer.import(0x3f_f000, 0x10_1000)?;
    println!("the I/O has {:#x} bytes in {} pieces", io.bytes(), io.pieces());
    // ANCHOR_END: buffer

    // ANCHOR: entries
    // Scatter-gather entries under a device's limits: 256 KiB at most.
    let limits = SegmentLimits::new((256 << 10).try_into()?);
    let mut room = [ScatterEntry::default(); 8];
    let entries = limits.write(io.clone(), &mut room)?;
    for entry in &room[..entries] {
        println!("  entry {} +{:#x}", entry.addr, entry.len);
    }
    // ANCHOR_END: entries

    // ANCHOR: nvme
    // NVMe PRPs: one for each page, the first in the command, the rest in a list.
    let mut list = [0; PAGE / 8];
    let mut pages = [ListPage { addr: DmaAddr::new(0x10_0000), entries: &mut list }];
    let prps = MemoryPageSize::new(0)?.write(io.clone(), &mut pages)?;
    println!("PRP 1 is {:#x}, PRP 2 leads to the list at {:#x}", prps.prp1, prps.prp2);
    println!("the list begins with {:#x}, {:#x}", u64::from_le(list[0]), u64::from_le(list[1]));
    // ANCHOR_END: nvme

    // ANCHOR: virtio
    // A virtio-blk read: the device reads the header and writes the data and the status.
    let (header, status) = (span(0x2000, 16)?, span(0x2010, 1)?);
    let data = io.chain([status]);
    let chain = Chain::new(SegmentLimits::default(), [header], data);
    let mut table = [SplitDescriptor::default(); 8];
    let free = [5, 2, 7, 1, 0];
    let used = chain.write_split(&free, |index, descriptor| {
        table[usize::from(index)] = descriptor;
    })?;
    println!("a chain of {used} descriptors, whose head is {}", free[0]);
    // ANCHOR_END: virtio
    Ok(())
}
