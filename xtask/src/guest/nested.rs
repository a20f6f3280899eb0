//! QEMU for inside a guest, of which the guest's kernel is the host.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::cpio::Archive;
use super::initrd::read;
use crate::debian::output_of;

const NAME: &str = "qemu-system-x86_64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "ld-linux-x86-64.so.2";
/// Its firmware, and what it puts before a kernel that it boots.
const DATA: [&str; 3] = [
    "usr/share/seabios/bios-256k.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/kvmvapic.bin",
];

/// Adds the program to an archive, with what it stands on, and `vmlinuz`, the guest's own kernel.
///
/// # Errors
///
/// Why it cannot be taken from beside `program`, in one line.
pub(super) fn add(program: &Path, kernel: &Path, archive: &mut Archive) -> Result<(), String> {
    let root = program.parent().and_then(Path::parent).unwrap_or(program).join("root");
    let libraries = root.join(LIBRARIES);
    let (loader, inside) = (libraries.join(LOADER), root.join("usr/bin").join(NAME));
    if !loader.is_file() || !inside.is_file() {
        let program = program.display();
        return Err(format!(
            "{program} is not one that `cargo xtask hw --install` put there, with its libraries"
        ));
    }
    let mut list = Command::new(&loader);
    list.arg("--library-path").arg(&libraries).arg("--list").arg(&inside);
    let list = output_of(&mut list)?;
    for folder in ["lib64", "usr", "usr/lib", LIBRARIES, "usr/share"] {
        archive.folder(folder);
    }
    ["usr/share/qemu", "usr/share/seabios"].iter().for_each(|folder| archive.folder(folder));
    archive.file(&format!("lib64/{LOADER}"), &read(&loader)?);
    for file in needed(&list) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("{LIBRARIES}/{name}"), &read(&file)?);
    }
    archive.file(&format!("bin/{NAME}"), &read(&inside)?);
    for data in DATA {
        archive.file(data, &read(&root.join(data))?);
    }
    archive.file("vmlinuz", &read(kernel)?);
    Ok(())
}

/// The files in what a loader lists: `NAME => FILE (ADDRESS)`, a line each.
pub(super) fn needed(list: &str) -> impl Iterator<Item = PathBuf> {
    let file = |line: &str| Some(PathBuf::from(line.split_once("=> ")?.1.rsplit_once(" (")?.0));
    list.lines().filter_map(file).filter(|file| file.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_loader_lists_are_files() {
        let list = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibz.so.1 => /a b/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n\tlibm.so.6 => not found\n";
        assert_eq!(needed(list).collect::<Vec<_>>(), [PathBuf::from("/a b/libz.so.1")]);
    }
}
