//! Drivers over the hardware made here, and what they make of it when they start.

use std::sync::Arc;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{
    Arena, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2, ArmLpaeS2Config, BreakBeforeMake, DirtyTracking,
    Format, PageTable, S2MemoryTypes,
};
use dmaspan::iommu::{Attachment, Domain, Port, Prepared, ReservedRegions, Target};
use dmaspan_drivers::Error;
use dmaspan_drivers::arm_smmu_v3::{
    EventInterrupts, OnFault, SmmuV3, SmmuV3Config, SmmuV3Format, SmmuV3Ops, SmmuV3Stream, Stage,
    StreamTable,
};

use crate::hardware::{Mode, Model, TestSmmu};
use crate::host::FakeHost;
use crate::liar::{self, Liar};

pub(crate) type Smmu = SmmuV3<TestSmmu, FakeHost>;
pub(crate) type DomainOf<F> = Domain<F, Arena, SmmuV3Ops<TestSmmu, FakeHost>>;
pub(crate) type Port1<F> = SmmuV3Stream<DomainOf<F>, TestSmmu, FakeHost>;
pub(crate) type S1 = ArmLpaeS1<12>;
pub(crate) type S2 = ArmLpaeS2<12>;

pub(crate) struct Rig {
    pub(crate) smmu: Arc<Smmu>,
    pub(crate) hardware: TestSmmu,
    pub(crate) memory: FakeHost,
    pub(crate) tables: Arena,
}

pub(crate) fn start(
    hardware: &TestSmmu,
    memory: &FakeHost,
    config: SmmuV3Config,
) -> Result<Arc<Smmu>, Error> {
    #[expect(unsafe_code, reason = "the hardware is the test's")]
    // SAFETY: the hardware reads what the host allocates, and reaches no other memory.
    unsafe {
        SmmuV3::new(hardware.clone(), memory.clone(), config)
    }
}

impl Rig {
    pub(crate) fn new(model: Model) -> Self {
        Self::with(model, SmmuV3Config::default())
    }

    pub(crate) fn with(model: Model, config: SmmuV3Config) -> Self {
        let memory = FakeHost::new(0x10_0000);
        let hardware = TestSmmu::new(&memory, model);
        let smmu = start(&hardware, &memory, config).unwrap();
        hardware.take();
        let tables = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
        Self { smmu, hardware, memory, tables }
    }

    pub(crate) fn table<F: Format<Word = u64>>(&self, format: F) -> PageTable<F, Arena> {
        PageTable::new(format, self.tables.clone()).unwrap()
    }

    pub(crate) fn domain<F: SmmuV3Format<Word = u64>>(&self, format: F) -> Arc<DomainOf<F>> {
        let ops = self.smmu.ops(F::STAGE, OnFault::Terminate).unwrap();
        Arc::new(Domain::new(self.table(format), ops).unwrap())
    }

    pub(crate) fn s1(&self) -> Arc<DomainOf<S1>> {
        self.domain(S1::new(self.smmu.stage1_config(12).unwrap()).unwrap())
    }

    pub(crate) fn s2(&self) -> Arc<DomainOf<S2>> {
        self.domain(S2::new(self.smmu.stage2_config(12).unwrap()).unwrap())
    }

    pub(crate) fn port<F: SmmuV3Format<Word = u64>>(&self, id: u32) -> Port1<F> {
        self.smmu.stream(id, ReservedRegions::new()).unwrap()
    }

    /// The words of a stream's entry, found as hardware finds them.
    pub(crate) fn entry(&self, id: u64) -> Option<[u64; 8]> {
        let address = self.hardware.register(0x80) & 0xf_ffff_ffff_ffc0;
        let config = self.hardware.register(0x88);
        assert!(id >> (config & 0x3f) == 0, "no such stream");
        let table = if config >> 16 & 0b11 == 1 {
            let split = config >> 6 & 0x1f;
            let descriptor = self.memory.read(address + (id >> split) * 8).unwrap();
            let reach = (descriptor & 0x1f).checked_sub(1)?;
            assert_eq!(reach, split);
            (descriptor & 0xf_ffff_ffff_ffc0) + (id & ((1 << split) - 1)) * 64
        } else {
            address + id * 64
        };
        Some([0, 1, 2, 3, 4, 5, 6, 7].map(|word| self.memory.read(table + word * 8).unwrap()))
    }
}

#[test]
fn accesses_are_aborted_before_anything_else_and_until_the_end() {
    let memory = FakeHost::new(0x10_0000);
    let hardware = TestSmmu::new(&memory, Model::LARGE);
    let config = SmmuV3Config { interrupts: EventInterrupts::Wired, ..Default::default() };
    let smmu = start(&hardware, &memory, config).unwrap();
    let writes = hardware.writes();
    // GBPA with UPDATE and ABORT; CR0; IRQ_CTRL.
    assert_eq!(writes[..3], [(0x44, 1 << 31 | 1 << 20), (0x20, 0), (0x50, 0)]);
    let cr0: Vec<u64> = writes.iter().filter(|write| write.0 == 0x20).map(|w| w.1).collect();
    // CMDQEN, then EVENTQEN, then SMMUEN.
    assert_eq!(cr0, [0, 0b1000, 0b1100, 0b1101]);
    assert_eq!(hardware.register(0x50), 0b101);
    // CFGI_ALL and TLBI_NSNH_ALL.
    assert_eq!(hardware.take(), [[0x04, 31], [0x30, 0]]);
    // Two levels, split at 8, 16 bits.
    assert_eq!(hardware.register(0x88), 1 << 16 | 8 << 6 | 16);
    drop(smmu);
    assert_eq!(hardware.register(0x20), 0);
    assert_eq!(hardware.register(0x44) & 1 << 20, 1 << 20);
    assert_eq!(memory.count(), 0, "structures are leaked");
}

#[test]
fn translations_that_devices_claim_to_have_are_checked() {
    let idr0 = Model::LARGE.idr0 | 1 << 10 | 1 << 9;
    let memory = FakeHost::new(0x10_0000);
    let hardware = TestSmmu::new(&memory, Model { idr0, ..Model::LARGE });
    let _smmu = start(&hardware, &memory, SmmuV3Config::default()).unwrap();
    assert_eq!(hardware.register(0x20), 0b1_1101);
    // The hypervisor's are forgotten too.
    assert_eq!(hardware.take(), [[0x04, 31], [0x30, 0], [0x20, 0]]);
}

#[test]
fn every_stream_of_a_linear_table_is_blocked() {
    let rig = Rig::new(Model::SMALL);
    for id in 0..64 {
        assert_eq!(rig.entry(id), Some([1, 0, 0, 0, 0, 0, 0, 0]));
    }
}

#[test]
fn hardware_that_does_not_see_caches_gets_no_tables_in_them() {
    let rig = Rig::new(Model { idr0: Model::SMALL.idr0 & !(1 << 4), ..Model::SMALL });
    // Outer shareable and non-cacheable.
    assert_eq!(rig.hardware.register(0x28), 0x820);
    let port = rig.port::<S1>(1);
    let domain = rig.s1();
    assert!(port.accepts(&domain).is_err(), "its memory says that walks see caches");
    assert!(port.translate(&domain).is_err());
    assert_eq!(rig.entry(1), Some([1, 0, 0, 0, 0, 0, 0, 0]));
}

#[test]
fn tables_of_the_second_level_come_with_their_streams() {
    let rig = Rig::new(Model::LARGE);
    let before = rig.memory.count();
    assert_eq!(rig.entry(0x1234), None);
    let first = rig.port::<S1>(0x1234);
    let second = rig.port::<S1>(0x12ff);
    assert_eq!(rig.memory.count(), before + 1);
    for id in 0x1200..0x1300 {
        assert_eq!(rig.entry(id), Some([1, 0, 0, 0, 0, 0, 0, 0]));
    }
    assert_eq!(rig.entry(0x1300), None);
    // They stay while hardware may know them.
    drop((first, second));
    let _again = rig.port::<S1>(0x1234);
    assert_eq!(rig.memory.count(), before + 1);
}

#[test]
fn entries_and_descriptors_are_those_of_the_manual() {
    let rig = Rig::new(Model::LARGE);
    let port = rig.port::<S1>(5);
    let domain = rig.s1();
    port.translate(&domain).unwrap();
    let [first, second, third, fourth, ..] = rig.entry(5).unwrap();
    // V, Config 0b101 and the descriptor's address; S1CIR and S1COR write-back, S1CSH inner
    // shareable, SHCFG incoming; VMID 0.
    assert_eq!(first & 0x3f, 0b1011);
    assert_eq!((second, third, fourth), (1 << 44 | 0b11_01_01_00, 0, 0));
    let descriptor = first & 0xf_ffff_ffff_ffc0;
    let words = [0, 1, 2, 3].map(|word| rig.memory.read(descriptor + word * 8).unwrap());
    // T0SZ 16, write-back inner shareable walks, EPD1, V; IPS 0b101, AA64, R, A, ASET, ASID 1.
    assert_eq!(words[0], 1 << 48 | 0xe205 << 32 | 0xc000_3510);
    assert_eq!(words[1..], [domain.root().get(), 0, 0xf404_ff44]);

    let port = rig.port::<S2>(6);
    let domain = rig.s2();
    port.translate(&domain).unwrap();
    let [first, second, third, fourth, ..] = rig.entry(6).unwrap();
    assert_eq!((first, second), (0b1101, 1 << 44));
    // VMID 1; T0SZ 16, SL0 0b10 (level 0), write-back inner shareable, 4K, PS 0b101; AA64, R.
    assert_eq!(third, 1 | 0x5_3590 << 32 | 1 << 51 | 1 << 58);
    assert_eq!(fourth, domain.root().get());
    // VMID 2, and stalls where they are wanted.
    let second = rig.s2();
    port.translate(&second).unwrap();
    assert_eq!(rig.entry(6).unwrap()[2], third + 1);
    let stalling = Rig::new(Model::SMALL);
    let ops = stalling.smmu.ops(Stage::Second, OnFault::Stall).unwrap();
    let format = S2::new(stalling.smmu.stage2_config(12).unwrap()).unwrap();
    let held = Arc::new(Domain::new(stalling.table(format), ops).unwrap());
    stalling.port::<S2>(6).translate(&held).unwrap();
    // S2S.
    assert_eq!(stalling.entry(6).unwrap()[2] >> 57 & 1, 1);
    port.block().unwrap();
    assert_eq!(rig.entry(6).unwrap()[0], 1);
    port.pass(crate::host::all_memory()).unwrap();
    let [first, second, ..] = rig.entry(6).unwrap();
    assert_eq!((first, second), (0b1001, 1 << 44));
}

#[test]
fn what_tables_need_besides_is_enabled_or_refused() {
    let can = Model {
        idr0: Model::LARGE.idr0 | 0b10 << 6,
        idr3: Model::LARGE.idr3 | 1 << 8 | 0b10 << 11,
        ..Model::LARGE
    };
    let (rig, lacking) = (Rig::new(can), Rig::new(Model::LARGE));
    let dirty = DirtyTracking::Hardware;
    let config = rig.smmu.stage1_config(12).unwrap();
    assert_eq!(config.break_before_make, BreakBeforeMake::NotNeeded);
    let config = ArmLpaeS1Config { dirty, ..config };
    let port = rig.port::<S1>(1);
    let lacks = lacking.port::<S1>(1);
    let no_marks = ArmLpaeS1Config { dirty: DirtyTracking::Off, ..config };
    let breaks = ArmLpaeS1Config { break_before_make: BreakBeforeMake::Needed, ..config };
    for config in [no_marks, breaks] {
        assert!(lacks.accepts(&lacking.domain(S1::new(config).unwrap())).is_err());
    }
    let domain = rig.domain(S1::new(config).unwrap());
    port.translate(&domain).unwrap();
    let descriptor = rig.entry(1).unwrap()[0] & 0xf_ffff_ffff_ffc0;
    // HD and HA.
    assert_eq!(rig.memory.read(descriptor).unwrap() >> 42 & 0b11, 0b11);

    let memory_types = S2MemoryTypes::Forced;
    let config = rig.smmu.stage2_config(12).unwrap();
    let config = ArmLpaeS2Config { dirty, memory_types, ..config };
    let domain = rig.domain(S2::new(config).unwrap());
    let port = rig.port::<S2>(2);
    port.translate(&domain).unwrap();
    let [_, second, third, ..] = rig.entry(2).unwrap();
    // S2FWB; S2HD and S2HA.
    assert_eq!((second >> 25 & 1, third >> 55 & 0b11), (1, 0b11));
    let config = lacking.smmu.stage2_config(12).unwrap();
    let lacks = lacking.port::<S2>(2);
    assert!(lacks.accepts(&lacking.domain(S2::new(config).unwrap())).is_ok());
    let forced = ArmLpaeS2Config { memory_types, ..config };
    assert!(lacks.accepts(&lacking.domain(S2::new(forced).unwrap())).is_err());
    let small = ArmLpaeS2Config { start_level: Some(3), input_bits: 25, ..config };
    assert!(lacks.accepts(&lacking.domain(S2::new(small).unwrap())).is_err());
    // Hooks of the other stage, and those of another SMMU.
    let ops = lacking.smmu.ops(Stage::First, OnFault::Terminate).unwrap();
    let mixed = Domain::new(lacking.table(S2::new(config).unwrap()), ops).unwrap();
    assert!(lacks.accepts(&mixed).is_err() && lacks.translate(&mixed).is_err());
    let foreign = rig.domain(S2::new(config).unwrap());
    assert!(lacks.accepts(&foreign).is_err() && lacks.translate(&foreign).is_err());
}

#[test]
fn a_change_tells_hardware_to_forget_the_entry_and_then_the_old_domain() {
    let rig = Rig::new(Model::LARGE);
    let port = rig.port::<S1>(5);
    let (one, two) = (rig.s1(), rig.s1());
    let configuration = [5 << 32 | 0x03, 0];
    // What is not looked at yet, and the word that changes everything.
    port.translate(&one).unwrap();
    assert_eq!(rig.hardware.take(), [configuration; 2]);
    // One word, at one moment; then TLBI_NH_ASID.
    port.translate(&two).unwrap();
    assert_eq!(rig.hardware.take(), [configuration, [1 << 48 | 0x11, 0]]);
    port.block().unwrap();
    assert_eq!(rig.hardware.take(), [configuration, [2 << 48 | 0x11, 0]]);
    let port = rig.port::<S2>(6);
    let (one, two) = (rig.s2(), rig.s2());
    let configuration = [6 << 32 | 0x03, 0];
    port.translate(&one).unwrap();
    rig.hardware.take();
    // Blocked on the way; then TLBI_S12_VMALL.
    port.translate(&two).unwrap();
    let forget = [1 << 32 | 0x28, 0];
    assert_eq!(rig.hardware.take(), [configuration, configuration, configuration, forget]);
}

#[test]
fn numbers_of_eight_bits_run_out_and_come_back() {
    let rig = Rig::new(Model::SMALL);
    let all: Vec<_> = (1..256).map(|_| rig.s1()).collect();
    let structures = rig.memory.count();
    let none = rig.smmu.ops(Stage::First, OnFault::Terminate).unwrap_err();
    assert_eq!(none, Error::NoIds { what: "ASIDs", limit: 255 });
    assert_eq!(rig.memory.count(), structures, "its descriptor is freed");
    drop(all);
    let all: Vec<_> =
        (1..256).map(|_| rig.smmu.ops(Stage::Second, OnFault::Terminate).unwrap()).collect();
    let none = rig.smmu.ops(Stage::Second, OnFault::Terminate).unwrap_err();
    assert_eq!(none, Error::NoIds { what: "VMIDs", limit: 255 });
    drop(all);
    let stream = Attachment::new(rig.port::<S1>(3)).unwrap();
    for _ in 0..300 {
        stream.replace(Target::Paging(Prepared::new(rig.s1()))).unwrap();
    }
}

#[test]
fn hardware_that_is_not_understood_is_refused() {
    let refuses = |model: Model, config: SmmuV3Config| {
        let memory = FakeHost::new(0x10_0000);
        let hardware = TestSmmu::new(&memory, model);
        let error = start(&hardware, &memory, config).expect_err("refused");
        assert_eq!((memory.count(), hardware.writes()), (0, Vec::new()), "{error}");
        error
    };
    let large = Model::LARGE;
    let models = [
        Model { idr0: large.idr0 & !0b1100, ..large },
        Model { idr0: large.idr0 & !0b11, ..large },
        Model { idr0: large.idr0 | 0b11 << 21, ..large },
        Model { idr1: large.idr1 | 1 << 29, ..large },
        Model { idr1: large.idr1 | 1 << 30, ..large },
        Model { idr5: large.idr5 | 0b111, ..large },
    ];
    for model in models {
        let error = refuses(model, SmmuV3Config::default());
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    // Of the stages one, and hooks of the other.
    for (bit, stage, other) in [(1, Stage::First, Stage::Second), (0, Stage::Second, Stage::First)]
    {
        let rig = Rig::new(Model { idr0: large.idr0 & !(1 << bit), ..large });
        let refused = rig.smmu.ops(stage, OnFault::Terminate).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
        rig.smmu.ops(other, OnFault::Terminate).unwrap();
    }
    let two = SmmuV3Config { stream_table: StreamTable::TwoLevels, ..Default::default() };
    assert!(matches!(refuses(Model::SMALL, two), Error::Unsupported { .. }));
    let bits = SmmuV3Config { stream_bits: Some(17), ..Default::default() };
    assert!(matches!(refuses(large, bits), Error::Config { limit: 16, .. }));
}

#[test]
fn every_allocation_may_fail_and_nothing_leaks() {
    let memory = FakeHost::new(0x10_0000);
    let mut failed = 0;
    for n in 0.. {
        let hardware = TestSmmu::new(&memory, Model::LARGE);
        memory.fail_after(n);
        let result = start(&hardware, &memory, SmmuV3Config::default()).and_then(|smmu| {
            let ops = smmu.ops(Stage::First, OnFault::Terminate)?;
            let _stream: Port1<S1> = smmu.stream(0x700, ReservedRegions::new())?;
            drop(ops);
            Ok(())
        });
        assert_eq!(memory.count(), 0, "with {n} allocations");
        match result {
            Err(Error::NoMemory(_)) => failed += 1,
            result => {
                result.unwrap();
                break;
            }
        }
    }
    // Three for the driver, one for a domain, one for a stream.
    assert_eq!(failed, 5);
    memory.fail(0);
}

#[test]
fn a_stream_that_could_not_be_made_can_be_claimed_later() {
    let rig = Rig::new(Model::LARGE);
    rig.memory.fail_after(0);
    let none = rig.smmu.stream::<DomainOf<S1>>(7, ReservedRegions::new());
    assert!(matches!(none, Err(Error::NoMemory(_))));
    rig.memory.fail(0);
    rig.port::<S1>(7);
}

#[test]
fn hardware_that_is_gone_does_not_start() {
    let memory = FakeHost::new(0x10_0000);
    let hardware = TestSmmu::new(&memory, Model::LARGE);
    hardware.set(Mode::Gone);
    let error = start(&hardware, &memory, SmmuV3Config::default()).unwrap_err();
    assert!(matches!(error, Error::Hardware(_)), "{error}");
    assert_eq!(memory.count(), 0);
}

#[test]
fn a_domain_that_lies_is_attached_as_the_one_that_fits_or_refused() {
    let rig = Rig::new(Model::LARGE);
    let tables = Arena::new(PhysAddr::new(0x8000_0000), 16 << 20);
    let other = Rig { tables, ..Rig::new(Model::LARGE) };
    let (ours, theirs) = (rig.s2(), other.s2());
    let stream: SmmuV3Stream<Liar<_, _, _>, _, _> =
        rig.smmu.stream(6, ReservedRegions::new()).unwrap();
    let stream = Attachment::new(stream).unwrap();
    // S2TTB.
    liar::attach(&stream, [&ours, &theirs], || rig.entry(6).unwrap()[3] == theirs.root().get());
}
