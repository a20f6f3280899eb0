//! The event queue and what its records say (IHI 0070, 3.5.2, 7.2 and 7.3).

use dmaspan::iommu::{
    FaultAccess, FaultReason, FaultReport, FaultResponse, FaultState, HardwareError,
};
use dmaspan::{Iova, PhysAddr, lg2};
use lock_api::Mutex;

use super::command::Command;
use super::features::{SmmuV3Features, StallModel};
use super::hardware;
use super::spec::{cmd, event, queue, reg};
use crate::error::Error;
use crate::faults::Handled;
use crate::host::Host;
use crate::mmio::Mmio;
use crate::structure::Words;

/// A record.
type Record = [u64; 4];

/// Where hardware places events.
pub(super) struct EventQueue<H: Host> {
    places: Words<H::Structure>,
    lg2: u32,
    /// EVENTQ_CONS as it is to be: the index, and OVACKFLG.
    consumer: Mutex<H::Lock, Consumer>,
}

#[derive(Clone, Copy)]
struct Consumer {
    index: u32,
    overflow: u32,
}

/// What is next in the queue.
pub(super) enum Next {
    Record(Record),
    /// Hardware named a place that is none.
    Garbled,
    Nothing,
}

impl<H: Host> EventQueue<H> {
    /// A queue of `2^lg2` places, which hardware has not been told of.
    pub(super) fn new(host: &H, lg2: u32, max_paddr: PhysAddr) -> Result<Self, Error> {
        let places = Words::new(host, lg2 + event::LG2_SIZE, max_paddr)?;
        Ok(Self { places, lg2, consumer: Mutex::new(Consumer { index: 0, overflow: 0 }) })
    }

    /// Tells hardware of it. EVENTQEN is clear.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let base = queue::ALLOCATE | self.places.paddr().get() | u64::from(self.lg2);
        registers.write64(reg::EVENTQ_BASE, base);
        registers.write32(reg::EVENTQ_PROD, 0);
        registers.write32(reg::EVENTQ_CONS, 0);
    }

    /// Gives the memory back. EVENTQEN is clear.
    pub(super) fn free(&mut self) {
        self.places.free_in_place();
    }

    /// How many records the queue has at most.
    pub(super) fn places(&self) -> u64 {
        lg2::size(self.lg2)
    }

    /// Takes the next record out.
    pub(super) fn take(&self, registers: &impl Mmio) -> Result<Next, HardwareError> {
        let mut consumer = self.consumer.lock();
        let producer = registers.read32(reg::EVENTQ_PROD);
        if producer == u32::MAX {
            return Err(hardware::gone(producer));
        }
        let round = self.index(u32::MAX);
        let ready = producer.wrapping_sub(consumer.index) & round;
        if ready == 0 {
            return Ok(Next::Nothing);
        }
        if u64::from(ready) > self.places() {
            consumer.index = producer & round;
            return Ok(Next::Garbled);
        }
        let place = (consumer.index & (round >> 1)) as usize;
        let first = place << event::LG2_WORDS;
        let record = [0, 1, 2, 3].map(|word| self.places.get(first + word));
        consumer.index = self.index(consumer.index.wrapping_add(1));
        Ok(Next::Record(record))
    }

    /// Tells hardware which places are free again and that an overflow was seen. Says whether there
    /// was one, and whether there are more records.
    pub(super) fn release(&self, registers: &impl Mmio, handled: &mut Handled) {
        let mut consumer = self.consumer.lock();
        let producer = registers.read32(reg::EVENTQ_PROD);
        let overflow = producer & queue::OVERFLOW;
        handled.overflowed = overflow != consumer.overflow;
        handled.more = self.index(producer) != consumer.index;
        consumer.overflow = overflow;
        registers.write32(reg::EVENTQ_CONS, consumer.index | overflow);
    }

    /// An index as the registers have it: the place, and a bit that changes with each round.
    fn index(&self, index: u32) -> u32 {
        index & ((2 << self.lg2) - 1)
    }
}

/// What a record says.
pub(super) struct Event {
    pub(super) report: FaultReport,
    /// By which a stalled access is told apart.
    tag: u64,
}

impl Event {
    /// What a record says; `None` where it is none that the manual knows.
    pub(super) fn decode(record: &Record, features: &SmmuV3Features) -> Option<Self> {
        let [first, second, address, _] = *record;
        let number = u32::try_from(first & event::NUMBER).unwrap_or(0);
        let (reason, fields) = reason(number, address, features)?;
        let stalls = fields == Fields::Stall && features.stalls != StallModel::Terminate;
        let (iova, access) = match fields {
            Fields::None => (0, FaultAccess::Read),
            Fields::Access | Fields::Stall => (address, access(second)),
        };
        let report = FaultReport {
            stream: u32::try_from(first >> event::SID_SHIFT).unwrap_or(0),
            iova: Iova::new(iova),
            access,
            reason,
            state: match stalls && second & event::STALL != 0 {
                true => FaultState::Stalled,
                false => FaultState::Ended,
            },
        };
        Some(Self { report, tag: second & event::STAG })
    }

    /// What goes on with the access if it is stalled.
    pub(super) fn answer(&self, response: FaultResponse) -> Option<Command> {
        let response = match response {
            FaultResponse::Terminate => cmd::RESUME_ABORT,
            FaultResponse::Retry => cmd::RESUME_RETRY,
        };
        let stalled = self.report.state == FaultState::Stalled;
        stalled.then(|| Command::resume(self.report.stream, self.tag, response))
    }
}

/// What a record has besides its number and the stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fields {
    None,
    /// InputAddr, RnW and InD.
    Access,
    /// These, and Stall and STAG.
    Stall,
}

/// Why there is a record with that number, and what it has.
fn reason(number: u32, address: u64, features: &SmmuV3Features) -> Option<(FaultReason, Fields)> {
    Some(match number {
        event::C_BAD_STREAMID | event::F_STREAM_DISABLED => (FaultReason::Blocked, Fields::None),
        event::F_STE_FETCH | event::C_BAD_STE | event::F_CD_FETCH | event::C_BAD_CD => {
            (FaultReason::Tables, Fields::None)
        }
        event::F_WALK_EABT => (FaultReason::Tables, Fields::Access),
        event::F_TRANSLATION => (FaultReason::Translation, Fields::Stall),
        // What went in was too large, or what came out.
        event::F_ADDR_SIZE if address > lg2::mask(features.output_bits) => {
            (FaultReason::Translation, Fields::Stall)
        }
        // No table of this project has a clear access flag.
        event::F_ADDR_SIZE | event::F_ACCESS => (FaultReason::Tables, Fields::Stall),
        event::F_PERMISSION => (FaultReason::Permission, Fields::Stall),
        event::F_UUT | event::F_TRANSL_FORBIDDEN | event::F_TLB_CONFLICT => {
            (FaultReason::Other(number), Fields::Access)
        }
        event::F_BAD_ATS_TREQ
        | event::C_BAD_SUBSTREAMID
        | event::F_CFG_CONFLICT
        | event::F_VMS_FETCH => (FaultReason::Other(number), Fields::None),
        _ => return None,
    })
}

fn access(word: u64) -> FaultAccess {
    match (word & event::RNW != 0, word & event::IND != 0) {
        (false, _) => FaultAccess::Write,
        (true, false) => FaultAccess::Read,
        (true, true) => FaultAccess::Execute,
    }
}
