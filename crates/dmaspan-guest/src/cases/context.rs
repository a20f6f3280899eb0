//! The facts about the guest that cases are told, and the means that they may need of it.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dmaspan_linux::pci::System;
use dmaspan_linux::vfio::{Backend, VfioDevice, VfioSpace};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::{MIB, Result, same};

/// The function that every guest has an NVMe controller at.
const NVME: &str = "0000:00:05.0";
/// The function whose BAR 2 is memory that others reach: QEMU's `ivshmem-plain`.
pub(super) const PEER: &str = "0000:00:06.0";

/// How many hugepages of 2 MiB are free.
pub(super) const FREE_HUGEPAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// The word of the kernel's command line that says that instructions are counted.
const COUNTED: &str = "dmaspan.counted";

/// What a case is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    /// The interface to use.
    pub(crate) backend: Backend,
    /// The function to use, bound to vfio-pci: an NVMe controller.
    pub(crate) device: String,
}

impl Context {
    /// Starts another process, which is going to be killed, and waits until it says that it is
    /// `ready`.
    pub(super) fn victim(&self, ready: &str) -> Result<Child> {
        let mut victim = Command::new(env::current_exe()?)
            .args(["victim", "--backend", self.backend.name(), "--device", &self.device])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(victim.stdout.take().ok_or("no output")?).lines();
        let said = lines.next().ok_or_else(|| format!("the other process is not {ready}"))??;
        same(said.as_str(), ready, "what the other process said")?;
        Ok(victim)
    }

    /// An address space of the backend with the device in it.
    ///
    /// # Errors
    ///
    /// Why it cannot be used.
    pub(crate) fn open(&self) -> Result<(VfioSpace, VfioDevice)> {
        Ok(VfioSpace::open(self.backend, self.device.parse()?)?)
    }
}

impl Default for Context {
    fn default() -> Self {
        Self { backend: Backend::Vfio, device: NVME.to_owned() }
    }
}

/// What a case may need to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The kernel has the backend.
    Backend,
    /// The backend is one of these: with others the case is not run and nothing is said.
    OneOf(&'static [Backend]),
    /// So many free hugepages of 2 MiB.
    Hugepages(u64),
    /// Instructions are counted, each a nanosecond.
    Counted,
    /// Somebody named it: it takes minutes.
    Named,
    /// The device has no IOMMU, and iommufd takes it. Other backends are not about it.
    Untranslated,
    /// A second function, bound to vfio-pci, whose BAR 2 is memory.
    Peer,
}

impl Need {
    /// Whether it can be met with a backend, whatever the guest has.
    pub(crate) fn is_about(self, backend: Backend) -> bool {
        match self {
            Self::OneOf(backends) => backends.contains(&backend),
            Self::Untranslated => backend == Backend::NoIommu,
            Self::Backend => backend != Backend::NoIommu,
            _ => true,
        }
    }

    /// Why it is not met, in one line; nothing where it is.
    pub(crate) fn lacks(self, context: &Context) -> Option<String> {
        match self {
            Self::Backend => {
                let path = match context.backend {
                    Backend::Vfio => "/dev/vfio/vfio",
                    _ => "/dev/iommu",
                };
                (!Path::new(path).exists()).then(|| format!("the kernel has no {path}"))
            }
            Self::OneOf(_) | Self::Named => None,
            Self::Untranslated => {
                let Ok(bdf) = context.device.parse() else {
                    return Some(format!("{} is no PCI function", context.device));
                };
                let reasons = System::new().why_not(bdf, Backend::NoIommu);
                reasons.first().map(ToString::to_string)
            }
            Self::Hugepages(count) => {
                let free = fs::read_to_string(FREE_HUGEPAGES).unwrap_or_default();
                let free: u64 = free.trim().parse().unwrap_or(0);
                (free < count).then(|| format!("{free} hugepages of 2 MiB are free, not {count}"))
            }
            Self::Counted => {
                let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
                let is_told = line.split_whitespace().any(|word| word == COUNTED);
                (!is_told).then(|| "times are not repeatable here".to_owned())
            }
            Self::Peer => match driver(PEER) {
                Some(name) if name == "vfio-pci" => None,
                _ => Some(format!("{PEER} is not bound to vfio-pci")),
            },
        }
    }
}

/// Does something while this process may lock 4 MiB, and has no privilege to lock more.
pub(super) fn with_4_mib_to_lock<T>(act: impl FnOnce() -> T) -> Result<T> {
    let (limits, rights) = (getrlimit(Resource::Memlock), capabilities(None)?);
    let limit = Rlimit { current: Some(4 * MIB), maximum: limits.maximum };
    setrlimit(Resource::Memlock, limit)?;
    let mut fewer = rights;
    fewer.effective.remove(CapabilitySet::IPC_LOCK);
    set_capabilities(None, fewer)?;
    let done = act();
    set_capabilities(None, rights)?;
    setrlimit(Resource::Memlock, limits)?;
    Ok(done)
}

/// A function in sysfs.
pub(crate) fn in_sysfs(bdf: &str) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(bdf)
}

/// The name of a function's driver.
pub(crate) fn driver(bdf: &str) -> Option<String> {
    let link = fs::read_link(in_sysfs(bdf).join("driver")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}
