//! Intel's VT-d: Virtualization Technology for Directed I/O.
//!
//! **Memory alone is protected, and not interrupts.** Writes to 0xfee0_0000 to 0xfeef_ffff are
//! interrupts, whatever tables say, and raise no fault; each stream [reserves](Vtd::stream) these
//! addresses. The driver remaps none, and leaves remapping as it found it: any device, also one
//! that nobody attached, can raise any interrupt of any CPU.
//!
//! One [`Vtd`] is one remapping hardware unit. In legacy mode requester IDs are translated by
//! second-stage tables ([`VtdSs`]) of their context entries; in scalable mode by tables of the
//! first ([`X86_64`]) or the second stage, through the PASID table's entry for accesses without
//! PASID. The hardware is told to forget through its invalidation queue.
//!
//! Source: Intel Virtualization Technology for Directed I/O, Architecture Specification, D51397,
//! revision 4.
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{PageTable, TableMemory, VtdSs};
//! use dmaspan::iommu::{Attachment, Domain, Port as _, Prepared, ReservedRegions, Target};
//! use dmaspan::{Iova, Prot, Span};
//! use dmaspan_drivers::vtd::{Mode, Stage, Vtd, VtdConfig};
//! use dmaspan_drivers::{Host, MmioRegion};
//!
//! /// Maps a buffer for the device 00:02.0, which may read it.
//! fn attach<H, M>(
//!     registers: MmioRegion,
//!     host: H,
//!     tables: M,
//!     buffer: Span,
//! ) -> Result<(), Box<dyn Error>>
//! where
//!     H: Host + 'static,
//!     M: TableMemory<u64> + 'static,
//! {
//!     let config = VtdConfig { mode: Some(Mode::Legacy), ..VtdConfig::new(46) };
//!     // SAFETY: the registers are those of a unit that nobody else drives, and the host's memory
//!     // is what it sees.
//!     let iommu = unsafe { Vtd::new(registers, host, config)? };
//!     let format = VtdSs::new(iommu.second_stage_config()?)?;
//!     let ops = iommu.ops(Stage::Second)?;
//!     let domain = Arc::new(Domain::new(PageTable::new(format, tables)?, ops)?);
//!     // SAFETY: nobody else maps in the domain, and the buffer is memory for the device.
//!     unsafe { domain.map_spans(Iova::new(0x1000), &[buffer], Prot::READ) }?;
//!     // Bus 0, device 2, function 0. Firmware reserves nothing for it here. The IOVAs of the
//!     // domain stay clear of all that the stream then reserves.
//!     let port = iommu.stream(0x0010, ReservedRegions::new())?;
//!     assert_eq!(port.reserved_regions().as_slice()[0].range.start(), Iova::new(0xfee0_0000));
//!     let stream = Attachment::new(port)?;
//!     stream.attach(Target::Paging(Prepared::new(domain)))?;
//!     Ok(())
//! }
//! ```

use alloc::sync::Arc;
use core::fmt;

use dmaspan::io_pgtable::{SnoopControl, VtdSs, VtdSsConfig, X86_64, X86_64Config};
use dmaspan::iommu::{HardwareError, RegionKind, ReservedRegion, ReservedRegions};
use dmaspan::{Coherency, PhysAddr, lg2};
use lock_api::Mutex;

use self::hardware::{Becomes, GONE, Hardware};
use self::queue::{LG2_BYTES, Queue};
use self::spec::{Command, PASS_DOMAIN, global, register, status};
use self::tables::Tables;
use crate::error::Error;
use crate::faults::{INTERRUPTS, Streams, region};
use crate::host::{Host, gone, poll};
use crate::ids::Ids;
use crate::mmio::Mmio;
use crate::stream::IommuStream;

mod faults;
mod features;
mod format;
mod hardware;
mod ops;
mod queue;
mod spec;
mod stream;
mod tables;

pub use crate::stage::Stage;
pub use features::VtdFeatures;
pub use format::VtdFormat;
pub use ops::VtdOps;
pub use stream::VtdStream;
use stream::VtdStreamHooks;

/// Says which structures tell hardware what a stream has (3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Context entries that lead to second-stage tables.
    Legacy,
    /// Context entries that lead to PASID tables, whose entries lead to tables of either stage.
    Scalable,
}

/// Says what the registers do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VtdConfig {
    /// Bits of physical addresses: Host Address Width of ACPI's table DMAR, plus one, 32 to 52.
    pub host_address_bits: u32,
    /// The mode; `None` for scalable mode where the hardware has it.
    pub mode: Option<Mode>,
    /// log2 of the bytes of the invalidation queue, 12 to 19. Its commands are 16 bytes, and 32 in
    /// scalable mode.
    pub queue_lg2_bytes: u32,
    /// Whether walks see the CPU's caches; `None` for what the registers say. A model in a
    /// hypervisor does, and may not say so.
    pub walks: Option<Coherency>,
}

impl VtdConfig {
    /// The best mode, and a queue of one page.
    pub const fn new(host_address_bits: u32) -> Self {
        Self { host_address_bits, mode: None, queue_lg2_bytes: LG2_BYTES.0, walks: None }
    }
}

/// The message by which hardware says that there are faults (11.4.11 and 11.4.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultInterrupt {
    /// Where it is written to.
    pub address: u64,
    /// What is written.
    pub data: u32,
}

/// A remapping hardware unit.
///
/// Dropped, it leaves all streams blocked; the root table and the queue, which hardware goes on
/// reading, leak.
pub struct Vtd<R: Mmio, H: Host> {
    hardware: Hardware<R, H>,
    config: VtdConfig,
    features: VtdFeatures,
    mode: Mode,
    queue: Queue<H>,
    tables: Tables<H::Structure, H::Lock>,
    ids: Ids<H::Lock>,
    streams: Streams<H::Lock>,
    /// Guards the fault records: a reader of one also gives it back.
    recording: Mutex<H::Lock, ()>,
    state: State,
}

/// Whether hardware took the root table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Made,
    Started,
}

impl<R: Mmio, H: Host> Vtd<R, H> {
    /// Takes the hardware over: whatever it was told before is forgotten, and all streams are
    /// blocked. Remapping of interrupts stays as it is.
    ///
    /// Translation is never disabled while memory is in reach: without it every access passes.
    ///
    /// # Errors
    ///
    /// [`Error::Hardware`] where it does not answer; [`Error::NoMemory`]; [`Error::Config`];
    /// [`Error::Unsupported`] where it translates no DMA, lacks the mode, the queue or draining, or
    /// where firmware
    /// left it translating in the other mode and it cannot protect memory meanwhile. What was
    /// allocated leaks then, as hardware may read it.
    ///
    /// # Safety
    ///
    /// Until the value and everything made of it is dropped:
    ///
    /// 1. `registers` are those of one such unit, ordered as [`Mmio`] says, and nobody else writes
    ///    them.
    /// 2. The unit reads and writes the host's structures, and reads the tables of domains, at
    ///    their physical addresses: in the CPU's caches where [`VtdConfig::walks`] says so.
    ///    Physical addresses of pinners, pools and other memory that is mapped are those of its
    ///    machine, too.
    /// 3. No stream that firmware set up needs its accesses: they are blocked.
    #[expect(
        unsafe_code,
        reason = "what devices reach depends on the registers being the right ones"
    )]
    pub unsafe fn new(registers: R, host: H, config: VtdConfig) -> Result<Arc<Self>, Error> {
        let hardware = Hardware::new(registers, host);
        if hardware.read32(register::VER) == GONE {
            return Err(gone(GONE).into());
        }
        let features = VtdFeatures {
            capability: hardware.read64(register::CAP),
            extended: hardware.read64(register::ECAP),
        };
        let best = if features.scalable() { Mode::Scalable } else { Mode::Legacy };
        let mode = config.mode.unwrap_or(best);
        check(&config, &features, mode)?;
        let max_paddr = PhysAddr::new(lg2::mask(config.host_address_bits));
        let mut iommu = Self {
            queue: Queue::new(&hardware.host, config.queue_lg2_bytes, mode, max_paddr)?,
            tables: Tables::new(&hardware.host, mode, max_paddr)?,
            ids: Ids::new(u32::from(PASS_DOMAIN) + 1, features.last_domain().into()),
            streams: Streams::new(),
            recording: Mutex::new(()),
            state: State::Made,
            hardware,
            config,
            features,
            mode,
        };
        iommu.start()?;
        iommu.state = State::Started;
        Ok(Arc::new(iommu))
    }

    /// Returns what the hardware has.
    pub fn features(&self) -> &VtdFeatures {
        &self.features
    }

    /// The mode that the hardware is in.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns whether the hardware's walks see the CPU's caches. If not, the tables of domains are
    /// in memory that [says so](dmaspan::io_pgtable::TableMemory::coherency).
    pub fn walks(&self) -> Coherency {
        self.config.walks.unwrap_or(self.features.walks(self.mode))
    }

    /// The configuration of second-stage tables that this hardware walks: 4 levels where it has
    /// them, and all leaf sizes. 5 levels and marks of writes are the caller's to choose, where
    /// [`features`](Self::features) has them.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it has no second stage in its mode.
    pub fn second_stage_config(&self) -> Result<VtdSsConfig, Error> {
        let features = &self.features;
        let unsupported = |value| Error::unsupported("second stage", value);
        if self.mode == Mode::Scalable && !features.scalable_second_stage() {
            return Err(unsupported(features.extended));
        }
        let levels = [4, 3, 5].into_iter().find(|&levels| features.second_stage_levels(levels));
        let levels = levels.ok_or_else(|| unsupported(features.capability))?;
        let snoop = match features.snoop_control() {
            true => SnoopControl::Cached,
            false => SnoopControl::Absent,
        };
        Ok(VtdSsConfig {
            page_sizes: Some(features.second_stage_sizes() & VtdSs::PAGE_SIZES),
            snoop,
            walks: features.walks(self.mode),
            ..VtdSsConfig::new(12 + 9 * levels, self.config.host_address_bits)
        })
    }

    /// The configuration of first-stage tables that this hardware walks: 4 levels and all leaf
    /// sizes. 5 levels are the caller's to choose, where [`features`](Self::features) has them.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it has no first stage in its mode.
    pub fn first_stage_config(&self) -> Result<X86_64Config, Error> {
        let features = &self.features;
        if self.mode != Mode::Scalable || !features.first_stage() {
            return Err(Error::unsupported("first stage", features.extended));
        }
        Ok(X86_64Config {
            page_sizes: Some(features.first_stage_sizes() & X86_64::PAGE_SIZES),
            ..X86_64Config::new(48, self.config.host_address_bits)
        })
    }

    /// The hooks of a new domain, whose tables are of that stage.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the hardware does not have the stage in its mode,
    /// [`Error::NoIds`].
    pub fn ops(self: &Arc<Self>, stage: Stage) -> Result<VtdOps<R, H>, Error> {
        match stage {
            Stage::First => self.first_stage_config().map(|_| ())?,
            Stage::Second => self.second_stage_config().map(|_| ())?,
        }
        VtdOps::new(Arc::clone(self), stage)
    }

    /// The accesses of a requester ID: the bus in 15:8, device and function in 7:0. They stay
    /// blocked until something is attached. Besides `regions`, the addresses of interrupts are
    /// reserved: see [`reserved_regions`].
    ///
    /// # Errors
    ///
    /// [`Error::NoStream`], [`Error::Claimed`], [`Error::NoMemory`].
    pub fn stream<D>(
        self: &Arc<Self>,
        id: u32,
        regions: ReservedRegions,
    ) -> Result<VtdStream<D, R, H>, Error> {
        let last = u32::from(u16::MAX);
        let stream = u16::try_from(id).map_err(|_| Error::NoStream { stream: id, last })?;
        let claimed = self.streams.claim_with(id, regions, reserved_regions())?;
        let device = self.tables.device(&self.hardware.host, stream);
        let device = device.inspect_err(|_| self.streams.release(id))?;
        Ok(IommuStream::new(VtdStreamHooks { iommu: Arc::clone(self), device }, claimed))
    }

    /// Has hardware say by an interrupt that there are faults, or not say it. It does not at first.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] for a message that is no interrupt: hardware would write to memory. Above
    /// bit 31 its address can have bits 31:8 of the CPU's APIC ID, with extended interrupt mode, in
    /// bits 63:40 (11.4.13).
    pub fn set_fault_interrupt(&self, interrupt: Option<FaultInterrupt>) -> Result<(), Error> {
        let hardware = &self.hardware;
        hardware.write32(register::FECTL, spec::INTERRUPT_MASK);
        let Some(FaultInterrupt { address, data }) = interrupt else { return Ok(()) };
        let half = |value: u64| u32::try_from(value & lg2::mask(32)).unwrap_or(0);
        let upper = if self.features.extended_interrupts() { lg2::mask(24) << 40 } else { 0 };
        if !INTERRUPTS.contains(&(address & !upper)) {
            let (what, limit) = ("the address of the fault interrupt", *INTERRUPTS.end());
            return Err(Error::Config { what, value: address, limit });
        }
        hardware.write32(register::FEDATA, data);
        hardware.write32(register::FEADDR, half(address));
        hardware.write32(register::FEUADDR, half(address >> 32));
        hardware.write32(register::FECTL, 0);
        Ok(())
    }

    /// Has hardware carry out commands, and waits until it has.
    fn run(&self, commands: &[Command]) -> Result<(), HardwareError> {
        self.queue.run(&self.hardware, commands)
    }

    /// Makes hardware walk the empty root table, and translate.
    fn start(&self) -> Result<(), Error> {
        let hardware = &self.hardware;
        let scalable = if self.mode == Mode::Scalable { spec::SCALABLE } else { 0 };
        hardware.write32(register::FECTL, spec::INTERRUPT_MASK);
        let status = hardware.read32(register::GSTS);
        let mode = hardware.read64(register::RTADDR) & spec::TABLE_MODE;
        if status & global::TRANSLATION != 0 && mode != scalable {
            self.stop_protected()?;
        }
        if status & global::QUEUE != 0 {
            // What is left of a queue stores its numbers before it is taken away (6.5.2). One that
            // stopped with an error never does.
            poll(&hardware.host, || {
                let stopped = hardware.read32(register::FSTS) & status::QUEUE != 0;
                let head = hardware.read64(register::IQH);
                (stopped || head == hardware.read64(register::IQT)).then_some(())
            });
            hardware.disable(global::QUEUE)?;
        }
        self.clear_faults();
        hardware.write64(register::IQT, 0);
        hardware.write64(register::IQA, self.queue.address());
        hardware.enable(global::QUEUE)?;
        if self.features.write_buffer() {
            hardware.flush_write_buffer()?;
        }
        hardware.write64(register::RTADDR, self.tables.root().get() | scalable);
        hardware.enable(global::ROOT_TABLE)?;
        self.run(stream::everything(self.mode))?;
        hardware.enable(global::TRANSLATION).map_err(|error| match self.features.has_widths() {
            false if error != gone(GONE) => no_translation(&self.features),
            _ => error.into(),
        })?;
        self.protect(Becomes::Clear)?;
        Ok(())
    }

    /// Disables translation with all memory protected from devices: the mode only changes without
    /// (11.4.5).
    fn stop_protected(&self) -> Result<(), Error> {
        if self.features.protected_memory() != [true, true] {
            let what = "protected memory, which a change of the mode needs while it translates";
            return Err(Error::unsupported(what, self.features.capability));
        }
        let hardware = &self.hardware;
        self.protect(Becomes::Clear)?;
        hardware.write32(register::PLMBASE, 0);
        hardware.write32(register::PLMLIMIT, u32::MAX);
        hardware.write64(register::PHMBASE, 1 << 32);
        hardware.write64(register::PHMLIMIT, u64::MAX);
        self.protect(Becomes::Set)?;
        Ok(hardware.disable(global::TRANSLATION)?)
    }

    /// Protects the regions that the registers name, or none (11.4.13).
    fn protect(&self, becomes: Becomes) -> Result<(), HardwareError> {
        if self.features.protected_memory() == [false, false] {
            return Ok(());
        }
        let value = if becomes == Becomes::Set { spec::PROTECT } else { 0 };
        self.hardware.write32(register::PMEN, value);
        let what = "memory was not protected, or is still";
        self.hardware.wait32(register::PMEN, spec::PROTECTED, becomes, what)
    }
}

/// Returns what no device behind a VT-d can have mapped: the addresses of interrupts (3.14; Linux:
/// `intel_iommu_get_resv_regions`).
pub fn reserved_regions() -> impl Iterator<Item = ReservedRegion> {
    region(INTERRUPTS, RegionKind::Msi).into_iter()
}

/// The error of a unit that is there for interrupts alone: QEMU's with `dma-translation=off`.
fn no_translation(features: &VtdFeatures) -> Error {
    let what = "translation of DMA: it supports no width of addresses";
    Error::unsupported(what, features.capability)
}

/// Whether the hardware has what the configuration asks for.
fn check(config: &VtdConfig, features: &VtdFeatures, mode: Mode) -> Result<(), Error> {
    let bits = "the number of bits of physical addresses";
    Error::check(bits, config.host_address_bits, 32..=52)?;
    let (least, most) = LG2_BYTES;
    Error::check("log2 of the bytes of the queue", config.queue_lg2_bytes, least..=most)?;
    // What has a first stage alone may have no width. Linux does not use the others either ("No
    // supported address widths").
    let has_second_stage = mode == Mode::Legacy || features.scalable_second_stage();
    if has_second_stage && !features.has_widths() {
        return Err(no_translation(features));
    }
    if !features.queued_invalidation() {
        return Err(Error::unsupported("invalidation queue", features.extended));
    }
    if !features.drains() {
        let what = "draining of accesses that were let through";
        return Err(Error::unsupported(what, features.capability));
    }
    if mode == Mode::Scalable && !features.scalable() {
        return Err(Error::unsupported("scalable mode", features.extended));
    }
    Ok(())
}

impl<R: Mmio, H: Host> Drop for Vtd<R, H> {
    fn drop(&mut self) {
        if self.state == State::Made {
            return;
        }
        // All that could be attached is gone; what was let pass is blocked here.
        self.tables.clear();
        if self.run(stream::everything(self.mode)).is_ok() {
            self.tables.free();
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for Vtd<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vtd")
            .field("mode", &self.mode)
            .field("features", &self.features)
            .finish_non_exhaustive()
    }
}
