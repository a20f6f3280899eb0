//! Folders that several processes may fill.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

/// Holds other processes off a place until it and its clones are closed.
///
/// # Errors
///
/// Why the file beside it cannot be made or locked.
pub(crate) fn lock(place: &Path) -> io::Result<File> {
    if let Some(parent) = place.parent() {
        fs::create_dir_all(parent)?;
    }
    let file = File::create(place.with_extension("lock"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("xtask: waiting for another process that works on {}", place.display());
            file.lock()?;
        }
        Err(TryLockError::Error(error)) => return Err(error),
    }
    Ok(file)
}

/// Removes a folder, where there is one.
///
/// # Errors
///
/// Why it is still there.
pub(crate) fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// That something cannot be written, in one line.
pub(crate) fn cannot_write(path: &Path, error: &io::Error) -> String {
    format!("{} cannot be written: {error}", path.display())
}
