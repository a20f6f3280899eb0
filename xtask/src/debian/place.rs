//! Folders that several processes may fill.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

/// Holds other processes off a place until it and its clones are closed.
///
/// # Errors
///
/// Why the file beside it cannot be made or locked, in one line.
pub(crate) fn lock(place: &Path) -> Result<File, String> {
    let lock = || {
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
    };
    lock().map_err(|error| cannot_write(place, &error))
}

/// Puts a folder into its place that `fill` has made beside it, so it is whole wherever it is
/// there.
///
/// # Errors
///
/// What failed, in one line; what was there before is there still.
pub(crate) fn replace<T>(
    place: &Path,
    fill: impl FnOnce(&Path) -> Result<T, String>,
) -> Result<T, String> {
    let mut new = place.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    remove(new).map_err(|error| cannot_write(new, &error))?;
    let filled = fill(new).inspect_err(|_| {
        // What cannot be removed is removed before the next attempt.
        let _ = remove(new);
    })?;
    let put = remove(place).and_then(|()| fs::rename(new, place));
    put.map(|()| filled).map_err(|error| cannot_write(place, &error))
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
