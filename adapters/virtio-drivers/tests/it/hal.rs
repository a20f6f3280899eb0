//! The `Hal` shares, refuses and counts.

use std::ptr::NonNull;
use std::sync::Mutex;

use dmaspan::Iova;
use dmaspan::dma::{
    CoherentFrames, CoherentMemory, CoherentRequest, Device, DeviceConfig, Direct, NoCoherent,
    NoPool, Trust,
};
use dmaspan::platform::OneThread;
use dmaspan::{PhysAddr, Span};
use dmaspan_virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, VirtioDma, VirtioUsage, hal};

use crate::rig::{Process, copying, copying_pool, device, untrusted};

#[repr(align(4096))]
struct Page([u8; PAGE_SIZE]);

const WAY: BufferDirection = BufferDirection::DeviceToDriver;

pub(crate) fn share<H: Hal>(buffer: NonNull<[u8]>, direction: BufferDirection) -> u64 {
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: tests keep the buffer and leave it alone until it is unshared.
    unsafe {
        H::share(buffer, direction)
    }
}

pub(crate) fn unshare<H: Hal>(addr: u64, buffer: NonNull<[u8]>, direction: BufferDirection) {
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: it is the buffer of `share`, or is refused.
    unsafe {
        H::unshare(addr, buffer, direction);
    }
}

#[test]
fn a_device_writes_a_shared_buffer_and_faults_once_it_is_unshared() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = device(Trust::Trusted);
    Disk::attach(dma).unwrap();
    let mut page = Box::new(Page([0; PAGE_SIZE]));
    let buffer = NonNull::from(&mut page.0[..]);
    let addr = share::<Disk>(buffer, WAY);
    assert_ne!(addr, 0);
    reach.write(&Process, Iova::new(addr), b"sector").unwrap();
    let past = Iova::new(addr + PAGE_SIZE as u64);
    assert!(reach.write(&Process, past, b"past").is_err());
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 1, queues: 0, refused: 0 });
    unshare::<Disk>(addr, buffer, WAY);
    assert_eq!(&page.0[..6], b"sector");
    assert!(reach.write(&Process, Iova::new(addr), b"late").is_err());
    assert_eq!((Disk::usage(), page.0[0]), (VirtioUsage::default(), b's'));
}

#[test]
fn a_second_unshare_and_another_length_or_direction_are_refused_and_counted() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = device(Trust::Trusted);
    Disk::attach(dma).unwrap();
    let (second, _) = device(Trust::Trusted);
    assert!(Disk::attach(second).is_err());
    let mut page = Box::new(Page([0; PAGE_SIZE]));
    let buffer = NonNull::from(&mut page.0[..]);
    let addr = share::<Disk>(buffer, WAY);
    unshare::<Disk>(addr, NonNull::from(&mut page.0[..512]), WAY);
    unshare::<Disk>(addr, buffer, BufferDirection::DriverToDevice);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 1, queues: 0, refused: 2 });
    reach.write(&Process, Iova::new(addr), b"still").unwrap();
    unshare::<Disk>(addr, buffer, WAY);
    unshare::<Disk>(addr, buffer, WAY);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 0, refused: 3 });
}

#[test]
fn who_is_told_of_a_refusal_may_look_at_what_the_device_has() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (done, refused) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (pool, _reach) = copying_pool(1 << 16);
        let dma = VirtioDma::copying(pool, |_| assert_eq!(Disk::usage().refused, 1));
        Disk::attach(dma).unwrap();
        let addr = share::<Disk>(NonNull::slice_from_raw_parts(NonNull::dangling(), 0), WAY);
        done.send((addr, Disk::usage().refused))
    });
    let refused = refused.recv_timeout(std::time::Duration::from_secs(20));
    assert_eq!(refused, Ok((dmaspan::DmaAddr::REFUSED.get(), 1)));
}

#[test]
fn a_buffer_whose_neighbours_an_untrusted_device_would_reach_is_refused_without_a_pool() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = device(Trust::Untrusted);
    Disk::attach(dma).unwrap();
    let mut page = Box::new(Page([7; PAGE_SIZE]));
    let addr = share::<Disk>(NonNull::from(&mut page.0[512..1024]), WAY);
    assert!(reach.write(&Process, Iova::new(addr), b"no").is_err());
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 0, refused: 1 });
    let whole = NonNull::from(&mut page.0[..]);
    let addr = share::<Disk>(whole, WAY);
    reach.write(&Process, Iova::new(addr), b"yes").unwrap();
    assert!(reach.write(&Process, Iova::new(addr + PAGE_SIZE as u64), b"no").is_err());
    unshare::<Disk>(addr, whole, WAY);
}

#[test]
fn a_device_that_tries_reaches_a_buffer_and_none_of_its_neighbours() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = untrusted();
    Disk::attach(dma).unwrap();
    let mut page = Box::new(Page([7; PAGE_SIZE]));
    page.0[512..1024].fill(1);
    for way in [BufferDirection::DriverToDevice, BufferDirection::Both, WAY] {
        let buffer = NonNull::from(&mut page.0[512..1024]);
        let addr = share::<Disk>(buffer, way);
        // It reads and writes whatever it can around the buffer.
        let (mut seen, mut reached, mut written) = (0, 0, 0);
        for at in addr.saturating_sub(2 * PAGE_SIZE as u64)..addr + 2 * PAGE_SIZE as u64 {
            let mut byte = [0];
            if reach.read(&Process, Iova::new(at), &mut byte).is_ok() {
                seen += usize::from(byte[0] == 7);
                reached += 1;
            }
            written += usize::from(reach.write(&Process, Iova::new(at), &[9]).is_ok());
        }
        let buffer = NonNull::from(&mut page.0[512..1024]);
        unshare::<Disk>(addr, buffer, way);
        assert_eq!(seen, 0, "{way:?}: it saw a neighbour");
        // These tables let a device read whatever it may write.
        assert!(reached >= 512, "{way:?}");
        let may_write = way != BufferDirection::DriverToDevice;
        assert_eq!(written, if may_write { reached } else { 0 }, "{way:?}");
        let expected = if may_write { 9 } else { 1 };
        assert!(page.0[512..1024].iter().all(|&byte| byte == expected), "{way:?}");
        assert!(page.0[..512].iter().chain(&page.0[1024..]).all(|&byte| byte == 7), "{way:?}");
    }
    assert_eq!(Disk::usage(), VirtioUsage::default());
}

#[test]
fn queues_are_zeroed_pages_and_without_a_device_there_are_none() {
    hal! { struct Disk: parking_lot::RawMutex; }
    assert_eq!(Disk::dma_alloc(1, BufferDirection::Both).0, 0);
    let (dma, mut reach) = device(Trust::Trusted);
    Disk::attach(dma).unwrap();
    let (addr, start) = Disk::dma_alloc(3, BufferDirection::Both);
    assert!(addr != 0 && addr % 4096 == 0 && start.addr().get() % PAGE_SIZE == 0);
    let mut bytes = [1; 64];
    reach.read(&Process, Iova::new(addr), &mut bytes).unwrap();
    assert_eq!((bytes, Disk::usage().queues), ([0; 64], 1));
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: it is of `dma_alloc`, and nobody uses it.
    let answer = unsafe { Disk::dma_dealloc(addr, start, 3) };
    assert_eq!((answer, Disk::usage()), (0, VirtioUsage::default()));
    assert!(reach.read(&Process, Iova::new(addr), &mut bytes).is_err());
}

#[test]
fn a_buffer_that_is_copied_comes_back_with_what_the_device_wrote_and_is_out_of_its_reach() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = copying(1 << 16);
    Disk::attach(dma).unwrap();
    // It lies anywhere, and nobody has pinned it.
    let mut bytes = vec![7; 3000];
    let addr =
        share::<Disk>(NonNull::from(&mut bytes[1000..2000]), BufferDirection::DeviceToDriver);
    assert_ne!(addr, 0);
    reach.write(&Process, Iova::new(addr + 10), b"sector").unwrap();
    // Until it is unshared, and after that, the device reaches the slot alone.
    assert_eq!(bytes, [7; 3000]);
    let buffer = NonNull::from(&mut bytes[1000..2000]);
    unshare::<Disk>(addr, NonNull::from(&mut [0; 999][..]), BufferDirection::DeviceToDriver);
    unshare::<Disk>(addr, buffer, BufferDirection::DriverToDevice);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 1, queues: 0, refused: 2 });
    unshare::<Disk>(addr, buffer, BufferDirection::DeviceToDriver);
    reach.write(&Process, Iova::new(addr + 10), b"late!!").unwrap();
    // What the device left alone is as it was.
    assert_eq!(
        &bytes[1000..1020],
        b"\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07sector\x07\x07\x07\x07"
    );
    assert!(bytes[..1010].iter().chain(&bytes[1016..]).all(|&byte| byte == 7));
    unshare::<Disk>(addr, NonNull::from(&mut bytes[1000..2000]), BufferDirection::DeviceToDriver);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 0, refused: 3 });

    // What a device may only read stays as the driver has it.
    let addr = share::<Disk>(NonNull::from(&mut bytes[..500]), BufferDirection::DriverToDevice);
    let mut seen = [0; 500];
    reach.read(&Process, Iova::new(addr), &mut seen).unwrap();
    assert_eq!(seen, [7; 500]);
    reach.write(&Process, Iova::new(addr), &[9; 500]).unwrap();
    unshare::<Disk>(addr, NonNull::from(&mut bytes[..500]), BufferDirection::DriverToDevice);
    assert_eq!(bytes[..500], [7; 500]);
}

#[test]
fn a_pool_that_is_full_refuses_and_serves_again_once_there_is_room() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let (dma, mut reach) = copying(1 << 16);
    Disk::attach(dma).unwrap();
    let (queue, start) = Disk::dma_alloc(15, BufferDirection::Both);
    assert!(queue != 0 && queue % 4096 == 0 && start.addr().get() % PAGE_SIZE == 0);
    assert_eq!(Disk::dma_alloc(2, BufferDirection::Both).0, 0);
    let mut page = vec![0; 2 * PAGE_SIZE];
    let nowhere = share::<Disk>(NonNull::from(&mut page[..]), BufferDirection::DriverToDevice);
    assert!(reach.read(&Process, Iova::new(nowhere), &mut [0]).is_err());
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 1, refused: 2 });
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: it is of `dma_alloc`, and nobody uses it.
    let answer = unsafe { Disk::dma_dealloc(queue, start, 15) };
    assert_eq!(answer, 0);
    let addr = share::<Disk>(NonNull::from(&mut page[..]), BufferDirection::DriverToDevice);
    assert!(reach.read(&Process, Iova::new(addr), &mut [0]).is_ok());
    #[expect(unsafe_code, reason = "a driver of tests")]
    // SAFETY: it is refused.
    let answer = unsafe { Disk::dma_dealloc(queue, start, 15) };
    assert_eq!((answer, Disk::usage().refused), (0, 3));
}

/// Coherent memory whose address is 0.
struct AtZero;

impl CoherentMemory for AtZero {
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let page = NonNull::from(&mut Box::leak(Box::new(Page([0; PAGE_SIZE]))).0);
        let span = Span::new(PhysAddr::new(0), request.len.min(4096)).unwrap();
        #[expect(unsafe_code, reason = "the page is leaked")]
        // SAFETY: nobody else has the page, for ever.
        Ok(unsafe { CoherentFrames::new(page.cast(), span, std::sync::Arc::new(())) })
    }
}

#[test]
fn address_0_is_given_to_nobody() {
    hal! { struct Disk: parking_lot::RawMutex; }
    let all = Span::new(PhysAddr::new(0), 1 << 40).unwrap();
    let direct = std::sync::Arc::new(Direct::new(all, OneThread));
    let device = Device::erased(direct, NoPool, DeviceConfig::bits(64)).unwrap();
    let device = device.with_coherent(std::sync::Arc::new(AtZero));
    #[expect(unsafe_code, reason = "no device is told")]
    // SAFETY: the buffers stay, and nothing reaches them by the address.
    let dma = unsafe { VirtioDma::new(device, |_| Some(0), |error| eprintln!("refused: {error}")) };
    Disk::attach(dma).unwrap();
    assert_eq!(Disk::dma_alloc(1, BufferDirection::Both).0, 0);
    let mut page = Box::new(Page([0; PAGE_SIZE]));
    let addr = share::<Disk>(NonNull::from(&mut page.0[..]), WAY);
    assert_ne!(addr, 0);
    assert_eq!(Disk::usage(), VirtioUsage { buffers: 0, queues: 0, refused: 2 });
}

#[test]
fn what_is_told_of_a_refused_buffer_is_its_own_cause() {
    hal! { struct Copied: parking_lot::RawMutex; }
    hal! { struct Mapped: parking_lot::RawMutex; }
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let tell = |error: dmaspan::dma::Error| TOLD.lock().unwrap().push(error.to_string());
    let told = || std::mem::take(&mut *TOLD.lock().unwrap());
    let mut page = Box::new(Page([0; PAGE_SIZE]));
    let empty = NonNull::from(&mut [][..]);

    let (pool, _) = copying_pool(1 << 13);
    Copied::attach(VirtioDma::copying(pool, tell)).unwrap();
    share::<Copied>(empty, WAY);
    let whole = NonNull::from(&mut page.0[..]);
    let addrs = [share::<Copied>(whole, WAY), share::<Copied>(whole, WAY)];
    share::<Copied>(NonNull::from(&mut [0; 1 << 14][..]), WAY);
    share::<Copied>(whole, WAY);
    let expected = [
        "a buffer without bytes cannot be mapped: leave it out",
        "the pool gives no slot of 0x4000 bytes: its longest span is shorter, 0x2000 bytes",
        "the pool gives no slot of 0x1000 bytes: none as long is free of what is free in all, \
         0x0 bytes",
    ];
    assert_eq!(told(), expected);
    addrs.into_iter().for_each(|addr| unshare::<Copied>(addr, whole, WAY));

    let all = Span::new(PhysAddr::new(0), 1 << 40).unwrap();
    let direct = std::sync::Arc::new(Direct::new(all, OneThread));
    let device = Device::erased(direct, NoPool, DeviceConfig::bits(64)).unwrap();
    let find = |buffer: NonNull<[u8]>| (buffer.len() < PAGE_SIZE).then_some(0);
    #[expect(unsafe_code, reason = "no device is told")]
    // SAFETY: nothing reaches the buffers by their addresses.
    let dma = unsafe { VirtioDma::new(device, find, tell) };
    Mapped::attach(dma).unwrap();
    share::<Mapped>(empty, WAY);
    share::<Mapped>(whole, WAY);
    share::<Mapped>(NonNull::from(&mut page.0[..512]), WAY);
    let start = whole.cast::<u8>().addr();
    let nowhere = format!(
        "the 0x1000 bytes at {start:#x} have no physical address, or several: map what is \
         contiguous"
    );
    let zero = "0x0 is no address for a driver: its interface takes it for a failure";
    assert_eq!(told(), [expected[0], nowhere.as_str(), zero]);
}
