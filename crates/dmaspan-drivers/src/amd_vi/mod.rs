//! AMD's IOMMU: I/O Virtualization Technology (48882).
//!
//! **Memory alone is protected, and not interrupts.** Accesses to 0xfee0_0000 to 0xfeef_ffff are
//! interrupts, whatever a table says, and all entries of the device table forward them: any device,
//! also one that nobody attached, can raise any interrupt of any CPU.
//!
//! A device has an entry in one flat table, which says whether its accesses are refused, pass, or
//! go through [`AmdV1`](dmaspan::io_pgtable::AmdV1) tables, and which domain they belong to. The
//! entry of a device that nobody attached refuses. Without translation *everything* would pass, so
//! the driver never turns it off: a driver that is dropped leaves the hardware as it is, and never
//! frees what the hardware reads.
//!
//! Accesses to 0xfd_0000_0000 to 0xff_ffff_ffff mean something to the bus. Each stream
//! [reserves](AmdVi::stream) them, and those that are interrupts.
//!
//! QEMU's model passes every access, whatever the driver tells it, unless it is started with
//! `-device amd-iommu,dma-remap=on`, which is off by default. No register shows that, so start QEMU
//! with the option.
//!
//! Not driven: guest tables (version 2), PASIDs, page requests, and caches of translations in
//! devices (ATS).
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{AmdV1, PageTable, TableMemory};
//! use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
//! use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig};
//! use dmaspan_drivers::{Host, MmioRegion};
//!
//! /// Gives the device 00:04.0 a domain. The numbers are of the capability in the PCI function.
//! fn attach<H: Host + 'static, M: TableMemory<u64> + 'static>(
//!     registers: MmioRegion,
//!     host: H,
//!     tables: M,
//!     (capability, miscellaneous): (u32, u32),
//! ) -> Result<(), Box<dyn Error>> {
//!     let config = AmdViConfig::new(capability, miscellaneous);
//!     // SAFETY: the registers are those of an AMD IOMMU that nobody else drives, and the host's
//!     // memory is what it sees.
//!     let iommu = unsafe { AmdVi::new(registers, host, config) }?;
//!
//!     let format = AmdV1::new(iommu.v1_config())?;
//!     let domain = Arc::new(Domain::new(PageTable::new(format, tables)?, iommu.ops()?)?);
//!     let stream = Attachment::new(iommu.stream(0x0020, ReservedRegions::new())?)?;
//!     stream.attach(Target::Paging(Prepared::new(domain)))?;
//!     // At each interrupt of the IOMMU, or from time to time:
//!     iommu.handle_faults()?;
//!     Ok(())
//! }
//! ```

mod events;
mod features;
mod ops;
mod queue;
mod spec;
mod stream;
mod tables;

use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::AtomicBool;

use dmaspan::io_pgtable::{AmdV1Config, DirtyTracking};
use dmaspan::iommu::{HardwareError, RegionKind, ReservedRegion, ReservedRegions};
use dmaspan::{PhysAddr, lg2};

use lock_api::Mutex;

pub use features::{AmdViConfig, AmdViFeatures};
pub use ops::AmdViOps;
pub use stream::AmdViStream;
use stream::AmdViStreamHooks;

use crate::error::Error;
use crate::faults::{INTERRUPTS, Streams, region};
use crate::host::{Host, NoMemory, gone, settle};
use crate::ids::Ids;
use crate::mmio::Mmio;
use crate::stream::IommuStream;
use crate::structure::Words;
use events::Events;
use queue::{Commands, Control};
use spec::{BUFFER_LENGTHS, Command, LG2_RECORD, control, register, status};
use tables::{Devices, FIRST_DOMAIN};

/// An IOMMU of AMD's.
pub struct AmdVi<R: Mmio, H: Host> {
    registers: R,
    host: H,
    features: AmdViFeatures,
    control: Control<H::Lock>,
    commands: Commands<H>,
    events: Events<H::Lock, H::Structure>,
    devices: Devices<H::Lock, H::Structure>,
    domains: Ids<H::Lock>,
    domain_count: u32,
    streams: Streams<H::Lock>,
    /// The address bit of encrypted memory, or none.
    encrypted: u64,
}

impl<R: Mmio, H: Host> AmdVi<R, H> {
    /// Takes an IOMMU over, whatever firmware left: all devices are blocked when this returns.
    ///
    /// Where firmware had it translate, it goes on to, by firmware's table until it has this
    /// driver's; nothing passes in between. Where not, accesses passed until now.
    ///
    /// Interrupts for events are enabled; whether they are sent anywhere is up to the MSI
    /// capability of the IOMMU's PCI function.
    ///
    /// # Errors
    ///
    /// [`Error`]: with the IOMMU as it was, but for [`Error::Hardware`].
    ///
    /// # Safety
    ///
    /// 1. `registers` are those of an AMD IOMMU, ordered as [`Mmio`] says, and the configuration
    ///    has what its PCI capability says. Where the IOMMU translates already, `write64` is one
    ///    access: a table whose address is half old and half new may be any memory.
    /// 2. Nobody else drives it while the driver lives and afterwards, unless it resets the IOMMU.
    /// 3. The memory of `host`, and of the tables of each domain, is what the IOMMU sees at those
    ///    addresses; that of the tables with [`AmdViConfig::encryption_bit`], if there is one.
    ///    Physical addresses of pinners, pools and other memory that is mapped are those of its
    ///    machine, too.
    /// 4. An IOMMU that does not look at the length of its device table, as QEMU's, has all devices
    ///    in it: [`AmdViConfig::last_device`] is 0xffff.
    #[expect(unsafe_code, reason = "hardware reads and writes the memory that it is told of")]
    pub unsafe fn new(registers: R, host: H, config: AmdViConfig) -> Result<Arc<Self>, Error> {
        check(&config)?;
        let control = registers.read64(register::CONTROL);
        if control == u64::MAX {
            return Err(gone(control).into());
        }
        let extended = if AmdViFeatures::has_extended(&config) {
            registers.read64(register::EXTENDED_FEATURES)
        } else {
            0
        };
        let features = AmdViFeatures::new(&config, extended)?;
        let [table, empty, ring, done, log] = allocate(&host, &config, &features)?;
        let (first_domain, last_domain) = (FIRST_DOMAIN.into(), config.last_domain.into());
        let iommu = Self {
            registers,
            host,
            features,
            control: Control::new(control),
            commands: Commands::new(ring, done, config.lg2_commands),
            events: Events::new(log, config.lg2_events),
            devices: Devices::new(table, empty, config.last_device),
            domains: Ids::new(first_domain, last_domain),
            domain_count: (last_domain + 1).saturating_sub(first_domain),
            streams: Streams::new(),
            encrypted: config.encryption_bit.map_or(0, lg2::size),
        };
        iommu.start()?;
        Ok(Arc::new(iommu))
    }

    /// Gives hardware this driver's table and queues.
    fn start(&self) -> Result<(), HardwareError> {
        let registers = &self.registers;
        self.control.change(registers, control::FIRMWARE, 0);
        let status = || registers.read32(register::STATUS);
        let what = "the queues that firmware set up did not stop";
        settle(&self.host, status, |status| status & status::RUN == 0, what)?;
        // Before the event log is told of: QEMU does not take it while an interrupt is pending.
        registers.write32(register::STATUS, status::CLEARED);
        // Devices pass in the exclusion range, whatever their entries say, unless bits 1:0 of its
        // base are 0. With SNP the range is the one that COMPLETION_WAIT may store to (3.4; Linux:
        // `iommu_set_cwwb_range`).
        registers.write64(register::EXCLUSION_BASE, self.commands.done_paddr());
        registers.write64(register::EXCLUSION_LIMIT, self.commands.done_paddr());
        registers.write64(register::DEVICE_TABLE, self.devices.base());
        self.commands.program(registers);
        self.events.program(registers);
        let enable = control::ENABLE
            | control::COHERENT
            | control::COMMANDS
            | control::EVENT_LOG
            | control::EVENT_INTERRUPT;
        self.control.change(registers, 0, enable);
        self.forget_all()
    }

    /// Has hardware forget what it knows by firmware.
    fn forget_all(&self) -> Result<(), HardwareError> {
        // Also where one command would do: emulated IOMMUs (QEMU) look at an entry when its own
        // command names it, and let the device pass until then.
        let last = if self.features.invalidate_all { self.devices.last() } else { u16::MAX };
        let entries = (0..=last).map(Command::invalidate_device);
        if self.features.invalidate_all {
            self.run(entries.chain([Command::invalidate_all()]))
        } else {
            self.run(entries.chain((0..=u16::MAX).map(Command::invalidate_domain)))
        }
    }

    /// Has commands done, and waits until they are.
    fn run(&self, commands: impl IntoIterator<Item = Command>) -> Result<(), HardwareError> {
        self.commands.run(&self.registers, &self.host, &self.control, commands)
    }

    /// Returns what the hardware has.
    pub fn features(&self) -> &AmdViFeatures {
        &self.features
    }

    /// The configuration of tables that reach all that this IOMMU does. They grow; leaves are
    /// marked where the hardware does that.
    pub fn v1_config(&self) -> AmdV1Config {
        let AmdViFeatures { input_bits, output_bits, dirty, .. } = self.features;
        let dirty = if dirty { DirtyTracking::Hardware } else { DirtyTracking::Off };
        let encryption_bit = (self.encrypted != 0).then(|| lg2::floor(self.encrypted));
        let output_bits = output_bits.min(encryption_bit.unwrap_or(output_bits));
        AmdV1Config { dirty, encryption_bit, ..AmdV1Config::new(input_bits, output_bits) }
    }

    /// The hooks of a new domain, with a domain ID of its own. It comes back when the hooks are
    /// dropped, unless hardware was not seen to forget the domain.
    ///
    /// # Errors
    ///
    /// [`Error::NoIds`].
    pub fn ops(self: &Arc<Self>) -> Result<AmdViOps<R, H>, Error> {
        let taken = self.domains.take().and_then(|domain| u16::try_from(domain).ok());
        let Some(domain) = taken else {
            return Err(Error::NoIds { what: "domain IDs", limit: self.domain_count });
        };
        let iommu = Arc::clone(self);
        let (known, forgotten) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(AmdViOps { iommu, domain, known, forgotten })
    }

    /// The stream of a device ID. Besides `regions`, those are reserved that have a meaning of
    /// their own for every device: see [`reserved_regions`].
    ///
    /// # Errors
    ///
    /// [`Error::NoStream`], [`Error::Claimed`], [`Error::NoMemory`].
    pub fn stream<D>(
        self: &Arc<Self>,
        id: u32,
        regions: ReservedRegions,
    ) -> Result<AmdViStream<D, R, H>, Error> {
        let last = self.devices.last();
        let device = match u16::try_from(id) {
            Ok(device) if device <= last => device,
            _ => return Err(Error::NoStream { stream: id, last: last.into() }),
        };
        let claimed = self.streams.claim_with(id, regions, reserved_regions())?;
        let iommu = Arc::clone(self);
        let switching = Mutex::new(());
        Ok(IommuStream::new(AmdViStreamHooks { iommu, device, switching }, claimed))
    }
}

impl<R: Mmio, H: Host> fmt::Debug for AmdVi<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmdVi").field("features", &self.features).finish_non_exhaustive()
    }
}

/// Returns what no device of an AMD IOMMU can have mapped: the addresses of interrupts, and those
/// that mean something else to HyperTransport (48882, 2.1.4.2; Linux:
/// `amd_iommu_get_resv_regions`).
pub fn reserved_regions() -> impl Iterator<Item = ReservedRegion> {
    let hypertransport = 0xfd_0000_0000..=0xff_ffff_ffff;
    let regions = [(INTERRUPTS, RegionKind::Msi), (hypertransport, RegionKind::Reserved)];
    regions.into_iter().filter_map(|(range, kind)| region(range, kind))
}

/// Whether hardware can be told of it.
fn check(config: &AmdViConfig) -> Result<(), Error> {
    let length = "log2 of the length of the command buffer";
    Error::check(length, config.lg2_commands, BUFFER_LENGTHS)?;
    Error::check("log2 of the length of the event log", config.lg2_events, BUFFER_LENGTHS)?;
    if let Some(bit) = config.encryption_bit {
        Error::check("the bit of encrypted memory", bit, 32..=51)?;
    }
    let domains = FIRST_DOMAIN.into()..=u16::MAX.into();
    Error::check("the last domain ID", config.last_domain.into(), domains)
}

/// The device table, an empty page table, the command buffer, the word that says what is done, and
/// the event log. All or nothing.
fn allocate<H: Host>(
    host: &H,
    config: &AmdViConfig,
    features: &AmdViFeatures,
) -> Result<[Words<H::Structure>; 5], NoMemory> {
    let max_paddr = PhysAddr::new(lg2::mask(features.output_bits));
    let sizes = [
        tables::lg2_size(config.last_device),
        12,
        config.lg2_commands + LG2_RECORD,
        12,
        config.lg2_events + LG2_RECORD,
    ];
    match sizes.map(|lg2_size| Words::new(host, lg2_size, max_paddr)) {
        [Ok(table), Ok(empty), Ok(ring), Ok(done), Ok(log)] => Ok([table, empty, ring, done, log]),
        some => {
            let mut failed = NoMemory { lg2_size: 12, max_paddr };
            for result in some {
                match result {
                    Ok(words) => words.free(),
                    Err(error) => failed = error,
                }
            }
            Err(failed)
        }
    }
}
