//! A driver accepts only features through `BehindIommu` with which its addresses are translated.

use dmaspan_virtio_drivers::BehindIommu;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Virtio 1.3, chapter 6.
const VERSION_1: u64 = 1 << 32;
const ACCESS_PLATFORM: u64 = 1 << 33;

/// A device that offers features, and remembers which were accepted.
#[derive(Debug)]
struct Fake {
    offered: u64,
    accepted: u64,
    status: DeviceStatus,
}

fn fake(offered: u64) -> Fake {
    Fake { offered, accepted: 0, status: DeviceStatus::empty() }
}

impl Transport for &mut Fake {
    fn device_type(&self) -> DeviceType {
        DeviceType::Block
    }

    fn read_device_features(&mut self) -> u64 {
        self.offered
    }

    fn write_driver_features(&mut self, driver_features: u64) {
        self.accepted = driver_features;
    }

    fn max_queue_size(&mut self, queue: u16) -> u32 {
        queue.into()
    }

    fn notify(&mut self, _: u16) {}

    fn get_status(&self) -> DeviceStatus {
        self.status
    }

    /// As QEMU does: features are not taken from a driver that bypasses the platform.
    fn set_status(&mut self, status: DeviceStatus) {
        let bypasses = self.offered & !self.accepted & ACCESS_PLATFORM != 0;
        self.status = if bypasses { status - DeviceStatus::FEATURES_OK } else { status };
    }

    fn set_guest_page_size(&mut self, _: u32) {}

    fn requires_legacy_layout(&self) -> bool {
        false
    }

    fn queue_set(&mut self, _: u16, _: u32, _: u64, _: u64, _: u64) {}

    fn queue_unset(&mut self, _: u16) {}

    fn queue_used(&mut self, queue: u16) -> bool {
        queue == 1
    }

    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }

    fn read_config_generation(&self) -> u32 {
        5
    }

    fn read_config_space<V: FromBytes + IntoBytes>(&self, _: usize) -> virtio_drivers::Result<V> {
        Ok(V::new_zeroed())
    }

    fn write_config_space<V: IntoBytes + Immutable>(
        &mut self,
        _: usize,
        _: V,
    ) -> virtio_drivers::Result<()> {
        Ok(())
    }
}

mod bits {
    bitflags::bitflags! {
        /// What a driver of the crate knows: not that it is behind an IOMMU.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Known: u64 {
            const VERSION_1 = 1 << 32;
        }
    }
}

#[test]
fn a_driver_that_knows_nothing_of_it_accepts_the_platform() {
    let mut device = fake(VERSION_1 | ACCESS_PLATFORM);
    // Alone, the driver is not taken.
    (&mut device).begin_init(bits::Known::VERSION_1);
    assert!(!device.status.contains(DeviceStatus::FEATURES_OK));

    let mut transport = BehindIommu::new(&mut device).unwrap();
    let negotiated = transport.begin_init(bits::Known::VERSION_1);
    assert_eq!(negotiated.bits(), VERSION_1);
    assert!(transport.get_status().contains(DeviceStatus::FEATURES_OK));
    assert_eq!(device.accepted, VERSION_1 | ACCESS_PLATFORM);
}

#[test]
fn a_device_that_bypasses_the_iommu_is_refused() {
    let mut device = fake(VERSION_1);
    let refused = BehindIommu::new(&mut device).unwrap_err();
    assert_eq!(refused.accepted, 0);
}

#[test]
fn all_else_is_the_transports() {
    let mut device = fake(ACCESS_PLATFORM);
    let mut transport = BehindIommu::new(&mut device).unwrap();
    assert_eq!(transport.device_type(), DeviceType::Block);
    assert_eq!(transport.max_queue_size(7), 7);
    assert!(transport.queue_used(1) && !transport.queue_used(0));
    assert_eq!(transport.read_config_generation(), 5);
    assert_eq!(transport.read_config_space::<u32>(0), Ok(0));
    assert!(!transport.requires_legacy_layout());
}
