//! Requests of programs to the types of the DMA API beside mapping.

use std::error::Error as StdError;
use std::sync::Arc;

use dmaspan::dma::{
    DestroyFailed, Device, DeviceConfig, Direct, DmaMemory, Error, ListMapping, Mapping, NoPool,
    Piece, RawMemory, Refused, Reservation, ReserveRequest, ScopeFailed, Segment, UnmapFailed,
    UnmapListFailed,
};
use dmaspan::io_pgtable::ArenaList;
use dmaspan::iommu::MapFailed;
use dmaspan::{Direction, Span};

use crate::common::span;
use crate::rig::{Buffer, Host, Translated};

type Raw = Translated<12, RawMemory>;
/// Memory of any kind, which cannot be printed.
type Any = Box<dyn DmaMemory>;

fn is_send<T: Send>() {}
fn is_shared<T: Send + Sync>() {}
fn is_error<T: StdError + 'static>() {}

/// Drivers keep mappings in queues that other threads end, and devices in an `Arc`.
#[test]
fn devices_are_shared_among_threads_and_what_they_map_goes_to_others() {
    is_shared::<Raw>();
    is_shared::<Direct<Any, Host>>();
    is_shared::<Device<Raw>>();
    is_send::<Device<Translated<12, Any>>>();
    is_shared::<Mapping<Raw>>();
    is_send::<Mapping<Translated<12, Any>>>();
    is_shared::<ListMapping<Raw>>();
    is_shared::<Reservation<Raw>>();
    is_shared::<UnmapFailed<Raw>>();
}

/// By `?` they become a boxed error, of memory that is not `Debug` too.
#[test]
fn whatever_gives_something_back_is_an_error_as_others() {
    is_error::<Refused<Any>>();
    is_error::<ScopeFailed<Any, fn()>>();
    is_error::<UnmapFailed<Translated<12, Any>>>();
    is_error::<UnmapListFailed<Translated<12, Any>>>();
    is_error::<DestroyFailed<Translated<12, Any>>>();
    is_error::<MapFailed<ArenaList>>();
}

const RAM: u64 = 0x8000_0000;

fn direct<H: DmaMemory>() -> Device<Direct<H, Host>> {
    let direct = Arc::new(Direct::new(span(RAM, 1 << 20), Host::default()));
    Device::new(direct, NoPool, DeviceConfig::bits(32)).unwrap()
}

fn beyond() -> RawMemory {
    // SAFETY: nobody touches the memory.
    unsafe { RawMemory::new(Piece::memory(span(1 << 33, 0x1000))) }
}

#[test]
fn a_refusal_is_printed_as_its_error_and_still_has_the_memory() {
    let device = direct::<Any>();
    let refused = device.map_single(Box::new(beyond()), Direction::ToDevice).unwrap_err();
    let unreachable: Span = span(1 << 33, 0x1000);
    assert_eq!(refused.error, Error::Unreachable { span: unreachable, last: 0xffff_ffff });
    assert_eq!(refused.to_string(), refused.error.to_string());
    assert!(format!("{refused:?}").contains("given back"), "{refused:?}");
    assert_eq!(refused.memory.unwrap().pieces(), [Piece::memory(unreachable)]);

    let mut segments = [Segment::default()];
    let boxed = |memory: Any| -> Result<(), Box<dyn StdError>> {
        let _list = device.map_list(memory, Direction::ToDevice, &mut segments)?;
        Ok(())
    };
    let error = { boxed }(Box::new(beyond())).unwrap_err();
    assert!(error.downcast::<Refused<Any>>().unwrap().memory.is_some());
}

/// Where in its granule the first byte is does not matter where there are no granules: a driver
/// that maps piece by piece instead has to hear of it.
#[test]
fn a_reservation_without_translation_is_refused_as_that_at_any_offset() {
    let direction = Direction::ToDevice;
    for offset in [0, 0x200, 0x1000] {
        let request = ReserveRequest { len: 0x1000, offset, pieces: 1, direction };
        let refused = direct::<Buffer>().reserve(request).unwrap_err();
        assert_eq!(refused, Error::Untranslated, "{offset:#x}");
    }
}
