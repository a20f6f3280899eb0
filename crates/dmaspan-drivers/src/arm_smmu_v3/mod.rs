//! Arm's SMMUv3: Arm System MMU architecture, version 3 (IHI 0070).
//!
//! **An interrupt is a write like others.** The driver maps no doorbell: a device raises no
//! interrupt by message until the owner of the domain maps the doorbell's page for it, by
//! `Prot::WRITE | Prot::MMIO`. From then on a GICv3 ITS takes the device's own events alone, and
//! other doorbells, such as a GICv2m's, whatever it writes.
//!
//! [`SmmuV3`] owns the registers, the stream table and the queues. A domain is of stage 1 or of
//! stage 2, with 64-bit tables: [`SmmuV3::stage1_config`] and [`SmmuV3::stage2_config`] say what
//! hardware walks, and [`SmmuV3::ops`] makes its hooks. Streams are told apart by the StreamID, for
//! PCI usually the requester ID.
//!
//! ```no_run
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{ArmLpaeS1, PageTable, TableMemory};
//! use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
//! use dmaspan::{Iova, PhysAddr, Prot, Span};
//! use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, Stage};
//! use dmaspan_drivers::{Host, MmioRegion};
//!
//! /// Maps a page for the device of StreamID 8.
//! fn attach<H, M>(registers: MmioRegion, host: H, tables: M) -> Result<(), Box<dyn Error>>
//! where
//!     H: Host + 'static,
//!     M: TableMemory<u64> + 'static,
//! {
//!     // SAFETY: nobody else drives the SMMU, and the host's memory is what it sees.
//!     let smmu = unsafe { SmmuV3::new(registers, host, SmmuV3Config::default()) }?;
//!
//!     let format = ArmLpaeS1::<12>::new(smmu.stage1_config(12)?)?;
//!     let ops = smmu.ops(Stage::First, OnFault::Terminate)?;
//!     let domain = Arc::new(Domain::new(PageTable::new(format, tables)?, ops)?);
//!     let page = Span::new(PhysAddr::new(0x8000_0000), 0x1000)?;
//!     // SAFETY: nobody else uses these IOVAs, and the memory is the device's.
//!     unsafe { domain.map_spans(Iova::new(0x1000), &[page], Prot::READ_WRITE) }?;
//!
//!     let stream = Attachment::new(smmu.stream(8, ReservedRegions::new())?)?;
//!     stream.attach(Target::Paging(Prepared::new(domain)))?;
//!     let handled = smmu.handle_faults()?;
//!     assert!(!handled.overflowed);
//!     Ok(())
//! }
//! ```

mod command;
mod events;
mod features;
mod format;
mod hardware;
mod ops;
mod queue;
mod reset;
mod spec;
mod ste;
mod stream;
mod table;
mod tlbi;

pub use crate::stage::Stage;
pub use features::{SmmuV3Features, StallModel};
pub use format::SmmuV3Format;
pub use ops::SmmuV3Ops;
pub use reset::{EventInterrupts, SmmuV3Config};
pub use stream::SmmuV3Stream;
use stream::SmmuV3StreamHooks;
pub use table::StreamTable;

use alloc::sync::Arc;
use core::fmt;
use core::iter;

use dmaspan::io_pgtable::{ArmLpaeS1Config, ArmLpaeS2Config};
use dmaspan::iommu::{HardwareError, ReservedRegions};
use dmaspan::{PhysAddr, lg2};

use command::{Command, Tag};
use events::{Event, Next};
use hardware::Hardware;
use spec::gerror;
use table::{StreamSlot, Tags};

use crate::error::Error;
use crate::faults::{Handled, Streams};
use crate::host::Host;
use crate::ids::Ids;
use crate::mmio::Mmio;
use crate::stream::IommuStream;

/// Says what becomes of a domain's accesses that fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnFault {
    /// They end.
    Terminate,
    /// Hardware holds them until [`SmmuV3::handle_faults`] has asked the stream's handler what to
    /// do. PCI devices cannot wait so long; others may, where the hardware can
    /// ([`SmmuV3Features::stalls`]).
    Stall,
}

/// An SMMUv3.
///
/// # Context
///
/// All methods may be called from several threads at once. [`handle_faults`](Self::handle_faults)
/// may run in an interrupt if the host's lock keeps interrupts off.
pub struct SmmuV3<R: Mmio, H: Host> {
    hardware: Hardware<R, H>,
    features: SmmuV3Features,
    structures: reset::Structures<H>,
    streams: Streams<H::Lock>,
    asids: Ids<H::Lock>,
    vmids: Ids<H::Lock>,
    /// How many commands an invalidation has at most.
    most_commands: usize,
}

impl<R: Mmio, H: Host> SmmuV3<R, H> {
    /// Returns what the hardware can.
    pub fn features(&self) -> &SmmuV3Features {
        &self.features
    }

    /// The largest stage-1 tables with a granule of `2^granule_lg2` bytes that this hardware walks:
    /// see [`SmmuV3Features::stage1_config`].
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub fn stage1_config(&self, granule_lg2: u32) -> Result<ArmLpaeS1Config, Error> {
        self.features.stage1_config(granule_lg2)
    }

    /// The largest stage-2 tables with a granule of `2^granule_lg2` bytes that this hardware walks:
    /// see [`SmmuV3Features::stage2_config`].
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`].
    pub fn stage2_config(&self, granule_lg2: u32) -> Result<ArmLpaeS2Config, Error> {
        self.features.stage2_config(granule_lg2)
    }

    /// The hooks of a new domain of that stage, with an ASID or a VMID of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where hardware lacks the stage or cannot stall, [`Error::NoIds`],
    /// [`Error::NoMemory`].
    pub fn ops(
        self: &Arc<Self>,
        stage: Stage,
        on_fault: OnFault,
    ) -> Result<SmmuV3Ops<R, H>, Error> {
        SmmuV3Ops::new(Arc::clone(self), stage, on_fault)
    }

    /// A stream, with the regions that firmware and the platform reserve for it. It has what it had
    /// before: nothing, if nobody attached it ever.
    ///
    /// # Errors
    ///
    /// [`Error::NoStream`], [`Error::Claimed`] while there is another port for it,
    /// [`Error::NoMemory`].
    pub fn stream<D>(
        self: &Arc<Self>,
        id: u32,
        regions: ReservedRegions,
    ) -> Result<SmmuV3Stream<D, R, H>, Error> {
        let table = &self.structures.table;
        let last = lg2::mask(table.bits);
        if u64::from(id) > last {
            let last = u32::try_from(last).unwrap_or(u32::MAX);
            return Err(Error::NoStream { stream: id, last });
        }
        let claimed = self.streams.claim(id, regions)?;
        let slot = table.slot(&self.hardware.host, id);
        let slot = slot.inspect_err(|_| self.streams.release(id))?;
        Ok(IommuStream::new(SmmuV3StreamHooks { smmu: Arc::clone(self), slot }, claimed))
    }

    /// Takes the events out of the queue that were there when it was called, and reports each to
    /// the stream that it concerns. Answers stalled accesses as the handlers say. Acknowledges
    /// global errors, and lets a command queue that stopped at one go on.
    ///
    /// # Context
    ///
    /// May run in an interrupt. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where the SMMU is gone, is in its service failure mode, or does not take
    /// an answer in bounded time: that access is stalled until its stream is blocked, and what is
    /// behind it in the queue stays there for the next call.
    pub fn handle_faults(&self) -> Result<Handled, HardwareError> {
        let registers = &self.hardware.registers;
        let events = &self.structures.events;
        let mut handled = Handled::default();
        let mut result = Ok(());
        for _ in 0..events.places() {
            match events.take(registers)? {
                Next::Nothing => break,
                Next::Garbled => handled.malformed = handled.malformed.saturating_add(1),
                Next::Record(record) => match Event::decode(&record, &self.features) {
                    None => handled.malformed = handled.malformed.saturating_add(1),
                    Some(event) => result = self.report(&event, &mut handled),
                },
            }
            // The next answer would be waited for as long.
            if result.is_err() {
                break;
            }
        }
        events.release(registers, &mut handled);
        // An event that could not be written is lost, too.
        let errors = self.hardware.acknowledge(!gerror::CMDQ_ERR & !gerror::SFM_ERR);
        handled.overflowed |= errors & gerror::EVENTQ_ABT_ERR != 0;
        let active = self.hardware.active_errors();
        if active & gerror::SFM_ERR != 0 {
            return Err(self.hardware.why("the SMMU has failed"));
        }
        if active & gerror::CMDQ_ERR != 0 {
            // Nobody waits for answers, who would see it.
            result = result.and(self.structures.commands.look(&self.hardware));
        }
        result.map(|()| handled)
    }

    /// Reports an event, and answers it if the access is stalled.
    fn report(&self, event: &Event, handled: &mut Handled) -> Result<(), HardwareError> {
        let response = self.streams.report(&event.report, handled);
        match event.answer(response) {
            Some(command) => self.structures.commands.place(&self.hardware, command),
            None => Ok(()),
        }
    }

    /// Places commands and waits until they are complete.
    fn run(&self, commands: impl IntoIterator<Item = Command>) -> Result<(), HardwareError> {
        self.structures.commands.run(&self.hardware, commands)
    }

    /// Gives a stream another entry, by which it has the domain with that tag, if any.
    fn switch(
        &self,
        slot: &StreamSlot<H>,
        tag: Option<Tag>,
        entry: &ste::Entry,
    ) -> Result<(), HardwareError> {
        let mut tags = slot.tags.lock();
        self.change(slot, &mut tags, tag, entry)
    }

    /// [`switch`](Self::switch), under the slot's lock.
    fn change(
        &self,
        slot: &StreamSlot<H>,
        tags: &mut Tags,
        tag: Option<Tag>,
        entry: &ste::Entry,
    ) -> Result<(), HardwareError> {
        let before = *tags;
        *tags = before.with(tag);
        for step in ste::steps(&slot.entry(), entry) {
            slot.store(&step);
            self.run(iter::once(Command::stream(slot.id)))?;
        }
        // With its translations, accesses by what it had are complete.
        let forget = match before {
            Tags::None => None,
            Tags::One(tag) => Some(Command::domain(tag)),
            Tags::Many => Some(Command::TRANSLATIONS),
        };
        let stalls = *entry == ste::BLOCKED && self.features.stalls != StallModel::Terminate;
        let end = stalls.then(|| Command::end_stalls(slot.id));
        if forget.is_some() || end.is_some() {
            self.run(forget.into_iter().chain(end))?;
        }
        *tags = Tags::None.with(tag);
        Ok(())
    }

    /// Blocks all streams that may have the domain with that tag.
    fn block_all(&self, tag: Tag) -> Result<(), HardwareError> {
        let mut next = self.structures.table.from(0);
        while let Some(slot) = next {
            let mut tags = slot.tags.lock();
            if tags.may_have(tag) {
                self.change(&slot, &mut tags, None, &ste::BLOCKED)?;
            }
            drop(tags);
            next = slot.id.checked_add(1).and_then(|id| self.structures.table.from(id));
        }
        Ok(())
    }

    /// The last address that hardware reaches.
    fn max_paddr(&self) -> PhysAddr {
        PhysAddr::new(lg2::mask(self.features.output_bits))
    }
}

impl<R: Mmio, H: Host> fmt::Debug for SmmuV3<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmmuV3").field("features", &self.features).finish_non_exhaustive()
    }
}
