//! Entries stay safe where hardware did not answer, and at the end.

use std::sync::Arc;

use dmaspan::iommu::{IommuOps as _, Port as _, ReservedRegions};
use dmaspan_drivers::vtd::{Mode, VtdStream};

use crate::fake::{Broken, Fake, Iommu, Tables, domain, map, start, unmap};
use crate::host::FakeHost;

const CONTEXTS: u64 = 0x1 | 1 << 4;
const EVERYTHING: u64 = 0x2 | 1 << 4 | 3 << 6;

fn port(iommu: &Arc<Iommu>, id: u32) -> VtdStream<Tables, Fake, FakeHost> {
    iommu.stream(id, ReservedRegions::new()).expect("nobody has it")
}

#[test]
fn a_detach_blocks_all_streams_that_have_the_domain_and_settles_the_others() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let [one, other] = [0, 1].map(|_| domain(&iommu).expect("there is a number"));
    let ports = [1, 2, 3].map(|id| port(&iommu, id));
    for (port, tables) in ports.iter().zip([&one, &other, &one]) {
        port.translate(tables).expect("it answers");
    }
    let context = fake.memory.read(fake.state().rtaddr).expect("a root entry") & !0xfff;
    let present = || [1, 2, 3].map(|id| fake.memory.read(context + id * 16).unwrap_or(0) & 1);
    assert_eq!(present(), [1, 1, 1]);
    one.ops().detach().expect("it answers");
    assert_eq!(present(), [0, 1, 0]);
    fake.breaks(Broken::Silent);
    ports[1].block().expect_err("it does not answer");
    fake.breaks(Broken::Not);
    fake.told();
    // Hardware may use what the second stream had.
    other.ops().detach().expect("it answers");
    assert!(fake.told().iter().any(|command| command[0] == EVERYTHING));
}

#[test]
fn a_switch_after_one_that_was_not_answered_forgets_everything_first() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Scalable).expect("it starts");
    let [one, other] = [0, 1].map(|_| domain(&iommu).expect("there is a number"));
    let port = port(&iommu, 1);
    port.translate(&one).expect("it answers");
    fake.breaks(Broken::Silent);
    port.translate(&other).expect_err("it does not answer");
    fake.breaks(Broken::Not);
    fake.told();
    port.translate(&one).expect("it answers");
    // All of it while the entry is absent; then the other directory is written, and is new.
    let told = fake.told();
    assert_eq!((told.len(), told[0][0]), (3 + 4, CONTEXTS));
}

#[test]
fn what_passed_is_blocked_when_the_driver_ends() {
    for mode in [Mode::Legacy, Mode::Scalable] {
        let fake = Fake::new();
        let iommu = start(&fake, mode).expect("it starts");
        let port = port(&iommu, 0x8f);
        port.pass(crate::host::all_memory()).expect("it can");
        fake.told();
        drop((port, iommu));
        let root = fake.state().rtaddr & !0xfff;
        assert_eq!([0, 8].map(|word| fake.memory.read(root + word)), [Some(0); 2]);
        assert_eq!(fake.told()[0][0], CONTEXTS);
    }
}

#[test]
fn what_is_not_done_at_the_end_stays_where_hardware_may_find_it() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let port = port(&iommu, 8);
    let structures = fake.memory.count();
    fake.breaks(Broken::Silent);
    drop((port, iommu));
    assert_eq!(fake.memory.count(), structures);
}

#[test]
fn a_full_queue_loses_no_command() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    assert!(map(&tables, 0, 0x100_0000));
    fake.told();
    fake.breaks(Broken::Stuck);
    for page in 0..200 {
        assert!(!unmap(&tables, page << 12, 0x1000));
    }
    fake.breaks(Broken::Not);
    // 256 places: one stays empty, and each command has its wait.
    assert_eq!(fake.told().len(), 127);
    assert!(unmap(&tables, 300 << 12, 0x1000));
}

#[test]
fn commands_that_hardware_refuses_are_not_given_again() {
    let fake = Fake::new();
    let iommu = start(&fake, Mode::Legacy).expect("it starts");
    let tables = domain(&iommu).expect("there is a number");
    assert!(map(&tables, 0, 0x100_0000));
    fake.told();
    fake.breaks(Broken::Picky);
    for page in 0..300 {
        assert!(!unmap(&tables, page << 12, 0x1000));
        assert_eq!(fake.state().fsts, 0);
    }
    fake.breaks(Broken::Not);
    assert_eq!(fake.told(), [[0; 2]; 0]);
    assert!(unmap(&tables, 400 << 12, 0x1000));
}
