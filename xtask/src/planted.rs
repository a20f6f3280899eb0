//! Accesses that are wrong, planted into a copy of the core wherever it moves bytes: Miri has to
//! find each in the tests that run methods on two threads.
//!
//! The copy is built once. Which plant grows is a variable of the environment, which Miri is told:
//! its own cargo keeps the environment of the build.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use crate::debian::cannot_write;
use crate::sanitize::MIRI_FLAGS;

/// A call that moves bytes: its file, itself, the address that it begins at, and the test that
/// makes it beside others.
struct Place {
    file: &'static str,
    call: &'static str,
    at: &'static str,
    test: &'static str,
}

const KERNELS: &str = "memory_of_a_kernels_pool";
const COHERENT: &str = "coherent_memory_is_read_and_written";
const PLACES: [Place; 8] = [
    bounced("bytes::copy(from, to, number(len))", "to"),
    bounced("bytes::clear(start, len)", "start"),
    bounced("bytes::read(start, into)", "start"),
    bounced("bytes::write(from, start)", "start"),
    coherent("bytes::load(at.as_ptr())", "at.as_ptr()"),
    coherent("bytes::store(at.as_ptr(), value)", "at.as_ptr()"),
    coherent("bytes::read(from.as_ptr(), into)", "from.as_ptr()"),
    coherent("bytes::write(from, to.as_ptr())", "to.as_ptr()"),
];

const fn bounced(call: &'static str, at: &'static str) -> Place {
    Place { file: "src/dma/bounce/frames.rs", call, at, test: KERNELS }
}

const fn coherent(call: &'static str, at: &'static str) -> Place {
    Place { file: "src/dma/coherent/frames.rs", call, at, test: COHERENT }
}

/// What grows: its name, and what Miri says of it.
const PLANTS: [(&str, &str); 2] =
    [("volatile", "Data race detected"), ("mixed", "Race condition detected")];

/// What is put before each call: nothing, or an access of the bytes there that is no atomic one, or
/// one of another size.
const PLANT: &str = "
extern crate std;
#[allow(unsafe_code, clippy::all)]
pub(crate) fn plant<T>(place: usize, at: *const T) {
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
    let grows = std::env::var(\"PLANTED\").unwrap_or_default();
    let at = at.cast_mut().cast::<u8>();
    if grows == std::format!(\"{place}-volatile\") {
        unsafe { at.write_volatile(at.read_volatile()) };
    } else if grows == std::format!(\"{place}-mixed\") {
        let around = at.map_addr(|at| at & !7).cast();
        unsafe { AtomicU64::from_ptr(around) }.fetch_or(0, Relaxed);
    }
}
";

const MANIFEST: &str = "\
[package]
name = \"dmaspan\"
edition = \"2024\"
[features]
log = []
[dependencies]
bitflags = \"2.13\"
lock_api = \"0.4\"
thiserror = { version = \"2.0\", default-features = false }
[dev-dependencies]
parking_lot = \"0.12\"
[workspace]
";

/// Plants all, one after the other; `miri` makes a command of these arguments.
///
/// # Errors
///
/// The first that is not found, in one line, and what Miri said.
pub(crate) fn run(miri: impl Fn(&[&str]) -> Command) -> Result<(), String> {
    let folder = crate::target_directory().join("planted-bytes");
    write(&folder).map_err(|error| cannot_write(&folder, &error))?;
    let test = |test: &str, grows: &str| {
        let mut command = miri(&["miri", "test", "--quiet", "--test", "at_once"]);
        // Miri's own panics follow where it emulates weak memory at several sizes.
        let flags = "-Zmiri-disable-weak-memory-emulation -Zmiri-env-set=PLANTED";
        let flags = format!("{MIRI_FLAGS} {flags}={grows}");
        command.args(["--", test]).env("MIRIFLAGS", flags).current_dir(&folder);
        command.output().map_err(|error| format!("rustup did not start: {error}"))
    };
    for (at, place) in PLACES.iter().enumerate() {
        for (plant, wanted) in PLANTS {
            let output = test(place.test, &format!("{at}-{plant}"))?;
            let said = [&output.stdout[..], &output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            if output.status.success() || !said.contains(wanted) {
                let Place { file, call, .. } = place;
                return Err(format!(
                    "not found by Miri: a {plant} access planted before `{call}` of {file}; it \
                     says:\n{said}"
                ));
            }
        }
    }
    crate::say(&format!("   found by Miri: {} accesses", PLACES.len() * PLANTS.len()));
    Ok(())
}

/// The core with all plants, none of which grows by itself.
fn write(folder: &Path) -> io::Result<()> {
    let root = crate::root();
    for part in ["src", "tests/at_once"] {
        copy(&root.join("crates/dmaspan").join(part), &folder.join(part))?;
    }
    fs::write(folder.join("Cargo.toml"), MANIFEST)?;
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    fs::copy(root.join("crates/dmaspan/README.md"), folder.join("README.md"))?;
    let lib = folder.join("src/lib.rs");
    fs::write(&lib, fs::read_to_string(&lib)? + PLANT)?;
    for (number, Place { file, call, at, .. }) in PLACES.iter().enumerate() {
        let file = folder.join(file);
        let text = fs::read_to_string(&file)?;
        if text.matches(call).count() != 1 {
            let why = format!("`{call}` is not there once");
            return Err(io::Error::new(io::ErrorKind::NotFound, why));
        }
        let planted = format!("{{ crate::plant({number}, {at}); {call} }}");
        fs::write(&file, text.replace(call, &planted))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}
