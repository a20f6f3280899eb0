//! The parts that the tests share.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::process::{self, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dmaspan_linux::fixed::{Completion, FixedPool, FixedRing, MemoryChoice, PoolOptions};
use dmaspan_linux::{HugetlbReservation, MemoryKind};

pub(crate) use crate::charged::charged;
use crate::charged::status;

/// The bytes that this process has pinned. Other tests pin too, so who counts runs alone; see
/// [`again`].
pub(crate) fn pinned() -> u64 {
    status("VmPin")
}

/// A generator of test values (the constants are Knuth's MMIX).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    pub(crate) fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }
}

/// The byte of test files at an offset.
pub(crate) fn pattern(offset: usize) -> u8 {
    u8::try_from((offset ^ offset >> 8 ^ offset >> 16) & 0xff).unwrap()
}

/// A new file, of no name, with these bytes. `flags` are for open(2).
pub(crate) fn file_with(bytes: &[u8], flags: i32) -> Option<Arc<File>> {
    use std::os::unix::fs::OpenOptionsExt;

    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = env::temp_dir().join(format!("dmaspan-fixed-{}-{number}", process::id()));
    fs::write(&path, bytes).unwrap();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path);
    fs::remove_file(&path).unwrap();
    opened.inspect_err(|error| eprintln!("SKIP: {error}")).ok().map(Arc::new)
}

/// The size of the kernel's own page.
pub(crate) fn page() -> u64 {
    MemoryKind::Base.page_size()
}

/// A pool of one kind of memory, whose slices are at least so long: of whole pages. `None` where
/// there is none, with the reason printed.
pub(crate) fn pool(kind: MemoryKind, slice_len: u64, slices: u32) -> Option<FixedPool> {
    let slice_len = slice_len.next_multiple_of(page());
    // With room for what no slice uses, at the end of each buffer.
    let len = slice_len * u64::from(slices) * 2;
    let reservation = match HugetlbReservation::for_memory(kind, len) {
        Ok(reservation) => reservation,
        Err(error) => {
            eprintln!("SKIP: {error}");
            return None;
        }
    };
    let options = PoolOptions::new(slice_len, slices).memory(MemoryChoice::Only(kind));
    // Pools of more than this are several buffers.
    let options = options.buffer_len((4 << 20).max(kind.page_size()));
    let pool = FixedPool::new(&options).unwrap();
    // Pages in use stay until the memory goes.
    drop(reservation);
    Some(pool)
}

pub(crate) fn base(slice_len: u64, slices: u32) -> FixedPool {
    pool(MemoryKind::Base, slice_len, slices).unwrap()
}

/// A ring for a pool. `None` where io_uring is not had.
pub(crate) fn ring(pool: &FixedPool, depth: u32) -> Option<FixedRing> {
    FixedRing::new(pool, depth).inspect_err(|error| eprintln!("SKIP: {error}")).ok()
}

/// The next operation to be done, which is waited for.
pub(crate) fn wait(ring: &mut FixedRing) -> Completion {
    loop {
        if let Some(done) = ring.completion() {
            return done;
        }
        ring.submit_and_wait(1).unwrap();
    }
}

/// Names the part that this program plays when a test starts it again.
const ROLE: &str = "DMASPAN_TEST_ROLE";

/// Runs the test `name` of this folder again, in a process that is its own, and passes as it
/// does. `None` in that second run, which is to do the work.
pub(crate) fn again(name: &str) -> Option<()> {
    if env::var_os(ROLE).is_some() {
        return None;
    }
    let test = format!("fixed::{name}");
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args(["--exact", &test, "--nocapture"]).env(ROLE, name).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    eprintln!("{errors}");
    Some(())
}
