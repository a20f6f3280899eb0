//! The file or disk that is read or written, and the kernel's description of it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::work::Op;
use crate::failed::Failed;

/// The words of an error, without its number.
pub(super) fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => ": run as root, or as who may read it",
        io::ErrorKind::NotFound => ": name a file or a disk that is there",
        _ => "",
    }
}

const NOT_DIRECT: &str = "its file system has no direct I/O (O_DIRECT): name a file on ext4, xfs \
    or btrfs, or a disk like /dev/nvme0n1";

const IN_USE: &str = "somebody uses the disk, as a file system that is mounted does: --write takes \
    one that nobody needs";

/// Something to read or write, past the page cache.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) file: Arc<File>,
    pub(crate) path: PathBuf,
    /// Its bytes.
    pub(crate) len: u64,
    /// The folder of its disk in sysfs; `None` where there is no single one.
    disk: Option<PathBuf>,
}

/// What a disk takes for one request (Documentation/ABI/stable/sysfs-block).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Limits {
    pub(crate) max_sectors_kb: u64,
    pub(crate) max_hw_sectors_kb: u64,
    pub(crate) max_segments: u64,
    pub(crate) logical_block_size: u64,
}

impl Source {
    /// Opens it for direct reads, or also for writes: then a disk must have no other user, as one
    /// that is mounted has.
    ///
    /// # Errors
    ///
    /// What it is that cannot be read so, and what can.
    pub(crate) fn open(path: &Path, ops: &[Op]) -> Result<Self, Failed> {
        let of = |words: &str| Failed::new(format_args!("{}: {words}", path.display()));
        let failed = |error: io::Error| of(&(words(&error) + advice(&error)));
        // Before it is opened: a pipe would wait for its other end.
        let metadata = fs::metadata(path).map_err(failed)?;
        let kind = metadata.file_type();
        let device = match () {
            () if kind.is_file() => metadata.dev(),
            () if kind.is_block_device() => metadata.rdev(),
            () => return Err(of("neither a file nor a disk: name one")),
        };
        // Of a disk O_EXCL means that nobody else has it, a file system among them (open(2)).
        let (is_disk, write) = (kind.is_block_device(), ops.contains(&Op::Write));
        let flags = libc::O_DIRECT | if write && is_disk { libc::O_EXCL } else { 0 };
        let opened = OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
        let mut file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => of(NOT_DIRECT),
            io::ErrorKind::ResourceBusy => of(IN_USE),
            _ => failed(error),
        })?;
        // Of a disk the metadata has no length.
        let len = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let disk = disk_of(Path::new("/sys/dev/block"), device);
        Ok(Self { file: Arc::new(file), path: path.to_owned(), len, disk })
    }

    /// Something that no test reads.
    #[cfg(test)]
    pub(super) fn unread() -> Self {
        let file = Arc::new(File::open("/dev/null").unwrap());
        Self { file, path: PathBuf::from("/dev/null"), len: 0, disk: None }
    }

    /// What its disk takes for one request.
    pub(crate) fn limits(&self) -> Option<Limits> {
        let queue = self.disk.as_ref()?.join("queue");
        let number = |name: &str| fs::read_to_string(queue.join(name)).ok()?.trim().parse().ok();
        Some(Limits {
            max_sectors_kb: number("max_sectors_kb")?,
            max_hw_sectors_kb: number("max_hw_sectors_kb")?,
            max_segments: number("max_segments")?,
            logical_block_size: number("logical_block_size")?,
        })
    }

    /// How many reads or writes its disk has done, for whomever.
    pub(crate) fn disk_requests(&self, op: Op) -> Option<u64> {
        done(&fs::read_to_string(self.disk.as_ref()?.join("stat")).ok()?, op)
    }
}

/// Of a disk's `stat`, the reads or the writes that are done: the first number, or the fifth
/// (Documentation/block/stat.rst).
fn done(text: &str, op: Op) -> Option<u64> {
    let place = match op {
        Op::Read => 0,
        Op::Write => 4,
    };
    text.split_whitespace().nth(place)?.parse().ok()
}

/// The folder of the disk that a device number is of, or of a part of it.
fn disk_of(root: &Path, device: u64) -> Option<PathBuf> {
    let found = root.join(format!("{}:{}", libc::major(device), libc::minor(device)));
    let found = fs::canonicalize(found).ok()?;
    let disk = if found.join("partition").exists() { found.parent()?.to_owned() } else { found };
    disk.join("queue").is_dir().then_some(disk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_disk_has_the_disk_s_folder() {
        let root = std::env::temp_dir().join(format!("dmaspan-disk-{}", std::process::id()));
        fs::create_dir_all(root.join("disk/queue")).unwrap();
        fs::create_dir_all(root.join("disk/part")).unwrap();
        fs::write(root.join("disk/part/partition"), "1\n").unwrap();
        for (name, to) in [("259:0", "disk"), ("259:1", "disk/part")] {
            std::os::unix::fs::symlink(root.join(to), root.join(name)).unwrap();
            let (_, minor) = name.split_once(':').unwrap();
            let device = libc::makedev(259, minor.parse().unwrap());
            assert_eq!(disk_of(&root, device), fs::canonicalize(root.join("disk")).ok());
        }
        assert_eq!(disk_of(&root, libc::makedev(259, 2)), None);
        fs::remove_dir_all(root).unwrap();
        let line = "     149       27     8352      116    7    3    80    12\n";
        assert_eq!((done(line, Op::Read), done(line, Op::Write)), (Some(149), Some(7)));
    }

    #[test]
    fn what_is_neither_a_file_nor_a_disk_is_not_opened() {
        for path in ["/dev/null", "/proc"] {
            let error = Source::open(Path::new(path), &[Op::Write]).unwrap_err();
            assert!(error.to_string().contains("neither a file nor a disk"), "{error}");
        }
        let error = Source::open(Path::new("/nowhere"), &[Op::Read]).unwrap_err();
        assert!(error.to_string().ends_with("name a file or a disk that is there"), "{error}");
    }
}
