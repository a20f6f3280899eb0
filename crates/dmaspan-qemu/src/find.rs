//! This looks for a QEMU that is new enough.

use std::env;
use std::fmt;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder with the QEMU to use, before all others.
const FOLDER: &str = "DMASPAN_QEMU";
/// What to do without QEMU: `require` makes it a failure.
const STRICT: &str = "DMASPAN_HW";
const ADVICE: &str = "`cargo xtask hw` gets one, or DMASPAN_QEMU names its folder";
/// The first release with the devices that the tests need.
const OLDEST: Version = Version { major: 11, minor: 1 };

/// A processor architecture, by QEMU's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// Arm, 64 bits.
    Aarch64,
    /// RISC-V, 64 bits.
    Riscv64,
    /// x86, 64 bits.
    X86_64,
}

impl Arch {
    /// The name of its QEMU.
    pub const fn program(self) -> &'static str {
        match self {
            Self::Aarch64 => "qemu-system-aarch64",
            Self::Riscv64 => "qemu-system-riscv64",
            Self::X86_64 => "qemu-system-x86_64",
        }
    }
}

/// A release of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Its first number.
    pub major: u32,
    /// Its second.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A QEMU that will do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qemu {
    /// Of which architecture.
    pub arch: Arch,
    /// The program.
    pub path: PathBuf,
    /// What it says of itself.
    pub version: Version,
}

/// Why there is no QEMU that will do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// None was found.
    #[error("no {program} of {OLDEST} or later; {ADVICE}")]
    None {
        /// Its name.
        program: &'static str,
    },
    /// One was found that is too old, or is none.
    #[error(
        "{} is {}, and {OLDEST} is needed; {ADVICE}",
        path.display(), version.map_or("no QEMU that starts".into(), |v| v.to_string())
    )]
    Unfit {
        /// Which.
        path: PathBuf,
        /// What it says of itself, if it says anything.
        version: Option<Version>,
    },
}

/// Looks for the architecture's QEMU: in the folder that `DMASPAN_QEMU` names, where
/// `cargo xtask hw` puts it, and in `PATH`.
///
/// # Errors
///
/// [`Missing`] names the first that is unfit, if there is one.
pub fn find(arch: Arch) -> Result<Qemu, Missing> {
    let program = arch.program();
    let path = env::var_os("PATH").unwrap_or_default();
    let named = env::var_os(FOLDER).map(PathBuf::from);
    let folders = named.into_iter().chain(installed()).chain(env::split_paths(&path));
    let mut unfit = None;
    for path in folders.map(|folder| folder.join(program)).filter(|path| path.is_file()) {
        match version(&path) {
            Some(version) if version >= OLDEST => return Ok(Qemu { arch, path, version }),
            version => {
                unfit.get_or_insert(Missing::Unfit { path, version });
            }
        }
    }
    Err(unfit.unwrap_or(Missing::None { program }))
}

/// The architecture's QEMU, or `None` with a line on stderr that says SKIP and why: a test returns
/// then.
///
/// # Panics
///
/// With `DMASPAN_HW=require` in the environment, where there is none: what must not be skipped has
/// failed.
pub fn ready(arch: Arch) -> Option<Qemu> {
    match find(arch) {
        Ok(qemu) => Some(qemu),
        Err(missing) if env::var_os(STRICT).is_some_and(|value| value == "require") => {
            panic!("{missing} ({STRICT}=require)")
        }
        Err(missing) => {
            // Not by `eprintln!`, whose lines the test framework keeps for itself; and as one
            // piece, into which no other thread's falls. Where nobody reads stderr there is nobody
            // to tell.
            let _ = io::stderr().write_all(format!("SKIP: {missing}\n").as_bytes());
            None
        }
    }
}

/// Where `cargo xtask hw` puts QEMU: in the target directory, which this program lies in, and
/// which cargo marks as a cache.
fn installed() -> Option<PathBuf> {
    let this = env::current_exe().ok()?;
    let target = this.ancestors().find(|folder| folder.join("CACHEDIR.TAG").is_file())?;
    Some(target.join("qemu").join("bin"))
}

fn version(path: &Path) -> Option<Version> {
    let mut command = Command::new(path);
    let output = command.arg("--version").stdin(Stdio::null()).output().ok()?;
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// The version in "QEMU emulator version 11.1.3 (…)".
fn parse(text: &str) -> Option<Version> {
    let mut numbers = text.split("version ").nth(1)?.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some(Version { major: number()?, minor: number()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let of = |text| parse(text);
        let debian = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\nCopyright";
        assert_eq!(of(debian), Some(Version { major: 11, minor: 1 }));
        assert!(of("QEMU emulator version 10.9.0") < Some(OLDEST));
        assert!(of("QEMU emulator version 11.0.2") < Some(OLDEST));
        assert!(of("QEMU emulator version 12.0.0") > Some(OLDEST));
        assert_eq!(of("something else"), None);
        assert_eq!(of("QEMU emulator version x"), None);
    }
}
