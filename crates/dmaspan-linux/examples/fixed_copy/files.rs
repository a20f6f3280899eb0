//! The file that is copied, and the new one.

#![expect(unsafe_code, reason = "advice about files, which the standard library lacks")]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::CopyError;

/// What offsets and lengths are multiples of without the page cache: enough for every disk.
pub(crate) const SECTOR: usize = 4096;

/// Whether bytes go through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caching {
    /// With `O_DIRECT`, where the file system has it.
    Past,
    /// Without.
    Through,
}

impl Caching {
    /// The length of a transfer of `len` bytes.
    pub(crate) fn transfer_len(self, len: usize) -> usize {
        match self {
            Self::Past => len.next_multiple_of(SECTOR),
            Self::Through => len,
        }
    }

    /// Where a transfer goes on of which `done` bytes are done.
    pub(crate) fn resume_at(self, done: usize) -> usize {
        match self {
            Self::Past => done / SECTOR * SECTOR,
            Self::Through => done,
        }
    }
}

/// What to do with a target that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    Refuse,
    Overwrite,
}

/// The file that is copied.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) file: Arc<File>,
    pub(crate) path: PathBuf,
    pub(crate) len: u64,
    pub(crate) caching: Caching,
}

impl Source {
    pub(crate) fn open(path: &Path, caching: Caching) -> Result<Self, CopyError> {
        let failed = |error| file_error("read it", path, error);
        // Before it is opened: a pipe would wait for its other end.
        let metadata = fs::metadata(path).map_err(failed)?;
        if !metadata.is_file() {
            return Err(CopyError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(failed)?;
        let caching = set_caching(&file, caching);
        Ok(Self { file: Arc::new(file), path: path.to_owned(), len: metadata.len(), caching })
    }

    /// Takes the file out of the page cache, so that each copy reads the disk.
    pub(crate) fn forget_cached(&self) {
        // What the disk has not got yet would stay.
        let _ = self.file.sync_all();
        // SAFETY:
        // 1. It is advice about a file that is open, and touches no memory of this process.
        let _ =
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }

    pub(crate) fn error(&self, error: io::Error) -> CopyError {
        file_error("read it", &self.path, error)
    }
}

/// The new file, beside its place until it is complete: a copy that is stopped leaves no half of a
/// file there. Removed on drop unless it is complete.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) file: Arc<File>,
    pub(crate) path: PathBuf,
    /// Where it is until then.
    partial: PathBuf,
    pub(crate) caching: Caching,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Partial,
    Complete,
}

impl Target {
    pub(crate) fn create(
        path: &Path,
        source: &Source,
        existing: Existing,
        caching: Caching,
    ) -> Result<Self, CopyError> {
        let failed = |error| file_error("create it", path, error);
        if let Ok(there) = fs::metadata(path) {
            let own = source.file.metadata().map_err(failed)?;
            if (own.dev(), own.ino()) == (there.dev(), there.ino()) {
                return Err(CopyError::SameFile { path: path.to_owned() });
            }
            if !there.is_file() {
                return Err(CopyError::NotAFile { path: path.to_owned() });
            }
        }
        // A link that leads nowhere is there too.
        if existing == Existing::Refuse && fs::symlink_metadata(path).is_ok() {
            return Err(CopyError::Exists { path: path.to_owned() });
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".part");
        let partial = PathBuf::from(partial);
        // It goes, with a mode of its own, or a link to somewhere else.
        if existing == Existing::Overwrite && fs::symlink_metadata(&partial).is_ok() {
            let removed = fs::remove_file(&partial);
            removed.map_err(|error| file_error("replace it", &partial, error))?;
        }
        // Nobody may read the copy who may not read the source.
        let mode = source.file.metadata().map_err(failed)?.mode() & 0o777;
        let opened = OpenOptions::new().write(true).mode(mode).create_new(true).open(&partial);
        let file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => CopyError::Unfinished { path: partial.clone() },
            _ => failed(error),
        })?;
        let caching = set_caching(&file, caching);
        let (file, path) = (Arc::new(file), path.to_owned());
        let target = Self { file, path, partial, caching, state: State::Partial };
        target.reserve(source.len)?;
        Ok(target)
    }

    /// Finds the disk's space for `len` bytes at once: blocks that are written in any order need
    /// none then, and too little space shows before anything is copied.
    fn reserve(&self, len: u64) -> Result<(), CopyError> {
        let Some(len_off) = i64::try_from(len).ok().filter(|len| *len != 0) else { return Ok(()) };
        // SAFETY:
        // 1. It is about a file that is open, and touches no memory of this process.
        let result = unsafe { libc::fallocate(self.file.as_raw_fd(), 0, 0, len_off) };
        if result == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EFBIG | libc::EDQUOT) => Err(self.error(error, len)),
            // A file system that cannot finds the space as it goes.
            _ => Ok(()),
        }
    }

    /// Cuts what is behind the last byte off, and waits until the disk has all of it.
    pub(crate) fn settle(&self, len: u64) -> Result<(), CopyError> {
        self.file.set_len(len).map_err(|error| self.error(error, len))?;
        self.file.sync_all().map_err(|error| self.error(error, len))
    }

    /// The same, and puts it in its place.
    pub(crate) fn finish(mut self, len: u64) -> Result<(), CopyError> {
        self.settle(len)?;
        let renamed = fs::rename(&self.partial, &self.path);
        renamed.map_err(|error| file_error("put it in its place", &self.path, error))?;
        self.state = State::Complete;
        Ok(())
    }

    pub(crate) fn error(&self, error: io::Error, len: u64) -> CopyError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                CopyError::NoSpace { path: self.path.clone(), len }
            }
            _ => file_error("write it", &self.path, error),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.state == State::Partial {
            // The reason why it is partial is told; this one would hide it.
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Makes an open file go past the page cache where that is wanted and the file system has it.
fn set_caching(file: &File, caching: Caching) -> Caching {
    if caching == Caching::Through {
        return caching;
    }
    // SAFETY:
    // 1. It asks about a file that is open, and touches no memory of this process.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Caching::Through;
    }
    // SAFETY:
    // 1. It changes a file that is open and that nobody uses yet, and touches no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_DIRECT) } {
        0 => Caching::Past,
        _ => Caching::Through,
    }
}

fn file_error(what: &'static str, path: &Path, error: io::Error) -> CopyError {
    CopyError::File { what, path: path.to_owned(), error }
}
