//! A client's memory in real memory: held, read and written by copies and by system calls, while
//! regions come and go.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dmaspan::regbuf::{HeldError, HostMemory as _, RegionError, RemoteMemory};
use dmaspan::{Errno, Iova, Prot, Span};
use dmaspan_linux::client::{self, ClientRegions, HeldFileError};
use dmaspan_linux::{Memory, MemoryKind};

use crate::fixed::support::{Random, file_with, pattern};

const READ: Prot = Prot::READ;
const WRITE: Prot = Prot::WRITE;
const BOTH: Prot = Prot::READ_WRITE;
/// Longer than any of these waits takes.
/// The kernel's own page.
fn page_size() -> u64 {
    MemoryKind::Base.page_size()
}

const LONG: Duration = Duration::from_secs(600);

fn at(start: u64) -> Iova {
    Iova::new(start)
}

fn span(start: u64, len: u64) -> Span<Iova> {
    Span::new(at(start), len).unwrap()
}

fn size(value: u64) -> usize {
    value.try_into().unwrap()
}

/// A region of a memfd that this process has mapped twice: as the client, and as the server.
fn region(regions: &ClientRegions, start: u64, pages: u64, access: Prot) -> Memory {
    let client = Memory::new(MemoryKind::Memfd, pages * page_size()).unwrap();
    let (fd, offset) = client.file().unwrap();
    let fd = fd.try_clone_to_owned().unwrap();
    let server = Memory::from_file(fd, offset, pages * page_size()).unwrap();
    assert_eq!(
        regions.insert(at(start), access, Arc::new(server)),
        Ok(span(start, pages * page_size()))
    );
    client
}

#[test]
fn what_is_written_to_held_memory_is_the_clients_over_all_its_regions() {
    let regions = ClientRegions::new();
    let base = 0x1_0000;
    // Pages in turn, each a region and a memfd of its own.
    let clients: Vec<_> =
        (0..5).map(|page| region(&regions, base + page * page_size(), 1, BOTH)).collect();
    let mut random = Random(3);
    let mut model = vec![0; size(5 * page_size())];
    for _ in 0..300 {
        let start = random.below(model.len() - 1);
        let len = 1 + random.below((model.len() - start).min(9000));
        let first = base + u64::try_from(start).unwrap();
        let held = regions.hold(at(first), len.try_into().unwrap(), BOTH).unwrap();
        let mut bytes = vec![0; len];
        held.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, model[start..start + len]);
        bytes.fill_with(|| random.byte());
        held.write(0, &bytes).unwrap();
        model[start..start + len].copy_from_slice(&bytes);
        // The slices are that memory.
        let total: usize = held.slices(0, held.len()).unwrap().map(|slice| slice.len()).sum();
        assert_eq!(total, len);
    }
    for (page, client) in clients.iter().enumerate() {
        let mut bytes = vec![0; size(page_size())];
        client.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, model[page * size(page_size())..][..size(page_size())]);
    }
}

#[test]
fn memory_says_where_it_is_and_copies_within_itself_alone() {
    let memory = Memory::new(MemoryKind::Base, 2 * page_size()).unwrap();
    let start = memory.user_range().start().get();
    let there = memory.slice().span().unwrap();
    assert_eq!((there.start().get(), there.len()), (start, 2 * page_size()));
    for (offset, len) in [(2 * page_size(), 1), (2 * page_size() - 3, 4), (u64::MAX, 1)] {
        let outside = memory.slice().part(offset.try_into().unwrap(), len);
        assert_eq!(outside, None);
        let refused = dmaspan::regbuf::HostMemory::write(&memory, offset, &vec![1; len]);
        assert_eq!(refused.unwrap_err().buffer, 2 * page_size());
        let refused = dmaspan::regbuf::HostMemory::read(&memory, offset, &mut vec![1; len]);
        assert_eq!(refused.unwrap_err().offset, offset);
    }
    let part = memory.slice().part(size(page_size()), 8).unwrap();
    assert_eq!((part.span().unwrap().start().get(), part.len()), (start + page_size(), 8));
}

#[test]
fn files_are_read_and_written_straight_from_held_memory() {
    let regions = ClientRegions::new();
    for page in 0..3 {
        drop(region(&regions, page * page_size(), 1, BOTH));
    }
    let bytes: Vec<u8> = (0..40_000).map(pattern).collect();
    let disk = file_with(&bytes, 0).unwrap();
    let held = regions.hold(at(100), 9000, BOTH).unwrap();
    for (from, len, offset) in [(0, 9000, 7), (17, 1, 39_999), (4000, 5000, 30_000), (50, 0, 0)] {
        assert_eq!(client::read_file(&held, from..from + len, &disk, offset).unwrap(), len);
        let mut found = vec![0; size(len)];
        held.read(from, &mut found).unwrap();
        assert_eq!(found, bytes[size(offset)..][..size(len)]);
    }
    // Fewer at the end of the file, and none behind it.
    assert_eq!(client::read_file(&held, 0..9000, &disk, 39_900).unwrap(), 100);
    assert_eq!(client::read_file(&held, 0..9000, &disk, 40_000).unwrap(), 0);

    let copy = file_with(b"", 0).unwrap();
    client::read_file(&held, 0..9000, &disk, 1234).unwrap();
    assert_eq!(client::write_file(&held, 300..8300, &copy, 50).unwrap(), 8000);
    let mut found = vec![0; 8000];
    copy.read_exact_at(&mut found, 50).unwrap();
    assert_eq!(found, bytes[1234 + 300..][..8000]);
}

/// A client that does not answer.
struct Nobody;

impl RemoteMemory for Nobody {
    fn read(&self, _offset: u64, _bytes: &mut [u8]) -> Result<(), Errno> {
        Err(Errno::EIO)
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> Result<(), Errno> {
        Err(Errno::EIO)
    }
}

#[test]
fn a_file_is_not_touched_where_memory_is_not_held_for_that() {
    let regions = ClientRegions::new();
    drop(region(&regions, 0, 1, BOTH));
    regions.insert_remote(at(page_size()), page_size(), BOTH, Arc::new(Nobody)).unwrap();
    let file = file_with(b"0123456789", 0).unwrap();
    let of = |error: HeldFileError<Iova>| match error {
        HeldFileError::Held(error) => error,
        error => panic!("{error}"),
    };
    let held = regions.hold(at(0), page_size(), READ).unwrap();
    let error = of(client::read_file(&held, 0..8, &file, 0).unwrap_err());
    assert_eq!(
        error,
        HeldError::Access { held: span(0, page_size()), wanted: WRITE, access: READ }
    );
    let held = regions.hold(at(0), page_size(), WRITE).unwrap();
    let error = of(client::write_file(&held, 0..8, &file, 0).unwrap_err());
    assert_eq!(
        error,
        HeldError::Access { held: span(0, page_size()), wanted: READ, access: WRITE }
    );
    let held = regions.hold(at(0), 2 * page_size(), BOTH).unwrap();
    let refused = HeldError::Remote { part: span(page_size() + 4, 4), errno: Errno::EIO };
    for refuses in [client::read_file, client::write_file] {
        let error = of(refuses(&held, page_size() + 4..page_size() + 8, &file, 0).unwrap_err());
        assert_eq!(error, refused);
    }
    for bytes in [0..2 * page_size() + 1, u64::MAX - 1..u64::MAX] {
        let error = of(client::read_file(&held, bytes, &file, 0).unwrap_err());
        assert!(matches!(error, HeldError::Outside { .. }), "{error}");
    }
    // The kernel's own reasons, with what was asked.
    let write_only = File::create("/dev/null").unwrap();
    let error = client::read_file(&held, 0..8, &write_only, 5).unwrap_err();
    assert!(matches!(error, HeldFileError::System { offset: 5, len: 8, .. }), "{error}");
    let error = client::read_file(&held, 0..8, &file, u64::MAX).unwrap_err();
    assert_eq!(error.errno(), Errno::EINVAL);
    let mut bytes = [0; 8];
    held.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8], "nothing was read");
}

/// A client that is asked for its memory, and how much at most at once.
struct Asked {
    memory: Memory,
    longest: AtomicUsize,
}

impl RemoteMemory for Asked {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        self.longest.fetch_max(bytes.len(), Ordering::Relaxed);
        self.memory.read(offset, bytes).map_err(|error| error.errno())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.longest.fetch_max(bytes.len(), Ordering::Relaxed);
        self.memory.write(offset, bytes).map_err(|error| error.errno())
    }
}

#[test]
fn files_go_by_copies_to_and_from_memory_that_the_client_is_asked_for() {
    let remote = 600 * page_size();
    let regions = ClientRegions::new();
    drop(region(&regions, 0, 1, BOTH));
    let memory = Memory::new(MemoryKind::Base, remote).unwrap();
    let asked = Arc::new(Asked { memory, longest: AtomicUsize::new(0) });
    regions.insert_remote(at(page_size()), remote, BOTH, Arc::clone(&asked) as Arc<_>).unwrap();
    drop(region(&regions, page_size() + remote, 1, BOTH));
    let all = size(2 * page_size() + remote);
    let bytes: Vec<u8> = (0..all + 9).map(pattern).collect();
    let disk = file_with(&bytes, 0).unwrap();
    let held = regions.hold(at(0), 2 * page_size() + remote, BOTH).unwrap();
    let mut found = vec![0; all];
    assert_eq!(client::read_file(&held, 0..held.len(), &disk, 9).unwrap(), held.len());
    // Longer than a message.
    assert_eq!(asked.longest.load(Ordering::Relaxed), 1 << 20);
    held.read(0, &mut found).unwrap();
    assert!(found == bytes[9..]);

    let copy = file_with(b"", 0).unwrap();
    assert_eq!(client::write_file(&held, 5..held.len(), &copy, 0).unwrap(), held.len() - 5);
    let mut written = vec![0; all - 5];
    copy.read_exact_at(&mut written, 0).unwrap();
    assert!(written == found[5..]);
    // The file ends within what is copied.
    let end = u64::try_from(all + 9).unwrap() - 100;
    assert_eq!(
        client::read_file(&held, page_size() - 50..3 * page_size(), &disk, end).unwrap(),
        100
    );
    held.read(page_size() - 50, &mut found[..200]).unwrap();
    assert!(found[..100] == bytes[all + 9 - 100..]);
    assert!(found[100..200] == bytes[9 + size(page_size()) + 50..][..100]);

    // What was moved before the client refused is not lost.
    let held = regions.hold(at(page_size() + remote - 8), 16, BOTH).unwrap();
    drop(regions.unmap_all());
    assert_eq!(client::read_file(&held, 0..16, &disk, 0).unwrap(), 16);
    regions.insert_remote(at(page_size()), page_size(), BOTH, Arc::new(Nobody)).unwrap();
    drop(region(&regions, 0, 1, BOTH));
    let held = regions.hold(at(page_size() - 8), 16, BOTH).unwrap();
    assert_eq!(client::read_file(&held, 0..16, &disk, 0).unwrap(), 8);
}

#[test]
fn an_unmap_is_waited_for_with_a_bound_and_again() {
    let regions = ClientRegions::new();
    drop(region(&regions, 0, 1, BOTH));
    drop(region(&regions, page_size(), 1, BOTH));
    assert_eq!(client::wait(regions.unmap(at(u64::MAX), 1).unwrap(), Duration::ZERO).unwrap(), 0);
    let held = regions.hold(at(page_size()), 8, WRITE).unwrap();
    let unmapping = regions.unmap(at(0), 2 * page_size()).unwrap();
    let (begin, bound) = (Instant::now(), Duration::from_millis(30));
    let still = client::wait(unmapping, bound).unwrap_err();
    assert!(begin.elapsed() >= bound);
    assert_eq!((still.held, still.errno()), (span(page_size(), page_size()), Errno::EBUSY));
    let text = still.to_string();
    assert!(text.starts_with(&format!(
        "the unmapped region {} is still held after 30ms",
        span(page_size(), page_size())
    )));
    // It is an error to pass on, and what is waited for is in it.
    let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(still);
    let still = boxed.downcast::<client::StillHeld>().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            held.write(0, b"late").unwrap();
            thread::sleep(Duration::from_millis(10));
            drop(held);
        });
        assert_eq!(client::wait(still.unmapping, LONG).unwrap(), 2 * page_size());
    });
    assert_eq!(regions.count(), 0);
}

#[test]
fn what_is_forgotten_keeps_the_memory_and_says_so_at_the_bound() {
    let regions = ClientRegions::new();
    let client_memory = region(&regions, 0, 1, BOTH);
    let held = Box::leak(Box::new(regions.hold(at(0), 8, BOTH).unwrap()));
    let still = client::wait(regions.unmap_all(), Duration::from_millis(5)).unwrap_err();
    drop(still);
    drop(regions);
    // A holder may use it for ever.
    held.write(0, b"leaked").unwrap();
    let mut bytes = [0; 6];
    client_memory.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"leaked");
}

#[test]
fn devices_on_other_threads_use_what_they_hold_while_regions_are_unmapped() {
    const DEVICES: u64 = 3;
    let regions = ClientRegions::new();
    let disk = (0..16 * size(page_size())).map(pattern).collect::<Vec<_>>();
    let disk = file_with(&disk, 0).unwrap();
    let ended = AtomicUsize::new(0);
    thread::scope(|scope| {
        for device in 0..DEVICES {
            let (regions, disk, ended) = (&regions, &disk, &ended);
            scope.spawn(move || {
                let mut random = Random(device);
                // Where there is a hole, the regions come back.
                let mut used = 0;
                while used < 300 {
                    let start: u64 = random.below(size(3 * page_size())).try_into().unwrap();
                    let len: u64 = (1 + random.below(6000)).try_into().unwrap();
                    let held = match regions.hold(at(start), len, BOTH) {
                        Ok(held) => held,
                        Err(RegionError::Hole { .. }) => {
                            thread::yield_now();
                            continue;
                        }
                        Err(error) => panic!("{error}"),
                    };
                    // Memory that was unmapped would end the process, or read as something else.
                    let offset = start * 3;
                    assert_eq!(client::read_file(&held, 0..len, disk, offset).unwrap(), len);
                    used += 1;
                }
                ended.fetch_add(1, Ordering::SeqCst);
            });
        }
        while ended.load(Ordering::SeqCst) < size(DEVICES) {
            for page in 0..4 {
                drop(region(&regions, page * page_size(), 1, BOTH));
            }
            thread::yield_now();
            let unmapping = regions.unmap(at(0), 4 * page_size()).unwrap();
            assert_eq!(client::wait(unmapping, LONG).unwrap(), 4 * page_size());
        }
    });
}
