//! Parts of buffers synced to and fro, against a model of every byte.

use dmaspan::dma::{ListMapping, Mapping};

use super::*;

for_all_granules!(
    every_part_that_is_synced_is_as_in_a_model_of_bytes,
    lists_and_what_was_written_of_them_are_as_in_a_model_of_bytes,
);

const DIRECTIONS: [Direction; 3] =
    [Direction::ToDevice, Direction::FromDevice, Direction::Bidirectional];

/// What each byte of a buffer is for the CPU and for the device.
struct Model {
    cpu: Vec<u8>,
    device: Vec<u8>,
    /// Whether the device has a copy of it.
    is_copy: Vec<bool>,
    direction: Direction,
}

impl Model {
    fn new(cpu: Vec<u8>, is_copy: Vec<bool>, direction: Direction) -> Self {
        Self { device: cpu.clone(), cpu, is_copy, direction }
    }

    fn cpu_writes(&mut self, first: usize, bytes: &[u8]) {
        for (n, byte) in (first..).zip(bytes) {
            self.cpu[n] = *byte;
            if !self.is_copy[n] {
                self.device[n] = *byte;
            }
        }
    }

    fn device_writes(&mut self, first: usize, bytes: &[u8]) {
        for (n, byte) in (first..).zip(bytes) {
            self.device[n] = *byte;
            if !self.is_copy[n] {
                self.cpu[n] = *byte;
            }
        }
    }

    fn sync_for_cpu(&mut self, first: usize, len: usize) {
        if self.direction != Direction::ToDevice {
            self.cpu[first..first + len].copy_from_slice(&self.device[first..first + len]);
        }
    }

    fn sync_for_device(&mut self, first: usize, len: usize) {
        if self.direction != Direction::FromDevice {
            self.device[first..first + len].copy_from_slice(&self.cpu[first..first + len]);
        }
    }
}

/// The part of a device's buffers that is bounced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bounced {
    Nothing,
    /// Bytes in granules that are not a buffer's alone; all, where no granule is.
    Shared,
    Everything,
}

impl Bounced {
    /// Which bytes of a piece are, found byte by byte.
    fn bytes(self, g: u64, span: Span) -> Vec<bool> {
        let (first, last) = (span.paddr().get(), span.last().get());
        let is_whole = |at: u64| at / g * g >= first && at / g * g + g - 1 <= last;
        let has_whole = (first..=last).any(is_whole);
        let is_bounced = |at| match self {
            Self::Nothing => false,
            Self::Shared => !has_whole || !is_whole(at),
            Self::Everything => true,
        };
        (first..=last).map(is_bounced).collect()
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap()
}

/// Offsets around the ends of granules.
fn edges(g: u64, (offset, len): (u64, u64)) -> Vec<u64> {
    let ends = (0..=(offset + len).div_ceil(g)).map(|n| (n * g).saturating_sub(offset));
    let mut edges: Vec<_> =
        ends.flat_map(|end| [end.saturating_sub(1), end, end + 1]).chain([len]).collect();
    edges.retain(|edge| *edge <= len);
    edges.sort_unstable();
    edges.dedup();
    edges
}

fn every_part_that_is_synced_is_as_in_a_model_of_bytes<const G: u32>() {
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let (plain, far) = (DeviceConfig::bits(40), near::<G>());
    let (behind, beside) = (&bench.behind(), &Arc::clone(&bench.memory));
    for place in [(0, (1 << G) + 9), (5, (2 << G) - 5), (77, 1000)] {
        each_pool(&bench, place, &bench.pool, behind, beside, plain, far);
    }
    each_pool(&bench, (100, 3u64 << G), &bench.pool, behind, beside, plain, far);
    each_pool(&bench, (100, 2u64 << G), &bench.sim, behind, beside, plain, far);
    bench.check_end();
}

fn each_pool<const G: u32, B: BouncePool + Clone>(
    bench: &Bench<G, Parts>,
    place: (u64, u64),
    pool: &B,
    behind: &impl Dma,
    beside: &impl Dma,
    plain: DeviceConfig,
    far: DeviceConfig,
) {
    for (config, bounced) in [
        (plain, Bounced::Nothing),
        (untrusted(plain), Bounced::Shared),
        (always(plain), Bounced::Everything),
    ] {
        let device = bench.translated(pool, config);
        DIRECTIONS.into_iter().for_each(|d| sync_all(bench, &device, behind, place, d, bounced));
    }
    for (config, bounced) in [
        (plain, Bounced::Nothing),
        (far, Bounced::Everything),
        (always(plain), Bounced::Everything),
    ] {
        let device = bench.beside(pool, config);
        DIRECTIONS.into_iter().for_each(|d| sync_all(bench, &device, beside, place, d, bounced));
    }
}

/// Syncs each part between two edges, both ways.
fn sync_all<const G: u32, T: Translation<Memory = Parts>, B: BouncePool>(
    bench: &Bench<G, Parts>,
    device: &Device<T, B>,
    dma: &impl Dma,
    place: (u64, u64),
    direction: Direction,
    bounced: Bounced,
) {
    let parts = bench.parts(&[place]);
    let own = parts.spans()[0];
    let is_copy = bounced.bytes(1 << G, own);
    let mut model = Model::new(parts.bytes(), is_copy, direction);
    let mapping: Mapping<T, B> = device.map_single(parts, direction).unwrap();
    let read = || crate::rig::read(&bench.memory, own);
    let edges = edges(1 << G, place);
    let mut seed = 0u8;
    for (n, &first) in edges.iter().enumerate() {
        // Large granules take long.
        for &behind in edges[n + 1..].iter().step_by(if G == 12 { 1 } else { 5 }) {
            let (len, at) = (behind - first, to_usize(first));
            seed = (seed + 1) % 100;
            let bytes = pattern(place.1, seed);
            bench.memory.cpu_write(own.paddr(), &bytes).unwrap();
            model.cpu_writes(0, &bytes);
            device.sync_for_device(&mapping, first, len).unwrap();
            model.sync_for_device(at, to_usize(len));
            let seen = dma.read(mapping.addr(), place.1).unwrap();
            assert!(seen == model.device, "{len:#x} bytes at {first:#x}, {bounced:?}");
            if direction == Direction::ToDevice {
                continue;
            }
            let bytes = pattern(place.1, seed + 50);
            dma.write(mapping.addr(), &bytes).unwrap();
            model.device_writes(0, &bytes);
            device.sync_for_cpu(&mapping, first, len).unwrap();
            model.sync_for_cpu(at, to_usize(len));
            assert!(read() == model.cpu, "{len:#x} bytes at {first:#x}, {bounced:?}");
        }
    }
    let before = read();
    device.sync_for_cpu(&mapping, 0, place.1).unwrap();
    model.sync_for_cpu(0, to_usize(place.1));
    assert!(direction != Direction::ToDevice || read() == before, "the device only reads");
    let parts = released(device.unmap(mapping));
    assert!(parts.bytes() == model.cpu && parts.buffers[0].is_whole(), "{bounced:?}");
}

fn lists_and_what_was_written_of_them_are_as_in_a_model_of_bytes<const G: u32>() {
    let g = 1u64 << G;
    let bench = Bench::<G, Parts>::new(PoolConfig::new(2));
    let (plain, far) = (DeviceConfig::bits(40), near::<G>());
    let places = [(100, 2 * g), (0, g), (0, 2 * g + 3), (7, 50), (g / 2, g / 2 + 2 * g)];
    for (config, bounced) in [
        (plain, Bounced::Nothing),
        (untrusted(plain), Bounced::Shared),
        (always(untrusted(plain)), Bounced::Everything),
    ] {
        let device = bench.translated(&bench.pool, config);
        let dma = bench.behind();
        DIRECTIONS.into_iter().for_each(|d| each_end(&bench, &device, &dma, &places, d, bounced));
    }
    let device = bench.beside(&bench.pool, far);
    let dma = Arc::clone(&bench.memory);
    for direction in DIRECTIONS {
        each_end(&bench, &device, &dma, &places, direction, Bounced::Everything);
    }
    bench.check_end();
}

/// Ends a list after so many bytes of it were written, for each edge in it.
fn each_end<const G: u32, T: Translation<Memory = Parts>, B: BouncePool>(
    bench: &Bench<G, Parts>,
    device: &Device<T, B>,
    dma: &impl Dma,
    places: &[(u64, u64)],
    direction: Direction,
    bounced: Bounced,
) {
    let (mut ends, mut before) = (Vec::new(), 0);
    for &place in places {
        ends.extend(edges(1 << G, place).into_iter().map(|edge| before + edge));
        before += place.1;
    }
    ends.retain(|_| direction != Direction::ToDevice);
    if G != 12 {
        ends = ends.into_iter().step_by(5).collect();
    }
    // A plain unmap last.
    for written in ends.into_iter().map(Some).chain([None]) {
        let parts = bench.parts(places);
        let is_copy = parts.spans().into_iter().flat_map(|own| bounced.bytes(1 << G, own));
        let mut model = Model::new(parts.bytes(), is_copy.collect(), direction);
        let mut room = [Segment::default(); 256];
        let mapping: ListMapping<T, B> = device.map_list(parts, direction, &mut room).unwrap();
        let segments = &room[..mapping.segment_count()];
        let read = |&Segment { addr, len }: &Segment| dma.read(addr, len).unwrap();
        let seen: Vec<_> = segments.iter().flat_map(read).collect();
        assert!(seen == model.device, "{bounced:?}");
        if direction != Direction::ToDevice {
            let bytes = pattern(mapping.len(), 70);
            let mut rest = &bytes[..];
            for segment in segments {
                let (part, behind) = rest.split_at(to_usize(segment.len));
                dma.write(segment.addr, part).unwrap();
                rest = behind;
            }
            model.device_writes(0, &bytes);
        }
        model.sync_for_cpu(0, to_usize(written.unwrap_or(before)));
        let parts = match written {
            Some(written) => released(device.unmap_list_written(mapping, written)),
            None => released(device.unmap_list(mapping)),
        };
        assert!(parts.bytes() == model.cpu, "{written:?} of {before}, {bounced:?}");
        assert!(parts.buffers.iter().all(Buffer::is_whole));
    }
}
