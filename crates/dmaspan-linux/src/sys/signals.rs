//! A process can ignore here the signals that would end it.

/// From now on this process ignores `SIGTERM`, `SIGINT` and `SIGHUP` (signal(7)): for one that
/// holds something for another and ends when that one does.
pub fn ignore_termination() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY:
        // 1. `SIG_IGN` is a disposition that every one of these signals may have, and no code runs
        //    on it.
        // It fails for unknown signals alone (signal(2), ERRORS), and these are in POSIX.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
