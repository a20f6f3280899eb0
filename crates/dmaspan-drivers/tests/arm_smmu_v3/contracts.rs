//! `Host` and `Structure`: memory that is not there, patience that changes, and panics at every
//! call, while hardware reads all that it was told of.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, Stage};
use dmaspan_drivers::{Again, Host, NoMemory, Structure};

use crate::hardware::{Model, TestSmmu};
use crate::host::{FakeHost, FakeStructure};

/// What happens at one call of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Incident {
    Fail,
    Panic,
}

/// A host whose calls are counted.
#[derive(Clone)]
struct Hostile {
    memory: FakeHost,
    calls: Arc<AtomicU64>,
    at: Option<(u64, Incident)>,
}

impl Hostile {
    /// Whether this call is to fail.
    fn turn(&self) -> bool {
        let call = 1 + self.calls.fetch_add(1, Ordering::Relaxed);
        let incident = self.at.and_then(|(at, incident)| (at == call).then_some(incident));
        // A panic while another one unwinds would end the program.
        let panics = incident == Some(Incident::Panic) && !std::thread::panicking();
        assert!(!panics, "planted");
        incident == Some(Incident::Fail)
    }
}

struct Memory(FakeStructure, Hostile);

#[expect(unsafe_code, reason = "the fake hardware sees nothing but these words")]
// SAFETY: the words are the inner structure's.
unsafe impl Structure for Memory {
    fn paddr(&self) -> PhysAddr {
        let _ = self.1.turn();
        self.0.paddr()
    }

    fn words(&self) -> &[AtomicU64] {
        let _ = self.1.turn();
        self.0.words()
    }
}

#[expect(unsafe_code, reason = "the fake hardware sees nothing but these words")]
// SAFETY: what is allocated is the inner host's.
unsafe impl Host for Hostile {
    type Lock = parking_lot::RawMutex;
    type Structure = Memory;

    fn allocate(&self, lg2_size: u32, max_paddr: PhysAddr) -> Result<Memory, NoMemory> {
        if self.turn() {
            return Err(NoMemory { lg2_size, max_paddr });
        }
        Ok(Memory(self.memory.allocate(lg2_size, max_paddr)?, self.clone()))
    }

    fn again(&self, polls: u32) -> Again {
        if self.turn() { Again::GiveUp } else { self.memory.again(polls) }
    }
}

/// Whether all is there that hardware reads, as its registers say. Returns how many streams have a
/// domain.
fn look(hardware: &TestSmmu, memory: &FakeHost) -> u32 {
    let address = |word: u64| word & 0xf_ffff_ffff_ffc0;
    let enabled = hardware.register(0x20);
    let read = |what: &str, at: u64| memory.read(at).unwrap_or_else(|| panic!("{what}: {at:#x}"));
    if enabled & 1 << 3 != 0 {
        read("the queue of commands is gone", address(hardware.register(0x90)));
    }
    if enabled & 1 << 2 != 0 {
        read("the queue of events is gone", address(hardware.register(0xa0)));
    }
    // SMMUEN as firmware left it has no table.
    let (table, config) = (address(hardware.register(0x80)), hardware.register(0x88));
    if enabled & 1 == 0 || table == 0 {
        return 0;
    }
    let (lg2, split) = (config & 0x3f, config >> 6 & 0x1f);
    let mut attached = 0;
    let mut entry = |at: u64| {
        let first = read("a table of streams is gone", at);
        // Valid, by a context descriptor.
        if first & 0b1011 == 0b1011 {
            read("a context descriptor is gone", address(first));
            attached += 1;
        }
    };
    if config >> 16 & 0b11 == 0 {
        (0..1 << lg2).for_each(|n| entry(table + n * 64));
        return attached;
    }
    for n in 0..1u64 << (lg2 - split) {
        let first = read("the table of streams is gone", table + n * 8);
        if first & 0x1f != 0 {
            (0..1u64 << ((first & 0x1f) - 1)).for_each(|n| entry(address(first) + n * 64));
        }
    }
    attached
}

/// Starts a driver, gives streams domains and takes them away again. Returns how many calls that
/// took.
fn play(model: Model, at: Option<(u64, Incident)>) -> u64 {
    let memory = FakeHost::new(0x8000_0000);
    let hardware = TestSmmu::new(&memory, model);
    let host = Hostile { memory: memory.clone(), calls: Arc::default(), at };
    let calls = Arc::clone(&host.calls);
    let mut attached = 0;
    let mut run = |does: &mut dyn FnMut()| {
        let result = catch_unwind(AssertUnwindSafe(does));
        let panic = result.err();
        let text = panic.as_ref().and_then(|panic| panic.downcast_ref::<&str>());
        assert!(panic.is_none() || text == Some(&"planted"), "a panic of the driver's own");
        attached += look(&hardware, &memory);
    };
    let (mut smmu, mut ops, mut stream) = (None, None, None);
    run(&mut || {
        #[expect(unsafe_code, reason = "the fake hardware is driven by nobody else")]
        // SAFETY: as said, and it sees the host's memory.
        let new = unsafe { SmmuV3::new(hardware.clone(), host.clone(), SmmuV3Config::default()) };
        smmu = new.ok();
    });
    let Some(smmu) = smmu else { return calls.load(Ordering::Relaxed) };
    run(&mut || ops = smmu.ops(Stage::First, OnFault::Terminate).ok());
    if let Some(ops) = ops {
        let config = smmu.stage1_config(12).unwrap();
        let tables = Arena::new(PhysAddr::new(0x4000_0000), 1 << 20);
        let table = PageTable::new(ArmLpaeS1::<12>::new(config).unwrap(), tables).unwrap();
        let (mut domain, mut parts) = (None, Some((table, ops)));
        run(&mut || domain = parts.take().and_then(|(table, ops)| Domain::new(table, ops).ok()));
        let domain = domain.map(Arc::new);
        run(&mut || {
            let port = smmu.stream(3, ReservedRegions::new()).ok();
            stream = port.and_then(|port| Attachment::new(port).ok());
        });
        if let (Some(stream), Some(domain)) = (&stream, &domain) {
            let target = || Target::Paging(Prepared::new(Arc::clone(domain)));
            run(&mut || _ = stream.attach(target()));
            run(&mut || _ = stream.detach());
            run(&mut || _ = stream.attach(target()));
        }
        let mut domain = domain;
        run(&mut || drop(domain.take()));
    }
    run(&mut || drop(stream.take()));
    let mut smmu = Some(smmu);
    run(&mut || drop(smmu.take()));
    assert!(at.is_some() || attached > 0, "hardware had a domain");
    calls.load(Ordering::Relaxed)
}

#[test]
fn a_hostile_host_gets_no_structure_back_that_hardware_reads() {
    for model in [Model::LARGE, Model::SMALL] {
        let calls = play(model, None);
        assert!(calls > 0);
        let step = usize::try_from(calls.div_ceil(400)).unwrap();
        for incident in [Incident::Fail, Incident::Panic] {
            for nth in (1..=calls).step_by(step) {
                println!("{incident:?} at call {nth} of {calls}");
                play(model, Some((nth, incident)));
            }
        }
    }
}
