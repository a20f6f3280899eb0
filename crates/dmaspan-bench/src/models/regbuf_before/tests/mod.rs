use std::sync::Arc;

use dmaspan::{Direction, Errno, PhysAddr, Span, UserAddr, UserRange, lg2};

use super::buffer::BvecBefore;
use super::*;
use dmaspan_sim::rng::Rng;

mod account;
mod bvecs;
mod descriptors;
mod imports;

const HUGE: u64 = 2 << 20;
const HUGE_PAGES: u64 = HUGE / PAGE;
const ALL: [Coalescing; 3] = [Coalescing::None, Coalescing::SingleHugepage, Coalescing::SameFolios];

/// The pages of spans.
fn pages_of(spans: &[Span]) -> Vec<PhysAddr> {
    let pages = |span: &Span| {
        let first = span.paddr();
        (0..span.len() / PAGE).map(move |n| first.wrapping_add(n * PAGE))
    };
    spans.iter().flat_map(pages).collect()
}

/// Hugepages of which no two touch.
fn apart(count: u64) -> Vec<PhysAddr> {
    let span = |n: u64| Span::new(PhysAddr::new((2 * n + 1) * HUGE), HUGE).unwrap();
    pages_of(&(0..count).map(span).collect::<Vec<_>>())
}

/// All of memory in folios of this order.
fn all_of(order: u32) -> impl Fn(PhysAddr) -> FolioBefore + Copy {
    move |page| FolioBefore {
        head: PhysAddr::new(lg2::align_down(page.get(), order + PAGE_LG2)),
        order,
    }
}

/// A buffer of `len` bytes that begins `offset` into the first of the pages that it needs.
fn buffer(
    pages: &[PhysAddr],
    offset: u64,
    len: u64,
    folios: impl Fn(PhysAddr) -> FolioBefore,
    coalescing: Coalescing,
) -> BufferBefore {
    let user = UserRange::from_len(UserAddr::new(HUGE + offset % PAGE), len).unwrap();
    let first = usize::try_from(offset / PAGE).unwrap();
    let needed = usize::try_from((offset % PAGE + len).div_ceil(PAGE)).unwrap();
    BufferBefore::new(user, &pages[first..first + needed], &folios, coalescing).unwrap()
}

/// Where the bytes from `offset` into the pages on are, page by page, with neighbours joined.
fn expected(pages: &[PhysAddr], offset: u64, len: u64) -> Vec<(u64, u64)> {
    let (mut at, end) = (offset, offset + len);
    let mut runs = Vec::new();
    while at < end {
        let behind = (lg2::align_down(at, PAGE_LG2) + PAGE).min(end);
        let page = pages[usize::try_from(at / PAGE).unwrap()];
        join(&mut runs, page.get() + at % PAGE, behind - at);
        at = behind;
    }
    runs
}

fn join(runs: &mut Vec<(u64, u64)>, addr: u64, len: u64) {
    match runs.last_mut() {
        Some((start, before)) if *start + *before == addr => *before += len,
        _ => runs.push((addr, len)),
    }
}

/// Where the bytes of entries are, with neighbours joined.
fn joined(entries: impl IntoIterator<Item = EntryBefore>) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    entries.into_iter().for_each(|entry| join(&mut runs, entry.addr, u64::from(entry.len)));
    runs
}
