//! [`Readers`] lets tables be read by anybody while others detach and free them.
//!
//! An operation owns its range, so no table that it can come to is freed under it
//! ([`TableMemory`](super::TableMemory#which-tables-are-read)). A listing owns nothing. It
//! registers here before it reads, section by section, and a table that was detached is freed only
//! when no section is left that may have come to it. Mapping and unmapping do not know of readers:
//! alone the freeing of tables asks whether there are any.
//!
//! # Why no reader sees a freed table
//!
//! A reader registers, has a fence, and reads. A thread that frees has a fence behind the detaching
//! stores, and looks for readers. Of two such fences one is first. If it is the reader's, the
//! freeing thread sees the reader. If it is the other, the reader sees the entries without the
//! links, and comes to no such table.
//!
//! # Why readers that overlap for ever hold nothing up
//!
//! Readers register in one of two generations. What is freed while some are there is put into a
//! place, and moves on from there when the *older* generation is empty: then the generations change
//! their roles, so that new readers register in the other one. Only those of the generation that is
//! the older one now can have come to what was put down before. Their number only falls, and what
//! waited for them is freed with the last.

use core::fmt;

use lock_api::Mutex;

use crate::atomic::{AtomicBool, AtomicU64, Ordering, fence, spin_loop};
use crate::platform::Flag;

/// How many threads put tables down at the same time without meeting.
const PLACES: usize = 4;
/// How often a thread that finds all places taken looks again.
const LOOKS: usize = if cfg!(loom) { 1 } else { 256 };

/// The bit of the state that says which generation new readers are of.
const NEW: u64 = 1;
/// The bits that count the readers of a generation, and one of them.
const COUNTS: [u64; 2] = [0x7fff_ffff << 1, 0xffff_ffff << 32];
const ONES: [u64; 2] = [1 << 1, 1 << 32];

/// Readers of a tree, and the tables that wait for them.
pub(super) struct Readers<L> {
    /// [`NEW`] and [`COUNTS`].
    state: AtomicU64,
    /// Whether there may be tables in `places` or `waiting`.
    pending: AtomicBool,
    /// Tables that readers of both generations may be in. Each lock is only tried, so that an
    /// interrupt does not wait for what it interrupted.
    places: [Mutex<Flag, Option<L>>; PLACES],
    /// Tables that only readers of the older generation can be in. The holder of the lock moves the
    /// generations on.
    waiting: Mutex<Flag, Option<L>>,
}

/// The generation that a reader is registered in.
#[derive(Clone, Copy)]
pub(super) struct Generation(usize);

impl<L> Readers<L> {
    pub(super) fn new() -> Self {
        Self {
            state: AtomicU64::new(0),
            pending: AtomicBool::new(false),
            places: [(); PLACES].map(|()| Mutex::new(None)),
            waiting: Mutex::new(None),
        }
    }

    /// Registers a reader: no table that it comes to from now on is freed before it
    /// [leaves](Self::leave).
    pub(super) fn enter(&self) -> Generation {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let generation = new_of(state);
            let more = state + ONES[generation];
            // Acquires what was detached before the generations changed.
            match self.state.compare_exchange_weak(state, more, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => {
                    fence(Ordering::SeqCst);
                    return Generation(generation);
                }
                Err(now) => state = now,
            }
        }
    }

    /// Ends what [`enter`](Self::enter) began. `append` joins two lists of tables, and `free` frees
    /// those that waited for this reader alone.
    pub(super) fn leave(
        &self,
        generation: Generation,
        append: impl Fn(&mut L, L),
        free: impl Fn(L),
    ) {
        let Generation(generation) = generation;
        let before = self.state.fetch_sub(ONES[generation], Ordering::AcqRel);
        if before & COUNTS[generation] == ONES[generation] {
            fence(Ordering::SeqCst);
            if self.pending.load(Ordering::Relaxed) {
                self.move_on(append, free);
            }
        }
    }

    /// Frees tables that were detached, at once or behind the readers that may be in them.
    #[inline]
    pub(super) fn release(&self, tables: L, append: impl Fn(&mut L, L), free: impl Fn(L)) {
        // Behind the stores that detached them.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Acquire) & !NEW == 0 {
            free(tables);
        } else {
            self.put_down(tables, append, free);
        }
    }

    /// Keeps tables until readers have left.
    #[cold]
    #[inline(never)]
    fn put_down(&self, tables: L, append: impl Fn(&mut L, L), free: impl Fn(L)) {
        let found = (0..LOOKS).find_map(|look| {
            if look > 0 {
                spin_loop();
            }
            self.places.iter().find_map(Mutex::try_lock)
        });
        // Without a place they leak, as tables in a dropped list do. Looks are counted since the
        // caller may have interrupted who has a place. It takes that as many threads as there are
        // places were stopped between these lines, by interrupts that free tables or by others that
        // had their CPUs, for as long as all looks last.
        let Some(mut place) = found else { return };
        add(&mut place, tables, &append);
        drop(place);
        self.pending.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        // The readers that it waited for may have left meanwhile.
        self.move_on(append, free);
    }

    /// Frees what no reader is in, and lets new readers register in the other generation, as long
    /// as there is something to be done and nobody else does it.
    fn move_on(&self, append: impl Fn(&mut L, L), free: impl Fn(L)) {
        loop {
            let Some(mut waiting) = self.waiting.try_lock() else { return };
            let unread = self.turn(&mut waiting, &append);
            drop(waiting);
            if let Some(tables) = unread {
                free(tables);
            }
            // A thread that was refused the lock meanwhile has gone, and relies on this look.
            fence(Ordering::SeqCst);
            let state = self.state.load(Ordering::Relaxed);
            let older = 1 - new_of(state);
            if state & COUNTS[older] != 0 || !self.pending.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Where the older generation is empty: hands out what waited for it, has what was put down
    /// since wait for the newer one, and makes that the older. Returns what no reader is in.
    fn turn(&self, waiting: &mut Option<L>, append: &impl Fn(&mut L, L)) -> Option<L> {
        // Acquires what the readers of the older generation did.
        let state = self.state.load(Ordering::Acquire);
        let new = new_of(state);
        if state & COUNTS[1 - new] != 0 {
            return None;
        }
        let mut unread = waiting.take();
        // Before the places are looked at, so that nothing is put there unseen.
        self.pending.swap(false, Ordering::AcqRel);
        for place in &self.places {
            // The holder of the lock says that something is pending once more.
            if let Some(tables) = place.try_lock().and_then(|mut place| place.take()) {
                add(waiting, tables, append);
            }
        }
        if waiting.is_some() {
            let state = self.state.fetch_xor(NEW, Ordering::AcqRel);
            if state & COUNTS[new] == 0 {
                // There is no reader at all, and those to come see what was detached.
                if let Some(tables) = waiting.take() {
                    add(&mut unread, tables, append);
                }
            } else {
                self.pending.store(true, Ordering::Release);
            }
        }
        unread
    }

    /// All tables that waited. No reader is left.
    pub(super) fn drain(&mut self, mut free: impl FnMut(L)) {
        self.waiting.get_mut().take().into_iter().for_each(&mut free);
        for place in &mut self.places {
            place.get_mut().take().into_iter().for_each(&mut free);
        }
    }
}

impl<L> fmt::Debug for Readers<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readers").finish_non_exhaustive()
    }
}

/// The generation that new readers are of.
fn new_of(state: u64) -> usize {
    usize::from(state & NEW != 0)
}

fn add<L>(to: &mut Option<L>, tables: L, append: &impl Fn(&mut L, L)) {
    match to {
        Some(to) => append(to, tables),
        None => *to = Some(tables),
    }
}
