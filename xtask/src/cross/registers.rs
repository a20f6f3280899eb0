//! The instructions by which `MmioRegion` reads and writes registers, as a disassembler shows them.

use std::process::Command;

use super::Target;
use super::tools::Tools;
use crate::debian::output_of;

/// What a function does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    Read,
    Write,
}

/// The functions, by what their names end with before a hash.
const FUNCTIONS: [(&str, Does); 4] = [
    ("6read32", Does::Read),
    ("6read64", Does::Read),
    ("7write32", Does::Write),
    ("7write64", Does::Write),
];

/// What a CPU has for one of them, in that order, and its barrier.
fn expected(machine: &str) -> ([&'static str; 4], &'static str) {
    match machine {
        "aarch64" => (["ldr w", "ldr x", "str w", "str x"], "dsb sy"),
        _ => (["lw ", "ld ", "sw ", "sd "], "fence"),
    }
}

/// Builds the drivers, optimised, and looks at what became of the accesses.
pub(super) fn check(target: &Target, tools: &Tools) -> Result<(), String> {
    let folder = crate::target_directory().join("cross");
    let object = folder.join(format!("registers-{}.o", target.machine));
    let mut build = crate::cargo(&["rustc", "--quiet", "--release", "-p", "dmaspan-drivers"]);
    build.args(["--lib", "--target", target.bare, "--target-dir"]).arg(&folder);
    // One unit, so that all of it is in one file.
    build.args(["--", "-C", "codegen-units=1", &format!("--emit=obj={}", object.display())]);
    crate::run(&mut build)?;
    let mut objdump = Command::new(tools.disassembler(target.gnu));
    let text = output_of(objdump.args(["-d", "--no-show-raw-insn"]).arg(&object))?;
    let (accesses, barrier) = expected(target.machine);
    for ((function, does), access) in FUNCTIONS.into_iter().zip(accesses) {
        let body = body(&text, function);
        let shown = find(&body, access, barrier, does);
        let shown = shown.map_err(|why| format!("{} {function}: {why}", target.machine))?;
        crate::say(&format!("   {} {}: {shown}", target.machine, &function[1..]));
    }
    Ok(())
}

/// The instructions of a method of `MmioRegion`.
fn body(text: &str, function: &str) -> Vec<String> {
    let is_begin = |line: &str| {
        line.ends_with(">:")
            && line.contains("MmioRegion")
            && line.contains(&format!("{function}17h"))
    };
    let lines = text.lines().skip_while(|line| !is_begin(line)).skip(1);
    let lines = lines.take_while(|line| !line.trim().is_empty());
    let instruction = |line: &str| {
        let words: Vec<&str> = line.split(':').nth(1)?.split_whitespace().collect();
        Some(words.join(" "))
    };
    lines.filter_map(instruction).collect()
}

/// The access, where the function has one with a plain address, and the barrier on its side with at
/// most an addition between them.
fn find(body: &[String], access: &str, barrier: &str, does: Does) -> Result<String, String> {
    let barriers: Vec<usize> =
        positions(body, |line| line == barrier || line.starts_with("fence "));
    let [barrier_at] = barriers[..] else {
        return Err(format!("{} barriers, where one is expected: {body:?}", barriers.len()));
    };
    let (begin, end) = match does {
        Does::Read => (barrier_at.saturating_sub(2), barrier_at),
        Does::Write => (barrier_at, barrier_at + 3),
    };
    let near = body.get(begin..end.min(body.len())).unwrap_or_default();
    // No write-back form, no offset, no pair.
    let is_plain = |line: &str| {
        let address = line.rsplit(' ').next().unwrap_or_default();
        line.starts_with(access)
            && (address.starts_with('[') && address.ends_with(']') || address.contains("0("))
    };
    match positions(near, is_plain)[..] {
        [at] => Ok(format!("{} with {barrier}", near[at])),
        _ => Err(format!("no `{access}` beside the barrier: {body:?}")),
    }
}

fn positions(lines: &[String], is_one: impl Fn(&str) -> bool) -> Vec<usize> {
    let found = lines.iter().enumerate().filter(|(_, line)| is_one(line));
    found.map(|(at, _)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(lines: &[&str], access: &str, does: Does) -> Result<String, String> {
        let lines: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
        find(&lines, access, "dsb sy", does)
    }

    #[test]
    fn write_back_forms_and_barriers_on_the_wrong_side_are_refused() {
        assert!(found(&["ldr x8, [x0]", "ldr w0, [x8]", "dsb sy"], "ldr w", Does::Read).is_ok());
        assert!(found(&["dsb sy", "add x8, x8, x1", "str w2, [x8]"], "str w", Does::Write).is_ok());
        for wrong in [
            &["ldr w0, [x8], #4", "dsb sy"][..],
            &["ldr w0, [x8, #4]!", "dsb sy"],
            &["dsb sy", "ldr w0, [x8]"],
            &["ldr w0, [x8]"],
            &["ldr x0, [x8]", "dsb sy"],
        ] {
            assert!(found(wrong, "ldr w", Does::Read).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_function_is_read_from_what_a_disassembler_prints() {
        let text = "0000 <_ZN1_MmioRegion_Mmio$GT$6read3217h0E>:\n   0:\tldr\tw0, [x8]\n   \
                    4:\tdsb\tsy\n\nDisassembly of section x:\n";
        assert_eq!(body(text, "6read32"), ["ldr w0, [x8]", "dsb sy"]);
        assert!(body(text, "6read64").is_empty());
    }
}
