//! A server is to listen where something is already.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use dmaspan_nvme_server::listen;

/// A folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn refused(path: &Path) -> String {
    let error = listen(path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse, "{error}");
    error.to_string()
}

#[test]
fn nothing_but_a_socket_that_nobody_listens_on_is_replaced() {
    let folder = Folder::new("listening");
    let at = |name: &str| folder.0.join(name);
    fs::write(at("file"), b"precious").unwrap();
    fs::create_dir(at("folder")).unwrap();
    symlink(at("file"), at("link")).unwrap();
    symlink(at("nowhere"), at("dangling")).unwrap();
    drop(UnixListener::bind(at("left")).unwrap());
    symlink(at("left"), at("linked")).unwrap();
    let serving = UnixListener::bind(at("serving")).unwrap();
    let datagrams = UnixDatagram::bind(at("datagrams")).unwrap();
    let before = folder.names();
    for (name, found) in [
        ("file", "a regular file of 8 bytes"),
        ("folder", "a directory"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("linked", "a symbolic link"),
        ("serving", "another process listens"),
        ("datagrams", "another process listens"),
    ] {
        let said = refused(&at(name));
        assert!(said.contains(found) && said.contains("another place"), "{name}: {said}");
    }
    // One that accepts nobody is there all the same, and is not waited for.
    let mut waiting = Vec::new();
    for _ in 0..=256 {
        waiting.push(std::thread::spawn({
            let serving = at("serving");
            move || UnixStream::connect(serving).map(drop)
        }));
    }
    assert!(refused(&at("serving")).contains("another process listens"));
    drop((serving, datagrams));
    waiting.into_iter().for_each(|client| drop(client.join()));
    assert_eq!(
        (folder.names(), fs::read(at("file")).unwrap()),
        (before.clone(), b"precious".into())
    );
    let listener = listen(&at("left")).unwrap();
    UnixStream::connect(at("left")).unwrap();
    listener.accept().unwrap();
    drop(listen(&at("new")).unwrap());
    assert_eq!(folder.names().len(), before.len() + 1);
}

#[test]
fn arguments_the_wrong_way_round_leave_the_disk_as_it_is_and_are_told() {
    let folder = Folder::new("swapped");
    let at = |name: &str| folder.0.join(name);
    fs::write(at("disk"), [7; 1024]).unwrap();
    fs::write(at("other"), [8; 1024]).unwrap();
    drop(UnixListener::bind(at("socket")).unwrap());
    for (socket, file) in [("disk", "other"), ("disk", "socket"), ("disk", "nowhere")] {
        let server = Command::new(env!("CARGO_BIN_EXE_dmaspan-nvme-server"));
        let server = { server }.arg(at(socket)).arg(at(file)).output().unwrap();
        let said = String::from_utf8_lossy(&server.stderr).into_owned();
        assert!(!server.status.success() && said.contains("SOCKET comes before FILE"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(folder.names(), ["disk", "other", "socket"]);
    assert_eq!(fs::read(at("disk")).unwrap(), [7; 1024]);
    assert!(fs::symlink_metadata(at("socket")).unwrap().file_type().is_socket());
}
