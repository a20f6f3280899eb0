//! Ranges as the fewest aligned blocks, which commands of several IOMMUs name.
//!
//! What lies in a block beside the range is forgotten needlessly and walked again when it is used;
//! that costs less than the commands which would spare it.

use dmaspan::{IovaRange, lg2};

/// One or two aligned blocks, each a power of two, that cover a range with less than twice its
/// bytes: an address in each, and log2 of the size.
///
/// One block, if the one around the range is small enough. If not, the range is cut at the address
/// in it with the highest alignment, to which the blocks of both parts reach.
pub(crate) fn blocks(range: IovaRange) -> impl Iterator<Item = (u64, u32)> {
    cover(range).into_iter().flatten()
}

fn cover(range: IovaRange) -> [Option<(u64, u32)>; 2] {
    let (start, last) = (range.start().get(), range.last().get());
    let around = u64::BITS - (start ^ last).leading_zeros();
    let Some(half) = around.checked_sub(1) else { return [Some((start, 0)), None] };
    if last - start >= lg2::size(half) {
        return [Some((start, around)), None];
    }
    // The highest bit that differs is set in the last address alone, so the cut is behind `start`.
    let cut = lg2::align_down(last, half);
    [Some((start, lg2_of(cut - start))), Some((cut, lg2_of(last - cut + 1)))]
}

/// log2 of the least power of two that is not smaller.
fn lg2_of(bytes: u64) -> u32 {
    u64::BITS - bytes.saturating_sub(1).leading_zeros()
}

#[cfg(test)]
mod tests {
    use dmaspan::Iova;

    use super::*;

    fn of(start: u64, last: u64) -> alloc::vec::Vec<(u64, u32)> {
        let range = IovaRange::new(Iova::new(start), Iova::new(last)).unwrap();
        blocks(range).collect()
    }

    #[test]
    fn an_aligned_power_of_two_is_one_block() {
        for lg2 in 12..64 {
            let size = lg2::size(lg2);
            assert_eq!(of(0, size - 1), [(0, lg2)]);
            assert_eq!(of(!(size - 1), u64::MAX), [(!(size - 1), lg2)]);
        }
        assert_eq!(of(0, u64::MAX), [(0, 64)]);
    }

    #[test]
    fn ranges_of_bytes_are_one_block_or_cut_where_the_alignment_is_highest() {
        assert_eq!(of(5, 5), [(5, 0)]);
        assert_eq!(of(0, 4), [(0, 3)], "more than half of it");
        assert_eq!(of(3, 4), [(3, 0), (4, 0)]);
        assert_eq!(of(3, 5), [(3, 0), (4, 1)]);
        assert_eq!(of(2, 6), [(2, 3)]);
        assert_eq!(of(3, 6), [(3, 0), (4, 2)]);
    }

    #[test]
    fn a_range_is_covered_by_less_than_twice_its_bytes() {
        let pages = [0u64, 1, 2, 3, 5, 7, 8, 511, 512, 513, 0x3_ffff, 0x4_0001, (1 << 52) - 9];
        for start in pages {
            for count in pages.map(|n| n + 1) {
                let Some(end) = start.checked_add(count).filter(|&end| end <= 1 << 52) else {
                    continue;
                };
                let (first, last) = (start << 12, ((end - 1) << 12) + 0xfff);
                let blocks = of(first, last);
                let bytes = |&(_, lg2): &(u64, u32)| 1u128 << lg2;
                let total: u128 = blocks.iter().map(bytes).sum();
                assert!(total < u128::from(count) << 13, "{first:#x} {last:#x} {blocks:x?}");
                let covers = |address: u64| {
                    blocks.iter().any(|&(iova, lg2)| {
                        lg2::align_down(iova, lg2) == lg2::align_down(address, lg2)
                    })
                };
                let step = (count / 64).max(1);
                let pages = (0..).map(|n| start + n * step).take_while(|&page| page < end);
                for page in pages {
                    assert!(covers(page << 12), "{first:#x} {last:#x} {page:#x} {blocks:x?}");
                }
                assert!(covers(last));
            }
        }
    }
}
