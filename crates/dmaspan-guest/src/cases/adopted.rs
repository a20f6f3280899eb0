//! Memory and address spaces that the application brings: the memory is mapped, and a device
//! reaches it in both directions.

use std::fs::{self, File};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use dmaspan::{DmaSpace as _, Iova, IovaRange, Prot};
use dmaspan_linux::plan::{Mapper, Region};
use dmaspan_linux::vfio;
use dmaspan_linux::{Memory, MemoryKind};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::nvme::both_ways_of;
use super::plain::{Plain, adopted_files_that_are_none};
use super::{BACKEND, Case, Context, MIB, Need, Outcome, Result, case};

const HUGEPAGE: u64 = 2 * MIB;

pub(super) const CASES: &[Case] = &[
    // Memory of the program itself.
    case("adopted/dma_both_ways_with_foreign", BACKEND, foreign),
    // A part of a file that others have as well.
    case("adopted/dma_both_ways_with_a_shared_file", BACKEND, shared),
    // A file of a hugetlbfs.
    case("adopted/dma_both_ways_with_hugetlbfs", &[Need::Backend, Need::Hugepages(2)], hugetlbfs),
    // An address space that plain requests map in, too.
    case("adopted/a_part_of_an_address_space_is_mapped_and_the_rest_left_alone", BACKEND, part),
    // Files that are no address space.
    case("adopted/a_file_that_is_no_address_space_is_refused", &[], |_| {
        adopted_files_that_are_none(IovaRange::from_len(Iova::new(AT), MIB)?)?;
        Ok(Outcome::Passed)
    }),
];

/// What plain requests map lies below, and what dmaspan maps from there on.
const AT: u64 = 1 << 32;

fn part(context: &Context) -> Result {
    let theirs = Arc::new(Memory::new(MemoryKind::Base, MIB)?);
    let below = Iova::new(AT - MIB);
    let maps = [(theirs.user_range(), below)];
    let mut plain = Plain::open(context, &theirs, &maps, &[(below, MIB)])?;
    plain.map()?;
    let ours = IovaRange::from_len(Iova::new(AT), 4 * MIB)?;
    let memory = Arc::new(Memory::new(MemoryKind::Base, 2 * MIB)?);
    let kept = Arc::downgrade(&memory);
    for _ in 0..2 {
        let space = plain.adopted(ours)?;
        check!(space.limits().apertures, [ours]);
        for outside in [AT - MIB, AT + 3 * MIB] {
            let refused =
                space.map(&memory, memory.user_range(), Iova::new(outside), Prot::READ_WRITE);
            check!(matches!(refused, Err(vfio::Error::OutsideApertures { .. }));
                "the rest is mapped");
        }
        let mapper = Mapper::new(space)?;
        let mapped = mapper.plan([Region::whole(&memory, Prot::READ_WRITE)])?.map()?;
        check!(ours.covers(IovaRange::from_len(mapped.iova(0).ok_or("no place")?, 2 * MIB)?));
        mapped.unmap()?;
        // What is left is unmapped with the space.
        let space = mapper.space();
        space.map(&memory, memory.user_range(), Iova::new(AT + MIB), Prot::READ_WRITE)?;
        check!(space.mappings(), 1);
        check!(space.unmap(IovaRange::from_len(below, MIB)?)?, 0);
    }
    drop(memory);
    check!(kept.strong_count(), 0);
    // Theirs is there still, all of it.
    check!(plain.unmap()?, MIB);
    Ok(Outcome::Passed)
}

fn foreign(context: &Context) -> Result {
    let own = Memory::new(MemoryKind::Base, 2 * MIB)?;
    let start = NonNull::from(own.words()).cast();
    #[expect(unsafe_code, reason = "this is what an application does that brings its memory")]
    // SAFETY:
    // 1. The words are all that there is from `start` on, and whoever has them accesses them
    //    atomically. They are freed with `own`, which is kept.
    let memory = unsafe { Memory::foreign(start, 2 * MIB, own)? };
    both_ways_of(context, memory)
}

/// The device's writes are seen through the other mapping, too.
fn shared(context: &Context) -> Result {
    let whole = Memory::new(MemoryKind::Memfd, 4 * MIB)?;
    let (file, offset) = whole.file().ok_or("a memfd has a file")?;
    let part = Memory::from_file(file.try_clone_to_owned()?, offset + MIB, 2 * MIB)?;
    part.populate()?;
    let outcome = both_ways_of(context, part)?;
    let (mut word, mut beside) = ([0; 8], [0; 8]);
    whole.read(MIB + 8, &mut word)?;
    whole.read(MIB - 8, &mut beside)?;
    if word == [0; 8] || beside != [0; 8] {
        return Err(format!("in the file are {word:?}, and before the part {beside:?}").into());
    }
    Ok(outcome)
}

fn hugetlbfs(context: &Context) -> Result {
    let place = Path::new("/tmp/hugetlbfs");
    fs::create_dir_all(place)?;
    mount("hugetlbfs", place, "hugetlbfs", MountFlags::empty(), Some(c"pagesize=2M"))?;
    let outcome = on_hugetlbfs(context, &place.join("file"));
    unmount(place, UnmountFlags::empty())?;
    outcome
}

fn on_hugetlbfs(context: &Context, path: &Path) -> Result {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len(2 * HUGEPAGE)?;
    // The second page of two.
    let memory = Memory::from_file(file, HUGEPAGE, HUGEPAGE)?;
    fs::remove_file(path)?;
    memory.populate()?;
    if memory.page_size() != HUGEPAGE {
        return Err(format!("its pages are of {:#x} bytes", memory.page_size()).into());
    }
    both_ways_of(context, memory)
}
