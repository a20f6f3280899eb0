use std::fs;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// A user without rights.
const NOBODY: u32 = 65534;

/// A folder of its own, which goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dmaspan-replace-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        Self(path)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn names(&self) -> Vec<OsString> {
        let mut names: Vec<OsString> =
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn replaced(path: &Path, text: &str) -> io::Result<()> {
    let mut new = WholeFile::at(path)?;
    new.write_all(text.as_bytes())?;
    new.finish()
}

/// Another user's folder, of the test's; `None` where this user can give nothing away.
fn folder_of_another(name: &str, all: &Folder) -> Option<PathBuf> {
    let path = all.at(name);
    fs::create_dir(&path).unwrap();
    if chown(&path, Some(NOBODY), Some(NOBODY)).is_err() {
        eprintln!("SKIP: only root can give a folder to another user");
        return None;
    }
    Some(path)
}

#[test]
fn a_file_has_all_of_what_was_written_or_what_it_had() {
    let all = Folder::new();
    for (name, old) in [("new", None), ("old", Some(&b"old"[..]))] {
        let path = all.at(name);
        if let Some(old) = old {
            fs::write(&path, old).unwrap();
        }
        let mut failed = WholeFile::at(&path).unwrap();
        failed.write_all(b"a part").unwrap();
        assert_eq!(fs::read(&path).ok().as_deref(), old);
        drop(failed);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut new = WholeFile::at(&path).unwrap();
            new.write_all(b"a part").unwrap();
            panic!("in the middle of it");
        }));
        assert!(panicked.is_err());
        assert_eq!(fs::read(&path).ok().as_deref(), old);
        replaced(&path, "all").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"all");
    }
    assert_eq!(all.names(), ["new", "old"]);
    assert!(replaced(&all.0, "x").is_err());
    assert!(replaced(&all.at("none/x"), "x").is_err());
    assert!(replaced(&all.at("old/x"), "x").is_err());
    assert!(replaced(Path::new(""), "x").is_err());
    assert!(replaced(Path::new("/"), "x").is_err());
    assert_eq!(all.names(), ["new", "old"]);
}

#[test]
fn who_reads_a_file_while_it_is_replaced_reads_the_old_one_or_the_new_one_whole() {
    let all = Folder::new();
    let file = all.at("report.prom");
    let texts = ["a".repeat(1 << 20), "b".repeat(1 << 19)];
    replaced(&file, &texts[0]).unwrap();
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| {
            for number in 0..20 {
                replaced(&file, &texts[number % 2]).unwrap();
            }
        });
        let mut reads = 0;
        while reads == 0 || !writer.is_finished() {
            let read = fs::read_to_string(&file).unwrap();
            assert!(texts.contains(&read), "{} bytes", read.len());
            reads += 1;
        }
    });
}

#[test]
fn the_mode_and_the_owner_of_the_file_before_are_kept() {
    let all = Folder::new();
    for mode in [0o600, 0o640, 0o644, 0o444, 0o4755] {
        let path = all.at("report");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let is_given = chown(&path, Some(1234), Some(4321)).is_ok();
        replaced(&path, "new").unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!(
            (found.mode() & 0o7777, fs::read(&path).unwrap()),
            (mode & 0o777, b"new".into())
        );
        assert!(!is_given || (found.uid(), found.gid()) == (1234, 4321));
        fs::remove_file(&path).unwrap();
    }
    // While it is written nobody else reads it.
    let path = all.at("secret");
    fs::write(&path, "old").unwrap();
    let new = WholeFile::at(&path).unwrap();
    assert_eq!(new.to.metadata().unwrap().mode() & 0o777, 0o600);
}

#[test]
fn a_link_that_only_this_user_or_root_can_have_made_stays() {
    let all = Folder::new();
    let (path, link) = (all.at("file"), all.at("link"));
    fs::create_dir(all.at("inner")).unwrap();
    symlink(&all.0, all.at("inner/up")).unwrap();
    symlink("inner/up/file", &link).unwrap();
    // The first time there is no such file.
    for text in ["first", "second"] {
        replaced(&link, text).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert!(!fs::symlink_metadata(&path).unwrap().is_symlink());
    }
    replaced(&all.at("inner/../inner/up/./other"), "by folders").unwrap();
    assert_eq!(fs::read(all.at("other")).unwrap(), b"by folders");
    symlink("round", all.at("round")).unwrap();
    let error = replaced(&all.at("round"), "x").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ELOOP));
    // A folder that all may write to, with a link of ours.
    fs::set_permissions(&all.0, Permissions::from_mode(0o1777)).unwrap();
    replaced(&link, "third").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"third");
    // The link has a second name, as that of another folder would have.
    fs::hard_link(&link, all.at("planted")).unwrap();
    replaced(&all.at("planted"), "own").unwrap();
    assert_eq!(
        (fs::read(&path).unwrap(), fs::read(all.at("planted")).unwrap()),
        (b"third".into(), b"own".into())
    );
}

#[test]
fn no_link_of_another_user_leads_root_to_another_file() {
    let all = Folder::new();
    let victim = all.at("victim");
    fs::write(&victim, "secret").unwrap();
    fs::set_permissions(&victim, Permissions::from_mode(0o600)).unwrap();
    let Some(folder) = folder_of_another("theirs", &all) else { return };
    let place = folder.join("report.html");
    let shared = all.at("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
    let in_shared = shared.join("report.html");
    for place in [&place, &in_shared] {
        symlink(&victim, place).unwrap();
        std::os::unix::fs::lchown(place, Some(NOBODY), Some(NOBODY)).unwrap();
        replaced(place, "report").unwrap();
        let found = fs::symlink_metadata(place).unwrap();
        assert!(found.is_file(), "{found:?}");
        assert_eq!(fs::read(place).unwrap(), b"report");
    }
    // A link to a folder on the way, and one that leads out and back.
    symlink(&all.0, folder.join("out")).unwrap();
    let error = replaced(&folder.join("out/victim"), "x").unwrap_err();
    assert!(error.to_string().contains("out is a link that another user can have made"), "{error}");
    // A device and a pipe that they made are not written to.
    for pipe in ["pipe", "other"] {
        let pipe = folder.join(pipe);
        fs::remove_file(&place).unwrap();
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        replaced(&pipe, "report").unwrap();
        assert_eq!(fs::read(&pipe).unwrap(), b"report");
        replaced(&place, "again").unwrap();
    }
    let found = fs::metadata(&victim).unwrap();
    assert_eq!((found.mode() & 0o777, fs::read(&victim).unwrap()), (0o600, b"secret".into()));
}

#[test]
fn no_link_of_another_user_leads_to_an_open_file_nor_by_the_folder_of_those_to_another() {
    let all = Folder::new();
    let victim = all.at("victim");
    fs::write(&victim, "secret").unwrap();
    let Some(folder) = folder_of_another("theirs", &all) else { return };
    let place = folder.join("report.html");
    let open = File::open(&victim).unwrap();
    for target in [
        format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open)),
        format!("/proc/self/fd/../../..{}", victim.display()),
        format!("/proc/self/fd/1/../../../..{}", victim.display()),
    ] {
        symlink(&target, &place).unwrap();
        std::os::unix::fs::lchown(&place, Some(NOBODY), Some(NOBODY)).unwrap();
        replaced(&place, "report").unwrap();
        assert!(fs::symlink_metadata(&place).unwrap().is_file(), "{target}");
        assert_eq!(fs::read(&victim).unwrap(), b"secret", "{target}");
        fs::remove_file(&place).unwrap();
    }
}

#[test]
fn devices_and_pipes_get_bytes_as_they_come() {
    let all = Folder::new();
    replaced(Path::new("/dev/null"), "gone").unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    symlink("/dev/null", all.at("link")).unwrap();
    replaced(&all.at("link"), "gone").unwrap();
    assert!(fs::symlink_metadata(all.at("link")).unwrap().is_symlink());
    let full = replaced(Path::new("/dev/full"), "too much").unwrap_err();
    assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    let pipe = all.at("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    std::thread::scope(|threads| {
        let reader = threads.spawn(|| fs::read_to_string(&pipe).unwrap());
        replaced(&pipe, "through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
    });
    assert_eq!(all.names(), ["link", "pipe"]);
}
