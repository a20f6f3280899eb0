//! Plans what a VMM asks of a device's address space, without any device: a space that records.
//!
//! The planner checks all regions before the space is asked, merges neighbours, and says what is
//! wrong with a region by its number. Here the space is the program's own; `vfio::Ioas` and
//! `vfio::VfioContainer` are the kernel's.

// ANCHOR: head
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex};

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};
use dmaspan_linux::plan::{Mapper, Region};
use dmaspan_linux::{Memory, MemoryKind};

const MIB: u64 = 1 << 20;
// ANCHOR_END: head

// ANCHOR: space
/// What is mapped, by its first address. It keeps the memory until the unmap.
#[derive(Default)]
struct Recorder {
    mapped: Mutex<BTreeMap<u64, (IovaRange, Arc<Memory>)>>,
}

impl DmaSpace for Recorder {
    type Memory = Arc<Memory>;
    type Error = std::io::Error;

    fn map_labelled(
        &self,
        memory: &Arc<Memory>,
        user: UserRange,
        iova: Iova,
        prot: Prot,
        _label: Label,
    ) -> Result<(), std::io::Error> {
        let len = user.checked_len().unwrap_or(u64::MAX);
        let range = IovaRange::from_len(iova, len).map_err(std::io::Error::other)?;
        println!("  map {len:#x} bytes at {range}, {prot:?}");
        let mut mapped = self.mapped.lock().unwrap();
        mapped.insert(iova.get(), (range, Arc::clone(memory)));
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> Result<u64, std::io::Error> {
        let mut mapped = self.mapped.lock().unwrap();
        let mut gone = 0;
        mapped.retain(|_, (one, _)| {
            gone += if range.covers(*one) { one.len_less_one() + 1 } else { 0 };
            !range.covers(*one)
        });
        Ok(gone)
    }

    fn limits(&self) -> Limits {
        // x86: nothing is mapped where interrupts are written.
        let below = IovaRange::new(Iova::new(0), Iova::new(0xfedf_ffff));
        let above = IovaRange::new(Iova::new(0xfef0_0000), Iova::new((1 << 48) - 1));
        Limits {
            apertures: below.into_iter().chain(above).collect(),
            page_sizes: 1 << 12 | 1 << 21 | 1 << 30,
            mappings_left: Some(65535),
        }
    }

    fn errno(&self, error: &std::io::Error) -> Errno {
        if error.kind() == std::io::ErrorKind::AlreadyExists {
            Errno::EEXIST
        } else {
            Errno::EINVAL
        }
    }
}
// ANCHOR_END: space

fn main() -> Result<(), Box<dyn Error>> {
    // ANCHOR: plan
    let mapper = Mapper::new(Recorder::default())?;
    // A guest's memory: one piece of the VMM's, which the guest has in two places.
    let ram = Arc::new(Memory::new(MemoryKind::Memfd, 64 * MIB)?);
    let regions = || -> Result<_, Box<dyn Error>> {
        Ok([
            Region::part(&ram, 0, 16 * MIB, Prot::READ_WRITE)?.at(Iova::new(0)),
            Region::part(&ram, 16 * MIB, 32 * MIB, Prot::READ_WRITE)?.at(Iova::new(16 * MIB)),
            Region::part(&ram, 48 * MIB, 16 * MIB, Prot::READ_WRITE)?.at(Iova::new(4 << 30)),
        ])
    };
    let planned = mapper.plan(regions()?)?;
    println!("{} regions become {} maps:", planned.regions(), planned.maps().len());
    let mapped = planned.map()?;

    // What cannot be mapped is refused before anything is.
    let window = Region::part(&ram, 0, 2 * MIB, Prot::READ)?.at(Iova::new(0xfed0_0000));
    match mapper.plan([window]) {
        Ok(_) => println!("the interrupts were planned away"),
        Err(error) => println!("refused: {error}"),
    }
    let twice = mapper.plan(regions()?).map(|planned| planned.bytes());
    println!("again: {}", twice.map_or_else(|error| error.to_string(), |bytes| format!("{bytes}")));

    mapped.unmap()?;
    println!("{} bytes are mapped in the end", mapper.mapped_bytes());
    Ok(())
}
// ANCHOR_END: plan
