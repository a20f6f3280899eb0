//! A container reports here what it can map: apertures, page sizes, and how many mappings.

use alloc::vec::Vec;

use lock_api::RawMutex;

use super::Container;
use super::attach::CacheCoherency;
use super::domains::{DomainId, Domains};
use crate::pin::Pinner;
use crate::range::IovaRange;

/// Says what a container can map now: what `VFIO_IOMMU_GET_INFO` and `VFIO_CHECK_EXTENSION` tell
/// (drivers/vfio/vfio_iommu_type1.c).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// Page sizes that all domains have, bit n for 2^n bytes, where sizes below the user's page
    /// count as that page; without domains the user's page and all above. The lowest is the granule
    /// to which mappings are aligned.
    pub page_sizes: u64,
    /// Where mappings may lie, in bytes: sorted, disjoint and with gaps between. What all domains
    /// translate, without the regions that are reserved for their devices; without domains all.
    pub iova_ranges: Vec<IovaRange>,
    /// How many more mappings there may be.
    pub mappings_left: u64,
    /// Whether the IOMMU makes the accesses of all devices coherent (`VFIO_DMA_CC_IOMMU`), as it
    /// does where there are no domains.
    pub coherency: CacheCoherency,
    /// Which domains are attached, in the order in which they were.
    pub domains: Vec<DomainId>,
}

impl<P: Pinner, L: RawMutex, const BATCH: usize> Container<P, L, BATCH> {
    /// Returns what can be mapped now.
    ///
    /// ```
    /// use dmaspan::{Account, Container, HostAddr};
    /// use dmaspan_linux::LinuxPinner;
    /// use dmaspan_linux::pinner::LinuxPinError;
    ///
    /// fn main() -> Result<(), LinuxPinError> {
    ///     let pinner = LinuxPinner::<HostAddr>::new()?;
    ///     let container: Container<_, parking_lot::RawMutex> =
    ///         Container::new(pinner, Account::new(1 << 20)).with_page_size(0x4000);
    ///     let info = container.info();
    ///     assert_eq!(info.page_sizes, !0 << 14);
    ///     assert_eq!(info.iova_ranges.len(), 1);
    ///     assert_eq!(info.mappings_left, 65535);
    ///     Ok(())
    /// }
    /// ```
    pub fn info(&self) -> Info {
        let all = self.state.lock();
        let domains = &all.domains;
        let left = self.max_mappings.saturating_sub(all.tree.len());
        Info {
            page_sizes: self.page_sizes(domains),
            iova_ranges: if domains.is_empty() {
                alloc::vec![IovaRange::ALL]
            } else {
                domains.apertures.clone()
            },
            mappings_left: u64::try_from(left).unwrap_or(u64::MAX),
            coherency: domains.coherency(),
            domains: domains.list.iter().map(|&(id, _)| id).collect(),
        }
    }

    /// The page sizes as users see them.
    #[inline(always)]
    pub(super) fn page_sizes(&self, domains: &Domains) -> u64 {
        let from_page = self.page_size.wrapping_neg();
        let sizes = if domains.is_empty() { from_page } else { domains.page_sizes };
        let smaller = if sizes & !from_page == 0 { 0 } else { self.page_size };
        sizes & from_page | smaller
    }

    /// The smallest page: what every mapping is aligned to.
    #[inline(always)]
    pub(super) fn granule(&self, domains: &Domains) -> u64 {
        let sizes = self.page_sizes(domains);
        sizes & sizes.wrapping_neg()
    }
}
