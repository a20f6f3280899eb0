//! Registers and memory that say anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan::io_pgtable::Arena;
use dmaspan::iommu::{Invalidation, IommuOps as _, Port as _, Scope, Tables as Detached};
use dmaspan::{Iova, IovaRange};
use dmaspan_drivers::Mmio;
use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig, RiscvOps, RiscvStream};
use dmaspan_sim::rng::Rng;
use parking_lot::Mutex;

use crate::hardware::{BASE_FORMAT, FIRST, Fake, MSI_FLAT, SECOND, tables};
use crate::host::{FakeHost, PATIENCE};

/// Hardware that works, but for one read in so many.
#[derive(Clone)]
struct Liar {
    fake: Fake,
    rng: Arc<Mutex<Rng>>,
    /// One read in so many; 0 for none.
    one_in: Arc<AtomicU32>,
}

impl Mmio for Liar {
    fn read32(&self, offset: u64) -> u32 {
        let truth = self.fake.read32(offset);
        let (one_in, mut rng) = (self.one_in.load(Ordering::Relaxed), self.rng.lock());
        if one_in == 0 || rng.below(one_in.into()) != 0 {
            return truth;
        }
        let bit = 1u32 << rng.below(32);
        match rng.below(4) {
            0 => u32::try_from(rng.next() & 0xffff_ffff).unwrap(),
            1 => truth ^ bit,
            2 => u32::try_from(rng.below(300)).unwrap(),
            _ => [0, u32::MAX, 1 << 16 | 1, 1 << 17][usize::try_from(rng.below(4)).unwrap()],
        }
    }

    fn write32(&self, offset: u64, value: u32) {
        self.fake.write32(offset, value);
    }
}

type Ops = RiscvOps<Liar, FakeHost>;
type Domain = dmaspan::iommu::Domain<dmaspan::io_pgtable::Riscv, Arena, Ops>;

/// Everything that can be called, in any order.
fn ordeal(iommu: &Arc<RiscvIommu<Liar, FakeHost>>, liar: &Liar, rng: &mut Rng) -> u32 {
    let domains: Vec<Arc<Domain>> = [FIRST, SECOND]
        .into_iter()
        .filter_map(|stage| {
            let config = iommu.config(stage).ok()?;
            let ops = iommu.ops(stage).ok()?;
            Some(Arc::new(dmaspan::iommu::Domain::new(tables(config), ops).ok()?))
        })
        .collect();
    let mut streams: Vec<RiscvStream<Domain, _, _>> = Vec::new();
    let mut failed = 0;
    for _ in 0..20 {
        let id = u32::try_from(rng.below(1 << 16)).unwrap();
        let which = usize::try_from(rng.below(2)).unwrap();
        let stream = streams.get(usize::try_from(rng.below(3)).unwrap());
        liar.fake.host.polls();
        let done = match (rng.below(8), stream, domains.get(which)) {
            (0, ..) => iommu.stream(id, Default::default()).map(|s| streams.push(s)).is_ok(),
            (1, Some(stream), _) => stream.block().is_ok(),
            (2, Some(stream), _) => stream.pass(crate::host::all_memory()).is_ok(),
            (3 | 4, Some(stream), Some(domain)) => stream.translate(domain).is_ok(),
            (5, _, Some(domain)) => {
                let range = IovaRange::from_len(Iova::new(0), 0x1000 << rng.below(6)).unwrap();
                let (scope, tables) = (Scope::Ranges(&[range]), Detached::Kept);
                let what = Invalidation { scope, leaf_sizes: 1 << 12, tables };
                domain.ops().invalidate(&what).is_ok()
            }
            (6, ..) => streams.pop().is_none(),
            _ => {
                liar.fake.record([(); 4].map(|()| rng.next()));
                iommu.handle_faults().is_ok()
            }
        };
        // A batch waits for room and for its fence; a switch makes three batches at most.
        assert!(liar.fake.host.polls() <= 6 * PATIENCE);
        failed += u32::from(!done);
    }
    failed
}

#[test]
fn nothing_that_registers_say_makes_the_driver_panic_or_wait_for_ever() {
    let mut rng = Rng::new(11);
    let (mut started, mut failed) = (0, 0);
    for round in 0..600 {
        let format = BASE_FORMAT | if round % 2 == 0 { MSI_FLAT } else { 0 };
        let liar = Liar {
            fake: Fake::new(format),
            rng: Arc::new(Mutex::new(Rng::new(rng.next()))),
            one_in: Arc::new(AtomicU32::new([0, 1, 3, 30, 300][round % 5])),
        };
        liar.fake.lenient();
        let config = RiscvIommuConfig {
            commands_lg2: 2 + u32::try_from(rng.below(4)).unwrap(),
            faults_lg2: 1 + u32::try_from(rng.below(4)).unwrap(),
            ..Default::default()
        };
        #[expect(unsafe_code, reason = "a driver is given its hardware")]
        // SAFETY: the hardware is of software, and reaches no memory but the host's structures.
        let iommu = unsafe { RiscvIommu::new(liar.clone(), liar.fake.host.clone(), config) };
        let Ok(iommu) = iommu else { continue };
        started += 1;
        liar.one_in.store([1, 2, 10, 100][(round / 5) % 4], Ordering::Relaxed);
        failed += ordeal(&iommu, &liar, &mut rng);
        // Hardware that tells the truth again is usable again.
        liar.one_in.store(0, Ordering::Relaxed);
        let ops = iommu.ops(FIRST).unwrap();
        let what = Invalidation { scope: Scope::All, leaf_sizes: 0, tables: Detached::Kept };
        let _ = (ops.invalidate(&what), iommu.handle_faults());
        ops.invalidate(&what).unwrap();
        iommu.handle_faults().unwrap();
    }
    assert!(started > 150 && failed > 500, "{started} {failed}");
}
