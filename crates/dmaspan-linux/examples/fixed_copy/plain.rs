//! Copying by a plain loop: one read, one write, and the next.

use std::os::unix::fs::FileExt;

use dmaspan_linux::fixed::{FixedBuf, OperationError};

use crate::error::CopyError;
use crate::files::{Source, Target};

/// Copies all bytes through `buffer`. The target may have some more then, to be cut off.
pub(crate) fn copy(
    source: &Source,
    target: &Target,
    buffer: &mut FixedBuf,
) -> Result<(), CopyError> {
    let mut at = 0;
    while at < source.len {
        let read = source.file.read_at(buffer, at).map_err(|error| source.error(error))?;
        if read == 0 {
            return Err(CopyError::Shrank { path: source.path.clone() });
        }
        let len = target.caching.transfer_len(read);
        let outside = || OperationError::Outside { bytes: 0..len, len: buffer.len() };
        let bytes = buffer.get(..len).ok_or_else(outside)?;
        let written = target.file.write_all_at(bytes, at);
        written.map_err(|error| target.error(error, source.len))?;
        at += u64::try_from(read).unwrap_or(u64::MAX);
    }
    Ok(())
}
