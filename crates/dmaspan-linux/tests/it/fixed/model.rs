//! Random reads and writes, several at a time, against a file that is plain bytes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dmaspan_linux::MemoryKind;
use dmaspan_linux::fixed::{FixedBuf, FixedRing};

use crate::fixed::support::{Random, file_with, pattern, pool, ring, wait};
use crate::turn::turn;

const FILE_LEN: usize = 1 << 20;
const SLICE_LEN: u64 = 100 << 10;
const SLICES: u32 = 160;
const DEPTH: u32 = 8;
const SEEDS: [u64; 2] = [0x5eed_0001, 0x00dd_5eed];

/// What offsets and lengths are multiples of, in the file and in the slice.
#[derive(Clone, Copy)]
struct Grain {
    file: usize,
    slice: usize,
}

const ANY: Grain = Grain { file: 1, slice: 1 };
const DIRECT: Grain = Grain { file: 4096, slice: 512 };

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Read,
    Write,
}

/// An operation in flight, and what its slice held when it began.
struct Pending {
    way: Way,
    in_file: Range<usize>,
    in_slice: Range<usize>,
    before: Vec<u8>,
}

struct Model {
    file: Vec<u8>,
    pending: Vec<Option<Pending>>,
    random: Random,
    grain: Grain,
}

impl Model {
    fn operation(&mut self, slice_len: usize) -> Pending {
        let Grain { file, slice } = self.grain;
        let len = (1 + self.random.below(64 << 10)).next_multiple_of(file);
        let at = |random: &mut Random, room: usize, grain: usize| {
            let start = random.below((room - len) / grain + 1) * grain;
            start..start + len
        };
        let in_file = at(&mut self.random, FILE_LEN, file);
        let in_slice = at(&mut self.random, slice_len, slice);
        let way = if self.random.below(2) == 0 { Way::Read } else { Way::Write };
        Pending { way, in_file, in_slice, before: Vec::new() }
    }

    /// Whether the outcome would depend on which of two is first.
    fn conflicts(&self, wanted: &Pending) -> bool {
        self.pending.iter().flatten().any(|other| {
            (wanted.way == Way::Write || other.way == Way::Write)
                && wanted.in_file.start < other.in_file.end
                && other.in_file.start < wanted.in_file.end
        })
    }

    fn begin(&mut self, ring: &mut FixedRing, mut buffer: FixedBuf, file: &Arc<File>, seed: u64) {
        let place = self.pending.iter().position(Option::is_none).unwrap();
        let mut pending = self.operation(buffer.len());
        while self.conflicts(&pending) {
            pending = self.operation(buffer.len());
        }
        let filler = self.random.byte();
        buffer.fill(filler);
        let marks = pending.in_slice.clone();
        buffer[marks.start] = self.random.byte();
        buffer[marks.end - 1] = self.random.byte();
        pending.before = buffer.to_vec();
        let (bytes, offset) = (pending.in_slice.clone(), pending.in_file.start);
        let (offset, token) = (u64::try_from(offset).unwrap(), u64::try_from(place).unwrap());
        match pending.way {
            Way::Read => ring.read(buffer, bytes, file, offset, token),
            Way::Write => ring.write(buffer, bytes, file, offset, token),
        }
        .unwrap_or_else(|refused| panic!("seed {seed:#x}: {refused}"));
        self.pending[place] = Some(pending);
    }

    fn end(&mut self, ring: &mut FixedRing, seed: u64) -> FixedBuf {
        let done = wait(ring);
        let place = usize::try_from(done.token).unwrap();
        let Pending { way, in_file, in_slice, mut before } = self.pending[place].take().unwrap();
        assert_eq!(done.result.unwrap(), in_slice.len(), "seed {seed:#x}");
        match way {
            Way::Read => before[in_slice].copy_from_slice(&self.file[in_file]),
            Way::Write => self.file[in_file].copy_from_slice(&before[in_slice]),
        }
        // All of the slice: what is beside the bytes stays.
        assert!(done.buffer[..] == before, "seed {seed:#x}, slice {}", done.buffer.index());
        done.buffer
    }
}

fn run(kind: MemoryKind, flags: i32, grain: Grain, operations: usize) {
    let _turn = turn();
    for seed in SEEDS {
        let Some(pool) = pool(kind, SLICE_LEN, SLICES) else { return };
        let Some(mut ring) = ring(&pool, DEPTH) else { return };
        let bytes: Vec<u8> = (0..FILE_LEN).map(pattern).collect();
        let Some(file) = file_with(&bytes, flags) else { return };
        let pending = (0..DEPTH).map(|_| None).collect();
        let mut model = Model { file: bytes, pending, random: Random(seed), grain };
        // All slices take part, not only those that were free last.
        let mut idle: Vec<_> = (0..SLICES).map(|_| pool.take().unwrap()).collect();
        for _ in 0..operations {
            if ring.in_flight() == ring.depth() {
                let buffer = model.end(&mut ring, seed);
                idle.push(buffer);
            }
            let buffer = idle.swap_remove(model.random.below(idle.len()));
            model.begin(&mut ring, buffer, &file, seed);
            if model.random.below(3) == 0 {
                ring.submit().unwrap();
            }
        }
        while ring.in_flight() != 0 {
            idle.push(model.end(&mut ring, seed));
        }
        let mut found = vec![0; FILE_LEN];
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&*file));
        File::open(path).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert!(found == model.file, "seed {seed:#x}");
        drop(idle);
        assert_eq!(pool.free_slices(), SLICES);
    }
}

#[test]
fn bytes_at_odd_places_of_base_pages_are_the_files() {
    run(MemoryKind::Base, 0, ANY, 3000);
}

#[test]
fn bytes_at_odd_places_of_hugetlb_pages_are_the_files() {
    run(MemoryKind::Hugetlb2M, 0, ANY, 3000);
}

#[test]
fn bytes_at_odd_places_of_transparent_huge_pages_are_the_files() {
    run(MemoryKind::Thp, 0, ANY, 3000);
}

#[test]
fn bytes_at_odd_places_of_a_file_in_memory_are_the_files() {
    run(MemoryKind::Memfd, 0, ANY, 3000);
}

#[test]
fn direct_io_at_any_sector_of_huge_and_base_pages_is_the_files() {
    run(MemoryKind::Hugetlb2M, libc::O_DIRECT, DIRECT, 1000);
    run(MemoryKind::Base, libc::O_DIRECT, DIRECT, 1000);
}
