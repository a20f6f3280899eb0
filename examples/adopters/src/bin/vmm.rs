//! A VMM maps its guest's memory for a device: vm-memory on one side, `plan::Mapper` on the other.
//!
//! The guest has 512 MiB at 0 and 256 MiB at 4 GiB. Each of its regions becomes one map of 2 MiB
//! leaves at the guest's own addresses. A range that the VMM keeps for itself is excluded, a BAR of
//! another device is mapped beside the memory, a DIMM comes while the guest runs, and a part goes
//! while the rest stays as it is. Memory without a file is taken by `Memory::foreign` instead.
//!
//! A machine without VFIO has a space that records what it is asked. It stands for the kernel's and
//! is no glue.
//!
//! Glue: 6 lines; unsafe: 0 blocks, 0 impls.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use dmaspan::{DmaSpace, Errno, Iova, IovaRange, Label, Limits, Prot, UserRange};
use dmaspan_linux::pci::System;
use dmaspan_linux::plan::{Mapper, MemorySpace, MmioSpace, Region};
use dmaspan_linux::vfio::{Backend, VfioSpace};
use dmaspan_linux::{Memory, MemoryKind};
use vm_memory::{
    Address, Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap,
};

const MIB: u64 = 1 << 20;
const HIGH: u64 = 4 << 30;
const DIMM: u64 = 8 << 30;

// ANCHOR: glue
/// A region of the guest's memory as a device shall see it: at the guest's own address.
fn region(ram: &GuestRegionMmap, unit: u32) -> Result<Region, Box<dyn Error>> {
    let file = ram.file_offset().ok_or("the guest's memory has no file")?;
    let memory = Memory::from_file(file.file().try_clone()?, file.start(), ram.len())?;
    let at = Iova::new(ram.start_addr().raw_value());
    Ok(Region::whole(&Arc::new(memory), Prot::READ_WRITE).at(at).in_unit(unit))
}
// ANCHOR_END: glue

/// Plans all of a guest's memory, each region of which can be unmapped by itself.
fn regions(guest: &GuestMemoryMmap) -> Result<Vec<Region>, Box<dyn Error>> {
    (0..).zip(guest.iter()).map(|(unit, ram)| region(ram, unit)).collect()
}

/// Memory of a guest, in a file of its own.
fn ram(at: u64, len: u64) -> Result<GuestRegionMmap, Box<dyn Error>> {
    let file = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    let file = Some(FileOffset::new(file, 0));
    Ok(GuestRegionMmap::from_range(GuestAddress(at), usize::try_from(len)?, file)?)
}

/// Maps and unmaps a guest's memory. Returns how many maps that were.
fn map_all(
    space: impl MemorySpace + 'static,
    guest: &GuestMemoryMmap,
) -> Result<usize, Box<dyn Error>> {
    let mapped = Mapper::new(space)?.map(regions(guest)?)?;
    let maps = mapped.plan().maps().len();
    mapped.unmap()?;
    Ok(maps)
}

fn main() -> Result<(), Box<dyn Error>> {
    let guest = GuestMemoryMmap::from_regions(vec![ram(0, 512 * MIB)?, ram(HIGH, 256 * MIB)?])?;
    let mapper = Mapper::new(Recorder::default())?;

    // The VMM's own: no guest memory, no BAR and no buffer may come here.
    mapper.exclude(IovaRange::from_len(Iova::new(0x2000_0000), 0xc000_0000)?)?;
    let planned = mapper.plan(regions(&guest)?)?;
    for map in planned.maps() {
        println!("map {}", map.iova());
    }
    for (leaf, bytes) in planned.leaves().filter(|(_, bytes)| *bytes > 0) {
        println!("{} MiB in leaves of {} KiB", bytes / MIB, leaf >> 10);
    }
    let mut mapped = planned.map()?;
    guest.write_obj(0x600d_f00d_u32, GuestAddress(HIGH + 0x1000))?;
    println!("the device reads {:#x}", mapper.space().read_u32(HIGH + 0x1000)?);

    // A BAR and a buffer, wherever there is room.
    let registers = Arc::new(Memory::new(MemoryKind::Memfd, 16 * MIB)?);
    let bar = mapper.map_bar(&registers, 0..16 * MIB, None, Prot::READ_WRITE)?;
    let buffer = mapper.alloc(64 << 10, 64 << 10)?;
    let are_apart = bar.range().intersection(buffer.range()).is_none();
    let are_outside = bar.iova().min(buffer.iova()) >= Iova::new(0xe000_0000);
    println!("BAR and buffer are apart: {are_apart}, outside the excluded range: {are_outside}");
    let inside = region(&ram(0x3000_0000, 2 * MIB)?, 0)?;
    println!("refused: {}", mapper.plan([inside]).map(|_| ()).unwrap_err());

    // A DIMM comes, and goes with the guest's consent.
    let dimm = Arc::new(ram(DIMM, 128 * MIB)?);
    let added = mapper.map([region(&dimm, 0)?])?;
    let larger = guest.insert_region(dimm)?;
    larger.write_obj(7_u32, GuestAddress(DIMM + 128 * MIB - 4))?;
    println!("the DIMM has {}", mapper.space().read_u32(DIMM + 128 * MIB - 4)?);
    added.unmap()?;
    let (_guest, _dimm) = larger.remove_region(GuestAddress(DIMM), 128 * MIB)?;

    // A part of what was mapped at once.
    let half = IovaRange::from_len(Iova::new(HIGH), 128 * MIB)?;
    println!("refused: {}", mapped.unmap_part(half).unwrap_err());
    println!("{} MiB unmapped, {} left", mapped.unmap_unit(1)? / MIB, mapped.bytes() / MIB);
    println!("the device: {}", mapper.space().read_u32(HIGH + 0x1000).unwrap_err());
    drop((bar, buffer, mapped));
    println!("{} bytes are mapped in the end", mapper.mapped_bytes());

    let devices = System::new().devices().unwrap_or_default();
    match devices.iter().find(|function| function.has_vfio_driver()) {
        None => println!("SKIP: no device has VFIO's driver"),
        Some(function) => match VfioSpace::open(Backend::Vfio, function.bdf) {
            Err(error) => println!("SKIP: {error}"),
            Ok((space, _device)) => println!("by VFIO: {} maps", map_all(space, &guest)?),
        },
    }
    Ok(())
}

/// A space that keeps what is mapped, for devices that are no hardware.
#[derive(Default)]
struct Recorder {
    mapped: Mutex<BTreeMap<u64, Entry>>,
}

type Entry = (IovaRange, Arc<Memory>, UserRange);

impl Recorder {
    fn read_u32(&self, iova: u64) -> Result<u32, Box<dyn Error>> {
        let mapped = self.mapped.lock().unwrap();
        let below = mapped.range(..=iova).next_back();
        let found = below.filter(|(_, (range, ..))| range.contains(Iova::new(iova)));
        let (start, (_, memory, user)) = found.ok_or("nothing is mapped there")?;
        let first = user.start().get() - memory.user_range().start().get();
        let mut bytes = [0; 4];
        memory.read(first + iova - start, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}

impl DmaSpace for Recorder {
    type Memory = Arc<Memory>;
    type Error = io::Error;

    fn map_labelled(
        &self,
        of: &Arc<Memory>,
        user: UserRange,
        at: Iova,
        _: Prot,
        _: Label,
    ) -> io::Result<()> {
        let len = user.checked_len().unwrap_or(u64::MAX);
        let range = IovaRange::from_len(at, len).map_err(io::Error::other)?;
        self.mapped.lock().unwrap().insert(at.get(), (range, Arc::clone(of), user));
        Ok(())
    }

    fn unmap(&self, range: IovaRange) -> io::Result<u64> {
        let mut mapped = self.mapped.lock().unwrap();
        let gone = mapped.extract_if(.., |_, (one, ..)| range.covers(*one));
        Ok(gone.map(|(_, (one, ..))| one.len_less_one() + 1).sum())
    }

    /// As x86 has it: nothing is mapped where interrupts are written.
    fn limits(&self) -> Limits {
        let below = IovaRange::new(Iova::new(0), Iova::new(0xfedf_ffff));
        let above = IovaRange::new(Iova::new(0xfef0_0000), Iova::new((1 << 48) - 1));
        let apertures = below.into_iter().chain(above).collect();
        Limits { apertures, page_sizes: 1 << 12 | 1 << 21 | 1 << 30, mappings_left: None }
    }

    fn errno(&self, _: &io::Error) -> Errno {
        Errno::EINVAL
    }
}

impl MmioSpace for Recorder {
    type Bar = Arc<Memory>;

    fn bar_range(bar: &Arc<Memory>, offsets: Range<u64>) -> io::Result<UserRange> {
        let len = offsets.end.saturating_sub(offsets.start);
        bar.sub_range(offsets.start, len).map_err(io::Error::other)
    }

    fn map_bar(&self, bar: &Arc<Memory>, of: Range<u64>, at: Iova, prot: Prot) -> io::Result<()> {
        self.map(bar, Self::bar_range(bar, of)?, at, prot)
    }
}
