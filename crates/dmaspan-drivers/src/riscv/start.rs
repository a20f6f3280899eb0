//! Starting the hardware, and stopping it ("Guidelines for initialization").

use dmaspan::iommu::HardwareError;
use dmaspan::{PhysAddr, lg2};
use lock_api::RawMutex;

use super::directory::{Directory, Shape};
use super::faults::FaultQueue;
use super::queue::CommandQueue;
use super::spec::{
    CAPABILITIES, CQCSR, CQCSR_ERRORS, CSR_BUSY, CSR_INTERRUPT, CSR_MEMORY_FAULT, CSR_ON,
    Capabilities, DDTP, DDTP_1LVL, DDTP_BUSY, DDTP_MODE, DDTP_OFF, FCTL, FCTL_BE, FCTL_GXL,
    FCTL_WSI, FQCSR, FQCSR_OVERFLOW, ICVEC, IGS_MSI, IGS_WSI, INVAL_DDT_ALL, INVAL_GVMA_ALL,
    INVAL_VMA_ALL, IPSR, IPSR_ALL, MSI_ADDR_0, MSI_DATA_0, MSI_VEC_CTL_0, PQCSR,
    interrupt_generation, major_version, physical_bits, ppn,
};
use super::{RiscvInterrupts, RiscvIommuConfig, RiscvIommuFeatures};
use crate::Mmio;
use crate::error::Error;
use crate::host::{self, Host, Structure, gone};
use crate::structure::Words;

/// log2 of the bytes of a queue of `2^lg2` places of `2^place_lg2` bytes each: not less than a
/// page.
pub(super) fn lg2_bytes(lg2: u32, place_lg2: u32) -> u32 {
    (lg2 + place_lg2).max(12)
}

/// An IOMMU that was brought up.
pub(super) struct Started<H: Host> {
    pub(super) features: RiscvIommuFeatures,
    pub(super) commands: CommandQueue<H>,
    pub(super) faults: FaultQueue<H::Structure, H::Lock>,
    pub(super) directory: Directory<H::Structure, H::Lock>,
}

/// Brings an IOMMU up with all devices blocked.
pub(super) fn start<R: Mmio, H: Host>(
    registers: &R,
    host: &H,
    config: &RiscvIommuConfig,
) -> Result<Started<H>, Error> {
    check(config)?;
    let capabilities = registers.read64(CAPABILITIES);
    if capabilities == u64::MAX {
        return Err(gone(capabilities).into());
    }
    if major_version(capabilities) != 1 {
        let what = "interface of a version 1 of the specification";
        return Err(Error::unsupported(what, capabilities));
    }
    let output_bits = physical_bits(capabilities);
    if !(32..=56).contains(&output_bits) {
        return Err(Error::unsupported("physical addresses of 32 to 56 bits", capabilities));
    }
    // Whatever firmware left, nothing passes from here on.
    turn_off(registers, host)?;
    set_control(registers, capabilities, config)?;
    let known = Capabilities::from_bits_truncate(capabilities);
    let max_paddr = PhysAddr::new(lg2::mask(output_bits));
    let interrupt = match config.interrupts {
        RiscvInterrupts::Off => 0,
        RiscvInterrupts::Wire | RiscvInterrupts::Message { .. } => CSR_INTERRUPT,
    };
    let mut commands = CommandQueue::new(host, config.commands_lg2, max_paddr)?;
    let faults = FaultQueue::new(host, config.faults_lg2, interrupt, max_paddr);
    let mut faults = faults.inspect_err(|_| commands.free())?;
    let context_lg2 = if known.contains(Capabilities::MSI_FLAT) { 3 } else { 2 };
    let shapes = (1..=3).map(|levels| Shape { levels, context_lg2 });
    let mut shapes = shapes.filter(|shape| shape.device_bits() >= config.device_id_bits);
    let up = turn_on_queues(registers, host, known, &commands, &faults)
        .and_then(|()| find_directory(registers, host, &mut shapes, max_paddr));
    match up {
        Ok(directory) => {
            let Shape { levels: directory_levels, .. } = directory.shape();
            let device_id_bits = directory.shape().device_bits();
            let capabilities = known;
            let features =
                RiscvIommuFeatures { capabilities, output_bits, device_id_bits, directory_levels };
            Ok(Started { features, commands, faults, directory })
        }
        Err(error) => {
            if turn_off(registers, host).is_ok() {
                commands.free();
                faults.free();
            }
            Err(error)
        }
    }
}

/// Turns the queues on, and makes hardware forget everything.
fn turn_on_queues<R: Mmio, H: Host>(
    registers: &R,
    host: &H,
    capabilities: Capabilities,
    commands: &CommandQueue<H>,
    faults: &FaultQueue<H::Structure, H::Lock>,
) -> Result<(), Error> {
    commands.start(registers, host)?;
    faults.start(registers, host)?;
    // "The IOMMU may retain information cached from in-memory data structures" when it turns off.
    commands.run(registers, host, &[INVAL_DDT_ALL])?;
    if capabilities.intersects(Capabilities::FIRST_STAGE) {
        commands.run(registers, host, &[INVAL_VMA_ALL])?;
    }
    if capabilities.intersects(Capabilities::SECOND_STAGE) {
        commands.run(registers, host, &[INVAL_GVMA_ALL])?;
    }
    Ok(())
}

/// Gives hardware, which is off, a directory of the first shape that it takes.
fn find_directory<R: Mmio, H: Host, L: RawMutex>(
    registers: &R,
    host: &H,
    shapes: &mut dyn Iterator<Item = Shape>,
    max_paddr: PhysAddr,
) -> Result<Directory<H::Structure, L>, Error> {
    for shape in shapes {
        let mut directory = Directory::new(host, shape, max_paddr)?;
        let mode = DDTP_1LVL + u64::from(shape.levels) - 1;
        if set_directory(registers, host, ppn(directory.root().get()) | mode)? {
            return Ok(directory);
        }
        // The mode is not kept, so hardware has not got the table.
        if set_directory(registers, host, DDTP_OFF)? {
            directory.free();
        }
    }
    let what = "device directory for IDs of so many bits";
    Err(Error::unsupported(what, registers.read64(CAPABILITIES)))
}

/// Refuses what no hardware can be set up with.
fn check(config: &RiscvIommuConfig) -> Result<(), Error> {
    Error::check("the number of bits of device IDs", config.device_id_bits, 0..=24)?;
    Error::check("log2 of the command queue's places", config.commands_lg2, 2..=15)?;
    Error::check("log2 of the fault queue's places", config.faults_lg2, 1..=15)
}

/// Sets what can only be changed while everything is off: little-endian, 64-bit tables, interrupts.
fn set_control<R: Mmio>(
    registers: &R,
    capabilities: u64,
    config: &RiscvIommuConfig,
) -> Result<(), Error> {
    let refused = |what| Error::unsupported(what, capabilities);
    let wire = match (config.interrupts, interrupt_generation(capabilities)) {
        (RiscvInterrupts::Wire, IGS_MSI) => return Err(refused("interrupts by wire")),
        (RiscvInterrupts::Message { .. }, IGS_WSI) => {
            return Err(refused("interrupts by message"));
        }
        (RiscvInterrupts::Wire, _) => FCTL_WSI,
        _ => 0,
    };
    let mut control = registers.read32(FCTL) & !(FCTL_BE | FCTL_GXL);
    if config.interrupts != RiscvInterrupts::Off {
        control = control & !FCTL_WSI | wire;
    }
    registers.write32(FCTL, control);
    let kept = registers.read32(FCTL);
    if kept & (FCTL_BE | FCTL_GXL) != 0 {
        return Err(Error::unsupported("little-endian tables with 64-bit entries", kept));
    }
    if config.interrupts != RiscvInterrupts::Off {
        // All causes go to vector 0, where nobody acknowledges those of before.
        registers.write64(ICVEC, 0);
        registers.write32(IPSR, IPSR_ALL);
    }
    if let RiscvInterrupts::Message { address, data } = config.interrupts {
        registers.write64(MSI_ADDR_0, address.get());
        registers.write32(MSI_DATA_0, data);
        registers.write32(MSI_VEC_CTL_0, 0);
    }
    Ok(())
}

/// Turns an IOMMU off: no access passes, and it reads and writes no memory of ours any more.
pub(super) fn turn_off<R: Mmio>(registers: &R, host: &impl Host) -> Result<(), HardwareError> {
    let what = "the IOMMU did not turn off";
    if !set_directory(registers, host, DDTP_OFF)? {
        return Err(HardwareError { what, status: registers.read64(DDTP) });
    }
    let clear = [
        (CQCSR, CQCSR_ERRORS),
        (FQCSR, CSR_MEMORY_FAULT | FQCSR_OVERFLOW),
        (PQCSR, CSR_MEMORY_FAULT | FQCSR_OVERFLOW),
    ];
    for (register, errors) in clear {
        settle(registers, host, register, CSR_BUSY, 0, what)?;
        registers.write32(register, errors);
        settle(registers, host, register, CSR_BUSY | CSR_ON, 0, what)?;
    }
    Ok(())
}

/// Writes `ddtp`, and says whether hardware has kept it: which modes there are shows by writing
/// them. Turned off, it keeps its table: accesses on their way may still look at it ("Software must
/// not change the PPN field value when transitioning the iommu_mode to Off").
fn set_directory<R: Mmio>(
    registers: &R,
    host: &impl Host,
    value: u64,
) -> Result<bool, HardwareError> {
    let settled = || {
        let read = || registers.read64(DDTP);
        host::settle(host, read, |ddtp| ddtp & DDTP_BUSY == 0, "ddtp stayed busy")
    };
    let old = settled()?;
    let mode = value & DDTP_MODE;
    let value = if mode == DDTP_OFF { ppn_of(old) | DDTP_OFF } else { value };
    registers.write64(DDTP, value);
    let kept = settled()?;
    Ok(kept & DDTP_MODE == mode && (mode == DDTP_OFF || ppn_of(kept) == ppn_of(value)))
}

/// The table that `ddtp` names.
fn ppn_of(ddtp: u64) -> u64 {
    ddtp & ppn(u64::MAX)
}

/// Tells hardware where a queue of `2^lg2` places is. It is off.
pub(super) fn queue_base<R: Mmio, S: Structure>(
    registers: &R,
    register: u64,
    words: &Words<S>,
    lg2: u32,
    what: &'static str,
) -> Result<(), Error> {
    let value = ppn(words.paddr().get()) | u64::from(lg2 - 1);
    registers.write64(register, value);
    let kept = registers.read64(register);
    if kept == value { Ok(()) } else { Err(Error::unsupported(what, kept)) }
}

/// Writes the control register of a queue, and waits until the queue is active.
pub(super) fn turn_on<R: Mmio>(
    registers: &R,
    host: &impl Host,
    register: u64,
    control: u32,
    what: &'static str,
) -> Result<(), HardwareError> {
    registers.write32(register, control);
    settle(registers, host, register, CSR_BUSY | CSR_ON, CSR_ON, what)
}

/// Waits until the bits of `mask` have a value.
fn settle<R: Mmio>(
    registers: &R,
    host: &impl Host,
    register: u64,
    mask: u32,
    value: u32,
    what: &'static str,
) -> Result<(), HardwareError> {
    let read = || registers.read32(register);
    host::settle(host, read, |csr| csr & mask == value, what).map(drop)
}
