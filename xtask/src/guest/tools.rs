//! Programs that make and check file systems with a journal, for inside a guest: its shell's own
//! make none.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::nested::needed;
use super::packages::SUITES;
use crate::debian::{self, Machine, output_of, remove, replace};

const SUITE: &str = "trixie";
const PACKAGE: &str = "e2fsprogs";
const PROGRAMS: [&str; 2] = ["mke2fs", "e2fsck"];
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// The programs, what loads them and their libraries: names and contents, all for one folder. They
/// are downloaded where they are not below `folder`.
///
/// # Errors
///
/// Why they cannot be had, in one line.
pub(super) fn get(folder: &Path, lock: &File) -> Result<Vec<(String, Vec<u8>)>, String> {
    let place = folder.join("tools");
    if !place.is_dir() {
        let (here, apt) = (Machine::here()?, folder.join("apt-of-tools"));
        let packages = here.root(&apt, SUITES, lock)?.download_closure(SUITE, &[PACKAGE])?;
        replace(&place, |new| debian::unpack(&packages, new, lock))?;
        remove(&apt).map_err(|error| debian::cannot_write(&apt, &error))?;
    }
    let libraries = place.join(LIBRARIES);
    let loader = libraries.join(LOADER);
    let mut files: Vec<PathBuf> = vec![loader.clone()];
    for name in PROGRAMS {
        let program = place.join("usr/sbin").join(name);
        let mut list = Command::new(&loader);
        list.arg("--library-path").arg(&libraries).arg("--list").arg(&program);
        files.extend(needed(&output_of(&mut list)?));
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
