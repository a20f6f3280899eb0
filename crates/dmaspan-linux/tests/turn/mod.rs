//! Turns of tests that use hugetlb pages, whose pools are the whole machine's.

use std::fs::File;

/// Waits for all other tests, of this process and of others, that hold a turn, and keeps them
/// waiting until the turn is dropped. It is a lock (flock(2)) of a folder that all processes see.
// The library states an older Rust; tests run with the workspace's.
#[clippy::msrv = "1.95"]
pub(crate) fn turn() -> File {
    let folder = ["/sys/kernel/mm", "/"].into_iter().find_map(|path| File::open(path).ok());
    let folder = folder.expect("the root is a folder that can be opened");
    folder.lock().expect("a folder can be locked");
    folder
}
