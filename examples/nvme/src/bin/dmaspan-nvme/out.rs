//! The bytes of a disk go to a file here: all of them, or none.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file that is written to. It gets its new content with [`finish`](Self::finish), whole; until
/// then, and where this is dropped, it is as it was.
pub(crate) struct Out {
    to: File,
    file: Option<Beside>,
}

/// A file that is to take the place of another one.
struct Beside {
    path: PathBuf,
    replaces: PathBuf,
}

impl Out {
    /// A file, or what else is at the path: to a device or a pipe bytes go as they come.
    ///
    /// # Errors
    ///
    /// Where it cannot be made, or not be written.
    pub(crate) fn file(path: &Path) -> io::Result<Self> {
        let found = match fs::metadata(path) {
            Ok(found) if !found.is_file() => {
                let to = File::options().write(true).open(path)?;
                return Ok(Self { to, file: None });
            }
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        // What is replaced is what a link leads to.
        let replaces = match &found {
            Some(_) => fs::canonicalize(path)?,
            None => path.to_owned(),
        };
        let mut name = OsString::from(replaces.file_name().ok_or(io::ErrorKind::InvalidInput)?);
        name.push(format!(".{}.part", std::process::id()));
        let beside = Beside { path: replaces.with_file_name(name), replaces };
        let to = File::options().write(true).create_new(true).open(&beside.path)?;
        if let Some(found) = found {
            to.set_permissions(found.permissions())?;
        }
        Ok(Self { to, file: Some(beside) })
    }

    /// Ends it: what was written is where it belongs.
    ///
    /// # Errors
    ///
    /// Where it cannot be put there.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.to.flush()?;
        if let Some(Beside { path, replaces }) = &self.file {
            fs::rename(path, replaces)?;
            self.file = None;
        }
        Ok(())
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        if let Some(beside) = &self.file {
            // Something has failed already, which is what is said.
            let _ = fs::remove_file(&beside.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command, Line};

    /// A folder of its own, which goes with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("dmaspan-nvme-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn names(&self) -> Vec<OsString> {
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_read_of_no_device_leaves_the_file_as_it_was() {
        let folder = Folder::new("no-device");
        let path = folder.0.join("disk.img");
        fs::write(&path, b"before").unwrap();
        let out = path.to_str().unwrap();
        let line =
            ["dmaspan-nvme", "read", "--lba", "0", "--blocks", "1", "--out", out, "ffff:ff:1f.7"];
        let Command::Read(args) = Line::try_parse_from(line).unwrap().command else { panic!() };
        crate::read(&args).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert_eq!(folder.names(), ["disk.img"]);
    }

    #[test]
    fn a_file_has_all_of_what_was_written_or_what_it_had() {
        let folder = Folder::new("all-or-nothing");
        for (name, old) in [("new", None), ("old", Some(&b"old"[..]))] {
            let path = folder.0.join(name);
            if let Some(old) = old {
                fs::write(&path, old).unwrap();
            }
            let mut failed = Out::file(&path).unwrap();
            failed.write_all(b"a part").unwrap();
            drop(failed);
            assert_eq!(fs::read(&path).ok().as_deref(), old);
            let mut out = Out::file(&path).unwrap();
            out.write_all(b"all").unwrap();
            assert_eq!(fs::read(&path).ok().as_deref(), old);
            out.finish().unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"all");
        }
        assert_eq!(folder.names().len(), 2);
    }

    #[test]
    fn a_link_stays_one_and_what_is_no_file_is_written_as_it_is() {
        let folder = Folder::new("links");
        let (path, link) = (folder.0.join("file"), folder.0.join("link"));
        fs::write(&path, b"old").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        let mut out = Out::file(&link).unwrap();
        out.write_all(b"new").unwrap();
        out.finish().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let mut null = Out::file(Path::new("/dev/null")).unwrap();
        null.write_all(b"gone").unwrap();
        null.finish().unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        assert!(Out::file(&folder.0).is_err());
    }
}
