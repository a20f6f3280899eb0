//! An entry never has the tables of one domain and the number of another.

use std::sync::Arc;

use dmaspan::io_pgtable::{AmdV1Config, DirtyTracking};
use dmaspan::iommu::{
    AllMemory, AttachedTo, Attachment, IommuOps as _, Port as _, Prepared, ReservedRegions, Target,
};
use dmaspan::{Iova, PhysAddr, Prot, Span};
use dmaspan_drivers::Error;
use dmaspan_drivers::amd_vi::{AmdViConfig, AmdViStream};

use crate::bringup::is_closed;
use crate::fake::{EXTENDED_FEATURES, Fake, Memory, Paging, Rig, Seen, config, start};
use crate::liar::{self, Liar};

const ROOT: u64 = 0x000f_ffff_ffff_f000;

pub(crate) fn paging(domain: &Arc<Paging>) -> Target<Paging> {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

/// Root and number of a domain, as an entry has them.
fn named(domain: &Paging) -> (u64, u64) {
    (domain.root().get(), domain.ops().domain_id().into())
}

fn of(seen: &Seen) -> (u64, u64) {
    (seen.entry[0] & ROOT, seen.entry[1] & 0xffff)
}

fn is_open(seen: &Seen) -> bool {
    seen.entry[0] & 0b11 << 61 != 0
}

#[test]
fn a_switch_closes_the_entry_and_forgets_the_old_domain_before_it_names_the_new_one() {
    let rig = Rig::new();
    let domains = [rig.domain(), rig.domain()];
    let stream = rig.stream(7);
    rig.fake.take();
    stream.attach(paging(&domains[0])).unwrap();
    let [entry, _wait] = rig.fake.take()[..] else { panic!("the entry, and the wait") };
    assert!(is_open(&entry));
    assert_eq!(of(&entry), named(&domains[0]));

    stream.replace(paging(&domains[1])).unwrap();
    let seen = rig.fake.take();
    assert_eq!(seen.iter().map(Seen::opcode).collect::<Vec<_>>(), [2, 3, 1, 2, 1]);
    assert!(!is_open(&seen[0]), "closed at first");
    assert_eq!(of(&seen[0]).1, named(&domains[0]).1, "with the old number");
    assert_eq!(seen[1].command[0] >> 32 & 0xffff, named(&domains[0]).1, "which is forgotten");
    assert_eq!(seen[1].command[1], 0x7fff_ffff_ffff_f003);
    assert!(is_open(&seen[3]));
    assert_eq!(of(&seen[3]), named(&domains[1]));

    // SAFETY: the fake's devices do nothing.
    stream.replace(Target::Identity(unsafe { AllMemory::promise() })).unwrap();
    assert_eq!(rig.fake.entry(7), [0b11 << 61 | 0b11, 2]);
    stream.detach().unwrap();
    assert!(is_closed(rig.fake.entry(7)));
    let others = (0..0x400).filter(|&device| device != 7);
    assert!(others.into_iter().all(|device| is_closed(rig.fake.entry(device))));
}

#[test]
fn a_switch_that_hardware_does_not_answer_leaves_the_stream_blocked_or_with_either() {
    // The waits that are lost: of the first step, or of the second.
    for lost in 1..=8 {
        let rig = Rig::new();
        let domains = [rig.domain(), rig.domain()];
        let stream = rig.stream(7);
        stream.attach(paging(&domains[0])).unwrap();
        rig.fake.behave(|how| how.lost_waits = lost);
        let result = stream.replace(paging(&domains[1]));
        let left = stream.attached_to();
        result.unwrap_err();
        rig.fake.behave(|how| how.lost_waits = 0);
        let open = rig.fake.entry(7)[0] & 0b11 << 61 != 0;
        match left {
            AttachedTo::Paging => assert!(open),
            AttachedTo::Blocked => assert!(!open),
            _ => {}
        }
        stream.detach().unwrap();
        assert!(is_closed(rig.fake.entry(7)), "{lost}");
    }
}

#[test]
fn a_new_root_is_stored_for_each_stream_of_the_domain_by_one_word() {
    let rig = Rig::new();
    let (domain, other) = (rig.domain(), rig.domain());
    let streams = [3, 5, 9].map(|id| rig.stream(id));
    for stream in &streams[..2] {
        stream.attach(paging(&domain)).unwrap();
    }
    streams[2].attach(paging(&other)).unwrap();
    let before = [3, 5, 9].map(|id| rig.fake.entry(id));
    rig.fake.take();
    let page = Span::new(PhysAddr::new(0x8000_0000), 0x1000).unwrap();
    // SAFETY: the fake's devices do nothing.
    unsafe { domain.map_spans(Iova::new(1 << 45), &[page], Prot::READ) }.unwrap();
    let after = [3, 5, 9].map(|id| rig.fake.entry(id));
    let (root, level) = domain.root_and_level();
    for nth in [0, 1] {
        assert_eq!(after[nth][0] & ROOT, root.get());
        assert_eq!(after[nth][0] >> 9 & 7, u64::from(level) + 1);
        let kept = !(ROOT | 7 << 9);
        assert_eq!(after[nth][0] & kept, before[nth][0] & kept);
        assert_eq!(after[nth][1], before[nth][1]);
    }
    assert_eq!(after[2], before[2]);
    let seen = rig.fake.take();
    let commands: Vec<_> =
        seen.iter().map(|seen| (seen.opcode(), seen.command[0] & 0xffff)).collect();
    assert_eq!(commands[..2], [(2, 3), (2, 5)]);
    assert_eq!(seen[2].command[1], 0x7fff_ffff_ffff_f003);
    assert_eq!(seen[3].opcode(), 1);
}

#[test]
fn a_root_in_encrypted_memory_is_one_when_it_changes_too() {
    let encrypted = 1 << 47;
    let rig = Rig::with(AmdViConfig { encryption_bit: Some(47), ..config() });
    let config = AmdV1Config { first_levels: 1, ..rig.iommu.v1_config() };
    assert_eq!((config.output_bits, config.encryption_bit), (47, Some(47)));
    let domain = rig.domain_of(config);
    let stream = rig.stream(7);
    stream.attach(paging(&domain)).unwrap();
    assert_eq!(rig.fake.entry(7)[0] & ROOT, domain.root().get() | encrypted);
    let page = Span::new(PhysAddr::new(0x8000_0000), 0x1000).unwrap();
    for iova in [1 << 21, 1 << 30, 1 << 39] {
        // SAFETY: the fake's devices do nothing.
        unsafe { domain.map_spans(Iova::new(iova), &[page], Prot::READ) }.unwrap();
        let (root, level) = domain.root_and_level();
        let [word, _] = rig.fake.entry(7);
        assert_eq!(word, domain.format().registers(root, level).dte);
        assert_eq!(word & ROOT, root.get() | encrypted);
    }
}

#[test]
fn a_domain_that_is_detached_closes_the_entries_that_still_have_it() {
    let rig = Rig::new();
    let domain = rig.domain();
    let stream = rig.stream(7);
    stream.attach(paging(&domain)).unwrap();
    domain.ops().detach().unwrap();
    let closed = rig.fake.entry(7);
    assert_eq!(closed[0] & 0b11 << 61, 0);
    // A new root is nothing to an entry that is closed.
    let page = Span::new(PhysAddr::new(0x8000_0000), 0x1000).unwrap();
    let root = domain.root();
    // SAFETY: the fake's devices do nothing.
    unsafe { domain.map_spans(Iova::new(1 << 45), &[page], Prot::READ) }.unwrap();
    assert_ne!(domain.root(), root);
    assert_eq!(rig.fake.entry(7), closed);
}

#[test]
fn a_number_that_no_stream_had_comes_back_and_one_that_was_given_again_does_not() {
    let rig = Rig::new();
    let id = rig.domain().ops().domain_id();
    let domain = rig.domain();
    assert_eq!(domain.ops().domain_id(), id, "nobody ever told hardware of it");
    // Not by an attachment, which would keep the domain.
    let stream = rig.iommu.stream::<Paging>(7, ReservedRegions::new()).unwrap();
    stream.translate(&domain).unwrap();
    domain.ops().detach().unwrap();
    // A stream may have been given it meanwhile: this time hardware does not answer.
    rig.fake.behave(|how| how.lost_waits = usize::MAX);
    domain.ops().detach().unwrap_err();
    drop(domain);
    rig.fake.behave(|how| how.lost_waits = 0);
    assert_ne!(rig.domain().ops().domain_id(), id);
}

#[test]
fn a_number_comes_back_when_hardware_has_forgotten_it_and_not_before() {
    let rig = Rig::with(AmdViConfig { last_domain: 4, ..config() });
    let stream = rig.stream(7);
    let domain = rig.domain();
    let id = domain.ops().domain_id();
    stream.attach(paging(&domain)).unwrap();
    stream.detach().unwrap();
    drop(domain);
    let domain = rig.domain();
    assert_eq!(domain.ops().domain_id(), id);
    stream.attach(paging(&domain)).unwrap();
    stream.detach().unwrap();
    rig.fake.behave(|how| how.lost_waits = 1);
    drop(domain);
    let domain = rig.domain();
    assert_ne!(domain.ops().domain_id(), id, "hardware did not say that it forgot it");
    rig.iommu.ops().unwrap_err();
}

#[test]
fn what_firmware_says_of_a_device_stays_in_its_entry() {
    let rig = Rig::new();
    let domain = rig.domain();
    let stream = rig.stream(7);
    stream.port().set_firmware_setting(0b1011_0101).unwrap();
    stream.attach(paging(&domain)).unwrap();
    let table = rig.fake.peek(0) & !0xfff;
    let [_, word] = rig.fake.entry(7);
    assert_eq!(word, 0b11 << 40 | u64::from(domain.ops().domain_id()));
    assert_eq!(rig.memory.word(table + 7 * 32 + 16), 0b1000_0101 << 56);
}

/// A domain of the same IOMMU that its streams cannot have.
fn unfit(rig: &Rig) -> Arc<Paging> {
    let domain = rig.domain_of(AmdV1Config::new(48, 52));
    let stream = rig.iommu.stream::<Paging>(8, ReservedRegions::new()).unwrap();
    stream.accepts(&domain).unwrap_err();
    domain
}

#[test]
fn a_domain_that_lies_is_attached_as_the_one_that_fits_or_refused() {
    let rig = Rig::new();
    let (fits, other) = (rig.domain(), unfit(&rig));
    let stream: AmdViStream<Liar<_, _, _>, _, _> =
        rig.iommu.stream(7, ReservedRegions::new()).unwrap();
    let stream = Attachment::new(stream).unwrap();
    liar::attach(&stream, [&fits, &other], || rig.fake.entry(7)[0] & ROOT == other.root().get());
}

#[test]
fn domains_that_do_not_fit_are_refused_also_where_nobody_asks_first() {
    // 4 levels.
    let memory = Memory::new();
    let fake = Fake::new(&memory);
    fake.poke(EXTENDED_FEATURES, 0);
    let iommu = start(&memory, &fake, config()).unwrap();
    let rig = Rig { memory, fake, iommu, ..Rig::new() };
    let stream = rig.iommu.stream::<Paging>(7, ReservedRegions::new()).unwrap();
    let blocked = rig.fake.entry(7);
    let fits = rig.iommu.v1_config();
    let cases = [
        (AmdV1Config { input_bits: 57, ..fits }, "levels"),
        (AmdV1Config { output_bits: 49, ..fits }, "physical"),
        (AmdV1Config { dirty: DirtyTracking::Hardware, ..fits }, "dirty bits"),
        // Hardware would walk what is 4 GiB above the tables.
        (AmdV1Config { output_bits: 32, encryption_bit: Some(32), ..fits }, "encrypted"),
    ];
    for (config, says) in cases {
        let domain = rig.domain_of(config);
        let error = stream.translate(&domain).unwrap_err();
        assert!(error.what.contains(says), "{error}");
        assert_eq!(stream.accepts(&domain).unwrap_err().what, error.what);
        assert_eq!(rig.fake.entry(7), blocked);
    }
    stream.translate(&rig.domain()).unwrap();
}

#[test]
fn a_domain_that_is_detached_while_a_stream_is_given_it_is_taken_away_at_its_end() {
    let rig = Rig::new();
    let (before, domain) = (rig.domain(), rig.domain());
    let stream = rig.iommu.stream::<Paging>(7, ReservedRegions::new()).unwrap();
    stream.translate(&before).unwrap();
    rig.fake.behave(|how| how.slow = 1);
    // While hardware is to forget what the stream had before.
    let detached = Arc::clone(&domain);
    let meanwhile = Box::new(move || detached.ops().detach().unwrap());
    *rig.memory.meanwhile.lock() = Some(meanwhile);
    stream.translate(&domain).unwrap();
    assert_eq!(rig.fake.entry(7)[0] & ROOT, domain.root().get());
    drop(domain);
    assert_eq!(rig.fake.entry(7)[0] & 0b11 << 61, 0, "its tables are freed");
}

#[test]
fn plain_tables_are_refused_where_those_of_the_host_are_encrypted() {
    let rig = Rig::with(AmdViConfig { encryption_bit: Some(47), ..config() });
    let stream = rig.iommu.stream::<Paging>(7, ReservedRegions::new()).unwrap();
    let plain = AmdV1Config { encryption_bit: None, ..rig.iommu.v1_config() };
    let another = AmdV1Config { encryption_bit: Some(48), ..rig.iommu.v1_config() };
    for config in [plain, another] {
        let error = stream.translate(&rig.domain_of(config)).unwrap_err();
        assert!(error.what.contains("encrypted"), "{error}");
    }
    stream.translate(&rig.domain()).unwrap();
    for bit in [31, 52, 64] {
        let (memory, config) =
            (Memory::new(), AmdViConfig { encryption_bit: Some(bit), ..config() });
        let error = start(&memory, &Fake::new(&memory), config).unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{error}");
    }
}
