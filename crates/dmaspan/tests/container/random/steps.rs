//! Mapping, unmapping and what changes domains: done, and done to the model.

use std::sync::Arc;

use dmaspan::container::{DirtyRead, MapRequest, Version};
use dmaspan::io_pgtable::DirtyBitmap;
use dmaspan::{Errno, Iova, Prot, UserRange};

use super::model::{Behind, Gone, Mapped, Pages};
use super::script::{Fit, Report, Trouble};
use super::views::{Kind, fresh};
use super::world::{Failed, Place, World};

/// What is compared between sizes of batches: 0 for a failure, or one more than the result.
pub(crate) type Outcome = u64;

fn outcome<T>(result: &Result<T, Failed>, value: impl FnOnce(&T) -> u64) -> Outcome {
    result.as_ref().map_or(0, |found| 1 + value(found))
}

impl<const BATCH: usize> World<BATCH> {
    pub(crate) fn map(&mut self, first: u64, new: Mapped, fit: Fit, trouble: Trouble) -> Outcome {
        let refusals = match fit {
            Fit::Skewed => vec![Errno::EINVAL],
            Fit::Aligned => self.model.refusals_of_map(first, &new),
        };
        self.watch(Some((first, &new)));
        let user = self.user(new.user);
        let user = match fit {
            Fit::Skewed => {
                UserRange::new(user.start().wrapping_add(16), user.last().wrapping_add(16))
            }
            Fit::Aligned => Some(user),
        };
        let iova = Iova::new(first << self.model.g);
        let result = self.troubled(trouble, |world, cancelled| {
            let space = &world.spaces[new.user.space];
            let request = MapRequest::new(space, user.unwrap(), iova, new.prot);
            let request = request.owner(&world.accounts[new.owner]).cancelled_by(cancelled);
            world.container.map_request(&request)
        });
        if self.judge(&result, &refusals) {
            self.graves.retain(|page| !(first..first + new.user.count).contains(page));
            self.model.mapped.insert(first, new);
            if !self.model.domains.is_empty() {
                self.model.pin(first);
            }
        } else if self.excuse.failed && self.model.overlapping(first, new.user.count).is_empty() {
            let mut was = new;
            was.pinned = Some(self.model.behind(was.user));
            self.lose_if_gone(first, Gone { was, whole: false });
        }
        // How often it is asked and how much it has then depends on batches, what it says not.
        outcome(&result, |found| found.spans * 1000 + ((found.memory + found.mmio) >> self.model.g))
    }

    /// Notes that a mapping is out of use for ever, if it is.
    fn lose_if_gone(&mut self, first: u64, gone: Gone) -> Place {
        let place = self.probe(first);
        match place {
            Place::Gone => panic!("hardware answers again, and {first:#x} is not released"),
            Place::Free => self.bury(first, gone.was.user.count),
            Place::Mapped => {}
        }
        place
    }

    fn bury(&mut self, first: u64, count: u64) {
        self.graves.extend(first..first + count);
    }

    /// Emulated devices unpin in mappings that are to go.
    fn tell(&mut self, firsts: &[u64]) {
        for first in firsts {
            let end = first + self.model.mapped[first].user.count;
            let reaches =
                |held: &super::model::Held| held.first < end && *first < held.first + held.count;
            let (gone, held): (Vec<_>, _) = self.model.held.drain(..).partition(reaches);
            self.model.held = held;
            gone.iter().for_each(|held| self.wrote(held.first, held.count));
        }
    }

    /// Notes that pages were written by others than devices.
    pub(crate) fn wrote(&mut self, first: u64, count: u64) {
        if !self.model.tracking {
            return;
        }
        for (&at, mapped) in &mut self.model.mapped {
            let pages = first.max(at)..(first + count).min(at + mapped.user.count);
            mapped.must.extend(pages.clone().map(|page| page - at));
            mapped.may.extend(pages.map(|page| page - at));
        }
    }

    /// Takes what was unmapped out of the model, or out of use.
    fn unmapped(&mut self, result: &Result<u64, Failed>, firsts: &[u64]) -> u64 {
        let mut bytes = 0;
        for first in firsts {
            let was = self.model.mapped[first].clone();
            let count = was.user.count;
            match result {
                Ok(_) => {
                    self.model.mapped.remove(first);
                    self.bury(*first, count);
                    assert_eq!(self.probe(*first), Place::Free);
                }
                Err(_) => {
                    let place = self.lose_if_gone(*first, Gone { was, whole: true });
                    assert!(place != Place::Mapped, "an unmap goes on behind a failure");
                    if place == Place::Free {
                        self.model.mapped.remove(first);
                    }
                }
            }
            bytes += count << self.model.g;
        }
        bytes
    }

    pub(crate) fn unmap(
        &mut self,
        (first, count): (u64, u64),
        report: Report,
        trouble: Trouble,
    ) -> Outcome {
        let mut words = vec![u64::MAX; usize::try_from(count.div_ceil(64)).unwrap() + 1];
        let mut reached = self.model.reached(first, count);
        if matches!(report, Report::Dirty) && !self.model.tracking {
            reached = Err(Errno::EINVAL);
        }
        let suspect = |first: &u64| self.model.mapped[first].suspect;
        let mut refusals: Vec<_> = reached.clone().err().into_iter().collect();
        let firsts = reached.unwrap_or_default();
        let may_fail = firsts.iter().any(suspect);
        let before = self.model.clone();
        self.watch(None);
        self.tell(&firsts);
        let range = self.iovas(first, count);
        let result = self.troubled(trouble, |world, _| match report {
            Report::Nothing => world.container.unmap(range),
            Report::Dirty => world.container.unmap_dirty(range, 1 << world.model.g, &mut words),
        });
        if may_fail && result.is_err() {
            refusals.push(Errno::EIO);
        }
        self.judge(&result, &refusals);
        let mut marked = self.model.clone();
        if result.is_err() {
            // What hardware may use counts as written, and which that is cannot be seen any more.
            firsts.iter().for_each(|first| marked.mapped.get_mut(first).unwrap().mark_all());
        }
        let bytes = self.unmapped(&result, &firsts);
        if let Ok(found) = result {
            assert_eq!(found, bytes);
        }
        if matches!(report, Report::Dirty) && refusals.is_empty() && self.model.tracking {
            let only = |n: u64| {
                firsts
                    .iter()
                    .any(|at| (*at..at + before.mapped[at].user.count).contains(&(first + n)))
            };
            let told = super::model::Model { gone: Default::default(), ..marked };
            assert_eq!(words.pop(), Some(u64::MAX), "no word behind the bitmap is written");
            self.check_bits(&told, (first, count), &words, &only);
        }
        outcome(&result, |bytes| bytes >> self.model.g)
    }

    pub(crate) fn unmap_all(&mut self, trouble: Trouble) -> Outcome {
        let firsts: Vec<u64> = self.model.mapped.keys().copied().collect();
        let may_fail = self.model.mapped.values().any(|mapped| mapped.suspect);
        self.watch(None);
        self.tell(&firsts);
        let result = self.troubled(trouble, |world, _| world.container.unmap_all());
        self.judge(&result, if may_fail && result.is_err() { &[Errno::EIO] } else { &[] });
        let bytes = self.unmapped(&result, &firsts);
        if let Ok(found) = result {
            assert_eq!(found, bytes);
        }
        outcome(&result, |bytes| bytes >> self.model.g)
    }

    pub(crate) fn attach(&mut self, kind: Kind, trouble: Trouble) -> Outcome {
        if self.attached.len() == 3 {
            return 0;
        }
        let domain = fresh::<BATCH>(kind, &self.faults);
        let (view, facts, attach) = (domain.view, domain.facts, domain.attach);
        let refusals = self.model.refusals_of_attach(facts, kind);
        self.watch(None);
        self.watch.views.lock().push(Arc::clone(&view));
        let result = self.troubled(trouble, |world, ask| attach(&world.container, ask));
        let firsts: Vec<u64> = self.model.mapped.keys().copied().collect();
        let alone = self.model.domains.is_empty();
        if self.judge(&result, &refusals) {
            self.attached.push((*result.as_ref().unwrap(), view));
            self.model.domains.push(facts);
            firsts.iter().filter(|_| alone).for_each(|first| self.model.pin(*first));
            return 1;
        }
        if !self.excuse.failed {
            assert_eq!(view.tables(), 0, "what was not attached is gone");
        }
        if view.tables() == 0 {
            self.watch.views.lock().retain(|other| !Arc::ptr_eq(other, &view));
        }
        for first in firsts {
            let mapped = self.model.mapped.get_mut(&first).unwrap();
            if alone {
                // It may have been mapped for a moment.
                mapped.mark_all();
                let mut was = mapped.clone();
                was.pinned = Some(self.model.behind(was.user));
                let place = self.lose_if_gone(first, Gone { was, whole: false });
                assert!(place != Place::Free, "a mapping is gone");
            } else {
                mapped.suspect |= self.excuse.failed;
            }
        }
        0
    }

    pub(crate) fn detach(&mut self, n: u8, trouble: Trouble) -> Outcome {
        if self.attached.is_empty() {
            return 0;
        }
        let n = usize::from(n) % self.attached.len();
        self.watch(None);
        let (id, view) = self.attached[n].clone();
        let result = self.troubled(trouble, |world, _| world.container.detach(id));
        let firsts: Vec<u64> = self.model.mapped.keys().copied().collect();
        let may_fail = self.model.mapped.values().any(|mapped| mapped.suspect);
        self.judge(&result, if may_fail && result.is_err() { &[Errno::EIO] } else { &[] });
        let last = self.attached.len() == 1;
        for first in &firsts {
            let mapped = self.model.mapped.get_mut(first).unwrap();
            mapped.mark_all();
            mapped.suspect |= self.excuse.failed && !last;
        }
        if last && self.model.emulated {
            self.let_emulated(&firsts);
        } else if last {
            self.unmapped(&result.map(|()| 0), &firsts);
        }
        self.attached.remove(n);
        self.model.domains.remove(n);
        if view.tables() == 0 {
            self.watch.views.lock().retain(|other| !Arc::ptr_eq(other, &view));
        } else {
            assert!(self.leaky, "tables leak");
        }
        1
    }

    /// Emulated devices stay: mappings do too, and only what those have pinned stays pinned.
    fn let_emulated(&mut self, firsts: &[u64]) {
        for first in firsts {
            let was = self.model.mapped[first].clone();
            let place = self.lose_if_gone(*first, Gone { was, whole: true });
            assert!(place != Place::Free, "a mapping is gone");
            if let Some(mapped) = self.model.mapped.get_mut(first) {
                mapped.pinned = None;
            }
        }
        self.model.held.iter_mut().for_each(|held| held.charged.fill(false));
    }

    /// Device memory is taken away from its user.
    pub(crate) fn revoke(&mut self, space: usize, (first, count): (u64, u64), trouble: Trouble) {
        let pages = Pages { space, first, count };
        let is_in = |user: Pages, n: u64| {
            user.space == space && (first..first + count).contains(&(user.first + n))
        };
        let device = |behind: Behind| matches!(behind, Behind::Device(_));
        self.watch(None);
        // An owner that has pinned some of it unpins all that is in the mapping.
        let pinned = |held: &super::model::Held| {
            let mut all = held.pages.iter();
            all.any(|&(_, (by, page), behind)| {
                by == space && (first..first + count).contains(&page) && device(behind)
            })
        };
        let starts: Vec<_> = self.model.held.iter().filter(|held| pinned(held)).collect();
        let told: Vec<u64> = starts
            .iter()
            .map(|held| *self.model.mapped.range(..=held.first).next_back().unwrap().0)
            .collect();
        self.tell(&told);
        let mut parts = Vec::new();
        for (&at, mapped) in &self.model.mapped {
            let behind = mapped.pinned.as_deref().unwrap_or_default();
            for run in runs(behind, self.model.g) {
                if run.clone().any(|n| is_in(mapped.user, n)) {
                    parts.push((at, run));
                }
            }
        }
        let user = self.user(pages);
        let result =
            self.troubled(trouble, |world, _| world.container.revoke(&world.spaces[space], user));
        self.judge(&result, &[]);
        let bytes: u64 = parts.iter().map(|(_, run)| run.end - run.start).sum();
        if let Ok(found) = result {
            assert_eq!(found, bytes << self.model.g);
        }
        for (at, run) in parts {
            let was = self.model.mapped.get(&at).cloned();
            let Some(was) = was else { continue };
            if result.is_err() && self.lose_if_gone(at, Gone { was, whole: true }) == Place::Gone {
                continue;
            }
            let mapped = self.model.mapped.get_mut(&at).unwrap();
            if self.model.tracking && mapped.prot.contains(Prot::WRITE) {
                mapped.may.extend(run.clone());
            }
            for n in run {
                mapped.pinned.as_mut().unwrap()[usize::try_from(n).unwrap()] = Behind::Hole;
            }
        }
        self.spaces[space].zap(user);
        for page in first..first + count {
            self.model.users[space].remove(&page);
        }
    }

    pub(crate) fn get(
        &mut self,
        (first, count): (u64, u64),
        how: DirtyRead,
        trouble: Trouble,
    ) -> Outcome {
        let mut words = vec![u64::MAX; usize::try_from(count.div_ceil(64)).unwrap()];
        let range = self.iovas(first, count);
        let whole = |&(at, pages, gone): &(u64, u64, bool)| {
            gone || (first <= at && at + pages <= first + count)
        };
        let refusals = if self.model.version == Version::V1 {
            vec![Errno::EACCES]
        } else if !self.model.tracking || !self.model.overlapping(first, count).iter().all(whole) {
            vec![Errno::EINVAL]
        } else {
            Vec::new()
        };
        let result = self.troubled(trouble, |world, _| {
            world.container.dirty_bitmap(range, 1 << world.model.g, &mut words, how)
        });
        if !self.judge(&result, &refusals) {
            return 0;
        }
        let model = self.model.clone();
        self.check_bits(&model, (first, count), &words, &|_| true);
        if how == DirtyRead::Clear {
            for (_, mapped) in self.model.mapped.range_mut(first..first + count) {
                mapped.must.clear();
                mapped.may.clear();
            }
        }
        words.iter().fold(1, |mixed, word| (mixed ^ word).rotate_left(7).wrapping_mul(0x9e37_79b9))
    }

    /// What is reported covers what was written, and is mapped and may have been.
    fn check_bits(
        &self,
        model: &super::model::Model,
        (first, count): (u64, u64),
        words: &[u64],
        about: &dyn Fn(u64) -> bool,
    ) {
        assert!(
            DirtyBitmap::new(&mut words.to_vec(), self.iovas(first, count), 1 << model.g).is_ok()
        );
        for n in 0..64 * words.len() as u64 {
            let set = words[usize::try_from(n / 64).unwrap()] >> (n % 64) & 1 == 1;
            let at = first + n;
            let found = model.mapped.range(..=at).next_back();
            let found = found.filter(|(start, mapped)| at - **start < mapped.user.count);
            let (must, may) = match found.filter(|_| n < count && about(n)) {
                Some((start, mapped)) => {
                    let page = at - start;
                    let held = |held: &super::model::Held| {
                        (held.first..held.first + held.count).contains(&at)
                    };
                    let held = model.held.iter().any(held);
                    let assumed = mapped.pinned.is_some() && model.assumes_written();
                    let lost = self.model.gone.contains_key(start);
                    (
                        held || assumed || lost || mapped.must.contains(&page),
                        held || assumed || lost || mapped.may.contains(&page),
                    )
                }
                None => {
                    let gone = model.overlapping(at, 1).iter().any(|&(_, _, gone)| gone);
                    (gone && n < count, gone && n < count)
                }
            };
            assert!(set || !must, "page {at:#x} was written and is not reported");
            assert!(!set || may, "page {at:#x} is reported and was not written");
        }
    }
}

/// Contiguous device memory among pages.
fn runs(behind: &[Behind], g: u32) -> Vec<std::ops::Range<u64>> {
    let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
    let mut next = None;
    for (n, behind) in (0u64..).zip(behind) {
        let Behind::Device(paddr) = *behind else {
            next = None;
            continue;
        };
        match runs.last_mut() {
            Some(run) if next == Some(paddr) => run.end = n + 1,
            _ => runs.push(n..n + 1),
        }
        next = Some(paddr + (1 << g));
    }
    runs
}
