//! The registers that invalidate (IHI 0062, "TLB maintenance operations").

use dmaspan::{Iova, lg2};

use super::bank::BankType;
use super::spec::{bank, cr0, global0, halves, joined, low16, low16_of_u64};
use super::state::State;
use super::sync::Origin;
use super::tlb::{Invalidation, Levels, Which};

/// Bits of the address in the argument of AArch64: VA\[55:12\].
const VA_LG2: u32 = 44;
/// Bits of the address in the argument of stage 2: IPA\[47:12\].
const IPA_LG2: u32 = 36;
/// Arguments have addresses of pages of 4 KiB, whatever the granule.
const PAGE_LG2: u32 = 12;

/// The place of an invalidation by address in [`Bank::upper`](super::bank::Bank).
fn by_address(offset: u64) -> Option<usize> {
    let is_one = |register: &u64| *register == offset;
    let all = [
        bank::TLBIVA,
        bank::TLBIVAA,
        bank::TLBIVAL,
        bank::TLBIVAAL,
        bank::TLBIIPAS2,
        bank::TLBIIPAS2L,
    ];
    all.iter().position(is_one)
}

impl State {
    /// Whether a bank has this register: stage 1 is invalidated by VA in banks of stage 1, and
    /// stage 2 by IPA in those of stage 2.
    fn has_invalidation(&self, number: usize, offset: u64) -> bool {
        let is_stage2 = self.banks[number].kind() == BankType::Two;
        matches!(offset, bank::TLBIIPAS2 | bank::TLBIIPAS2L) == is_stage2
    }

    /// An invalidation by address, written with one access of 64 bits. AArch32's arguments by VA
    /// have 32 bits, and such an access is none.
    pub(super) fn invalidate_wide(&mut self, number: usize, offset: u64, value: u64) -> Option<()> {
        by_address(offset).filter(|_| self.has_invalidation(number, offset))?;
        let registers = self.banks.get(number)?;
        if registers.kind() != BankType::Two && !registers.is_aarch64() {
            return None;
        }
        self.invalidate_address(number, offset, value);
        Some(())
    }

    /// An invalidation written with an access of 32 bits. The upper half of an argument of 64 bits
    /// waits for the lower one, which begins the operation.
    pub(super) fn invalidate_narrow(
        &mut self,
        number: usize,
        offset: u64,
        value: u32,
    ) -> Option<()> {
        let base = offset & !0b111;
        if let Some(place) = by_address(base).filter(|_| self.has_invalidation(number, base)) {
            let registers = self.banks.get_mut(number)?;
            let is_wide = registers.kind() == BankType::Two || registers.is_aarch64();
            if offset != base {
                *registers.upper.get_mut(place).filter(|_| is_wide)? = value;
                return Some(());
            }
            let upper = registers.upper.get_mut(place).map(std::mem::take)?;
            self.invalidate_address(number, offset, joined([value, upper]));
            return Some(());
        }
        let registers = self.banks.get(number)?;
        let commands = &mut self.counters.commands;
        let which = match offset {
            _ if registers.kind() == BankType::Two => return None,
            bank::TLBIASID => {
                commands.by_asid += 1;
                Which::Asid(low16(value) & registers.asid_mask())
            }
            bank::TLBIALL => {
                commands.all_of_bank += 1;
                Which::One
            }
            _ => return None,
        };
        let vmid = Some(self.vmid(number));
        let what = Invalidation { vmid, which, at: None, levels: Levels::All };
        self.accept(Origin::Bank(number), what);
        Some(())
    }

    fn invalidate_address(&mut self, number: usize, offset: u64, argument: u64) {
        let registers = &self.banks[number];
        let (at, asid) = match (registers.kind(), registers.is_aarch64()) {
            (BankType::Two, _) => ((argument & lg2::mask(IPA_LG2)) << PAGE_LG2, 0),
            (_, true) => {
                let va = (argument & lg2::mask(VA_LG2)) << PAGE_LG2;
                let top = VA_LG2 + PAGE_LG2;
                let negative = va & lg2::size(top - 1) != 0;
                let va = if negative { va | !lg2::mask(top) } else { va };
                (va, low16_of_u64(argument >> 48) & registers.asid_mask())
            }
            (_, false) => {
                let [low, _] = halves(argument);
                (lg2::align_down(low.into(), PAGE_LG2), low16(low) & 0xff)
            }
        };
        let commands = &mut self.counters.commands;
        let (count, which, levels) = match offset {
            bank::TLBIVA => (&mut commands.by_va, Which::AsidAndGlobal(asid), Levels::All),
            bank::TLBIVAA => (&mut commands.by_va_all_asids, Which::One, Levels::All),
            bank::TLBIVAL => (&mut commands.by_va_last, Which::AsidAndGlobal(asid), Levels::Last),
            bank::TLBIVAAL => (&mut commands.by_va_all_asids_last, Which::One, Levels::Last),
            bank::TLBIIPAS2 => (&mut commands.by_ipa, Which::Two, Levels::All),
            _ => (&mut commands.by_ipa_last, Which::Two, Levels::Last),
        };
        *count += 1;
        let vmid = Some(self.vmid(number));
        let what = Invalidation { vmid, which, at: Some(Iova::new(at)), levels };
        self.accept(Origin::Bank(number), what);
    }

    /// SMMU_TLBIVMID, SMMU_TLBIALLNSNH and SMMU_TLBIALLH. No context is of the hypervisor here, so
    /// the last one forgets nothing.
    pub(super) fn invalidate_global(&mut self, offset: u64, value: u32) {
        let commands = &mut self.counters.commands;
        let what = match offset {
            global0::TLBIVMID => {
                commands.by_vmid += 1;
                let mask = if self.cr0 & cr0::VMID16EN == 0 { 0xff } else { 0xffff };
                Invalidation { vmid: Some(low16(value) & mask), ..Invalidation::EVERYTHING }
            }
            global0::TLBIALLNSNH => {
                commands.all += 1;
                Invalidation::EVERYTHING
            }
            _ => {
                commands.all_hyp += 1;
                return;
            }
        };
        self.accept(Origin::Global, what);
    }
}
