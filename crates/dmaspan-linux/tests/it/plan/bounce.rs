//! Pools whose slots a space maps.

use std::sync::Arc;

use dmaspan::swiotlb::{Pool, PoolConfig, SlotRequest};
use dmaspan_linux::UserPlatform;
use dmaspan_linux::plan::{MappedBounce, Mapper};

use crate::plan::kernel::{Entry, Kernel, RW, page_size, x86};

type Slots = Pool<MappedBounce<Kernel>, UserPlatform>;

fn rig(len: u64) -> (Arc<Kernel>, Mapper<Kernel>, Arc<Slots>) {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    let slots = MappedBounce::new(&mapper, len).unwrap();
    (kernel, mapper, Arc::new(Pool::new(slots, PoolConfig::new(1), UserPlatform).unwrap()))
}

/// What a device finds at an address, by the only mapping that there is.
fn device_reads(entry: &Entry, at: u64, bytes: &mut [u8]) {
    assert!(at >= entry.iova.start().get() && at <= entry.iova.last().get());
    entry.memory.read(at - entry.iova.start().get(), bytes).unwrap();
}

#[test]
fn leases_are_zeroed_at_the_addresses_of_devices_in_one_map_that_ends_with_the_pool() {
    let (kernel, mapper, pool) = rig(64 * page_size());
    let [entry] = &kernel.entries()[..] else { panic!("it is one map") };
    assert_eq!(entry.prot, RW);
    let aligned = SlotRequest { granule: page_size(), ..SlotRequest::default() };
    let mut leases = Vec::new();
    for (n, len) in [1, 16, 2048, 5000, 3 * page_size()].into_iter().enumerate() {
        let lease = pool.lease(len, &aligned).unwrap();
        let at = lease.span().start().get();
        assert!(at != 0 && at.is_multiple_of(page_size()), "{at:#x}");
        let mut bytes = vec![1; usize::try_from(len).unwrap()];
        device_reads(entry, at, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0));
        bytes.fill(u8::try_from(n).unwrap() + 7);
        lease.write(0, &bytes).unwrap();
        let mut seen = vec![0; bytes.len()];
        device_reads(entry, at, &mut seen);
        assert_eq!(seen, bytes);
        // The program's pointer is to what the device reads.
        let user = entry.user.start().get() + (at - entry.iova.start().get());
        assert_eq!(lease.as_ptr().unwrap().addr().get() as u64, user);
        leases.push((lease, seen));
    }
    for (lease, written) in &leases {
        let mut bytes = vec![0; written.len()];
        lease.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, written);
    }
    assert_eq!(kernel.state().map_calls, 1);
    drop(leases);
    drop(pool);
    assert!(kernel.is_empty());
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, 0));
}

#[test]
fn a_pool_that_cannot_be_unmapped_is_leaked_and_counted_and_a_lease_keeps_it() {
    let (kernel, mapper, pool) = rig(page_size());
    let lease = pool.lease(16, &SlotRequest::default()).unwrap();
    let weak = Arc::downgrade(&kernel.entries()[0].memory);
    drop(pool);
    assert!(!kernel.is_empty());
    kernel.state().failing_unmaps = vec![1];
    drop(lease);
    kernel.state().entries.clear();
    assert!(weak.upgrade().is_some());
    assert_eq!((mapper.mapped_bytes(), mapper.leaked_bytes()), (0, page_size()));
}

#[test]
fn a_pool_that_the_space_refuses_is_none() {
    let kernel = Kernel::new(x86());
    let mapper = Mapper::shared(kernel.clone()).unwrap();
    kernel.state().failing_map = Some(1);
    assert!(MappedBounce::new(&mapper, page_size()).is_err());
    assert!(MappedBounce::new(&mapper, 0).is_err());
    assert!(kernel.is_empty());
    assert_eq!(mapper.mapped_bytes(), 0);
}
