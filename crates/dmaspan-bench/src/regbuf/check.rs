//! A check that both ways lead to the same bytes.

use super::plan::Io;
use super::work::{ByPage, BySegment};
use crate::failed::Failed;
use dmaspan::regbuf::descriptors::{Prps, ScatterEntry, Sgl, SglDescriptor};

/// Contiguous bytes: where, and how many.
type Piece = (u64, u64);

/// Pieces, joined where they touch.
fn joined(pieces: impl Iterator<Item = Piece>) -> Vec<Piece> {
    let mut all: Vec<Piece> = Vec::new();
    for (addr, len) in pieces {
        match all.last_mut() {
            Some((start, before)) if *start + *before == addr => *before += len,
            _ => all.push((addr, len)),
        }
    }
    all
}

/// The number that a descriptor has in these bytes of it, little-endian.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The address and the length of a Data Block; of any other descriptor nothing.
fn block(descriptor: SglDescriptor) -> Piece {
    let bytes = descriptor.to_bytes();
    if bytes[15] == 0 { (number(&bytes[..8]), number(&bytes[8..12])) } else { (0, 0) }
}

/// What the controller finds by a list of one page.
fn by_sgl(sgl: Sgl, list: &[SglDescriptor]) -> Vec<Piece> {
    let bytes = sgl.sgl1.to_bytes();
    if sgl.list_pages == 0 {
        return joined([block(sgl.sgl1)].into_iter());
    }
    let count = usize::try_from(number(&bytes[8..12]) / 16).unwrap_or(usize::MAX);
    joined(list.iter().take(count).map(|descriptor| block(*descriptor)))
}

/// All PRPs that the controller finds, of which there are `count`.
fn all_prps(prps: Prps, lists: &[&[u64]], count: usize) -> Vec<u64> {
    let mut all = vec![prps.prp1];
    if prps.list_pages == 0 {
        all.extend((prps.prp2 != 0).then_some(prps.prp2));
        return all;
    }
    for (number, list) in lists[..prps.list_pages].iter().enumerate() {
        let is_last = number + 1 == prps.list_pages;
        let data = if is_last { *list } else { &list[..list.len() - 1] };
        let left = count.saturating_sub(all.len());
        all.extend(data.iter().take(left).map(|entry| u64::from_le(*entry)));
    }
    all
}

/// Compares where imports lead.
pub(crate) fn imports(old: &ByPage<'_>, new: &BySegment<'_>, ios: &[Io]) -> Result<(), Failed> {
    for io in ios {
        let pages = joined(old.pieces(*io)?.map(|piece| (piece.addr, piece.len.into())));
        let segments = new.pieces(*io)?.map(|span| (span.start().get(), span.len()));
        expect("imports", *io, &pages, &joined(segments))?;
    }
    Ok(())
}

/// Compares where descriptors lead.
pub(crate) fn descriptors(
    old: &mut ByPage<'_>,
    new: &mut BySegment<'_>,
    ios: &[Io],
) -> Result<(), Failed> {
    for io in ios {
        let used = old.scatter(*io)?;
        let pages = old.entries[..used].iter().map(|entry| (entry.addr, entry.len.into()));
        let pages = joined(pages);
        let used = new.scatter(*io)?;
        let piece = |entry: &ScatterEntry| (entry.addr.get(), u64::from(entry.len));
        let entries = joined(new.entries[..used].iter().map(piece));
        expect("scatter-gather entries", *io, &pages, &entries)?;

        old.sgl(*io)?;
        let sgl = new.write_sgl(*io)?;
        expect("SGLs", *io, &pages, &by_sgl(sgl, new.sgl[0].entries))?;

        old.prps.fill(0);
        old.prp(*io)?;
        let prps = new.write_prps(*io)?;
        let count = old.prps.iter().position(|entry| *entry == 0).unwrap_or(old.prps.len());
        let expected: Vec<u64> = old.prps[..count].iter().map(|prp| u64::from_le(*prp)).collect();
        let lists: Vec<&[u64]> = new.prps.iter().map(|page| &*page.entries).collect();
        expect("PRPs", *io, &expected, &all_prps(prps, &lists, count))?;
    }
    Ok(())
}

fn expect<T: PartialEq>(what: &'static str, io: Io, old: &[T], new: &[T]) -> Result<(), Failed> {
    let Io { offset, len } = io;
    if old == new {
        return Ok(());
    }
    Err(Failed::new(format_args!(
        "{what} of {len} bytes at {offset} differ by page and by segment"
    )))
}
