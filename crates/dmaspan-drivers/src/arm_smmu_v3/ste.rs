//! Stream table entries, and in which order their words are stored.
//!
//! Hardware may read the words of an entry at different times, and keeps what it read until it is
//! told to forget. So an entry changes in steps, with an invalidation and a sync behind each, and
//! whatever mix of the words before and after a step it reads is the one or the other entry
//! (IHI 0070, 3.21.3).

use super::spec::ste;

/// The words of an entry that are not always 0.
pub(super) type Entry = [u64; 4];

/// The entry of a stream that reaches nothing: accesses end with an abort, and nobody is told.
pub(super) const BLOCKED: Entry = [ste::VALID | ste::ABORT, 0, 0, 0];

/// The entry of a stream whose accesses pass.
pub(super) const PASSING: Entry = [ste::VALID | ste::BYPASS, ste::SHCFG_INCOMING, 0, 0];

/// The bits that hardware looks at (5.2).
fn used(entry: &Entry) -> Entry {
    if entry[0] & ste::VALID == 0 {
        return [ste::VALID, 0, 0, 0];
    }
    let none = [0; 4];
    let more = match entry[0] & ste::CONFIG {
        ste::BYPASS => [ste::USED_BYPASS, none],
        ste::STAGE_1 => [ste::USED_BYPASS, ste::USED_STAGE_1],
        ste::STAGE_2 => [ste::USED_BYPASS, ste::USED_STAGE_2],
        ste::ABORT => [none, none],
        // Not of this driver: whatever there is.
        _ => [[u64::MAX; 4], none],
    };
    let of = |word: usize| ste::USED_ALWAYS[word] | more[0][word] | more[1][word];
    [of(0), of(1), of(2), of(3)]
}

/// The words to store, one step after the other, to change `now` to `next`. There is at least one.
///
/// Where what hardware looks at differs in one word, the words that it does not look at yet go
/// before, and that word changes everything at one moment. Where it differs in more, the stream is
/// blocked meanwhile.
pub(super) fn steps(now: &Entry, next: &Entry) -> impl Iterator<Item = Entry> + use<> {
    let (looked_at, will_be) = (used(now), used(next));
    let each = |word: &dyn Fn(usize) -> u64| [word(0), word(1), word(2), word(3)];
    let ahead = each(&|i| now[i] & looked_at[i] | next[i] & !looked_at[i]);
    let differs = each(&|i| (ahead[i] ^ next[i]) & will_be[i]);
    let steps = match differs.iter().filter(|&&bits| bits != 0).count() {
        0 | 1 => {
            let before = each(&|i| if differs[i] == 0 { ahead[i] } else { now[i] });
            let after = each(&|i| if differs[i] == 0 { ahead[i] } else { next[i] });
            [Some(before).filter(|before| before != now && *before != after), Some(after), None]
        }
        _ => {
            let blocked = BLOCKED[0];
            let before = [blocked, now[1], now[2], now[3]];
            let after = [blocked, next[1], next[2], next[3]];
            [Some(before), Some(after), Some(*next)]
        }
    };
    steps.into_iter().flatten()
}

#[cfg(test)]
mod tests;
