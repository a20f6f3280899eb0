//! Memory that a device and the program use at the same time, and blocks of it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use dmaspan::dma::{
    Bounce, BouncePool, Coherent, CoherentFrames, CoherentMemory, CoherentRequest, Device,
    DeviceConfig, DeviceLimits, Direct, DmaMemory, Error, Flush, FreeFailed, NoCoherent, NoPool,
    RawMemory, Translation, UnmappedIovas, UnmappedState,
};
use dmaspan::swiotlb::{Pool, PoolConfig};
use dmaspan::{Direction, DmaAddr, PhysAddr};
use dmaspan_sim::coherent::{SimCoherent, Uncached};
use dmaspan_sim::fault::{Faults, Fired};
use dmaspan_sim::memory::{FrameState, SimMemory};
use dmaspan_sim::pool_memory::SimPoolMemory;

use crate::common::{for_all_granules, span};
use crate::rig::{BYTES, Dma, Host, RAM, Rig, non_coherent, untrusted};

for_all_granules! {
    a_device_and_the_program_see_what_the_other_wrote_until_it_is_freed,
    scattered_frames_are_one_range_for_both,
    refused_memory_changes_nothing_whatever_step_fails,
    what_hardware_did_not_forget_is_not_reused_before_it_does,
    a_handle_that_is_dropped_leaks,
}

impl<const G: u32> Rig<G> {
    /// What is held, but for tables: those of a part of the space that was in use stay.
    fn held(&self) -> (usize, u64, (usize, usize)) {
        let (slots, _, frames, waiting, _) = self.state();
        (slots, frames, waiting)
    }

    fn source(&self) -> SimCoherent {
        SimCoherent::new(Arc::clone(&self.memory), &self.faults)
    }
}

fn is_owned(memory: &SimMemory, at: PhysAddr) -> bool {
    memory.frame_state(at) == Some(FrameState::Owned)
}

fn first_frame(coherent: &Coherent) -> PhysAddr {
    coherent.pieces()[0].span.paddr()
}

/// Both write and read; `dma` is the device.
fn exchange(coherent: &mut Coherent, dma: &impl Dma) {
    let (len, addr) = (coherent.len(), coherent.addr());
    let at = |offset: u64| DmaAddr::new(addr.get() + offset);
    assert_eq!(dma.read(addr, len).unwrap(), vec![0; usize::try_from(len).unwrap()]);

    coherent.write(8, 0x0102_0304_0506_0708_u64).unwrap();
    assert_eq!(dma.read(at(8), 8).unwrap(), 0x0102_0304_0506_0708_u64.to_ne_bytes());
    dma.write(at(16), &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(coherent.read::<u16>(16).unwrap(), u16::from_ne_bytes([1, 2]));
    assert_eq!(coherent.read::<u32>(20).unwrap(), u32::from_ne_bytes([5, 6, 7, 8]));
    assert_eq!(coherent.read::<u8>(23).unwrap(), 8);

    // The end, and bytes that no number is aligned to.
    let bytes: Vec<u8> = (1..=45).collect();
    coherent.write_bytes(len - 45, &bytes).unwrap();
    assert_eq!(dma.read(at(len - 45), 45).unwrap(), bytes);
    dma.write(at(len - 44), &bytes[..44]).unwrap();
    let mut read = [0; 45];
    coherent.read_bytes(len - 45, &mut read).unwrap();
    assert_eq!((read[0], &read[1..]), (1, &bytes[..44]));
    // The pointer leads there, too.
    // SAFETY: the byte is within the memory.
    let last = unsafe { coherent.as_ptr().add(usize::try_from(len - 1).unwrap()) };
    // SAFETY: nobody else accesses it.
    assert_eq!(unsafe { last.read_volatile() }, 44);
}

fn a_device_and_the_program_see_what_the_other_wrote_until_it_is_freed<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    for config in [DeviceConfig::bits(32), untrusted(DeviceConfig::bits(40))] {
        let device = rig.translated(config).with_coherent(Arc::new(rig.source()));
        let before = rig.held();
        let mut coherent = device.alloc(3000, 1 << 18).unwrap();
        assert_eq!((coherent.len(), coherent.addr().get() % (1 << 18)), (3000, 0));
        assert!(coherent.addr().get() + 3000 <= config.limits.last);
        exchange(&mut coherent, &rig.behind());
        let (addr, frame) = (coherent.addr(), first_frame(&coherent));
        device.free(coherent).unwrap();
        assert!(rig.behind().read(addr, 1).is_none(), "a device reaches freed memory");
        assert!(!is_owned(&rig.memory, frame));
        assert_eq!(rig.held(), before);
    }
    let device = rig.direct(DeviceConfig::bits(32)).unwrap().with_coherent(Arc::new(rig.source()));
    let mut coherent = device.alloc(0x3000, 1 << 20).unwrap();
    assert_eq!(coherent.addr().get(), first_frame(&coherent).get());
    assert_eq!((coherent.addr().get() % (1 << 20), coherent.pieces().len()), (0, 1));
    exchange(&mut coherent, &rig.beside());
    device.free(coherent).unwrap();
    assert!(rig.memory.violations().is_empty(), "{:?}", rig.memory.violations());
}

fn scattered_frames_are_one_range_for_both<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Lazy);
    let source = rig.source().scattered(7);
    let device = rig.translated(DeviceConfig::bits(48)).with_coherent(Arc::new(source));
    // More pieces than one call of the table takes.
    let len = 130 << G;
    let mut coherent = device.alloc(len, 1).unwrap();
    assert_eq!(coherent.pieces().len(), 130);
    exchange(&mut coherent, &rig.behind());
    for n in 0..130 {
        coherent.write(n << G, n).unwrap();
    }
    for n in 0..130_u64 {
        let at = DmaAddr::new(coherent.addr().get() + (n << G));
        assert_eq!(rig.behind().read(at, 8).unwrap(), n.to_ne_bytes());
    }
    device.free(coherent).unwrap();
    assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (16, vec![]));
}

fn refused_memory_changes_nothing_whatever_step_fails<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let source = rig.source().scattered(3);
    let device = rig.translated(DeviceConfig::bits(48)).with_coherent(Arc::new(source));
    let before = rig.held();
    // A table is asked for a second time where the first try fails; the others fail below.
    rig.faults.arm(2);
    device.free(device.alloc(5 << G, 1).unwrap()).unwrap();
    assert_eq!(rig.faults.disarm(), Fired::Yes);
    let mut failed = [0; 4];
    for n in 1.. {
        rig.faults.arm(n);
        let kind = match device.alloc(5 << G, 1).map(|coherent| device.free(coherent)) {
            Ok(Ok(())) => 0,
            Ok(Err(FreeFailed { error: Error::Quarantined { .. }, coherent: None })) => 1,
            Err(Error::NoCoherent { .. }) => 2,
            Err(Error::Domain(_) | Error::Quarantined { .. }) => 3,
            other => panic!("{other:?}"),
        };
        if rig.faults.disarm() == Fired::No {
            break;
        }
        failed[kind] += 1;
        // What hardware was not seen to forget is freed by now.
        device.flush().unwrap();
        assert_eq!(rig.held(), before, "after the failure of step {n}");
    }
    // The sync of the free; the source; and that of the map.
    assert_eq!(failed, [0, 1, 1, 1]);
    assert_eq!(rig.memory.violations(), []);
}

fn what_hardware_did_not_forget_is_not_reused_before_it_does<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(DeviceConfig::bits(48)).with_coherent(Arc::new(rig.source()));
    let (coherent, hardware) = (device.alloc(1 << G, 1).unwrap(), rig.behind());
    let (addr, frame) = (coherent.addr(), first_frame(&coherent));
    hardware.write(addr, &[7]).unwrap();
    assert_eq!(device.list_unmapped().count(), 0);

    rig.faults.arm(1);
    let failed = device.free(coherent).unwrap_err();
    assert!(matches!(failed.error, Error::Quarantined { .. }), "{failed}");
    assert!(failed.coherent.is_none());
    let listed: Vec<_> = device.list_unmapped().collect();
    let [UnmappedIovas { range, state: UnmappedState::Quarantined, .. }] = listed[..] else {
        panic!("{listed:?}");
    };
    assert_eq!((range.start().get(), range.len_less_one()), (addr.get(), (1 << G) - 1));
    // The device has the old translation still, and writes where nothing else is.
    hardware.write(addr, &[8]).unwrap();
    assert!(is_owned(&rig.memory, frame));
    rig.faults.arm(1);
    let other = device.alloc(1 << G, 1).unwrap();
    assert_eq!(rig.faults.disarm(), Fired::Yes);
    assert_ne!((other.addr(), first_frame(&other)), (addr, frame));
    rig.faults.arm(1);
    assert!(device.flush().is_err());
    assert!(is_owned(&rig.memory, frame));
    assert_eq!(device.list_unmapped().collect::<Vec<_>>(), listed);

    // The next one frees it, and may have it.
    device.free(other).unwrap();
    assert_eq!(device.list_unmapped().count(), 0);
    assert!(hardware.read(addr, 1).is_none());
    assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (16, vec![]));
}

fn a_handle_that_is_dropped_leaks<const G: u32>() {
    let rig = Rig::<G>::new(Flush::Strict);
    let device = rig.translated(DeviceConfig::bits(48)).with_coherent(Arc::new(rig.source()));
    let [dropped, forgotten, kept] = [(); 3].map(|()| device.alloc(1 << G, 1).unwrap());
    let addrs = [dropped.addr(), forgotten.addr(), kept.addr()];
    {
        let (_dropped, _forgotten) = (dropped, std::mem::ManuallyDrop::new(forgotten));
    }
    rig.behind().write(kept.addr(), &[1]).unwrap();
    rig.faults.arm(1);
    device.free(kept).unwrap_err();
    // It has what is in quarantine.
    drop(device);
    for addr in addrs {
        rig.behind().write(addr, &[1]).unwrap();
    }
    rig.domain.flush().unwrap();
    // 16 frames are the pool's.
    assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (19, vec![]));
}

type Raw = Arc<Direct<RawMemory, Host>>;

fn direct() -> Raw {
    Arc::new(Direct::new(span(RAM, BYTES), Host::default()))
}

fn memory() -> Arc<SimMemory> {
    Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap())
}

fn refusals<T: Translation, B: BouncePool>(device: &Device<T, B>, cases: &[(u64, u64, &str)]) {
    for &(len, align, expected) in cases {
        let refused = device.alloc(len, align).unwrap_err();
        assert_eq!(refused.to_string(), expected, "{len:#x} at {align:#x}");
    }
}

#[test]
fn lengths_and_alignments_that_no_memory_can_have_are_named_with_the_limit() {
    let rig = Rig::<12>::new(Flush::Strict);
    let source: Arc<dyn CoherentMemory> = Arc::new(rig.source());
    let device = rig.translated(DeviceConfig::bits(32)).with_coherent(Arc::clone(&source));
    let before = rig.held();
    let none = "0x0 bytes of coherent memory cannot be had: the device can have 1 to 0xfffff000";
    let over =
        "0x100000001 bytes of coherent memory cannot be had: the device can have 1 to 0xfffff000";
    let odd = "0x3 is no alignment for the device: it has to be a power of two to 0x80000000";
    let large = "0x100000000 is no alignment for the device: it has to be a power of two to \
                 0x80000000";
    let zero = "0x0 is no alignment for the device: it has to be a power of two to 0x80000000";
    let cases =
        [(0, 1, none), ((1 << 32) + 1, 1, over), (8, 3, odd), (8, 1 << 32, large), (8, 0, zero)];
    refusals(&device, &cases);
    assert!(matches!(device.alloc(u64::MAX, 1), Err(Error::Length { .. })));
    assert!(matches!(device.alloc(1 << 31, 1), Err(Error::NoCoherent { .. })));
    assert_eq!(rig.held(), before);

    // Its memory begins at 0x80000000, and 16 frames are the pool's: it reaches none that is free.
    let limits = DeviceLimits { last: RAM + 0xffff, ..DeviceLimits::bits(32) };
    let narrow = DeviceConfig { limits, ..DeviceConfig::bits(32) };
    let device = rig.direct(narrow).unwrap().with_coherent(source);
    let beyond = "no 0x8 bytes of coherent memory, aligned to 0x1, up to 0x8000ffff: no such \
                  frames are free";
    refusals(&device, &[(8, 1, beyond)]);
    assert_eq!(rig.held(), before);

    let device = rig.direct(DeviceConfig::bits(32)).unwrap();
    let nobody = "no 0x8 bytes of coherent memory, aligned to 0x1, up to 0xffffffff: nobody said \
                  where it comes from: `Device::with_coherent` does";
    refusals(&device, &[(8, 1, nobody)]);
}

#[test]
fn a_device_that_does_not_see_caches_gets_memory_that_is_not_cached_or_none() {
    let rig = Rig::<12>::new(Flush::Strict);
    let config = non_coherent(DeviceConfig::bits(32));
    let of = |source| rig.translated(config).with_coherent(Arc::new(source));
    let device = of(rig.source().uncached(Uncached::Missing));
    let refused = device.alloc(8, 8).unwrap_err();
    let none = NoCoherent { why: "all memory is cached" };
    assert!(matches!(refused, Error::NoCoherent { source, .. } if source == none), "{refused}");
    let device = of(rig.source());
    let mut coherent = device.alloc(0x1000, 8).unwrap();
    exchange(&mut coherent, &rig.behind());
    device.free(coherent).unwrap();
    // Nothing is synced, ever.
    assert_eq!(rig.host.taken(), []);
}

/// A source that gives what is not asked for.
struct Wrong(SimCoherent, fn(CoherentRequest) -> CoherentRequest);

impl CoherentMemory for Wrong {
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        self.0.allocate(&self.1(*request))
    }
}

#[test]
fn memory_that_is_not_what_was_asked_for_is_refused_and_freed() {
    let memory = memory();
    memory.allocate_at(span(RAM, 0x1000)).unwrap();
    let source = SimCoherent::new(Arc::clone(&memory), &Faults::none()).scattered(1);
    let wrongs: [fn(CoherentRequest) -> CoherentRequest; 5] = [
        |it| CoherentRequest { len: it.len + 0x1000, ..it },
        |it| CoherentRequest { len: it.len - 0x1000, ..it },
        |it| CoherentRequest { align: 0x1000, ..it },
        |it| CoherentRequest { last: PhysAddr::new(u64::MAX), align: 0x20_0000, ..it },
        |it| CoherentRequest { contiguity: dmaspan::dma::Contiguity::AnySpans, ..it },
    ];
    let limits = DeviceLimits { last: RAM + 0xf_ffff, ..DeviceLimits::bits(32) };
    let config = DeviceConfig { limits, ..DeviceConfig::bits(32) };
    for (n, wrong) in wrongs.into_iter().enumerate() {
        let device = Device::new(direct(), NoPool, config).unwrap();
        let device = device.with_coherent(Arc::new(Wrong(source.clone(), wrong)));
        let refused = device.alloc(0x2000, 0x4000).unwrap_err();
        let other = NoCoherent { why: "other memory was given than was asked for" };
        let is_it = matches!(refused, Error::NoCoherent { source, .. } if source == other);
        assert!(is_it, "{n}: {refused}");
        assert_eq!(memory.pinned_frames(), 0, "{n}");
    }
}

/// A source whose memory does not begin at a page for the program.
struct Askew;

impl CoherentMemory for Askew {
    fn allocate(&self, request: &CoherentRequest) -> Result<CoherentFrames, NoCoherent> {
        let count = usize::try_from(request.len / 8).unwrap() + 1;
        let words: Arc<Vec<AtomicU64>> = Arc::new((0..count).map(|_| AtomicU64::new(0)).collect());
        let first = usize::from(words.as_ptr().addr().is_multiple_of(0x1000));
        let start = NonNull::from(&words[first..]).cast();
        // SAFETY: the words are the owner's alone, zeros, and as many; no device is told of them.
        Ok(unsafe { CoherentFrames::new(start, span(RAM, request.len), words) })
    }
}

#[test]
fn memory_that_the_program_has_at_no_page_is_refused() {
    let device = Device::new(direct(), NoPool, DeviceConfig::bits(32)).unwrap();
    let device = device.with_coherent(Arc::new(Askew));
    let refused = device.alloc(0x1000, 8).unwrap_err();
    let other = NoCoherent { why: "other memory was given than was asked for" };
    assert!(matches!(refused, Error::NoCoherent { source, .. } if source == other), "{refused}");
}

type SimSlots = Arc<Pool<SimPoolMemory, Host>>;

fn slots(memory: SimPoolMemory) -> SimSlots {
    Arc::new(Pool::new(memory, PoolConfig::new(1), Host::default()).unwrap())
}

#[test]
fn a_device_that_bounces_all_gets_memory_of_its_pool_alone() {
    let config = DeviceConfig { bounce: Bounce::Always, ..DeviceConfig::bits(32) };
    let memory = memory();
    let own = || vec![span(RAM, 0x2_0000)];
    let pointers = SimPoolMemory::with_pointers(Arc::clone(&memory), own(), &Faults::none());
    let pool = slots(pointers.unwrap());
    // Memory that the host does not see is no use, whoever has it.
    let private = Arc::new(SimCoherent::new(Arc::clone(&memory), &Faults::none()));
    let device = Device::new(direct(), Arc::clone(&pool), config).unwrap().with_coherent(private);
    let mut coherent = device.alloc(0x1800, 0x2000).unwrap();
    assert!(pool.owns(coherent.pieces()[0].span));
    assert_eq!(coherent.addr().get() % 0x2000, 0);
    exchange(&mut coherent, &memory);
    assert!(device.alloc(0x2_0000, 1).unwrap_err().to_string().contains("the pool has no run"));
    device.free(coherent).unwrap();
    assert_eq!(pool.stats().used, 0);
    // A holder before left something there, and the next one sees none of it.
    let again = device.alloc(0x1800, 0x2000).unwrap();
    assert_eq!(memory.read_all(again.addr(), 0x1800), vec![0; 0x1800]);
    // Dropped, its slots are nobody's for ever.
    drop(again);
    assert_eq!(pool.stats().used, 0x2000);

    let without = slots(SimPoolMemory::new(self::memory(), own()).unwrap());
    let device = Device::new(direct(), without, config).unwrap();
    let refused = device.alloc(8, 8).unwrap_err().to_string();
    assert!(refused.ends_with("the pool's memory has no pointers"), "{refused}");
    let device = Device::new(direct(), pool, non_coherent(config)).unwrap();
    let refused = device.alloc(8, 8).unwrap_err().to_string();
    assert!(refused.ends_with("its pool is cached"), "{refused}");
    assert_eq!(memory.violations(), []);
}

trait ReadAll {
    fn read_all(&self, addr: DmaAddr, len: u64) -> Vec<u8>;
}

impl<D: Dma> ReadAll for D {
    fn read_all(&self, addr: DmaAddr, len: u64) -> Vec<u8> {
        self.read(addr, len).unwrap()
    }
}

#[test]
fn memory_of_another_device_is_given_back() {
    let rig = Rig::<12>::new(Flush::Strict);
    let [one, other] = [(); 2]
        .map(|()| rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source())));
    let coherent = one.alloc(8, 8).unwrap();
    let addr = coherent.addr();
    let FreeFailed { error, coherent } = other.free(coherent).unwrap_err();
    assert_eq!(error, Error::Foreign { addr });
    let coherent = coherent.unwrap();
    assert!(rig.behind().read(addr, 8).is_some());
    one.free(coherent).unwrap();
}

#[test]
fn accesses_beyond_the_end_or_across_are_refused_and_do_nothing() {
    let rig = Rig::<12>::new(Flush::Strict);
    let device = rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source()));
    let mut coherent = device.alloc(100, 8).unwrap();
    let outside = |offset, len| Error::OutsideMapping { offset, len, mapped: 100 };
    assert_eq!(coherent.read::<u64>(96), Err(outside(96, 8)));
    assert_eq!(coherent.read::<u32>(96), Ok(0));
    assert_eq!(coherent.read::<u8>(100), Err(outside(100, 1)));
    assert_eq!(coherent.read::<u64>(u64::MAX), Err(outside(u64::MAX, 8)));
    assert_eq!(coherent.write(2, 1_u32), Err(Error::Unaligned { offset: 2, len: 4 }));
    assert_eq!(coherent.write_bytes(60, &[1; 41]), Err(outside(60, 41)));
    assert_eq!(coherent.read_bytes(101, &mut []), Err(outside(101, 0)));
    assert_eq!(coherent.read_bytes(100, &mut []), Ok(()));
    assert_eq!(rig.behind().read(coherent.addr(), 100).unwrap(), [0; 100]);
    device.free(coherent).unwrap();
}

#[test]
fn another_device_can_have_it_mapped_too() {
    let rig = Rig::<12>::new(Flush::Strict);
    let one = rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source()));
    let direct = Arc::new(Direct::new(span(RAM, BYTES), Host::default()));
    let peer = Device::new(direct, NoPool, DeviceConfig::bits(32)).unwrap();
    let mut coherent = one.alloc(0x1000, 8).unwrap();
    coherent.write(0, 5_u8).unwrap();
    let mapping = peer.map_single(coherent, Direction::Bidirectional).unwrap();
    assert_eq!(rig.beside().read(mapping.addr(), 1).unwrap(), [5]);
    let dmaspan::dma::Unmapped::Released(coherent) = peer.unmap(mapping).unwrap() else {
        panic!("a device without translation releases at once");
    };
    one.free(coherent).unwrap();
}

mod blocks {
    use super::*;
    use dmaspan::dma::{CoherentPool, ForeignBlock};

    /// A device with a pool of blocks, and the addresses of all blocks that a page has.
    fn addrs(len: u64, align: u64, boundary: Option<u64>) -> (u64, Vec<u64>) {
        let rig = Rig::<12>::new(Flush::Strict);
        let device = rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source()));
        let mut pool = CoherentPool::new(&device, len, align, boundary).unwrap();
        let mut blocks = vec![pool.alloc(&device).unwrap()];
        while pool.blocks().0 < pool.blocks().1 {
            blocks.push(pool.alloc(&device).unwrap());
        }
        let page = blocks[0].addr().get();
        let at = blocks.iter().map(|block| block.addr().get() - page).collect();
        blocks.into_iter().for_each(|block| pool.free(block).unwrap());
        pool.destroy(&device).unwrap();
        assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (16, vec![]));
        (page, at)
    }

    #[test]
    fn blocks_lie_as_those_of_linux_do() {
        assert_eq!(addrs(64, 64, None).1, (0..64).map(|n| n * 64).collect::<Vec<_>>());
        // 96 is aligned to 32, and 128 is not crossed: one in each.
        assert_eq!(addrs(96, 32, Some(128)).1, (0..32).map(|n| n * 128).collect::<Vec<_>>());
        // Two of 96 bytes in 256, and 64 are left over.
        let expected = (0..16).flat_map(|n| [n * 256, n * 256 + 96]).collect::<Vec<_>>();
        assert_eq!(addrs(96, 32, Some(256)).1, expected);
        assert_eq!(addrs(5, 4, None).1.len(), 512);
        assert_eq!(addrs(1, 1, None).1.len(), 4096);
        assert_eq!(addrs(3000, 8, None).1, [0]);
        // Pages of one block, which begin on multiples of more than they have.
        let (page, at) = addrs(0x5001, 16, Some(0x8000));
        assert_eq!((page % 0x8000, at), (0, vec![0]));
        assert_eq!(addrs(64, 0x2000, None).0 % 0x2000, 0);
    }

    #[test]
    fn a_block_is_zeroed_and_its_own_whatever_the_device_wrote_into_free_ones() {
        let rig = Rig::<12>::new(Flush::Strict);
        let device = rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source()));
        let mut pool = CoherentPool::new(&device, 20, 1, None).unwrap();
        let blocks: Vec<_> = (0..500).map(|_| pool.alloc(&device).unwrap()).collect();
        let hardware = rig.behind();
        let first = blocks[0].addr();
        for mut block in blocks {
            assert_eq!((block.len(), hardware.read_all(block.addr(), 20)), (20, vec![0; 20]));
            block.write_bytes(0, &[0xff; 20]).unwrap();
            assert!(block.write_bytes(1, &[0xff; 20]).is_err());
            pool.free(block).unwrap();
        }
        // A list that went through free blocks would lead anywhere now.
        hardware.write(first, &[0xa5; 0x1000]).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        let blocks: Vec<_> = (0..500).map(|_| pool.alloc(&device).unwrap()).collect();
        for block in &blocks {
            assert!(seen.insert(block.addr().get()), "{block:?} was given out twice");
            let mut bytes = [1; 20];
            block.read_bytes(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 20]);
        }
        assert_eq!(pool.blocks(), (500, 612));
        blocks.into_iter().for_each(|block| pool.free(block).unwrap());
        pool.destroy(&device).unwrap();
        assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (16, vec![]));
    }

    #[test]
    fn blocks_and_devices_of_others_are_refused() {
        let rig = Rig::<12>::new(Flush::Strict);
        let [one, other] = [(); 2]
            .map(|()| rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source())));
        let [mut ours, mut theirs] =
            [(); 2].map(|()| CoherentPool::new(&one, 32, 32, None).unwrap());
        let block = ours.alloc(&one).unwrap();
        let addr = block.addr();
        let ForeignBlock { block } = theirs.free(block).unwrap_err();
        assert_eq!(Error::from(theirs.free(ours.alloc(&one).unwrap()).unwrap_err()), {
            Error::Foreign { addr: DmaAddr::new(addr.get() + 32) }
        });
        ours.free(block).unwrap();
        assert!(matches!(ours.alloc(&other), Err(Error::Foreign { .. })));
        // One is lost by now, and leaks its page.
        assert_eq!(ours.destroy(&one), Err(Error::BlocksOut { blocks: 1 }));
        assert!(matches!(theirs.destroy(&other), Err(Error::Foreign { .. })));
        assert!(rig.behind().read(addr, 32).is_some());
        assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (17, vec![]));
    }

    #[test]
    fn pages_with_blocks_out_leak_and_the_others_are_freed() {
        let rig = Rig::<12>::new(Flush::Strict);
        let device = rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source()));
        let mut pool = CoherentPool::new(&device, 2048, 2048, None).unwrap();
        let mut blocks: Vec<_> = (0..6).map(|_| pool.alloc(&device).unwrap()).collect();
        {
            let _dropped = blocks.pop();
        }
        let mut kept = blocks.remove(0);
        blocks.into_iter().for_each(|block| pool.free(block).unwrap());
        assert_eq!((rig.memory.pinned_frames(), pool.blocks()), (16 + 3, (2, 6)));
        assert_eq!(pool.destroy(&device), Err(Error::BlocksOut { blocks: 2 }));
        assert_eq!(rig.memory.pinned_frames(), 16 + 2);
        // It can be used, by both.
        kept.write(0, 9_u8).unwrap();
        assert_eq!(rig.behind().read(kept.addr(), 1).unwrap(), [9]);
        drop(device);
        assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (18, vec![]));
    }

    #[test]
    fn what_no_block_can_be_is_refused_with_the_limit() {
        let rig = Rig::<12>::new(Flush::Strict);
        let device = rig.translated(DeviceConfig::bits(32)).with_coherent(Arc::new(rig.source()));
        let refused = |len, align, boundary| {
            CoherentPool::new(&device, len, align, boundary).unwrap_err().to_string()
        };
        let boundary = "0x40 is no boundary of blocks: it has to be a power of two from 0x60 on";
        assert_eq!(refused(96, 32, Some(64)), boundary);
        assert!(refused(96, 32, Some(0x300)).starts_with("0x300 is no boundary"));
        assert!(refused(0, 32, None).contains("cannot be had: the device can have 1 to"));
        assert!(refused(1 << 40, 32, None).contains("cannot be had: the device can have 1 to"));
        assert!(refused(u64::MAX, 1 << 31, None).contains("cannot be had"));
        assert!(refused(8, 24, None).starts_with("0x18 is no alignment"));
        assert!(refused(8, 1 << 32, None).starts_with("0x100000000 is no alignment"));
    }

    #[test]
    fn a_refused_page_leaves_the_pool_as_it_was() {
        let rig = Rig::<12>::new(Flush::Strict);
        let device = rig.translated(DeviceConfig::bits(40)).with_coherent(Arc::new(rig.source()));
        let mut pool = CoherentPool::new(&device, 4096, 8, None).unwrap();
        let block = pool.alloc(&device).unwrap();
        let before = rig.held();
        for n in 1..3 {
            rig.faults.arm(n);
            pool.alloc(&device).unwrap_err();
            assert_eq!(rig.faults.disarm(), Fired::Yes);
            assert_eq!((rig.held(), pool.blocks()), (before, (1, 1)), "step {n}");
        }
        pool.free(block).unwrap();
        let block = pool.alloc(&device).unwrap();
        pool.free(block).unwrap();
        rig.faults.arm(1);
        assert!(matches!(pool.destroy(&device), Err(Error::Quarantined { .. })));
        assert_eq!(rig.memory.pinned_frames(), 17);
        device.flush().unwrap();
        assert_eq!((rig.memory.pinned_frames(), rig.memory.violations()), (16, vec![]));
    }
}
