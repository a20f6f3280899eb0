//! The switch of a copy of the tree that has many changes in it: none is in force but the one that
//! the environment names.

extern crate std;

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::io::Write as _;

/// The change in force, and 0 for none.
static CHOSEN: AtomicU32 = AtomicU32::new(0);
/// Where it is noted which changes a program came by, and by which it came already.
static NOTES: std::sync::OnceLock<std::fs::File> = std::sync::OnceLock::new();
static SEEN: [AtomicBool; 1 << 16] = [const { AtomicBool::new(false) }; 1 << 16];

/// Called before `main`, since tests count allocations and make them fail.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    if let Some(number) = std::env::var("DMASPAN_MUTANT").ok().and_then(|it| it.parse().ok()) {
        CHOSEN.store(number, Relaxed);
    }
    if let Ok(file) = std::env::var("DMASPAN_MUTANTS_SEEN") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
        let _ = file.map(|file| NOTES.set(file));
    }
}

/// Whether the change with this number is in force.
#[inline(always)]
pub fn at(number: u32) -> bool {
    if CHOSEN.load(Relaxed) == number {
        return true;
    }
    if let Some(mut notes) = NOTES.get()
        && !SEEN[number as usize].swap(true, Relaxed)
    {
        let _ = notes.write_all(&number.to_le_bytes());
    }
    false
}
