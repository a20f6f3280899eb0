//! The work of devices, emulated and others, and the moves of users' memory.

use dmaspan::container::ExternalPin;
use dmaspan::pin::Dirty;
use dmaspan::{Errno, Iova, Prot, Span};

use super::model::{Behind, Held, Mapped, Pages};
use super::script::{Op, Trouble};
use super::steps::Outcome;
use super::world::World;

/// Where in a page something is written.
const OFFSET: u64 = 0x48;

impl<const BATCH: usize> World<BATCH> {
    fn page_of(&self, n: u8, page: u16) -> Option<(u64, u64)> {
        let first = self.nth(n)?;
        Some((first, u64::from(page) % self.model.mapped[&first].user.count))
    }

    /// A device behind a domain writes: it reaches what is mapped, if it may, and nothing else.
    pub(crate) fn device_writes(&mut self, n: u8, page: u16, domain: u8) -> Outcome {
        let Some((first, page)) = self.page_of(n, page).filter(|_| !self.attached.is_empty())
        else {
            return 0;
        };
        self.writes += 1;
        let view = &self.attached[usize::from(domain) % self.attached.len()].1;
        let at = (first + page) << self.model.g;
        if self.is_blind(view.as_ref()) {
            return 0;
        }
        let hit = view.write(at + OFFSET, &self.memory, &self.writes.to_le_bytes());
        let g = self.model.g;
        let mapped = self.model.mapped.get_mut(&first).unwrap();
        let behind = mapped.pinned.as_ref().map(|all| all[usize::try_from(page).unwrap()]);
        let leads = behind.and_then(Behind::paddr).filter(|_| mapped.prot.contains(Prot::WRITE));
        assert_eq!(hit.map(|leaf| leaf.paddr), leads.map(|paddr| paddr + OFFSET));
        let Some(leaf) = hit else { return 0 };
        self.contents.insert(leaf.paddr, self.writes);
        if self.model.tracking {
            let marked = |at: u64| (at >> g).saturating_sub(first).min(mapped.user.count - 1);
            mapped.must.insert(page);
            mapped.may.extend(marked(leaf.block.start().get())..=marked(leaf.block.last().get()));
        }
        1
    }

    /// Why an emulated device may not read or write a page.
    fn refusals_of_copy(&self, first: u64, page: u64, asked: Prot) -> (Vec<Errno>, Behind) {
        let mapped = &self.model.mapped[&first];
        let user = Pages { first: mapped.user.first + page, count: 1, ..mapped.user };
        let behind = self.model.behind(user)[0];
        let writes = asked.contains(Prot::WRITE);
        let refusals = if self.model.mapped.values().any(|mapped| !mapped.vaddr_known) {
            vec![Errno::EBUSY]
        } else if !mapped.prot.contains(asked) {
            vec![Errno::EPERM]
        } else if behind == Behind::Hole || (writes && matches!(behind, Behind::ReadOnly(_))) {
            vec![Errno::EFAULT]
        } else {
            Vec::new()
        };
        (refusals, behind)
    }

    pub(crate) fn writes(&mut self, n: u8, page: u16, trouble: Trouble) -> Outcome {
        let Some((first, page)) = self.page_of(n, page) else { return 0 };
        let (refusals, behind) = self.refusals_of_copy(first, page, Prot::READ_WRITE);
        self.writes += 1;
        let bytes = self.writes.to_le_bytes();
        let at = Iova::new(((first + page) << self.model.g) + OFFSET);
        let result = self.troubled(trouble, |world, _| world.container.write(at, &bytes));
        if self.judge(&result, &refusals) {
            self.contents.insert(behind.paddr().unwrap() + OFFSET, self.writes);
            self.wrote(first + page, 1);
            return 1;
        }
        // Part of it may have been.
        self.model.mapped.get_mut(&first).unwrap().may.insert(page);
        0
    }

    pub(crate) fn reads(&mut self, n: u8, page: u16, trouble: Trouble) -> Outcome {
        let Some((first, page)) = self.page_of(n, page) else { return 0 };
        let (refusals, behind) = self.refusals_of_copy(first, page, Prot::READ);
        let mut bytes = [0xa5; 8];
        let at = Iova::new(((first + page) << self.model.g) + OFFSET);
        let result = self.troubled(trouble, |world, _| world.container.read(at, &mut bytes));
        if !self.judge(&result, &refusals) {
            return 0;
        }
        let paddr = behind.paddr().unwrap() + OFFSET;
        let expected = self.contents.get(&paddr).copied().unwrap_or(0);
        assert_eq!(u64::from_le_bytes(bytes), expected, "what was written there last");
        1 + expected
    }

    pub(crate) fn attach_emulated(&mut self) -> Outcome {
        if self.emulated.is_some() {
            return 0;
        }
        let invalid = self.model.mapped.values().any(|mapped| !mapped.vaddr_known);
        let result = self.container.attach_emulated(self.device.clone());
        assert_eq!(result.is_err(), invalid);
        self.emulated = result.ok();
        self.model.emulated = self.emulated.is_some();
        u64::from(self.model.emulated)
    }

    pub(crate) fn detach_emulated(&mut self) -> Outcome {
        let Some(id) = self.emulated.take() else { return 0 };
        while !self.model.held.is_empty() {
            self.unpin(0);
        }
        self.container.detach_emulated(id).unwrap();
        self.model.emulated = false;
        if self.model.domains.is_empty() {
            self.model.mapped.clear();
        }
        1
    }

    pub(crate) fn pin(&mut self, n: u8, page: u16, count: u8, trouble: Trouble) -> Outcome {
        let Some((first, page)) = self.page_of(n, page) else { return 0 };
        let mapped = &self.model.mapped[&first];
        let count = u64::from(count).min(mapped.user.count - page);
        let user = Pages { first: mapped.user.first + page, count, ..mapped.user };
        let behind = self.model.behind(user);
        let pages = (user.first..).zip(&behind);
        let pages = pages.map(|(at, behind)| (mapped.owner, (user.space, at), *behind)).collect();
        let charged = vec![mapped.pinned.is_some(); behind.len()];
        let held = Held { first: first + page, count, pages, charged };
        let (refusals, prot) = (self.refusals_of_hold(mapped, &held), mapped.prot);
        let mut spans: Vec<Span> = Vec::new();
        let range = self.iovas(held.first, count);
        let result = self
            .troubled(trouble, |world, _| world.container.pin_external(range, prot, &mut spans));
        let done = self.judge(&result, &refusals);
        let Ok(pin) = result else { return u64::from(done) };
        let frames = spans.iter().flat_map(|span| {
            (0..span.len()).step_by(1 << self.model.g).map(|at| span.paddr().get() + at)
        });
        assert!(frames.eq(behind.iter().filter_map(|behind| behind.paddr())));
        self.device.pins.lock().push(pin);
        self.wrote(held.first, count);
        self.model.held.push(held);
        1
    }

    fn refusals_of_hold(&self, mapped: &Mapped, held: &Held) -> Vec<Errno> {
        let model = &self.model;
        if model.version == dmaspan::container::Version::V1 {
            return vec![Errno::EACCES];
        } else if model.mapped.values().any(|mapped| !mapped.vaddr_known) {
            return vec![Errno::EBUSY];
        } else if !model.emulated {
            return vec![Errno::EINVAL];
        }
        let mut refusals = Vec::new();
        let writes = mapped.prot.contains(Prot::WRITE);
        let bad = |behind: &Behind| {
            *behind == Behind::Hole || (writes && matches!(behind, Behind::ReadOnly(_)))
        };
        if held.pages.iter().any(|(_, _, behind)| bad(behind)) {
            refusals.push(Errno::EFAULT);
        }
        let mut with = model.clone();
        with.held.push(held.clone());
        if with.charged(mapped.owner).1 > model.limit {
            refusals.push(Errno::ENOMEM);
        }
        refusals
    }

    pub(crate) fn unpin(&mut self, n: u8) -> Outcome {
        if self.model.held.is_empty() {
            return 0;
        }
        let held = self.model.held.swap_remove(usize::from(n) % self.model.held.len());
        let range = self.iovas(held.first, held.count);
        let mut pins = self.device.pins.lock();
        let found = pins.iter().position(|pin: &ExternalPin| pin.range() == range).unwrap();
        let pin = pins.swap_remove(found);
        drop(pins);
        self.container.unpin_external(pin, Dirty::Written).unwrap();
        self.wrote(held.first, held.count);
        1
    }

    /// Forgets the users' addresses of pages, or of everything.
    pub(crate) fn invalidate(&mut self, pages: Option<(u64, u64)>, trouble: Trouble) -> Outcome {
        let all: Vec<u64> = self.model.mapped.keys().copied().collect();
        let reached = pages.map_or(Ok(all), |(first, count)| self.model.reached(first, count));
        let refusals: Vec<Errno> = match &reached {
            Err(errno) => vec![*errno],
            Ok(_) if self.model.emulated => vec![Errno::EBUSY],
            Ok(firsts) if firsts.iter().any(|at| !self.model.mapped[at].vaddr_known) => {
                vec![Errno::EINVAL]
            }
            Ok(_) => Vec::new(),
        };
        let result = self.troubled(trouble, |world, _| match pages {
            Some((first, count)) => world.container.invalidate_vaddr(world.iovas(first, count)),
            None => world.container.invalidate_vaddr_all(),
        });
        let hidden = reached.as_ref().is_ok_and(|firsts| firsts.is_empty()) && result.is_ok();
        let refusals = if hidden { Vec::new() } else { refusals };
        if !self.judge(&result, &refusals) {
            return 0;
        }
        let mut bytes = 0;
        for first in reached.unwrap() {
            let mapped = self.model.mapped.get_mut(&first).unwrap();
            mapped.vaddr_known = false;
            bytes += mapped.user.count << self.model.g;
        }
        assert_eq!(result.unwrap(), bytes);
        1 + bytes
    }

    /// The memory is another space's now, and another owner's.
    pub(crate) fn moves(&mut self, n: u8, space: u8, owner: u8, trouble: Trouble) -> Outcome {
        let Some(first) = self.nth(n) else { return 0 };
        let was = self.model.mapped[&first].clone();
        let (space, owner) = (usize::from(space) % 2, usize::from(owner) % 2);
        let mut with = self.model.clone();
        let now = with.mapped.get_mut(&first).unwrap();
        (now.user.space, now.owner, now.vaddr_known) = (space, owner, true);
        let user = now.user;
        let used = with.charged(owner).1;
        let refusals = if was.vaddr_known {
            vec![Errno::EINVAL]
        } else if used > self.model.limit && used > self.model.charged(owner).1 {
            vec![Errno::ENOMEM]
        } else {
            Vec::new()
        };
        let result = self.troubled(trouble, |world, _| world.update(first, user, owner));
        if self.judge(&result, &refusals) {
            self.model = with;
            return 1;
        }
        0
    }

    pub(crate) fn tracks(&mut self, op: Op, trouble: Trouble) -> Outcome {
        let refusals = match self.model.version {
            dmaspan::container::Version::V1 => vec![Errno::EACCES],
            dmaspan::container::Version::V2 => Vec::new(),
        };
        let starts = matches!(op, Op::Start);
        let result = self.troubled(trouble, |world, _| {
            if starts { world.container.start_dirty() } else { world.container.stop_dirty() }
        });
        if !self.judge(&result, &refusals) {
            return 0;
        }
        if starts != self.model.tracking {
            self.model.tracking = starts;
            for mapped in self.model.mapped.values_mut() {
                mapped.must.clear();
                mapped.may.clear();
                if self.excuse.failed {
                    mapped.mark_all();
                }
            }
        }
        1
    }
}
