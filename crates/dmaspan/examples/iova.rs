//! The allocator of IOVAs by itself: ranges that nobody else has, with limits and reserved regions.
//!
//! A `DmaDomain` has one inside. By itself it serves a VMM that places BARs, a planner, or a driver
//! whose addresses another system translates.

// ANCHOR: head
use std::error::Error;

use dmaspan::iommu::iova::{Align, Request, Space};
use dmaspan::platform::OneThread;
use dmaspan::{Iova, IovaRange};

const MIB: u64 = 1 << 20;
// ANCHOR_END: head

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: space
    // 48 bits of addresses in pages of 4 KiB, for one CPU; x86's interrupts are no memory.
    let aperture = IovaRange::from_len(Iova::new(0), 1 << 48)?;
    let space = Space::new(aperture, 12, 1, OneThread)?;
    space.reserve(IovaRange::from_len(Iova::new(0xfee0_0000), MIB)?)?;

    // A device with 32 bits of addresses: three pages, and 5 MiB that large leaves can map.
    let limit = Iova::new(u64::from(u32::MAX));
    let small = space.alloc(Request { bytes: 0x3000, align: Align::Natural, limit })?;
    let large = space.alloc(Request { bytes: 5 * MIB, align: Align::To(2 * MIB), limit })?;
    println!("three pages: {}", small.range());
    println!("5 MiB:       {}", large.range());

    // Of a place that the caller chose.
    let bar = IovaRange::from_len(Iova::new(0xc000_0000), 256 * MIB)?;
    let bar = space.alloc_at(bar)?;
    println!("a BAR:       {}", bar.range());

    // What cannot be had is refused at once, with what was asked for and what there is.
    let all = space.alloc(Request { bytes: 4 << 30, align: Align::Natural, limit });
    println!("refused: {}", all.unwrap_err());
    let twice = space.alloc_at(bar.range());
    println!("refused: {}", twice.unwrap_err());
    // ANCHOR_END: space

    let stats = space.stats();
    println!("{} ranges are out, {:#x} bytes are reserved", stats.live, stats.reserved);

    // Whatever was mapped there has been unmapped and synced. A range that is dropped is lost.
    space.free(small)?;
    space.free(large)?;
    // A driver that keeps addresses as numbers gets them back, checked.
    let raw = space.into_raw(bar)?;
    space.free(space.from_raw(raw)?)?;
    println!("freed twice: {}", space.from_raw(raw).unwrap_err());
    Ok(())
}
