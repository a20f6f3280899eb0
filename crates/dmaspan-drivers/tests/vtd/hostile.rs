//! Hardware that does not answer, answers wrongly, or reports anything.

use std::sync::Arc;

use dmaspan::iommu::Tables::Detached;
use dmaspan::iommu::{
    AttachedTo, FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse, Invalidation,
    IommuOps as _, Port as _, ReservedRegions, Scope,
};
use dmaspan::{Iova, IovaRange};
use dmaspan_drivers::vtd::Mode;
use parking_lot::Mutex;

use crate::fake::{Broken, Fake, Tables, domain, map, start, stream, to, unmap};

#[test]
fn commands_that_never_complete_are_errors_and_later_ones_work() {
    for mode in [Mode::Legacy, Mode::Scalable] {
        let fake = Fake::new();
        let iommu = start(&fake, mode).expect("it starts");
        let tables = domain(&iommu).expect("there is a number");
        let stream = stream(&iommu, 8);
        stream.attach(to(&tables)).expect("it is attached");
        assert!(map(&tables, 0, 0x100_0000));
        for broken in [Broken::Stuck, Broken::Silent, Broken::Gone] {
            fake.breaks(broken);
            // More than the queue holds.
            for page in 0..300 {
                assert!(!unmap(&tables, page << 12, 0x1000), "{page}");
                assert!(map(&tables, page << 12, 0x1000));
            }
            assert!(stream.detach().is_err());
            assert_eq!(stream.attached_to(), AttachedTo::Unknown);
            fake.breaks(Broken::Not);
            stream.detach().expect("it answers again");
            // Nobody knows what it missed: it forgot everything.
            assert!(fake.told().iter().any(|command| command[0] & 0x3f == 0x2 | 1 << 4));
            stream.attach(to(&tables)).expect("it answers again");
            assert!(unmap(&tables, 0, 0x1000) && map(&tables, 0, 0x1000));
        }
    }
}

#[test]
fn an_error_in_the_queue_fails_what_waits_and_nothing_after_it() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    assert!(map(&tables, 0, 0x100_0000));
    for page in 0..400 {
        let broken = if page % 2 == 0 { Broken::Refuses } else { Broken::TimesOut };
        fake.breaks(broken);
        assert!(!unmap(&tables, page << 12, 0x1000), "{page}");
        assert!(unmap(&tables, (page + 1000) << 12, 0x1000), "{page}");
        assert_eq!(fake.state().fsts, 0);
    }
    // An answer of a device that nobody asked fails nothing.
    fake.breaks(Broken::Stuck);
    fake.state().fsts = 1 << 5;
    let hardware = fake.clone();
    fake.memory.meanwhile(move || hardware.breaks(Broken::Not));
    assert!(unmap(&tables, 900 << 12, 0x1000));
    assert_eq!(fake.state().fsts, 0);
}

#[test]
fn many_threads_share_a_queue_that_fails_at_times() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Scalable).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (tables, fake) = (&tables, &fake);
            scope.spawn(move || {
                for turn in 0..500u64 {
                    let iova = (thread << 30) + (turn << 12);
                    assert!(map(tables, iova, 0x1000));
                    if thread == 0 && turn % 50 == 0 {
                        fake.breaks(Broken::Refuses);
                    }
                    let _ = unmap(tables, iova, 0x1000);
                }
            });
        }
    });
    assert!(map(&tables, 0x1000, 0x1000));
    assert!(unmap(&tables, 0x1000, 0x1000));
}

#[derive(Default)]
struct Heard(Mutex<Vec<FaultReport>>);

impl FaultHandler for Heard {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}

#[test]
fn records_are_reported_to_the_stream_that_they_name() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let stream = stream(&iommu, 0x1234);
    let heard = Arc::new(Heard::default());
    stream.port().faults().set(Some(Arc::<Heard>::clone(&heard)));
    let record =
        |reason: u64, bits: u64, id: u64| [0x7654_3fff, 1 << 63 | bits | reason << 32 | id];
    fake.state().records = [
        record(0x05, 0, 0x1234),
        record(0x71, 1 << 62, 0x1234),
        record(0x02, 1 << 62, 0x5678),
        // A page request, and a reason that is none.
        record(0x05, 1 << 28, 0x1234),
    ];
    // Beginning with the second, and some were lost.
    fake.state().fsts = 1 << 8 | 1;
    let handled = iommu.handle_faults().expect("it is there");
    assert_eq!((handled.reported, handled.unclaimed, handled.malformed), (2, 1, 1));
    assert!(handled.overflowed && !handled.more);
    assert_eq!(fake.state().fsts & 1, 0);
    let heard = std::mem::take(&mut *heard.0.lock());
    let said: Vec<_> = heard.iter().map(|fault| (fault.access, fault.reason)).collect();
    let expected = [
        (FaultAccess::Read, FaultReason::Translation),
        (FaultAccess::Write, FaultReason::Permission),
    ];
    assert_eq!(said, expected);
    assert!(heard.iter().all(|fault| fault.iova.get() == 0x7654_3000 && fault.stream == 0x1234));
    assert_eq!(iommu.handle_faults().expect("it is there"), Default::default());
}

#[test]
fn a_record_that_is_written_meanwhile_is_reported_whole() {
    for narrow_bus in [false, true] {
        let fake = Fake::new();
        let iommu = start(&fake, Mode::Legacy).expect("it starts");
        let stream = stream(&iommu, 0x1234);
        let heard = Arc::new(Heard::default());
        stream.port().faults().set(Some(Arc::<Heard>::clone(&heard)));
        fake.state().narrow_bus = narrow_bus;
        fake.state().records[1] = [0x1000, 1 << 63 | 5 << 32 | 0x1234];
        fake.state().arrives = Some([0x7654_3000, 1 << 63 | 5 << 32 | 0x1234]);
        let handled = iommu.handle_faults().expect("it is there");
        assert_eq!((handled.unclaimed, handled.malformed), (0, 0));
        assert!(iommu.handle_faults().is_ok_and(|handled| !handled.more));
        let mut heard: Vec<_> = heard.0.lock().iter().map(|fault| fault.iova.get()).collect();
        heard.sort_unstable();
        assert_eq!(heard, [0x1000, 0x7654_3000]);
    }
}

#[test]
fn a_storm_of_faults_takes_bounded_time_and_says_that_there_are_more() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    fake.breaks(Broken::Storm);
    fake.state().records = [[0, 1 << 63 | 5 << 32 | 8]; 4];
    // The first record is one that there is not.
    fake.state().fsts = 0xff << 8;
    let before = fake.state().reads;
    let handled = iommu.handle_faults().expect("it is there");
    assert_eq!((handled.unclaimed, handled.more), (4, true));
    assert!(fake.state().reads - before <= 2 + 3 * 4);
    fake.breaks(Broken::Gone);
    assert!(iommu.handle_faults().is_err());
}

#[test]
fn registers_that_read_as_anything_are_survived() {
    for seed in 0..200 {
        let fake = Fake::new();
        let mode = if seed % 2 == 0 { Mode::Legacy } else { Mode::Scalable };
        let iommu = start(&fake, mode).expect("it starts");
        let tables = domain(&iommu).expect("there is a number");
        let stream = stream(&iommu, 8);
        stream.attach(to(&tables)).expect("it is attached");
        assert!(map(&tables, 0, 0x10_0000));
        fake.breaks(Broken::Garbled(seed));
        for page in 0..20 {
            let _ = unmap(&tables, page << 12, 0x1000);
        }
        let _ = iommu.handle_faults();
        let _ = stream.detach();
        drop((stream, tables));
        // A start over such hardware ends, too.
        let _ = start(&fake, mode);
    }
}

/// Some registers, each read of which may be anything, over hardware that does what it is told and
/// claims to have anything.
#[test]
fn hardware_that_claims_anything_and_lies_at_times_is_survived() {
    let mut started = 0;
    for seed in 0..500u64 {
        let fake = Fake::new();
        let mut random = seed;
        let mut next = || {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            random ^ random >> 29
        };
        // A queue and draining, or nothing starts.
        fake.state().cap = next() | 3 << 54;
        fake.state().ecap = next() | 1 << 1;
        fake.state().fsts = u32::try_from(next() & 0xffff).expect("16 bits");
        let mode = if seed % 2 == 0 { Mode::Legacy } else { Mode::Scalable };
        if seed % 3 == 0 {
            fake.state().lies = Some(next());
        }
        let Ok(iommu) = start(&fake, mode) else { continue };
        started += 1;
        let faults = iommu.handle_faults();
        assert!(faults.is_err() || faults.is_ok_and(|handled| handled.reported == 0));
        let streams = [8, 0xfff8].map(|id| iommu.stream::<Tables>(id, ReservedRegions::new()));
        let domains = [0, 1].map(|_| domain(&iommu));
        for tables in domains.iter().flatten() {
            for stream in streams.iter().flatten() {
                let _ = stream.translate(tables);
                let _ = stream.pass(crate::host::all_memory());
                let _ = stream.translate(tables);
            }
            for iova in [0, 0x1000, 1 << 38] {
                let _ = map(tables, iova, 0x3000) && unmap(tables, iova, 0x3000);
            }
            let ranges = [(0, u64::MAX), (0x7000, 0x7fff), (u64::MAX - 0xfff, u64::MAX)];
            for (start, last) in ranges {
                let range = IovaRange::new(Iova::new(start), Iova::new(last)).expect("a range");
                let scope = Scope::Ranges(&[range]);
                let what = Invalidation { scope, leaf_sizes: 0, tables: Detached };
                let _ = tables.ops().invalidate(&what);
            }
            let _ = tables.ops().detach();
        }
        let _ = iommu.handle_faults();
        for stream in streams.iter().flatten() {
            let _ = stream.block();
        }
    }
    assert!(started > 100, "{started}");
}
