//! Registered buffers, which several CPUs use in turn: each I/O keeps the buffer of a slot, imports
//! a part of it and lets go of it when it is done.

use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;

use dmaspan::error::Errno;
use dmaspan::regbuf::{Buffer, Keep, Owner, Registry, Segments, SegmentsBuilder, Source};
use dmaspan::{Direction, PhysAddr, Prot, Span, UserAddr, UserRange};

use super::contention::{self, CPUS};
use super::{PROT, SZ_2M, SZ_4K, is_wanted};

/// There is nothing to let go of.
struct Nothing;

impl Keep<PhysAddr> for Nothing {
    fn end(&mut self, _segments: &Segments<PhysAddr>) {}
}

/// Buffers are lent, and none comes from here.
struct Nobody;

impl Source for Nobody {
    type Addr = PhysAddr;
    type Error = Infallible;

    fn buffer(&self, user: UserRange, _access: Prot) -> Result<Buffer<PhysAddr>, Infallible> {
        Ok(buffer(user))
    }

    fn owner(&self) -> Owner<'_> {
        Owner { account: None, space: 0, device: None }
    }

    fn errno(&self, error: &Infallible) -> Errno {
        match *error {}
    }
}

/// Four huge pages that are not neighbours.
fn buffer(user: UserRange) -> Buffer<PhysAddr> {
    let mut segments = SegmentsBuilder::new();
    for nth in 0..user.checked_len().expect("a buffer") / SZ_2M {
        let span = Span::new(PhysAddr::new((1 << 32) + 2 * nth * SZ_2M), SZ_2M);
        segments.push(span.expect("a valid span")).expect("room");
    }
    let segments = segments.build().expect("room");
    // SAFETY: no device uses the addresses.
    unsafe { Buffer::new(segments, user, PROT, Box::new(Nothing)) }.expect("as long as its memory")
}

/// A registry with a buffer of its own, or with one that others share.
fn registry(shared: Option<&Arc<Buffer<PhysAddr>>>) -> Registry<Nobody> {
    let user = UserRange::from_len(UserAddr::new(1 << 40), 4 * SZ_2M).expect("a valid range");
    let mut registry = Registry::new(Nobody);
    registry.register_sparse(1).expect("a table");
    let buffer = shared.map_or_else(|| Arc::new(buffer(user)), Arc::clone);
    registry.lend(0, buffer).expect("an empty slot");
    registry
}

pub(crate) fn run(wanted: &[String]) {
    if !contention::is_asked() {
        return;
    }
    if is_wanted(wanted, "own_registry") {
        let registries: Vec<_> = (0..CPUS).map(|_| registry(None)).collect();
        use_in_turn(|cpu| &registries[cpu]);
    } else if is_wanted(wanted, "shared_buffer") {
        let user = UserRange::from_len(UserAddr::new(1 << 40), 4 * SZ_2M).expect("a valid range");
        let shared = Arc::new(buffer(user));
        let registries: Vec<_> = (0..CPUS).map(|_| registry(Some(&shared))).collect();
        use_in_turn(|cpu| &registries[cpu]);
    } else if is_wanted(wanted, "one_slot") {
        let registry = registry(None);
        use_in_turn(|_| &registry);
    }
}

fn use_in_turn<'r>(registry: impl Fn(usize) -> &'r Registry<Nobody> + Sync) {
    contention::take_turns(|turn| {
        let registry = registry(turn.cpu);
        let keep = |nth| {
            let node = registry.get(0).expect("a buffer").clone();
            let part = node.import(nth * 3 * SZ_4K, SZ_4K, Direction::FromDevice);
            black_box(part.expect("a part of it").next());
            node
        };
        turn.batch(keep, drop);
    });
}
