//! Buffers that are copied to and from slots of a pool, which is all that the device reaches.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::ptr::NonNull;

use dmaspan::dma::{Error, NoCoherent};
use dmaspan::swiotlb::{self, Lease, Pool, PoolMemory, SlotRequest};
use dmaspan::{Direction, DmaAddr, PhysAddr, Platform};

use crate::{PAGE, Reach};

/// A pool whose slots a device reaches at their addresses, and what is leased of it.
pub(crate) struct Copied<M: PoolMemory<Address = DmaAddr>, P: Platform> {
    pool: Arc<Pool<M, P>>,
    queues: BTreeMap<u64, Lease<M, P>>,
    buffers: BTreeMap<u64, (Lease<M, P>, u64, Direction)>,
}

impl<M: PoolMemory<Address = DmaAddr>, P: Platform> Copied<M, P> {
    pub(crate) fn new(pool: Arc<Pool<M, P>>) -> Self {
        Self { pool, queues: BTreeMap::new(), buffers: BTreeMap::new() }
    }

    fn lease(&self, len: u64, align: u64) -> Result<Lease<M, P>, Error> {
        let request = SlotRequest { granule: align, ..SlotRequest::default() };
        let lease = self.pool.lease(len, &request).map_err(|error| refused(len, &error))?;
        match lease.span().start() {
            addr if addr.get() == 0 => Err(Error::MeansFailure { addr }),
            _ => Ok(lease),
        }
    }
}

/// The error for a slot that the pool refused, with the limit that was met.
fn refused(len: u64, error: &swiotlb::Error) -> Error {
    let (why, limit) = match *error {
        swiotlb::Error::Full { free, .. } => ("none as long is free of what is free in all", free),
        swiotlb::Error::TooLong { max, .. } => ("its longest span is shorter", max),
        _ => ("it has none for this device", 0),
    };
    Error::NoLease { len, why, limit }
}

const NO_POINTER: &str = "the pool's memory has no pointer";

fn no_pointer(len: u64) -> Error {
    let (last, source) = (PhysAddr::new(u64::MAX), NoCoherent { why: NO_POINTER });
    Error::NoCoherent { len, align: PAGE, last, source }
}

#[expect(unsafe_code, reason = "buffers of a driver are copied")]
impl<M, P> Reach for Copied<M, P>
where
    M: PoolMemory<Address = DmaAddr> + 'static,
    P: Platform + 'static,
{
    fn alloc(&mut self, len: u64) -> Result<(u64, NonNull<u8>), Error> {
        let queue = self.lease(len, PAGE)?;
        let start = queue.as_ptr().ok_or_else(|| no_pointer(len))?;
        let addr = queue.span().start().get();
        self.queues.insert(addr, queue);
        Ok((addr, start))
    }

    fn dealloc(&mut self, addr: DmaAddr) -> Result<(), Error> {
        self.queues.remove(&addr.get()).map(drop).ok_or(Error::NotMapped { addr })
    }

    unsafe fn share(
        &mut self,
        buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<DmaAddr, Error> {
        let len = buffer.len() as u64;
        let lease = self.lease(len, 1)?;
        // SAFETY: the driver lends the buffer for this call, as the caller promises.
        let bytes = unsafe { buffer.as_ref() };
        // Also for a device that only writes: what it does not write comes back as it was.
        lease.write(0, bytes).map_err(|error| refused(len, &error))?;
        let addr = lease.span().start();
        self.buffers.insert(addr.get(), (lease, len, direction));
        Ok(addr)
    }

    unsafe fn unshare(
        &mut self,
        addr: DmaAddr,
        mut buffer: NonNull<[u8]>,
        direction: Direction,
    ) -> Result<(), Error> {
        let len = buffer.len() as u64;
        let (lease, mapped, way) =
            self.buffers.remove(&addr.get()).ok_or(Error::NotMapped { addr })?;
        let wrong = match () {
            () if mapped != len => Err(Error::OtherLength { addr, len, mapped }),
            () if way != direction => Err(Error::OtherDirection { addr, direction, mapped: way }),
            () => Ok(()),
        };
        if wrong.is_err() {
            self.buffers.insert(addr.get(), (lease, mapped, way));
            return wrong;
        }
        if direction != Direction::ToDevice {
            // SAFETY: the driver lends the buffer for this call, as the caller promises.
            let bytes = unsafe { buffer.as_mut() };
            let outside = |_| Error::OtherLength { addr, len, mapped };
            lease.read(0, bytes).map_err(outside)?;
        }
        Ok(())
    }

    /// Nothing is ever unmapped.
    fn is_forgotten(&mut self) -> bool {
        true
    }
}
