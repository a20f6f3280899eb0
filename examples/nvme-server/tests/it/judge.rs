//! A sanitizer that hears what a server does with its client's memory.

use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::iommu::{Invalidation, Scope, Tables};
use dmaspan::{Iova, IovaRange, Prot};
use dmaspan_nvme_server::Observer;
use dmaspan_sim::sanitizer::{LeafSizes, Neighbours, Parts, Sanitizer, SanitizerConfig};
use dmaspan_sim::walker::Access;

/// What the client is told to be unused counts as unmapped and flushed. A use after that is an
/// error, as is one of memory that the client never gave, or gave for less.
pub(crate) struct Judge {
    sanitizer: Sanitizer,
    uses: AtomicU64,
}

impl Judge {
    pub(crate) fn new() -> Self {
        let (parts, leaf_sizes) = (Parts::Allow, LeafSizes::Any);
        // Regions side by side are one memory of the client.
        let neighbours = Neighbours::Joined;
        let config =
            SanitizerConfig { parts, leaf_sizes, neighbours, ..SanitizerConfig::default() };
        Self { sanitizer: Sanitizer::new(config), uses: AtomicU64::new(0) }
    }

    /// How many uses there were, and what was wrong.
    pub(crate) fn verdict(&self) -> (u64, Vec<String>) {
        let errors = self.sanitizer.errors();
        let errors = errors.iter().map(ToString::to_string).collect();
        (self.uses.load(Ordering::Relaxed), errors)
    }
}

fn range(address: u64, len: u64) -> Option<IovaRange> {
    IovaRange::from_len(Iova::new(address), len).ok()
}

impl Observer for Judge {
    fn gave(&self, address: u64, len: u64, access: Prot) {
        if let Some(range) = range(address, len) {
            self.sanitizer.on_map(range, &[], access);
        }
    }

    fn used(&self, address: u64, len: u64, access: Prot) {
        self.uses.fetch_add(1, Ordering::Relaxed);
        let access = if access.contains(Prot::WRITE) { Access::Write } else { Access::Read };
        self.sanitizer.on_dma(Iova::new(address), len, access);
    }

    fn took(&self, address: u64, len: u64) {
        if let Some(range) = range(address, len) {
            self.sanitizer.on_unmap_parts(range, Tables::Kept, 0);
            let (scope, tables) = (Scope::Ranges(&[range]), Tables::Kept);
            self.sanitizer.on_invalidate(&Invalidation { scope, leaf_sizes: 1 << 12, tables });
        }
    }
}
