//! The memory of clients, well-behaved and hostile.

use std::fs::File;
use std::io::{self, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use dmaspan::Prot;
use dmaspan::regbuf::RegionError;
use dmaspan_linux::client::{self, ClientMemory};
use dmaspan_linux::mem::AdoptError;
use dmaspan_vfio_user::{ClientDma, ClientDmaError, ClientFiles, DeviceModel, ModelBackend};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::sockopt::set_socket_linger;
use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, vfio_region_info,
};
use vfio_user::{Client, DmaMapFlags, DmaUnmapFlags, Server, ServerBackend, ServerRegion};

const PAGE: u64 = 0x1000;
const RAM: u64 = 0x4000_0000;
const BOTH: DmaMapFlags = DmaMapFlags::READ_WRITE;
const NONE: DmaUnmapFlags = DmaUnmapFlags::empty();
const SOON: Duration = Duration::from_secs(60);

fn unsealed(len: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("client", flags).unwrap());
    file.set_len(len).unwrap();
    file
}

fn sealed_by(len: u64, seals: SealFlags) -> File {
    let file = unsealed(len);
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn sealed(len: u64) -> File {
    sealed_by(len, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

fn sent(file: &File) -> Option<OwnedFd> {
    Some(file.try_clone().unwrap().into())
}

fn unmapped(dma: &ClientDma, address: u64, size: u64) -> u64 {
    client::wait(dma.unmap(NONE, address, size).unwrap(), SOON).unwrap()
}

#[test]
fn a_file_that_is_sent_is_memory_until_it_is_unmapped() {
    let (dma, file) = (ClientDma::default(), sealed(4 * PAGE));
    dma.map(BOTH, PAGE, RAM, 2 * PAGE, sent(&file)).unwrap();
    let held = dma.hold(RAM + PAGE - 2, 4, Prot::READ_WRITE).unwrap();
    held.write(0, b"over").unwrap();
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 2 * PAGE - 2).unwrap();
    assert_eq!(&bytes, b"over");
    drop(held);
    assert_eq!(unmapped(&dma, RAM, 2 * PAGE), 2 * PAGE);
    assert!(matches!(dma.hold(RAM, 1, Prot::READ), Err(RegionError::Hole { .. })));
}

#[test]
fn a_map_that_is_refused_before_its_file_is_looked_at_waits_for_nobody_to_close_it() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let _peer = listener.accept().unwrap();
    // A close waits until the peer has taken what it never takes.
    set_socket_linger(&stream, Some(Duration::from_secs(36_000))).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    let (done, refused) = mpsc::channel();
    thread::spawn(move || {
        let dma = ClientDma::default().with_most(0);
        done.send(dma.map(BOTH, 0, RAM, PAGE, Some(stream.into())))
    });
    let refused = refused.recv_timeout(SOON).expect("it waits for the socket's peer");
    assert!(matches!(refused, Err(ClientDmaError::TooMany { most: 0, .. })));
}

#[test]
fn what_has_no_memory_is_remembered_and_an_access_is_an_error_of_that_access() {
    let dma = ClientDma::default();
    let no_memory = OwnedFd::from(File::open("/proc/self/exe").unwrap());
    let device = OwnedFd::from(File::open("/dev/zero").unwrap());
    for (n, file) in [None, Some(no_memory), Some(device)].into_iter().enumerate() {
        let at = RAM + n as u64 * PAGE;
        dma.map(BOTH, 0, at, PAGE, file).unwrap();
        let held = dma.hold(at, 8, Prot::READ_WRITE).unwrap();
        assert_eq!(held.read(0, &mut [0; 8]).unwrap_err().errno().get(), 14);
        assert_eq!(held.write(0, &[0; 8]).unwrap_err().errno().get(), 14);
    }
    // They are regions as any other.
    let over = dma.map(BOTH, 0, RAM, PAGE, None).unwrap_err();
    assert!(matches!(over, ClientDmaError::Region(RegionError::Overlaps { .. })), "{over}");
    assert_eq!(unmapped(&dma, RAM, 3 * PAGE), 3 * PAGE);
}

#[test]
fn a_map_that_cannot_be_is_refused_with_its_errno_and_changes_nothing() {
    let dma = ClientDma::default();
    let file = sealed(4 * PAGE);
    dma.map(BOTH, 0, RAM, 2 * PAGE, sent(&file)).unwrap();
    let top = u64::MAX - PAGE + 1;
    let refused = |flags, offset, address, size, file| {
        let error = dma.map(flags, offset, address, size, file).unwrap_err();
        assert_eq!(dma.regions().count(), 1, "{error}");
        error.errno().get()
    };
    let (einval, eexist, eoverflow) = (22, 17, 75);
    // Overlapping: the same, from below, from above, inside, around.
    for (address, size) in [(0, 2), (-1, 2), (1, 2), (1, 1), (-1, 4)] {
        let address = RAM.wrapping_add_signed(address * 0x1000);
        assert_eq!(refused(BOTH, 0, address, size * PAGE, sent(&file)), eexist);
        assert_eq!(refused(BOTH, 0, address, size * PAGE, None), eexist);
    }
    // Wrapping, with memory and without.
    assert_eq!(refused(BOTH, 0, top, 2 * PAGE, sent(&file)), eoverflow);
    assert_eq!(refused(BOTH, 0, top, u64::MAX, None), eoverflow);
    // Nothing, unaligned, for no access.
    assert_eq!(refused(BOTH, 0, 0, 0, sent(&file)), einval);
    assert_eq!(refused(BOTH, 0, 0, 0, None), einval);
    assert_eq!(refused(BOTH, 1, 0, PAGE, sent(&file)), einval);
    assert_eq!(refused(BOTH, 0, 0, PAGE - 1, sent(&file)), einval);
    assert_eq!(refused(DmaMapFlags::empty(), 0, 0, PAGE, sent(&file)), einval);
    // Huge: beyond the file, and more than any process has.
    for (offset, size) in [
        (0, 5 * PAGE),
        (4 * PAGE, PAGE),
        (0, 1 << 62),
        (0, top),
        (top, PAGE),
        (top, top),
        (1 << 63, 1 << 63),
    ] {
        refused(BOTH, offset, 0x8000_0000, size, sent(&file));
    }
    // The top page itself is one.
    dma.map(BOTH, 0, top, PAGE, sent(&file)).unwrap();
    dma.hold(u64::MAX, 1, Prot::WRITE).unwrap().write(0, &[1]).unwrap();
}

#[test]
fn no_client_has_more_regions_than_it_may() {
    let dma = ClientDma::default().with_most(3);
    let map = |n: u64| dma.map(BOTH, 0, n * PAGE, PAGE, None);
    (0..3).for_each(|n| map(n).unwrap());
    assert!(matches!(map(3), Err(ClientDmaError::TooMany { most: 3, .. })));
    unmapped(&dma, 0, PAGE);
    map(3).unwrap();
}

#[test]
fn a_file_that_can_shrink_is_refused_and_one_that_is_sealed_stays() {
    let dma = ClientDma::default();
    let file = unsealed(2 * PAGE);
    let refused = dma.map(BOTH, 0, RAM, PAGE, sent(&file)).unwrap_err();
    assert!(matches!(refused, ClientDmaError::NotSealed { .. }), "{refused}");
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    dma.map(BOTH, 0, RAM, 2 * PAGE, sent(&file)).unwrap();
    assert!(file.set_len(PAGE).is_err());
    dma.hold(RAM + PAGE, PAGE, Prot::WRITE).unwrap().write(0, &[1; 0x1000]).unwrap();
    // A file on a tmpfs cannot be sealed.
    if let Ok(file) = tmpfs_file() {
        let refused = dma.map(BOTH, 0, 0, PAGE, sent(&file)).unwrap_err();
        assert!(matches!(refused, ClientDmaError::NotSealed { .. }), "{refused}");
    }
}

#[test]
fn a_file_of_a_trusted_client_that_has_shrunk_before_it_is_mapped_is_too_short() {
    let dma = ClientDma::new(ClientFiles::Any);
    let file = unsealed(2 * PAGE);
    dma.map(BOTH, 0, RAM, 2 * PAGE, sent(&file)).unwrap();
    file.set_len(PAGE).unwrap();
    let refused = dma.map(BOTH, 0, RAM + 2 * PAGE, 2 * PAGE, sent(&file)).unwrap_err();
    let ClientDmaError::File { error: AdoptError::TooShort { .. }, .. } = refused else {
        panic!("{refused}");
    };
    // The kernel's own accesses to what is gone are errors.
    let held = dma.hold(RAM, 2 * PAGE, Prot::READ_WRITE).unwrap();
    let exe = File::open("/proc/self/exe").unwrap();
    assert!(client::read_file(&held, PAGE..2 * PAGE, &exe, 0).is_err());
}

/// A file on a tmpfs, where there is one.
fn tmpfs_file() -> io::Result<File> {
    let path = format!("/dev/shm/dmaspan-vfio-user-{}", std::process::id());
    let file =
        File::options().read(true).write(true).create_new(true).open(&path).inspect_err(|_| {
            eprintln!("SKIP: there is no tmpfs in /dev/shm");
        })?;
    std::fs::remove_file(path)?;
    file.set_len(PAGE)?;
    Ok(file)
}

/// The same file, open for reading alone.
fn read_only(file: &File) -> Option<OwnedFd> {
    Some(File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().into())
}

/// The rights of this process to the mapping that has an address.
fn rights(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of = maps.lines().find(|line| {
        let bounds = line.split_once(' ').and_then(|(bounds, _)| bounds.split_once('-')).unwrap();
        let [from, to] = [bounds.0, bounds.1].map(|at| usize::from_str_radix(at, 16).unwrap());
        (from..to).contains(&address)
    });
    of.unwrap().split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn what_a_client_gives_for_reads_alone_is_read_and_nobody_here_can_write_it() {
    let [open, sealed, future] = [(); 3].map(|()| sealed_by(2 * PAGE, SealFlags::SHRINK));
    for file in [&open, &sealed, &future] {
        file.write_all_at(b"theirs", PAGE).unwrap();
    }
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    fcntl_add_seals(&future, SealFlags::FUTURE_WRITE).unwrap();
    for (n, sent) in
        [sent(&open), read_only(&open), sent(&sealed), sent(&future)].into_iter().enumerate()
    {
        let dma = ClientDma::default();
        dma.map(DmaMapFlags::READ, 0, RAM, 2 * PAGE, sent).unwrap();
        let held = dma.hold(RAM + PAGE, 6, Prot::READ).unwrap();
        let mut bytes = [0; 6];
        held.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"theirs", "{n}");
        assert!(held.write(0, b"ours").is_err());
        for wanted in [Prot::WRITE, Prot::READ_WRITE] {
            let refused = dma.hold(RAM + PAGE, 6, wanted).unwrap_err();
            assert!(matches!(refused, RegionError::Access { .. }), "{refused}");
        }
        let slice = held.slices(0, 6).unwrap().next().unwrap();
        assert!(rights(slice.as_ptr().addr()).starts_with("r--"), "{n}");
        drop(held);
        assert_eq!(unmapped(&dma, RAM, 2 * PAGE), 2 * PAGE);
    }
    // With the right to write, it is written, and the client sees it.
    let dma = ClientDma::default();
    dma.map(BOTH, 0, RAM, 2 * PAGE, sent(&open)).unwrap();
    let held = dma.hold(RAM + PAGE, 4, Prot::WRITE).unwrap();
    held.write(0, b"ours").unwrap();
    let slice = held.slices(0, 4).unwrap().next().unwrap();
    assert!(rights(slice.as_ptr().addr()).starts_with("rw-"));
    let mut bytes = [0; 6];
    open.read_exact_at(&mut bytes, PAGE).unwrap();
    assert_eq!(&bytes, b"oursrs");
}

#[test]
fn a_right_that_the_file_does_not_have_is_refused_and_the_refusal_says_what_to_do() {
    let (file, eacces, eperm) = (sealed_by(PAGE, SealFlags::SHRINK), 13, 1);
    let dma = ClientDma::default();
    for flags in [BOTH, DmaMapFlags::WRITE] {
        let refused = dma.map(flags, 0, RAM, PAGE, read_only(&file)).unwrap_err();
        assert_eq!(refused.errno().get(), eacces);
        let said = refused.to_string();
        assert!(said.contains("0x1000 bytes at 0x40000000"), "{said}");
        assert!(said.contains("open it for reading and writing"), "{said}");
    }
    for seal in [SealFlags::FUTURE_WRITE, SealFlags::WRITE] {
        fcntl_add_seals(&file, seal).unwrap();
        let refused = dma.map(BOTH, 0, RAM, PAGE, sent(&file)).unwrap_err();
        assert_eq!(refused.errno().get(), eperm, "{refused}");
        assert!(refused.to_string().contains("take it for reads alone"), "{refused}");
    }
    assert_eq!(dma.regions().count(), 0);
}

#[test]
fn a_region_keeps_no_descriptor_of_its_file() {
    let (dma, file) = (ClientDma::default(), sealed(64 * PAGE));
    let inode = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    (0..64).for_each(|n| dma.map(BOTH, n * PAGE, RAM + n * PAGE, PAGE, sent(&file)).unwrap());
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
        let found = std::fs::metadata(entry.as_ref().unwrap().path());
        found.is_ok_and(|found| std::os::unix::fs::MetadataExt::ino(&found) == inode)
    });
    assert_eq!(open.count(), 1);
    dma.hold(RAM, 64 * PAGE, Prot::WRITE).unwrap().write(5, b"still").unwrap();
    assert_eq!(unmapped(&dma, RAM, 64 * PAGE), 64 * PAGE);
}

#[test]
fn an_unmap_takes_all_that_it_covers_and_never_part_of_a_region() {
    let (dma, file) = (ClientDma::default(), sealed(512 * PAGE));
    // As a guest's IOMMU has them: 512 maps of a page, and one unmap.
    for n in 0..512 {
        dma.map(BOTH, n * PAGE, RAM + n * PAGE, PAGE, sent(&file)).unwrap();
    }
    dma.hold(RAM, 512 * PAGE, Prot::WRITE).unwrap().write(0x1f_fffc, &[1; 4]).unwrap();
    for (address, size) in [(RAM + 1, PAGE), (RAM, PAGE + 1), (RAM - PAGE, PAGE + 8)] {
        let cut = dma.unmap(NONE, address, size).unwrap_err();
        assert!(matches!(cut, ClientDmaError::Region(RegionError::Cuts { .. })), "{cut}");
    }
    assert_eq!(dma.unmap(NONE, RAM, 0).unwrap_err().errno().get(), 22);
    assert_eq!(dma.unmap(NONE, 2, u64::MAX).unwrap_err().errno().get(), 75);
    assert_eq!(dma.regions().count(), 512);
    assert_eq!(unmapped(&dma, RAM, 512 * PAGE), 512 * PAGE);
    // Nothing is there.
    assert_eq!(unmapped(&dma, RAM, 1 << 47), 0);
    // Up to 2^64, as QEMU unmaps what is above its interrupt window.
    dma.map(BOTH, 0, 0x1_0000_0000, PAGE, sent(&file)).unwrap();
    dma.map(BOTH, 0, u64::MAX - PAGE + 1, PAGE, sent(&file)).unwrap();
    dma.map(BOTH, 0, RAM, PAGE, sent(&file)).unwrap();
    assert_eq!(unmapped(&dma, 0xfef0_0000, 0xffff_ffff_0110_0000), 2 * PAGE);
    // Everything, whatever the range.
    let all = dma.unmap(DmaUnmapFlags::UNMAP_ALL, 0, 0).unwrap();
    assert_eq!((all.bytes(), dma.regions().count()), (PAGE, 0));
}

#[test]
fn ram_that_goes_and_comes_in_pieces_is_waited_for() {
    let dma = ClientDma::default().with_settle(SOON);
    let file = sealed(16 * PAGE);
    dma.map(BOTH, 0, RAM, 16 * PAGE, sent(&file)).unwrap();
    let (count, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let held = dma.hold_settled(RAM, 16 * PAGE, Prot::READ_WRITE).unwrap();
            held.write(3 * PAGE - 2, b"seam").unwrap();
            count.fetch_add(1, Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        (0..2).for_each(|_| drop(scope.spawn(work)));
        for round in 0..200 {
            let before = count.load(Ordering::Relaxed);
            while count.load(Ordering::Relaxed) == before {
                thread::yield_now();
            }
            assert_eq!(unmapped(&dma, 0, 1 << 40), 16 * PAGE);
            let cut = 1 + round % 14;
            for (from, to) in [(0, cut), (cut, cut + 1), (cut + 1, 16)] {
                let (offset, size) = (from * PAGE, (to - from) * PAGE);
                dma.map(BOTH, offset, RAM + offset, size, sent(&file)).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_hole_is_no_matter_of_time_where_nothing_was_unmapped() {
    let dma = ClientDma::default().with_settle(Duration::from_secs(3600));
    dma.map(BOTH, 0, RAM, PAGE, None).unwrap();
    // An hour would be noticed.
    assert!(matches!(dma.hold_settled(0, 1, Prot::READ), Err(RegionError::Hole { .. })));
    let dma = dma.with_settle(Duration::ZERO);
    unmapped(&dma, RAM, PAGE);
    assert!(matches!(dma.hold_settled(RAM, 1, Prot::READ), Err(RegionError::Hole { .. })));
}

/// Holds a queue between requests, and an operation for as long as it is told.
#[derive(Default)]
struct Holder {
    dma: Arc<ClientDma>,
    queue: Option<ClientMemory>,
    operation: Option<ClientMemory>,
}

const QUEUE: u64 = 0;
const OPERATION: u64 = 8;

impl DeviceModel for Holder {
    fn region_read(&mut self, _: u32, _: u64, data: &mut [u8]) -> io::Result<()> {
        data.fill(u8::try_from(self.dma.regions().count()).unwrap());
        Ok(())
    }

    fn region_write(&mut self, _: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        let address = u64::from_le_bytes(data.try_into().map_err(io::Error::other)?);
        let held = (address != 0)
            .then(|| self.dma.hold(address, 16, Prot::READ_WRITE).map_err(io::Error::other))
            .transpose()?;
        match offset {
            QUEUE => self.queue = held,
            OPERATION => self.operation = held,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(())
    }

    fn reset(&mut self) -> io::Result<()> {
        (self.queue, self.operation) = (None, None);
        Ok(())
    }

    fn set_irqs(&mut self, _: u32, _: u32, _: u32, _: u32, _: Vec<File>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn let_go(&mut self) {
        self.queue = None;
    }
}

#[test]
fn an_unmap_takes_a_queue_back_and_waits_for_an_operation_no_longer_than_its_bound() {
    let dma = Arc::new(ClientDma::default());
    let holder = Holder { dma: dma.clone(), ..Default::default() };
    let mut backend = ModelBackend::new(holder, dma).with_bound(Duration::from_millis(50));
    let file = sealed(PAGE);
    let map = |backend: &mut ModelBackend<Holder>| {
        backend.dma_map(BOTH, 0, RAM, PAGE, Some(file.try_clone().unwrap()))
    };
    map(&mut backend).unwrap();
    backend.region_write(0, QUEUE, &RAM.to_le_bytes()).unwrap();
    backend.dma_unmap(NONE, RAM, PAGE).unwrap();

    map(&mut backend).unwrap();
    backend.region_write(0, OPERATION, &RAM.to_le_bytes()).unwrap();
    let busy = backend.dma_unmap(NONE, RAM, PAGE).unwrap_err();
    assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy, "{busy}");
    assert!(busy.to_string().contains("still held after 50ms"), "{busy}");
    // It is gone for everybody else, and the address is free.
    assert!(backend.region_write(0, QUEUE, &RAM.to_le_bytes()).is_err());
    map(&mut backend).unwrap();
    backend.device().operation.as_ref().unwrap().write(0, b"late").unwrap();
    backend.reset().unwrap();
    backend.region_write(0, QUEUE, &RAM.to_le_bytes()).unwrap();
    backend.end().unwrap();
}

#[test]
fn the_server_of_the_crate_serves_a_model_and_its_clients_memory() {
    let path = std::env::temp_dir().join(format!("dmaspan-vfio-user-it-{}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let flags = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
    let argsz = u32::try_from(size_of::<vfio_region_info>()).unwrap();
    let region_info = vfio_region_info { argsz, flags, size: 0x1000, ..Default::default() };
    let registers = ServerRegion { region_info, sparse_areas: Vec::new(), mmap_fd: None };
    let server = Server::from_owned_fd(listener.into(), true, Vec::new(), vec![registers]);
    let serving = thread::spawn(move || {
        let dma = Arc::new(ClientDma::default());
        let holder = Holder { dma: dma.clone(), ..Default::default() };
        let mut backend = ModelBackend::new(holder, dma);
        server.run(&mut backend).unwrap();
        backend.end().unwrap();
        backend.device().dma.regions().count()
    });
    let mut client = Client::new(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let file = sealed(2 * PAGE);
    client.dma_map(0, RAM, PAGE, file.as_raw_fd()).unwrap();
    client.dma_map(PAGE, RAM + PAGE, PAGE, file.as_raw_fd()).unwrap();
    client.region_write(0, QUEUE, &(RAM + PAGE - 8).to_le_bytes()).unwrap();
    let mut count = [0];
    client.region_read(0, 0, &mut count).unwrap();
    assert_eq!(count, [2]);
    client.dma_unmap(RAM, 2 * PAGE).unwrap();
    client.dma_map(0, RAM, PAGE, file.as_raw_fd()).unwrap();
    client.region_write(0, OPERATION, &RAM.to_le_bytes()).unwrap();
    client.reset().unwrap();
    client.shutdown().unwrap();
    assert_eq!(serving.join().unwrap(), 0);
}
