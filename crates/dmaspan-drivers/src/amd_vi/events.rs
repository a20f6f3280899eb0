//! The event log and the hardware event registers (2.5).

use dmaspan::iommu::{FaultAccess, FaultReason, FaultReport, FaultState, HardwareError};
use dmaspan::{Iova, lg2};
use lock_api::{Mutex, RawMutex};

use super::AmdVi;
use super::spec::{
    Access, BUFFER_LENGTH_SHIFT, Event, LG2_RECORD, control, hardware_event, register, status,
};
use crate::faults::Handled;
use crate::host::{Host, Structure, gone, poll};
use crate::log;
use crate::mmio::Mmio;
use crate::structure::Words;

pub(super) struct Events<L, S> {
    /// The record to be read next. Positions count records; a place in the log is one modulo its
    /// length.
    head: Mutex<L, u64>,
    log: Words<S>,
    lg2_entries: u32,
}

/// Whether a record that hardware announced and has not written is waited for. It may be late, so
/// Linux waits, too (drivers/iommu/amd/iommu.c, `iommu_print_event`); once a look, since one that
/// does not come at all takes as long as a poll does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LateRecord {
    IsWaitedFor,
    WasWaitedFor,
}

impl<L: RawMutex, S: Structure> Events<L, S> {
    pub(super) fn new(log: Words<S>, lg2_entries: u32) -> Self {
        Self { head: Mutex::new(0), log, lg2_entries }
    }

    /// Tells hardware where the log is; it is empty. Nothing is logged meanwhile.
    pub(super) fn program(&self, registers: &impl Mmio) {
        let length = u64::from(self.lg2_entries) << BUFFER_LENGTH_SHIFT;
        registers.write64(register::EVENT_BASE, self.log.paddr().get() | length);
        registers.write64(register::EVENT_HEAD, 0);
        registers.write64(register::EVENT_TAIL, 0);
    }

    /// The position of the record that hardware writes next.
    fn tail(&self, registers: &impl Mmio) -> Result<u64, HardwareError> {
        // Under the lock: what others take out meanwhile is not waited to come round again.
        let head = self.head.lock();
        let tail = registers.read64(register::EVENT_TAIL);
        let index = tail >> LG2_RECORD;
        if tail == u64::MAX {
            Err(gone(tail))
        } else if index > lg2::mask(self.lg2_entries) {
            let what = "the tail of the event log points outside of the log";
            Err(HardwareError { what, status: tail })
        } else {
            Ok(*head + self.place(index.wrapping_sub(*head)))
        }
    }

    /// The place of a position.
    fn place(&self, position: u64) -> u64 {
        position & lg2::mask(self.lg2_entries)
    }

    /// Takes the record at the head out, if that is before the tail.
    fn take(&self, host: &impl Host, tail: u64, late: &mut LateRecord) -> Option<Event> {
        let mut head = self.head.lock();
        if *head >= tail {
            return None;
        }
        // The log has this place: its length is that of the mask.
        let at = usize::try_from(self.place(*head) * 2).unwrap_or(usize::MAX);
        let read = || {
            let event = Event::decode([self.log.get(at), self.log.get(at.saturating_add(1))]);
            (event != Event::Nothing).then_some(event)
        };
        let event = match late {
            LateRecord::IsWaitedFor => poll(host, read),
            LateRecord::WasWaitedFor => read(),
        };
        if event.is_none() {
            *late = LateRecord::WasWaitedFor;
        }
        // What is there when hardware comes round again is not taken for a record.
        self.log.set(at, 0);
        self.log.set(at.saturating_add(1), 0);
        *head += 1;
        Some(event.unwrap_or(Event::Nothing))
    }

    /// Gives hardware the room of what was taken out.
    fn give_room(&self, registers: &impl Mmio) {
        let head = self.head.lock();
        registers.write64(register::EVENT_HEAD, self.place(*head) << LG2_RECORD);
    }
}

impl<R: Mmio, H: Host> AmdVi<R, H> {
    /// Takes the events out of the log, at most as many as it has room for, and reports the faults
    /// among them to their streams. To be called when the IOMMU interrupts, or at times.
    ///
    /// Of an access that failed because a table could not be read, hardware does not say the
    /// address: it is reported with 0.
    ///
    /// # Context
    ///
    /// May run in an interrupt, and concurrently with itself. Does not allocate.
    ///
    /// # Errors
    ///
    /// [`HardwareError`] where the IOMMU is gone or its log is not where it should be, and where an
    /// event says that it refused a command; the call that waited for that one failed.
    pub fn handle_faults(&self) -> Result<Handled, HardwareError> {
        let mut handled = Handled::default();
        let mut refused = Ok(());
        let status = self.registers.read32(register::STATUS);
        if status == status::GONE {
            return Err(gone(status));
        }
        if status & status::EVENT_INTERRUPT != 0 {
            // Before the log is read, so that what comes later interrupts again.
            self.registers.write32(register::STATUS, status::EVENT_INTERRUPT);
        }
        let tail = self.events.tail(&self.registers)?;
        let mut late = LateRecord::IsWaitedFor;
        // At most as many as the log has: so far ahead is a tail.
        while let Some(event) = self.events.take(&self.host, tail, &mut late) {
            self.handle(event, &mut handled, &mut refused);
        }
        self.events.give_room(&self.registers);
        self.handle_hardware_event(&mut handled, &mut refused);
        if status & status::EVENT_OVERFLOW != 0 {
            handled.overflowed = true;
            self.restart_log();
        }
        handled.more = self.events.tail(&self.registers)? != tail;
        refused.map(|()| handled)
    }

    fn handle(&self, event: Event, handled: &mut Handled, refused: &mut Result<(), HardwareError>) {
        match event {
            Event::PageFault(access) => {
                let reason = self.reason(&access);
                self.report(&access, access.address, reason, handled);
            }
            Event::IllegalDeviceEntry(access) => {
                self.report(&access, access.address, FaultReason::Tables, handled);
            }
            Event::TableError(access) => self.report(&access, 0, FaultReason::Tables, handled),
            Event::Refused(access, code) => {
                self.report(&access, access.address, FaultReason::Other(code), handled);
            }
            Event::CommandError(at) => {
                let what = "the IOMMU refused the command at this address";
                log::warn!(
                    "the IOMMU refused the command {} at {at:#x}: all \
                     that was placed before has failed, and what it was to make hardware forget \
                     stays out of use",
                    self.commands.shown(at)
                );
                *refused = Err(HardwareError { what, status: at });
                self.commands.restart_stopped(&self.registers, &self.host, &self.control);
            }
            Event::InvalidationTimeout(at) => {
                let what = "a device did not answer the command at this address";
                log::warn!("a device did not answer an invalidation, the command at {at:#x}");
                *refused = Err(HardwareError { what, status: at });
            }
            Event::CounterZero => {}
            Event::Nothing => handled.malformed = handled.malformed.saturating_add(1),
        }
    }

    /// Why an access faulted. Whether the device is blocked, its entry says.
    fn reason(&self, access: &Access) -> FaultReason {
        /// IO_PAGE_FAULT, for what is none.
        const PAGE_FAULT: u32 = 2;
        if access.is_interrupt() {
            FaultReason::Other(PAGE_FAULT)
        } else if self.devices.is_closed(access.device) {
            FaultReason::Blocked
        } else if access.is_malformed() {
            FaultReason::Tables
        } else if access.lacks_permission() {
            FaultReason::Permission
        } else {
            FaultReason::Translation
        }
    }

    fn report(&self, access: &Access, iova: u64, reason: FaultReason, handled: &mut Handled) {
        let report = FaultReport {
            stream: access.device.into(),
            iova: Iova::new(iova),
            access: if access.is_write() { FaultAccess::Write } else { FaultAccess::Read },
            reason,
            state: FaultState::Ended,
        };
        // It has ended: there is nothing to answer.
        let _ = self.streams.report(&report, handled);
    }

    /// The record in registers, of what could not be logged (3.4, hardware event registers).
    fn handle_hardware_event(
        &self,
        handled: &mut Handled,
        refused: &mut Result<(), HardwareError>,
    ) {
        if !self.features.hardware_events {
            return;
        }
        let status = self.registers.read32(register::HARDWARE_EVENT_STATUS);
        if status & hardware_event::VALID == 0 || status == status::GONE {
            return;
        }
        let upper = self.registers.read64(register::HARDWARE_EVENT_UPPER);
        let lower = self.registers.read64(register::HARDWARE_EVENT_LOWER);
        handled.overflowed |= status & hardware_event::OVERFLOW != 0;
        let both = hardware_event::VALID | hardware_event::OVERFLOW;
        self.registers.write32(register::HARDWARE_EVENT_STATUS, both);
        self.handle(Event::decode([upper, lower]), handled, refused);
    }

    /// Has events logged again after there was no room (2.5, restarting the event log).
    fn restart_log(&self) {
        self.control.change(&self.registers, control::EVENT_LOG, 0);
        // Where it does not stop, it goes on: clearing the overflow is all that it needs then.
        poll(&self.host, || {
            (self.registers.read32(register::STATUS) & status::EVENT_RUN == 0).then_some(())
        });
        self.registers.write32(register::STATUS, status::EVENT_OVERFLOW);
        self.control.change(&self.registers, 0, control::EVENT_LOG);
    }
}
