//! The reason why a file is not copied.

use std::io;
use std::path::PathBuf;

use dmaspan_linux::fixed::{OperationError, PoolError, RingAttachError};
use indicatif::HumanBytes;

/// Why a file is not copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error("{}: cannot {what}: {}", path.display(), words(error))]
    File { what: &'static str, path: PathBuf, error: io::Error },
    #[error("{}: not a regular file: name one", path.display())]
    NotAFile { path: PathBuf },
    #[error("{}: it exists: --force replaces it", path.display())]
    Exists { path: PathBuf },
    #[error("{}: it is left of a copy that was stopped, or one is at work: --force replaces it",
        path.display())]
    Unfinished { path: PathBuf },
    #[error("{}: source and target are the same file", path.display())]
    SameFile { path: PathBuf },
    #[error("{}: there is no space for {}: make room or choose another place", path.display(),
        HumanBytes(*len))]
    NoSpace { path: PathBuf, len: u64 },
    #[error("{}: it became shorter while it was copied", path.display())]
    Shrank { path: PathBuf },
    #[error("no buffers: {0}")]
    Pool(#[from] PoolError),
    #[error("no ring: {0}")]
    Attach(#[from] RingAttachError),
    #[error("an operation does not begin: {0}")]
    Operation(#[from] OperationError),
    #[error("io_uring failed: {}", words(.0))]
    Ring(io::Error),
}

/// The sentence, without the number.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" (os error ").map_or_else(|| text.clone(), |(words, _)| words.to_owned())
}
