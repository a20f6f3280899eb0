//! Programs that adopt dmaspan, in a workspace of their own, and drivers that others wrote, whose
//! own tests run over an adapter.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::run_all;
use crate::debian::{cannot_write, remove};
use crate::{Checked, cargo};

pub(super) const FOLDER: &str = "examples/adopters";
pub(super) const MANIFEST: &str = "examples/adopters/Cargo.toml";

/// The crate whose tests run over its adapter.
const VIRTIO: &str = "virtio-drivers";
/// The file that its tests reach memory by, and what stands in its place.
const HAL: &str = "src/hal/fake.rs";
const OURS: &str = "adapters/virtio-drivers/tests/upstream/fake.rs";

/// Lints the programs, runs them, and counts what they cost. They share the target directory, where
/// their dependencies have been built already.
pub(super) fn check() -> Checked {
    let target = crate::target_directory();
    let mut lints = cargo(&["clippy", "--manifest-path", MANIFEST, "--all-targets", "--locked"]);
    lints.arg("--target-dir").arg(&target).args(["--", "-D", "warnings"]);
    let mut tests = cargo(&["test", "--manifest-path", MANIFEST, "--locked"]);
    tests.arg("--target-dir").arg(&target);
    run_all([&mut lints, &mut tests])?;
    let virtio = copy(&target.join(VIRTIO))?;
    let mut theirs = cargo(&["test", "--lib", "--no-default-features", "--features", "alloc"]);
    theirs.arg("--manifest-path").arg(virtio.join("Cargo.toml"));
    theirs.arg("--target-dir").arg(&target);
    run_all([&mut theirs])
}

/// Copies the crate from where cargo has it, gives its tests our `Hal`, and returns the copy.
fn copy(to: &Path) -> Result<PathBuf, String> {
    let output = cargo(&["metadata", "--locked", "--format-version", "1"]).output();
    let output = output.map_err(|error| format!("cargo did not start: {error}"))?;
    let metadata = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("`cargo metadata` printed no JSON: {error}"))?;
    let from = folder(&metadata).ok_or("cargo does not know where virtio-drivers is")?;
    let written = || {
        remove(to)?;
        copy_all(&from.join("src"), &to.join("src"))?;
        fs::copy(crate::root().join(OURS), to.join(HAL))?;
        fs::copy(crate::root().join("Cargo.lock"), to.join("Cargo.lock"))?;
        let manifest = fs::read_to_string(from.join("Cargo.toml"))?;
        fs::write(to.join("Cargo.toml"), with_adapter(&manifest, &crate::root()))
    };
    written().map_err(|error| cannot_write(to, &error))?;
    Ok(to.to_owned())
}

/// Where the sources of the crate are, of what `cargo metadata` prints.
fn folder(metadata: &Value) -> Option<PathBuf> {
    let packages = metadata["packages"].as_array()?;
    let found = packages.iter().find(|package| package["name"] == VIRTIO)?;
    Some(Path::new(found["manifest_path"].as_str()?).parent()?.to_owned())
}

/// A manifest whose tests have the adapter, in a workspace of its own.
fn with_adapter(manifest: &str, root: &Path) -> String {
    let adapter =
        [("dmaspan", "crates/dmaspan"), ("dmaspan-virtio-drivers", "adapters/virtio-drivers")];
    let adapter = adapter.map(|(name, place)| {
        let path = root.join(place).display().to_string();
        format!("\n[dev-dependencies.{name}]\npath = {path:?}\n")
    });
    format!("{manifest}{}\n[workspace]\n", adapter.concat())
}

fn copy_all(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let place = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_all(&entry.path(), &place)?;
        } else {
            fs::write(place, fs::read(entry.path())?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crate_is_found_and_its_copy_has_the_adapter_for_its_tests() {
        let metadata = serde_json::json!({ "packages": [
            { "name": "other", "manifest_path": "/a/Cargo.toml" },
            { "name": "virtio-drivers", "manifest_path": "/b/Cargo.toml" },
        ]});
        assert_eq!(folder(&metadata), Some(PathBuf::from("/b")));
        assert_eq!(folder(&serde_json::json!({ "packages": [] })), None);
        let manifest = with_adapter("[package]\n", Path::new("/a b"));
        assert!(manifest.starts_with("[package]\n"));
        assert!(manifest.contains("[dev-dependencies.dmaspan]\npath = \"/a b/crates/dmaspan\"\n"));
        assert!(manifest.ends_with("\n[workspace]\n"));
    }
}
