//! A page table by itself: map spans, look at what is there, and take a part of it away.
//!
//! A hypervisor that fills tables for hardware, or a VMM that emulates an IOMMU, needs no more than
//! this. That nobody else uses the range meanwhile, and that hardware has forgotten what was taken
//! away, is for the caller to see to here; a `Domain` does both.

#![expect(unsafe_code, reason = "it says that no hardware walks the table")]

// ANCHOR: head
use std::error::Error;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
// ANCHOR_END: head

// ANCHOR: main
fn main() -> Result<(), Box<dyn Error>> {
    // Memory for tables, which hardware would see from 0x4000_0000 on.
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48))?;
    let mut table = PageTable::new(format, tables.clone())?;

    // A buffer in two pieces: 4 MiB, and three pages elsewhere.
    let spans = [
        Span::new(PhysAddr::new(0x8000_0000), 4 << 20)?,
        Span::new(PhysAddr::new(0x1_2345_6000), 0x3000)?,
    ];
    let bytes = (4 << 20) + 0x3000;
    let range = IovaRange::from_len(Iova::new(0x20_0000), bytes)?;
    let whole = table.whole(); // `&mut`: nobody else works on this table
    whole.map_spans(range.start(), &spans, Prot::READ_WRITE)?;

    println!("mapped {bytes:#x} bytes at {range}:");
    for run in whole.walk(range) {
        println!("  {run:x?}");
    }
    for (lg2, leaves) in whole.census(range).sizes() {
        println!("  {leaves} leaves of {} KiB", (1 << lg2) >> 10);
    }
    let inside = Iova::new(0x60_1234);
    println!("{inside} leads to {:?}", whole.iova_to_phys(inside));
    println!("tables in use: {}", tables.tables());
    // ANCHOR_END: main

    // ANCHOR: unmap
    // Unmapping returns what was there, as spans, so that nobody has to ask before.
    let mut room = SpanBuf::room::<8>();
    let mut removed = SpanBuf::new(&mut room);
    let upper = IovaRange::from_len(Iova::new(0x60_0000), 0x3000)?;
    let unmapped = whole.unmap(upper, &mut removed)?;
    println!("unmapped {upper}, which led to {:?}", removed.spans());
    println!("hardware must forget {:?}", unmapped.retired.range());

    // SAFETY: no hardware walks this table.
    unsafe { table.free(unmapped.retired) };
    println!("the table is at {}, for TTBR", table.root());
    Ok(())
}
// ANCHOR_END: unmap
