//! The bytes of a table, which may be anything.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

/// The reason why a table of firmware is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FirmwareError {
    /// The table is another one.
    #[error("this is no {table}: its first four bytes are {found:#010x}")]
    Signature {
        /// The table that was expected.
        table: &'static str,
        /// The first four bytes, most significant byte first.
        found: u32,
    },
    /// The bytes of an ACPI table do not add up to 0.
    #[error("the bytes of the {table} add up to {sum:#x}, not to 0: it is damaged")]
    Checksum {
        /// The table.
        table: &'static str,
        /// Their sum.
        sum: u8,
    },
    /// Something reaches over an end.
    #[error(
        "the {what} at {offset:#x} of the {table} has {bytes:#x} bytes, but these end at {limit:#x}"
    )]
    Ends {
        /// The table.
        table: &'static str,
        /// What, lower-case.
        what: &'static str,
        /// Where it begins.
        offset: usize,
        /// The bytes that it takes.
        bytes: usize,
        /// Where the table, or the entry around it, ends.
        limit: usize,
    },
    /// A number is not one of those that can be.
    #[error(
        "the {what} at {offset:#x} of the {table} is {value:#x}, but may be {least:#x} to {most:#x}"
    )]
    Value {
        /// The table.
        table: &'static str,
        /// What, lower-case.
        what: &'static str,
        /// Where it is.
        offset: usize,
        /// The number.
        value: u64,
        /// The least that it may be.
        least: u64,
        /// The most.
        most: u64,
    },
    /// A reference leads to no IOMMU.
    #[error("the {what} at {offset:#x} of the {table} leads to {target:#x}, where no IOMMU is")]
    NoIommu {
        /// The table.
        table: &'static str,
        /// What, lower-case.
        what: &'static str,
        /// Where it is.
        offset: usize,
        /// What it says: an offset, or a node's phandle.
        target: u32,
    },
}

/// A part of a table, read by offsets from the table's beginning.
#[derive(Clone, Copy)]
pub(super) struct Bytes<'a> {
    pub(super) table: &'static str,
    bytes: &'a [u8],
    /// The offset of the first of `bytes`.
    start: usize,
}

impl<'a> Bytes<'a> {
    /// All of a table's bytes, before any is known to be right.
    pub(super) fn new(table: &'static str, bytes: &'a [u8]) -> Self {
        Self { table, bytes, start: 0 }
    }

    /// An ACPI table, whose length and sum are right: ACPI 6.5, 5.2.6.
    pub(super) fn acpi(table: &'static str, bytes: &'a [u8]) -> Result<Self, FirmwareError> {
        let all = Self::new(table, bytes);
        let signature = all.array::<4>(0, "signature")?;
        if signature != table.as_bytes() {
            return Err(FirmwareError::Signature { table, found: u32::from_be_bytes(signature) });
        }
        let length = all.u32(4, "length")?;
        let length = all.check("length", 4, length.into(), 36..=u64::MAX)?;
        let all = all.part(0, usize::try_from(length).unwrap_or(usize::MAX), "table")?;
        let sum = all.bytes.iter().fold(0u8, |sum, &byte| sum.wrapping_add(byte));
        if sum != 0 {
            return Err(FirmwareError::Checksum { table, sum });
        }
        Ok(all)
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }

    pub(super) fn end(&self) -> usize {
        self.start + self.bytes.len()
    }

    pub(super) fn as_slice(&self) -> &'a [u8] {
        self.bytes
    }

    /// A part of these bytes.
    pub(super) fn part(
        &self,
        offset: usize,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, FirmwareError> {
        let from = offset.checked_sub(self.start);
        let part = from.and_then(|from| self.bytes.get(from..from.checked_add(bytes)?));
        let ends =
            FirmwareError::Ends { table: self.table, what, offset, bytes, limit: self.end() };
        Ok(Self { bytes: part.ok_or(ends)?, start: offset, ..*self })
    }

    fn array<const N: usize>(
        &self,
        offset: usize,
        what: &'static str,
    ) -> Result<[u8; N], FirmwareError> {
        let mut array = [0; N];
        array.copy_from_slice(self.part(offset, N, what)?.bytes);
        Ok(array)
    }

    pub(super) fn u8(&self, offset: usize, what: &'static str) -> Result<u8, FirmwareError> {
        self.array::<1>(offset, what).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&self, offset: usize, what: &'static str) -> Result<u16, FirmwareError> {
        self.array(offset, what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&self, offset: usize, what: &'static str) -> Result<u32, FirmwareError> {
        self.array(offset, what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&self, offset: usize, what: &'static str) -> Result<u64, FirmwareError> {
        self.array(offset, what).map(u64::from_le_bytes)
    }

    /// A number of a device tree, most significant byte first.
    pub(super) fn be32(&self, offset: usize, what: &'static str) -> Result<u32, FirmwareError> {
        self.array(offset, what).map(u32::from_be_bytes)
    }

    /// The bytes up to a zero byte.
    pub(super) fn text(
        &self,
        offset: usize,
        what: &'static str,
    ) -> Result<&'a [u8], FirmwareError> {
        let rest = self.part(offset, self.end().saturating_sub(offset), what)?;
        let end = rest.bytes.iter().position(|&byte| byte == 0);
        let bytes = rest.bytes.len().saturating_add(1);
        let ends =
            FirmwareError::Ends { table: self.table, what, offset, bytes, limit: self.end() };
        end.and_then(|end| rest.bytes.get(..end)).ok_or(ends)
    }

    /// Refuses a number that is not within its limits.
    pub(super) fn check(
        &self,
        what: &'static str,
        offset: usize,
        value: u64,
        limits: RangeInclusive<u64>,
    ) -> Result<u64, FirmwareError> {
        if limits.contains(&value) {
            return Ok(value);
        }
        let (least, most) = limits.into_inner();
        Err(FirmwareError::Value { table: self.table, what, offset, value, least, most })
    }

    /// The last of `count` numbers of 32 bits from `first`; `count` is not 0.
    pub(super) fn last(
        &self,
        what: &'static str,
        offset: usize,
        first: u32,
        count: u64,
    ) -> Result<u32, FirmwareError> {
        let most = u64::from(u32::MAX - first) + 1;
        let count = self.check(what, offset, count, 1..=most)?;
        // `check` has seen that the sum is no more than `u32::MAX`.
        Ok(u32::try_from(u64::from(first) + count - 1).unwrap_or(u32::MAX))
    }

    /// The last byte of memory whose length stands at `offset`.
    pub(super) fn last_byte(
        &self,
        offset: usize,
        first: u64,
        bytes: u64,
    ) -> Result<u64, FirmwareError> {
        let most = (u64::MAX - first).saturating_add(1);
        let bytes = self.check("length of memory", offset, bytes, 1..=most)?;
        Ok(first + (bytes - 1))
    }

    /// The name of an object of ACPI.
    pub(super) fn name(&self, offset: usize) -> Result<Arc<str>, FirmwareError> {
        Ok(String::from_utf8_lossy(self.text(offset, "name of an object")?).into())
    }

    /// The nodes of a table whose header says, as of IORT (DEN 0049, 3.1) and RIMT, how many there
    /// are and where they begin. Each has its length at `length`, and `least` bytes or more.
    pub(super) fn nodes(self, length: usize, least: usize) -> Result<Vec<Self>, FirmwareError> {
        let first = self.u32(40, "offset of nodes")? as usize;
        self.check("offset of nodes", 40, first as u64, 48..=self.end() as u64)?;
        let length = |table: &Self, at| table.u16(at + length, "length of a node").map(usize::from);
        let nodes = self.parts(first, least, "node", length).collect::<Result<Vec<_>, _>>()?;
        let count = self.u32(36, "number of nodes")?;
        self.check("number of nodes", 36, count.into(), 0..=nodes.len() as u64)?;
        Ok(nodes)
    }

    /// The parts of these bytes from `offset` on, each as long as `length` says of its beginning.
    ///
    /// A length below `least` is refused, so the walk ends.
    pub(super) fn parts<F>(
        self,
        offset: usize,
        least: usize,
        what: &'static str,
        length: F,
    ) -> impl Iterator<Item = Result<Self, FirmwareError>>
    where
        F: Fn(&Self, usize) -> Result<usize, FirmwareError>,
    {
        let mut at = Some(offset);
        core::iter::from_fn(move || {
            let here = at.filter(|&here| here < self.end())?;
            let part = length(&self, here).and_then(|bytes| {
                self.check(what, here, bytes as u64, least as u64..=u64::MAX)?;
                self.part(here, bytes, what)
            });
            at = part.as_ref().ok().map(Self::end);
            Some(part)
        })
    }
}
