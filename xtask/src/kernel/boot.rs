//! One boot of the kernel.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::echo;

/// How long a boot may take; it takes some seconds on a machine that has nothing else to do.
const LIMIT: Duration = Duration::from_secs(300);

pub(super) struct Boot<'a> {
    pub(super) qemu: &'a Path,
    pub(super) kernel: &'a Path,
    pub(super) disk: &'a Path,
    /// Words for QEMU: the machine.
    pub(super) options: &'a str,
    pub(super) command_line: &'a str,
    /// Where the console goes.
    pub(super) log: &'a Path,
}

/// A boot that has ended by itself.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) console: String,
    /// Echoes that came back.
    pub(super) answers: u32,
    pub(super) took: Duration,
}

impl Ended {
    /// What it said last.
    pub(super) fn last(&self) -> &str {
        self.console.lines().last().unwrap_or("nothing")
    }
}

impl Boot<'_> {
    /// Boots, and sends echoes until the kernel has ended.
    pub(super) fn run(&self) -> Result<Ended, String> {
        let began = Instant::now();
        let (here, there) = UnixDatagram::pair().map_err(|error| format!("no socket: {error}"))?;
        let mut child =
            self.start(there).map_err(|error| format!("QEMU does not start: {error}"))?;
        let has_ended = AtomicBool::new(false);
        let (ended, answers) = thread::scope(|scope| {
            let echoes = scope.spawn(|| echo::send(&here, &has_ended));
            let ended = wait(&mut child, began + LIMIT);
            has_ended.store(true, Ordering::Relaxed);
            (ended, echoes.join().unwrap_or(0))
        });
        let log = self.log.display();
        ended.map_err(|why| format!("{why}; its console is in {log}"))?;
        let console = fs::read(self.log).map_err(|error| format!("{log}: {error}"))?;
        let console = String::from_utf8_lossy(&console).replace('\r', "");
        Ok(Ended { console, answers, took: began.elapsed() })
    }

    /// The network card's frames come and go by the standard input, a datagram each, so that no
    /// address can be somebody else's.
    fn start(&self, network: UnixDatagram) -> io::Result<Child> {
        File::create(self.log)?;
        let [disk, log] =
            [self.disk, self.log].map(|path| path.display().to_string().replace(',', ",,"));
        let mut qemu = Command::new(self.qemu);
        qemu.args(self.options.split(' '));
        let devices = "-smp 2 -m 256M -display none -nodefaults -no-reboot \
                       -serial chardev:console \
                       -device edu,addr=3,dma_mask=0xffffffff \
                       -device virtio-blk-pci,drive=one,addr=4,disable-legacy=on,iommu_platform=on \
                       -device nvme,drive=other,serial=1,addr=5 \
                       -netdev dgram,id=net,local.type=fd,local.str=0 \
                       -device virtio-net-pci,netdev=net,addr=6,disable-legacy=on,\
                       iommu_platform=on,romfile= \
                       -device iommu-testdev,addr=7";
        qemu.args(devices.split_whitespace());
        qemu.arg("-chardev").arg(format!("file,id=console,path={log}"));
        for drive in ["one", "other"] {
            qemu.arg("-drive");
            qemu.arg(format!("if=none,id={drive},file={disk},format=raw,readonly=on"));
        }
        qemu.arg("-kernel").arg(self.kernel);
        if !self.command_line.is_empty() {
            qemu.args(["-append", self.command_line]);
        }
        // QEMU tells of each fault, beside the console.
        let said = File::create(self.log.with_extension("qemu.txt"))?;
        qemu.stdin(Stdio::from(OwnedFd::from(network))).stderr(said).spawn()
    }
}

/// Waits until QEMU has ended, and ends it when that takes too long.
fn wait(child: &mut Child, until: Instant) -> Result<(), String> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return Ok(()),
            Ok(Some(status)) => return Err(format!("QEMU ended with {status}")),
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(20)),
            other => {
                // It is ended whatever was answered.
                let _ = child.kill();
                let _ = child.wait();
                return Err(match other {
                    Err(error) => format!("QEMU cannot be waited for: {error}"),
                    _ => format!("the kernel had not ended after {} s", LIMIT.as_secs()),
                });
            }
        }
    }
}
