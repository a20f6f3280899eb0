//! A disk by the driver of `virtio-drivers`.

use alloc::vec;

use dmaspan::platform::Flag;
use dmaspan_virtio_drivers::{BehindIommu, hal};
use sha2::{Digest, Sha256};
use virtio_drivers::device::blk::{SECTOR_SIZE, VirtIOBlk};
use virtio_drivers::transport::pci::PciTransport;

use crate::{DISK_BYTES, Result};

hal! {
    /// What the disk reaches.
    pub(crate) struct DiskHal: Flag;
}

/// The bytes of a request.
const REQUEST: usize = 128 << 10;

pub(crate) struct Disk(VirtIOBlk<DiskHal, BehindIommu<PciTransport>>);

impl Disk {
    pub(crate) fn new(transport: BehindIommu<PciTransport>) -> Result<Self> {
        Ok(Self(VirtIOBlk::new(transport)?))
    }

    /// Reads the disk and returns what its bytes hash to.
    pub(crate) fn hash(&mut self) -> Result<[u8; 32]> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; REQUEST];
        for start in (0..DISK_BYTES as usize).step_by(REQUEST) {
            self.0.read_blocks(start / SECTOR_SIZE, &mut buffer)?;
            hash.update(&buffer);
        }
        Ok(hash.finalize().into())
    }
}
