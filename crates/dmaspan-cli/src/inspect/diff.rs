//! The difference of two dumps.

use dmaspan::Prot;

use super::domain::{Domain, MappedSpan};

/// What happened to a range of IOVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Change {
    Added,
    Removed,
    /// It leads to other memory.
    Moved,
    /// It leads to the same memory, with other permissions.
    Permissions,
}

impl Change {
    pub(crate) const ALL: [Self; 4] = [Self::Added, Self::Removed, Self::Moved, Self::Permissions];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Moved => "moved",
            Self::Permissions => "permissions",
        }
    }
}

/// A range that is different, and where it led and leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) change: Change,
    pub(crate) iova: u64,
    pub(crate) bytes: u64,
    pub(crate) before: Option<(u64, Prot)>,
    pub(crate) after: Option<(u64, Prot)>,
}

/// A domain in both dumps, or in one.
pub(crate) struct Pair<'d> {
    pub(crate) before: Option<&'d Domain>,
    pub(crate) after: Option<&'d Domain>,
}

/// Which domains of two dumps are the same: those of a device that both have, those of one root,
/// and where each dump has but one, these.
pub(crate) fn pairs<'d>(before: &'d [Domain], after: &'d [Domain]) -> Vec<Pair<'d>> {
    let mut left: Vec<&Domain> = before.iter().collect();
    let alone = before.len() == 1 && after.len() == 1;
    let mut pairs = Vec::new();
    for domain in after {
        let of_device =
            |other: &&Domain| other.devices.iter().any(|device| domain.devices.contains(device));
        let of_root = |other: &&Domain| {
            domain.devices.is_empty() && other.devices.is_empty() && other.root == domain.root
        };
        let found = left.iter().position(|other| alone || of_device(other) || of_root(other));
        pairs.push(Pair { before: found.map(|at| left.remove(at)), after: Some(domain) });
    }
    pairs.extend(left.into_iter().map(|before| Pair { before: Some(before), after: None }));
    pairs
}

/// What is different, by ascending IOVA.
pub(crate) fn changes(before: &[MappedSpan], after: &[MappedSpan]) -> Vec<Changed> {
    let mut changes: Vec<Changed> = Vec::new();
    let (mut old, mut new) = (Rest::new(before), Rest::new(after));
    loop {
        let (one, other) = (old.head(), new.head());
        // From the lower start on, as far as nothing begins or ends.
        let changed = match (one, other) {
            (None, None) => break,
            (Some(one), None) => removed(one, one.bytes),
            (None, Some(other)) => added(other, other.bytes),
            (Some(one), Some(other)) if one.iova < other.iova => {
                removed(one, one.bytes.min(other.iova - one.iova))
            }
            (Some(one), Some(other)) if other.iova < one.iova => {
                added(other, other.bytes.min(one.iova - other.iova))
            }
            (Some(one), Some(other)) => {
                let bytes = one.bytes.min(other.bytes);
                let change = match (one.paddr == other.paddr, one.prot == other.prot) {
                    (true, true) => None,
                    (true, false) => Some(Change::Permissions),
                    (false, _) => Some(Change::Moved),
                };
                let (before, after) =
                    (Some((one.paddr, one.prot)), Some((other.paddr, other.prot)));
                if let Some(change) = change {
                    push(&mut changes, Changed { change, iova: one.iova, bytes, before, after });
                }
                old.skip(bytes);
                new.skip(bytes);
                continue;
            }
        };
        match changed.change {
            Change::Removed => old.skip(changed.bytes),
            _ => new.skip(changed.bytes),
        }
        push(&mut changes, changed);
    }
    changes
}

fn removed(span: MappedSpan, bytes: u64) -> Changed {
    let before = Some((span.paddr, span.prot));
    Changed { change: Change::Removed, iova: span.iova, bytes, before, after: None }
}

fn added(span: MappedSpan, bytes: u64) -> Changed {
    let after = Some((span.paddr, span.prot));
    Changed { change: Change::Added, iova: span.iova, bytes, before: None, after }
}

/// Adds a change, joined with the one before where it goes on.
fn push(changes: &mut Vec<Changed>, next: Changed) {
    if let Some(last) = changes.last_mut() {
        let goes_on =
            |before: Option<(u64, Prot)>, after: Option<(u64, Prot)>| match (before, after) {
                (None, None) => true,
                (Some((one, prot)), Some((next, next_prot))) => {
                    one.checked_add(last.bytes) == Some(next) && prot == next_prot
                }
                _ => false,
            };
        if last.change == next.change
            && last.iova.checked_add(last.bytes) == Some(next.iova)
            && goes_on(last.before, next.before)
            && goes_on(last.after, next.after)
            && let Some(bytes) = last.bytes.checked_add(next.bytes)
        {
            last.bytes = bytes;
            return;
        }
    }
    changes.push(next);
}

/// What was not compared.
struct Rest<'s> {
    spans: &'s [MappedSpan],
    /// Bytes of the first span that were.
    done: u64,
}

impl<'s> Rest<'s> {
    fn new(spans: &'s [MappedSpan]) -> Self {
        Self { spans, done: 0 }
    }

    fn head(&self) -> Option<MappedSpan> {
        let span = *self.spans.first()?;
        let (iova, paddr) = (span.iova.wrapping_add(self.done), span.paddr.wrapping_add(self.done));
        Some(MappedSpan { iova, paddr, bytes: span.bytes - self.done, ..span })
    }

    fn skip(&mut self, bytes: u64) {
        self.done += bytes;
        if self.spans.first().is_some_and(|span| span.bytes <= self.done) {
            self.spans = self.spans.get(1..).unwrap_or(&[]);
            self.done = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RW: Prot = Prot::READ_WRITE;

    fn span(iova: u64, paddr: u64, bytes: u64, prot: Prot) -> MappedSpan {
        MappedSpan { iova, paddr, bytes, prot, lg2: (12, 12) }
    }

    #[test]
    fn what_came_went_moved_and_may_be_done_is_told_by_range() {
        let before = [span(0x1000, 0x8000, 0x4000, RW), span(0x9000, 0x2_0000, 0x2000, RW)];
        let after = [
            span(0x2000, 0x9000, 0x1000, RW),
            span(0x3000, 0xa000, 0x1000, Prot::READ),
            span(0x4000, 0x5_0000, 0x2000, RW),
            span(0x9000, 0x2_0000, 0x2000, RW),
            span(u64::MAX - 0xfff, 0, 0x1000, RW),
        ];
        let found: Vec<_> = changes(&before, &after)
            .iter()
            .map(|changed| (changed.change, changed.iova, changed.bytes))
            .collect();
        assert_eq!(
            found,
            [
                (Change::Removed, 0x1000, 0x1000),
                (Change::Permissions, 0x3000, 0x1000),
                (Change::Moved, 0x4000, 0x1000),
                (Change::Added, 0x5000, 0x1000),
                (Change::Added, u64::MAX - 0xfff, 0x1000),
            ]
        );
        assert_eq!(changes(&before, &before), []);
        assert_eq!(changes(&before, &[]).len(), 2);
    }

    #[test]
    fn one_range_that_is_cut_differently_is_one_change() {
        let before = [span(0, 0x8000, 0x1000, RW), span(0x1000, 0x9000, 0x1000, RW)];
        let after = [span(0, 0x1_8000, 0x2000, RW)];
        let found = changes(&before, &after);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].change, found[0].bytes), (Change::Moved, 0x2000));
    }

    #[test]
    fn domains_are_the_same_by_device_then_by_root() {
        let of = |device: Option<&str>, root| {
            let mut domain = Domain::new(Some(root), "t");
            domain.devices.extend(device.map(str::to_owned));
            domain
        };
        let before = [of(Some("a"), 1), of(Some("b"), 2), of(None, 3)];
        let after = [of(Some("b"), 9), of(None, 3), of(None, 4)];
        let found: Vec<_> = pairs(&before, &after)
            .iter()
            .map(|pair| (pair.before.and_then(|it| it.root), pair.after.and_then(|it| it.root)))
            .collect();
        assert_eq!(
            found,
            [(Some(2), Some(9)), (Some(3), Some(3)), (None, Some(4)), (Some(1), None)]
        );
        let one = pairs(&before[..1], &after[2..]);
        assert!(one.len() == 1 && one[0].before.is_some());
    }
}
