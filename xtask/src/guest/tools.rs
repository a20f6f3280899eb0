//! Programs of Debian with what they stand on: those that make and check file systems with a
//! journal, for inside a guest, whose shell's own make none; and QEMU's storage daemon, for beside
//! it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::nested::needed;
use super::packages::SUITES;
use crate::debian::{self, Machine, output_of, remove, replace};

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// A package and the suite that it is taken from.
struct Package {
    name: &'static str,
    suite: &'static str,
    /// The folder below that of the kernels.
    folder: &'static str,
}

const FILE_SYSTEMS: Package = Package { name: "e2fsprogs", suite: "trixie", folder: "tools" };
const FILE_SYSTEM_PROGRAMS: [&str; 2] = ["mke2fs", "e2fsck"];
/// As new as QEMU is.
const STORAGE: Package =
    Package { name: "qemu-utils", suite: "trixie-backports", folder: "storage" };
const STORAGE_PROGRAM: &str = "usr/bin/qemu-storage-daemon";

/// The programs for file systems, what loads them and their libraries: names and contents, all for
/// one folder. They are downloaded where they are not below `folder`.
///
/// # Errors
///
/// Why they cannot be had, in one line.
pub(super) fn file_systems(folder: &Path, lock: &File) -> Result<Vec<(String, Vec<u8>)>, String> {
    let place = FILE_SYSTEMS.get(folder, lock)?;
    let mut files: Vec<PathBuf> = vec![place.join(LIBRARIES).join(LOADER)];
    for name in FILE_SYSTEM_PROGRAMS {
        let program = place.join("usr/sbin").join(name);
        files.extend(needed(&output_of(loaded(&place).arg("--list").arg(&program))?));
        files.push(program);
    }
    files.sort();
    files.dedup();
    let read = |file: PathBuf| {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let content = fs::read(&file);
        let content = content.map_err(|why| format!("{} cannot be read: {why}", file.display()))?;
        Ok((name, content))
    };
    files.into_iter().map(read).collect()
}

/// The folder of QEMU's storage daemon, which is downloaded where it is not below `folder`.
///
/// # Errors
///
/// Why it cannot be had, in one line.
pub(super) fn storage(folder: &Path, lock: &File) -> Result<PathBuf, String> {
    STORAGE.get(folder, lock)
}

/// What starts QEMU's storage daemon, from its folder.
pub(super) fn storage_daemon(place: &Path) -> Command {
    let mut command = loaded(place);
    command.arg(place.join(STORAGE_PROGRAM));
    command
}

impl Package {
    /// The folder with its files and those of the packages that it stands on.
    fn get(&self, folder: &Path, lock: &File) -> Result<PathBuf, String> {
        let place = folder.join(self.folder);
        if !place.is_dir() {
            let (here, apt) = (Machine::here()?, folder.join(format!("apt-of-{}", self.folder)));
            let root = here.root(&apt, SUITES, lock)?;
            let packages = root.download_closure(self.suite, &[self.name])?;
            replace(&place, |new| debian::unpack(&packages, new, lock))?;
            remove(&apt).map_err(|error| debian::cannot_write(&apt, &error))?;
        }
        Ok(place)
    }
}

/// The loader of a folder with its libraries, before the program that it loads.
fn loaded(place: &Path) -> Command {
    let libraries = place.join(LIBRARIES);
    let mut command = Command::new(libraries.join(LOADER));
    command.arg("--library-path").arg(libraries);
    command
}
