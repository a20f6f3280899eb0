//! The same operations by several CPUs in turn, for a reader of what they access, as
//! `xtask/peers/bench/contention.h` has them: CPUs take turns, so that no lock is waited for, and
//! each operation begins and ends with a store to an address of its own. These addresses are
//! announced on stderr, where valgrind's lackey writes as well.

use std::array;
use std::cell::Cell;
use std::env;
use std::fs;
use std::hint::spin_loop;
use std::io::{self, PipeReader, PipeWriter, Read as _, Write as _};
use std::mem::{self, MaybeUninit};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering, compiler_fence};
use std::thread;
use std::time::{Duration, Instant};

use super::{cpu, memory};

/// CPUs that take turns.
pub(crate) const CPUS: usize = 4;
/// Operations of each kind in a turn.
pub(crate) const BATCH: usize = 16;
/// Turns of each CPU that fill caches, and are not marked.
const TURNS_BEFORE: usize = 48;
const TURNS: usize = 32;

/// Whether CPUs take turns in this process, and nothing is timed.
pub(crate) fn is_asked() -> bool {
    static IS_ASKED: OnceLock<bool> = OnceLock::new();
    *IS_ASKED.get_or_init(|| env::var_os("PEERS_CONTENTION").is_some())
}

#[derive(Clone, Copy)]
enum Operation {
    Map,
    Unmap,
}

/// Where an operation begins and where it ends, on cache lines of their own.
type Edges = [[AtomicU8; 64]; 2];

/// By operation; those of a CPU share no page with another's.
#[repr(align(4096))]
struct Marks([Edges; 2]);

impl Marks {
    const fn new() -> Self {
        Self([const { [const { [const { AtomicU8::new(0) }; 64] }; 2] }; 2])
    }
}

static MARKS: [Marks; CPUS] = [const { Marks::new() }; CPUS];
/// Of the turns before, which are announced to nobody.
static BEFORE: [Marks; CPUS] = [const { Marks::new() }; CPUS];

/// A CPU whose turn it is.
pub(crate) struct Turn {
    pub(crate) cpu: usize,
    marks: Cell<&'static Marks>,
}

impl Turn {
    #[inline(always)]
    fn marked<T>(&self, operation: Operation, work: impl FnOnce() -> T) -> T {
        let [begin, end] = &self.marks.get().0[operation as usize];
        compiler_fence(Ordering::SeqCst);
        begin[0].store(1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        let result = work();
        compiler_fence(Ordering::SeqCst);
        end[0].store(1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        result
    }

    /// Maps a batch, by the number of each, and unmaps it.
    #[inline(always)]
    pub(crate) fn batch<T>(&self, mut map: impl FnMut(u64) -> T, mut unmap: impl FnMut(T)) {
        let mut held: [Option<T>; BATCH] = array::from_fn(|_| None);
        for (nth, place) in (0..).zip(&mut held) {
            *place = Some(self.marked(Operation::Map, || map(nth)));
        }
        for place in &mut held {
            if let Some(mapped) = place.take() {
                self.marked(Operation::Unmap, || unmap(mapped));
            }
        }
    }
}

/// Announces what the reader has to know, and lets all CPUs do their work in turn.
pub(crate) fn take_turns(work: impl Fn(&Turn) + Sync) {
    announce_all();
    let (readers, mut writers): (Vec<PipeReader>, Vec<PipeWriter>) =
        (0..CPUS).map(|_| io::pipe().expect("a pipe")).unzip();
    let mut first = writers[0].try_clone().expect("a descriptor");
    // Each has the writer of the next one.
    writers.rotate_left(1);
    thread::scope(|scope| {
        for (cpu, (token, next)) in readers.into_iter().zip(writers).enumerate() {
            let work = &work;
            scope.spawn(move || turns(cpu, token, next, work));
        }
        first.write_all(&[0]).expect("a turn is given");
    });
}

fn turns(cpu: usize, mut token: PipeReader, mut next: PipeWriter, work: &impl Fn(&Turn)) {
    memory::run_on(cpu);
    announce_stack(cpu);
    let turn = Turn { cpu, marks: Cell::new(&BEFORE[cpu]) };
    for nth in 0..TURNS_BEFORE + TURNS {
        token.read_exact(&mut [0]).expect("a turn is given");
        // By then the CPU that gave the turn waits for its next one.
        thread::sleep(Duration::from_millis(2));
        if nth == TURNS_BEFORE {
            turn.marks.set(&MARKS[cpu]);
        }
        work(&turn);
        next.write_all(&[0]).expect("a turn is given");
    }
    // A thread that ends does much, which is to be in no operation of another's.
    token.read_exact(&mut [0]).expect("all have had their turns");
    // Nobody waits for the last one, and the pipe is there for it.
    let _ = next.write_all(&[0]);
    mem::forget(token);
}

/// A line in one piece, since others write there too.
fn announce(text: &str) {
    let line = format!("contention {text}\n");
    io::stderr().write_all(line.as_bytes()).expect("stderr is read");
}

fn announce_all() {
    let mappings = fs::read_to_string("/proc/self/maps").expect("what is mapped");
    mappings.lines().for_each(|line| announce(&format!("mapping {line}")));
    let tables = memory::range();
    announce(&format!("tables {:x} {:x}", tables.start, tables.end));
    for (cpu, marks) in MARKS.iter().enumerate() {
        for (name, edges) in ["map", "unmap"].iter().zip(&marks.0) {
            for (edge, mark) in ["begin", "end"].iter().zip(edges) {
                announce(&format!("mark {:x} {cpu} {name} {edge}", (&raw const *mark).addr()));
            }
        }
    }
}

fn announce_stack(cpu: usize) {
    let mut attr = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let (mut start, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: a thread that runs asks for itself.
    let thread = unsafe { libc::pthread_self() };
    // SAFETY: the attributes are written here.
    let mut failed = unsafe { libc::pthread_getattr_np(thread, attr.as_mut_ptr()) };
    // SAFETY: they were written above, and the others are variables.
    failed |= unsafe { libc::pthread_attr_getstack(attr.as_ptr(), &raw mut start, &raw mut bytes) };
    // SAFETY: they are used no more.
    failed |= unsafe { libc::pthread_attr_destroy(attr.as_mut_ptr()) };
    assert_eq!(failed, 0, "where is the stack?");
    announce(&format!("stack {cpu} {:x} {:x}", start.addr(), start.addr() + bytes));
}

/// Prints how long a cache line takes from one CPU to another: two threads add to it by turns. The
/// shortest time counts, since what else runs only makes it longer; nothing is printed where there
/// are not two CPUs.
pub(crate) fn time_line() {
    const ROUNDS: usize = 101;
    const TIMES: u32 = 1000;
    if cpu::allowed().len() < cpu::MAX {
        return;
    }
    let round = || {
        let line = AtomicU32::new(0);
        let took = cpu::race(cpu::MAX, |nth, barrier| {
            cpu::pin(nth);
            barrier.wait();
            let start = Instant::now();
            for time in 0..TIMES {
                let mine = 2 * time + u32::from(nth == 1);
                while line.load(Ordering::Acquire) != mine {
                    spin_loop();
                }
                line.store(mine + 1, Ordering::Release);
            }
            start.elapsed()
        });
        took.as_nanos() as f64 / f64::from(2 * TIMES)
    };
    let shortest = (0..ROUNDS).map(|_| round()).fold(f64::INFINITY, f64::min);
    println!("line transfer {shortest:.3}");
}
