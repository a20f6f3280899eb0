//! A [`PaperIommu`] is an IOMMU as a plan needs it: what it can map, and how tall its tables are.

use std::fmt;
use std::str::FromStr;

use dmaspan::space::Limits;
use dmaspan::{Iova, IovaRange, lg2};

use crate::os::Size;

/// The kinds of IOMMU whose limits are known without asking one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IommuModel {
    /// Intel VT-d, second stage.
    Vtd,
    /// AMD-Vi with its own tables.
    Amd,
    /// Arm SMMUv3, stage 1.
    SmmuV3,
    /// RISC-V, first stage.
    Riscv,
}

impl IommuModel {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Vtd, Self::Amd, Self::SmmuV3, Self::Riscv];

    /// The name on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vtd => "vtd",
            Self::Amd => "amd",
            Self::SmmuV3 => "smmuv3",
            Self::Riscv => "riscv",
        }
    }

    /// The most address bits: five levels of VT-d (specification, 3.6) and of RISC-V (Sv57), six
    /// of AMD (IOMMU specification, 2.2.3), and Arm's with LPA (DDI 0487, D8.1).
    const fn most_bits(self) -> u32 {
        match self {
            Self::Vtd | Self::Riscv => 57,
            Self::Amd => 64,
            Self::SmmuV3 => 52,
        }
    }

    /// The IOVAs that Linux reserves behind each such IOMMU: those of interrupts on x86
    /// (`IOAPIC_RANGE_START`), HyperTransport's on AMD (`HT_RANGE_START`), and the window that
    /// software maps an interrupt controller into on Arm (`MSI_IOVA_BASE`).
    fn reserved(self) -> Vec<ReservedIovas> {
        let named = |name: &str, start, last| {
            IovaRange::new(Iova::new(start), Iova::new(last))
                .map(|range| ReservedIovas { name: name.to_owned(), range })
        };
        let interrupts = || named("interrupts (MSI)", 0xfee0_0000, 0xfeef_ffff);
        let all = match self {
            Self::Vtd => [interrupts(), None],
            Self::Amd => [interrupts(), named("HyperTransport", 0xfd_0000_0000, 0xff_ffff_ffff)],
            Self::SmmuV3 => [named("interrupts (MSI)", 0x800_0000, 0x80f_ffff), None],
            Self::Riscv => [None, None],
        };
        all.into_iter().flatten().collect()
    }
}

impl fmt::Display for IommuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Vtd => "Intel VT-d",
            Self::Amd => "AMD-Vi",
            Self::SmmuV3 => "Arm SMMUv3",
            Self::Riscv => "RISC-V IOMMU",
        })
    }
}

/// The reason why there is no such IOMMU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IommuError {
    /// An unknown kind.
    #[error("`{name}` is no kind of IOMMU: take vtd, amd, smmuv3 or riscv")]
    Kind {
        /// What was asked for.
        name: String,
    },
    /// More or fewer address bits than such an IOMMU has.
    #[error("an IOMMU of the kind {} has 32 to {most} address bits, not {bits}", kind.name())]
    Bits {
        /// Which kind.
        kind: IommuModel,
        /// What was asked for.
        bits: u32,
        /// The most that it has.
        most: u32,
    },
    /// A granule that such an IOMMU does not have.
    #[error(
        "an IOMMU of the kind {} has no granule of {}: take {}",
        kind.name(), Size(*granule),
        if *kind == IommuModel::SmmuV3 { "4K, 16K or 64K" } else { "4K" }
    )]
    Granule {
        /// Which kind.
        kind: IommuModel,
        /// What was asked for, in bytes.
        granule: u64,
    },
    /// Sizes of pages that no IOMMU has.
    #[error("page sizes of {pages:#x} have none of 4 KiB to 64 KiB, or one below: list them all")]
    PageSizes {
        /// The sizes, a bit each.
        pages: u64,
    },
}

impl FromStr for IommuModel {
    type Err = IommuError;

    fn from_str(name: &str) -> Result<Self, IommuError> {
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == name);
        kind.ok_or_else(|| IommuError::Kind { name: name.to_owned() })
    }
}

/// IOVAs that mean something else, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedIovas {
    /// What they are for.
    pub name: String,
    /// Which.
    pub range: IovaRange,
}

/// What an IOMMU can map, whether there is one or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaperIommu {
    /// What it is; `None` for one whose limits were read from a machine.
    pub kind: Option<IommuModel>,
    /// How many bits of an IOVA it translates.
    pub address_bits: u32,
    /// The sizes of leaves, a bit each.
    pub page_sizes: u64,
    /// Where mappings may lie, apart from what is reserved; sorted and disjoint.
    pub apertures: Vec<IovaRange>,
    /// Where nothing may be mapped.
    pub reserved: Vec<ReservedIovas>,
}

const K4: u64 = 4 << 10;
const K64: u64 = 64 << 10;

impl PaperIommu {
    /// One of this kind, as Linux drives it, with 48 address bits and a granule of 4 KiB.
    ///
    /// ```
    /// use dmaspan_linux::plan::forecast::{IommuModel, PaperIommu};
    ///
    /// let iommu = PaperIommu::new(IommuModel::Vtd).with_bits(39)?;
    /// assert_eq!(iommu.limits(None).apertures.last().unwrap().last().get(), (1 << 39) - 1);
    /// assert!(PaperIommu::new(IommuModel::Vtd).with_bits(64).is_err());
    /// Ok::<(), dmaspan_linux::plan::forecast::IommuError>(())
    /// ```
    pub fn new(kind: IommuModel) -> Self {
        let bits = 48;
        Self {
            kind: Some(kind),
            address_bits: bits,
            page_sizes: leaves(kind, K4),
            apertures: vec![whole(Some(kind), bits)],
            reserved: kind.reserved(),
        }
    }

    /// The same with so many address bits, all of which it translates.
    ///
    /// # Errors
    ///
    /// [`IommuError::Bits`].
    pub fn with_bits(self, bits: u32) -> Result<Self, IommuError> {
        let kind = self.kind.unwrap_or(IommuModel::Amd);
        let most = kind.most_bits();
        if !(32..=most).contains(&bits) {
            return Err(IommuError::Bits { kind, bits, most });
        }
        Ok(Self { address_bits: bits, apertures: vec![whole(self.kind, bits)], ..self })
    }

    /// The same with a granule of so many bytes, and the leaves that go with it.
    ///
    /// # Errors
    ///
    /// [`IommuError::Granule`].
    pub fn with_granule(self, granule: u64) -> Result<Self, IommuError> {
        let kind = self.kind.unwrap_or(IommuModel::Amd);
        let sizes = match (kind, granule) {
            (_, K4) | (IommuModel::SmmuV3, 0x4000 | K64) => leaves(kind, granule),
            _ => return Err(IommuError::Granule { kind, granule }),
        };
        Ok(Self { page_sizes: sizes, ..self })
    }

    /// The same with leaves of these sizes, a bit each.
    ///
    /// # Errors
    ///
    /// [`IommuError::PageSizes`] where the smallest is not a page of 4 KiB to 64 KiB.
    pub fn with_page_sizes(self, sizes: u64) -> Result<Self, IommuError> {
        let granule = sizes & sizes.wrapping_neg();
        if !(K4..=K64).contains(&granule) {
            return Err(IommuError::PageSizes { pages: sizes });
        }
        Ok(Self { page_sizes: sizes, ..self })
    }

    /// The limits of a space behind it, in which so many more mappings may be made.
    pub fn limits(&self, mappings_left: Option<u64>) -> Limits {
        let mut reserved: Vec<IovaRange> = self.reserved.iter().map(|it| it.range).collect();
        reserved.sort_unstable_by_key(|range| range.start());
        let apertures =
            self.apertures.iter().flat_map(|aperture| minus(*aperture, &reserved)).collect();
        Limits { apertures, page_sizes: self.page_sizes, mappings_left }
    }

    /// The smallest page, in bytes.
    pub const fn granule(&self) -> u64 {
        self.page_sizes & self.page_sizes.wrapping_neg()
    }

    /// How many levels its tables have: a table has as many entries of 8 bytes as a granule has
    /// room for.
    pub(super) fn levels(&self) -> u32 {
        let granule = lg2::floor(self.granule());
        self.address_bits.saturating_sub(granule).div_ceil(granule.saturating_sub(3).max(1)).max(1)
    }

    /// What is reserved in a range.
    pub(super) fn reserved_in(&self, range: IovaRange) -> Option<&ReservedIovas> {
        self.reserved.iter().find(|reserved| reserved.range.intersection(range).is_some())
    }
}

/// What `ranges`, sorted, leave of a range; they may overlap.
fn minus(range: IovaRange, ranges: &[IovaRange]) -> Vec<IovaRange> {
    let mut joined: Vec<IovaRange> = Vec::new();
    for next in ranges {
        match joined.last_mut().and_then(|last| Some((last.join(*next)?, last))) {
            Some((both, last)) => *last = both,
            None => joined.push(*next),
        }
    }
    range.minus(&joined).collect()
}

/// The leaves that Linux's driver maps with.
fn leaves(kind: IommuModel, granule: u64) -> u64 {
    // The whole tree of AMD takes any power of two by repeated entries, of which those between the
    // levels' own are rarely more than what alignment permits.
    let entries = granule / 8;
    let above = granule * entries;
    let top = above.saturating_mul(entries);
    match (kind, granule) {
        (IommuModel::SmmuV3, K4) | (IommuModel::Vtd | IommuModel::Riscv | IommuModel::Amd, _) => {
            granule | above | top
        }
        _ => granule | above,
    }
}

/// All IOVAs of so many bits. Linux gives those of RISC-V half of it, since the upper half has the
/// sign (drivers/iommu/riscv/iommu.c).
fn whole(kind: Option<IommuModel>, bits: u32) -> IovaRange {
    let bits = if kind == Some(IommuModel::Riscv) { bits.saturating_sub(1) } else { bits };
    let last = u64::MAX.checked_shr(u64::BITS.saturating_sub(bits)).unwrap_or(0);
    IovaRange::new(Iova::new(0), Iova::new(last)).unwrap_or(IovaRange::ALL)
}
