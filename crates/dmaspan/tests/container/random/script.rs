//! The operations of a history: numbers are taken modulo the number of choices.

use dmaspan::Prot;
use dmaspan::account::Counting;
use dmaspan::container::{DirtyRead, Version};
use dmaspan_sim::memory::Holes;
use proptest::prelude::*;

use super::views::Kind;
use crate::common::PROT;

/// Which pages of IOVAs an operation is about.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Select {
    /// A mapping.
    Nth(u8),
    /// From one mapping to another.
    FromTo(u8, u8),
    /// A mapping without its first pages or its last.
    Cut(u8, u8),
    /// Any.
    Pages(u16, u8),
}

/// Whether user addresses begin with a page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fit {
    Aligned,
    Skewed,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Report {
    Nothing,
    Dirty,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Map {
        at: u16,
        from: u8,
        count: u8,
        space: u8,
        owner: u8,
        prot: Prot,
        fit: Fit,
    },
    /// Memory of which all is contiguous, as long as large leaves.
    MapLarge {
        at: u8,
        count: u16,
        owner: u8,
    },
    Unmap {
        pages: Select,
        report: Report,
    },
    UnmapAll,
    Attach {
        kind: Kind,
    },
    Detach {
        n: u8,
    },
    Invalidate {
        pages: Select,
    },
    InvalidateAll,
    Update {
        n: u8,
        space: u8,
        owner: u8,
    },
    Start,
    Stop,
    Get {
        pages: Select,
        how: DirtyRead,
    },
    /// A device behind a domain writes.
    Device {
        n: u8,
        page: u16,
        domain: u8,
    },
    /// An emulated device writes, or reads.
    Write {
        n: u8,
        page: u16,
    },
    Read {
        n: u8,
        page: u16,
    },
    AttachEmulated,
    DetachEmulated,
    Pin {
        n: u8,
        page: u16,
        count: u8,
    },
    Unpin {
        n: u8,
    },
    /// Device memory is taken away from a user, and comes back.
    Revoke {
        space: u8,
        from: u8,
        count: u8,
    },
    Plug {
        space: u8,
    },
}

/// What goes wrong meanwhile.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trouble {
    /// Which step fails, 0 for none.
    pub(crate) step: u8,
    /// The domain whose hardware does not answer.
    pub(crate) deaf: Option<u8>,
    /// After how many times it is asked the caller cancels.
    pub(crate) cancel: Option<u8>,
}

#[derive(Clone, Debug)]
pub(crate) struct Script {
    /// log2 of the page: with 16K there are domains of several granules.
    pub(crate) g: u32,
    pub(crate) version: Version,
    pub(crate) counting: Counting,
    pub(crate) holes: Holes,
    /// In pages.
    pub(crate) limit: u64,
    pub(crate) steps: Vec<(Op, Trouble)>,
}

fn select() -> impl Strategy<Value = Select> {
    prop_oneof![
        4 => any::<u8>().prop_map(Select::Nth),
        2 => any::<(u8, u8)>().prop_map(|(a, b)| Select::FromTo(a, b)),
        1 => any::<(u8, u8)>().prop_map(|(a, b)| Select::Cut(a, b)),
        1 => any::<(u16, u8)>().prop_map(|(a, b)| Select::Pages(a, b)),
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    let rare = || prop::bool::weighted(0.1);
    (any::<u8>(), prop::bool::weighted(0.8), prop::bool::weighted(0.3), rare())
        .prop_map(|(format, marks, msi, unsafe_)| Kind { format, marks, msi, isolated: !unsafe_ })
}

fn map() -> impl Strategy<Value = Op> {
    let fit = prop_oneof![30 => Just(Fit::Aligned), 1 => Just(Fit::Skewed)];
    let prot = prop_oneof![4 => Just(PROT), 1 => Just(Prot::READ.union(Prot::CACHE))];
    let from = prop_oneof![3 => 0..60u8, 3 => 60..128u8, 1 => 128..160u8];
    (any::<u16>(), from, 1..40u8, any::<(u8, u8)>(), prot, fit).prop_map(
        |(at, from, count, (space, owner), prot, fit)| Op::Map {
            at,
            from,
            count,
            space,
            owner,
            prot,
            fit,
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let report = prop_oneof![Just(Report::Nothing), Just(Report::Dirty)];
    let how = prop_oneof![2 => Just(DirtyRead::Clear), 1 => Just(DirtyRead::Keep)];
    let mapping = prop_oneof![
        7 => map(),
        1 => (any::<u8>(), 1..520u16, any::<u8>())
            .prop_map(|(at, count, owner)| Op::MapLarge { at, count, owner }),
        4 => (select(), report).prop_map(|(pages, report)| Op::Unmap { pages, report }),
        1 => Just(Op::UnmapAll),
        4 => kind().prop_map(|kind| Op::Attach { kind }),
        1 => any::<u8>().prop_map(|n| Op::Detach { n }),
    ];
    let vaddr = prop_oneof![
        2 => select().prop_map(|pages| Op::Invalidate { pages }),
        1 => Just(Op::InvalidateAll),
        5 => any::<(u8, u8, u8)>().prop_map(|(n, space, owner)| Op::Update { n, space, owner }),
    ];
    let dirty = prop_oneof![
        2 => Just(Op::Start),
        1 => Just(Op::Stop),
        4 => (select(), how).prop_map(|(pages, how)| Op::Get { pages, how }),
        8 => any::<(u8, u16, u8)>()
            .prop_map(|(n, page, domain)| Op::Device { n, page, domain }),
    ];
    let emulated = prop_oneof![
        2 => Just(Op::AttachEmulated),
        1 => Just(Op::DetachEmulated),
        2 => any::<(u8, u16)>().prop_map(|(n, page)| Op::Write { n, page }),
        2 => any::<(u8, u16)>().prop_map(|(n, page)| Op::Read { n, page }),
        4 => (any::<u8>(), any::<u16>(), 1..9u8)
            .prop_map(|(n, page, count)| Op::Pin { n, page, count }),
        2 => any::<u8>().prop_map(|n| Op::Unpin { n }),
        2 => (any::<u8>(), any::<u8>(), 1..12u8)
            .prop_map(|(space, from, count)| Op::Revoke { space, from, count }),
        1 => any::<u8>().prop_map(|space| Op::Plug { space }),
    ];
    prop_oneof![8 => mapping, 2 => vaddr, 5 => dirty, 4 => emulated]
}

/// What can go wrong in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Troubles {
    /// Any step may fail: which one that is depends on the size of batches.
    Any,
    /// What does not depend on it.
    OfAnyBatch,
}

fn trouble(troubles: Troubles) -> BoxedStrategy<Trouble> {
    match troubles {
        Troubles::Any => {
            let step = prop_oneof![2 => Just(0u8), 2 => 1..12u8, 1 => 12..120u8];
            let deaf = prop::option::weighted(0.1, any::<u8>());
            let cancel = prop::option::weighted(0.1, 0..6u8);
            let all = (step, deaf, cancel);
            all.prop_map(|(step, deaf, cancel)| Trouble { step, deaf, cancel }).boxed()
        }
        Troubles::OfAnyBatch => {
            let cancel = prop::option::weighted(0.1, Just(0));
            cancel.prop_map(|cancel| Trouble { cancel, ..Trouble::default() }).boxed()
        }
    }
}

pub(crate) fn script(troubles: Troubles) -> impl Strategy<Value = Script> {
    let g = prop_oneof![2 => Just(12), 1 => Just(14)];
    let version = prop_oneof![1 => Just(Version::V1), 3 => Just(Version::V2)];
    let counting =
        prop_oneof![Just(Counting::Ranges), Just(Counting::Mappings), Just(Counting::Frames),];
    let holes = prop_oneof![Just(Holes::FoundFirst), Just(Holes::FoundOnTheWay)];
    let limit = prop_oneof![2 => Just(1u64 << 30), 1 => 30..120u64];
    let steps = prop::collection::vec((op(), trouble(troubles)), 1..60);
    (g, version, counting, holes, limit, steps).prop_map(
        |(g, version, counting, holes, limit, steps)| Script {
            g,
            version,
            counting,
            holes,
            limit,
            steps,
        },
    )
}
