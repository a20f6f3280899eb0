//! Hardware that is broken, gone or lies.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dmaspan::Prot;
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS2, TableMemory};
use dmaspan::iommu::{AttachError, AttachedTo, Attachment, IommuOps, ReservedRegions};
use dmaspan_drivers::arm_smmu::{SmmuV2, SmmuV2Config};
use dmaspan_drivers::{Error, Mmio};
use dmaspan_sim::smmu_v2::{Behaviour, Reads, Smmu, SmmuConfig, SyncCompletion};

use super::host::{POLLS, TestHost};
use super::rig::{Rig, Stream, Tables, arena, granule, map, range, target};

type S1 = ArmLpaeS1<12>;

#[expect(unsafe_code, reason = "registers of nothing")]
fn make<R: Mmio>(registers: R) -> Result<Arc<SmmuV2<R, TestHost>>, Error> {
    // SAFETY: there is no hardware behind, and so nobody else who drives it.
    unsafe { SmmuV2::new(registers, TestHost, SmmuV2Config::new()) }
}

fn reading(reads: Reads) -> Behaviour {
    Behaviour { reads, ..Default::default() }
}

const NEVER: SyncCompletion = SyncCompletion::Never;

fn never() -> Behaviour {
    Behaviour { sync: NEVER, ..Default::default() }
}

#[test]
fn an_smmu_that_does_not_answer_is_not_taken() {
    let tables = arena();
    let hardware = Smmu::new(SmmuConfig::default(), tables).unwrap();
    hardware.set_behaviour(reading(Reads::Ones));
    struct Model<T>(Smmu<T>);
    impl<T: dmaspan_sim::walker::TableWords + Send + Sync> Mmio for Model<T> {
        fn read32(&self, offset: u64) -> u32 {
            self.0.read32(offset)
        }
        fn write32(&self, offset: u64, value: u32) {
            self.0.write32(offset, value);
        }
    }
    let model = Arc::new(Model(hardware));
    let refused = make(Arc::clone(&model)).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { what: "registers that answer", .. }));
    model.0.set_behaviour(never());
    let refused = make(Arc::clone(&model)).unwrap_err();
    assert!(matches!(refused, Error::Hardware(_)), "{refused}");
    model.0.set_behaviour(Behaviour::default());
    assert!(make(model).is_ok());
}

/// Registers that all read as one value, whatever is written.
struct Constant(u32);

impl Mmio for Constant {
    fn read32(&self, _offset: u64) -> u32 {
        self.0
    }

    fn write32(&self, _offset: u64, _value: u32) {}
}

#[test]
fn registers_that_say_what_cannot_be_are_refused() {
    for bit in 0..32 {
        for value in [1 << bit, !(1 << bit), (1 << bit) - 1] {
            // Whatever comes of it, it comes soon.
            if let Ok(smmu) = make(Constant(value)) {
                let _ = smmu.handle_faults();
                let _ = smmu.ops::<S1>();
            }
        }
    }
    assert!(matches!(make(Constant(0)), Err(Error::Unsupported { what: "translation", .. })));
}

fn sync_that_never_ends<F: Tables>()
where
    Arena: TableMemory<F::Word>,
{
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<F>(1), rig.domain::<F>());
    stream.attach(target(&domain)).unwrap();
    let page = granule::<F>();
    map(&domain, 0, 0x8000_0000, 4 * page, Prot::READ);
    assert!(rig.reads(1, 0).is_some());
    rig.hardware.set_behaviour(never());
    let before = rig.hardware.counters().status_reads;
    let gather = {
        #[expect(unsafe_code, reason = "simulated memory, one thread")]
        // SAFETY: nobody else works on the range.
        let unsynced = unsafe { domain.remove(range(0, 4 * page)) }.unwrap();
        unsynced.sync().unwrap_err()
    };
    assert!(gather.error.what.contains("did not finish"), "{}", F::NAME);
    assert!(rig.hardware.counters().status_reads - before <= u64::from(POLLS) + 1);
    // Nothing was promised, and the old translation is in use.
    assert!(rig.reads(1, 0).is_some());
    let Err(AttachError::Hardware { left, .. }) = stream.detach() else { panic!("detached") };
    assert_eq!(left, AttachedTo::Unknown, "{}", F::NAME);
    // It recovers: the same sync succeeds, and the stream is blocked.
    rig.hardware.set_behaviour(Behaviour::default());
    #[expect(unsafe_code, reason = "the gather of this domain")]
    // SAFETY: the gather is this domain's.
    let synced = unsafe { domain.sync(gather.gather) }.unwrap();
    assert!(synced.covers(range(0, 4 * page)));
    stream.detach().unwrap();
    assert_eq!(stream.attached_to(), AttachedTo::Blocked);
    stream.attach(target(&domain)).unwrap();
    map(&domain, 0, 0x9000_0000, page, Prot::READ);
    assert_eq!(rig.reads(1, 0), Some(0x9000_0000), "{}", F::NAME);
}

#[test]
fn a_sync_that_never_ends_is_an_error_in_bounded_time_and_the_driver_recovers() {
    sync_that_never_ends::<S1>();
    sync_that_never_ends::<ArmLpaeS2<12>>();
}

#[test]
fn what_hardware_does_not_let_go_of_is_never_freed() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    map(&domain, 0, 0x8000_0000, 0x1000, Prot::READ);
    stream.detach().unwrap();
    let (in_use, bank) = (rig.tables.tables(), domain.ops().bank());
    rig.hardware.set_behaviour(never());
    drop(domain);
    rig.hardware.set_behaviour(Behaviour::default());
    assert_eq!(rig.tables.tables(), in_use);
    // Nobody gets the bank again, or its ASID.
    assert_ne!(rig.driver.ops::<S1>().unwrap().bank(), bank);
}

#[test]
fn a_stream_whose_register_takes_nothing_is_not_called_blocked() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    rig.registers.deaf.store(true, Ordering::Relaxed);
    let Err(AttachError::Hardware { source, left }) = stream.detach() else { panic!("detached") };
    assert!(source.what.contains("route"), "{source}");
    assert_eq!(left, AttachedTo::Paging);
    rig.registers.deaf.store(false, Ordering::Relaxed);
    stream.detach().unwrap();
}

#[test]
fn hardware_that_is_gone_is_an_error_everywhere() {
    let rig = Rig::new();
    let (stream, domain) = (rig.stream::<S1>(1), rig.domain::<S1>());
    stream.attach(target(&domain)).unwrap();
    rig.hardware.set_behaviour(reading(Reads::Ones));
    assert_eq!(rig.driver.handle_faults().unwrap_err().what, "the SMMU does not answer");
    let what = dmaspan::iommu::Invalidation {
        scope: dmaspan::iommu::Scope::All,
        leaf_sizes: 1 << 12,
        tables: dmaspan::iommu::Tables::Kept,
    };
    let polled = rig.hardware.counters().status_reads;
    assert_eq!(domain.ops().invalidate(&what).unwrap_err().what, "the SMMU does not answer");
    assert_eq!(rig.hardware.counters().status_reads - polled, 1);
    assert!(stream.detach().is_err());
    let new: Stream<S1> = rig.driver.stream(2, ReservedRegions::new()).unwrap();
    assert!(Attachment::new(new).is_err());
}

#[test]
fn registers_that_change_at_random_panic_nothing() {
    let rig = Rig::new();
    let domain = rig.domain::<S1>();
    let stream = rig.stream::<S1>(1);
    rig.hardware.set_behaviour(reading(Reads::Random));
    for turn in 0..300 {
        let _ = stream.replace(target(&domain));
        let _ = stream.detach();
        let _ = rig.driver.handle_faults();
        let _ = rig.driver.ops::<ArmLpaeS2<12>>();
        let _ = make(rig.registers.clone());
        let _: Result<Stream<S1>, _> = rig.driver.streams(turn, turn, ReservedRegions::new());
    }
}
