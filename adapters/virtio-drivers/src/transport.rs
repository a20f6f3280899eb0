//! [`BehindIommu`] is a transport whose device uses the addresses that a `Hal` gives it.

use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The feature bit by which a device uses the platform's addresses: virtio 1.3, chapter 6.
const ACCESS_PLATFORM: u64 = 1 << 33;

/// A transport that accepts `VIRTIO_F_ACCESS_PLATFORM` where the device offers it.
///
/// A device that offers it is translated by the platform's IOMMU, and works only with a driver that
/// accepts it (virtio 1.3, 6.1). The drivers of virtio-drivers 0.13 do not, whatever their `Hal`
/// is; with this around their transport they do. A device that does not offer it uses physical
/// addresses, whatever IOMMU the machine has: [`BehindIommu::new`] refuses such a one.
///
/// ```
/// use dmaspan_virtio_drivers::{BehindIommu, Hal};
/// use virtio_drivers::device::blk::VirtIOBlk;
/// use virtio_drivers::transport::Transport;
///
/// fn disk<H: Hal, T: Transport>(transport: T) -> Result<VirtIOBlk<H, BehindIommu<T>>, String> {
///     let transport = BehindIommu::new(transport).map_err(|_| "the disk bypasses the IOMMU")?;
///     VirtIOBlk::new(transport).map_err(|error| error.to_string())
/// }
/// ```
#[derive(Debug)]
pub struct BehindIommu<T>(T);

impl<T: Transport> BehindIommu<T> {
    /// Around a transport whose driver was not made yet.
    ///
    /// # Errors
    ///
    /// The transport, where the device does not offer the feature: no IOMMU translates what it
    /// accesses.
    pub fn new(mut transport: T) -> Result<Self, T> {
        let offered = transport.read_device_features() & ACCESS_PLATFORM != 0;
        if offered { Ok(Self(transport)) } else { Err(transport) }
    }
}

impl<T: Transport> Transport for BehindIommu<T> {
    fn device_type(&self) -> DeviceType {
        self.0.device_type()
    }

    fn read_device_features(&mut self) -> u64 {
        self.0.read_device_features()
    }

    fn write_driver_features(&mut self, driver_features: u64) {
        self.0.write_driver_features(driver_features | ACCESS_PLATFORM);
    }

    fn max_queue_size(&mut self, queue: u16) -> u32 {
        self.0.max_queue_size(queue)
    }

    fn notify(&mut self, queue: u16) {
        self.0.notify(queue);
    }

    fn get_status(&self) -> DeviceStatus {
        self.0.get_status()
    }

    fn set_status(&mut self, status: DeviceStatus) {
        self.0.set_status(status);
    }

    fn set_guest_page_size(&mut self, guest_page_size: u32) {
        self.0.set_guest_page_size(guest_page_size);
    }

    fn requires_legacy_layout(&self) -> bool {
        self.0.requires_legacy_layout()
    }

    fn queue_set(&mut self, queue: u16, size: u32, descriptors: u64, driver: u64, device: u64) {
        self.0.queue_set(queue, size, descriptors, driver, device);
    }

    fn queue_unset(&mut self, queue: u16) {
        self.0.queue_unset(queue);
    }

    fn queue_used(&mut self, queue: u16) -> bool {
        self.0.queue_used(queue)
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        self.0.ack_interrupt()
    }

    fn read_config_generation(&self) -> u32 {
        self.0.read_config_generation()
    }

    fn read_config_space<V: FromBytes + IntoBytes>(
        &self,
        offset: usize,
    ) -> virtio_drivers::Result<V> {
        self.0.read_config_space(offset)
    }

    fn write_config_space<V: IntoBytes + Immutable>(
        &mut self,
        offset: usize,
        value: V,
    ) -> virtio_drivers::Result<()> {
        self.0.write_config_space(offset, value)
    }
}
