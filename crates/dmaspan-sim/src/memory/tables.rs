//! The page tables of simulated address spaces, for the pinner that kernels use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::follow::{FaultIn, UserLeaf, UserTables};
use dmaspan::pin::Dirty;
use dmaspan::{Errno, PhysAddr, Promise, Prot, Span, UserAddr, UserRange};

use super::mm::Mm;
use super::vma::Rights;
use super::{FaultError, SimMemory, SimSpace};
use crate::walker::Access;

/// The tables of the [`SimSpace`]s of a memory, as a kernel gives them to a
/// [`LeafPinner`](dmaspan::follow::LeafPinner).
///
/// [`SimPinner`](super::SimPinner) shares nothing with it but the spaces, so that either judges the
/// other.
#[derive(Clone, Debug)]
pub struct SimTables {
    memory: Arc<SimMemory>,
    lookups: Arc<AtomicU64>,
}

impl SimTables {
    /// The tables of this memory's spaces.
    pub fn new(memory: Arc<SimMemory>) -> Self {
        Self { memory, lookups: Arc::default() }
    }

    fn has(&self, space: &SimSpace) -> bool {
        Arc::ptr_eq(space.memory(), &self.memory)
    }

    /// Returns how many leaves were looked up, those that were not there included.
    pub fn lookups(&self) -> u64 {
        self.lookups.load(Ordering::Relaxed)
    }
}

/// The leaf that maps `at`.
fn leaf_of(mm: &Mm, at: UserAddr) -> Option<UserLeaf> {
    let (_, leaf) = mm.find(at)?;
    let prot = match leaf.rights {
        Rights::ReadOnly => Prot::READ,
        Rights::ReadWrite => Prot::READ_WRITE,
    };
    Some(UserLeaf::of_size(at, leaf.size_lg2.into(), leaf.paddr, leaf.kind, prot))
}

// SAFETY:
// 1. Frames are pinned under the lock of the tables, while these have the whole leaf that was found
//    before, its access included, and are nobody else's until they are unpinned: no Rust reference
//    to their bytes exists outside the memory's lock. Frames given another use while they are
//    pinned are a violation that tests ask for.
// 2. A space calls its listeners, which revoke, when look-ups find device memory no more, and it
//    goes when they have returned.
#[expect(unsafe_code, reason = "the trait is a promise about memory, kept as said above")]
unsafe impl UserTables for SimTables {
    type Space = Arc<SimSpace>;
    type Address = PhysAddr;
    type Error = FaultError;

    fn leaf(&self, space: &Arc<SimSpace>, at: UserAddr) -> Option<UserLeaf> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        if self.has(space) { leaf_of(&space.mm.read(), at) } else { None }
    }

    fn pin(
        &self,
        space: &Arc<SimSpace>,
        leaf: &UserLeaf,
        at: UserAddr,
        frames: Span,
        _access: Prot,
    ) -> bool {
        let mm = space.mm.read();
        // The access is the leaf's. Nothing here is copied on write.
        let is_still_there = leaf_of(&mm, at) == Some(*leaf);
        if is_still_there {
            self.memory.pin_span(frames);
        }
        is_still_there
    }

    fn unpin(&self, _promise: Promise<'_>, frames: Span, dirty: Dirty) {
        self.memory.unpin_span(frames, dirty);
    }

    fn fault_in(
        &self,
        space: &Arc<SimSpace>,
        at: UserAddr,
        prot: Prot,
    ) -> Result<FaultIn, FaultError> {
        if !self.has(space) {
            return Ok(FaultIn::Refused);
        }
        let access = if prot.contains(Prot::WRITE) { Access::Write } else { Access::Read };
        match space.fault(at, access) {
            Ok(_) | Err(FaultError::Again { .. }) => Ok(FaultIn::LookAgain),
            Err(FaultError::Hole { .. } | FaultError::ReadOnly { .. }) => Ok(FaultIn::Refused),
            Err(error @ FaultError::Revoked { .. }) => Err(error),
        }
    }

    fn frame_lg2(&self) -> u32 {
        self.memory.granule_lg2()
    }

    fn space_id(&self, space: &Arc<SimSpace>) -> u64 {
        space.id()
    }

    fn memory_bytes(&self, space: &Arc<SimSpace>, range: UserRange) -> u64 {
        space.memory_bytes(range)
    }

    fn read(
        &self,
        space: &Arc<SimSpace>,
        at: UserAddr,
        bytes: &mut [u8],
    ) -> Result<(), FaultError> {
        space.read_bytes(at, bytes)
    }

    fn write(&self, space: &Arc<SimSpace>, at: UserAddr, bytes: &[u8]) -> Result<(), FaultError> {
        space.write_bytes(at, bytes)
    }

    fn errno(&self, _error: &FaultError) -> Errno {
        Errno::EFAULT
    }
}
