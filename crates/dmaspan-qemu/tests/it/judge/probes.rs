//! DMA at an address, and what must come of it.

use dmaspan::iommu::{FaultAccess, FaultReason};
use dmaspan::{Iova, PhysAddr, Prot};
use dmaspan_qemu::{DmaRefused, TestDev};
use dmaspan_sim::bus::Bus as _;
use dmaspan_sim::walker::{Access, FaultKind, Walker as _};

use crate::judge::engine::{COPIES, Disagreement, Judge, Judged, Judges, agree};
use crate::judge::rig::{Rig, Strict as _, WRITERS};

/// As many addresses are used again.
const WARM: usize = 32;
/// Faults are reported by the page of this size at least.
const REPORTED: u64 = !0xfff;

/// What an access must come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Lands(PhysAddr),
    /// Refused, since nothing is mapped or the stream is blocked.
    Fault(FaultReason),
    /// Refused, since what is mapped may only be read.
    ReadOnly(FaultReason),
    /// Refused, and no word of it.
    Silence,
}

impl<R: Rig> Judge<R> {
    /// Lets devices at each place: all that write, and now and then the one that reads.
    pub(crate) fn probe_all(&mut self, places: &[Iova]) -> Judged {
        for &iova in places {
            for writer in 0..WRITERS.len() {
                self.write_at(writer, iova)?;
            }
            if self.rng.below(4) == 0 {
                self.read_at(iova)?;
            }
            if !self.warm.contains(&iova) {
                self.warm.push_back(iova);
                self.warm.truncate(WARM);
            }
        }
        if self.warm.len() == WARM && self.rng.below(4) == 0 {
            self.warm.pop_front();
        }
        Ok(())
    }

    /// What the models say of an access, after the walker was asked the same.
    fn expected(&mut self, stream: usize, iova: Iova, access: Access) -> Judged<Expected> {
        let Some(side) = self.streams[stream].to else {
            return Ok(R::blocked().map_or(Expected::Silence, Expected::Fault));
        };
        let side = &self.sides[side];
        let needed = match access {
            Access::Read => Prot::READ,
            Access::Write => Prot::WRITE,
        };
        let mapped = side.model.lookup(iova);
        if self.judges == Judges::HardwareAlone {
            return Ok(match mapped {
                Some((paddr, prot)) if prot.contains(needed) => Expected::Lands(paddr),
                Some(_) => Expected::ReadOnly(R::read_only()),
                None => Expected::Fault(R::unmapped()),
            });
        }
        let walker = self.rig.walker(&side.domain);
        let tables = side.domain.memory();
        let walked = walker.walk(tables, iova, access);
        let expected = match mapped {
            Some((paddr, prot)) if prot.contains(needed) => {
                let found = walker.strict(tables, iova);
                if let Ok(leaf) = &found {
                    *self.reached.entry(leaf.group_lg2).or_default() += 1;
                }
                let found = found.map(|leaf| leaf.paddr);
                agree!(
                    walked.is_ok() && found == Ok(paddr),
                    "the walker says {found:x?} of {iova}, not {paddr}"
                );
                Expected::Lands(paddr)
            }
            mapped => {
                let (expected, needed) = match mapped {
                    Some(_) => (Expected::ReadOnly(R::read_only()), FaultKind::Permission),
                    None => (Expected::Fault(R::unmapped()), FaultKind::Translation),
                };
                let faults = matches!(walked, Err(fault) if fault.kind == needed);
                agree!(faults, "the walker says {walked:x?} of {iova}, not {needed:?}");
                expected
            }
        };
        Ok(expected)
    }

    /// A write of 4 bytes, by the device of that stream.
    pub(crate) fn write_at(&mut self, writer: usize, iova: Iova) -> Judged {
        self.in_access = true;
        self.write_within(writer, iova)?;
        self.in_access = false;
        Ok(())
    }

    fn write_within(&mut self, writer: usize, iova: Iova) -> Judged {
        let expected = self.expected(writer, iova, Access::Write)?;
        let mapped = self.streams[writer].to.and_then(|side| self.sides[side].model.lookup(iova));
        // Where nothing is mapped the device is told of memory that stays as it is.
        let paddr = mapped.map_or(self.memory.paddr(), |(paddr, _)| paddr);
        let before = self.rng.next().to_ne_bytes();
        self.set(paddr, &before[..4])?;
        let said = self.writers[writer].write(iova.get(), paddr, 4);
        let found = self.word(paddr)?;
        let written = TestDev::WRITTEN.to_le_bytes();
        match expected {
            Expected::Lands(_) => agree!(
                said.is_ok() && found == written,
                "a write to {iova} did not land at {paddr}: {said:x?}, found {found:x?}, {:?}",
                self.reports(writer)
            ),
            _ => agree!(
                said == Err(DmaRefused::ON_THE_WAY) && found == before[..4],
                "a write to {iova} went through, which is {expected:?}: {said:x?}, found {found:x?}"
            ),
        }
        self.heard(writer, iova, FaultAccess::Write, expected)
    }

    /// A read of 4 bytes by the copier, which writes them to the mailbox.
    fn read_at(&mut self, iova: Iova) -> Judged {
        self.in_access = true;
        self.read_within(iova)?;
        self.in_access = false;
        Ok(())
    }

    fn read_within(&mut self, iova: Iova) -> Judged {
        // It could not tell.
        if self.streams[COPIES].to.is_none() {
            return Ok(());
        }
        let expected = self.expected(COPIES, iova, Access::Read)?;
        let there = self.rng.next().to_ne_bytes();
        if let Expected::Lands(paddr) = expected {
            self.set(paddr, &there[..4])?;
        }
        self.mailbox.set_word(0, 0);
        self.copier.read(iova.get(), 4);
        self.heard(COPIES, iova, FaultAccess::Read, expected)?;
        self.copier.write(self.mailbox_iova.get(), 4);
        self.heard(COPIES, iova, FaultAccess::Write, Expected::Lands(self.mailbox.paddr()))?;
        let read = self.word(self.mailbox.paddr())?;
        if let Expected::Lands(paddr) = expected {
            agree!(read == there[..4], "a read of {iova}, at {paddr}, gave {read:x?}");
        }
        Ok(())
    }

    /// What was reported, and nothing else.
    fn heard(
        &mut self,
        stream: usize,
        iova: Iova,
        access: FaultAccess,
        expected: Expected,
    ) -> Judged {
        let (reason, silent) = match expected {
            Expected::Fault(reason) => (reason, false),
            Expected::ReadOnly(reason) => (reason, R::SILENT_WHEN_CACHED),
            // What is reported in spite of it is heard when the operation is over.
            Expected::Lands(_) | Expected::Silence => return Ok(()),
        };
        let reports = self.reports(stream);
        if silent && reports.is_empty() {
            return Ok(());
        }
        let id = self.streams[stream].id;
        let right = reports.iter().all(|report| {
            report.stream == id
                && (!R::NAMES_ADDRESSES || (report.iova.get() ^ iova.get()) & REPORTED == 0)
                && report.access == access
                && report.reason == reason
        });
        agree!(
            !reports.is_empty() && right,
            "{access:?} of {iova} by {id:#x} is {expected:?}, and reported was {reports:x?}"
        );
        Ok(())
    }

    /// Nothing was reported but what was expected.
    pub(crate) fn heard_all(&mut self) -> Judged {
        self.handle_faults();
        for stream in &self.streams {
            let reports = stream.heard.take();
            agree!(reports.is_empty(), "nothing was refused, and reported was {reports:x?}");
        }
        Ok(())
    }

    fn reports(&self, stream: usize) -> Vec<dmaspan::iommu::FaultReport> {
        self.handle_faults();
        self.streams[stream].heard.take()
    }

    fn handle_faults(&self) {
        let handled = self.rig.handle_faults();
        assert!(handled.malformed == 0 && handled.unclaimed == 0, "{handled:?}");
    }

    fn set(&self, paddr: PhysAddr, bytes: &[u8]) -> Judged {
        let ram = self.rig.pci().machine().ram();
        ram.write(paddr, bytes).map_err(|error| Disagreement(error.to_string()))
    }

    fn word(&self, paddr: PhysAddr) -> Judged<[u8; 4]> {
        let mut bytes = [0; 4];
        let ram = self.rig.pci().machine().ram();
        let read = ram.read(paddr, &mut bytes);
        read.map(|()| bytes).map_err(|error| Disagreement(error.to_string()))
    }
}
