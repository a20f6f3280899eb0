//! Registers, structures, commands and events: AMD I/O Virtualization Technology (IOMMU)
//! Specification, publication 48882. Sections are those of revision 3.

use dmaspan::lg2;

use crate::faults::INTERRUPTS;

/// MMIO registers (3.4).
pub(super) mod register {
    /// Device Table Base Address Register.
    pub(crate) const DEVICE_TABLE: u64 = 0x0000;
    /// Command Buffer Base Address Register.
    pub(crate) const COMMAND_BASE: u64 = 0x0008;
    /// Event Log Base Address Register.
    pub(crate) const EVENT_BASE: u64 = 0x0010;
    /// IOMMU Control Register.
    pub(crate) const CONTROL: u64 = 0x0018;
    /// IOMMU Exclusion Base Register: bit 0 enables the range, bit 1 lets all devices at it.
    pub(crate) const EXCLUSION_BASE: u64 = 0x0020;
    /// IOMMU Exclusion Range Limit Register.
    pub(crate) const EXCLUSION_LIMIT: u64 = 0x0028;
    /// IOMMU Extended Feature Register.
    pub(crate) const EXTENDED_FEATURES: u64 = 0x0030;
    /// IOMMU Hardware Event Upper Register: the word of a record that has the event code.
    pub(crate) const HARDWARE_EVENT_UPPER: u64 = 0x0040;
    /// IOMMU Hardware Event Lower Register.
    pub(crate) const HARDWARE_EVENT_LOWER: u64 = 0x0048;
    /// IOMMU Hardware Event Status Register.
    pub(crate) const HARDWARE_EVENT_STATUS: u64 = 0x0050;
    /// Command Buffer Head Pointer Register.
    pub(crate) const COMMAND_HEAD: u64 = 0x2000;
    /// Command Buffer Tail Pointer Register.
    pub(crate) const COMMAND_TAIL: u64 = 0x2008;
    /// Event Log Head Pointer Register.
    pub(crate) const EVENT_HEAD: u64 = 0x2010;
    /// Event Log Tail Pointer Register.
    pub(crate) const EVENT_TAIL: u64 = 0x2018;
    /// IOMMU Status Register.
    pub(crate) const STATUS: u64 = 0x2020;
}

/// The PCI capability block (3.2).
pub(super) mod capability {
    /// Header bit 26, NpCache: absent entries are cached, too.
    pub(crate) const NP_CACHE: u32 = 1 << 26;
    /// Header bit 27, EFRSup: there is an Extended Feature Register.
    pub(crate) const EXTENDED_FEATURES: u32 = 1 << 27;
    /// Miscellaneous Information Register 0, bits 14:8, PASize.
    pub(crate) const PHYSICAL_BITS_SHIFT: u32 = 8;
    /// Miscellaneous Information Register 0, bits 21:15, VASize.
    pub(crate) const VIRTUAL_BITS_SHIFT: u32 = 15;
    /// Both are 7 bits.
    pub(crate) const BITS_MASK: u32 = 0x7f;
}

/// IOMMU Extended Feature Register (3.4).
pub(super) mod feature {
    /// IASup: INVALIDATE_IOMMU_ALL.
    pub(crate) const INVALIDATE_ALL: u64 = 1 << 6;
    /// HESup: hardware error registers.
    pub(crate) const HARDWARE_EVENTS: u64 = 1 << 8;
    /// HATS: levels of host tables, less 4; 3 is none.
    pub(crate) const LEVELS_SHIFT: u32 = 10;
    pub(crate) const LEVELS_MASK: u64 = 0b11;
    /// HASup: accessed bits are set in host tables.
    pub(crate) const ACCESSED: u64 = 1 << 49;
    /// HDSup: dirty bits are set in host tables.
    pub(crate) const DIRTY: u64 = 1 << 52;
}

/// IOMMU Control Register (3.4).
pub(super) mod control {
    /// IommuEn: accesses are translated. Without it all of them pass.
    pub(crate) const ENABLE: u64 = 1 << 0;
    /// EventLogEn.
    pub(crate) const EVENT_LOG: u64 = 1 << 2;
    /// EventIntEn.
    pub(crate) const EVENT_INTERRUPT: u64 = 1 << 3;
    /// ComWaitIntEn.
    pub(crate) const WAIT_INTERRUPT: u64 = 1 << 4;
    /// Coherent: reads of the device table are snooped.
    pub(crate) const COHERENT: u64 = 1 << 10;
    /// CmdBufEn.
    pub(crate) const COMMANDS: u64 = 1 << 12;
    /// PPRLogEn and PPRIntEn.
    pub(crate) const PAGE_REQUESTS: u64 = 0b11 << 13;
    /// GALogEn and GAIntEn.
    pub(crate) const GUEST_INTERRUPTS: u64 = 0b11 << 28;
    /// DualPprLogEn and DualEventLogEn: logs have a second buffer.
    const SECOND_LOGS: u64 = 0b1111 << 30;
    /// DevTblSegEn: upper devices have tables of their own.
    const SEGMENTS: u64 = 0b111 << 34;
    /// MarcEn: in some ranges addresses are relocated, whatever tables say.
    const APERTURES: u64 = 1 << 40;
    /// VCmdEn and VIommuEn: virtual machines have queues of their own.
    const VIRTUAL: u64 = 0b11 << 52;
    /// Whatever reads or writes memory that firmware set up, and what announces it.
    const QUEUES: u64 =
        EVENT_LOG | EVENT_INTERRUPT | WAIT_INTERRUPT | COMMANDS | PAGE_REQUESTS | GUEST_INTERRUPTS;
    /// What firmware may have set, and would go on besides this driver's table and queues.
    pub(crate) const FIRMWARE: u64 = QUEUES | SECOND_LOGS | SEGMENTS | APERTURES | VIRTUAL;
}

/// IOMMU Status Register (3.4).
pub(super) mod status {
    /// EventOverflow: an event had no room; none is logged until this is cleared.
    pub(crate) const EVENT_OVERFLOW: u32 = 1 << 0;
    /// EventLogInt.
    pub(crate) const EVENT_INTERRUPT: u32 = 1 << 1;
    /// EventLogRun.
    pub(crate) const EVENT_RUN: u32 = 1 << 3;
    /// CmdBufRun: 0 where the buffer is disabled or a command was refused.
    pub(crate) const COMMANDS_RUN: u32 = 1 << 4;
    /// EventLogRun, CmdBufRun, PPRLogRun and GALogRun.
    pub(crate) const RUN: u32 = EVENT_RUN | COMMANDS_RUN | 1 << 7 | 1 << 8;
    /// All that a one clears: overflows and interrupts of all logs.
    pub(crate) const CLEARED: u32 = 0b111 | 0b11 << 5 | 0b11 << 9;
    /// What a device that is gone answers.
    pub(crate) const GONE: u32 = u32::MAX;
}

/// IOMMU Hardware Event Status Register (3.4).
pub(super) mod hardware_event {
    /// HEV: there is a record.
    pub(crate) const VALID: u32 = 1 << 0;
    /// HEO: there were more.
    pub(crate) const OVERFLOW: u32 = 1 << 1;
}

/// log2 of the size of a command and of an event record (2.4, 2.5).
pub(super) const LG2_RECORD: u32 = 4;
/// Base registers of buffers, bits 59:56: log2 of the number of entries (3.4).
pub(super) const BUFFER_LENGTH_SHIFT: u32 = 56;
/// The smallest and the largest value of it (3.4).
pub(super) const BUFFER_LENGTHS: core::ops::RangeInclusive<u32> = 8..=15;

/// log2 of the size of a device table entry (2.2.2).
pub(super) const LG2_DEVICE_ENTRY: u32 = 5;

/// Device table entries, bits 127:0 (2.2.2.1). The others are 0, but for
/// [`interrupts`](device_entry::interrupts): IV = 0, interrupts are not remapped.
pub(super) mod device_entry {
    use dmaspan::PhysAddr;

    /// Word 0, V: bits 127:1 are valid. Without it accesses pass.
    pub(crate) const VALID: u64 = 1 << 0;
    /// Word 0, TV: so are Mode, root, IR and IW.
    pub(crate) const TRANSLATION_VALID: u64 = 1 << 1;
    /// Word 0, Mode: the number of levels. With 0 accesses go untranslated, as IR and IW permit.
    pub(crate) const MODE_SHIFT: u32 = 9;
    const MODE: u64 = 0b111 << MODE_SHIFT;
    /// Word 0, host page table root pointer.
    pub(crate) const ROOT: u64 = 0x000f_ffff_ffff_f000;
    /// Word 0, IR and IW: reads and writes are permitted, if the tables do.
    pub(crate) const READ_WRITE: u64 = 0b11 << 61;
    /// Word 1, DomainID.
    const DOMAIN: u64 = 0xffff;
    /// Word 1, SysMgt: which system management messages pass.
    const SYSTEM_MANAGEMENT: u64 = 0b11 << 40;

    /// Word 0 of a device that reaches nothing: IR and IW are 0, above a table without entries.
    ///
    /// Mode 0 would do (2.2.2.1: then IR and IW decide), but QEMU lets a device pass whose mode is
    /// 0, whatever they are.
    pub(crate) fn closed(empty_table: PhysAddr) -> u64 {
        VALID | TRANSLATION_VALID | 1 << MODE_SHIFT | empty_table.get() & ROOT
    }

    /// Word 0 of a device that reaches all memory: no levels, IR and IW.
    pub(crate) const PASSING: u64 = VALID | TRANSLATION_VALID | READ_WRITE;

    /// Word 0 with another tree: everything that says where it is and how high is in this word, so
    /// one store changes both.
    pub(crate) fn with_root(word: u64, root: u64, level: u32) -> u64 {
        let mode = (u64::from(level) + 1) << MODE_SHIFT & MODE;
        word & !(MODE | ROOT) | mode | root & ROOT
    }

    /// The domain in word 1.
    pub(crate) fn domain(word: u64) -> u16 {
        super::low16(word)
    }

    /// Word 1 with that domain; what firmware asked for stays.
    pub(crate) fn with_domain(word: u64, domain: u16) -> u64 {
        word & !DOMAIN | u64::from(domain)
    }

    /// Word 1 with SysMgt of an IVHD entry's DTE setting, bits 5:4 (5.2.2.1).
    pub(crate) fn with_setting(word: u64, setting: u8) -> u64 {
        word & !SYSTEM_MANAGEMENT | u64::from(setting >> 4 & 0b11) << 40
    }

    /// Word 2 of that setting: INITPass, EIntPass and NMIPass from bits 2:0, LINT0Pass and
    /// LINT1Pass from bits 7:6 (5.2.2.1).
    pub(crate) fn interrupts(setting: u8) -> u64 {
        u64::from(setting & 0b111) << 56 | u64::from(setting >> 6) << 62
    }
}

/// A command (2.4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Command(pub(super) [u64; 2]);

/// What an INVALIDATE_IOMMU_PAGES takes besides leaves (2.4.3, PDE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Walks {
    Kept,
    Forgotten,
}

impl Command {
    const OPCODE_SHIFT: u32 = 60;
    /// COMPLETION_WAIT, s: store the second word.
    const STORE: u64 = 1 << 0;
    /// INVALIDATE_IOMMU_PAGES, S: the address says the size.
    const SIZED: u64 = 1 << 0;
    /// INVALIDATE_IOMMU_PAGES, PDE: directory entries, too.
    const DIRECTORIES: u64 = 1 << 1;
    /// INVALIDATE_IOMMU_PAGES, the address of everything (2.4.3).
    const EVERYTHING: u64 = 0x7fff_ffff_ffff_f000;
    /// The largest block whose size an address says (2.2.3, page size encodings).
    const LARGEST_LG2: u32 = 51;

    /// COMPLETION_WAIT: when all before it are done, stores `data` at `store` (2.4.1).
    pub(super) fn completion_wait(store: u64, data: u64) -> Self {
        let store = store & 0x000f_ffff_ffff_fff8;
        Self([1 << Self::OPCODE_SHIFT | store | Self::STORE, data])
    }

    /// INVALIDATE_DEVTAB_ENTRY (2.4.2).
    pub(super) fn invalidate_device(device: u16) -> Self {
        Self([2 << Self::OPCODE_SHIFT | u64::from(device), 0])
    }

    /// INVALIDATE_IOMMU_PAGES: the block of `2^lg2` bytes around `iova`, or everything of the
    /// domain where an address cannot say so large a block (2.4.3).
    pub(super) fn invalidate_pages(domain: u16, iova: u64, lg2: u32, walks: Walks) -> Self {
        let opcode = 3 << Self::OPCODE_SHIFT | u64::from(domain) << 32;
        let walks = if walks == Walks::Forgotten { Self::DIRECTORIES } else { 0 };
        let address = match lg2 {
            0..=12 => lg2::align_down(iova, 12),
            // Ones below the size, but for the highest (2.2.3, page size encodings).
            13..=Self::LARGEST_LG2 => {
                let ones = lg2::mask(lg2 - 1) & !lg2::mask(12);
                lg2::align_down(iova, lg2) | ones | Self::SIZED
            }
            _ => Self::EVERYTHING | Self::SIZED,
        };
        Self([opcode, address | walks])
    }

    /// INVALIDATE_IOMMU_PAGES of everything that is cached of a domain (2.4.3).
    pub(super) fn invalidate_domain(domain: u16) -> Self {
        Self::invalidate_pages(domain, 0, 64, Walks::Forgotten)
    }

    /// INVALIDATE_IOMMU_ALL (2.4.8).
    pub(super) fn invalidate_all() -> Self {
        Self([8 << Self::OPCODE_SHIFT, 0])
    }
}

/// What an event record says (2.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// ILLEGAL_DEV_TABLE_ENTRY (2.5.2).
    IllegalDeviceEntry(Access),
    /// IO_PAGE_FAULT (2.5.3).
    PageFault(Access),
    /// DEV_TAB_HARDWARE_ERROR (2.5.4) or PAGE_TAB_HARDWARE_ERROR (2.5.5): a table could not be
    /// read. The address is the table's.
    TableError(Access),
    /// ILLEGAL_COMMAND_ERROR (2.5.6) or COMMAND_HARDWARE_ERROR (2.5.7): the command at this
    /// physical address was refused or could not be read, and the command buffer stopped.
    CommandError(u64),
    /// IOTLB_INV_TIMEOUT (2.5.8): a device did not answer the command at this physical address.
    InvalidationTimeout(u64),
    /// INVALID_DEVICE_REQUEST (2.5.9), INVALID_PPR_REQUEST (2.5.10), or one of later revisions
    /// that names a device, by its event code.
    Refused(Access, u32),
    /// EVENT_COUNTER_ZERO (2.5.11).
    CounterZero,
    /// No event: hardware has not written it yet, or never will.
    Nothing,
}

/// Of which access an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) device: u16,
    pub(super) address: u64,
    flags: u64,
}

impl Access {
    /// Word 0 bits 51, 52, 53 and 54: interrupt, present, write, permission (2.5.3).
    const INTERRUPT: u64 = 1 << 51;
    const PRESENT: u64 = 1 << 52;
    const WRITE: u64 = 1 << 53;
    const PERMISSION: u64 = 1 << 54;
    /// RZ: a reserved bit was set, or a level was wrong.
    const RESERVED: u64 = 1 << 55;
    const QEMU_WRITE: u64 = 1 << 49;

    /// I, of an address that interrupts have.
    pub(super) fn is_interrupt(&self) -> bool {
        self.flags & Self::INTERRUPT != 0 && INTERRUPTS.contains(&self.address)
    }

    /// RW. The manual promises it only for what is mapped; hardware says it of everything.
    ///
    /// QEMU sets I for accesses to memory, too, and says in bits 49:48 what was tried: 2 is a
    /// write.
    pub(super) fn is_write(&self) -> bool {
        let as_qemu = Self::INTERRUPT | Self::QEMU_WRITE;
        self.flags & Self::WRITE != 0 || !self.is_interrupt() && self.flags & as_qemu == as_qemu
    }

    /// PR and PE: mapped, and without the permission.
    pub(super) fn lacks_permission(&self) -> bool {
        let both = Self::PRESENT | Self::PERMISSION;
        self.flags & both == both
    }

    /// PR and RZ: a table is wrong.
    pub(super) fn is_malformed(&self) -> bool {
        let both = Self::PRESENT | Self::RESERVED;
        self.flags & both == both
    }
}

impl Event {
    pub(super) fn decode([word, address]: [u64; 2]) -> Self {
        let access = Access { device: low16(word), address, flags: word };
        match word >> 60 {
            0x1 => Self::IllegalDeviceEntry(access),
            0x2 => Self::PageFault(access),
            0x3 | 0x4 => Self::TableError(access),
            0x5 | 0x6 => Self::CommandError(address),
            0x7 => Self::InvalidationTimeout(address),
            0x8 => Self::Refused(access, 0x8),
            0x9 => Self::Refused(access, 0x9),
            0xa => Self::CounterZero,
            0xd => Self::Refused(access, 0xd),
            0xe => Self::Refused(access, 0xe),
            _ => Self::Nothing,
        }
    }
}

/// Bits 15:0.
fn low16(word: u64) -> u16 {
    let [low, high, ..] = word.to_le_bytes();
    u16::from_le_bytes([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_the_size_of_what_is_forgotten() {
        let address = |iova, lg2| Command::invalidate_pages(7, iova, lg2, Walks::Kept).0[1];
        // 48882, table of example page size encodings.
        assert_eq!(address(0x1234_5678, 12), 0x1234_5000);
        assert_eq!(address(0x1234_5678, 13), 0x1234_4000 | 1);
        assert_eq!(address(0x1234_5678, 14), 0x1234_4000 | 0x1000 | 1);
        assert_eq!(address(0x1234_5678, 16), 0x1234_0000 | 0x7000 | 1);
        assert_eq!(address(0x1234_5678, 21), 0x1220_0000 | 0xf_f000 | 1);
        assert_eq!(address(0x1234_5678, 30), 0x1fff_f000 | 1);
        assert_eq!(address(u64::MAX, 51), 0xfffb_ffff_ffff_f000 | 1);
        assert_eq!(address(0, 52), 0x7fff_ffff_ffff_f000 | 1);
        assert_eq!(Command::invalidate_domain(7).0, [3 << 60 | 7 << 32, 0x7fff_ffff_ffff_f003]);
    }

    #[test]
    fn commands_are_the_manuals() {
        assert_eq!(Command::completion_wait(0x12_3458, 9).0, [0x1000_0000_0012_3459, 9]);
        assert_eq!(Command::invalidate_device(0x1234).0, [0x2000_0000_0000_1234, 0]);
        assert_eq!(Command::invalidate_all().0, [0x8000_0000_0000_0000, 0]);
    }

    #[test]
    fn a_setting_of_firmware_is_put_where_the_entry_has_it() {
        assert_eq!(device_entry::interrupts(0b1100_0111), 0b1100_0111 << 56);
        assert_eq!(device_entry::with_setting(5, 0b0011_0000), 5 | 0b11 << 40);
        assert_eq!(device_entry::with_domain(u64::MAX, 3), u64::MAX << 16 | 3);
    }
}
