//! The operations of VFIO's type 1 alone.

use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::{
    Backend, DirtyLogging, DirtyPages, Error, OpenError, VfioContainer, VfioDevice,
};
use dmaspan_linux::{Memory, MemoryKind};

use super::{Case, Context, MIB, Need, Outcome, Result, case, page, same};

const AT: u64 = 1 << 32;

pub(super) const CASES: &[Case] = &[
    // VFIO takes all that a device reaches for written; the compatibility mode says that it has
    // none.
    case(
        "type1/dirty_pages_are_those_that_the_device_reaches",
        &[Need::Backend, Need::OneOf(&[Backend::Vfio, Backend::Compat])],
        dirty_pages,
    ),
];

fn open(context: &Context) -> Result<(VfioContainer, VfioDevice), OpenError> {
    let bdf = context.device.parse().map_err(|_| OpenError::Unsupported {
        what: "the device has no address",
        advice: "name it as lspci does",
    })?;
    match context.backend {
        Backend::Compat => VfioContainer::open_compat(bdf),
        _ => VfioContainer::open(bdf),
    }
}

fn dirty_pages(context: &Context) -> Result {
    let (space, _device) = open(context)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, MIB)?);
    let starts = [AT, AT + 2 * MIB];
    let map = |start| space.map(&memory, memory.user_range(), Iova::new(start), Prot::READ_WRITE);
    starts.into_iter().try_for_each(map)?;
    let all = IovaRange::from_len(Iova::new(AT), 3 * MIB)?;
    let mut bitmap = DirtyPages::new(all, page())?;
    match (context.backend, space.set_dirty_tracking(DirtyLogging::On)) {
        (Backend::Compat, Err(Error::Unsupported { .. })) => return Ok(Outcome::Passed),
        (Backend::Compat, other) => {
            return Err(format!("the compatibility mode notes what is written: {other:?}").into());
        }
        (_, set) => set?,
    }
    space.read_dirty(&mut bitmap)?;
    let dirty: Vec<IovaRange> = bitmap.ranges().collect();
    let mapped: Result<Vec<_>, _> =
        starts.iter().map(|&start| IovaRange::from_len(Iova::new(start), MIB)).collect();
    same(dirty, mapped?, "dirty ranges")?;
    let mut part = DirtyPages::new(IovaRange::from_len(Iova::new(AT), MIB / 2)?, page())?;
    let refused = space.read_dirty(&mut part);
    check!(matches!(refused, Err(Error::Bisects { .. })); "a part of a mapping has a bitmap");
    space.set_dirty_tracking(DirtyLogging::Off)?;
    bitmap.clear();
    let refused = space.read_dirty(&mut bitmap);
    check!(refused.is_err(); "without tracking there are dirty pages");
    space.unmap_all()?;
    Ok(Outcome::Passed)
}
