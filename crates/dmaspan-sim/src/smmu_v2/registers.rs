//! Reads and writes of the registers.

use super::bank::BankType;
use super::config::StreamMatchSupport;
use super::spec::{bank, fsr, gfsr, global0, global1, halves, joined};
use super::stall::Outcome;
use super::state::State;
use super::sync::Origin;

/// A register, by the space that it is in and its offset there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegisterPlace {
    Global0(u64),
    Global1(u64),
    Bank(usize, u64),
}

/// An access to what is no register, or of the wrong width or direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Undefined;

impl RegisterPlace {
    /// The sync whose write or status this is.
    pub(super) fn sync(self) -> Option<Origin> {
        match self {
            Self::Global0(global0::TLBGSYNC | global0::TLBGSTATUS) => Some(Origin::Global),
            Self::Bank(number, bank::TLBSYNC | bank::TLBSTATUS) => Some(Origin::Bank(number)),
            _ => None,
        }
    }

    /// The register of 64 bits that this is in, and which half of it.
    fn wide(self) -> (Self, usize) {
        let split = |offset: u64| (offset & !0b111, usize::from(offset & 0b100 != 0));
        match self {
            Self::Global0(offset) => {
                let (offset, half) = split(offset);
                (Self::Global0(offset), half)
            }
            Self::Global1(offset) => {
                let (offset, half) = split(offset);
                (Self::Global1(offset), half)
            }
            Self::Bank(number, offset) => {
                let (offset, half) = split(offset);
                (Self::Bank(number, offset), half)
            }
        }
    }
}

/// The number of a register in an array of `len` words.
fn number(offset: u64, base: u64, len: usize) -> Option<usize> {
    let number = usize::try_from(offset.checked_sub(base)? / 4).ok()?;
    (number < len).then_some(number)
}

impl State {
    /// The register at an offset of the SMMU (IHI 0062, "The SMMU address space").
    pub(super) fn place(&self, offset: u64) -> Option<RegisterPlace> {
        let page_lg2 = self.config.page_size.lg2();
        let (page, inside) = (offset >> page_lg2, offset & ((1 << page_lg2) - 1));
        match page {
            0 => Some(RegisterPlace::Global0(inside)),
            1 => Some(RegisterPlace::Global1(inside)),
            _ => {
                let number = usize::try_from(page.checked_sub(1 << self.config.pages_lg2)?).ok()?;
                (number < self.banks.len()).then_some(RegisterPlace::Bank(number, inside))
            }
        }
    }

    pub(super) fn read_narrow(&mut self, place: RegisterPlace) -> Result<u32, Undefined> {
        let (wide, half) = place.wide();
        if let Some(value) = self.read_wide(wide) {
            return Ok(halves(value)[half]);
        }
        let value = match place {
            RegisterPlace::Global0(offset) => self.read_global0(offset),
            RegisterPlace::Global1(offset) => self.read_global1(offset),
            RegisterPlace::Bank(number, offset) => self.read_bank(number, offset),
        };
        value.ok_or(Undefined)
    }

    pub(super) fn write_narrow(
        &mut self,
        place: RegisterPlace,
        value: u32,
    ) -> Result<(), Undefined> {
        let (wide, half) = place.wide();
        if let Some(old) = self.read_wide(wide) {
            let mut words = halves(old);
            words[half] = value;
            return self.write_wide(wide, joined(words));
        }
        let written = match place {
            RegisterPlace::Global0(offset) => self.write_global0(offset, value),
            RegisterPlace::Global1(offset) => self.write_global1(offset, value),
            RegisterPlace::Bank(number, offset) => self.write_bank(number, offset, value),
        };
        written.ok_or(Undefined)
    }

    /// A register of 64 bits that can be read.
    pub(super) fn read_wide(&self, place: RegisterPlace) -> Option<u64> {
        match place {
            RegisterPlace::Global0(global0::GFAR) => Some(self.gfar),
            RegisterPlace::Bank(number, offset) => {
                let registers = self.banks.get(number)?;
                let [ttbr0, ttbr1] = registers.ttbr;
                let is_stage2 = registers.kind() == BankType::Two;
                match offset {
                    bank::TTBR0 => Some(ttbr0),
                    bank::TTBR1 if !is_stage2 => Some(ttbr1),
                    bank::FAR => Some(registers.far),
                    bank::IPAFAR if is_stage2 => Some(registers.ipafar),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Writes a register of 64 bits. One that can be read can be written.
    pub(super) fn write_wide(&mut self, place: RegisterPlace, value: u64) -> Result<(), Undefined> {
        let readable = self.read_wide(place).is_some();
        match place {
            RegisterPlace::Global0(_) if readable => self.gfar = value,
            RegisterPlace::Bank(number, offset) if readable => {
                let registers = self.banks.get_mut(number).ok_or(Undefined)?;
                match offset {
                    bank::TTBR0 => registers.ttbr[0] = value,
                    bank::TTBR1 => registers.ttbr[1] = value,
                    bank::FAR => registers.far = value,
                    _ => registers.ipafar = value,
                }
            }
            RegisterPlace::Bank(number, offset) => {
                return self.invalidate_wide(number, offset, value).ok_or(Undefined);
            }
            RegisterPlace::Global0(_) | RegisterPlace::Global1(_) => return Err(Undefined),
        }
        Ok(())
    }

    fn read_global0(&mut self, offset: u64) -> Option<u32> {
        match offset {
            global0::CR0 => Some(self.cr0),
            global0::CR2 => Some(self.cr2),
            global0::ACR => Some(self.acr),
            global0::ID0..=global0::ID7 => self.config.identification((offset - global0::ID0) / 4),
            global0::GFSR => Some(self.gfsr),
            global0::GFSYNR0 => Some(self.gfsynr[0]),
            global0::GFSYNR1 => Some(self.gfsynr[1]),
            // IMPLEMENTATION DEFINED.
            global0::GFSYNR2 => Some(0),
            global0::TLBGSTATUS => Some(self.sync_status(Origin::Global)),
            global0::S2CR.. => {
                number(offset, global0::S2CR, self.s2cr.len()).map(|number| self.s2cr[number])
            }
            _ => self.smr_number(offset).map(|number| self.smr[number]),
        }
    }

    fn smr_number(&self, offset: u64) -> Option<usize> {
        match self.config.streams {
            StreamMatchSupport::Matching => number(offset, global0::SMR, self.smr.len()),
            StreamMatchSupport::Indexing => None,
        }
    }

    fn write_global0(&mut self, offset: u64, value: u32) -> Option<()> {
        match offset {
            global0::CR0 => self.set_cr0(value),
            global0::CR2 => self.cr2 = value,
            global0::ACR => self.acr = value,
            global0::GFSR => {
                let cleared = self.gfsr & value;
                self.gfsr &= !value;
                let back = self.storm(cleared);
                if back != 0 {
                    self.gfsr |= back;
                    self.gfar = self.rng.next();
                }
            }
            global0::GFSRRESTORE => self.gfsr = value & gfsr::ALL,
            global0::GFSYNR0 => self.gfsynr[0] = value,
            global0::GFSYNR1 => self.gfsynr[1] = value,
            global0::GFSYNR2 => {}
            global0::TLBIVMID | global0::TLBIALLNSNH | global0::TLBIALLH => {
                self.invalidate_global(offset, value);
            }
            global0::TLBGSYNC => self.sync(Origin::Global),
            global0::S2CR.. => {
                let number = number(offset, global0::S2CR, self.s2cr.len())?;
                self.s2cr[number] = value & self.s2cr_writable();
            }
            _ => {
                let number = self.smr_number(offset)?;
                self.smr[number] = value & self.smr_writable();
            }
        }
        Some(())
    }

    fn read_global1(&self, offset: u64) -> Option<u32> {
        let find = |base| number(offset, base, self.banks.len()).map(|at| &self.banks[at]);
        match offset {
            global1::CBA2R.. => find(global1::CBA2R).map(|bank| bank.cba2r),
            global1::CBFRSYNRA.. => find(global1::CBFRSYNRA).map(|bank| bank.frsynra),
            _ => find(global1::CBAR).map(|bank| bank.cbar),
        }
    }

    fn write_global1(&mut self, offset: u64, value: u32) -> Option<()> {
        let banks = self.banks.len();
        let find = |base| number(offset, base, banks);
        match offset {
            global1::CBA2R.. => self.set_cba2r(find(global1::CBA2R)?, value),
            global1::CBFRSYNRA.. => self.banks[find(global1::CBFRSYNRA)?].frsynra = value,
            _ => self.set_cbar(find(global1::CBAR)?, value),
        }
        Some(())
    }

    fn read_bank(&mut self, number: usize, offset: u64) -> Option<u32> {
        let registers = self.banks.get(number)?;
        let is_stage2 = registers.kind() == BankType::Two;
        match offset {
            bank::SCTLR => Some(registers.sctlr),
            bank::ACTLR => Some(registers.actlr),
            bank::TCR => Some(registers.tcr),
            bank::FSR => Some(registers.fsr),
            bank::FSYNR0 => Some(registers.fsynr0),
            // IMPLEMENTATION DEFINED.
            bank::FSYNR1 => Some(0),
            bank::TLBSTATUS => Some(self.sync_status(Origin::Bank(number))),
            bank::TCR2 if !is_stage2 => Some(registers.tcr2),
            bank::CONTEXTIDR if !is_stage2 => Some(registers.contextidr),
            bank::MAIR0 if !is_stage2 => Some(registers.mair[0]),
            bank::MAIR1 if !is_stage2 => Some(registers.mair[1]),
            _ => None,
        }
    }

    fn write_bank(&mut self, number: usize, offset: u64, value: u32) -> Option<()> {
        let registers = self.banks.get_mut(number)?;
        let is_stage2 = registers.kind() == BankType::Two;
        match offset {
            bank::SCTLR => registers.sctlr = value,
            bank::ACTLR => registers.actlr = value,
            bank::RESUME => {
                let retry = value & 1 == 0;
                registers.stalls.resume(if retry { Outcome::Retry } else { Outcome::Terminate });
                registers.fsr &= !fsr::SS;
            }
            bank::TCR => registers.tcr = value,
            bank::FSR => self.clear_fsr(number, value),
            bank::FSRRESTORE => {
                let kept = registers.fsr & fsr::SS;
                registers.fsr = value & (fsr::FAULTS | fsr::FORMAT) | kept;
            }
            bank::FSYNR0 => registers.fsynr0 = value,
            bank::FSYNR1 => {}
            bank::TLBSYNC => self.sync(Origin::Bank(number)),
            bank::TCR2 if !is_stage2 => registers.tcr2 = value,
            bank::CONTEXTIDR if !is_stage2 => registers.contextidr = value,
            bank::MAIR0 if !is_stage2 => registers.mair[0] = value,
            bank::MAIR1 if !is_stage2 => registers.mair[1] = value,
            _ => return self.invalidate_narrow(number, offset, value),
        }
        Some(())
    }

    /// Ones clear the fault bits that they are written to. SS and FORMAT are not cleared so.
    fn clear_fsr(&mut self, number: usize, value: u32) {
        let Some(registers) = self.banks.get_mut(number) else { return };
        let cleared = registers.fsr & value & fsr::FAULTS;
        registers.fsr &= !cleared;
        let back = self.storm(cleared);
        if back != 0 {
            let address = self.rng.next();
            if let Some(registers) = self.banks.get_mut(number) {
                registers.fsr |= back;
                registers.far = address;
            }
        }
    }
}
