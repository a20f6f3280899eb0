//! The proof that what is published stands by itself.
//!
//! `cargo package` makes an archive of each package. All archives are unpacked into a workspace of
//! their own, where they are built and their documentation's examples run: a file that a package
//! forgot is missing there, and so is a path that leads out of it.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::debian::{cannot_write, remove};
use crate::published::{self, Package};
use crate::{Checked, Outcome};

/// Where archives are unpacked, below the target directory.
const FOLDER: &str = "unpacked";

/// Packages the workspace, unpacks what is published, builds it, and runs the examples of its
/// documentation.
///
/// # Errors
///
/// What failed, in one line; cargo has said more by then.
pub fn check() -> Checked {
    let target = crate::target_directory();
    let archives = target.join("package");
    let mut package = crate::cargo(&["package", "--workspace", "--no-verify", "--allow-dirty"]);
    crate::run(package.args(["--quiet", "--target-dir"]).arg(&target))
        .map_err(|why| format!("`cargo package --workspace` failed: {why}"))?;

    let packages = published::packages()?;
    let folder = target.join(FOLDER);
    make_empty(&folder, &packages)?;
    for package in &packages {
        let archive = archives.join(format!("{}.crate", directory(package)));
        let mut unpack = Command::new("tar");
        crate::run(unpack.arg("-xzf").arg(&archive).arg("-C").arg(&folder))
            .map_err(|why| format!("{} cannot be unpacked: {why}", archive.display()))?;
        let unpacked = folder.join(directory(package));
        contents(package, &unpacked)?;
        give_back(package, &packages, &unpacked.join("Cargo.toml"))?;
    }
    let root = fs::read_to_string(crate::root().join("Cargo.toml"));
    let root = root.map_err(|error| format!("the workspace's Cargo.toml: {error}"))?;
    write(&folder.join("Cargo.toml"), &manifest(&packages, &root))?;
    let lock = fs::copy(crate::root().join("Cargo.lock"), folder.join("Cargo.lock"));
    lock.map_err(|error| format!("Cargo.lock cannot be copied: {error}"))?;

    // What the workspace's tests have built is not built again.
    for arguments in
        [&["check", "--workspace", "--examples"][..], &["test", "--workspace", "--doc"]]
    {
        let mut cargo = crate::cargo(arguments);
        crate::run(cargo.arg("--quiet").arg("--target-dir").arg(&target).current_dir(&folder))
            .map_err(|why| format!("`cargo {}` in {FOLDER}: {why}", arguments.join(" ")))?;
    }
    let names: Vec<_> = packages.iter().map(|package| package.name.as_str()).collect();
    crate::say(&format!("package: {} build and pass their examples unpacked", names.join(", ")));
    Ok(Outcome::Passed)
}

/// What the folder of an unpacked package is called.
fn directory(package: &Package) -> String {
    format!("{}-{}", package.name, package.version)
}

/// Takes out what an earlier call has unpacked.
fn make_empty(folder: &Path, packages: &[Package]) -> Result<(), String> {
    for package in packages {
        let old = folder.join(directory(package));
        remove(&old).map_err(|error| format!("{} cannot be removed: {error}", old.display()))?;
    }
    let made = fs::create_dir_all(folder);
    made.map_err(|error| format!("{} cannot be made: {error}", folder.display()))
}

/// Fails where a package lacks a file that each has to have.
fn contents(package: &Package, unpacked: &Path) -> Result<(), String> {
    for name in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        if !unpacked.join(name).is_file() {
            let folder = package.folder.display();
            return Err(format!(
                "the package {} has no {name}; put it into {folder}",
                package.name
            ));
        }
    }
    Ok(())
}

/// Cargo leaves a dependency out of a package's tests that names no version, since it depends on
/// the package itself. Examples need it: it is given back here, and said so.
fn give_back(package: &Package, packages: &[Package], manifest: &Path) -> Result<(), String> {
    let left_out = packages.iter().filter(|other| package.left_out.contains(&other.name));
    let given: Vec<&Package> = left_out.collect();
    if given.is_empty() {
        return Ok(());
    }
    let text = fs::read_to_string(manifest);
    let text = text.map_err(|error| format!("{} cannot be read: {error}", manifest.display()))?;
    write(manifest, &(text + &dependencies(&given)))?;
    let names: Vec<_> = given.iter().map(|package| package.name.as_str()).collect();
    let names = names.join(" and ");
    crate::say(&format!("package: the examples of {} are run with {names}", package.name));
    Ok(())
}

/// Dependencies of tests on unpacked packages, as a manifest has them.
fn dependencies(packages: &[&Package]) -> String {
    packages.iter().fold(String::new(), |mut text, package| {
        let (name, folder) = (&package.name, directory(package));
        let _ = write!(text, "\n[dev-dependencies.{name}]\npath = \"../{folder}\"\n");
        text
    })
}

/// The manifest of the workspace in which packages are unpacked. It has the profiles of `root`, and
/// packages that depend on each other find each other there.
fn manifest(packages: &[Package], root: &str) -> String {
    let mut text = String::from("[workspace]\nresolver = \"3\"\nmembers = [\n");
    for package in packages {
        let _ = writeln!(text, "    \"{}\",", directory(package));
    }
    text.push_str("]\n\n[patch.crates-io]\n");
    for package in packages {
        let _ = writeln!(text, "{} = {{ path = \"{}\" }}", package.name, directory(package));
    }
    let mut is_profile = false;
    for line in root.lines() {
        if line.starts_with('[') {
            // One of a package that is not here would be a warning.
            is_profile = line.starts_with("[profile.") && !line.contains(".package");
        }
        if is_profile && !line.starts_with('#') {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|error| cannot_write(file, &error))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn package(name: &str, left_out: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            version: "0.1.0".to_owned(),
            folder: PathBuf::new(),
            rust: "1.88".to_owned(),
            is_library: true,
            left_out: left_out.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    #[test]
    fn unpacked_packages_use_each_other_and_the_profiles_of_the_workspace() {
        let root = "[workspace]\nx = 1\n\n[profile.test]\nopt-level = 1\n# A remark.\n\
                    [profile.release.package.other]\ny = 2\n[profile.dev]\nz = 3\n";
        let text = manifest(&[package("a", &["b"]), package("b", &[])], root);
        assert_eq!(
            text,
            "[workspace]\nresolver = \"3\"\nmembers = [\n    \"a-0.1.0\",\n    \"b-0.1.0\",\n]\n\n\
             [patch.crates-io]\na = { path = \"a-0.1.0\" }\nb = { path = \"b-0.1.0\" }\n\
             [profile.test]\nopt-level = 1\n[profile.dev]\nz = 3\n"
        );
    }

    #[test]
    fn what_cargo_leaves_out_is_given_back_as_the_unpacked_package() {
        assert_eq!(
            dependencies(&[&package("b", &[])]),
            "\n[dev-dependencies.b]\npath = \"../b-0.1.0\"\n"
        );
        assert_eq!(dependencies(&[]), "");
    }

    #[test]
    fn a_package_without_its_licence_is_refused() {
        let empty = Path::new("does-not-exist");
        let why = contents(&package("a", &[]), empty).unwrap_err();
        assert!(why.starts_with("the package a has no README.md"), "{why}");
    }
}
