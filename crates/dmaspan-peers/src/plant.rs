//! Wrong bits, put into this side's tables: each must be found.

use dmaspan::io_pgtable::{Format, Word};

use crate::compare::{Found, Sides, registers};
use crate::formats::{Subject, Told, one_of};
use crate::run::Run;

impl<S: Subject> Run<'_, S> {
    /// Flips each bit of a leaf, of a link and of the registers, one at a time, and returns how
    /// many it flipped. Only a link's mark for software may go unnoticed, where links have one.
    pub(crate) fn plant(&mut self, found: &Found) -> Result<u64, String> {
        let mut planted = 0;
        let marked = <S::Format as Format>::WRITTEN_BACK.bits();
        for (entries, spared) in [(&found.leaves, 0), (&found.links, marked)] {
            if entries.is_empty() {
                continue;
            }
            let at = one_of(&mut self.rng, entries);
            let bits = 8u32 << <S::Format as Format>::Word::LG2_BYTES;
            for bit in (0..bits).filter(|bit| spared & 1 << bit == 0) {
                self.plant_one(at, bit)?;
                planted += 1;
            }
        }
        Ok(planted + self.plant_registers()?)
    }

    /// Flips a bit of the entry at `at`, and back again.
    fn plant_one(&mut self, at: u64, bit: u32) -> Result<(), String> {
        let bits = 1u64 << (bit + if at & 4 == 0 { 0 } else { 32 });
        let view = self.setup.view();
        let memory = self.table.memory().clone();
        memory.flip(view, at, bits)?;
        let Self { setup, linux, table, model, .. } = self;
        let compared = Sides::<S> { setup, linux, table, model, view }.compare();
        memory.flip(view, at, bits)?;
        match compared {
            Ok(_) => Err(format!("a wrong bit {bit} of the entry at {at:#x} was not found")),
            Err(_) => Ok(()),
        }
    }

    fn plant_registers(&mut self) -> Result<u64, String> {
        let words = self.linux.root()?;
        let (setup, format, at) = (&self.setup, self.table.format(), self.table.root_and_level());
        let mut met = self.counts.met;
        let all = S::registers(Told { setup, format, at, root: &words, met: &mut met });
        let mut planted = 0;
        for n in 0..all.len() {
            for bit in 0..64 {
                let mut wrong = all.clone();
                wrong[n].ours ^= 1 << bit;
                if registers(&wrong).is_ok() {
                    return Err(format!("a wrong bit {bit} of {} was not found", all[n].name));
                }
                planted += 1;
            }
        }
        Ok(planted)
    }
}
