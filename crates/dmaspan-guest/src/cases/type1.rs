//! What VFIO's type 1 alone has.

use std::sync::Arc;

use dmaspan::{DmaSpace, Iova, IovaRange, Prot};
use dmaspan_linux::vfio::{Backend, DirtyBitmap, DirtyTracking, Error, OpenError, Type1};
use dmaspan_linux::{Memory, MemoryKind};

use super::{Case, Context, Need, Outcome, Result};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const AT: u64 = 1 << 32;

/// VFIO takes all that a device reaches for written; the compatibility mode says that it has none.
pub(super) const DIRTY_PAGES: Case = Case {
    name: "type1/dirty_pages_are_those_that_the_device_reaches",
    needs: &[Need::Backend, Need::OneOf(&[Backend::Vfio, Backend::Compat])],
    run: dirty_pages,
};

fn open(context: &Context) -> std::result::Result<(Type1, dmaspan_linux::vfio::Device), OpenError> {
    let bdf = context.device.parse().map_err(|_| OpenError::Unsupported {
        what: "the device has no address",
        advice: "name it as lspci does",
    })?;
    match context.backend {
        Backend::Compat => Type1::open_compat(bdf),
        _ => Type1::open(bdf),
    }
}

fn dirty_pages(context: &Context) -> Result {
    let (space, _device) = open(context)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, MIB)?);
    let starts = [AT, AT + 2 * MIB];
    let map = |start| space.map(&memory, memory.user_range(), Iova::new(start), Prot::READ_WRITE);
    starts.into_iter().try_for_each(map)?;
    let all = IovaRange::from_len(Iova::new(AT), 3 * MIB)?;
    let mut bitmap = DirtyBitmap::new(all, PAGE)?;
    match (context.backend, space.set_dirty_tracking(DirtyTracking::On)) {
        (Backend::Compat, Err(Error::Unsupported { .. })) => return Ok(Outcome::Passed),
        (Backend::Compat, other) => {
            return Err(format!("the compatibility mode notes what is written: {other:?}").into());
        }
        (_, set) => set?,
    }
    space.read_dirty(&mut bitmap)?;
    let dirty: Vec<IovaRange> = bitmap.ranges().collect();
    let mapped: std::result::Result<Vec<_>, _> =
        starts.iter().map(|&start| IovaRange::from_len(Iova::new(start), MIB)).collect();
    if dirty != mapped? {
        return Err(format!("of {all} dirty are {dirty:?}").into());
    }
    let mut part = DirtyBitmap::new(IovaRange::from_len(Iova::new(AT), MIB / 2)?, PAGE)?;
    if !matches!(space.read_dirty(&mut part), Err(Error::Bisects { .. })) {
        return Err("a part of a mapping has a bitmap".into());
    }
    space.set_dirty_tracking(DirtyTracking::Off)?;
    bitmap.clear();
    if space.read_dirty(&mut bitmap).is_ok() {
        return Err("without tracking there are dirty pages".into());
    }
    space.unmap_all()?;
    Ok(Outcome::Passed)
}
