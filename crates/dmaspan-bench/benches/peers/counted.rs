//! Counting under callgrind: all of a process, by its rounds, or one operation alone.

use std::arch::asm;
use std::env;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// The request to callgrind that switches counting on or off.
const TOGGLE_COLLECT: u64 = 0x4354_0002;

/// The round that has begun.
static ROUND: AtomicU32 = AtomicU32::new(0);

/// How many rounds there are under a counter of instructions.
pub(crate) fn rounds() -> Option<u32> {
    env::var("PEERS_COUNTED_ROUNDS").ok().and_then(|text| text.parse().ok())
}

/// A round begins.
pub(crate) fn begin(round: u32) {
    ROUND.store(round, Ordering::Relaxed);
}

/// Does it, and has it counted where it is the operation that is asked for and its first round was
/// before.
#[inline(always)]
pub(crate) fn only(operation: &str, run: impl FnOnce()) {
    let is_counted = is_counted(operation);
    if is_counted {
        toggle();
    }
    run();
    if is_counted {
        toggle();
    }
}

#[inline(never)]
fn is_counted(operation: &str) -> bool {
    static ASKED: OnceLock<Option<String>> = OnceLock::new();
    let asked = ASKED.get_or_init(|| env::var("PEERS_COUNTED_OP").ok());
    // `unmap_rest` leaves out look-ups of addresses, of which there are none here.
    let is_asked = asked.as_deref().is_some_and(|asked| asked.starts_with(operation));
    ROUND.load(Ordering::Relaxed) > 0 && is_asked
}

/// Asks valgrind. Elsewhere the instructions do nothing together.
#[inline(never)]
fn toggle() {
    let request = [TOGGLE_COLLECT, 0, 0, 0, 0, 0];
    // SAFETY: what `rdi` and `rbx` have is the same afterwards, and valgrind reads the request.
    unsafe {
        asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") request.as_ptr(),
            inout("rdx") 0u64 => _,
            options(nostack),
        );
    }
}
