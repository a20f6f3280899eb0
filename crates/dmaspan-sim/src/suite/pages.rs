//! Pages that a domain maps and unmaps as far as they go, as drivers of Linux ask for them.

use dmaspan::io_pgtable::{Arena, Error, Format, Gap};
use dmaspan::{Iova, PhysAddr, iommu, lg2};

use super::rewrite::places;
use super::rig::Rig;
use super::space::{Space, range, span};
use super::tree::{PROT, Tree};
use super::{Subject, each};
use crate::fault::{Faults, Faulty};
use crate::iotlb::{AbsentEntries, IotlbConfig};
use crate::walker::{Access, Switch};

/// Pages of `2^lg2` bytes from the first address on: over the border of a table where there is
/// room, and as many as fit otherwise, but two at least.
fn pages<S: Subject>(space: &Space, lg2: u32) -> Option<(u64, u64)> {
    let entries = lg2::size(S::Format::LG2_ENTRIES);
    let fits = |&(first, count): &(u64, u64)| {
        space.nth(lg2, first + count).is_some() && space.has_memory(lg2, first + count)
    };
    let all = [(entries / 2, entries / 2 + 5), (0, 5), (0, 2)];
    let (first, count) = all.into_iter().find(fits)?;
    Some((space.nth(lg2, first)?, count))
}

/// What is in the way of a page ends the map. The pages before it stay, hardware that caches
/// absent entries finds them, and an unmap of all pages stops at the first hole.
pub fn a_domain_maps_pages_up_to_what_is_in_the_way<S: Subject>() {
    each::<S>(|format| {
        let config = IotlbConfig { absent: AbsentEntries::Cached, ..IotlbConfig::default() };
        let rig = Rig::with_config(Tree::<S>::new(format), config);
        let granule = rig.space.granule();
        for lg2 in rig.space.sizes() {
            let Some((iova, count)) = pages::<S>(&rig.space, lg2) else { continue };
            let (size, way) = (lg2::size(lg2), iova + ((count - 1) << lg2));
            let (all, before) = (range(iova, count << lg2), way - iova);
            rig.map(way, &[span(0, granule)], PROT).unwrap();
            // Hardware remembers that nothing is there.
            assert!(rig.iotlb().translate(Iova::new(way - 1), Access::Read).is_err());
            let mapped = rig.map_pages(iova, 0, size, count);
            let occupied = Err(Error::Occupied { leaf: range(way, granule) }.into());
            assert_eq!(mapped.result, occupied);
            assert!(mapped.unsynced.is_none());
            // It sees what is ahead where it would need a new table.
            let done = mapped.bytes;
            assert!(done <= before && done.is_multiple_of(size), "{done:#x} of {before:#x}");
            let mut leaves = rig.leaves(all);
            leaves.pop();
            assert_eq!(leaves.len() as u64, done / size, "no leaf has another size");
            assert!(leaves.iter().all(|leaf| leaf.range.len_less_one() + 1 == size));
            // The rest by single pages.
            for at in (done..before).step_by(usize::try_from(size).unwrap()) {
                let mapped = rig.map_pages(iova + at, at, size, 1);
                assert_eq!((mapped.bytes, mapped.result), (size, Ok(())));
            }
            assert_eq!(rig.map_pages(way, before, size, 1).result, occupied);
            let found = rig.iotlb().translate(Iova::new(way - 1), Access::Read).unwrap().paddr;
            assert_eq!(found, PhysAddr::new(before - 1));
            let (bytes, result) = rig.unmap_pages(iova, size, count, None);
            assert_eq!(bytes, before + granule);
            match result {
                Ok(()) => assert_eq!(size, granule),
                Err(iommu::Error::Table(Error::Hole { .. })) => assert!(size > granule),
                Err(error) => panic!("{error}"),
            }
            assert_eq!(rig.leaves(all), []);
            assert!(rig.iotlb().translate(Iova::new(way - 1), Access::Read).is_err());
            let nothing = rig.unmap_pages(iova, size, count, Some(Gap::Accept));
            assert!(nothing.0 == 0 && nothing.1.is_err(), "{nothing:?}");
        }
        // Bad arguments change nothing, and split nothing.
        let Some(&(lg2, iova)) = places::<S::Format>(&rig.space).last() else { return };
        rig.map(iova, &[span(0, lg2::size(lg2))], PROT).unwrap();
        let before = rig.leaves(range(iova, lg2::size(lg2)));
        for (at, size, count) in
            [(iova + granule, granule / 2, 1), (iova + granule, granule, 0), (iova + 1, granule, 1)]
        {
            let taken = rig.unmap_pages(at, size, count, Some(Gap::Accept));
            assert!(taken.0 == 0 && matches!(taken.1, Err(iommu::Error::Table(_))), "{taken:?}");
            let mapped = rig.map_pages(at, 0, size, count);
            assert!(mapped.bytes == 0 && mapped.result.is_err());
            assert_eq!(rig.leaves(range(iova, lg2::size(lg2))), before);
        }
    });
}

/// Where hardware does not take what was mapped, none of it stays; where it does not forget that
/// either, the gather says what it may use.
pub fn pages_that_hardware_does_not_take_are_taken_back<S: Subject>() {
    each::<S>(|format| {
        let rig = Rig::<S>::new(format);
        for lg2 in rig.space.sizes() {
            let Some((iova, count)) = pages::<S>(&rig.space, lg2) else { continue };
            let (size, all) = (lg2::size(lg2), range(iova, count << lg2));
            for failing in [0, 1] {
                rig.hooks().take_maps(Switch::Off);
                rig.hooks().fail(failing);
                let mapped = rig.map_pages(iova, 0, size, count);
                assert!(matches!(mapped.result, Err(iommu::Error::Hardware { .. })));
                assert_eq!((mapped.bytes, rig.leaves(all)), (0, vec![]));
                rig.hooks().take_maps(Switch::On);
                let Some(gather) = mapped.unsynced else {
                    assert_eq!(failing, 0);
                    continue;
                };
                assert!(failing == 1 && !gather.is_empty());
                rig.sync(gather);
            }
        }
        let arena = rig.arena.clone();
        drop(rig);
        assert_eq!(arena.tables(), 0, "no table is lost");
    });
}

/// Tables of smaller leaves that became empty leave before larger pages take their place.
pub fn larger_pages_go_where_tables_became_empty<S: Subject>() {
    each::<S>(|format| {
        let rig = Rig::<S>::new(format);
        let granule = rig.space.granule();
        for lg2 in rig.space.sizes().into_iter().skip(1) {
            let Some((iova, count)) = pages::<S>(&rig.space, lg2) else { continue };
            let (size, all) = (lg2::size(lg2), range(iova, count << lg2));
            // Pages are there to be mapped at once, and the last ones are not: each has a table.
            for at in (count.saturating_sub(3).max(1)..count).map(|n| iova + n * size) {
                rig.map(at, &[span(0, granule)], PROT).unwrap();
                rig.unmap(range(at, granule)).unwrap();
            }
            let mapped = rig.map_pages(iova, 0, size, count);
            assert_eq!((mapped.bytes, mapped.result), (count * size, Ok(())), "2^{lg2}");
            assert_eq!(rig.leaves(all).len() as u64, count);
            assert_eq!(rig.unmap_pages(iova, size, count, None), (count * size, Ok(())));
        }
        let arena = rig.arena.clone();
        drop(rig);
        assert_eq!(arena.tables(), 0, "no table is lost");
    });
}

/// A leaf that reaches out of the range stays, unless the caller wants it to be split: then what
/// lies outside stays mapped, and hardware forgets what lies inside.
pub fn an_unmap_of_pages_cuts_leaves_where_it_is_told_to<S: Subject>() {
    each::<S>(|format| {
        let breaks = format.needs_break();
        for (lg2, iova) in places::<S::Format>(&Space::of(&format)) {
            let rig = Rig::<S>::new(format.clone());
            let (size, granule) = (lg2::size(lg2), rig.space.granule());
            let all = range(iova, size);
            let parts = [
                (0, granule),
                (granule, size - granule),
                (granule, size - 2 * granule),
                (size / 2, granule),
            ];
            for (offset, len) in parts.into_iter().filter(|part| part.1 != 0) {
                rig.map(iova, &[span(0, size)], PROT).unwrap();
                let (at, count, end) = (iova + offset, len / granule, offset + len);
                for page in [iova, at, iova + size - 1] {
                    rig.iotlb().translate(Iova::new(page), Access::Read).unwrap();
                }
                let before = rig.leaves(all);
                rig.hooks().forgotten();
                let leaf = Err(Error::WouldSplit { leaf: all }.into());
                assert_eq!(rig.unmap_pages(at, granule, count, None), (0, leaf));
                if breaks {
                    let refused = Err(Error::NeedsBreak { leaf: all }.into());
                    assert_eq!(
                        rig.unmap_pages(at, granule, count, Some(Gap::Refuse)),
                        (0, refused)
                    );
                }
                assert_eq!((rig.leaves(all), rig.hooks().forgotten()), (before, vec![]));
                let gap = if breaks { Gap::Accept } else { Gap::Refuse };
                assert_eq!(rig.unmap_pages(at, granule, count, Some(gap)), (len, Ok(())));
                for page in [at, iova + end - 1] {
                    assert_eq!(rig.translate(page), None);
                    let cached = rig.iotlb().translate(Iova::new(page), Access::Read);
                    assert!(cached.is_err(), "hardware forgot {page:#x}");
                }
                // What lies outside is as it was.
                for (offset, len) in [(0, offset), (end, size - end)] {
                    if len != 0 {
                        let at = iova + offset;
                        assert_eq!(rig.translate(at), Some(PhysAddr::new(offset)));
                        assert_eq!(rig.unmap(range(at, len)).unwrap(), [span(offset, len)]);
                    }
                }
                assert_eq!(rig.leaves(all), []);
            }
            let arena = rig.arena.clone();
            drop(rig);
            assert_eq!(arena.tables(), 0, "no table is lost");
        }
    });
}

/// A domain without mappings, whose tables may be refused.
fn faulty<S: Subject>(format: &S::Format, faults: &Faults) -> Rig<S, Faulty<Arena>> {
    Rig::with_config(Tree::faulty(format.clone(), faults), IotlbConfig::default())
}

/// Checks that tables were missing.
#[track_caller]
fn has_no_tables(error: &iommu::Error, step: u32) {
    let found = matches!(error, iommu::Error::Table(Error::NoTables { .. }));
    assert!(found, "step {step}: {error}");
}

/// With every single allocation of tables failing in turn, a domain says which pages it mapped
/// before, and can be asked for the others.
pub fn pages_without_tables_can_be_asked_for_again<S: Subject>() {
    each::<S>(|format| {
        let faults = Faults::none();
        let mut came_half_way = None;
        for lg2 in Space::of(&format).sizes() {
            let Some((iova, count)) = pages::<S>(&Space::of(&format), lg2) else { continue };
            let (size, all) = (lg2::size(lg2), range(iova, count << lg2));
            faults.sweep(|step| {
                faults.disarm();
                let rig = faulty::<S>(&format, &faults);
                let is_begun = iova != rig.space.aperture.start().get();
                if is_begun {
                    // What comes before it has a table, which the first pages share.
                    rig.map(iova - size, &[span(0, size)], PROT).unwrap();
                }
                faults.arm(step);
                let mapped = rig.map_pages(iova, 0, size, count);
                assert!(mapped.unsynced.is_none());
                let done = mapped.bytes / size;
                assert_eq!(rig.leaves(all).len() as u64, done, "step {step}");
                for page in 0..count {
                    let found = rig.iotlb().translate(Iova::new(iova + page * size), Access::Read);
                    assert_eq!(found.is_ok(), page < done, "step {step}");
                }
                match &mapped.result {
                    Ok(()) => assert_eq!(done, count),
                    Err(error) => {
                        has_no_tables(error, step);
                        assert!(done < count, "step {step}");
                        if is_begun && size == rig.space.granule() {
                            came_half_way.get_or_insert(done > 0);
                        }
                        let (at, left) = (done * size, count - done);
                        let rest = rig.map_pages(iova + at, at, size, left);
                        assert_eq!((rest.bytes, rest.result), (left * size, Ok(())));
                    }
                }
                assert_eq!(rig.unmap_pages(iova, size, count, None), (count * size, Ok(())));
                assert_eq!(rig.leaves(all), []);
            });
        }
        assert_ne!(came_half_way, Some(false), "pages were mapped where their table was there");
    });
}

/// Where a leaf cannot be cut for want of tables, at the first end of the range or at the other,
/// nothing is taken away.
pub fn an_unmap_of_pages_that_cannot_cut_takes_nothing<S: Subject>() {
    each::<S>(|format| {
        let faults = Faults::none();
        let gap = if format.needs_break() { Gap::Accept } else { Gap::Refuse };
        for (lg2, iova) in places::<S::Format>(&Space::of(&format)) {
            let (size, granule) = (lg2::size(lg2), Space::of(&format).granule());
            // Both ends are cut, unless the leaf has but two pages.
            let (at, len) = (iova + granule, (size - 2 * granule).max(granule));
            faults.sweep(|step| {
                faults.disarm();
                let rig = faulty::<S>(&format, &faults);
                rig.map(iova, &[span(0, size)], PROT).unwrap();
                faults.arm(step);
                let (bytes, result) = rig.unmap_pages(at, granule, len / granule, Some(gap));
                match result {
                    Ok(()) => assert_eq!(bytes, len, "step {step}"),
                    Err(error) => {
                        has_no_tables(&error, step);
                        assert_eq!(bytes, 0, "step {step}");
                    }
                }
                // What was not taken away is where it was.
                for offset in [0, granule, size / 2, size - granule] {
                    let is_gone = (granule..granule + bytes).contains(&offset);
                    let expected = (!is_gone).then(|| PhysAddr::new(offset));
                    assert_eq!(rig.translate(iova + offset), expected, "step {step}");
                }
            });
        }
    });
}
