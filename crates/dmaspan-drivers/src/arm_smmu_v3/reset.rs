//! Starting the hardware: from whatever firmware left to an SMMU that blocks all streams (IHI 0070,
//! 6.3.9.6 and 3.11).

use alloc::sync::Arc;

use dmaspan::iommu::HardwareError;
use dmaspan::{Coherency, PhysAddr, lg2};

use super::SmmuV3;
use super::command::Command;
use super::events::EventQueue;
use super::features::SmmuV3Features;
use super::hardware::Hardware;
use super::queue::CommandQueue;
use super::spec::{cr0, cr1, cr2, gbpa, irq_ctrl, reg};
use super::table::{SPLIT, StreamTable, Table};
use super::tlbi;
use crate::error::Error;
use crate::faults::Streams;
use crate::host::{Host, poll};
use crate::ids::Ids;
use crate::mmio::Mmio;

/// The most bits of streams' numbers that a table has entries for unless it is asked for more:
/// 4 MiB of entries, or 512 KiB of first-level descriptors.
const LINEAR_BITS: u32 = 16;
const TWO_LEVEL_BITS: u32 = 24;

/// Says who is told of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventInterrupts {
    /// Nobody: faults are looked for by [`SmmuV3::handle_faults`].
    Off,
    /// The wired interrupts of events and of global errors are raised.
    Wired,
}

/// Says how an SMMUv3 is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmmuV3Config {
    /// How the stream table is made.
    pub stream_table: StreamTable,
    /// Bits of the numbers of the streams that there are; `None` for those that hardware has, but
    /// at most 16 in a linear table and 24 in one of two levels.
    pub stream_bits: Option<u32>,
    /// log2 of the places of the command queue, if hardware has so many.
    pub lg2_commands: u32,
    /// log2 of the places of the event queue, if hardware has so many.
    pub lg2_events: u32,
    /// The receivers of events.
    pub interrupts: EventInterrupts,
}

impl Default for SmmuV3Config {
    /// Queues of 4 KiB, no interrupts, and all streams.
    fn default() -> Self {
        Self {
            stream_table: StreamTable::Any,
            stream_bits: None,
            lg2_commands: 8,
            lg2_events: 7,
            interrupts: EventInterrupts::Off,
        }
    }
}

/// What hardware reads and writes. Dropped, it leaks.
pub(super) struct Structures<H: Host> {
    pub(super) table: Table<H>,
    pub(super) commands: CommandQueue<H>,
    pub(super) events: EventQueue<H>,
}

impl<H: Host> Structures<H> {
    /// What the configuration asks for, for hardware with these features.
    fn new(host: &H, config: &SmmuV3Config, features: &SmmuV3Features) -> Result<Self, Error> {
        let max_paddr = PhysAddr::new(lg2::mask(features.output_bits));
        let (kind, bits) = stream_table(config, features)?;
        let lg2_commands = config.lg2_commands.min(features.lg2_commands);
        let lg2_events = config.lg2_events.min(features.lg2_events);
        let mut commands = CommandQueue::new(host, lg2_commands, max_paddr)?;
        let events = EventQueue::new(host, lg2_events, max_paddr);
        let mut events = events.inspect_err(|_| commands.free())?;
        let table = Table::new(host, kind, bits, max_paddr).inspect_err(|_| {
            commands.free();
            events.free();
        })?;
        Ok(Self { table, commands, events })
    }

    /// Gives all of it back. Hardware does not use it any more.
    fn free(&mut self) {
        self.table.free();
        self.commands.free();
        self.events.free();
    }
}

/// How the stream table is made, and for how many bits of streams' numbers.
fn stream_table(
    config: &SmmuV3Config,
    features: &SmmuV3Features,
) -> Result<(StreamTable, u32), Error> {
    let (kind, most) = match config.stream_table {
        StreamTable::TwoLevels if !features.two_levels => {
            return Err(Error::unsupported("stream table of two levels", 0u32));
        }
        StreamTable::Any | StreamTable::TwoLevels if features.two_levels => {
            (StreamTable::TwoLevels, TWO_LEVEL_BITS)
        }
        _ => (StreamTable::Linear, LINEAR_BITS),
    };
    let bits = config.stream_bits.unwrap_or(features.stream_bits.min(most));
    Error::check("the bits of streams", bits, 0..=features.stream_bits)?;
    // One table of the second level would have them all.
    let kind = if bits > SPLIT { kind } else { StreamTable::Linear };
    Ok((kind, bits))
}

impl<R: Mmio, H: Host> SmmuV3<R, H> {
    /// Takes the SMMU over, whatever firmware left. All streams are blocked meanwhile and after it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for hardware that this driver does not drive, [`Error::Config`],
    /// [`Error::NoMemory`]: with nothing changed. [`Error::Hardware`] where it does not answer: it
    /// lets nothing through then, if it does what it was told, and what it may read is leaked.
    ///
    /// # Safety
    ///
    /// While the value exists, and as long as what it leaks is read:
    ///
    /// 1. `registers` are those of an SMMUv3, both pages of them (IHI 0070, 6.1), ordered as
    ///    [`Mmio`] says, and nobody else drives its Non-secure side.
    /// 2. What the host allocates, and the tables of domains, are what the SMMU finds at their
    ///    addresses. Physical addresses of pinners, pools and other memory that is mapped are those
    ///    of its machine, too.
    /// 3. What the SMMU was told before to read and to write is not needed any more, or stays
    ///    untouched: it may be used until this returns.
    #[expect(unsafe_code, reason = "hardware that reaches all memory")]
    pub unsafe fn new(registers: R, host: H, config: SmmuV3Config) -> Result<Arc<Self>, Error> {
        let features = SmmuV3Features::read(&registers)?;
        let structures = Structures::new(&host, &config, &features)?;
        let places = lg2::size(config.lg2_commands.min(features.lg2_commands));
        // With the sync behind them they fit in the queue.
        let fit = usize::try_from(places).unwrap_or(0).saturating_sub(1);
        // The number 0 stays nobody's: streams of stage 1 have it as their VMID.
        let ids = |bits: u32| Ids::new(1, (1 << bits) - 1);
        let smmu = Self {
            asids: ids(features.asid_bits),
            vmids: ids(features.vmid_bits),
            hardware: Hardware::new(registers, host),
            features,
            structures,
            streams: Streams::new(),
            most_commands: fit.clamp(1, tlbi::MAX_COMMANDS),
        };
        smmu.disable()?;
        smmu.enable(config.interrupts)?;
        Ok(Arc::new(smmu))
    }

    /// Ends all accesses, without any table, and stops the queues.
    fn disable(&self) -> Result<(), HardwareError> {
        self.abort_without_tables()?;
        let hardware = &self.hardware;
        let what = "the SMMU did not stop";
        hardware.update(reg::CR0, 0, reg::CR0ACK, what)?;
        let what = "the SMMU did not stop its interrupts";
        hardware.update(reg::IRQ_CTRL, 0, reg::IRQ_CTRLACK, what)
    }

    /// Makes accesses end that come while no table is in use (6.3.15).
    fn abort_without_tables(&self) -> Result<(), HardwareError> {
        let hardware = &self.hardware;
        let settled = || {
            let value = hardware.registers.read32(reg::GBPA);
            (value & gbpa::UPDATE == 0).then_some(value)
        };
        let why = || hardware.why("the SMMU did not take the setting for accesses without tables");
        let value = poll(&hardware.host, settled).ok_or_else(why)?;
        hardware.registers.write32(reg::GBPA, value | gbpa::ABORT | gbpa::UPDATE);
        let value = poll(&hardware.host, settled).ok_or_else(why)?;
        if value & gbpa::ABORT == 0 {
            let what = "the SMMU would let accesses through without tables";
            return Err(HardwareError { what, status: value.into() });
        }
        Ok(())
    }

    /// Tells hardware where everything is, makes it forget all that it knew, and turns it on.
    fn enable(&self, interrupts: EventInterrupts) -> Result<(), HardwareError> {
        let Self { hardware, structures, features, .. } = self;
        let registers = &hardware.registers;
        registers.write32(
            reg::CR1,
            match features.coherency {
                Coherency::Coherent => cr1::CACHED,
                Coherency::NonCoherent => cr1::NON_CACHEABLE,
            },
        );
        registers.write32(reg::CR2, cr2::PTM | cr2::RECINVSID);
        structures.table.program(registers);
        structures.commands.program(registers);
        structures.events.program(registers);
        hardware.acknowledge(u32::MAX);

        let on = |value| hardware.update(reg::CR0, value, reg::CR0ACK, "the SMMU did not start");
        on(cr0::CMDQEN)?;
        let hypervisor = features.hypervisor.then_some(Command::HYPERVISOR);
        let all = [Command::CONFIGURATION, Command::TRANSLATIONS];
        self.run(all.into_iter().chain(hypervisor))?;
        on(cr0::CMDQEN | cr0::EVENTQEN)?;
        if interrupts == EventInterrupts::Wired {
            // No address for messages.
            registers.write64(reg::GERROR_IRQ_CFG0, 0);
            registers.write64(reg::EVENTQ_IRQ_CFG0, 0);
            let enabled = irq_ctrl::GERROR | irq_ctrl::EVENTQ;
            let what = "the SMMU did not start its interrupts";
            hardware.update(reg::IRQ_CTRL, enabled, reg::IRQ_CTRLACK, what)?;
        }
        // What a device says that it has translated is checked, too.
        let ats = if features.ats { cr0::ATSCHK } else { 0 };
        if ats != 0 {
            on(cr0::CMDQEN | cr0::EVENTQEN | ats)?;
        }
        on(cr0::CMDQEN | cr0::EVENTQEN | ats | cr0::SMMUEN)
    }
}

impl<R: Mmio, H: Host> Drop for SmmuV3<R, H> {
    /// All accesses end from then on. Where hardware does not say that it has stopped, what it
    /// reads is leaked.
    fn drop(&mut self) {
        if self.disable().is_ok() {
            self.structures.free();
        }
    }
}
