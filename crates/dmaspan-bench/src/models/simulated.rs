//! Simulated memory and a user of it.

use std::sync::Arc;

use dmaspan::{PhysAddr, UserAddr, UserRange};
use dmaspan_sim::memory::{AllocError, Books, SimMemory, SimSpace};

use crate::failed::Failed;

/// Where the memory and its user's are: multiples of every leaf, and different, so that nothing is
/// right by accident.
const MEMORY_AT: PhysAddr = PhysAddr::new(1 << 36);
pub(crate) const USER_AT: UserAddr = UserAddr::new(0x7e00_0000_0000);

/// Memory of so many bytes, and a space of its user.
pub(crate) fn simulated(bytes: u64) -> Result<(Arc<SimMemory>, Arc<SimSpace>), Failed> {
    let memory = SimMemory::with_books(MEMORY_AT, bytes, 12, Books::Folios);
    let memory = Arc::new(memory.map_err(no_memory)?);
    let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
    Ok((memory, space))
}

/// How much memory so many bytes lie apart in: base pages choose from four times as much.
pub(crate) const fn room_for(bytes: u64) -> u64 {
    4 * bytes + (4 << 30)
}

/// What memory says that is too small.
pub(crate) fn no_memory(error: AllocError) -> Failed {
    Failed::at("simulated memory")(error)
}

/// Where a user has so many bytes, if the space had a place for them.
pub(crate) fn placed(user: Option<UserRange>, bytes: u64) -> Result<UserRange, Failed> {
    let no_place = || format!("the simulated space has no place for {bytes} bytes");
    user.ok_or_else(|| Failed::new(no_place()))
}
