//! Reads and writes of emulated devices, against a model of bytes.

use std::sync::Arc;

use dmaspan::container::{Error, MapRequest};
use dmaspan::{DmaSpace, Errno, Iova, Prot, RangeError};
use proptest::prelude::*;

use crate::common::PROT;
use crate::emulated::{PAGE, pages};
use crate::hooked::{Hooking, Owner, size};

const PAGES: u64 = 12;

/// Three mappings that follow each other, in another order in the user's memory.
fn mapped(owner: &Owner, container: &Hooking) {
    for (at, from) in [(0, 8), (4, 0), (8, 4)] {
        container.map(&owner.space, owner.pages(from, 4), Iova::new(at * PAGE), PROT).unwrap();
    }
}

/// All bytes of the user, as they lie behind the IOVAs.
fn contents(owner: &Owner) -> Vec<u8> {
    let mut bytes = vec![0; size(PAGES * PAGE)];
    owner.space.read(owner.user.start(), &mut bytes).unwrap();
    bytes.rotate_right(size(4 * PAGE));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn bytes_go_where_the_mappings_say_at_any_offset_and_length(
        writes in prop::collection::vec((0..PAGES * PAGE, 1..3 * PAGE, any::<u8>()), 1..16),
    ) {
        let owner = Owner::new(PAGES);
        let container = owner.container();
        mapped(&owner, &container);
        let mut model = contents(&owner);
        for (at, len, byte) in writes {
            let len = size(len.min(PAGES * PAGE - at));
            let place = size(at)..size(at) + len;
            let bytes: Vec<u8> = (0..len).map(|n| byte.wrapping_add(n.to_le_bytes()[0])).collect();
            container.write(Iova::new(at), &bytes).unwrap();
            model[place.clone()].copy_from_slice(&bytes);
            let mut seen = vec![0; len];
            container.read(Iova::new(at), &mut seen).unwrap();
            prop_assert!(seen == model[place]);
        }
        prop_assert!(contents(&owner) == model);
        owner.assert_untouched();
        prop_assert_eq!(container.unmap_all().unwrap(), PAGES * PAGE);
    }
}

#[test]
fn what_is_not_permitted_or_not_mapped_is_refused_before_a_byte_is_copied() {
    let owner = Owner::new(PAGES);
    let container = owner.container();
    for (page, prot) in [(0, PROT), (2, Prot::READ), (4, Prot::WRITE), (7, PROT)] {
        let user = owner.pages(page, 2);
        container.map(&owner.space, user, Iova::new(page * PAGE), prot).unwrap();
    }
    let before = contents(&owner);
    let write = |at, len| container.write(Iova::new(at), &vec![7; size(len)]).unwrap_err();
    let read = |at, len| container.read(Iova::new(at), &mut vec![0; size(len)]).unwrap_err();
    let denied = |error: Error<_>, page| {
        let range = pages(page, 2);
        assert!(matches!(error, Error::Denied { mapping, .. } if mapping == range), "{error}");
        assert_eq!(container.errno(&error), Errno::EPERM);
    };
    denied(write(2 * PAGE, 1), 2);
    denied(write(2 * PAGE - 5, 10), 2);
    // As in Linux, a write reads too.
    denied(write(5 * PAGE, 1), 4);
    denied(read(4 * PAGE - 1, 2), 4);
    container.read(Iova::new(2 * PAGE - 5), &mut [0; 10]).unwrap();
    for (at, len, hole) in [(5 * PAGE, 2 * PAGE, 6), (6 * PAGE, 1, 6), (8 * PAGE, 2 * PAGE, 9)] {
        let error = if at == 5 * PAGE { read(at + PAGE, len) } else { write(at, len) };
        let hole = Iova::new(hole * PAGE);
        assert!(matches!(error, Error::NotMapped { at, .. } if at == hole), "{error}");
        assert_eq!(container.errno(&error), Errno::EINVAL);
    }
    let error = read(0, 0);
    assert!(matches!(error, Error::Range(RangeError::Empty { .. })), "{error}");
    assert_eq!(container.errno(&error), Errno::EINVAL);
    assert_eq!(container.errno(&write(u64::MAX, 2)), Errno::EOVERFLOW);
    assert!(contents(&owner) == before);

    owner.space.unmap(owner.pages(8, 1));
    let error = read(7 * PAGE, 2 * PAGE);
    assert!(matches!(error, Error::Copy { .. }), "{error}");
    assert_eq!(container.errno(&error), Errno::EFAULT);
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
}

#[test]
fn nothing_is_unmapped_while_it_is_copied() {
    let owner = Owner::new(PAGES);
    let container = Arc::new(owner.with_domain());
    mapped(&owner, &container);
    let other = Arc::clone(&container);
    *container.pinner().on_copy.lock() = Some(Box::new(move || {
        for busy in [pages(0, 4), pages(4, 4)] {
            let error = other.unmap(busy).unwrap_err();
            assert!(matches!(error, Error::Busy { busy: b, .. } if b == busy), "{error}");
        }
        // Nobody copies what lies behind, and others may copy too.
        assert_eq!(other.unmap(pages(8, 4)).unwrap(), 4 * PAGE);
        other.read(Iova::new(PAGE), &mut [0; 16]).unwrap();
    }));
    container.write(Iova::new(3 * PAGE), &vec![1; size(2 * PAGE)]).unwrap();
    assert!(container.pinner().on_copy.lock().is_none(), "it was called");
    // Also where copying fails it ends.
    owner.space.unmap(owner.pages(8, 4));
    assert!(container.read(Iova::new(0), &mut [0; 16]).is_err());
    assert_eq!(container.unmap_all().unwrap(), 8 * PAGE);
    owner.assert_untouched();
}

#[test]
fn a_mapping_under_construction_is_busy() {
    let owner = Owner::new(PAGES);
    let container = Arc::new(owner.with_domain());
    let (other, during) = (Arc::clone(&container), pages(0, 4));
    *container.pinner().on_pin.lock() = Some(Box::new(move || {
        let error = other.read(Iova::new(PAGE), &mut [0; 16]).unwrap_err();
        assert!(matches!(error, Error::Busy { busy, .. } if busy == during), "{error}");
        assert_eq!(other.errno(&error), Errno::EBUSY);
    }));
    let request = MapRequest::new(&owner.space, owner.pages(0, 4), Iova::new(0), PROT);
    container.map_request(&request).unwrap();
    assert!(container.pinner().on_pin.lock().is_none(), "it was called");
    container.read(Iova::new(PAGE), &mut [0; 16]).unwrap();
}
