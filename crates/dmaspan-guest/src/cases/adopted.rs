//! Memory that the application brings: mapped, and reached by a device in both directions.

use std::fs::{self, File};
use std::path::Path;
use std::ptr::NonNull;

use dmaspan_linux::{Memory, MemoryKind};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::nvme::both_ways_of;
use super::{BACKEND, Case, Context, MIB, Need, Result, case};

const HUGEPAGE: u64 = 2 * MIB;

pub(super) const CASES: &[Case] = &[
    // Memory of the program itself.
    case("adopted/dma_both_ways_with_foreign", BACKEND, foreign),
    // A part of a file that others have as well.
    case("adopted/dma_both_ways_with_a_shared_file", BACKEND, shared),
    // A file of a hugetlbfs.
    case("adopted/dma_both_ways_with_hugetlbfs", &[Need::Backend, Need::Hugepages(2)], hugetlbfs),
];

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
    mount("hugetlbfs", place, "hugetlbfs", MountFlags::empty(), None)?;
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
