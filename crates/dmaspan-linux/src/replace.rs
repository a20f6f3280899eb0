//! Files that programs write, whole or not at all: [`WholeFile`].
//!
//! The new content is written to a file beside the place, whose name nobody can foresee, and which
//! is opened only where nothing has that name. It is on the disk before it takes the place, so
//! whoever reads meanwhile, or after a crash, finds the old content or the new one. Until it takes
//! the place, every error and every panic removes it.
//!
//! | at the place | what becomes of it |
//! |---|---|
//! | nothing | a new file, whose mode the umask decides: collectors of figures may read it |
//! | a file | the new one takes its place, with its mode, and its owner where that is permitted |
//! | a link that only this user or root can have made | it stays; what it leads to is the place |
//! | a link of anybody to this process's standard output or error | bytes go there as they come |
//! | a device or pipe that only they can have made | bytes go to it as they come |
//! | a link, device or pipe that somebody else can have made | the new file takes its place |
//! | a folder | an error |
//!
//! So root may write into the folder of somebody whom it does not trust: no link there leads it to
//! another file. A link to a *folder* on the way that somebody else can have made is an error.
//! Somebody else can have made whatever lies in a folder of theirs, and in one that they may write
//! to all that does not belong to this user or root. Every step begins at an open folder, so that
//! nobody can exchange a folder that was looked at.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Component, Path};

use rustix::fs::{self, AtFlags, CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// How many links are followed, as by the kernel (path_resolution(7)).
const LINKS: u32 = 40;

/// New content for a file. It gets there with [`finish`](Self::finish), whole; until then, and
/// where this is dropped, the file is as it was.
///
/// ```
/// use std::io::Write;
///
/// use dmaspan_linux::replace::WholeFile;
///
/// let place = std::env::temp_dir().join(format!("dmaspan-doc-{}", std::process::id()));
/// let mut new = WholeFile::at(&place)?;
/// new.write_all(b"all of it")?;
/// assert!(!place.exists());
/// new.finish()?;
/// assert_eq!(std::fs::read(&place)?, b"all of it");
/// std::fs::remove_file(&place)?;
/// Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct WholeFile {
    to: File,
    /// `None` where bytes go to a device or a pipe.
    beside: Option<Beside>,
}

/// A file that is to take a place.
#[derive(Debug)]
struct Beside {
    folder: OwnedFd,
    temporary: String,
    name: OsString,
    /// The mode, the owner and the group of the file that has the place.
    old: Option<(u32, u32, u32)>,
}

impl WholeFile {
    /// New content for the file at `path`.
    ///
    /// # Errors
    ///
    /// Where it cannot be made: there is no folder to make it in, or none that may be written to,
    /// or the path leads to a folder, or through a link that another user can have made.
    pub fn at(path: &Path) -> io::Result<Self> {
        // Whoever names a file from the root on may be in a folder that they may not look into.
        let start = if path.is_absolute() { "/" } else { "." };
        let mut folder = open_folder(CWD, OsStr::new(start), OFlags::empty())?;
        let mut left = Vec::new();
        push(&mut left, path);
        let mut links = 0;
        while let Some(name) = left.pop() {
            if name == "/" {
                folder = open_folder(CWD, &name, OFlags::empty())?;
                continue;
            }
            let is_last = left.is_empty();
            let found = match fs::statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) if is_last => return Self::beside(folder, name, None),
                found => found?,
            };
            let kind = FileType::from_raw_mode(found.st_mode);
            let is_procs = fs::fstatfs(&folder)?.f_type == fs::PROC_SUPER_MAGIC;
            match kind {
                FileType::Directory if is_last => return Err(Errno::ISDIR.into()),
                FileType::Directory => folder = open_folder(&folder, &name, OFlags::NOFOLLOW)?,
                FileType::RegularFile if is_last => {
                    return Self::beside(folder, name, Some(found));
                }
                // The kernel made it, and only the kernel knows where it leads: to an open file.
                FileType::Symlink if is_procs && is_last => {
                    return stream(&folder, &name, OFlags::empty());
                }
                FileType::Symlink if is_procs => {
                    folder = open_folder(&folder, &name, OFlags::empty())?;
                }
                FileType::Symlink => {
                    let target = fs::readlinkat(&folder, &name, Vec::new())?.into_bytes();
                    // Standard output and error, which are there to be written to. No other file
                    // that is open is, and nothing may follow the number.
                    let is_own = [&b"/proc/self/fd/1"[..], b"/proc/self/fd/2"].contains(&&*target);
                    if is_own || is_trusted(&folder, &found)? {
                        links += 1;
                        if links > LINKS {
                            return Err(Errno::LOOP.into());
                        }
                        push(&mut left, Path::new(&OsString::from_vec(target)));
                    } else if is_last {
                        return Self::beside(folder, name, None);
                    } else {
                        let why = format!(
                            "{} is a link that another user can have made: name the folder that it \
                             leads to",
                            Path::new(&name).display()
                        );
                        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
                    }
                }
                _ if !is_last => return Err(Errno::NOTDIR.into()),
                _ if is_trusted(&folder, &found)? => {
                    return stream(&folder, &name, OFlags::NOFOLLOW);
                }
                _ => return Self::beside(folder, name, None),
            }
        }
        Err(Errno::ISDIR.into())
    }

    /// Beside a name in a folder.
    fn beside(folder: OwnedFd, name: OsString, old: Option<Stat>) -> io::Result<Self> {
        // With keys that the kernel has chosen at random. Collectors read no hidden files.
        let temporary = format!(".dmaspan-{:016x}", RandomState::new().hash_one(0));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        // Nobody else reads a part of what will have a mode that is not known yet.
        let mode = Mode::from_raw_mode(if old.is_some() { 0o600 } else { 0o666 });
        let to = fs::openat(&folder, temporary.as_str(), flags | OFlags::CLOEXEC, mode)?;
        let old = old.map(|old| (old.st_mode & 0o777, old.st_uid, old.st_gid));
        Ok(Self { to: to.into(), beside: Some(Beside { folder, temporary, name, old }) })
    }

    /// Puts what was written where it belongs, and waits until the disk has it.
    ///
    /// # Errors
    ///
    /// Where it cannot be put there, or the disk does not take it.
    pub fn finish(mut self) -> io::Result<()> {
        self.to.flush()?;
        let Some(Beside { folder, temporary, name, old }) = &self.beside else { return Ok(()) };
        if let Some(old) = *old {
            keep(&self.to, old)?;
        }
        self.to.sync_all()?;
        fs::renameat(folder, temporary.as_str(), folder, name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let synced = fs::openat(folder, ".", flags, Mode::empty()).and_then(fs::fsync);
        self.beside = None;
        match synced {
            // A folder that may be written and not read, and a file system that syncs no folders.
            Err(Errno::ACCESS | Errno::INVAL) => Ok(()),
            synced => Ok(synced?),
        }
    }
}

impl Write for WholeFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if let Some(Beside { folder, temporary, .. }) = &self.beside {
            // Something has failed already, which is what is said.
            let _ = fs::unlinkat(folder, temporary.as_str(), AtFlags::empty());
        }
    }
}

/// Gives a file the owner, the group and the mode of the one before it. A group that is not the one
/// before has no more rights than all others.
fn keep(file: &File, (mode, uid, gid): (u32, u32, u32)) -> io::Result<()> {
    let kept = fchown(file, Some(uid), Some(gid)).or_else(|_| fchown(file, None, Some(gid)));
    let mode = if kept.is_ok() { mode } else { mode & (0o707 | (mode & 7) << 3) };
    file.set_permissions(Permissions::from_mode(mode))
}

/// Adds the parts of a path to those that are left, of which the last comes first.
fn push(left: &mut Vec<OsString>, path: &Path) {
    let parts = path.components().filter(|part| *part != Component::CurDir);
    left.extend(parts.rev().map(|part| part.as_os_str().to_owned()));
}

fn open_folder(at: impl AsFd, name: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(fs::openat(at, name.as_bytes(), flags, Mode::empty())?)
}

/// A device or a pipe. Standard output and error are taken as they are: who writes to them next
/// goes on behind what was written.
fn stream(folder: &OwnedFd, name: &OsStr, flags: OFlags) -> io::Result<WholeFile> {
    let found = fs::statat(folder, name, AtFlags::empty())?;
    let is_it = |own: &BorrowedFd<'_>| {
        fs::fstat(own).is_ok_and(|own| (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino))
    };
    let (out, error) = (io::stdout(), io::stderr());
    if let Some(own) = [out.as_fd(), error.as_fd()].into_iter().find(is_it) {
        return Ok(WholeFile { to: own.try_clone_to_owned()?.into(), beside: None });
    }
    let flags = flags | OFlags::WRONLY | OFlags::APPEND | OFlags::NOCTTY | OFlags::CLOEXEC;
    let to = fs::openat(folder, name.as_bytes(), flags, Mode::empty())?;
    Ok(WholeFile { to: to.into(), beside: None })
}

/// Whether only this user or root can have put something into a folder. With a second name it may
/// have been made for another place.
fn is_trusted(folder: &OwnedFd, found: &Stat) -> io::Result<bool> {
    let own = rustix::process::geteuid().as_raw();
    let folder = fs::fstat(folder)?;
    let is_ours = |uid: u32| uid == 0 || uid == own;
    let is_closed = folder.st_mode & 0o022 == 0;
    Ok(is_ours(folder.st_uid) && (is_closed || is_ours(found.st_uid) && found.st_nlink == 1))
}

#[cfg(test)]
mod tests;
