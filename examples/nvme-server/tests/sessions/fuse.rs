//! A file of a file system whose server answers when it is told to, or never.
//!
//! The server is a process of its own, this program once more: a process that waits for itself
//! could not even be killed. It ends with the other end of its input, and then nothing waits any
//! more.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Requests (include/uapi/linux/fuse.h).
const FORGET: u32 = 2;
const OPEN: u32 = 14;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
/// Bytes of a request's header.
const HEADER: usize = 40;
const EIO: i32 = -5;

const PLACE: &str = "DMASPAN_FUSE";
const MOUNTED: &str = "mounted";

/// Whether requests get an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answers {
    Never,
    AtOnce,
}

/// The file.
pub(crate) struct Fuse {
    file: Option<File>,
    server: Child,
    input: Option<ChildStdin>,
    /// Open, as the program says now and then that its test is running.
    _output: BufReader<ChildStdout>,
}

impl Fuse {
    /// The only file of a file system of its own, which has no place any more.
    ///
    /// # Errors
    ///
    /// Where this process may not mount one.
    pub(crate) fn new(name: &str) -> io::Result<Self> {
        let place = format!("dmaspan-file-{name}-{}", std::process::id());
        let place = std::env::temp_dir().join(place);
        File::create(&place)?;
        let mut server = Command::new(std::env::current_exe()?);
        server.args(["--exact", "fuse::serves_a_file", "--ignored", "--nocapture"]);
        server.env(PLACE, &place).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = server.spawn()?;
        let input = server.stdin.take();
        let mut output = BufReader::new(server.stdout.take().unwrap());
        let mut lines = output.by_ref().lines();
        let is_mounted = lines.any(|line| line.is_ok_and(|line| line.contains(MOUNTED)));
        let mut fuse = Self { file: None, server, input, _output: output };
        if is_mounted {
            fuse.file = Some(File::options().read(true).write(true).open(&place)?);
            unmount(&place, UnmountFlags::DETACH)?;
        }
        fs::remove_file(&place)?;
        if is_mounted { Ok(fuse) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    pub(crate) fn file(&self) -> &File {
        self.file.as_ref().unwrap()
    }

    /// From now on requests are answered, those that wait too, or they wait.
    pub(crate) fn set(&self, answers: Answers) {
        self.input.as_ref().unwrap().write_all(&[answers as u8]).unwrap();
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // All that waits gets an error.
        drop(self.input.take());
        let _ = self.server.wait();
    }
}

#[test]
#[ignore = "is a process of other tests"]
fn serves_a_file() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    if let Ok(device) = mounted(&place) {
        println!("{MOUNTED}");
        serve(device);
    }
}

fn mounted(place: &Path) -> io::Result<File> {
    let device = File::options().read(true).write(true).open("/dev/fuse")?;
    let options = format!("fd={},rootmode=100000,user_id=0,group_id=0", device.as_raw_fd());
    let options = CString::new(options)?;
    mount("dmaspan", place, "fuse", MountFlags::NOSUID, options.as_c_str())?;
    Ok(device)
}

fn serve(mut device: File) {
    // Without a buffer, which poll(2) would not see.
    let mut input = File::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut request = vec![0; 1 << 17];
    let (mut waiting, mut is_answering) = (Vec::new(), false);
    loop {
        let mut wanted = [PollFd::new(&device, PollFlags::IN), PollFd::new(&input, PollFlags::IN)];
        poll(&mut wanted, None).unwrap();
        let [of_device, of_input] = wanted.map(|wanted| !wanted.revents().is_empty());
        if of_input {
            let mut told = [0];
            let Ok(1) = input.read(&mut told) else { return };
            is_answering = told != [0];
        }
        if is_answering {
            waiting.drain(..).for_each(|unique| reply(&mut device, unique, EIO, &[]));
        }
        if !of_device {
            continue;
        }
        // It ends with the file system.
        let Ok(HEADER..) = device.read(&mut request) else { return };
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let unique = u64::from(word(8)) | u64::from(word(12)) << 32;
        match word(4) {
            INIT => {
                // Version 7.31, and writes of a page.
                let mut answer = [7_u32, 31, 0, 0, 0, 4096, 1].map(u32::to_le_bytes).concat();
                answer.resize(64, 0);
                reply(&mut device, unique, 0, &answer);
            }
            OPEN => reply(&mut device, unique, 0, &[0; 16]),
            FORGET | BATCH_FORGET | INTERRUPT => {}
            _ if is_answering => reply(&mut device, unique, EIO, &[]),
            _ => waiting.push(unique),
        }
    }
}

fn reply(device: &mut File, unique: u64, error: i32, body: &[u8]) {
    let mut bytes = u32::try_from(16 + body.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(error.to_le_bytes());
    bytes.extend(unique.to_le_bytes());
    bytes.extend(body);
    // One that was interrupted is unknown.
    let _ = device.write(&bytes);
}
