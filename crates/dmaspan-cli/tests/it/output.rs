//! Reports in files: whose files they touch, and who may read them.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn dump(name: &str) -> String {
    format!("{}/tests/dumps/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// The options of each command that writes a file, and what the file is named by.
fn writers() -> Vec<(Vec<String>, &'static str)> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let layout = format!("{}/../../docs/layouts/q35-4g.toml", env!("CARGO_MANIFEST_DIR"));
    vec![
        (words(&["inspect", &dump("vtd-legacy.debugfs")]), "--output"),
        (words(&["inspect", &dump("vtd-legacy.debugfs"), "--format", "html"]), "--output"),
        (
            words(&["inspect", &dump("vtd.core"), "--iommu", "vtd", "--root", "0x97f000"]),
            "--tables",
        ),
        (words(&["plan", "--layout", &layout, "--format", "prometheus"]), "--output"),
    ]
}

fn write(words: &[String], option: &str, place: &Path) -> Output {
    Command::new(DMASPAN).args(words).arg(option).arg(place).output().unwrap()
}

#[test]
fn a_report_of_root_goes_through_no_link_of_the_folders_owner() {
    let all = Folder::new("planted");
    let (folder, victim) = (all.0.join("theirs"), all.0.join("victim"));
    fs::write(&victim, "secret").unwrap();
    fs::set_permissions(&victim, Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(&folder).unwrap();
    if chown(&folder, Some(65534), Some(65534)).is_err() {
        let _ = io::stderr().write_all(b"SKIP: only root can give a folder to another user\n");
        return;
    }
    let place = folder.join("report");
    // A name that is made of the process's number could be foreseen.
    for pid in 0..3000 {
        let name = format!(".report.{}", std::process::id() + pid);
        symlink(&victim, folder.join(name)).unwrap();
    }
    let before = fs::read_dir(&folder).unwrap().count();
    for (words, option) in writers() {
        let _ = fs::remove_file(&place);
        symlink(&victim, &place).unwrap();
        let output = write(&words, option, &place);
        assert!(output.stderr.is_empty(), "{words:?}: {output:?}");
        assert!(fs::symlink_metadata(&place).unwrap().is_file(), "{words:?}");
        let mode = fs::metadata(&victim).unwrap().permissions().mode() & 0o777;
        assert_eq!((fs::read(&victim).unwrap(), mode), (b"secret".into(), 0o600), "{words:?}");
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), before + 1);
}

#[test]
fn a_report_that_nobody_else_may_read_stays_one() {
    let all = Folder::new("mode");
    let place = all.0.join("report");
    for (words, option) in writers() {
        fs::write(&place, "old").unwrap();
        fs::set_permissions(&place, Permissions::from_mode(0o600)).unwrap();
        let output = write(&words, option, &place);
        assert!(output.stderr.is_empty(), "{words:?}: {output:?}");
        assert_ne!(fs::read(&place).unwrap(), b"old", "{words:?}");
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o600, "{words:?}");
    }
    assert_eq!(fs::read_dir(&all.0).unwrap().count(), 1);
}

#[test]
fn a_report_for_standard_output_goes_where_that_goes_and_nothing_there_is_lost() {
    let all = Folder::new("stdout");
    let (words, option) = &writers()[0];
    // As /dev/stdout is, which no failure of this test may replace.
    let stdout = &all.0.join("stdout");
    symlink("/proc/self/fd/1", stdout).unwrap();
    let piped = write(words, option, stdout);
    assert!(piped.status.success() && piped.stdout.len() > 100, "{piped:?}");
    let path = all.0.join("log");
    fs::write(&path, "before\n").unwrap();
    // Two programs that write behind each other, as a shell has it.
    let mut log = File::options().read(true).write(true).open(&path).unwrap();
    log.seek(SeekFrom::End(0)).unwrap();
    for is_removed in [false, true] {
        if is_removed {
            fs::remove_file(&path).unwrap();
        }
        let mut command = Command::new(DMASPAN);
        command.args(words).arg(option).arg(stdout).stdout(log.try_clone().unwrap());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let mut text = Vec::new();
    log.rewind().unwrap();
    log.read_to_end(&mut text).unwrap();
    assert_eq!(text, [b"before\n", &piped.stdout[..], &piped.stdout[..]].concat());
    assert!(fs::symlink_metadata(stdout).unwrap().is_symlink());
    let full = write(words, option, Path::new("/dev/full"));
    assert_eq!(full.status.code(), Some(1));
    let says = String::from_utf8(full.stderr).unwrap();
    assert!(says.starts_with("error: /dev/full cannot be written: No space left"), "{says}");
}
