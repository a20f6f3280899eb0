//! The program in namespaces, as containers have them.

use std::io::{self, Write};
use std::process::{Command, Output};

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");

/// The output of a shell's command in namespaces; `None` where this machine permits none.
fn inside(namespaces: &str, command: &str) -> Option<Output> {
    let unshare = |command: &str| {
        let words: Vec<&str> = namespaces.split(' ').collect();
        Command::new("unshare").args(words).args(["sh", "-c", command]).output()
    };
    match unshare("true") {
        Ok(output) if output.status.success() => {}
        refused => {
            let line = format!("SKIP: `unshare {namespaces}` is refused here: {refused:?}\n");
            let _ = io::stderr().write_all(line.as_bytes());
            return None;
        }
    }
    Some(unshare(&command.replace("dmaspan", DMASPAN)).unwrap())
}

/// What a command prints, in one line without indents.
fn flat(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn in_a_user_namespace_the_limit_of_locked_memory_is_seen_named_and_kept() {
    let doctor = "ulimit -l 8192; dmaspan doctor";
    let Some(doctor) = inside("-U -r", doctor) else { return };
    let text = flat(&doctor);
    assert!(text.contains("locked memory: only 8 MiB may be locked (RLIMIT_MEMLOCK)"), "{text}");
    assert!(text.contains("a user namespace, where CAP_IPC_LOCK does not lift that"), "{text}");

    let chosen = inside("-U -r", "ulimit -l 8192; dmaspan map --memory base --runs 1").unwrap();
    let text = flat(&chosen);
    assert!(chosen.status.success(), "{text} {chosen:?}");
    assert!(text.contains("this process may pin only 8 MiB"), "{text}");
    assert!(text.contains("as root outside of this user namespace"), "{text}");

    let asked = inside("-U -r", "ulimit -l 8192; dmaspan map 16M --memory base --runs 1").unwrap();
    let text = flat(&asked);
    assert!(!asked.status.success(), "{text}");
    assert!(
        text.contains("exceeds the limit of 8 MiB of locked memory (RLIMIT_MEMLOCK)"),
        "{text}"
    );
    assert!(text.contains("CAP_IPC_LOCK outside of this user namespace"), "{text}");
    assert!(!text.contains("has no memory to pin"), "{text}");
}

#[test]
fn in_a_container_no_disk_is_unused_because_its_mounts_are_not_seen() {
    // Another root, in which nothing is mounted of the machine but its sysfs.
    let command = "mount -t tmpfs none /mnt && mkdir /mnt/sys /mnt/proc && \
                   cp --parents dmaspan $(ldd dmaspan | grep -o '/[^ ]*') /mnt && \
                   mount --rbind /sys /mnt/sys && mount -t proc none /mnt/proc && \
                   chroot /mnt dmaspan devices --format json";
    let Some(output) = inside("-U -r -m -p -f --mount-proc", command) else { return };
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(why.contains("no PCI") || why.contains("mount:"), "{why}");
        let _ = io::stderr().write_all(format!("SKIP: {why}\n").as_bytes());
        return;
    }
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for device in report["devices"].as_array().unwrap() {
        let is_disk = device["class"].as_str().unwrap().starts_with("01");
        let is_used = !device["uses"].as_array().unwrap().is_empty();
        assert!(!is_disk || is_used || device["driver"].is_null(), "{device}");
    }
}
