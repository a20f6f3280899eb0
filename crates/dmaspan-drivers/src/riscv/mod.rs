//! RISC-V's IOMMU: RISC-V IOMMU Architecture Specification, version 1.0.
//!
//! **An interrupt is a write like others.** The driver leaves MSI page tables off: a device raises
//! no interrupt by message until the owner of the domain maps the page of an interrupt file (IMSIC)
//! for it, by `Prot::WRITE | Prot::MMIO`, and then every identity of that file.
//!
//! One address space for each domain: a first stage (Sv39, Sv48, Sv57), told apart by its PSCID, or
//! a second stage (Sv39x4, Sv48x4, Sv57x4), told apart by its GSCID. Streams are device IDs, found
//! through a device directory of one to three levels, with contexts in the base or the extended
//! format. A device context that is not valid blocks its device, and one with both stages Bare lets
//! it at all memory.
//!
//! | file | |
//! |---|---|
//! | `spec.rs` | registers, commands, records, structures |
//! | `start.rs` | bringing the hardware up, and down |
//! | `queue.rs`, `faults.rs` | commands that it executes, faults that it records |
//! | `directory.rs`, `context.rs` | how it finds a device's context, and how that is changed |
//! | `ops.rs`, `stream.rs` | the hooks of a domain, and of a stream |
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{PageTable, Riscv, RiscvStage, TableMemory};
//! use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
//! use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig};
//! use dmaspan_drivers::{Host, Mmio};
//!
//! /// Gives the device of ID 0x10 a domain.
//! fn attach(
//!     registers: impl Mmio + 'static,
//!     host: impl Host + 'static,
//!     tables: impl TableMemory<u64> + 'static,
//! ) -> Result<(), Box<dyn Error>> {
//!     // SAFETY: these are the registers of a RISC-V IOMMU that nobody else drives, and the host's
//!     // memory and that of the tables are what it sees.
//!     let iommu = unsafe { RiscvIommu::new(registers, host, RiscvIommuConfig::default()) }?;
//!     let format = Riscv::new(iommu.config(RiscvStage::Second)?)?;
//!     let ops = iommu.ops(RiscvStage::Second)?;
//!     let domain = Arc::new(Domain::new(PageTable::new(format, tables)?, ops)?);
//!     let stream = Attachment::new(iommu.stream(0x10, ReservedRegions::new())?)?;
//!     stream.attach(Target::Paging(Prepared::new(domain)))?;
//!     Ok(())
//! }
//! ```

mod context;
mod directory;
mod faults;
mod ops;
mod queue;
mod spec;
mod start;
mod stream;

use alloc::sync::Arc;
use core::fmt;

use dmaspan::io_pgtable::{
    DirtyTracking, Format, Riscv, RiscvConfig, RiscvMemoryTypes, RiscvMode, RiscvStage,
};
use dmaspan::iommu::HardwareError;
use dmaspan::{Coherency, PhysAddr, lg2};

pub use ops::RiscvOps;
pub use spec::Capabilities;
pub use stream::RiscvStream;

use crate::Mmio;
use crate::error::Error;
use crate::faults::Streams;
use crate::host::Host;
use crate::ids::Ids;
use directory::Directory;
use faults::FaultQueue;
use queue::CommandQueue;
use spec::Command;

/// The last PSCID and the last GSCID that are given out. A GSCID has 16 bits, a PSCID 20; 0 is the
/// number in contexts that have no such stage.
const LAST_ID: u32 = 0xffff;

/// Says how an IOMMU's own interrupts reach a CPU ("Feature-control register" and "MSI
/// configuration table").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RiscvInterrupts {
    /// They do not: [`RiscvIommu::handle_faults`] is called now and then.
    Off,
    /// By the wire of vector 0.
    Wire,
    /// By a message.
    Message {
        /// Where it is written.
        address: PhysAddr,
        /// What is written.
        data: u32,
    },
}

/// Says how an IOMMU is to be set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RiscvIommuConfig {
    /// How many bits device IDs have, at most 24; the directory has the fewest levels that the
    /// hardware takes for them.
    pub device_id_bits: u32,
    /// log2 of the places of the command queue: 2 to 15.
    pub commands_lg2: u32,
    /// log2 of the places of the fault queue: 1 to 15.
    pub faults_lg2: u32,
    /// Whether hardware's walks of page tables see the CPU's caches, which firmware says.
    pub walks: Coherency,
    /// How its interrupts are signalled.
    pub interrupts: RiscvInterrupts,
}

impl Default for RiscvIommuConfig {
    /// For all requester IDs of PCI, with queues of a page, polled.
    fn default() -> Self {
        Self {
            device_id_bits: 16,
            commands_lg2: 8,
            faults_lg2: 7,
            walks: Coherency::Coherent,
            interrupts: RiscvInterrupts::Off,
        }
    }
}

/// Says what an IOMMU can do, as its registers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RiscvIommuFeatures {
    /// `capabilities`, as far as this driver knows it.
    pub capabilities: Capabilities,
    /// Bits of physical addresses.
    pub output_bits: u32,
    /// Bits of device IDs that its directory tells apart.
    pub device_id_bits: u32,
    /// The levels of its directory, 1 to 3.
    pub directory_levels: u32,
}

impl RiscvIommuFeatures {
    /// Returns whether the IOMMU walks such tables.
    pub const fn walks(&self, stage: RiscvStage, mode: RiscvMode) -> bool {
        self.capabilities.contains(match (stage, mode) {
            (RiscvStage::First(_), RiscvMode::Sv39) => Capabilities::SV39,
            (RiscvStage::First(_), RiscvMode::Sv48) => Capabilities::SV48,
            (RiscvStage::First(_), RiscvMode::Sv57) => Capabilities::SV57,
            (RiscvStage::Second, RiscvMode::Sv39) => Capabilities::SV39X4,
            (RiscvStage::Second, RiscvMode::Sv48) => Capabilities::SV48X4,
            (RiscvStage::Second, RiscvMode::Sv57) => Capabilities::SV57X4,
        })
    }

    const fn has_first_stage(&self) -> bool {
        self.capabilities.intersects(Capabilities::FIRST_STAGE)
    }

    const fn has_second_stage(&self) -> bool {
        self.capabilities.intersects(Capabilities::SECOND_STAGE)
    }
}

/// A RISC-V IOMMU.
///
/// Dropped, it lets no access of any device through.
pub struct RiscvIommu<R: Mmio, H: Host> {
    registers: R,
    host: H,
    features: RiscvIommuFeatures,
    walks: Coherency,
    commands: CommandQueue<H>,
    faults: FaultQueue<H::Structure, H::Lock>,
    directory: Directory<H::Structure, H::Lock>,
    streams: Streams<H::Lock>,
    pscids: Ids<H::Lock>,
    gscids: Ids<H::Lock>,
}

impl<R: Mmio, H: Host> RiscvIommu<R, H> {
    /// Takes an IOMMU over, whatever state it is in: no access of any device passes from the begin
    /// of the call until a stream is attached.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] and [`Error::Unsupported`] where hardware cannot be set up so,
    /// [`Error::NoMemory`], [`Error::Hardware`] where it does not answer. No access passes then,
    /// unless the hardware does not even turn off.
    ///
    /// # Safety
    ///
    /// As long as the value exists,
    ///
    /// 1. `registers` are those of an IOMMU as the specification describes it, ordered as [`Mmio`]
    ///    says, and nobody else writes them;
    /// 2. the IOMMU sees the host's memory at the addresses that the host names, and the tables of
    ///    domains that are attached at those that their memory names, written back where
    ///    [`RiscvIommuConfig::walks`] says that it does not see caches; and physical addresses of
    ///    pinners, pools and other memory that is mapped are those of its machine, too;
    /// 3. a message of [`RiscvIommuConfig::interrupts`] goes to an interrupt controller, which the
    ///    IOMMU writes to whatever it lets devices do; and
    /// 4. accesses of devices whose streams are claimed reach memory through this IOMMU alone, and
    ///    under the number that the stream was claimed by.
    #[expect(unsafe_code, reason = "what devices reach is what this hardware lets them reach")]
    pub unsafe fn new(registers: R, host: H, config: RiscvIommuConfig) -> Result<Arc<Self>, Error> {
        let started = start::start(&registers, &host, &config)?;
        let start::Started { features, commands, faults, directory } = started;
        Ok(Arc::new(Self {
            registers,
            host,
            features,
            walks: config.walks,
            commands,
            faults,
            directory,
            streams: Streams::new(),
            pscids: Ids::new(1, LAST_ID),
            gscids: Ids::new(1, LAST_ID),
        }))
    }

    /// Returns what the hardware can do.
    pub fn features(&self) -> &RiscvIommuFeatures {
        &self.features
    }

    /// The tables of a stage that the hardware walks, in its largest mode, with leaves of all
    /// sizes. Where it has [`Capabilities::AMO_HWAD`] a caller may choose to have writes marked.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it does not have the stage.
    pub fn config(&self, stage: RiscvStage) -> Result<RiscvConfig, Error> {
        let modes = [RiscvMode::Sv57, RiscvMode::Sv48];
        let largest = modes.into_iter().find(|&mode| self.features.walks(stage, mode));
        self.config_of(stage, largest.unwrap_or(RiscvMode::Sv39))
    }

    /// [`config`](Self::config) in that mode: fewer levels are walked faster and reach less.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the hardware does not have the mode in that stage.
    pub fn config_of(&self, stage: RiscvStage, mode: RiscvMode) -> Result<RiscvConfig, Error> {
        let capabilities = self.features.capabilities;
        if !self.features.walks(stage, mode) {
            let what = match stage {
                RiscvStage::First(_) => "first stage of that mode",
                RiscvStage::Second => "second stage of that mode",
            };
            return Err(Error::unsupported(what, capabilities.bits()));
        }
        let memory_types = match capabilities.contains(Capabilities::SVPBMT) {
            true => RiscvMemoryTypes::Svpbmt,
            false => RiscvMemoryTypes::Platform,
        };
        let output_bits = self.features.output_bits;
        let (page_sizes, dirty) = (None, DirtyTracking::Off);
        let singles = RiscvConfig { mode, stage, output_bits, page_sizes, memory_types, dirty };
        // "IOMMU implementations must support the Svnapot standard extension" ("IOMMU
        // capabilities").
        let page_sizes = Riscv::new(singles)
            .ok()
            .map(|format| format.geometry().page_sizes | Riscv::NAPOT_SIZES);
        Ok(RiscvConfig { page_sizes, ..singles })
    }

    /// The last address that the hardware reaches.
    fn max_paddr(&self) -> PhysAddr {
        PhysAddr::new(lg2::mask(self.features.output_bits))
    }

    /// Makes hardware execute commands, and waits until it has.
    fn run(&self, commands: &[Command]) -> Result<(), HardwareError> {
        self.commands.run(&self.registers, &self.host, commands)
    }
}

impl<R: Mmio, H: Host> Drop for RiscvIommu<R, H> {
    fn drop(&mut self) {
        // Off lets nothing pass. What hardware may still read is leaked.
        if start::turn_off(&self.registers, &self.host).is_ok() {
            self.directory.free();
            self.commands.free();
            self.faults.free();
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for RiscvIommu<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RiscvIommu").field("features", &self.features).finish_non_exhaustive()
    }
}
