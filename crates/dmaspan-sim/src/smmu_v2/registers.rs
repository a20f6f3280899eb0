//! Reads and writes of the registers.

use dmaspan::lg2;

use super::bank::BankType;
use super::config::StreamMatchSupport;
use super::spec::{bank, fsr, gfsr, global0, global1, halves, joined};
use super::stall::Outcome;
use super::state::State;
use super::sync::Origin;

/// A register, by the space that it is in and its offset there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RegisterPlace {
    space: RegisterSpace,
    offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegisterSpace {
    Global0,
    Global1,
    Bank(usize),
}

/// An access to what is no register, or of the wrong width or direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Undefined;

impl RegisterPlace {
    /// The sync whose write or status this is.
    pub(super) fn sync(self) -> Option<Origin> {
        match (self.space, self.offset) {
            (RegisterSpace::Global0, global0::TLBGSYNC | global0::TLBGSTATUS) => {
                Some(Origin::Global)
            }
            (RegisterSpace::Bank(number), bank::TLBSYNC | bank::TLBSTATUS) => {
                Some(Origin::Bank(number))
            }
            _ => None,
        }
    }

    /// The register of 64 bits that this is in, and which half of it.
    fn wide(self) -> (Self, usize) {
        let half = usize::from(self.offset & 0b100 != 0);
        (Self { offset: self.offset & !0b111, ..self }, half)
    }
}

/// The number of a register in an array that begins at `base`.
fn number(offset: u64, base: u64) -> Option<usize> {
    usize::try_from(offset.checked_sub(base)? / 4).ok()
}

impl State {
    /// The register at an offset of the SMMU (IHI 0062, "The SMMU address space").
    pub(super) fn place(&self, offset: u64) -> Option<RegisterPlace> {
        let page_lg2 = self.config.page_size.lg2();
        let space = match offset >> page_lg2 {
            0 => RegisterSpace::Global0,
            1 => RegisterSpace::Global1,
            page => {
                let number = usize::try_from(page.checked_sub(1 << self.config.pages_lg2)?).ok()?;
                self.banks.get(number).map(|_| RegisterSpace::Bank(number))?
            }
        };
        Some(RegisterPlace { space, offset: offset & lg2::mask(page_lg2) })
    }

    pub(super) fn read_narrow(&mut self, place: RegisterPlace) -> Result<u32, Undefined> {
        let (wide, half) = place.wide();
        if let Some(value) = self.wide_register(wide) {
            return Ok(halves(*value)[half]);
        }
        if let Some(value) = self.plain_register(place) {
            return Ok(*value);
        }
        let value = match place.space {
            RegisterSpace::Global0 => self.read_global0(place.offset),
            RegisterSpace::Global1 => None,
            RegisterSpace::Bank(number) => self.read_bank(number, place.offset),
        };
        value.ok_or(Undefined)
    }

    pub(super) fn write_narrow(
        &mut self,
        place: RegisterPlace,
        value: u32,
    ) -> Result<(), Undefined> {
        let (wide, half) = place.wide();
        if let Some(register) = self.wide_register(wide) {
            let mut words = halves(*register);
            words[half] = value;
            *register = joined(words);
            return Ok(());
        }
        let written = match place.space {
            RegisterSpace::Global0 => self.write_global0(place.offset, value),
            RegisterSpace::Global1 => self.write_global1(place.offset, value),
            RegisterSpace::Bank(number) => self.write_bank(number, place.offset, value),
        };
        if written.is_some() {
            return Ok(());
        }
        *self.plain_register(place).ok_or(Undefined)? = value;
        Ok(())
    }

    pub(super) fn read_wide(&mut self, place: RegisterPlace) -> Result<u64, Undefined> {
        self.wide_register(place).map(|register| *register).ok_or(Undefined)
    }

    pub(super) fn write_wide(&mut self, place: RegisterPlace, value: u64) -> Result<(), Undefined> {
        if let Some(register) = self.wide_register(place) {
            *register = value;
            return Ok(());
        }
        let RegisterSpace::Bank(number) = place.space else { return Err(Undefined) };
        self.invalidate_wide(number, place.offset, value).ok_or(Undefined)
    }

    /// A register of 64 bits, which holds what is written.
    fn wide_register(&mut self, place: RegisterPlace) -> Option<&mut u64> {
        let RegisterSpace::Bank(number) = place.space else {
            let is_gfar = place.space == RegisterSpace::Global0 && place.offset == global0::GFAR;
            return is_gfar.then_some(&mut self.gfar);
        };
        let registers = self.banks.get_mut(number)?;
        let is_stage2 = registers.kind() == BankType::Two;
        match place.offset {
            bank::TTBR0 => Some(&mut registers.ttbr[0]),
            bank::TTBR1 if !is_stage2 => Some(&mut registers.ttbr[1]),
            bank::FAR => Some(&mut registers.far),
            bank::IPAFAR if is_stage2 => Some(&mut registers.ipafar),
            _ => None,
        }
    }

    /// A register of 32 bits that can be read without an effect, and holds what is written where
    /// nothing else is said of its writes.
    fn plain_register(&mut self, place: RegisterPlace) -> Option<&mut u32> {
        let offset = place.offset;
        match place.space {
            RegisterSpace::Global0 => match offset {
                global0::CR0 => Some(&mut self.cr0),
                global0::CR2 => Some(&mut self.cr2),
                global0::ACR => Some(&mut self.acr),
                global0::GFSR => Some(&mut self.gfsr),
                global0::GFSYNR0 => Some(&mut self.gfsynr[0]),
                global0::GFSYNR1 => Some(&mut self.gfsynr[1]),
                global0::S2CR.. => self.s2cr.get_mut(number(offset, global0::S2CR)?),
                _ => {
                    let number = self.smr_number(offset)?;
                    self.smr.get_mut(number)
                }
            },
            RegisterSpace::Global1 => {
                let base = lg2::align_down(offset, 10);
                let registers = self.banks.get_mut(number(offset, base)?)?;
                match base {
                    global1::CBAR => Some(&mut registers.cbar),
                    global1::CBFRSYNRA => Some(&mut registers.frsynra),
                    global1::CBA2R => Some(&mut registers.cba2r),
                    _ => None,
                }
            }
            RegisterSpace::Bank(number) => {
                let registers = self.banks.get_mut(number)?;
                let is_stage2 = registers.kind() == BankType::Two;
                match offset {
                    bank::SCTLR => Some(&mut registers.sctlr),
                    bank::ACTLR => Some(&mut registers.actlr),
                    bank::TCR => Some(&mut registers.tcr),
                    bank::FSR => Some(&mut registers.fsr),
                    bank::FSYNR0 => Some(&mut registers.fsynr0),
                    bank::TCR2 if !is_stage2 => Some(&mut registers.tcr2),
                    bank::CONTEXTIDR if !is_stage2 => Some(&mut registers.contextidr),
                    bank::MAIR0 if !is_stage2 => Some(&mut registers.mair[0]),
                    bank::MAIR1 if !is_stage2 => Some(&mut registers.mair[1]),
                    _ => None,
                }
            }
        }
    }

    fn read_global0(&mut self, offset: u64) -> Option<u32> {
        match offset {
            global0::ID0..=global0::ID7 => self.config.identification((offset - global0::ID0) / 4),
            // IMPLEMENTATION DEFINED.
            global0::GFSYNR2 => Some(0),
            global0::TLBGSTATUS => Some(self.sync_status(Origin::Global)),
            _ => None,
        }
    }

    fn smr_number(&self, offset: u64) -> Option<usize> {
        match self.config.streams {
            StreamMatchSupport::Matching => number(offset, global0::SMR),
            StreamMatchSupport::Indexing => None,
        }
    }

    fn write_global0(&mut self, offset: u64, value: u32) -> Option<()> {
        match offset {
            global0::CR0 => self.set_cr0(value),
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
            global0::GFSYNR2 => {}
            global0::TLBIVMID | global0::TLBIALLNSNH | global0::TLBIALLH => {
                self.invalidate_global(offset, value);
            }
            global0::TLBGSYNC => self.sync(Origin::Global),
            global0::S2CR.. => {
                let writable = self.s2cr_writable();
                *self.s2cr.get_mut(number(offset, global0::S2CR)?)? = value & writable;
            }
            _ => {
                let (number, writable) = (self.smr_number(offset)?, self.smr_writable());
                *self.smr.get_mut(number)? = value & writable;
            }
        }
        Some(())
    }

    fn write_global1(&mut self, offset: u64, value: u32) -> Option<()> {
        let banks = self.banks.len();
        let find = |base| number(offset, base).filter(|number| *number < banks);
        match offset {
            global1::CBA2R.. => self.set_cba2r(find(global1::CBA2R)?, value),
            global1::CBFRSYNRA.. => return None,
            _ => self.set_cbar(find(global1::CBAR)?, value),
        }
        Some(())
    }

    fn read_bank(&mut self, number: usize, offset: u64) -> Option<u32> {
        match offset {
            // IMPLEMENTATION DEFINED.
            bank::FSYNR1 => Some(0),
            bank::TLBSTATUS => Some(self.sync_status(Origin::Bank(number))),
            _ => None,
        }
    }

    fn write_bank(&mut self, number: usize, offset: u64, value: u32) -> Option<()> {
        let registers = self.banks.get_mut(number)?;
        match offset {
            bank::RESUME => {
                let retry = value & 1 == 0;
                registers.stalls.resume(if retry { Outcome::Retry } else { Outcome::Terminate });
                registers.fsr &= !fsr::SS;
            }
            bank::FSR => self.clear_fsr(number, value),
            bank::FSRRESTORE => {
                let kept = registers.fsr & fsr::SS;
                registers.fsr = value & (fsr::FAULTS | fsr::FORMAT) | kept;
            }
            bank::FSYNR1 => {}
            bank::TLBSYNC => self.sync(Origin::Bank(number)),
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
