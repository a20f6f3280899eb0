//! Firmware's description of a machine's IOMMUs: which IOMMU serves which requester, by which
//! stream, and which memory is reserved.
//!
//! | function | what it reads | source |
//! |---|---|---|
//! | [`IommuMap::dmar`] | DMAR, of VT-d | VT-d 4.1, chapter 8 |
//! | [`IommuMap::ivrs`] | IVRS, of AMD-Vi | 48882, chapter 5 |
//! | [`IommuMap::iort`] | IORT, of SMMUs | Arm's DEN 0049 |
//! | [`IommuMap::rimt`] | RIMT, of RISC-V's IOMMUs | RISC-V IO Mapping Table 1.0 |
//! | [`IommuMap::device_tree`] | `iommus`, `iommu-map`, `iommu-addresses` | Linux's bindings |
//!
//! Each takes bytes that the caller found, and believes none of them: a length, an offset or a
//! number that does not fit is a [`FirmwareError`] that names the table, the place and the limit.
//! What a table yields takes memory in proportion to its length. A table that is refused describes
//! no machine: leave every stream blocked.
//!
//! ```
//! use dmaspan_drivers::firmware::{FirmwareError, IommuMap, DmaRequester};
//!
//! /// The base of the registers, and the stream, of the function 2 on a machine's first bus.
//! fn disk(iort: &[u8]) -> Result<Option<(u64, u32)>, FirmwareError> {
//!     let map = IommuMap::iort(iort)?;
//!     let stream = map.streams(DmaRequester::Pci { segment: 0, id: 2 << 3 }).next();
//!     Ok(stream.map(|found| (map.units()[found.unit].base, found.stream)))
//! }
//!
//! assert!(disk(b"FACP").unwrap_err().to_string().contains("this is no IORT"));
//! ```

mod bytes;
mod device_tree;
mod dmar;
mod iort;
mod ivrs;
mod rimt;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

pub use bytes::FirmwareError;

/// The design of an IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IommuKind {
    /// Arm's SMMU of version 1 or 2: [`arm_smmu`](crate::arm_smmu).
    SmmuV2,
    /// Arm's SMMUv3: [`arm_smmu_v3`](crate::arm_smmu_v3).
    SmmuV3,
    /// Intel's VT-d: [`vtd`](crate::vtd).
    Vtd,
    /// AMD's IOMMU: [`amd_vi`](crate::amd_vi).
    AmdVi,
    /// RISC-V's IOMMU: [`riscv`](crate::riscv).
    Riscv,
}

/// An IOMMU that firmware describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuUnit {
    /// Its design.
    pub kind: IommuKind,
    /// The physical address of its registers; 0 where it is a PCI function whose BAR says that.
    pub base: u64,
    /// The segment and the requester ID of the PCI function that it is, if it is one.
    pub pci: Option<(u16, u16)>,
}

/// What asks for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaRequester<'a> {
    /// A PCI function.
    Pci {
        /// The segment, which a device tree calls `linux,pci-domain`. Host bridges of a device tree
        /// without that property are numbered in their order.
        segment: u16,
        /// Bus, device and function: 8, 5 and 3 bits.
        id: u16,
    },
    /// A device of the platform: a node's path in the device tree, or an object's in ACPI.
    Named(&'a str),
}

/// A stream of a requester, in the IOMMU that serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequesterStream {
    /// The place of the IOMMU in [`IommuMap::units`].
    pub unit: usize,
    /// The number of the stream there: a StreamID, a device ID; for VT-d, the requester ID.
    pub stream: u32,
}

/// Memory that firmware wants a requester to reach, or never to be given as an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedMemory {
    /// The first IOVA.
    pub first: u64,
    /// The last IOVA, which is never below the first.
    pub last: u64,
    /// The physical address to which the first leads. Map the range before the requester is
    /// attached. `None`: map nothing there.
    pub paddr: Option<u64>,
}

/// The requesters that a line of a table is about.
#[derive(Clone, Debug)]
enum Requesters {
    /// PCI functions of a segment; `mask` is applied before `ids`.
    Pci {
        segment: u16,
        ids: RangeInclusive<u32>,
        mask: u32,
    },
    /// All of a segment.
    Segment(u16),
    /// All that there are.
    All,
    Named(Arc<str>),
    /// Whatever has one of these streams.
    Streams(Arc<[(usize, RangeInclusive<u32>)]>),
}

impl Requesters {
    fn ids(segment: u16, ids: RangeInclusive<u32>) -> Self {
        Self::Pci { segment, ids, mask: 0xffff }
    }

    fn has(&self, requester: DmaRequester<'_>) -> bool {
        match (self, requester) {
            (Self::All, _) => true,
            (Self::Segment(of), DmaRequester::Pci { segment, .. }) => *of == segment,
            (Self::Pci { segment: of, ids, mask }, DmaRequester::Pci { segment, id }) => {
                *of == segment && ids.contains(&(u32::from(id) & mask))
            }
            (Self::Named(path), DmaRequester::Named(name)) => **path == *name,
            _ => false,
        }
    }
}

/// How the number of a stream follows from the requester.
#[derive(Clone, Copy, Debug)]
enum To {
    /// It is this, whoever asks.
    Stream(u32),
    /// It is this for the first requester ID of the range, and so on.
    Base(u32),
    /// It is the requester ID.
    Id,
}

#[derive(Clone, Debug)]
struct Route {
    from: Requesters,
    /// `None`: no IOMMU serves them.
    unit: Option<usize>,
    to: To,
}

impl Route {
    fn stream(&self, requester: DmaRequester<'_>) -> Option<u32> {
        let id = match requester {
            DmaRequester::Pci { id, .. } => u32::from(id),
            DmaRequester::Named(_) => 0,
        };
        match (self.to, &self.from) {
            (To::Stream(stream), _) => Some(stream),
            (To::Base(base), Requesters::Pci { ids, mask, .. }) => {
                base.checked_add((id & mask).checked_sub(*ids.start())?)
            }
            (To::Id, _) => Some(id),
            (To::Base(_), _) => None,
        }
    }
}

/// What firmware says of a machine's IOMMUs.
#[derive(Clone, Debug, Default)]
pub struct IommuMap {
    units: Vec<IommuUnit>,
    routes: Vec<Route>,
    reserved: Vec<(Requesters, ReservedMemory)>,
}

impl IommuMap {
    /// The IOMMUs, in the order of the table.
    pub fn units(&self) -> &[IommuUnit] {
        &self.units
    }

    /// The streams of a requester: at most one of a PCI function, any number of a device with a
    /// name, none where no IOMMU serves it. Its accesses then reach all of memory: do not drive it,
    /// or keep bus mastering off.
    pub fn streams<'a>(
        &'a self,
        requester: DmaRequester<'a>,
    ) -> impl Iterator<Item = RequesterStream> + 'a {
        let most = if matches!(requester, DmaRequester::Pci { .. }) { 1 } else { usize::MAX };
        let routes = self.routes.iter().filter(move |route| route.from.has(requester)).take(most);
        routes.filter_map(move |route| {
            Some(RequesterStream { unit: route.unit?, stream: route.stream(requester)? })
        })
    }

    /// The memory that is reserved for a requester, in the order of the table.
    pub fn reserved<'a>(
        &'a self,
        requester: DmaRequester<'a>,
    ) -> impl Iterator<Item = ReservedMemory> + 'a {
        let is_for = move |from: &Requesters| match from {
            Requesters::Streams(of) => self.streams(requester).any(|found| {
                of.iter().any(|(unit, of)| *unit == found.unit && of.contains(&found.stream))
            }),
            other => other.has(requester),
        };
        self.reserved.iter().filter(move |(from, _)| is_for(from)).map(|&(_, memory)| memory)
    }
}
