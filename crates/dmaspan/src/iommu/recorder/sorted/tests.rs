use alloc::collections::BTreeMap;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Named {
    range: IovaRange,
    name: u32,
}

impl Placed for Named {
    fn range(&self) -> IovaRange {
        self.range
    }

    fn at(&self, range: IovaRange) -> Self {
        Self { range, ..*self }
    }
}

fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

/// Each address has a name; what is adjacent and of one name is one record or several.
fn addresses(sorted: &Sorted<Named>) -> BTreeMap<u64, u32> {
    let each = |named: &Named| {
        let name = named.name;
        (named.range.start().get()..=named.range.last().get()).map(move |at| (at, name))
    };
    let found: Vec<_> = sorted.from(Iova::new(0)).flat_map(each).collect();
    assert!(found.is_sorted_by(|a, b| a.0 < b.0), "sorted and disjoint");
    found.into_iter().collect()
}

#[test]
fn records_are_as_in_a_model_of_single_addresses_whatever_comes_and_goes() {
    let (mut sorted, mut model) = (Sorted::default(), BTreeMap::new());
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for name in 0..if cfg!(miri) { 20 } else { 4000 } {
        let at = range(next(500), 1 + next(9));
        let all = || at.start().get()..=at.last().get();
        match next(3) {
            0 => {
                sorted.remove(at).unwrap();
                model.retain(|address, _| !all().contains(address));
            }
            1 => {
                sorted.change(at, |named: &mut Named| named.name = name).unwrap();
                model.range_mut(all()).for_each(|(_, old)| *old = name);
            }
            _ => {
                sorted.remove(at).unwrap();
                sorted.insert(Named { range: at, name }).unwrap();
                model.extend(all().map(|at| (at, name)));
            }
        }
        assert_eq!(addresses(&sorted), model);
        assert_eq!(sorted.len(), sorted.from(Iova::new(0)).count());
        assert!(sorted.blocks.iter().all(|block| (1..=BLOCK).contains(&block.len())));
    }
}

#[test]
fn records_that_come_in_order_fill_their_blocks() {
    let mut sorted = Sorted::default();
    (0..64).for_each(|n| sorted.insert(Named { range: range(n * 2, 1), name: 0 }).unwrap());
    assert_eq!(sorted.blocks.len(), 64 / BLOCK);
}
