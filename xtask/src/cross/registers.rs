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

/// What a CPU has for one of them, in that order, and its barrier. One of 32 bits has each half of
/// 64 by itself.
fn expected(machine: &str) -> ([&'static str; 4], &'static str) {
    match machine {
        "aarch64" => (["ldr w", "ldr x", "str w", "str x"], "dsb sy"),
        "arm" => (["ldr r", "ldr r", "str r", "str r"], "dsb sy"),
        _ => (["lw ", "ld ", "sw ", "sd "], "fence"),
    }
}

/// How many instructions a CPU may have from a barrier to the store behind it: of 32 bits, it first
/// reads from its stack what it is to store.
const BEHIND: usize = 6;

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
        let halves = if function.ends_with("64") && !target.is_64_bits { 2 } else { 1 };
        let shown = find(&body, access, barrier, does, halves);
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

/// The accesses of a function, one or two, where each has a plain address and a barrier beside it,
/// with little between them. Of two halves the upper one is to be written first.
fn find(
    body: &[String],
    access: &str,
    barrier: &str,
    does: Does,
    halves: usize,
) -> Result<String, String> {
    let barriers = positions(body, |line| line == barrier || line.starts_with("fence "));
    if barriers.len() != halves {
        let found = barriers.len();
        return Err(format!("{found} barriers, where {halves} are expected: {body:?}"));
    }
    // No write-back form, no offset, no pair.
    let is_plain = |line: &str| {
        let address = line.rsplit(' ').next().unwrap_or_default();
        line.starts_with(access)
            && (address.starts_with('[') && address.ends_with(']') || address.contains("0("))
    };
    let mut shown = Vec::new();
    for (index, &at) in barriers.iter().enumerate() {
        let next = barriers.get(index + 1).copied().unwrap_or(body.len());
        let near = match does {
            Does::Read => &body[at.saturating_sub(2)..at],
            Does::Write => &body[at..next.min(at + BEHIND)],
        };
        let [found] = positions(near, is_plain)[..] else {
            return Err(format!("no `{access}` beside the barrier: {body:?}"));
        };
        let is_upper = |line: &String| line.starts_with("add ") && line.ends_with("#4");
        if halves == 2 && does == Does::Write && index == 0 && !near[..found].iter().any(is_upper) {
            return Err(format!("the lower half is written first: {body:?}"));
        }
        shown.push(near[found].as_str());
    }
    Ok(format!("{} with {barrier}", shown.join(", ")))
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
        find(&lines, access, "dsb sy", does, 1)
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
    fn of_two_halves_the_upper_one_is_written_first_and_each_has_its_barrier() {
        let (low, high) = ("str r3, [r0]", "str r1, [r2]");
        let found = |lines: &[&str]| {
            let lines: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
            find(&lines, "str r", "dsb sy", Does::Write, 2)
        };
        let step = "add r2, r0, #4";
        assert!(found(&["dsb sy", "ldr r1, [fp, #12]", step, high, "dsb sy", low]).is_ok());
        assert!(found(&["dsb sy", low, step, "dsb sy", high]).is_err());
        assert!(found(&["dsb sy", step, high, low]).is_err());
        assert!(found(&["dsb sy", step, high, "dsb sy", "strd r2, [r0]"]).is_err());
    }

    #[test]
    fn a_function_is_read_from_what_a_disassembler_prints() {
        let text = "0000 <_ZN1_MmioRegion_Mmio$GT$6read3217h0E>:\n   0:\tldr\tw0, [x8]\n   \
                    4:\tdsb\tsy\n\nDisassembly of section x:\n";
        assert_eq!(body(text, "6read32"), ["ldr w0, [x8]", "dsb sy"]);
        assert!(body(text, "6read64").is_empty());
    }
}
