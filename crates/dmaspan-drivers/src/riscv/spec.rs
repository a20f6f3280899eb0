//! Registers, commands, records and structures in memory, as the RISC-V IOMMU Architecture
//! Specification, version 1.0, lays them out. Sections are named by their titles.

use dmaspan::lg2;

bitflags::bitflags! {
    /// What an IOMMU can do: bits of its register `capabilities` ("IOMMU capabilities").
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Capabilities: u64 {
        /// Sv39 in the first stage.
        const SV39 = 1 << 9;
        /// Sv48 in the first stage.
        const SV48 = 1 << 10;
        /// Sv57 in the first stage.
        const SV57 = 1 << 11;
        /// Entries of tables may say the type of memory.
        const SVPBMT = 1 << 15;
        /// Sv39x4 in the second stage.
        const SV39X4 = 1 << 17;
        /// Sv48x4 in the second stage.
        const SV48X4 = 1 << 18;
        /// Sv57x4 in the second stage.
        const SV57X4 = 1 << 19;
        /// MSIs can be translated: device contexts have the extended format.
        const MSI_FLAT = 1 << 22;
        /// Hardware can set A and D bits in entries of tables.
        const AMO_HWAD = 1 << 24;
        /// Hardware has both byte orders.
        const END = 1 << 27;
        /// An invalidation of addresses can take what is cached of tables, too ("Non-leaf PTE
        /// Invalidation Extension").
        const NL = 1 << 42;
        /// An invalidation can name a range ("Address Range Invalidation Extension").
        const S = 1 << 43;
        /// Any mode of the first stage.
        const FIRST_STAGE = 0b111 << 9;
        /// Any mode of the second stage.
        const SECOND_STAGE = 0b111 << 17;
    }
}

/// `capabilities`, 64 bits.
pub(super) const CAPABILITIES: u64 = 0;
/// `fctl`, 32 bits.
pub(super) const FCTL: u64 = 8;
/// `ddtp`, 64 bits.
pub(super) const DDTP: u64 = 16;
/// `cqb`, 64 bits.
pub(super) const CQB: u64 = 24;
/// `cqh`, 32 bits.
pub(super) const CQH: u64 = 32;
/// `cqt`, 32 bits.
pub(super) const CQT: u64 = 36;
/// `fqb`, 64 bits.
pub(super) const FQB: u64 = 40;
/// `fqh`, 32 bits.
pub(super) const FQH: u64 = 48;
/// `fqt`, 32 bits.
pub(super) const FQT: u64 = 52;
/// `cqcsr`, 32 bits.
pub(super) const CQCSR: u64 = 72;
/// `fqcsr`, 32 bits.
pub(super) const FQCSR: u64 = 76;
/// `pqcsr`, 32 bits.
pub(super) const PQCSR: u64 = 80;
/// `ipsr`, 32 bits.
pub(super) const IPSR: u64 = 84;
/// `icvec`, 64 bits.
pub(super) const ICVEC: u64 = 760;
/// `msi_addr_0`, 64 bits, `msi_data_0` and `msi_vec_ctl_0`, 32 bits ("MSI configuration table").
pub(super) const MSI_ADDR_0: u64 = 768;
pub(super) const MSI_DATA_0: u64 = 776;
pub(super) const MSI_VEC_CTL_0: u64 = 780;

/// `capabilities.version`: the major version in the upper nibble.
pub(super) const fn major_version(capabilities: u64) -> u64 {
    capabilities >> 4 & 0xf
}

/// `capabilities.IGS`: how interrupts can be signalled.
pub(super) const fn interrupt_generation(capabilities: u64) -> u64 {
    capabilities >> 28 & 0b11
}
/// By messages alone.
pub(super) const IGS_MSI: u64 = 0;
/// By a wire alone.
pub(super) const IGS_WSI: u64 = 1;

/// `capabilities.PAS`: how many bits a physical address has.
pub(super) fn physical_bits(capabilities: u64) -> u32 {
    u32::try_from(capabilities >> 32 & 0x3f).unwrap_or(0)
}

/// `fctl` ("Features-control register"): big-endian, interrupts by wire, 32-bit guests.
pub(super) const FCTL_BE: u32 = 1 << 0;
pub(super) const FCTL_WSI: u32 = 1 << 1;
pub(super) const FCTL_GXL: u32 = 1 << 2;

/// `ddtp.iommu_mode` ("Device-directory-table pointer"): no access passes.
pub(super) const DDTP_OFF: u64 = 0;
/// `ddtp.iommu_mode`: a directory of one level. Two and three levels are the next numbers.
pub(super) const DDTP_1LVL: u64 = 2;
pub(super) const DDTP_MODE: u64 = 0xf;
pub(super) const DDTP_BUSY: u64 = 1 << 4;

/// Bits 53:10 of `ddtp`, `cqb`, `fqb` and of an entry of a directory: bits 55:12 of an address.
pub(super) const fn ppn(paddr: u64) -> u64 {
    paddr >> 2 & (lg2::mask(54) & !lg2::mask(10))
}

/// `cqcsr`, `fqcsr` and `pqcsr` ("Command-queue CSR" and the next two): the queue is to be active,
/// raises interrupts, is active, and is changing.
pub(super) const CSR_ENABLE: u32 = 1 << 0;
pub(super) const CSR_INTERRUPT: u32 = 1 << 1;
pub(super) const CSR_ON: u32 = 1 << 16;
pub(super) const CSR_BUSY: u32 = 1 << 17;
/// `cqmf`, `fqmf`, `pqmf`: the queue's memory could not be reached. Cleared by a 1, as all below.
pub(super) const CSR_MEMORY_FAULT: u32 = 1 << 8;
/// `cqcsr.cmd_to`: a command took too long.
pub(super) const CQCSR_TIMEOUT: u32 = 1 << 9;
/// `cqcsr.cmd_ill`: a command is none, or is not implemented.
pub(super) const CQCSR_ILLEGAL: u32 = 1 << 10;
/// Each of these stops the command queue.
pub(super) const CQCSR_ERRORS: u32 = CSR_MEMORY_FAULT | CQCSR_TIMEOUT | CQCSR_ILLEGAL;
/// `fqcsr.fqof`: there was no room for a record. No more are written until it is cleared.
pub(super) const FQCSR_OVERFLOW: u32 = 1 << 9;

/// `ipsr.fip` ("Interrupt pending status register"): an interrupt of the fault queue.
pub(super) const IPSR_FAULT: u32 = 1 << 1;
/// Interrupts of all causes: the three queues and the counters.
pub(super) const IPSR_ALL: u32 = 0b1111;

/// log2 of the bytes of a command ("Command-Queue") and of a record ("Fault/Event-Queue").
pub(super) const COMMAND_LG2: u32 = 4;
pub(super) const FAULT_LG2: u32 = 5;

/// A command: two words ("Command-Queue").
pub(super) type Command = [u64; 2];

const IOTINVAL: u64 = 1;
const IOFENCE: u64 = 2;
const IODIR: u64 = 3;
/// Bits 9:7, func3.
const FUNC_GVMA: u64 = 1 << 7;
/// IOTINVAL: the address, the PSCID and the GSCID are valid.
const AV: u64 = 1 << 10;
const PSCV: u64 = 1 << 32;
const GV: u64 = 1 << 33;
/// IOTINVAL: entries of all levels, where an address is named.
const NL: u64 = 1 << 34;
/// IOTINVAL, second word: the address says the size of a range.
const RANGE: u64 = 1 << 9;
/// IOFENCE.C: reads, and writes, that were processed are to be seen by everybody.
const PR: u64 = 1 << 12;
const PW: u64 = 1 << 13;
/// IODIR: the device is valid.
const DV: u64 = 1 << 33;

/// IOTINVAL.VMA of all host address spaces ("IOMMU page-table cache invalidation commands").
pub(super) const INVAL_VMA_ALL: Command = [IOTINVAL, 0];
/// IOTINVAL.GVMA of all guests.
pub(super) const INVAL_GVMA_ALL: Command = [IOTINVAL | FUNC_GVMA, 0];
/// IODIR.INVAL_DDT of all devices ("IOMMU directory cache invalidation commands").
pub(super) const INVAL_DDT_ALL: Command = [IODIR, 0];
/// IOFENCE.C: all commands before it have completed, and all accesses that were processed before
/// are seen by everybody ("IOMMU command-queue fence commands").
pub(super) const FENCE: Command = [IOFENCE | PR | PW, 0];
/// IOFENCE.C that waits for no access: a command that does nothing.
pub(super) const NOTHING: Command = [IOFENCE, 0];

/// IOTINVAL.VMA of the host address space with that PSCID.
pub(super) const fn inval_pscid(pscid: u32) -> Command {
    [IOTINVAL | PSCV | (pscid as u64) << 12, 0]
}

/// IOTINVAL.VMA of the first stages of the guest with that GSCID.
pub(super) const fn inval_vma_of_guest(gscid: u32) -> Command {
    [IOTINVAL | GV | (gscid as u64) << 44, 0]
}

/// IOTINVAL.GVMA of the guest with that GSCID.
pub(super) const fn inval_gscid(gscid: u32) -> Command {
    [IOTINVAL | FUNC_GVMA | GV | (gscid as u64) << 44, 0]
}

/// The same invalidation, of the leaf at `address` alone.
pub(super) const fn at(command: Command, address: u64) -> Command {
    let [operands, _] = command;
    [operands | AV, address >> 12 << 10]
}

/// The same invalidation, of the leaves in the block of `2^lg2` bytes around `address`: all of them
/// where that is the address space ("Address Range Invalidation Extension").
pub(super) const fn in_block(command: Command, address: u64, lg2: u32) -> Command {
    match lg2 {
        0..=12 => at(command, address),
        13..64 => {
            // Ones below the size, but for the highest.
            let ones = lg2::mask(lg2 - 1);
            let [operands, address] = at(command, lg2::align_down(address, lg2) | ones);
            [operands, address | RANGE]
        }
        _ => command,
    }
}

/// The same invalidation, of tables, too. It means nothing where no address is named, since then
/// all is forgotten.
pub(super) const fn with_tables(command: Command) -> Command {
    let [operands, address] = command;
    [operands | NL, address]
}

/// IODIR.INVAL_DDT of a device.
pub(super) const fn inval_device(device: u32) -> Command {
    [IODIR | DV | (device as u64) << 40, 0]
}

/// An entry of a directory that is not the last ("Non-leaf DDT entry"): it is valid, and where the
/// next one is.
pub(super) const fn directory_entry(table: u64) -> u64 {
    DIRECTORY_VALID | ppn(table)
}
const DIRECTORY_VALID: u64 = 1 << 0;

/// The words of a device context in the order of memory ("Device-context fields"). Those of the
/// extended format that follow are 0: MSIs are not recognised.
pub(super) const DC_TC: usize = 0;
pub(super) const DC_IOHGATP: usize = 1;
pub(super) const DC_TA: usize = 2;
pub(super) const DC_FSC: usize = 3;
pub(super) const DC_WORDS: usize = 4;
/// `DC.tc.V`: the context is valid. Where it is not, all else is ignored.
pub(super) const TC_VALID: u64 = 1 << 0;
/// `DC.tc` of a context that is not valid, but may be cached as it was: its other bits "may be
/// freely used by software", and this one says that it is not known to be forgotten.
pub(super) const TC_LEFT: u64 = 1 << 1;
/// Bits 63:60 of `iohgatp` and `fsc`: the mode, 0 for none.
const ATP_MODE_SHIFT: u32 = 60;

/// Whether `iohgatp` or `fsc` names a table.
pub(super) const fn translates(atp: u64) -> bool {
    atp >> ATP_MODE_SHIFT != 0
}

/// `iohgatp.GSCID`.
pub(super) const fn gscid_field(gscid: u32) -> u64 {
    (gscid as u64) << 44
}

/// `iohgatp.GSCID` of a word.
pub(super) fn gscid_of(iohgatp: u64) -> u32 {
    u32::try_from(iohgatp >> 44 & 0xffff).unwrap_or(0)
}

/// `ta.PSCID`.
pub(super) const fn pscid_field(pscid: u32) -> u64 {
    (pscid as u64) << 12
}

/// `ta.PSCID` of a word.
pub(super) fn pscid_of(ta: u64) -> u32 {
    u32::try_from(ta >> 12 & 0xf_ffff).unwrap_or(0)
}

/// A record of the fault queue ("Fault/Event-Queue").
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultRecord {
    pub(super) cause: u32,
    pub(super) transaction: u32,
    pub(super) device: u32,
    pub(super) iotval: u64,
}

impl FaultRecord {
    /// What the words of a record say.
    pub(super) fn new(first: u64, iotval: u64) -> Self {
        let field =
            |shift: u32, bits: u32| u32::try_from(first >> shift & lg2::mask(bits)).unwrap_or(0);
        Self { cause: field(0, 12), transaction: field(34, 6), device: field(40, 24), iotval }
    }
}
