//! Commands of each architecture, and what they make an IOTLB forget, bit by bit.
//!
//! A command by address takes the leaves there, and what is cached of tables, and of entries in
//! them that were absent, only where its bit for those says so. Nothing else is taken: hardware may
//! keep the rest.

use dmaspan::iommu::{Invalidation, Scope, Tables};
use dmaspan::{Iova, IovaRange, lg2};

/// What one command makes hardware forget of one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheCommand {
    /// The address space's number: a domain ID, an ASID, a VMID, a PSCID or a GSCID.
    pub(crate) space: u32,
    /// Where; everywhere for `None`, and then of all kinds.
    pub(crate) range: Option<IovaRange>,
    /// The sizes of leaves, bit n for 2^n bytes.
    pub(crate) leaf_sizes: u64,
    /// Whether walks are forgotten, too.
    pub(crate) walks: Tables,
}

impl CacheCommand {
    /// What it makes hardware forget.
    pub(crate) fn invalidation(&self) -> Invalidation<'_> {
        let ranges = self.range.as_slice();
        let scope = if ranges.is_empty() { Scope::All } else { Scope::Ranges(ranges) };
        Invalidation { scope, leaf_sizes: self.leaf_sizes, tables: self.walks }
    }

    fn all(space: u64) -> Self {
        Self { range: None, ..Self::leaves(space, IovaRange::ALL, false) }
    }

    #[expect(clippy::fn_params_excessive_bools, reason = "it is a bit of the command")]
    fn leaves(space: u64, range: IovaRange, walks: bool) -> Self {
        let space = u32::try_from(space).unwrap_or(u32::MAX);
        let walks = if walks { Tables::Detached } else { Tables::Kept };
        Self { space, range: Some(range), leaf_sizes: u64::MAX, walks }
    }

    /// VT-d: IOTLB invalidations (6.5.2.3) and those of PASID 0 (6.5.2.4), of one domain. Of pages
    /// they are for `2^AM` of them, and keep walks with IH.
    pub(crate) fn vtd([low, high]: [u64; 2]) -> Option<Self> {
        let domain = low >> 16 & 0xffff;
        match (low & 0xf, low >> 4 & 3) {
            (2 | 6, 2) => Some(Self::all(domain)),
            (2 | 6, 3) => {
                let lg2 = u32::try_from(high & 0x3f).unwrap_or(0) + 12;
                Some(Self::leaves(domain, block_around(Iova::new(high), lg2), high & 1 << 6 == 0))
            }
            _ => None,
        }
    }

    /// AMD: INVALIDATE_IOMMU_PAGES (48882, 2.4.3). With S the first zero of the address says the
    /// size; walks are forgotten with PDE.
    pub(crate) fn amd_vi([low, high]: [u64; 2]) -> Option<Self> {
        if low >> 60 != 3 {
            return None;
        }
        let domain = low >> 32 & 0xffff;
        let ones = (high | 0xfff).trailing_ones();
        let lg2 = if high & 1 == 0 { 12 } else { ones + 1 };
        // The whole space is one of 2^52 bytes.
        let range = if lg2 < 52 { block_around(Iova::new(high), lg2) } else { IovaRange::ALL };
        Some(Self::leaves(domain, range, high & 2 != 0))
    }

    /// SMMUv3: CMD_TLBI_NH_ASID, CMD_TLBI_NH_VA, CMD_TLBI_S12_VMALL and CMD_TLBI_S2_IPA (IHI 0070,
    /// 4.4). Without TG a command is for the leaf at its address; with it for
    /// `(NUM + 1) * 2^SCALE` granules, and with TTL for leaves of that level alone, or groups of
    /// them. Walks are kept with Leaf.
    pub(crate) fn smmu_v3([low, high]: [u64; 2]) -> Option<Self> {
        let (vmid, asid) = (low >> 32 & 0xffff, low >> 48);
        let space = match low & 0xff {
            0x11 => return Some(Self::all(asid)),
            0x28 => return Some(Self::all(vmid)),
            0x12 => asid,
            0x2a => vmid,
            _ => return None,
        };
        let at = Iova::new(lg2::align_down(high, 12));
        let told = |range| Self::leaves(space, range, high & 1 == 0);
        let granule_lg2 = match high >> 10 & 3 {
            0 => return Some(told(IovaRange::point(at))),
            1 => 12,
            2 => 14,
            _ => 16,
        };
        let granules = ((low >> 12 & 0x1f) + 1) << (low >> 20 & 0x1f);
        let range = IovaRange::from_len(at, granules << granule_lg2).ok()?;
        let leaf_sizes = match high >> 8 & 3 {
            0 => u64::MAX,
            // Up to the leaves of the next level.
            level => {
                let above = 3 - u32::try_from(level).unwrap_or(3);
                let entry_lg2 = granule_lg2 + above * (granule_lg2 - 3);
                lg2::mask(entry_lg2 + granule_lg2 - 3) & !lg2::mask(entry_lg2)
            }
        };
        Some(Self { leaf_sizes, ..told(range) })
    }

    /// RISC-V: IOTINVAL.VMA of a PSCID and IOTINVAL.GVMA of a GSCID. With AV they are for the leaf
    /// at the address, or with S for those in a block; walks are forgotten with NL.
    pub(crate) fn riscv([low, high]: [u64; 2]) -> Option<Self> {
        let space = match (low & 0x7f, low >> 7 & 7) {
            (1, 0) => low >> 12 & 0xf_ffff,
            (1, 1) => low >> 44 & 0xffff,
            _ => return None,
        };
        if low & 1 << 10 == 0 {
            return Some(Self::all(space));
        }
        let address = high >> 10 << 12;
        let range = match high & 1 << 9 {
            0 => IovaRange::point(Iova::new(address)),
            _ => block_around(Iova::new(address), (address | 0xfff).trailing_ones() + 1),
        };
        Some(Self::leaves(space, range, low & 1 << 34 != 0))
    }
}

/// The aligned block of `2^lg2` addresses that has `iova`.
fn block_around(iova: Iova, lg2: u32) -> IovaRange {
    let start = lg2::align_down(iova.get(), lg2);
    IovaRange::new(Iova::new(start), Iova::new(start | lg2::mask(lg2))).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(
        space: u32,
        start: u64,
        len: u64,
        leaf_sizes: u64,
        walks: Tables,
    ) -> Option<CacheCommand> {
        let range = IovaRange::from_len(Iova::new(start), len).ok();
        Some(CacheCommand { space, range, leaf_sizes, walks })
    }

    fn all(space: u32) -> Option<CacheCommand> {
        let (range, leaf_sizes, walks) = (None, u64::MAX, Tables::Kept);
        Some(CacheCommand { space, range, leaf_sizes, walks })
    }

    const ANY: u64 = u64::MAX;
    use Tables::{Detached, Kept};

    #[test]
    fn a_command_of_vt_d_is_for_its_pages_and_keeps_walks_with_ih() {
        let of = |low: u64, high| CacheCommand::vtd([low | 5 << 16, high]);
        assert_eq!(of(2 | 3 << 4, 0x1234_5000 | 1 << 6), told(5, 0x1234_5000, 0x1000, ANY, Kept));
        assert_eq!(of(6 | 3 << 4, 0x1234_5000 | 9), told(5, 0x1220_0000, 2 << 20, ANY, Detached));
        assert_eq!(of(2 | 2 << 4, 0), all(5));
        assert_eq!(of(1 | 3 << 4, 0), None, "the context cache");
    }

    #[test]
    fn a_command_of_amd_is_for_the_size_that_its_address_says_and_takes_walks_with_pde() {
        let of = |high| CacheCommand::amd_vi([3 << 60 | 7 << 32, high]);
        assert_eq!(of(0x1234_5000), told(7, 0x1234_5000, 0x1000, ANY, Kept));
        assert_eq!(of(0x1234_4001), told(7, 0x1234_4000, 0x2000, ANY, Kept));
        assert_eq!(of(0x122f_f003), told(7, 0x1220_0000, 2 << 20, ANY, Detached));
        let everything = of(0x7fff_ffff_ffff_f003).unwrap();
        assert_eq!((everything.range, everything.walks), (Some(IovaRange::ALL), Detached));
        assert_eq!(CacheCommand::amd_vi([2 << 60, 0]), None, "a device's entry");
    }

    #[test]
    fn a_command_of_an_smmu_is_for_a_leaf_or_for_granules_of_a_level_and_keeps_walks_with_leaf() {
        let va = |fields: u64, high| CacheCommand::smmu_v3([0x12 | 3 << 48 | fields, high]);
        assert_eq!(va(0, 0x5001), told(3, 0x5000, 1, ANY, Kept));
        assert_eq!(va(0, 0x5000), told(3, 0x5000, 1, ANY, Detached));
        // 3 granules of 4K, and of leaves of level 3, or of groups of them.
        let pages = lg2::mask(21) & !lg2::mask(12);
        assert_eq!(
            va(2 << 12, 0x5000 | 1 << 10 | 3 << 8 | 1),
            told(3, 0x5000, 0x3000, pages, Kept)
        );
        assert_eq!(va(2 << 20, 0x4000 | 2 << 10), told(3, 0x4000, 4 << 14, ANY, Detached));
        let stage_2 = CacheCommand::smmu_v3([0x2a | 4 << 32, 0x5001]);
        assert_eq!(stage_2, told(4, 0x5000, 1, ANY, Kept));
        assert_eq!(CacheCommand::smmu_v3([0x11 | 3 << 48, 0]), all(3));
        assert_eq!(CacheCommand::smmu_v3([0x28 | 4 << 32, 0]), all(4));
        assert_eq!(CacheCommand::smmu_v3([0x46, 0]), None, "a sync");
    }

    #[test]
    fn a_command_of_risc_v_is_for_a_leaf_or_a_block_and_takes_walks_with_nl() {
        let of = |low: u64, high| CacheCommand::riscv([1 | 9 << 12 | low, high]);
        let (av, nl, block) = (1 << 10, 1 << 34, 1 << 9);
        assert_eq!(of(av, 5 << 10), told(9, 0x5000, 1, ANY, Kept));
        assert_eq!(of(av | nl, 4 << 10 | block), told(9, 0x4000, 0x2000, ANY, Detached));
        assert_eq!(of(av, 0b111 << 10 | block), told(9, 0, 0x1_0000, ANY, Kept));
        assert_eq!(of(0, 0), all(9));
        assert_eq!(CacheCommand::riscv([1 | 1 << 7 | 6 << 44, 0]), all(6));
        assert_eq!(CacheCommand::riscv([2, 0]), None, "a fence");
    }
}
