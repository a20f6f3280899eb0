//! Accesses that are wrong, planted into a copy of the core wherever it moves bytes: Miri has to
//! find each in the tests that run methods on two threads.
//!
//! The copy is built once. Which plant grows is a variable of the environment, which Miri is told:
//! its own cargo keeps the environment of the build.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::debian::cannot_write;
use crate::sanitize::{self, MIRI_FLAGS};
use crate::tree::Tree;

/// The files whose calls move bytes, what these begin with, how many there are, and the test that
/// makes them beside others.
const FILES: [(&str, &str, usize, &str); 3] = [
    ("src/dma/bounce/frames.rs", "bytes::", 4, "memory_of_a_kernels_pool"),
    ("src/dma/coherent/frames.rs", "bytes::", 4, "coherent_memory_is_read_and_written"),
    ("src/bytes.rs", "S::", 2, "bytes_and_numbers"),
];
/// What a call begins with that has memory which nobody else has yet.
const ALONE: &str = "bytes::clear(self.";
/// What grows: its name, and what Miri says of it.
const PLANTS: [(&str, &str); 2] =
    [("volatile", "Data race detected"), ("mixed", "Race condition detected")];

/// Plants all, one after the other; `miri` makes a command of these arguments.
///
/// # Errors
///
/// The first that is not found, in one line, and what Miri said.
pub(crate) fn run(miri: impl Fn(&[&str]) -> Command) -> Result<(), String> {
    let folder = crate::target_directory().join("planted-bytes");
    for (number, (call, test)) in write(&folder)?.iter().enumerate() {
        for (kind, (plant, wanted)) in PLANTS.into_iter().enumerate() {
            let mut command = miri(&["miri", "test", "--quiet", "--test", "at_once"]);
            // Miri's own panics follow where it emulates weak memory at several sizes.
            let flags = "-Zmiri-disable-weak-memory-emulation -Zmiri-env-set=PLANTED";
            let flags = format!("{MIRI_FLAGS} {flags}={}", 2 * number + kind);
            command.args(["--", test]).env("MIRIFLAGS", flags).current_dir(&folder);
            sanitize::finds(command, &format!("Miri, {plant} before {call}"), wanted)?;
        }
    }
    Ok(())
}

/// The core with all plants, none of which grows by itself: the calls and their tests, by number.
fn write(folder: &Path) -> Result<Vec<(String, &'static str)>, String> {
    let mut calls = Vec::new();
    for file in Tree::of_workspace()?.files() {
        let path = match (file.path.as_str(), file.path.strip_prefix("crates/dmaspan/")) {
            ("xtask/planted/manifest.toml", _) => "Cargo.toml",
            (path @ "Cargo.lock", _) => path,
            (_, Some(path)) if path != "Cargo.toml" => path,
            _ => continue,
        };
        let mut text = file.text.clone();
        if path == "src/lib.rs" {
            text += include_str!("../planted/plant.rs");
        }
        for &(of, begin, count, test) in FILES.iter().filter(|(of, ..)| *of == path) {
            let blocks = file.text.split("unsafe { ").filter_map(|it| Some(it.split_once(" }")?.0));
            let moves = blocks.filter(|it| it.starts_with(begin) && !it.starts_with(ALONE));
            let before = calls.len();
            for call in moves {
                // A caller's own buffer has fewer bytes than a word.
                let in_word = if begin == "S::" { "size_of::<S>() == 8" } else { "true" };
                let (number, at) = (calls.len(), start(call));
                let planted = format!("{{ crate::plant({number}, {at}, {in_word}); {call} }}");
                text = text.replace(call, &planted);
                calls.push((format!("`{call}` of {of}"), test));
            }
            if calls.len() - before != count {
                return Err(format!("{of} has not {count} calls that move bytes"));
            }
        }
        let to = folder.join(path);
        let written = fs::create_dir_all(to.parent().unwrap_or(folder));
        let written = written.and_then(|()| fs::write(&to, text));
        written.map_err(|error| cannot_write(&to, &error))?;
    }
    Ok(calls)
}

/// Where a call begins to move bytes, or to write them.
fn start(call: &str) -> &str {
    let taken = call.split_once('(').map_or(call, |(_, taken)| taken);
    let taken = taken.strip_suffix(')').unwrap_or(taken);
    let is_second = ["bytes::copy(", "bytes::write("].iter().any(|it| call.starts_with(it));
    taken.split(", ").nth(usize::from(is_second)).unwrap_or(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plants_stand_where_bytes_are_moved() {
        assert_eq!(start("bytes::copy(from, to, number(len))"), "to");
        assert_eq!(start("bytes::read(from.as_ptr(), into)"), "from.as_ptr()");
        let folder = std::env::temp_dir().join(format!("planted-{}", std::process::id()));
        let written = write(&folder);
        let planted = fs::read_to_string(folder.join("src/dma/bounce/frames.rs"));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(written.map(|calls| calls.len()), Ok(10));
        let clear = "unsafe { { crate::plant(3, start, true); bytes::clear(start, len) } };";
        assert!(planted.unwrap().contains(clear));
    }
}
