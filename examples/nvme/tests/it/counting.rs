//! I/O allocates nothing.

use dmaspan_nvme::{QueueConfig, Transfer};

use crate::access::Machine;
use crate::fake::Model;
use dmaspan_sim::allocator::{Watched, allocated, uncounted};
use dmaspan_sim::rng::Rng;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

#[test]
fn a_million_reads_at_depth_32_allocate_nothing() {
    let machine = Machine::new(Model::default());
    let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(33));
    let mut buffers = Vec::new();
    for _ in 0..32 {
        buffers.push(machine.map(machine.ram.scattered(0x200, &[0xe00, 0x200])));
    }
    let mut rng = Rng::new(1);
    let reads = 1_000_000;
    let (mut begun, mut ended) = (0, 0);
    let mut free: Vec<usize> = (0..32).collect();
    let mut used = [0; 64];
    let mut rounds = 0;
    let ((), cost) = allocated(|| {
        while ended < reads {
            // Each ends at least one: a completion that is lost is not waited for.
            rounds += 1;
            assert!(rounds <= reads, "{ended} of {begun} reads have ended");
            while begun < reads
                && let Some(n) = free.pop()
            {
                let lba = rng.below(8184);
                let (transfer, buffer) = (Transfer::Read, &buffers[n]);
                let id = queue.push(transfer, &namespace, lba, buffer, 0..4096).unwrap();
                used[id.index()] = n;
                begun += 1;
            }
            queue.ring();
            machine.run();
            ended += queue
                .reap(|completed| {
                    assert_eq!(completed.result, Ok(()));
                    free.push(used[completed.id.index()]);
                })
                .unwrap();
            uncounted(|| machine.fake.lock().done.clear());
        }
    });
    assert_eq!(cost.count, 0);
    controller.shutdown([queue]).unwrap();
}

#[test]
fn large_transfers_that_wait_allocate_nothing() {
    let machine = Machine::new(Model { sgls: 1, mdts: 0, ..Model::default() });
    let config = QueueConfig { list_pages: 3, ..QueueConfig::new(4) };
    let (controller, namespace, mut queue) = machine.ready(config);
    let pages = machine.map(machine.ram.scattered(0xffc, &[4, 0x30_0000]));
    let amid = machine.map(machine.ram.scattered(0x1, &[511; 32]));
    let ((), cost) = allocated(|| {
        queue.write(&namespace, 0, &pages, 4..0x30_0004).unwrap();
        queue.read(&namespace, 0, &pages, 0..0x30_0000).unwrap();
        queue.read(&namespace, 3, &amid, 7..7 + 31 * 512).unwrap();
        queue.flush(&namespace).unwrap();
    });
    assert_eq!(cost.count, 0);
    assert_eq!(machine.fake.lock().by_sgl, 1);
    controller.shutdown([queue]).unwrap();
}
