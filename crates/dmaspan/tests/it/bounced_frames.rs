//! A kernel's bounce pool in frames of its page allocator, which gives freed frames to others at
//! once.

use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, Direct, DmaConfig, DmaDomain, FrameBounce, Mapping, Piece, RawMemory,
    Trust,
};
use dmaspan::io_pgtable::{FrameTables, PageTable, X86_64};
use dmaspan::iommu::Domain;
use dmaspan::platform::OneThread;
use dmaspan::swiotlb::{self, Growth, Pool, PoolConfig, PoolMemory, SlotRequest};
use dmaspan::{Coherency, Direction, Iova, PhysAddr, Span};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::Access;

use crate::common::span;
use crate::formats::x86_64::FirstStage;
use crate::frames::{BASE, BYTES, Machine, x86};

type Slots = Pool<FrameBounce<Machine>, OneThread>;
type Tlb = Iotlb<<FirstStage as Subject>::Walker, Machine>;
type Kernel = DmaDomain<X86_64, Arc<FrameTables<Machine>>, Tlb, OneThread, RawMemory>;

const LAST: PhysAddr = PhysAddr::new(u64::MAX);

fn machine() -> Machine {
    Machine::new(Coherency::Coherent)
}

fn slots(machine: &Machine, bytes: u64, config: PoolConfig) -> Arc<Slots> {
    let memory = FrameBounce::new(machine.clone(), bytes, LAST).unwrap();
    Arc::new(Pool::new(memory, config, OneThread).unwrap())
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

fn bytes(len: u64, seed: u8) -> Vec<u8> {
    (0..len).map(|n| n.to_le_bytes()[0].wrapping_mul(7).wrapping_add(seed) | 1).collect()
}

/// Memory of a driver, which keeps it for good.
fn memory(at: u64, len: u64) -> RawMemory {
    // SAFETY: nobody else has the frames, and they are not put back.
    unsafe { RawMemory::new(Piece::memory(span(at, len))) }
}

/// A domain over the machine's frames with its IOMMU, and a device that is not trusted.
fn untrusted(machine: &Machine, slots: &Arc<Slots>) -> (Device<Kernel, Arc<Slots>>, Tlb) {
    let tables = Arc::new(FrameTables::new(machine.clone()));
    let table = PageTable::new(x86(), tables).unwrap();
    let (root, top) = table.root_and_level();
    let tlb = Iotlb::new(FirstStage::walker(table.format(), root, top), machine.clone());
    let domain = Domain::new(table, tlb.clone()).unwrap();
    let domain = DmaDomain::new(domain, DmaConfig::new(1), OneThread).unwrap();
    let config = DeviceConfig { trust: Trust::Untrusted, ..DeviceConfig::bits(40) };
    (Device::new(Arc::new(domain), Arc::clone(slots), config).unwrap(), tlb)
}

/// Where a device gets with each byte from `addr` on, by what its IOMMU knows.
fn reached(tlb: &Tlb, addr: u64, len: u64) -> Vec<PhysAddr> {
    let at = |addr| tlb.translate(Iova::new(addr), Access::Read).unwrap().paddr;
    (addr..addr + len).map(at).collect()
}

fn read(machine: &Machine, at: &[PhysAddr]) -> Vec<u8> {
    at.iter().map(|at| machine.bytes(*at, 1)[0]).collect()
}

/// Frames that are the page allocator's are written by others.
fn others_use_what_is_free(machine: &Machine) {
    let frames: Vec<u64> = std::iter::from_fn(|| machine.take(12)).collect();
    frames.iter().for_each(|frame| machine.scribble(*frame, 12, 0x66));
    frames.into_iter().for_each(|frame| machine.put(frame, 12));
}

#[test]
fn page_ends_are_bounced_in_the_kernels_frames_and_what_is_beside_them_is_not_seen() {
    let machine = machine();
    let slots = slots(&machine, 1 << 16, PoolConfig::new(1));
    let (device, tlb) = untrusted(&machine, &slots);
    let frames = BASE + machine.take(14).unwrap();
    // Two ends and two whole frames between them; one frame's part; two ends alone.
    for (offset, len) in [(0xd1f, 0x2400), (0x123, 0x77), (0xfff, 2), (0x10, 0x1fe1)] {
        machine.scribble(frames - BASE, 14, 0xee);
        machine.write(PhysAddr::new(frames + offset), &bytes(len, 1));
        let buffer = memory(frames + offset, len);
        let mapping = device.map_single(buffer, Direction::Bidirectional).unwrap();
        let addr = mapping.addr().get();
        let (first, end) = (addr & !0xfff, (addr + len).next_multiple_of(0x1000));
        let all = reached(&tlb, first, end - first);
        let seen = read(&machine, &all);
        let (before, behind) = (index(addr - first), index(addr + len - first));
        assert_eq!(seen[before..behind], bytes(len, 1));
        let beside = || seen[..before].iter().chain(&seen[behind..]);
        assert!(beside().all(|byte| *byte == 0), "it sees what is beside its buffer");
        // It writes everything that it reaches.
        for (at, byte) in all.iter().zip(bytes(end - first, 99)) {
            machine.write(*at, &[byte]);
        }
        let _buffer = device.unmap(mapping).unwrap();
        let back = machine.bytes(PhysAddr::new(frames), 1 << 14);
        let (start, end) = (index(offset), index(offset + len));
        assert_eq!(back[start..end], bytes(1 << 14, 99)[before..behind]);
        let beside = || back[..start].iter().chain(&back[end..]);
        assert!(beside().all(|byte| *byte == 0xee), "it changed what is beside its buffer");
    }
    assert_eq!(slots.stats().used, 0);
}

#[test]
fn frames_of_slots_are_nobody_elses_while_a_device_may_reach_them() {
    let machine = machine();
    let empty = machine.out().0;
    let growth = Some(Growth::new(1 << 12, 1 << 16));
    let slots = slots(&machine, 1 << 12, PoolConfig { growth, ..PoolConfig::new(1) });
    let (device, tlb) = untrusted(&machine, &slots);
    let frames = BASE + machine.take(13).unwrap();
    machine.write(PhysAddr::new(frames + 0xf00), &bytes(0x200, 3));
    // Slots of what the pool began with, of what it grew by, and of memory for one alone.
    let map = || {
        let buffer = memory(frames + 0xf00, 0x200);
        device.map_single(buffer, Direction::ToDevice).unwrap()
    };
    let base = map();
    slots.grow().unwrap();
    let (grown, [single, other, leaked]) = (map(), [(); 3].map(|()| map()));
    assert_eq!((slots.stats().used, slots.stats().single), (5 << 12, 3 << 12));
    let addr = |mapping: &Mapping<_, _>| mapping.addr().get();
    let addrs = [&base, &grown, &single, &other, &leaked].map(addr);
    let all_see = |addrs: &[u64]| {
        others_use_what_is_free(&machine);
        for addr in addrs {
            assert_eq!(read(&machine, &reached(&tlb, *addr, 0x200)), bytes(0x200, 3));
        }
    };
    all_see(&addrs);
    let places = addrs.map(|addr| reached(&tlb, addr, 1)[0]);

    // Hardware does not answer: the slots stay where its caches may still lead.
    tlb.fail_next_invalidations(100);
    let _errors = [grown, single].map(|mapping| device.unmap(mapping).unwrap_err());
    slots.shrink();
    assert_eq!((slots.stats().used, slots.stats().single), (5 << 12, 3 << 12));
    others_use_what_is_free(&machine);
    assert!(places.iter().all(|at| machine.bytes(*at, 0x100) == bytes(0x200, 3)[..0x100]));

    // Then it does. Slots of which that was in doubt stay out of use for ever, others may go.
    tlb.fail_next_invalidations(0);
    device.flush().unwrap();
    let _buffers = [base, other].map(|mapping| device.unmap(mapping).unwrap());
    slots.shrink();
    assert_eq!(
        (slots.stats().used, slots.stats().single, slots.stats().grown),
        (3 << 12, 2 << 12, 1 << 12)
    );
    all_see(&addrs[4..]);
    for addr in &addrs[..4] {
        tlb.translate(Iova::new(*addr), Access::Read).unwrap_err();
    }

    // A mapping that is dropped leaks: its frames never go back.
    drop(leaked);
    drop((device, slots));
    others_use_what_is_free(&machine);
    for kept in [1, 2, 4] {
        assert_eq!(machine.bytes(places[kept], 0x200), bytes(0x200, 3));
    }
    assert!(machine.out().0 > empty);
}

#[test]
fn all_frames_go_back_with_the_pool() {
    let machine = machine();
    let growth = Some(Growth::new(3 << 11, 1 << 16));
    let slots = slots(&machine, 5 << 12, PoolConfig { growth, ..PoolConfig::new(1) });
    let lens: Vec<u64> = slots.memory().spans().iter().map(|span| span.len()).collect();
    assert_eq!((lens, machine.out().0), (vec![4 << 12, 1 << 12], 2));
    let request = SlotRequest::default();
    let take = |len| slots.take(original(BASE, len), &request).unwrap();
    assert_eq!(slots.grow().unwrap().len(), 3 << 11);
    // Longer than all that there is: for this request alone.
    let single = take(5 << 12);
    assert_eq!((slots.stats().single, machine.out().0), (5 << 12, 4));
    slots.release(single).unwrap();
    assert_eq!(machine.out().0, 3);
    slots.release(take(3 << 11)).unwrap();
    assert_eq!(slots.shrink(), 3 << 11);
    assert_eq!(machine.out().0, 2);
    slots.grow().unwrap();
    drop(slots);
    assert_eq!(machine.out().0, 0);
}

fn original(at: u64, len: u64) -> swiotlb::Original {
    // SAFETY: the machine's memory is there as long as the test, and nothing is copied to it.
    unsafe { swiotlb::Original::new(span(at, len)) }
}

#[test]
fn a_device_that_reaches_little_gets_slots_there_and_every_byte_at_every_alignment() {
    let machine = machine();
    let reach = PhysAddr::new(BASE + (1 << 20) - 1);
    let memory_of = FrameBounce::new(machine.clone(), 1 << 15, reach).unwrap();
    let slots = Arc::new(Pool::new(memory_of, PoolConfig::new(1), OneThread).unwrap());
    let all = Span::new(PhysAddr::new(0), BASE + BYTES).unwrap();
    let direct = Arc::new(Direct::<RawMemory, _>::new(all, OneThread));
    let mut config = DeviceConfig::bits(40);
    config.limits.last = reach.get();
    let device = Device::new(direct, Arc::clone(&slots), config).unwrap();
    let far = BASE + BYTES - (1 << 14);
    for (offset, len) in (0..17).flat_map(|at| [1, 7, 8, 63, 4096, 9001].map(|len| (at, len))) {
        machine.write(PhysAddr::new(far + offset), &bytes(len, 5));
        let mapping = device.map_single(memory(far + offset, len), Direction::Bidirectional);
        let mapping = mapping.unwrap();
        let at = PhysAddr::new(mapping.addr().get());
        assert!(at.get() + (len - 1) <= reach.get());
        assert_eq!(machine.bytes(at, index(len)), bytes(len, 5));
        machine.write(at, &bytes(len, 8));
        let _buffer = device.unmap(mapping).unwrap();
        assert_eq!(machine.bytes(PhysAddr::new(far + offset), index(len)), bytes(len, 8));
    }
}

#[test]
fn frames_that_run_out_are_given_back_and_bad_sizes_are_refused() {
    let machine = machine();
    let none = |bytes| swiotlb::Error::NoMemory { bytes };
    let new = |bytes, last| FrameBounce::new(machine.clone(), bytes, last).map(drop);
    for bytes in [BYTES + 1, 1 << 40, 1 << 63, u64::MAX] {
        assert_eq!(new(bytes, LAST), Err(none(bytes)));
    }
    assert_eq!(new(0x1000, PhysAddr::new(BASE - 1)), Err(none(0x1000)));
    assert_eq!(machine.out().0, 0);
    let empty = FrameBounce::new(machine.clone(), 0, LAST).unwrap();
    let error = Pool::new(empty, PoolConfig::new(1), OneThread).unwrap_err();
    assert!(matches!(error, swiotlb::Error::Spans { .. }), "{error}");
    assert_eq!(machine.out().0, 0);
}
