//! The invariants of containers, checked after every operation.

use dmaspan::{PhysAddr, Prot};

use super::model::{Behind, MAX_MAPPINGS, Mapped};
use super::views::View;
use super::world::World;

impl<const BATCH: usize> World<BATCH> {
    /// All that is checked after an operation. Returns what does not depend on the size of batches.
    pub(crate) fn check(&mut self) -> Vec<u64> {
        let mut seen = self.check_info();
        self.check_pins(&mut seen);
        self.check_charges(&mut seen);
        self.check_translations();
        self.check_nothing_else();
        assert_eq!(self.memory.violations(), []);
        seen.extend(self.container.census().sizes().flat_map(|(lg2, count)| [lg2.into(), count]));
        seen
    }

    fn check_info(&self) -> Vec<u64> {
        let (info, model) = (self.container.info(), &self.model);
        let count = model.mapped.len() + model.gone.len();
        assert_eq!(self.container.mappings(), count);
        assert_eq!(info.mappings_left, (MAX_MAPPINGS - count) as u64);
        let found: Vec<_> = info
            .iova_ranges
            .iter()
            .map(|range| (range.start().get(), range.last().get()))
            .collect();
        assert_eq!(found, model.iova_ranges());
        assert_eq!(info.page_sizes, model.page_sizes());
        let attached: Vec<_> = self.attached.iter().map(|(id, _)| *id).collect();
        assert_eq!(info.domains, attached);
        assert_eq!(self.container.tracks_dirty(), model.tracking);
        let ranges = found.into_iter().flat_map(|(start, last)| [start, last]);
        ranges.chain([count as u64, info.page_sizes]).collect()
    }

    /// A frame has as many pins as there are mappings and pins of it.
    fn check_pins(&self, seen: &mut Vec<u64>) {
        let (pins, more) = self.model.pins();
        let mut pinned = 0;
        for &frame in self.model.users.iter().flat_map(|user| user.values()).filter_map(frame) {
            let found = self.memory.pins(PhysAddr::new(frame)).unwrap();
            let least = pins.get(&frame).copied().unwrap_or(0);
            let most = least + more.get(&frame).copied().unwrap_or(0);
            assert!((least..=most).contains(&found), "{frame:#x}: {found}, not {least}");
            seen.push(found.into());
            pinned += u64::from(least > 0);
        }
        if self.model.gone.is_empty() {
            // Both users have the same frames.
            assert_eq!(self.memory.pinned_frames(), pinned / 2);
        }
    }

    fn check_charges(&self, seen: &mut Vec<u64>) {
        for (owner, account) in self.accounts.iter().enumerate() {
            let (least, most) = self.model.charged(owner);
            let used = account.used();
            let pages = used >> self.model.g;
            // What was written of ten mappings is noted in less than a page.
            assert!(used == pages << self.model.g || self.model.tracking);
            assert!((least..=most).contains(&pages), "{pages}, not {least} to {most}");
            seen.push(used);
        }
    }

    /// Every domain leads where the model says, and permits what it says.
    fn check_translations(&self) {
        let g = self.model.g;
        for (_, view) in &self.attached {
            for at in view.stale() {
                let lost = self.model.overlapping(at >> g, 1).iter().any(|&(_, _, gone)| gone);
                assert!(lost, "an IOTLB has {at:#x}, which nothing maps");
            }
            assert!(self.leaky || view.stale_links() == 0);
            for (&first, mapped) in &self.model.mapped {
                let behind = mapped.pinned.as_deref().unwrap();
                let mut known = None;
                for (page, &behind) in (first..).zip(behind) {
                    let at = page << g;
                    // A leaf says where all of it is.
                    known = known.filter(|leaf: &super::views::Leaf| {
                        leaf.block.contains(dmaspan::Iova::new(at))
                    });
                    let fresh = || {
                        let leaf = view.walk(at)?;
                        let back = at - leaf.block.start().get();
                        Some(super::views::Leaf { paddr: leaf.paddr.wrapping_sub(back), ..leaf })
                    };
                    known = known.or_else(fresh);
                    let leads =
                        known.map(|leaf| leaf.paddr.wrapping_add(at - leaf.block.start().get()));
                    assert_eq!(leads, behind.paddr(), "{at:#x}");
                    if let Some(leaf) = known {
                        check_prot(mapped, behind, leaf.prot);
                    }
                }
                self.check_ends(view.as_ref(), first, behind);
            }
        }
    }

    /// Whether hardware has not confirmed that it forgot tables that are not there any more: then
    /// it may walk those, which are empty, and miss what is mapped anew.
    pub(crate) fn is_blind(&self, view: &dyn View) -> bool {
        self.leaky && view.stale_links() > 0
    }

    /// What devices find at the ends of a mapping, through caches that remember everything.
    fn check_ends(&self, view: &dyn View, first: u64, behind: &[Behind]) {
        if self.is_blind(view) {
            return;
        }
        let g = self.model.g;
        let last = behind.len() - 1;
        for n in [0, last / 2, last] {
            let at = (first + n as u64) << g;
            assert_eq!(view.translate(at).map(|leaf| leaf.paddr), behind[n].paddr());
        }
        for page in [first.checked_sub(1), Some(first + behind.len() as u64)] {
            if let Some(page) = page.filter(|page| self.model.overlapping(*page, 1).is_empty()) {
                assert_eq!(view.translate(page << g), None, "nothing is around a mapping");
            }
        }
    }

    /// What was unmapped is reached by no device, and what is lost is pinned if it is.
    fn check_nothing_else(&mut self) {
        let views = self.watch.views.lock();
        for page in std::mem::take(&mut self.graves) {
            for view in views.iter() {
                assert_eq!(view.walk(page << self.model.g), None, "{page:#x}");
                assert_eq!(view.translate(page << self.model.g), None, "{page:#x}");
            }
        }
        let lost = self.model.gone.iter();
        let lost = lost.flat_map(|(first, gone)| *first..first + gone.was.user.count);
        for page in lost {
            for leaf in views.iter().filter_map(|view| view.translate(page << self.model.g)) {
                let pins = self.memory.pins(PhysAddr::new(leaf.paddr));
                assert!(pins != Some(0), "{:#x} is reached and not pinned", leaf.paddr);
            }
        }
        if !self.leaky && self.model.mapped.is_empty() {
            assert!(views.iter().all(|view| view.tables() == 1), "only roots are left");
        }
    }
}

fn frame(behind: &Behind) -> Option<&u64> {
    match behind {
        Behind::Memory(frame) | Behind::ReadOnly(frame) => Some(frame),
        Behind::Device(_) | Behind::Hole => None,
    }
}

fn check_prot(mapped: &Mapped, behind: Behind, found: Prot) {
    assert_eq!(found.contains(Prot::WRITE), mapped.prot.contains(Prot::WRITE));
    assert!(found.contains(Prot::READ));
    if let Behind::Device(_) = behind {
        assert!(!found.contains(Prot::CACHE) || !found.contains(Prot::MMIO));
    }
}
