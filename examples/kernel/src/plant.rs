//! Faults that are planted on purpose: the checks of the kernel have to find each.

use dmaspan::io_pgtable::TableRoot;
use dmaspan::iommu::{DriverOps, Event, HardwareError, Invalidation, IommuOps};
use dmaspan::{IovaRange, PhysAddr, Promise};

/// The faults that the command line asks for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plants {
    /// Hardware is not told what was unmapped.
    pub(crate) invalidation: bool,
    /// A device is attached by the stream of another.
    pub(crate) stream: bool,
    /// A driver unmaps a buffer that its device still writes.
    pub(crate) early: bool,
    /// A device writes more than it was given.
    pub(crate) limits: bool,
    /// A device uses an address above those that its driver says it has.
    pub(crate) mask: bool,
    /// CPUs are not told what was unmapped for a guest.
    #[cfg(target_arch = "aarch64")]
    pub(crate) guest_cpus: bool,
    /// The IOMMU is not told that.
    #[cfg(target_arch = "aarch64")]
    pub(crate) guest_device: bool,
}

impl Plants {
    pub(crate) fn of(options: &str) -> Self {
        let has =
            |name: &str| options.split(' ').any(|one| one.strip_prefix("plant=") == Some(name));
        Self {
            invalidation: has("invalidation"),
            stream: has("stream"),
            early: has("early"),
            limits: has("limits"),
            mask: has("mask"),
            #[cfg(target_arch = "aarch64")]
            guest_cpus: has("guest-cpus"),
            #[cfg(target_arch = "aarch64")]
            guest_device: has("guest-device"),
        }
    }
}

/// The hooks of a driver, from which an invalidation may be left out.
pub(crate) struct Tapped<O> {
    driver: O,
    leaves_out: bool,
}

impl<O> Tapped<O> {
    pub(crate) fn new(driver: O, plants: &Plants) -> Self {
        Self { driver, leaves_out: plants.invalidation }
    }
}

// SAFETY: each hook asks the driver's and answers what it answered, but where a fault is planted:
// the kernel ends then, with devices that reach memory which it freed.
unsafe impl<O: IommuOps> IommuOps for Tapped<O> {
    type Address = O::Address;

    fn begin(&self, promise: Promise<'_>, root: &TableRoot) -> Result<(), HardwareError> {
        self.driver.begin(promise, root)
    }

    fn invalidate(&self, what: &Invalidation<'_>) -> Result<(), HardwareError> {
        if self.leaves_out { Ok(()) } else { self.driver.invalidate(what) }
    }

    fn sync_map(&self, range: IovaRange) -> Result<(), HardwareError> {
        self.driver.sync_map(range)
    }

    fn root_changed(
        &self,
        promise: Promise<'_>,
        current: &dyn Fn() -> (PhysAddr, u32),
    ) -> Result<(), HardwareError> {
        self.driver.root_changed(promise, current)
    }

    fn detach(&self) -> Result<(), HardwareError> {
        self.driver.detach()
    }

    fn observe(&self, event: &Event<'_>) {
        self.driver.observe(event);
    }

    fn max_ranges(&self) -> usize {
        self.driver.max_ranges()
    }
}

// SAFETY: as above; streams are given the driver's own hooks.
unsafe impl<O: DriverOps> DriverOps for Tapped<O> {
    type Driver = O::Driver;

    fn driver(&self) -> &O::Driver {
        self.driver.driver()
    }
}
