//! A run that was killed with its holder leaves hugetlb pages set aside; a later run finds them
//! here, and says so.
//!
//! The kernel does not say who raised the number of pages. So the holder leaves a record in `/run`,
//! which is empty when the machine starts, as the pools are. The holder keeps a lock of the record
//! (flock(2)), which ends with the process however that ends: a record that nobody has locked is
//! left over.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

use crate::size::ByteSize;

const RECORDS: &str = "/run";
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// What the name of a record begins with; the size of a page in KiB and the holder's number follow.
const PREFIX: &str = "dmaspan-hugetlb-";

/// That this process has set pages aside. Dropping it says that it has given them back.
#[derive(Debug)]
pub struct ReservationRecord {
    path: PathBuf,
    /// Locked while it is open.
    _file: File,
}

impl Drop for ReservationRecord {
    fn drop(&mut self) {
        // One that stays is found to be of pages that are not there, or asks for too much.
        let _ = fs::remove_file(&self.path);
    }
}

impl ReservationRecord {
    /// A record of pages. `None` where there are none or it cannot be written: the pages are set
    /// aside all the same.
    pub fn of(page_size: u64, pages: u64) -> Option<Self> {
        if pages == 0 {
            return None;
        }
        Self::in_folder(Path::new(RECORDS), page_size, pages).ok()
    }

    fn in_folder(folder: &Path, page_size: u64, pages: u64) -> io::Result<Self> {
        let name = format!("{PREFIX}{}kB.{}", page_size / 1024, process::id());
        let path = folder.join(name);
        let mut file = File::options().write(true).create_new(true).open(&path)?;
        // A run that finds it before it is locked finds no number in it.
        file.lock()?;
        writeln!(file, "{pages}")?;
        Ok(Self { path, _file: file })
    }
}

/// What runs that were killed have left set aside, and what gives it back: a note for each size of
/// pages.
pub fn notes() -> Vec<String> {
    notes_in(Path::new(RECORDS), Path::new(POOLS))
}

fn notes_in(records: &Path, pools: &Path) -> Vec<String> {
    let mut left: BTreeMap<u64, (u64, Vec<PathBuf>)> = BTreeMap::new();
    for path in fs::read_dir(records).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if let Some((page_kib, pages)) = left_by(&path) {
            let (sum, paths) = left.entry(page_kib).or_default();
            *sum = sum.saturating_add(pages);
            paths.push(path);
        }
    }
    left.into_iter().filter_map(|(kib, (pages, paths))| note(pools, kib, pages, &paths)).collect()
}

/// The size of pages in KiB and their number, of a record whose process is gone.
fn left_by(path: &Path) -> Option<(u64, u64)> {
    let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
    let page_kib = name.split_once("kB.")?.0.parse().ok()?;
    let file = File::open(path).ok()?;
    file.try_lock_shared().ok()?;
    let pages = io::read_to_string(&file).ok()?.trim().parse().ok()?;
    Some((page_kib, pages))
}

fn note(pools: &Path, page_kib: u64, pages: u64, paths: &[PathBuf]) -> Option<String> {
    let pool = pools.join(format!("hugepages-{page_kib}kB/nr_hugepages"));
    let now: u64 = fs::read_to_string(&pool).ok()?.trim().parse().ok()?;
    let Some(before) = now.checked_sub(pages) else {
        // Somebody has given them back.
        paths.iter().for_each(|path| drop(fs::remove_file(path)));
        return None;
    };
    let (pool, size) = (pool.display(), ByteSize::new(page_kib.saturating_mul(1024)));
    let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let paths = paths.join(" ");
    // With -f: another run that starts in between finds the pages gone, and removes the records.
    let (s, are) = if pages == 1 { ("", "is") } else { ("s", "are") };
    Some(format!(
        "{pages} hugetlb page{s} of {size} {are} still set aside by a run that was killed: run \
         `echo {before} > {pool} && rm -f {paths}` as root to give them back"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed with it.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn folder(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("dmaspan-{name}-{}", process::id()));
        fs::create_dir_all(path.join("hugepages-2048kB")).unwrap();
        Folder(path)
    }

    #[test]
    fn pages_of_a_run_that_is_gone_are_said_with_the_command_and_those_of_others_are_not() {
        let Folder(at) = &folder("left-over");
        let pool = at.join("hugepages-2048kB/nr_hugepages");
        fs::write(&pool, "40\n").unwrap();
        let own = ReservationRecord::in_folder(at, 2 << 20, 8).unwrap();
        assert!(notes_in(at, at).is_empty());
        fs::write(at.join("dmaspan-hugetlb-2048kB.1"), "30\n").unwrap();
        fs::write(at.join("dmaspan-hugetlb-2048kB.2"), "2\n").unwrap();
        // One that is being written, and files of others.
        fs::write(at.join("dmaspan-hugetlb-2048kB.3"), "").unwrap();
        fs::write(at.join("dmaspan-hugetlb-x"), "1\n").unwrap();
        let notes = notes_in(at, at);
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.starts_with("32 hugetlb pages of 2 MiB are still set aside by"), "{note}");
        let (from, rest) = note.split_once('`').unwrap();
        let command = rest.split_once('`').unwrap().0;
        assert!(from.ends_with("was killed: run ") && command.starts_with("echo 8 > "), "{note}");
        let done = process::Command::new("sh").args(["-c", command]).status().unwrap();
        assert!(done.success());
        assert_eq!(fs::read_to_string(&pool).unwrap(), "8\n");
        assert!(notes_in(at, at).is_empty());
        assert!(own.path.exists());
        drop(own);
        assert!(!at.join(format!("{PREFIX}2048kB.{}", process::id())).exists());
    }

    #[test]
    fn pages_that_were_given_back_by_hand_are_forgotten() {
        let Folder(at) = &folder("given-back");
        fs::write(at.join("hugepages-2048kB/nr_hugepages"), "3\n").unwrap();
        let record = at.join("dmaspan-hugetlb-2048kB.1");
        fs::write(&record, "4\n").unwrap();
        assert!(notes_in(at, at).is_empty() && !record.exists());
    }
}
