//! Device contexts: where they are, what is in them, and in which steps that changes.

use std::sync::Arc;

use dmaspan::Coherency;
use dmaspan::io_pgtable::{DirtyTracking, RiscvConfig, RiscvMode};
use dmaspan::iommu::{Attachment, IommuOps as _, Port as _, Prepared, Target};
use dmaspan_drivers::Error;
use dmaspan_drivers::riscv::{RiscvIommuConfig, RiscvStream};
use dmaspan_sim::rng::Rng;

use crate::hardware::{
    AMO_HWAD, BASE_FORMAT, FIRST, Fake, Fault, Iommu, MSI_FLAT, SECOND, Stream, Tables, domain,
    domain_of, stream,
};
use crate::liar::{self, Liar};

#[test]
fn a_context_is_where_hardware_looks_for_it() {
    let mut rng = Rng::new(7);
    for (format, widths) in [(BASE_FORMAT, [7, 16, 24]), (BASE_FORMAT | MSI_FLAT, [6, 15, 24])] {
        for bits in widths {
            let fake = Fake::new(format);
            let config = RiscvIommuConfig { device_id_bits: bits, ..Default::default() };
            let iommu = fake.start(config).unwrap();
            let last = (1 << bits) - 1;
            let random = (0..20).map(|_| u32::try_from(rng.below(1 << bits)).unwrap());
            let mut ids: Vec<u32> = random.chain([0, 1, last]).collect();
            ids.sort_unstable();
            ids.dedup();
            let domains = [FIRST, SECOND].map(|stage| domain(&iommu, stage));
            let streams: Vec<_> = ids.iter().map(|&id| stream(&iommu, id)).collect();
            for (n, stream) in streams.iter().enumerate() {
                stream.translate(&domains[n % 2]).unwrap();
            }
            for (n, &id) in ids.iter().enumerate() {
                let root = domains[n % 2].root().get() >> 12;
                let expected = match n % 2 {
                    0 => [1, 0, 1 << 12, 10 << 60 | root],
                    _ => [1, 10 << 60 | 1 << 44 | root, 0, 0],
                };
                assert_eq!(fake.context(id), expected, "{bits} bits, {id:#x}");
                if format & MSI_FLAT != 0 {
                    let at = fake.context_at(&fake.state.lock(), id).unwrap();
                    let more = [32, 40, 48, 56].map(|offset| fake.host.read(at + offset));
                    assert_eq!(more, [Some(0); 4], "MSIs are not recognised");
                }
            }
            let none = iommu.stream::<Tables>(last + 1, Default::default()).unwrap_err();
            assert_eq!(none, Error::NoStream { stream: last + 1, last });
            let claimed = iommu.stream::<Tables>(ids[0], Default::default()).unwrap_err();
            assert_eq!(claimed, Error::Claimed { stream: ids[0] });
        }
    }
}

#[test]
fn dirty_marks_are_asked_for_in_the_context() {
    let fake = Fake::new(BASE_FORMAT | AMO_HWAD);
    let iommu = fake.driver();
    let stream = stream(&iommu, 5);
    for (stage, bit) in [(FIRST, 8), (SECOND, 7)] {
        let config = iommu.config(stage).unwrap();
        let dirty = RiscvConfig { dirty: DirtyTracking::Hardware, ..config };
        stream.translate(&domain_of(&iommu, stage, dirty)).unwrap();
        assert_eq!(fake.context(5)[0], 1 | 1 << bit);
    }
}

/// Everything that a stream can have.
fn give(stream: &Stream, domains: &[Arc<Tables>], which: usize) -> bool {
    let done = match which.checked_sub(2) {
        None if which == 0 => stream.block(),
        None => stream.pass(crate::host::all_memory()),
        Some(domain) => stream.translate(&domains[domain]),
    };
    done.is_ok()
}

fn four(iommu: &Arc<Iommu>) -> Vec<Arc<Tables>> {
    [FIRST, FIRST, SECOND, SECOND].map(|stage| domain(iommu, stage)).into()
}

/// Hardware reads the words of a context in any order, so between two looks that are told apart by
/// a fence only one word of a context changes that is valid before or after.
#[test]
fn hardware_never_sees_a_mixture_of_two_contexts() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let (stream, domains) = (stream(&iommu, 9), four(&iommu));
    fake.state.lock().watched = Some(9);
    let mut rng = Rng::new(3);
    let mut refused = 0;
    for _ in 0..3000 {
        // Now and then hardware refuses all commands for a while.
        let broken = rng.below(8) == 0;
        fake.set(if broken { Fault::Refuses(3, 1 << 10) } else { Fault::None });
        refused += usize::from(!give(&stream, &domains, usize::try_from(rng.below(6)).unwrap()));
        let context = fake.context(9);
        fake.state.lock().contexts.push(context);
    }
    assert!(refused > 100);
    let seen = std::mem::take(&mut fake.state.lock().contexts);
    let mut valid = 0;
    for (before, after) in seen.iter().zip(&seen[1..]) {
        if (before[0] | after[0]) & 1 == 0 {
            continue;
        }
        valid += 1;
        let changed = (0..4).filter(|&word| before[word] != after[word]).count();
        assert!(changed <= 1, "{before:x?} -> {after:x?}");
    }
    assert!(valid > 1000, "{valid}");
}

#[test]
fn each_switch_says_what_the_manual_demands() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let (stream, domains) = (stream(&iommu, 0x10), four(&iommu));
    const FENCE: [u64; 2] = [2 | 1 << 12 | 1 << 13, 0];
    const CONTEXT: [u64; 2] = [3 | 1 << 33 | 0x10 << 40, 0];
    let pscid = |pscid: u64| [1 | 1 << 32 | pscid << 12, 0];
    let guest = |gscid: u64, func: u64| [1 | func << 7 | 1 << 33 | gscid << 44, 0];
    let steps: [(usize, &[[u64; 2]]); 9] = [
        // Blocked from the begin: nothing is cached.
        (0, &[]),
        (2, &[CONTEXT, FENCE]),
        // Two words change, so it goes through a context that is not valid.
        (3, &[CONTEXT, pscid(1), FENCE, CONTEXT, FENCE]),
        (4, &[CONTEXT, pscid(2), FENCE, CONTEXT, FENCE]),
        // One word changes.
        (5, &[CONTEXT, guest(1, 0), guest(1, 1), FENCE]),
        (5, &[]),
        (1, &[CONTEXT, guest(2, 0), guest(2, 1), FENCE]),
        (0, &[CONTEXT, [1, 0], FENCE]),
        (0, &[]),
    ];
    for (which, expected) in steps {
        assert!(give(&stream, &domains, which));
        assert_eq!(fake.take(), expected, "{which}");
    }
}

#[test]
fn after_a_failure_everything_is_forgotten_before_the_stream_has_anything() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let (port, domains) = (stream(&iommu, 1), four(&iommu));
    assert!(give(&port, &domains, 2));
    fake.set(Fault::Stuck);
    assert!(!give(&port, &domains, 3) && !give(&port, &domains, 0));
    assert_eq!(fake.context(1)[0] & 1, 0, "it is blocked as soon as hardware looks");
    // Both domains may be walked.
    for domain in &domains[..2] {
        assert!(domain.ops().detach().is_err());
    }
    fake.set(Fault::None);
    fake.take();
    assert!(give(&port, &domains, 4));
    let all = [[3, 0], [1, 0], [1 | 1 << 7, 0]];
    assert!(fake.take().windows(3).any(|commands| commands == all));
    for domain in &domains[..2] {
        domain.ops().detach().unwrap();
    }
    // A driver that claims a stream that was not blocked begins like this, too.
    drop(port);
    fake.take();
    let again = stream(&iommu, 1);
    again.block().unwrap();
    assert_eq!(fake.take()[..3], all);
    drop(again);
    let attachment = Attachment::new(stream(&iommu, 1)).unwrap();
    assert_eq!(fake.take(), [[0; 2]; 0], "it was blocked for certain");
    drop(attachment);
}

#[test]
fn a_stream_that_may_still_pass_is_not_taken_for_a_blocked_one_by_who_claims_it_next() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    let port = stream(&iommu, 1);
    port.pass(crate::host::all_memory()).unwrap();
    fake.set(Fault::Stuck);
    assert!(port.block().is_err());
    assert_eq!(fake.context(1)[0] & 1, 0, "it is blocked as soon as hardware looks");
    drop(port);
    let again = stream(&iommu, 1);
    assert!(again.block().is_err(), "hardware has not forgotten that all accesses pass");
    drop(again);
    fake.set(Fault::None);
    fake.take();
    stream(&iommu, 1).block().unwrap();
    assert!(fake.take().windows(2).any(|commands| commands == [[3, 0], [1, 0]]));
    assert_eq!(fake.context(1), [0; 4]);
}

#[test]
fn the_number_of_a_domain_that_a_stream_still_has_is_not_given_to_another() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.driver();
    for (stage, word, number) in [(FIRST, 2, 12), (SECOND, 1, 44)] {
        let kept = domain(&iommu, stage);
        // Hardware knows nothing of it, and then it does.
        kept.ops().detach().unwrap();
        let port = stream(&iommu, 1);
        port.translate(&kept).unwrap();
        drop((port, kept));
        let another = stream(&iommu, 2);
        another.translate(&domain(&iommu, stage)).unwrap();
        let number_of = |device| fake.context(device)[word] >> number & 0xffff;
        assert_ne!(number_of(1), number_of(2), "{stage:?}");
        another.block().unwrap();
    }
}

#[test]
fn domains_that_hardware_does_not_walk_are_refused() {
    let fake = Fake::new(BASE_FORMAT & !(1 << 11 | 1 << 15));
    let iommu = fake.driver();
    let other = Fake::new(BASE_FORMAT).driver();
    let attachment = Attachment::new(stream(&iommu, 1)).unwrap();
    let config = iommu.config(FIRST).unwrap();
    assert_eq!(config.mode, RiscvMode::Sv48);
    let cases = [
        (domain(&other, FIRST), "another IOMMU"),
        (domain_of(&iommu, SECOND, config), "different stages"),
        (domain_of(&iommu, FIRST, RiscvConfig { mode: RiscvMode::Sv57, ..config }), "its mode"),
        (domain_of(&iommu, FIRST, RiscvConfig { output_bits: 47, ..config }), "more bits"),
        (
            domain_of(&iommu, FIRST, RiscvConfig { dirty: DirtyTracking::Hardware, ..config }),
            "dirty",
        ),
    ];
    for (domain, says) in cases {
        let target = Target::Paging(Prepared::new(Arc::clone(&domain)));
        let error = attachment.attach(target).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
        // Nor by who does not ask first.
        assert!(attachment.port().translate(&domain).is_err());
        assert_eq!(fake.context(1), [0; 4]);
    }
}

#[test]
fn tables_in_caches_that_hardware_does_not_see_are_refused() {
    let fake = Fake::new(BASE_FORMAT);
    let walks = Coherency::NonCoherent;
    let iommu = fake.start(RiscvIommuConfig { walks, ..Default::default() }).unwrap();
    let stream = stream(&iommu, 1);
    let error = stream.accepts(&domain(&iommu, FIRST)).unwrap_err();
    assert!(error.what.contains("caches"), "{error}");
}

#[test]
fn a_domain_that_lies_is_attached_as_the_one_that_fits_or_refused() {
    let fake = Fake::new(BASE_FORMAT);
    let (iommu, other) = (fake.driver(), Fake::new(BASE_FORMAT).driver());
    for (device, stage, word) in [(1, FIRST, 3), (2, SECOND, 1)] {
        let [ours, theirs] = [&iommu, &other].map(|iommu| domain(iommu, stage));
        let stream: RiscvStream<Liar<_, _, _>, _, _> =
            iommu.stream(device, Default::default()).unwrap();
        let stream = Attachment::new(stream).unwrap();
        let tables = theirs.root().get() >> 12;
        liar::attach(&stream, [&ours, &theirs], || {
            fake.context(device)[word] & 0xfff_ffff_ffff == tables
        });
    }
}
