//! The errors of the DMA API.

use super::coherent::NoCoherent;
use crate::addr::{DmaAddr, HostAddr, PhysAddr};
use crate::error::{Either, Errno};
use crate::iommu::{self, HardwareError, iova};
use crate::prot::Direction;
use crate::range::IovaRange;
use crate::span::Span;

/// The reason why the DMA API refused an operation, with what offends and the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There are no IOVAs for it.
    #[error(transparent)]
    Iova(#[from] iova::Error),
    /// The domain refused to map it.
    #[error(transparent)]
    Domain(#[from] iommu::Error),
    /// The device reaches nothing that could be given to it.
    #[error("the device reaches addresses up to {last:#x}, and so none of {lowest:#x} and above")]
    Mask {
        /// The last address that the device can use.
        last: u64,
        /// The first that there could be for it.
        lowest: u64,
    },
    /// Everything is to be bounced, and there is nothing to bounce it through.
    #[error("the device bounces all its buffers and has no pool: give it one with slots")]
    NoPool,
    /// A limit of the device cannot be kept.
    #[error("a device cannot have {what} of {value:#x}: the limit is {limit:#x}")]
    Limit {
        /// Which.
        what: &'static str,
        /// What the device asks for.
        value: u64,
        /// What there is.
        limit: u64,
    },
    /// There is no memory for a flush queue.
    #[error("there is no memory for flush queues of {cpus} CPUs with {entries} entries each")]
    NoQueue {
        /// How many CPUs it was to have slots for.
        cpus: usize,
        /// How many entries a slot was to have.
        entries: usize,
    },
    /// The device does not reach the memory, and there is nothing to bounce it through.
    #[error("{span} is beyond {last:#x}, the last address of the device, and cannot be bounced")]
    Unreachable {
        /// The memory.
        span: Span,
        /// The last address that the device can use.
        last: u64,
    },
    /// The memory has to be bounced, and the pool gives no slot for it: none is free that is long
    /// enough, or it cannot copy this memory.
    #[error(
        "the pool gives no slot for the {len:#x} bytes of {span}: none as long is free, or it \
         cannot copy them"
    )]
    NoSlot {
        /// The memory.
        span: Span,
        /// How many bytes the slot would have.
        len: u64,
    },
    /// The pool gives no slot to a buffer of the program.
    #[error("the pool gives no slot of {len:#x} bytes: {why}, {limit:#x} bytes")]
    NoLease {
        /// How many bytes the slot would have.
        len: u64,
        /// The limit that was met, in words.
        why: &'static str,
        /// That limit in bytes.
        limit: u64,
    },
    /// Registers of a device cannot be bounced.
    #[error("{span} is not memory, so it cannot be bounced")]
    NotMemory {
        /// The registers.
        span: Span,
    },
    /// Nobody knows one physical address for a buffer of the program.
    #[error(
        "the {len:#x} bytes at {start} have no physical address, or several: map what is contiguous"
    )]
    NoPhysical {
        /// Where the buffer begins for the program.
        start: HostAddr,
        /// How many bytes it has.
        len: u64,
    },
    /// An address means something else to the interface that was to hand it out.
    #[error("{addr} is no address for a driver: its interface takes it for a failure")]
    MeansFailure {
        /// What the device would use.
        addr: DmaAddr,
    },
    /// What is to be mapped as one piece is not one, or has no bytes.
    #[error("{}", Either(
        *pieces == 0,
        format_args!("a buffer without bytes cannot be mapped: leave it out"),
        format_args!("memory of {pieces} pieces cannot be mapped as one: map it as a list"),
    ))]
    NotSingle {
        /// How many pieces it has; none of no bytes.
        pieces: usize,
    },
    /// The mapping is not of this device.
    #[error("the mapping at {addr} belongs to another device")]
    Foreign {
        /// Where the mapping begins.
        addr: DmaAddr,
    },
    /// There is nothing mapped there that was turned into an address: it never was, or was
    /// unmapped, or is another device's.
    #[error("no mapping of this device was handed out as the address {addr}")]
    NotMapped {
        /// What was said to be mapped.
        addr: DmaAddr,
    },
    /// The mapping has another length.
    #[error("{mapped:#x} bytes are mapped at {addr}, not {len:#x}")]
    OtherLength {
        /// Where the mapping begins.
        addr: DmaAddr,
        /// The length that was said, in bytes.
        len: u64,
        /// How many bytes are mapped.
        mapped: u64,
    },
    /// The mapping has another direction.
    #[error("the mapping at {addr} goes {mapped:?}, not {direction:?}")]
    OtherDirection {
        /// Where the mapping begins.
        addr: DmaAddr,
        /// The direction that was said.
        direction: Direction,
        /// The direction that it was mapped for.
        mapped: Direction,
    },
    /// A device overwrites what it does not only write.
    #[error("only a mapping FromDevice can be overwritten, not one {direction:?}")]
    Overwrites {
        /// The direction that was asked for.
        direction: Direction,
    },
    /// Slots were not filled, since the device writes what is mapped, and nobody said how much of
    /// it it wrote: [`unmap_written`](super::Device::unmap_written) and its likes do.
    #[error("the device overwrites {len:#x} bytes: say by `unmap_written` how many it wrote")]
    Unreported {
        /// How many bytes are mapped.
        len: u64,
    },
    /// There is no memory to remember a mapping by its address.
    #[error("there is no memory for a record of the {len:#x} bytes mapped at {addr}")]
    NoRecord {
        /// Where the mapping begins.
        addr: DmaAddr,
        /// How many bytes are mapped.
        len: u64,
    },
    /// There is no memory to remember mappings by their addresses.
    #[error("there is no memory for the records of a device")]
    NoRecords,
    /// Nothing translates the device's addresses, so there are no IOVAs.
    #[error("nothing translates the addresses of the device, so it has no IOVAs")]
    Untranslated,
    /// A list has no pieces.
    #[error("a list without pieces cannot be mapped")]
    EmptyList,
    /// The bytes of a list, or the IOVAs for them, are more than there are addresses.
    #[error("a list wraps beyond 2^64 bytes at its piece {piece}")]
    ListWraps {
        /// The first piece that does not fit, counted from 0.
        piece: usize,
    },
    /// There is no room for the segments of a list.
    #[error("the list makes {needed} segments, and there is room for {room}")]
    SegmentRoom {
        /// How many segments there is room for.
        room: usize,
        /// How many the list has.
        needed: usize,
    },
    /// Memory of another device is beyond what the device can address.
    #[error("{span} of another device is beyond {last:#x}, the last address of this device")]
    PeerUnreachable {
        /// Where it is on their common bus.
        span: Span,
        /// The last address that the device can use.
        last: u64,
    },
    /// Part of what is to be synced is not in the mapping.
    #[error("{}", Either(
        *len == 0,
        format_args!("no bytes were asked for, of the {mapped:#x} bytes mapped"),
        format_args!(
            "{len:#x} bytes at offset {offset:#x} are not within the {mapped:#x} bytes mapped"
        ),
    ))]
    OutsideMapping {
        /// Where it would begin, in bytes from the mapping's first.
        offset: u64,
        /// How many bytes it would be.
        len: u64,
        /// How many bytes are mapped.
        mapped: u64,
    },
    /// What would be unlinked or linked cuts a piece that is linked.
    #[error("{len:#x} bytes at offset {offset:#x} overlap a link, and a link is not cut")]
    CutsLink {
        /// Where the linked piece begins, in bytes from the reservation's first.
        offset: u64,
        /// How many bytes it has.
        len: u64,
    },
    /// Low bits of an address do not fit its place: translation leaves them as they are.
    #[error("{offset:#x} does not lie in its granule of {granule:#x} bytes as its place does")]
    Misplaced {
        /// The address, or the offset in a granule.
        offset: u64,
        /// The granule in bytes.
        granule: u64,
    },
    /// Hardware could not be told of the reservation, and what was linked was unmapped.
    #[error("the reservation at {addr} was withdrawn: hardware did not take its translations")]
    Withdrawn {
        /// The reservation's first address.
        addr: DmaAddr,
    },
    /// There is no room to keep a record of so many pieces.
    #[error("there is no memory for a record of {pieces} pieces")]
    NoRoom {
        /// How many they would be.
        pieces: usize,
    },
    /// What is reached on the bus needs no translation and gets none.
    #[error("the device reaches {span} on the bus without a mapping: give it that address")]
    NotTranslated {
        /// The addresses on the bus.
        span: Span,
    },
    /// There cannot be so much coherent memory.
    #[error("{len:#x} bytes of coherent memory cannot be had: the device can have 1 to {limit:#x}")]
    Length {
        /// How many bytes were asked for.
        len: u64,
        /// How many the device can address.
        limit: u64,
    },
    /// Nothing can be aligned so.
    #[error("{align:#x} is no alignment for the device: it has to be a power of two to {limit:#x}")]
    Alignment {
        /// What was asked for.
        align: u64,
        /// The largest alignment of an address that the device can use.
        limit: u64,
    },
    /// There is no coherent memory like that.
    #[error("no {len:#x} bytes of coherent memory, aligned to {align:#x}, up to {last}: {source}")]
    NoCoherent {
        /// How many bytes were asked for.
        len: u64,
        /// To what they were to be aligned.
        align: u64,
        /// The last address that the memory could have: the device's, where nothing translates.
        last: PhysAddr,
        /// What is missing.
        source: NoCoherent,
    },
    /// An access is not at a multiple of its length.
    #[error("an access of {len:#x} bytes at offset {offset:#x} is not at a multiple of its length")]
    Unaligned {
        /// Where it would begin, in bytes from the first.
        offset: u64,
        /// How many bytes it would have.
        len: u64,
    },
    /// A block cannot be so in a pool of coherent memory.
    #[error("{boundary:#x} is no boundary of blocks: it has to be a power of two from {len:#x} on")]
    Boundary {
        /// How many bytes a block would have, with what aligns the next.
        len: u64,
        /// What no block was to cross.
        boundary: u64,
    },
    /// Blocks of a pool of coherent memory are out: their memory leaks.
    #[error("{blocks} blocks of the pool are out: the pages that they are in leak")]
    BlocksOut {
        /// How many.
        blocks: usize,
    },
    /// Hardware was not seen to forget the translations: IOVAs and memory stay in quarantine.
    #[error("{range} was unmapped but stays in quarantine: {source}")]
    Quarantined {
        /// Where the translations were.
        range: IovaRange,
        /// What hardware said.
        source: HardwareError,
    },
}

impl Error {
    /// Returns what a front end that looks like Linux answers.
    pub const fn errno(&self) -> Errno {
        match self {
            // As `dma_map_sgtable` says it; who asks for IOVAs alone is told `ENOSPC`.
            Self::Iova(iova::Error::Exhausted { .. }) => Errno::ENOMEM,
            Self::Iova(error) => error.errno(),
            Self::ListWraps { .. } => Errno::EOVERFLOW,
            Self::PeerUnreachable { .. } => Errno::EREMOTEIO,
            Self::Domain(error) => error.errno(),
            // As `dma_iova_link` for a piece that does not lie on its granule.
            Self::Misplaced { .. }
            | Self::Mask { .. }
            | Self::NoPool
            | Self::Unreachable { .. }
            | Self::Withdrawn { .. }
            | Self::Quarantined { .. } => Errno::EIO,
            Self::NoCoherent { .. }
            | Self::NoSlot { .. }
            | Self::NoLease { .. }
            | Self::NoRoom { .. }
            | Self::NoRecord { .. }
            | Self::NoRecords
            | Self::NoQueue { .. } => Errno::ENOMEM,
            Self::NotTranslated { .. } => Errno::EREMOTEIO,
            Self::NotMemory { .. } => Errno::EPERM,
            Self::NotMapped { .. } => Errno::ENOENT,
            Self::Untranslated => Errno::EOPNOTSUPP,
            Self::BlocksOut { .. } => Errno::EBUSY,
            Self::Length { .. }
            | Self::Alignment { .. }
            | Self::Unaligned { .. }
            | Self::Boundary { .. }
            | Self::Limit { .. }
            | Self::NotSingle { .. }
            | Self::NoPhysical { .. }
            | Self::MeansFailure { .. }
            | Self::EmptyList
            | Self::SegmentRoom { .. }
            | Self::Foreign { .. }
            | Self::CutsLink { .. }
            | Self::OtherLength { .. }
            | Self::OtherDirection { .. }
            | Self::Overwrites { .. }
            | Self::Unreported { .. }
            | Self::OutsideMapping { .. } => Errno::EINVAL,
        }
    }
}
