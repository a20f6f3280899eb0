//! The sanitizer watches a driver that is not ours, by events alone.
//!
//! The driver here has page tables and an allocator of its own, and four bugs. It would work on
//! most machines most of the time: what is wrong is only what hardware may still hold.

// ANCHOR: head
use std::error::Error;

use dmaspan::iommu::{Invalidation, Scope, Tables};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span};
use dmaspan_sim::sanitizer::{Outcome, Sanitizer, SanitizerConfig};
use dmaspan_sim::walker::Access;
// ANCHOR_END: head

/// The places where a driver of another project maps, unmaps and flushes, with a line of ours each.
struct Shim {
    sanitizer: Sanitizer,
}

// ANCHOR: shim
impl Shim {
    #[track_caller] // reports name the driver's lines
    fn map(&self, iova: IovaRange, memory: Span) {
        // ... the driver writes its page table ...
        self.sanitizer.on_map(iova, &[memory], Prot::READ_WRITE);
        // ... and only now gives the address to its device.
    }

    #[track_caller]
    fn unmap(&self, iova: IovaRange) {
        // ... the driver clears its entries ...
        self.sanitizer.on_unmap(iova, Tables::Kept);
    }

    #[track_caller]
    fn flush(&self, iova: IovaRange) {
        let scope = Scope::Ranges(&[iova]);
        let what = Invalidation { scope, leaf_sizes: 1 << 12, tables: Tables::Kept };
        let begun = self.sanitizer.on_invalidate_begin(&what);
        // ... the driver sends the command and waits for it ...
        self.sanitizer.on_invalidate_end(begun, Outcome::Done);
    }

    #[track_caller]
    fn free(&self, iova: IovaRange, memory: Span) {
        self.sanitizer.on_release(iova);
        self.sanitizer.on_free(memory);
        // ... the allocators of the driver get both back.
    }
}
// ANCHOR_END: shim

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: run
    let sanitizer = Sanitizer::new(SanitizerConfig::default());
    let nic = Shim { sanitizer: sanitizer.named("nic0") };
    let page = |n: u64| IovaRange::from_len(Iova::new(n << 12), 0x1000);
    let frame = |n: u64| Span::new(PhysAddr::new(0x8000_0000 + (n << 12)), 0x1000);

    // As it should be: map, use, unmap, flush, free.
    nic.map(page(1)?, frame(1)?);
    nic.sanitizer.on_dma(Iova::new(0x1000), 1500, Access::Write);
    nic.unmap(page(1)?);
    nic.flush(page(1)?);
    nic.free(page(1)?, frame(1)?);
    println!("a right driver: {} errors", sanitizer.errors().len());

    // The first bug: the page is free before hardware has forgotten it.
    nic.map(page(2)?, frame(2)?);
    nic.unmap(page(2)?);
    nic.free(page(2)?, frame(2)?);
    nic.flush(page(2)?);

    // The second: the device writes what was unmapped.
    nic.map(page(3)?, frame(3)?);
    nic.unmap(page(3)?);
    nic.sanitizer.on_dma(Iova::new(0x3000), 64, Access::Write);
    nic.flush(page(3)?);

    // The third: it writes behind the flush, to an address that it kept.
    nic.sanitizer.on_dma(Iova::new(0x1000), 4, Access::Write);

    // The fourth: a packet that nobody unmapped.
    nic.map(page(4)?, frame(4)?);

    for finding in sanitizer.finish() {
        println!();
        // The last columns of a history are places in this file, and the thread.
        for line in finding.to_string().lines() {
            println!("{}", line.split("  at ").next().unwrap_or_default().trim_end());
        }
    }
    // ANCHOR_END: run
    Ok(())
}
