//! Random histories of several threads, devices and buffers.

use std::sync::{Arc, Mutex};
use std::thread;

use dmaspan::dma::{Device, DeviceConfig, Flush, MapBufferError, MappedSource, NoPool};
use dmaspan::regbuf::{Buffer, BufferRequest, CloneRequest, Existing, Node, Registry};
use dmaspan::{Direction, DmaAddr, PhysAddr, Prot, UserRange};

use super::world::{Accesses as _, Behind, Dma, PAGE, Rng, Source, World, part, physical, size};

const PAGES: u64 = 96;

/// What the user has at each place, all the time: devices write what is there.
fn byte_at(place: u64) -> u8 {
    u8::try_from((place ^ (place >> 8) ^ (place >> 16)) & 0xff).unwrap()
}

/// What operations are done on: nodes of registries, and buffers that devices share.
enum InFlight {
    Node(Node<DmaAddr>),
    Mapped(Buffer<DmaAddr>),
}

impl InFlight {
    fn buffer(&self) -> &Buffer<DmaAddr> {
        match self {
            Self::Node(node) => node,
            Self::Mapped(buffer) => buffer,
        }
    }
}

/// A domain and what all threads do in it.
struct Place<'a, const G: u32> {
    world: &'a World,
    behind: &'a Behind<G>,
    all: UserRange,
    /// Buffers that devices of both domains map.
    buffers: &'a [Arc<Buffer<PhysAddr>>],
    /// What each thread can take from another.
    shared: Mutex<Registry<Source<Dma<G>>>>,
    flying: Mutex<Vec<InFlight>>,
}

impl<const G: u32> Place<'_, G> {
    fn range(&self, rng: &mut Rng) -> UserRange {
        let offset = rng.below(PAGES * PAGE - 1);
        part(self.all, offset, 1 + rng.below((PAGES * PAGE - offset).min(20 * PAGE)))
    }

    /// A device reads and writes part of a buffer.
    fn operate(&self, buffer: &Buffer<DmaAddr>, rng: &mut Rng) {
        let offset = rng.below(buffer.len());
        let len = 1 + rng.below((buffer.len() - offset).min(2 * PAGE));
        let mut at = buffer.user().start().get() - self.all.start().get() + offset;
        for piece in buffer.import(offset, len, Direction::Bidirectional).unwrap() {
            let expected: Vec<_> = (at..at + piece.len()).map(byte_at).collect();
            assert!(self.behind.read(piece).unwrap() == expected, "{piece:?} for {at:#x}");
            self.behind.write(piece.start(), &expected).unwrap();
            at += piece.len();
        }
    }

    /// Takes something out of flight, perhaps to put it back.
    fn fly(&self, rng: &mut Rng) {
        let any = {
            let mut flying = self.flying.lock().unwrap();
            let at = size(rng.below(4 + u64::try_from(flying.len()).unwrap()));
            (at < flying.len()).then(|| flying.swap_remove(at))
        };
        let Some(any) = any else { return };
        self.operate(any.buffer(), rng);
        if rng.below(3) == 0 {
            self.flying.lock().unwrap().push(any);
        }
    }

    fn run(&self, seed: u64) {
        let mut rng = Rng::new(seed);
        let config = DeviceConfig::bits(40);
        let device = Device::new(Arc::clone(&self.behind.domain), NoPool, config).unwrap();
        let device = Arc::new(device);
        let mut mine = Registry::new(MappedSource::new(self.world.pinned(), Arc::clone(&device)));
        let mut third = self.behind.registry(self.world);
        for _ in 0..150 {
            let requests = [
                BufferRequest::new(self.range(&mut rng)),
                BufferRequest::new(self.range(&mut rng)),
            ];
            // Where hardware does not answer, or a table is taken already, nothing happens.
            match rng.below(8) {
                0 => drop(mine.register(&requests)),
                1 => drop(mine.update(u32::try_from(rng.below(2)).unwrap(), &requests[..1])),
                2 => drop(mine.unregister()),
                3 => drop(self.shared.lock().unwrap().update(0, &requests)),
                4 => {
                    let existing = Existing::Replace;
                    let request = CloneRequest { existing, ..CloneRequest::default() };
                    drop(third.clone_from(&self.shared.lock().unwrap(), &request));
                }
                5 => {
                    let buffer = Arc::clone(&self.buffers[size(rng.below(3))]);
                    match device.map_buffer(buffer, Prot::READ_WRITE) {
                        Ok(mapped) => {
                            self.flying.lock().unwrap().push(InFlight::Mapped(mapped));
                        }
                        Err(MapBufferError::Map { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                6 => self.behind.iotlb.fail_next_invalidations(1),
                _ => drop(self.behind.domain.flush()),
            }
            for registry in [&mine, &third] {
                if let Ok(node) = registry.get(u32::try_from(rng.below(2)).unwrap()) {
                    self.operate(node, &mut rng);
                    self.flying.lock().unwrap().push(InFlight::Node(node.clone()));
                }
            }
            self.fly(&mut rng);
            self.fly(&mut rng);
        }
    }
}

fn history(seed: u64) {
    println!("seed {seed:#x}");
    let world = World::new();
    let small = Behind::<12>::new(&world, Flush::Lazy);
    let large = Behind::<16>::new(&world, Flush::Strict);
    let all = world.folios(&[0, 1, 2, 3, 0, 4, 5, 4, 2, 2, 2, 2], seed);
    assert_eq!(all.checked_len(), Some(PAGES * PAGE));
    let bytes: Vec<_> = (0..PAGES * PAGE).map(byte_at).collect();
    world.space.write(all.start(), &bytes).unwrap();
    let buffers = [(0x123, 0x9000), (0x8000, 0x1_0000), (0x4_0fff, 2)]
        .map(|(offset, len)| physical(&world, part(all, offset, len), Prot::READ_WRITE));
    fn place<'a, const G: u32>(
        world: &'a World,
        behind: &'a Behind<G>,
        all: UserRange,
        buffers: &'a [Arc<Buffer<PhysAddr>>],
    ) -> Place<'a, G> {
        let mut shared = behind.registry(world);
        shared.register(&[BufferRequest::VACANT, BufferRequest::VACANT]).unwrap();
        let (shared, flying) = (Mutex::new(shared), Mutex::default());
        Place { world, behind, all, buffers, shared, flying }
    }
    let in_small = place(&world, &small, all, &buffers);
    let in_large = place(&world, &large, all, &buffers);
    thread::scope(|scope| {
        for n in 1..=2 {
            let (in_small, in_large) = (&in_small, &in_large);
            scope.spawn(move || in_small.run(seed.wrapping_mul(n)));
            scope.spawn(move || in_large.run(seed.wrapping_mul(n + 2)));
        }
    });
    drop((in_small, in_large));
    drop(buffers);
    // A failure that was asked for may be left.
    let _ = (small.domain.flush(), large.domain.flush());
    small.domain.flush().unwrap();
    large.domain.flush().unwrap();
    assert_eq!(world.held(), (0, 0));
    small.check_end();
    large.check_end();
}

#[test]
fn bytes_stay_the_users_in_random_histories_of_threads_and_devices() {
    (0x9e37_79b9..0x9e37_79bd).for_each(history);
}
