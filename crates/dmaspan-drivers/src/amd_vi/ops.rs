//! The hooks of a domain: they tell the IOMMU what changed in its tables.

use alloc::sync::Arc;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};

use dmaspan::iommu::{DriverOps, HardwareError, Invalidation, IommuOps, Scope, Tables};
use dmaspan::{IovaRange, PhysAddr, Promise};

use super::AmdVi;
use super::spec::{Command, Walks, device_entry};
use crate::blocks::blocks;
use crate::host::Host;
use crate::mmio::Mmio;

/// The hooks of a domain, which has a domain ID of the IOMMU for as long.
pub struct AmdViOps<R: Mmio, H: Host> {
    pub(super) iommu: Arc<AmdVi<R, H>>,
    pub(super) domain: u16,
    /// Whether a stream was ever given the domain. It stays so: a stream may be on its way to the
    /// domain while another thread detaches that.
    pub(super) known: AtomicBool,
    /// Whether hardware has forgotten the domain ID since the last `detach`, which a domain ends
    /// with.
    pub(super) forgotten: AtomicBool,
}

impl<R: Mmio, H: Host> AmdViOps<R, H> {
    /// The domain ID.
    pub fn domain_id(&self) -> u16 {
        self.domain
    }

    /// The commands that make hardware forget a range: see [`blocks`].
    fn forget(&self, range: IovaRange, walks: Walks) -> impl Iterator<Item = Command> {
        let domain = self.domain;
        let commands = blocks(range);
        commands.map(move |(iova, lg2)| Command::invalidate_pages(domain, iova, lg2, walks))
    }
}

/// The most ranges that are named: with two blocks each and a COMPLETION_WAIT they go into the
/// command buffer as one batch.
const MAX_RANGES: usize = 8;

#[expect(unsafe_code, reason = "the contract with a domain")]
// SAFETY: 1. INVALIDATE_IOMMU_PAGES covers the scope, with directory entries where tables were
// detached, and the COMPLETION_WAIT behind it is not done before it is and before the accesses made
// through what was forgotten are (2.4.1, 2.4.3). Hardware reads the tables anew after that.
// `Mmio` orders the CPU's stores before the register that starts the commands.
// 2. `detach` closes every device that has the domain, and flushes both.
// 3. `root_changed` asks for the root under the lock under which all entries are stored, stores it
// into every entry that has the domain and invalidates each; a `translate` after it reads the root
// under the same lock.
unsafe impl<R: Mmio, H: Host> IommuOps for AmdViOps<R, H> {
    type Address = PhysAddr;

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        let walks = match what.tables {
            Tables::Kept => Walks::Kept,
            Tables::Detached => Walks::Forgotten,
        };
        match what.scope {
            Scope::Ranges(ranges) if ranges.len() <= MAX_RANGES => {
                self.iommu.run(ranges.iter().flat_map(|&range| self.forget(range, walks)))
            }
            _ => self.iommu.run([Command::invalidate_domain(self.domain)]),
        }
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        if !self.iommu.features.caches_absent {
            return Ok(());
        }
        // Directory entries that were absent, too.
        self.iommu.run(self.forget(range, Walks::Forgotten))
    }

    fn root_changed(
        &self,
        _: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        let devices = &self.iommu.devices;
        {
            let entries = devices.lock();
            let (root, level) = current();
            let root = root.get() | self.iommu.encrypted;
            for device in devices.of_domain(self.domain) {
                if !devices.is_closed(device) {
                    let word = entries.translation(device);
                    entries.set_translation(device, device_entry::with_root(word, root, level));
                }
            }
        }
        let entries = devices.of_domain(self.domain).map(Command::invalidate_device);
        self.iommu.run(entries.chain([Command::invalidate_domain(self.domain)]))
    }

    fn detach(&self) -> Result<(), HardwareError> {
        let devices = &self.iommu.devices;
        if !self.known.load(Ordering::Acquire) {
            return Ok(());
        }
        self.forgotten.store(false, Ordering::Release);
        {
            let entries = devices.lock();
            for device in devices.of_domain(self.domain) {
                entries.set_translation(device, devices.closed());
            }
        }
        let entries = devices.of_domain(self.domain).map(Command::invalidate_device);
        self.iommu.run(entries.chain([Command::invalidate_domain(self.domain)]))?;
        self.forgotten.store(true, Ordering::Release);
        Ok(())
    }

    fn max_ranges(&self) -> usize {
        MAX_RANGES
    }
}

#[expect(unsafe_code, reason = "the promise of a driver")]
// SAFETY: they are the driver's.
unsafe impl<R: Mmio, H: Host> DriverOps for AmdViOps<R, H> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl<R: Mmio, H: Host> Drop for AmdViOps<R, H> {
    fn drop(&mut self) {
        // Hardware that was not seen to forget the domain may mix it up with the next of its ID.
        if !*self.known.get_mut() || *self.forgotten.get_mut() {
            self.iommu.domains.give(self.domain.into());
        }
    }
}

impl<R: Mmio, H: Host> fmt::Debug for AmdViOps<R, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmdViOps").field("domain", &self.domain).finish_non_exhaustive()
    }
}
