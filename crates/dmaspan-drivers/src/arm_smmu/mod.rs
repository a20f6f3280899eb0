//! Arm's SMMUv2: Arm System MMU architecture, version 2 (IHI 0062).
//!
//! **An interrupt is a write like others.** The driver maps no doorbell: a device raises no
//! interrupt by message until the owner of the domain maps the doorbell's page for it, by
//! `Prot::WRITE | Prot::MMIO`. From then on a GICv3 ITS takes the device's own events alone, and
//! other doorbells, such as a GICv2m's, whatever it writes.
//!
//! The hardware has a *stream map*, whose entries say what becomes of the accesses of which
//! streams, and *context banks*, which translate. A domain has a bank from its [`ops`](SmmuV2::ops)
//! on. Streams of the same domain lead to the same bank, and a stream changes to another one by one
//! write of 32 bits, so that each access sees the one or the other. Then the driver makes hardware
//! forget what it cached of the old bank.
//!
//! There are no queues: the driver writes registers, and reads whether hardware is done. An
//! invalidation takes at most [`MAX_COMMANDS`] writes and one wait.
//!
//! Neither silicon nor a model by others has judged this driver: QEMU has no SMMUv2, and the model
//! in `dmaspan-sim`, on which the tests run, has the same author. Both share whatever that author
//! misread in the manual.
//!
//! The driver does what the architecture says. Some implementations need more, above all against
//! their errata (Linux: arm-smmu-impl.c); the caller does that before it makes the driver.
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use dmaspan::io_pgtable::{ArmLpaeS1, PageTable, TableMemory};
//! use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
//! use dmaspan_drivers::arm_smmu::{SmmuV2, SmmuV2Config, SmmuV2Stream};
//! use dmaspan_drivers::{Host, Mmio};
//!
//! /// Gives the device of stream 0x17 a domain.
//! fn attach<R, H, M>(registers: R, host: H, tables: M) -> Result<(), Box<dyn Error>>
//! where
//!     R: Mmio + 'static,
//!     H: Host + 'static,
//!     M: TableMemory<u64> + 'static,
//! {
//!     // SAFETY: these are the registers of an SMMU that nobody else drives.
//!     let smmu = unsafe { SmmuV2::new(registers, host, SmmuV2Config::new()) }?;
//!
//!     let format = ArmLpaeS1::<12>::new(smmu.features().stage_1_config())?;
//!     let ops = smmu.ops::<ArmLpaeS1<12>>()?;
//!     let domain = Arc::new(Domain::new(PageTable::new(format, tables)?, ops)?);
//!
//!     let port: SmmuV2Stream<_, _, _> = smmu.stream(0x17, ReservedRegions::new())?;
//!     let stream = Attachment::new(port)?;
//!     stream.attach(Target::Paging(Prepared::new(domain)))?;
//!     Ok(())
//! }
//! ```

mod bank;
mod faults;
mod features;
mod format;
mod map;
mod ops;
mod registers;
mod spec;
mod stream;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;

use dmaspan::iommu::{FaultHook, HardwareError, ReservedRegions};
use lock_api::Mutex;

pub use features::{Has, SmmuV2Features, StreamMapping};
pub use format::SmmuV2Format;
pub use ops::{MAX_COMMANDS, SmmuV2Ops};
pub use stream::SmmuV2Stream;
use stream::SmmuV2StreamHooks;

use self::bank::Bank;
use self::format::Kind;
use self::map::StreamMap;
use self::registers::Registers;
use self::spec::{SYNC_ACTIVE, cr0, gr0};
use crate::error::Error;
use crate::faults::ClaimedStream;
use crate::host::{Host, poll};
use crate::ids::Ids;
use crate::mmio::Mmio;
use crate::stage::Stage;
use crate::stream::IommuStream;

/// Says what becomes of an access that a bank does not translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stalls {
    /// It ends with an error.
    Ended,
    /// Hardware holds it until [`SmmuV2::handle_faults`] has asked the stream's handler. For
    /// devices that can wait, where hardware can stall.
    Held,
}

/// Says what is to be decided about an SMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmmuV2Config {
    /// The first ASID and VMID to use. For SMMUs that share a TLB, whose numbers must differ
    /// (Linux: Cavium's erratum 27704).
    pub first_id: u16,
    /// What becomes of an access that is not translated.
    pub stalls: Stalls,
}

impl SmmuV2Config {
    /// Numbers from 0 on, and accesses that are not translated end.
    pub const fn new() -> Self {
        Self { first_id: 0, stalls: Stalls::Ended }
    }
}

impl Default for SmmuV2Config {
    fn default() -> Self {
        Self::new()
    }
}

/// An SMMUv2.
pub struct SmmuV2<R, H: Host> {
    registers: Registers<R>,
    host: H,
    features: SmmuV2Features,
    config: SmmuV2Config,
    state: Mutex<H::Lock, State<H::Lock>>,
    /// The banks that have only stage 2, and all others.
    stage_2_banks: Ids<H::Lock>,
    banks: Ids<H::Lock>,
    /// One at a time waits, so that nobody begins anew what another one waits for, for ever.
    global_sync: Mutex<H::Lock, ()>,
    bank_syncs: Box<[Mutex<H::Lock, ()>]>,
    /// Around taking a fault out of the registers.
    faults: Mutex<H::Lock, ()>,
}

/// What hardware was told.
struct State<L> {
    map: StreamMap<L>,
    banks: Box<[Option<Taken>]>,
}

/// A bank that is a domain's, or was.
#[derive(Clone, Copy)]
struct Taken {
    bank: Bank,
    /// Hardware may walk the domain's tables.
    translates: Translates,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Translates {
    Yes,
    No,
}

impl<L> State<L> {
    fn bank(&mut self, index: u32) -> Option<&mut Taken> {
        self.banks.get_mut(index as usize)?.as_mut()
    }
}

impl<R: Mmio, H: Host> SmmuV2<R, H> {
    /// Takes the SMMU as it is, blocks all streams, and enables it.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where it has nothing that translates or says what cannot be,
    /// [`Error::Hardware`] where it does not answer.
    ///
    /// # Safety
    ///
    /// The registers are those of an SMMUv2, as seen by non-secure software and ordered as [`Mmio`]
    /// says, and nobody else uses them. It reads tables at the addresses that formats are told of
    /// as `TableMemory`'s. Physical addresses of pinners, pools and other memory that is mapped are
    /// those of its machine, too.
    #[expect(unsafe_code, reason = "tables are freed on the strength of what registers say")]
    pub unsafe fn new(registers: R, host: H, config: SmmuV2Config) -> Result<Arc<Self>, Error> {
        let registers = Registers::new(registers);
        let features = SmmuV2Features::read(&registers)?;
        let SmmuV2Features { banks, stage_2_banks, .. } = features;
        let mut smmu = Self {
            registers,
            host,
            config,
            state: Mutex::new(State {
                map: StreamMap::new(&features),
                banks: (0..banks).map(|_| None).collect(),
            }),
            stage_2_banks: match stage_2_banks.checked_sub(1) {
                Some(last) => Ids::new(0, last),
                None => Ids::new(1, 0),
            },
            banks: Ids::new(stage_2_banks, banks - 1),
            global_sync: Mutex::new(()),
            bank_syncs: (0..banks).map(|_| Mutex::new(())).collect(),
            faults: Mutex::new(()),
            features,
        };
        smmu.reset()?;
        Ok(Arc::new(smmu))
    }

    /// Returns what the hardware has.
    pub fn features(&self) -> &SmmuV2Features {
        &self.features
    }

    /// The hooks of a new domain, whose tables have the format `F`. They take a context bank,
    /// which is free again when the domain has been dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for tables that the hardware does not walk, [`Error::NoIds`] where
    /// all banks are taken, and [`Error::Config`] where [`SmmuV2Config::first_id`] leaves none of
    /// the numbers that such a bank can have.
    pub fn ops<F: SmmuV2Format>(self: &Arc<Self>) -> Result<SmmuV2Ops<R, H>, Error> {
        let context = F::CONTEXT;
        if let Some((what, register)) = context.missing(&self.features) {
            return Err(Error::unsupported(what, self.registers.read(register)));
        }
        let index = match context.stage {
            Stage::First => self.banks.take(),
            Stage::Second => self.stage_2_banks.take().or_else(|| self.banks.take()),
        };
        let limit = self.features.banks;
        let index = index.ok_or(Error::NoIds { what: "context banks", limit })?;
        let (what, id, limit) = match (context.stage, context.tables, self.features.wide_vmids) {
            (Stage::First, Kind::AArch64, _) => ("the ASID", 0, 0xffff),
            (Stage::First, _, _) => ("the ASID", 0, 0xff),
            // VMID 0 is that of all banks of stage 1.
            (Stage::Second, _, Has::Yes) => ("the VMID", 1, 0xffff),
            (Stage::Second, _, Has::No) => ("the VMID", 1, 0xff),
        };
        let id = u32::from(self.config.first_id) + index + id;
        Error::check(what, id, 0..=limit).inspect_err(|_| self.give(index))?;
        let bank = Bank { index, context, id };
        let mut state = self.state.lock();
        if let Some(place) = state.banks.get_mut(index as usize) {
            *place = Some(Taken { bank, translates: Translates::No });
        }
        bank.prepare(&self.registers, &self.features);
        drop(state);
        Ok(SmmuV2Ops::new(Arc::clone(self), bank))
    }

    /// A stream: the accesses with that stream ID.
    ///
    /// # Errors
    ///
    /// [`Error::NoStream`], [`Error::Claimed`], and [`Error::NoIds`] where all entries of the
    /// stream map are taken.
    pub fn stream<D>(
        self: &Arc<Self>,
        id: u32,
        regions: ReservedRegions,
    ) -> Result<SmmuV2Stream<D, R, H>, Error> {
        self.streams(id, 0, regions)
    }

    /// Several streams as one: those whose ID is `id` in all bits that `mask` does not have.
    /// Faults are reported with the ID of the stream that caused them.
    ///
    /// # Errors
    ///
    /// As for [`stream`](Self::stream); [`Error::Claimed`] where any of the streams is somebody's,
    /// since what matches two entries has none, and [`Error::Config`] for a mask that entries
    /// cannot have.
    pub fn streams<D>(
        self: &Arc<Self>,
        id: u32,
        mask: u32,
        regions: ReservedRegions,
    ) -> Result<SmmuV2Stream<D, R, H>, Error> {
        let ids = map::Ids { id: id & !mask, mask };
        let claimed = ClaimedStream { id: ids.id, regions, faults: FaultHook::new() };
        let claimed = Arc::new(claimed);
        let ours = Arc::clone(&claimed);
        let entry = self.state.lock().map.claim(&self.registers, ids, ours)?;
        let hooks = SmmuV2StreamHooks::new(Arc::clone(self), entry);
        Ok(IommuStream::new(hooks, claimed))
    }

    /// Blocks everything, then forgets everything, and only then turns banks off.
    fn reset(&mut self) -> Result<(), Error> {
        let registers = &self.registers;
        // Where firmware has the SMMU decide about accesses, it goes on to: with this no stream
        // passes for want of an entry while entries change. While CLIENTPD is set, as after a
        // reset, all pass (IHI 0062, SMMU_sCR0).
        registers.write(gr0::CR0, registers.read(gr0::CR0) | cr0::USFCFG);
        map::block_entries(registers, &self.features);
        let mut control = cr0::GFRE | cr0::GFIE | cr0::GCFGFRE | cr0::GCFGFIE;
        control |= cr0::VMIDPNE | cr0::PTM | cr0::USFCFG | cr0::SMCFCFG;
        if self.features.wide_vmids == Has::Yes {
            control |= cr0::VMID16EN;
        }
        if self.features.wide_streams == Has::Yes {
            control |= cr0::EXIDENABLE;
        }
        registers.write(gr0::CR0, control);
        map::clear_entries(registers, &self.features);
        registers.write(gr0::GFSR, registers.read(gr0::GFSR));
        for index in 0..self.features.banks {
            bank::end_faults(registers, index);
        }
        registers.write(gr0::TLBIALLH, 0);
        registers.write(gr0::TLBIALLNSNH, 0);
        // What found its bank before has completed after this: a bank that is off lets it pass.
        self.sync_global()?;
        for index in 0..self.features.banks {
            bank::disable(registers, index);
        }
        // Entries have the bits that CR0 says.
        map::probe(registers, &mut self.features);
        *self.state.get_mut() = State {
            map: StreamMap::new(&self.features),
            banks: (0..self.features.banks).map(|_| None).collect(),
        };
        Ok(self.sync_global()?)
    }

    /// Waits until all that hardware was told to forget is forgotten, and all accesses that used it
    /// have completed (IHI 0062, SMMU_sTLBGSYNC).
    fn sync_global(&self) -> Result<(), HardwareError> {
        let _one = self.global_sync.lock();
        self.registers.write(gr0::TLBGSYNC, 0);
        self.wait(|| self.registers.read(gr0::TLBGSTATUS))
    }

    /// The same for what one bank was told (IHI 0062, SMMU_CBn_TLBSYNC).
    fn sync_bank(&self, index: u32) -> Result<(), HardwareError> {
        let Some(sync) = self.bank_syncs.get(index as usize) else { return self.sync_global() };
        let _one = sync.lock();
        let bank = self.registers.bank(index);
        bank.write(spec::bank::TLBSYNC, 0);
        self.wait(|| bank.read(spec::bank::TLBSTATUS))
    }

    /// Looks at the state of a sync until it is over.
    fn wait(&self, status: impl Fn() -> u32) -> Result<(), HardwareError> {
        let done = poll(&self.host, || match status() {
            u32::MAX => Some(Err(GONE)),
            status if status & SYNC_ACTIVE == 0 => Some(Ok(())),
            _ => None,
        });
        done.unwrap_or_else(|| {
            let status = self.registers.read(gr0::GFSR).into();
            Err(HardwareError { what: "the SMMU did not finish a TLB sync in time", status })
        })
    }

    /// Gives a bank back.
    fn give(&self, index: u32) {
        let ids =
            if index < self.features.stage_2_banks { &self.stage_2_banks } else { &self.banks };
        ids.give(index);
    }
}

/// All registers read as ones.
const GONE: HardwareError =
    HardwareError { what: "the SMMU does not answer", status: u32::MAX as u64 };

impl<R, H: Host> fmt::Debug for SmmuV2<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmmuV2")
            .field("features", &self.features)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
