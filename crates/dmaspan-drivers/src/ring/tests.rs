//! A ring and hardware that is made here. With `--cfg loom` the threads of a test run in all
//! interleavings that there are, and with all values that the orderings let a load see.

#[path = "../../tests/shared/patience.rs"]
mod patience;

use alloc::sync::Arc;

use dmaspan::PhysAddr;
#[cfg(loom)]
use loom::thread;
#[cfg(not(loom))]
use std::thread;

use super::*;
use patience::Patience;

/// A command that is nothing but a fence.
const FENCE: u64 = 0xf;
/// log2 of the places.
const LG2: u32 = 4;

/// How the hardware knows that a fence is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Done {
    ByHead,
    ByNumber,
}

/// Hardware that takes commands when it is told to.
struct Hardware {
    ring: Ring<Patience>,
    host: Patience,
    done: Done,
    /// What it was told, and how far it is.
    tail: AtomicU64,
    head: AtomicU64,
    /// The number that it stored last.
    number: AtomicU64,
    /// Whether it stopped at a command.
    is_stopped: AtomicBool,
    /// Whether it answers nothing any more; none of loom's, since one thread alone sets it.
    is_gone: std::sync::atomic::AtomicBool,
    /// How often it was told of a tail.
    tells: std::sync::atomic::AtomicU64,
    /// How often it was asked for room.
    rooms: std::sync::atomic::AtomicU64,
    /// The command that it refuses.
    bad: u64,
    /// Which commands it carried out: loom's, so that a test may look only behind a fence.
    carried_out: [AtomicU64; 8],
    fences: AtomicU64,
}

impl Hardware {
    fn new(done: Done, bad: u64, patience: u32) -> Arc<Self> {
        let host = Patience::new(patience);
        let words = Words::new(&host, LG2 + 4, PhysAddr::new(u64::MAX)).unwrap();
        let ring = Ring::new(words, LG2, 1, Full::EmptyPlace);
        // Loom's locks are made with their first use, before there are threads.
        ring.locked(|_| ());
        Arc::new(Self {
            ring,
            host,
            done,
            tail: AtomicU64::new(0),
            head: AtomicU64::new(0),
            number: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            is_gone: std::sync::atomic::AtomicBool::new(false),
            tells: std::sync::atomic::AtomicU64::new(0),
            rooms: std::sync::atomic::AtomicU64::new(0),
            bad,
            carried_out: core::array::from_fn(|_| AtomicU64::new(0)),
            fences: AtomicU64::new(0),
        })
    }

    /// Carries out a command, if there is one and it goes. Says whether it did.
    fn step(&self) -> bool {
        let (head, tail) = (self.head.load(Ordering::Acquire), self.tail.load(Ordering::Acquire));
        if head == tail || self.is_stopped.load(Ordering::Acquire) {
            return false;
        }
        let [command, end] = self.ring.shown(head).0;
        if command == self.bad {
            self.is_stopped.store(true, Ordering::Release);
            return false;
        }
        if command == FENCE {
            self.fences.fetch_add(1, Ordering::Relaxed);
            self.number.store(end, Ordering::Release);
        } else {
            let nth = usize::try_from(command).unwrap_or(0) & 7;
            self.carried_out[nth].store(1, Ordering::Relaxed);
        }
        self.head.store((head + 1) & lg2::mask(LG2), Ordering::Release);
        true
    }

    /// Has a command carried out. Where it is said to be, it was.
    fn run(&self, command: u64) -> Result<(), HardwareError> {
        self.ring.run(self, 1, [[command, 0]])?;
        assert!(self.is_carried_out(command), "{command} was not carried out");
        Ok(())
    }

    fn is_carried_out(&self, command: u64) -> bool {
        self.carried_out[usize::try_from(command).unwrap_or(0) & 7].load(Ordering::Relaxed) == 1
    }

    /// Places a command without a thread that waits for it yet.
    fn begin(&self, command: u64) -> Batch {
        self.ring.place(self, 1, [[command, 0]], Behind::Fence).unwrap()
    }
}

impl Consumer<Patience> for Hardware {
    fn host(&self) -> &Patience {
        &self.host
    }

    fn fence(&self, _ring: &Ring<Patience>, end: u64) -> [u64; 2] {
        [FENCE, end]
    }

    fn tell(&self, ring: &Ring<Patience>, tail: u64) {
        self.tells.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        self.tail.store(ring.index(tail), Ordering::Release);
    }

    fn done(&self, ring: &Ring<Patience>) -> u64 {
        match self.done {
            Done::ByHead => ring.head(),
            Done::ByNumber => ring.stored(|| self.number.load(Ordering::Acquire), u64::BITS),
        }
    }

    fn ask(&self, asking: &Asking<'_, Patience>, need: Need) -> Result<Option<u32>, HardwareError> {
        if self.is_gone.load(core::sync::atomic::Ordering::Acquire) {
            return Err(HardwareError { what: "gone", status: 0 });
        }
        #[cfg(not(loom))]
        assert!(asking.ring.seen.is_asked.load(Ordering::Relaxed), "others are not told");
        let room = u64::from(need == Need::Room);
        self.rooms.fetch_add(room, core::sync::atomic::Ordering::Relaxed);
        if need == Need::Room || self.done == Done::ByHead {
            assert!(asking.advance(self.head.load(Ordering::Acquire)));
        }
        Ok(self.is_stopped.load(Ordering::Acquire).then_some(7))
    }

    fn recover(
        &self,
        locked: &mut Locked<'_, Patience>,
        stopped: u32,
    ) -> Result<(), HardwareError> {
        let ring = locked.ring();
        let behind = locked.left(self.head.load(Ordering::Acquire));
        for position in ring.tail() - behind..ring.tail() {
            ring.set(position, [0, 0]);
        }
        locked.spoil(stopped);
        self.is_stopped.store(false, Ordering::Release);
        Ok(())
    }

    fn failed(&self, status: u32) -> HardwareError {
        HardwareError { what: "failed", status: status.into() }
    }

    fn stuck(&self, at: Stuck, _start: Option<u64>) -> HardwareError {
        let what = match at {
            Stuck::Full => "full",
            Stuck::Late => "late",
        };
        HardwareError { what, status: 0 }
    }
}

/// Runs a test in all interleavings with three preemptions, or often.
fn model(test: impl Fn() + Send + Sync + 'static) {
    #[cfg(loom)]
    {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(test);
    }
    #[cfg(not(loom))]
    (0..200).for_each(|_| test());
}

/// One thread runs the command 2 while another runs the command 1, and is the hardware: it takes so
/// many steps before it waits, and so many afterwards.
fn two_threads(done: Done, bad: u64, before: u32, after: u32) -> [Result<(), HardwareError>; 2] {
    let hardware = Hardware::new(done, bad, 2);
    let other = Arc::clone(&hardware);
    let other = thread::spawn(move || other.run(2));
    let batch = hardware.begin(1);
    (0..before).for_each(|_| _ = hardware.step());
    let ran = hardware.ring.wait(&*hardware, batch);
    if ran.is_ok() {
        assert!(hardware.is_carried_out(1));
    }
    (0..after).for_each(|_| _ = hardware.step());
    [ran, other.join().unwrap()]
}

#[test]
fn what_is_done_by_the_head_was_carried_out_before() {
    model(|| {
        let ran = two_threads(Done::ByHead, u64::MAX, 4, 2);
        assert!(ran.iter().flatten().count() > 0 || ran[0].is_err_and(|e| e.what == "late"));
    });
}

#[test]
fn what_is_done_by_a_number_was_carried_out_before() {
    model(|| {
        let ran = two_threads(Done::ByNumber, u64::MAX, 4, 2);
        assert!(ran.iter().flatten().count() > 0 || ran[0].is_err_and(|e| e.what == "late"));
    });
}

#[test]
fn a_batch_with_a_bad_command_is_never_done() {
    model(|| assert!(two_threads(Done::ByHead, 1, 2, 3)[0].is_err()));
    model(|| assert!(two_threads(Done::ByNumber, 2, 4, 1)[1].is_err()));
}

/// Where no thread but the test's own is.
#[cfg(not(loom))]
mod alone {
    use alloc::vec::Vec;

    use super::patience::{TRIED, WAITED};
    use super::*;

    /// Hardware takes all that it can.
    fn go(hardware: &Hardware) {
        while hardware.step() {}
    }

    fn fences(hardware: &Hardware) -> u64 {
        hardware.fences.load(Ordering::Relaxed)
    }

    #[test]
    fn two_batches_bring_their_fences_and_those_behind_share_one() {
        for done in [Done::ByHead, Done::ByNumber] {
            let hardware = Hardware::new(done, u64::MAX, 2);
            let first = hardware.begin(1);
            assert_eq!(first, Batch { start: 0, end: 2, fence: Some(2) });
            let ring = &hardware.ring;
            let second = ring.place(&*hardware, 1, [], Behind::Fence).unwrap();
            assert_eq!(second.fence, Some(3));
            // A third one has no fence: hardware has two to do.
            let third = hardware.begin(3);
            assert_eq!((third.fence, third.end), (None, 4));
            assert!(hardware.step() && hardware.step());
            assert_eq!(ring.wait(&*hardware, first), Ok(()));
            let fourth = hardware.begin(4);
            // The first is done, so this one has a fence, and it is the third's as well.
            assert_eq!(fourth.fence, Some(6));
            go(&hardware);
            for batch in [third, second, fourth] {
                assert_eq!(ring.wait(&*hardware, batch), Ok(()));
            }
            assert_eq!(fences(&hardware), 3);
        }
    }

    #[test]
    fn one_who_waits_places_the_fence_that_nobody_brought() {
        for done in [Done::ByHead, Done::ByNumber] {
            let hardware = Hardware::new(done, u64::MAX, 3);
            let ring = &hardware.ring;
            let fences_of = [(); 2].map(|()| ring.place(&*hardware, 1, [], Behind::Fence).unwrap());
            let batch = hardware.begin(1);
            assert_eq!(batch.fence, None);
            // Hardware does nothing: two fences are under way, and there is no third.
            assert_eq!(ring.wait(&*hardware, batch).unwrap_err().what, "late");
            assert_eq!(ring.tail(), 3);
            go(&hardware);
            for fence in fences_of {
                assert_eq!(ring.wait(&*hardware, fence), Ok(()));
            }
            // It is placed by this look, and done by none.
            assert_eq!(ring.wait(&*hardware, batch).unwrap_err().what, "late");
            assert_eq!(ring.tail(), 4);
            go(&hardware);
            assert_eq!(ring.wait(&*hardware, batch), Ok(()));
        }
    }

    #[test]
    fn a_batch_that_fills_the_ring_is_placed_whole_and_its_fence_waits_for_room() {
        for done in [Done::ByHead, Done::ByNumber] {
            let hardware = Hardware::new(done, u64::MAX, 3);
            let (ring, full) = (&hardware.ring, hardware.ring.capacity());
            let commands = (0..full).map(|_| [1, 0]);
            let batch = ring.place(&*hardware, 1, commands, Behind::Nothing).unwrap();
            assert_eq!((batch.fence, batch.end, ring.tail()), (None, full, full));
            assert_eq!(ring.wait(&*hardware, batch).unwrap_err().what, "late");
            assert_eq!(ring.tail(), full, "a command that was not fetched yet is overwritten");
            go(&hardware);
            let _ = ring.wait(&*hardware, batch);
            go(&hardware);
            assert_eq!(ring.wait(&*hardware, batch), Ok(()));
        }
    }

    #[test]
    fn what_was_noted_as_over_does_not_come_back() {
        let hardware = Hardware::new(Done::ByHead, u64::MAX, 3);
        let ring = &hardware.ring;
        let batch = hardware.begin(1);
        ring.locked(|locked| locked.spoil(7));
        ring.look(&*hardware, Need::Done).unwrap();
        assert_eq!(ring.seen.done.load(Ordering::Acquire), batch.end, "hardware took nothing");
    }

    #[test]
    fn a_batch_without_commands_waits_for_a_fence_that_comes_after_it() {
        let hardware = Hardware::new(Done::ByHead, u64::MAX, 3);
        let ring = &hardware.ring;
        let empty = || ring.place(&*hardware, 1, [], Behind::Fence).unwrap();
        let _two = [empty(), empty()];
        let batch = empty();
        assert_eq!(batch, Batch { start: 2, end: 2, fence: None });
        go(&hardware);
        // The fences before it are done, and its own is placed by the first look.
        assert_eq!(ring.wait(&*hardware, batch).unwrap_err().what, "late");
        assert_eq!(ring.tail(), 3);
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, batch), Ok(()));
    }

    #[test]
    fn hardware_that_lost_two_fences_gets_others() {
        let hardware = Hardware::new(Done::ByNumber, u64::MAX, 3);
        let ring = &hardware.ring;
        for _ in 0..2 {
            let lost = ring.place(&*hardware, 1, [], Behind::Fence).unwrap();
            ring.set(lost.start, [0, 0]);
            go(&hardware);
            assert_eq!(ring.wait(&*hardware, lost).unwrap_err().what, "late");
        }
        let batch = hardware.begin(1);
        assert_eq!(batch.fence, Some(4));
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, batch), Ok(()));
        // One that somebody gave up, and one that nobody waits for.
        let lose = || {
            let lost = ring.place(&*hardware, 1, [], Behind::Fence).unwrap();
            ring.set(lost.start, [0, 0]);
            go(&hardware);
            lost
        };
        assert_eq!(ring.wait(&*hardware, lose()).unwrap_err().what, "late");
        lose();
        let batch = hardware.begin(2);
        assert_eq!(batch.fence, Some(batch.end));
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, batch), Ok(()));
        // Also where nobody waits for them, but for room behind them.
        let lost = [(); 2].map(|()| ring.place(&*hardware, 1, [], Behind::Fence).unwrap());
        lost.iter().for_each(|fence| ring.set(fence.start, [0, 0]));
        let commands = (2..ring.capacity()).map(|_| [1, 0]);
        let _ = ring.place(&*hardware, 1, commands, Behind::Nothing).unwrap();
        let full = ring.place(&*hardware, 1, [[2, 0]], Behind::Fence);
        assert_eq!(full.unwrap_err().what, "full");
        go(&hardware);
        let batch = hardware.begin(3);
        assert_eq!(batch.fence, Some(batch.end));
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, batch), Ok(()));
    }

    #[test]
    fn a_number_is_that_of_a_batch_that_waits_or_changes_nothing() {
        let hardware = Hardware::new(Done::ByNumber, u64::MAX, 3);
        let ring = &hardware.ring;
        ring.placed.tail.store((1 << 32) + 5, Ordering::Release);
        let done = (1 << 32) - 3;
        ring.seen.done.store(done, Ordering::Release);
        for number in [(1 << 32) - 3, (1 << 32) - 4, 6, 1 << 31] {
            assert_eq!(ring.stored(|| number, 32), done, "{number:#x}");
        }
        assert_eq!(ring.stored(|| 2, 32), (1 << 32) + 2);
        assert_eq!(ring.stored(|| 4, u64::BITS), done);
        assert_eq!(ring.stored(|| (1 << 32) + 5, u64::BITS), (1 << 32) + 5);
    }

    /// Every tail, what is noted as done, and every number, against the sentence that says it.
    #[test]
    fn a_number_is_the_last_position_up_to_the_tail_that_waits_and_has_its_bits() {
        let hardware = Hardware::new(Done::ByNumber, u64::MAX, 3);
        let ring = &hardware.ring;
        for bits in 1..=4 {
            for (tail, back) in (0..40u64).flat_map(|tail| (0..=16).map(move |back| (tail, back))) {
                let Some(done) = tail.checked_sub(back) else { continue };
                ring.placed.tail.store(tail, Ordering::Release);
                ring.seen.done.store(done, Ordering::Release);
                for number in 0..1 << bits {
                    let is = |position: &u64| *position & lg2::mask(bits) == number;
                    let last = (done..=tail).rev().take(1 << bits).find(is);
                    let found = ring.stored(|| number, bits);
                    assert_eq!(found, last.unwrap_or(done), "{bits}: {done}..={tail}, {number}");
                }
            }
        }
    }

    #[test]
    fn positions_are_noted_before_half_a_number_tells_them_no_more() {
        let hardware = Hardware::new(Done::ByNumber, u64::MAX, 3);
        let (ring, far) = (&hardware.ring, DISTANCE + 16);
        for position in [&ring.placed.tail, &ring.seen.head, &hardware.number] {
            position.store(far, Ordering::Release);
        }
        // Nobody asked hardware since the first command.
        assert_eq!(ring.seen.done.load(Ordering::Acquire), 0);
        let batch = hardware.begin(1);
        assert_eq!(ring.seen.done.load(Ordering::Acquire), far);
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, batch), Ok(()));
    }

    #[test]
    fn what_began_before_an_error_has_failed_and_nothing_after() {
        let hardware = Hardware::new(Done::ByHead, 1, 3);
        let ring = &hardware.ring;
        let bad = hardware.begin(1);
        go(&hardware);
        ring.look(&*hardware, Need::Done).unwrap();
        assert_eq!(ring.wait(&*hardware, bad).unwrap_err().what, "failed");
        go(&hardware);
        let good = hardware.begin(2);
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, good), Ok(()));
        assert!(ring.is_spoiled(bad.start) && !ring.is_spoiled(good.start));
    }

    #[test]
    fn a_head_behind_the_tail_is_no_head() {
        let hardware = Hardware::new(Done::ByHead, u64::MAX, 3);
        let ring = &hardware.ring;
        let _ = hardware.begin(1);
        let asking = ring.seen.lock.lock();
        let asking = Asking::new(ring, &asking);
        assert!(!asking.advance(3) && ring.head() == 0);
        assert!(asking.advance(2) && ring.head() == 2);
        assert!(!asking.advance(1) && ring.head() == 2);
    }

    #[test]
    fn a_look_waits_for_no_lock_but_the_last_and_tries_none_that_another_has() {
        for done in [Done::ByHead, Done::ByNumber] {
            let hardware = Hardware::new(done, u64::MAX, 50);
            let ring = &hardware.ring;
            let batch = hardware.begin(1);
            // The last look of all is in its turn: nobody says that there was none.
            let before = (WAITED.get(), TRIED.get());
            assert_eq!(ring.wait(&*hardware, batch).unwrap_err().what, "late");
            assert_eq!((WAITED.get() - before.0, TRIED.get() - before.1), (1, 51));
            // While another one asks, a caller does nothing but look, and keeps its patience.
            ring.seen.is_asked.store(true, Ordering::Relaxed);
            let before = (WAITED.get(), TRIED.get());
            let mut looks = 0;
            let waited = thread::scope(|scope| {
                scope.spawn(|| {
                    while hardware.host.calls() < 1000 {
                        thread::yield_now();
                    }
                    go(&hardware);
                    ring.seen.is_asked.store(false, Ordering::Relaxed);
                });
                looks = hardware.host.calls();
                ring.wait(&*hardware, batch)
            });
            assert_eq!(waited, Ok(()));
            assert!(hardware.host.calls() - looks > 50);
            assert_eq!(WAITED.get() - before.0, 0);
            assert!(TRIED.get() - before.1 <= 51);
            // Also one that waits for another's fence.
            let fence = |_| ring.place(&*hardware, 1, [], Behind::Fence).unwrap();
            (0..2).for_each(|nth| _ = fence(nth));
            let batch = hardware.begin(2);
            let before = WAITED.get();
            let _ = ring.wait(&*hardware, batch);
            assert_eq!((WAITED.get() - before, batch.fence), (1, None));
        }
    }

    #[test]
    fn a_batch_without_room_keeps_its_patience_while_another_asks_and_hears_an_error_at_once() {
        let hardware = Hardware::new(Done::ByHead, u64::MAX, 50);
        let (ring, full) = (&hardware.ring, hardware.ring.capacity());
        let commands = (0..full).map(|_| [1, 0]);
        let _ = ring.place(&*hardware, 1, commands, Behind::Nothing).unwrap();
        ring.seen.is_asked.store(true, Ordering::Relaxed);
        let placed = thread::scope(|scope| {
            scope.spawn(|| {
                while hardware.host.calls() < 1000 {
                    thread::yield_now();
                }
                go(&hardware);
                ring.seen.is_asked.store(false, Ordering::Relaxed);
            });
            ring.place(&*hardware, 1, [[2, 0]], Behind::Nothing)
        });
        assert_eq!(placed.map(|batch| batch.start), Ok(full));
        let tells = hardware.tells.load(core::sync::atomic::Ordering::Relaxed);
        assert_eq!(tells, 2, "hardware is told of what was placed alone");
        // A ring that is full again, at hardware that does not come back.
        let commands = (0..full - 1).map(|_| [1, 0]);
        let _ = ring.place(&*hardware, 1, commands, Behind::Nothing).unwrap();
        hardware.is_gone.store(true, Ordering::Release);
        let looks = hardware.host.calls();
        let placed = ring.place(&*hardware, 1, [[2, 0]], Behind::Nothing);
        assert_eq!(placed.unwrap_err().what, "gone");
        assert_eq!(hardware.host.calls(), looks, "nobody waits for it");
    }

    #[test]
    fn hardware_is_asked_for_what_memory_does_not_say_alone() {
        let hardware = Hardware::new(Done::ByNumber, u64::MAX, 3);
        let ring = &hardware.ring;
        let before = TRIED.get();
        let batch = hardware.begin(1);
        go(&hardware);
        assert_eq!(ring.wait(&*hardware, batch), Ok(()));
        assert_eq!(TRIED.get(), before, "there was room, and it was done");
        let late = hardware.begin(2);
        assert_eq!(ring.wait(&*hardware, late).unwrap_err().what, "late");
        assert_eq!(hardware.rooms.load(core::sync::atomic::Ordering::Relaxed), 0);
    }

    #[test]
    fn the_last_look_for_room_waits_for_who_asks() {
        for done in [Done::ByHead, Done::ByNumber] {
            let hardware = Hardware::new(done, u64::MAX, 50);
            let ring = &hardware.ring;
            let commands = (0..ring.capacity()).map(|_| [1, 0]);
            let _ = ring.place(&*hardware, 1, commands, Behind::Nothing).unwrap();
            let before = (WAITED.get(), TRIED.get());
            let full = ring.place(&*hardware, 1, [[2, 0]], Behind::Nothing);
            assert_eq!(full.unwrap_err().what, "full");
            // Each look takes the lock of those who place. The last one has both, and room that it
            // finds is taken.
            assert_eq!((WAITED.get() - before.0, TRIED.get() - before.1), (51 + 3, 51 + 1));
        }
    }

    #[test]
    fn a_list_that_does_not_know_its_length_is_placed_whole_and_ends() {
        let hardware = Hardware::new(Done::ByHead, u64::MAX, 3);
        let mut left = 3;
        let commands = core::iter::from_fn(|| {
            left -= i32::from(left > 0);
            (left > 0).then_some([1, 0])
        });
        let batch = hardware.ring.place(&*hardware, 1, commands, Behind::Nothing).unwrap();
        assert_eq!((batch.start, batch.end), (0, 2));
    }

    #[test]
    fn eight_threads_whose_commands_wait_have_three_fences() {
        for done in [Done::ByHead, Done::ByNumber] {
            let hardware = Hardware::new(done, u64::MAX, u32::MAX);
            thread::scope(|scope| {
                let spawn = |nth| {
                    let hardware = &hardware;
                    scope.spawn(move || hardware.run(nth))
                };
                let threads: Vec<_> = (0..8).map(spawn).collect();
                // Hardware is told of all commands, and of two fences, before it takes any.
                while hardware.tail.load(Ordering::Acquire) < 10 {
                    thread::yield_now();
                }
                while threads.iter().any(|thread| !thread.is_finished()) {
                    hardware.step();
                    thread::yield_now();
                }
                threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
            });
            assert_eq!(fences(&hardware), 3);
        }
    }
}
