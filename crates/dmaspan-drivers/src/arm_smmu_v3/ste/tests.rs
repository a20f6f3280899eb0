//! Hardware that reads the words of an entry in any order, while they change, sees nothing but the
//! entries before and after.

use super::*;

/// What hardware makes of an entry, written anew from the manual (5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    /// Nothing passes.
    Blocked,
    Bypass {
        attributes: u64,
    },
    Stage1 {
        descriptor: u64,
        how: u64,
        attributes: u64,
        vmid: u64,
    },
    Stage2 {
        how: u64,
        attributes: u64,
        vmid: u64,
        walk: u64,
        root: u64,
    },
}

fn meaning([a, b, c, d]: Entry) -> Meaning {
    // MTCFG to INSTCFG: bits 32 and up.
    let attributes = b >> 32;
    match (a & 1, a >> 1 & 7) {
        (0, _) | (1, 0) => Meaning::Blocked,
        (_, 4) => Meaning::Bypass { attributes },
        // S1Fmt, S1ContextPtr and S1CDMax; S1DSS, S1CIR, S1COR, S1CSH, S1STALLD, EATS and STRW.
        (_, 5) => Meaning::Stage1 {
            descriptor: a >> 4,
            how: b & 0xf800_00ff,
            attributes,
            vmid: c & 0xffff,
        },
        // S2HWU, S2FWB, EATS.
        (_, 6) => Meaning::Stage2 {
            how: b & 0x3200_0f00,
            attributes,
            vmid: c & 0xffff,
            walk: c >> 16,
            root: d,
        },
        _ => panic!("a configuration that is not used: {a:#x}"),
    }
}

fn stage1(descriptor: u64, read: u64) -> Entry {
    [ste::VALID | ste::STAGE_1 | descriptor, ste::SHCFG_INCOMING | read, 0, 0]
}

fn stage2(vmid: u64, root: u64, more: u64) -> Entry {
    let walk = ste::S2AA64 | ste::S2R | 0x2_3558 << 32;
    [ste::VALID | ste::STAGE_2, ste::SHCFG_INCOMING | more, walk | vmid, root]
}

fn entries() -> [Entry; 8] {
    [
        BLOCKED,
        [0; 4],
        PASSING,
        stage1(0x1000, ste::CD_CACHED),
        stage1(0x8_0000_0040, ste::CD_CACHED),
        stage2(1, 0x4000, 0),
        stage2(2, 0x8000, 0),
        stage2(2, 0xc000, ste::S2FWB),
    ]
}

/// All that hardware may read while `now` becomes `next`: each word as it was or as it is to be.
fn mixes(now: Entry, next: Entry) -> impl Iterator<Item = Entry> {
    (0..16).map(move |bits| {
        [0, 1, 2, 3].map(|word| if bits >> word & 1 == 0 { now[word] } else { next[word] })
    })
}

/// Changes an entry step by step, and says whether hardware may see a blocked one on the way.
fn change(now: Entry, next: Entry) -> (Entry, bool) {
    let (mut entry, mut blocks) = (now, false);
    let mut count = 0;
    for step in steps(&now, &next) {
        for mix in mixes(entry, step) {
            let seen = meaning(mix);
            let known = seen == meaning(now) || seen == meaning(next);
            assert!(known || seen == Meaning::Blocked, "{now:x?} to {next:x?}: {seen:x?}");
            blocks |= !known;
        }
        entry = step;
        count += 1;
    }
    assert!((1..=3).contains(&count), "{count} steps");
    assert_eq!(meaning(entry), meaning(next), "{now:x?} to {next:x?}");
    (entry, blocks)
}

#[test]
fn hardware_sees_the_old_entry_or_the_new_one_or_none() {
    // Also from what earlier changes leave in words that are not looked at.
    for first in entries() {
        for second in entries() {
            let (left, _) = change(first, second);
            for third in entries() {
                let (left, _) = change(left, third);
                for fourth in entries() {
                    change(left, fourth);
                }
            }
        }
    }
}

#[test]
fn only_what_differs_in_several_words_is_blocked_on_the_way() {
    let [blocked, invalid, passing, one, other, two, three, _] = entries();
    let hitless = [
        (blocked, one),
        (one, blocked),
        (blocked, two),
        (two, blocked),
        (invalid, two),
        (passing, one),
        (one, passing),
        (passing, two),
        (two, passing),
        (one, other),
        (one, one),
        (two, two),
    ];
    for (now, next) in hitless {
        assert!(!change(now, next).1, "{now:x?} to {next:x?}");
    }
    // VMID and root of stage 2 are two words, and stage 1 has a VMID too.
    for (now, next) in [(two, three), (one, two), (two, one)] {
        assert!(change(now, next).1, "{now:x?} to {next:x?}");
    }
}

#[test]
fn one_step_does_what_changes_one_word() {
    let [blocked, _, passing, one, other, two, ..] = entries();
    let count = |now, next| steps(&now, &next).count();
    assert_eq!(count(one, other), 1);
    assert_eq!(count(one, blocked), 1);
    assert_eq!(count(two, blocked), 1);
    assert_eq!(count(blocked, two), 2);
    assert_eq!(count(blocked, one), 2);
    assert_eq!(count(blocked, passing), 2);
    assert_eq!(count(one, one), 1);
}
