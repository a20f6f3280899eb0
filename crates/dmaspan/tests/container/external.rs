//! External pins: counted page by page, charged, and refused as Linux refuses them.

use std::sync::Arc;

use dmaspan::container::{Attach, DirtyRead, Error, ExternalPin, Interrupts, Version};
use dmaspan::pin::{Dirty, Kind, SpanSink, Stopped};
use dmaspan::{Container, DmaSpace, Errno, Iova, Prot, Span, SpanBuf};
use dmaspan_sim::fault::Faults;
use proptest::prelude::*;
use proptest::sample::Index;

use crate::common::{PROT, faulty_domain, range};
use crate::emulated::{Model, PAGE, pages};
use crate::hooked::{Hooking, Owner, size};

#[test]
fn a_pin_pins_and_charges_and_says_where_the_pages_are() {
    let owner = Owner::new(16);
    let (_, container, _) = Model::attach(owner.container());
    container.map(&owner.space, owner.pages(4, 8), Iova::new(8 * PAGE), PROT).unwrap();
    owner.assert_untouched();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(10, 3), Prot::READ_WRITE, &mut spans).unwrap();
    let found: Vec<_> = spans
        .iter()
        .flat_map(|span| (0..span.len()).step_by(4096).map(|at| span.paddr().wrapping_add(at)))
        .collect();
    assert_eq!(found, owner.frames[6..9]);
    assert_eq!((owner.memory.pinned_frames(), owner.account.used()), (3, 3 * PAGE));
    assert_eq!(pin.range(), pages(10, 3));
    container.unpin_external(pin, Dirty::Written).unwrap();
    assert!(owner.frames[6..9].iter().all(|frame| owner.memory.is_dirty(*frame) == Some(true)));
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(8, 1), Prot::READ, &mut spans).unwrap();
    container.unpin_external(pin, Dirty::Clean).unwrap();
    assert_eq!(owner.memory.is_dirty(owner.frames[4]), Some(false));
    owner.assert_untouched();
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
}

const PAGES: u64 = 24;

#[derive(Clone, Copy, Debug)]
enum Step {
    Pin,
    PinRange,
    Unpin,
    UnpinRange,
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64, u64, Index)>> {
    let step = prop_oneof![
        2 => Just(Step::Pin),
        2 => Just(Step::PinRange),
        1 => Just(Step::Unpin),
        3 => Just(Step::UnpinRange),
    ];
    let step = (step, 0..PAGES, 0..PAGES, any::<Index>());
    let step =
        step.prop_map(|(step, first, count, n)| (step, first, 1 + count % (PAGES - first), n));
    prop::collection::vec(step, 1..120)
}

#[test]
fn a_pin_of_another_container_becomes_an_error_that_names_it() {
    let owner = Owner::new(16);
    let (_, container, _) = Model::attach(owner.container());
    let (_, other, _) = Model::attach(owner.container());
    container.map(&owner.space, owner.pages(4, 8), Iova::new(8 * PAGE), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(10, 3), PROT, &mut spans).unwrap();
    // As a user writes it.
    let unpin = |pin| -> Result<(), Error<_>> { Ok(other.unpin_external(pin, Dirty::Clean)?) };
    let error = unpin(pin).unwrap_err();
    assert!(matches!(error, Error::ForeignPin { range } if range == pages(10, 3)), "{error}");
    let expected = format!("the pin of {} belongs to another container", pages(10, 3));
    assert_eq!(error.to_string(), expected);
    assert_eq!(container.errno(&error), Errno::EINVAL);
}

/// What a model says of pins, page by page.
#[derive(Default)]
struct Pins {
    handles: Vec<ExternalPin>,
    by_range: [u32; 24],
}

impl Pins {
    fn step(&mut self, container: &Hooking, (step, first, count, n): (Step, u64, u64, Index)) {
        let index = size(first)..size(first + count);
        let asked = pages(first, count);
        let mut spans: Vec<Span> = Vec::new();
        match step {
            Step::Pin => {
                self.handles.push(container.pin_external(asked, PROT, &mut spans).unwrap())
            }
            Step::PinRange => {
                container.pin_range(asked, PROT, &mut spans).unwrap();
                self.by_range[index].iter_mut().for_each(|pins| *pins += 1);
            }
            Step::Unpin if self.handles.is_empty() => {}
            Step::Unpin => {
                let pin = self.handles.swap_remove(n.index(self.handles.len()));
                container.unpin_external(pin, Dirty::Clean).unwrap();
            }
            Step::UnpinRange => {
                let unpinned = container.unpin_range(asked, Dirty::Clean);
                let Some(hole) = self.by_range[index.clone()].iter().position(|pins| *pins == 0)
                else {
                    unpinned.unwrap();
                    self.by_range[index].iter_mut().for_each(|pins| *pins -= 1);
                    return;
                };
                let (error, hole) = (unpinned.unwrap_err(), first + hole as u64);
                let hole = Iova::new(hole * PAGE);
                assert!(matches!(error, Error::NotPinned { at, .. } if at == hole), "{error}");
                assert_eq!(container.errno(&error), Errno::EINVAL);
            }
        }
    }

    fn of(&self, page: u64) -> u32 {
        let at = Iova::new(page * PAGE);
        let by_handle = self.handles.iter().filter(|pin| pin.range().contains(at)).count();
        u32::try_from(by_handle).unwrap() + self.by_range[size(page)]
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_page_stays_pinned_until_as_many_unpins_as_pins(steps in steps()) {
        let owner = Owner::new(PAGES);
        let (_, container, _) = Model::attach(owner.container());
        // Three mappings that follow each other, in another order in the user's memory.
        for (at, from) in [(0, 16), (8, 0), (16, 8)] {
            let user = owner.pages(from, 8);
            container.map(&owner.space, user, Iova::new(at * PAGE), PROT).unwrap();
        }
        let frame = |page: u64| owner.frames[size((page + 16) % PAGES)];
        let mut pins = Pins::default();
        for step in steps {
            pins.step(&container, step);
            for page in 0..PAGES {
                prop_assert_eq!(owner.memory.pins(frame(page)), Some(pins.of(page)));
            }
            let pinned = (0..PAGES).filter(|page| pins.of(*page) > 0).count() as u64;
            prop_assert!(owner.account.used() >= pinned * PAGE);
        }
        for pin in pins.handles {
            container.unpin_external(pin, Dirty::Clean).unwrap();
        }
        for (page, pins) in (0..).zip(pins.by_range) {
            (0..pins).for_each(|_| container.unpin_range(pages(page, 1), Dirty::Clean).unwrap());
        }
        owner.assert_untouched();
        prop_assert_eq!(container.unmap_all().unwrap(), PAGES * PAGE);
    }
}

#[test]
fn unpinning_by_range_takes_no_pin_of_a_handle() {
    let owner = Owner::new(4);
    let (_, container, _) = Model::attach(owner.container());
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(0, 4), PROT, &mut spans).unwrap();
    assert!(matches!(
        container.unpin_range(pages(0, 4), Dirty::Clean),
        Err(Error::NotPinned { at, .. }) if at == Iova::new(0)
    ));
    container.unpin_external(pin, Dirty::Clean).unwrap();
    owner.assert_untouched();
}

#[test]
fn what_cannot_be_pinned_is_refused_as_linux_does_and_changes_nothing() {
    let owner = Owner::new(16);
    let mut spans: Vec<Span> = Vec::new();
    let lonely = owner.container();
    let error = lonely.pin_external(pages(0, 1), Prot::READ, &mut spans).unwrap_err();
    assert!(matches!(error, Error::NotAttached), "{error}");
    assert_eq!(lonely.errno(&error), Errno::EINVAL);
    let v1 = lonely.with_version(Version::V1);
    let error = v1.pin_external(pages(0, 1), Prot::READ, &mut spans).unwrap_err();
    assert!(matches!(error, Error::NeedsV2), "{error}");
    assert_eq!(v1.errno(&error), Errno::EACCES);

    let (_, container, id) = Model::attach(owner.container());
    let map = |page, from, count, prot| {
        let user = owner.pages(from, count);
        container.map(&owner.space, user, Iova::new(page * PAGE), prot).unwrap();
    };
    map(0, 0, 4, PROT);
    map(4, 4, 4, Prot::READ);
    map(9, 8, 4, PROT);
    let mut pin = |at, prot| container.pin_external(at, prot, &mut spans).unwrap_err();
    let holes = [(pages(3, 8), 8), (pages(8, 1), 8), (pages(11, 4), 13), (pages(40, 1), 40)];
    for (asked, hole) in holes {
        let error = pin(asked, Prot::READ);
        let hole = Iova::new(hole * PAGE);
        assert!(matches!(error, Error::NotMapped { at, .. } if at == hole), "{error}");
        assert_eq!(container.errno(&error), Errno::EINVAL);
    }
    let error = pin(pages(3, 2), PROT);
    assert!(matches!(error, Error::Denied { mapping, .. } if mapping == pages(4, 4)), "{error}");
    assert_eq!(container.errno(&error), Errno::EPERM);
    for misaligned in [range(0x800, 0x1000), range(0, 0x1800)] {
        let error = pin(misaligned, PROT);
        assert!(matches!(error, Error::MisalignedUnmap { granule: PAGE, .. }), "{error}");
        let error = container.unpin_range(misaligned, Dirty::Clean).unwrap_err();
        assert_eq!(container.errno(&error), Errno::EINVAL);
    }
    assert!(matches!(pin(pages(0, 1), Prot::CACHE), Error::NoAccess { .. }));
    owner.space.unmap(owner.pages(6, 1));
    let error = pin(pages(2, 6), Prot::READ);
    assert!(matches!(error, Error::Pin { user, .. } if user == owner.pages(4, 4)), "{error}");
    assert_eq!(container.errno(&error), Errno::EFAULT);
    owner.assert_untouched();

    container.detach_emulated(id).unwrap();
    let error = container.detach_emulated(id).unwrap_err();
    assert!(matches!(error, Error::NotAttached), "{error}");
}

#[test]
fn a_limit_refuses_a_pin_before_memory_is_pinned() {
    let owner = Owner::new(8);
    let poor = dmaspan::Account::new(5 * PAGE);
    let (_, container, _) = Model::attach(Container::new(owner.pinner(), Arc::clone(&poor)));
    // The first mapping fits, the second does not.
    container.map(&owner.space, owner.pages(0, 4), Iova::new(0), PROT).unwrap();
    container.map(&owner.space, owner.pages(4, 4), Iova::new(4 * PAGE), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let error = container.pin_external(pages(0, 8), PROT, &mut spans).unwrap_err();
    assert!(matches!(error, Error::OverLimit { .. }), "{error}");
    assert_eq!(container.errno(&error), Errno::ENOMEM);
    assert_eq!(poor.used(), 0);
    owner.assert_untouched();
}

#[test]
fn when_the_last_domain_goes_mappings_stay_for_emulated_devices_with_what_they_pinned() {
    let owner = Owner::new(16);
    let (model, container, id) = Model::attach(owner.container());
    let (domain, tables, _) = faulty_domain::<12>(&Faults::none());
    let domain = container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    container.map(&owner.space, owner.pages(0, 8), Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 3), PROT, &mut spans).unwrap();
    assert_eq!((owner.memory.pinned_frames(), owner.account.used()), (8, 8 * PAGE));
    container.detach(domain).unwrap();
    assert_eq!((container.mappings(), model.told()), (1, vec![]), "nothing is unmapped");
    assert_eq!((owner.memory.pinned_frames(), owner.account.used()), (3, 3 * PAGE));
    assert_eq!(tables.tables(), 0, "the domain is gone");
    // The next one finds the mapping.
    let (domain, _, _) = faulty_domain::<12>(&Faults::none());
    container.attach(domain, Attach::new(Interrupts::Isolated)).unwrap();
    assert_eq!((owner.memory.pinned_frames(), owner.account.used()), (8, 8 * PAGE));
    container.unpin_external(pin, Dirty::Clean).unwrap();
    container.detach_emulated(id).unwrap();
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn what_domains_have_charged_is_not_charged_again() {
    let owner = Owner::new(8);
    let (_, container, _) = Model::attach(owner.with_domain());
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    assert_eq!(owner.account.used(), 8 * PAGE);
    let mut spans: Vec<Span> = Vec::new();
    let pin = container.pin_external(pages(2, 4), PROT, &mut spans).unwrap();
    assert_eq!(owner.account.used(), 8 * PAGE);
    assert_eq!(owner.memory.pins(owner.frames[2]), Some(2));
    container.unpin_external(pin, Dirty::Clean).unwrap();
    assert_eq!(owner.account.used(), 8 * PAGE);
    assert_eq!(owner.memory.pins(owner.frames[2]), Some(1));
    container.unmap_all().unwrap();
    owner.assert_untouched();
}

/// Spans with their kinds, as many as there is room for.
struct Kinded(Vec<(Span, Kind)>, usize);

impl SpanSink for Kinded {
    fn push(&mut self, span: Span, kind: Kind) -> Result<(), Stopped> {
        if self.0.len() == self.1 {
            return Err(Stopped);
        }
        self.0.push((span, kind));
        Ok(())
    }
}

#[test]
fn kinds_reach_the_caller_and_come_back_to_the_pinner() {
    let owner = Owner::new(16);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let (_, container, _) = Model::attach(Container::new(pinner, Arc::clone(&owner.account)));
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let mut kinds = Kinded(Vec::new(), 16);
    let whole = container.pin_external(pages(0, 16), PROT, &mut kinds).unwrap();
    let odd = |frame: &u64| frame >> 12 & 1 == 1;
    let frames: Vec<u64> = owner.frames.iter().map(|frame| frame.get()).collect();
    for ((span, kind), frame) in kinds.0.iter().zip(&frames) {
        assert_eq!(span.paddr().get(), *frame);
        assert_eq!(*kind, if odd(frame) { Kind::Mmio } else { Kind::Memory });
    }
    let mmio = frames.iter().filter(|frame| odd(frame)).count() as u64;
    assert!((1..16).contains(&mmio), "both kinds are there");
    container.unpin_external(whole, Dirty::Clean).unwrap();
    let unpinned = || std::mem::take(&mut *container.pinner().unpinned.lock());
    assert_eq!(unpinned(), ((16 - mmio) * PAGE, mmio * PAGE));
    // The pinner looks at the kind of each span that is cut out.
    container.pin_range(pages(0, 16), PROT, &mut Kinded(Vec::new(), 16)).unwrap();
    for (first, count) in [(5, 4), (0, 3), (12, 4), (9, 3), (3, 2)] {
        container.unpin_range(pages(first, count), Dirty::Clean).unwrap();
        let odd = frames[size(first)..][..size(count)].iter().filter(|frame| odd(frame));
        let mmio = odd.count() as u64;
        assert_eq!(unpinned(), ((count - mmio) * PAGE, mmio * PAGE), "{first} {count}");
    }
    owner.assert_untouched();
}

#[test]
fn device_memory_is_not_revoked_before_devices_have_unpinned_it() {
    let owner = Owner::new(16);
    let mut pinner = owner.pinner();
    pinner.odd = Kind::Mmio;
    let (model, container, _) = Model::attach(Container::new(pinner, Arc::clone(&owner.account)));
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let odd = |frame: &dmaspan::PhysAddr| frame.get() >> 12 & 1 == 1;
    let mmio = owner.frames.iter().position(odd).unwrap() as u64;
    let memory = owner.frames.iter().position(|frame| !odd(frame)).unwrap() as u64;
    let pin = |page| {
        let mut kinds = Kinded(Vec::new(), 16);
        container.pin_external(pages(page, 1), PROT, &mut kinds).unwrap()
    };
    let (of_device, of_memory) = (pin(mmio), pin(memory));
    let revoke = |page| container.revoke(&owner.space, owner.pages(page, 1));
    assert_eq!(revoke(memory).unwrap(), 0, "memory stays");
    assert_eq!(model.told(), []);
    let error = revoke(mmio).unwrap_err();
    assert!(matches!(error, Error::StillPinned { range } if range == pages(0, 16)), "{error}");
    assert_eq!(model.told(), [pages(0, 16); 10]);
    model.pins.lock().push(of_device);
    assert_eq!(revoke(mmio).unwrap(), 0, "no domain has it");
    assert_eq!(model.told(), [pages(0, 16)]);
    assert_eq!(owner.memory.pinned_frames(), 1);
    container.unpin_external(of_memory, Dirty::Clean).unwrap();
    owner.assert_untouched();
}

#[test]
fn a_sink_without_room_gives_everything_back() {
    let owner = Owner::new(64);
    let (_, container, _) = Model::attach(owner.container());
    container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
    let mut room = SpanBuf::room::<4>();
    let mut few = SpanBuf::new(&mut room);
    let error = container.pin_external(pages(0, 64), PROT, &mut few).unwrap_err();
    assert!(matches!(error, Error::SinkFull { user } if user == owner.user), "{error}");
    owner.assert_untouched();
    assert_eq!(container.unmap_all().unwrap(), 64 * PAGE);
}

#[test]
fn pins_of_another_container_are_given_back() {
    let owner = Owner::new(4);
    let (_, ours, _) = Model::attach(owner.container());
    let (_, theirs, _) = Model::attach(owner.container());
    let mut spans: Vec<Span> = Vec::new();
    let mut pins = [&ours, &theirs].map(|container| {
        container.map(&owner.space, owner.user, Iova::new(0), PROT).unwrap();
        Some(container.pin_external(pages(0, 4), PROT, &mut spans).unwrap())
    });
    let foreign = ours.unpin_external(pins[1].take().unwrap(), Dirty::Clean).unwrap_err();
    assert_eq!(owner.memory.pins(owner.frames[0]), Some(2));
    theirs.unpin_external(foreign.pin, Dirty::Clean).unwrap();
    ours.unpin_external(pins[0].take().unwrap(), Dirty::Clean).unwrap();
    owner.assert_untouched();
}

#[test]
fn what_devices_pin_and_write_is_dirty_and_stays_so_while_it_is_pinned() {
    let owner = Owner::new(64);
    let (model, container, _) = Model::attach(owner.container());
    container.map(&owner.space, owner.pages(0, 32), Iova::new(0), PROT).unwrap();
    let mut spans: Vec<Span> = Vec::new();
    let early = container.pin_external(pages(1, 1), PROT, &mut spans).unwrap();
    container.start_dirty().unwrap();
    container.map(&owner.space, owner.pages(32, 32), Iova::new(32 * PAGE), PROT).unwrap();
    let dirty = || {
        let mut words = [0];
        container.dirty_bitmap(pages(0, 64), PAGE, &mut words, DirtyRead::Clear).unwrap();
        words[0]
    };
    assert_eq!(dirty(), 0b10, "what is pinned already");
    container.unpin_external(early, Dirty::Clean).unwrap();
    assert_eq!((dirty(), dirty()), (0b10, 0), "it was pinned when it was read last");
    // As in Linux, also what is pinned for reading.
    let pin = container.pin_external(pages(31, 2), Prot::READ, &mut spans).unwrap();
    let two = 0b11 << 31;
    assert_eq!((dirty(), dirty()), (two, two));
    container.write(Iova::new(3 * PAGE - 1), &[1, 2]).unwrap();
    container.read(Iova::new(5 * PAGE), &mut [0; 8]).unwrap();
    assert_eq!((dirty(), dirty()), (two | 0b1100, two));
    assert!(container.write(Iova::new(64 * PAGE - 1), &[1, 2]).is_err());
    assert_eq!(dirty(), two);
    model.pins.lock().push(pin);
    let mut words = [0];
    assert_eq!(container.unmap_dirty(pages(0, 64), PAGE, &mut words).unwrap(), 64 * PAGE);
    assert_eq!((words[0], model.told()), (two, vec![pages(0, 32)]));
    owner.assert_untouched();
}
