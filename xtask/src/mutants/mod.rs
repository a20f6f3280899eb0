//! `cargo xtask mutants`: changes of the program that a test has to notice.
//!
//! A copy of the tree has all of them, each behind a switch, so that it is compiled once. First
//! each test runs by itself, and it is noted which changes it comes by; then, change by change,
//! those tests run with its switch on, the quickest first, until one fails. Of a change that none
//! notices `xtask/mutants/alive.txt` has to say why it changes nothing that anybody could see.

mod changes;
mod trial;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::tree::{File, Tree};
use crate::{Checked, Outcome, root, target_directory};
use changes::Change;

/// Which changes are tried.
#[derive(Debug)]
pub enum Chosen {
    /// All of them.
    All,
    /// A tenth, of one area, by the commit.
    Tenth,
    /// Those whose names contain this.
    Named(String),
}

/// # Errors
///
/// Arguments that there are not.
pub fn parse(arguments: &[&str]) -> Result<Chosen, String> {
    match *arguments {
        [] => Ok(Chosen::All),
        ["--tenth"] => Ok(Chosen::Tenth),
        [name] if !name.starts_with('-') => Ok(Chosen::Named(name.to_owned())),
        _ => Err("there is `--tenth`, or a part of a change's name".into()),
    }
}

/// Files whose changes the same tests notice.
struct Area {
    package: &'static str,
    /// The tests, as arguments of `cargo test`.
    tests: &'static str,
    /// Files and beginnings of them.
    files: Vec<&'static str>,
}

/// A change in its place, whose name begins with the file.
struct Mutant<'a> {
    file: &'a str,
    area: &'a Area,
    change: Change,
}

/// Tries changes, and says which of them no test notices.
///
/// # Errors
///
/// Changes that live without a reason, or a reason without a change.
pub fn run(chosen: &Chosen) -> Checked {
    let tree = Tree::of_workspace().map_err(str::to_owned)?;
    let areas = areas();
    let mut mutants = all(tree, &areas)?;
    let reasons = reasons(&mutants)?;
    match chosen {
        Chosen::All => {}
        Chosen::Tenth => {
            // They take the longest, and there is nothing to find.
            mutants.retain(|it| !reasons.iter().any(|name| is_of(name, it)));
            choose_tenth(&mut mutants)?;
        }
        Chosen::Named(name) => mutants.retain(|it| it.change.name.contains(name)),
    }
    let copy = target_directory().join("mutants");
    build(tree, &copy, &mut mutants)?;
    crate::say(&format!("{} changes", mutants.len()));
    let mut failed = Vec::new();
    for of_area in mutants.chunk_by(|one, other| std::ptr::eq(one.area, other.area)) {
        failed.extend(trial::living(of_area[0].area, &copy, of_area)?);
    }
    failed.retain(|lives| !reasons.iter().any(|it| is_of(it, lives)));
    if failed.is_empty() {
        return Ok(Outcome::Passed);
    }
    let names: Vec<&str> = failed.iter().map(|it| it.change.name.as_str()).collect();
    Err(format!("no test notices, and alive.txt has no reason:\n   {}", names.join("\n   ")))
}

/// The lines of a table that are neither blank nor comments.
fn lines(table: &'static str) -> impl Iterator<Item = &'static str> {
    table.lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Those of areas.txt.
fn areas() -> Vec<Area> {
    let mut all: Vec<Area> = Vec::new();
    for line in lines(include_str!("../../mutants/areas.txt")) {
        if let (Some(file), Some(area)) = (line.strip_prefix("  "), all.last_mut()) {
            area.files.push(file);
        } else {
            let (package, tests) = line.split_once(' ').unwrap_or((line, "--tests"));
            all.push(Area { package, tests, files: Vec::new() });
        }
    }
    all
}

/// All changes of the areas' files.
fn all<'a>(tree: &'a Tree, areas: &'a [Area]) -> Result<Vec<Mutant<'a>>, String> {
    let mut mutants = Vec::new();
    for area in areas {
        let is_of_area = |file: &&File| area.files.iter().any(|it| file.path.starts_with(it));
        for file in tree.files().iter().filter(is_of_area) {
            let changes = of_file(file)?.into_iter();
            mutants.extend(changes.map(|change| Mutant { file: &file.path, area, change }));
        }
    }
    match planted().find(|(file, ..)| !mutants.iter().any(|it| it.file == *file)) {
        Some((file, ..)) => Err(format!("planted.txt names {file}, which no area has")),
        None => Ok(mutants),
    }
}

/// The changes of a file, of which no two have the same name.
fn of_file(file: &File) -> Result<Vec<Change>, String> {
    let mut found = changes::find(&file.text).map_err(|why| format!("{}: {why}", file.path))?;
    for (_, from, to) in planted().filter(|it| it.0 == file.path) {
        let unknown = || format!("{}: once there should be:\n{from}", file.path);
        found.push(changes::planted(&file.text, &from, &to).ok_or_else(unknown)?);
    }
    let mut counts = HashMap::new();
    for change in &mut found {
        let count = counts.entry(change.name.clone()).or_insert(0);
        *count += 1;
        if *count > 1 {
            change.name.push_str(&format!(" #{count}"));
        }
        change.name.insert_str(0, &format!("{} ", file.path));
    }
    Ok(found)
}

/// Those of planted.txt: a file behind `@`, lines behind `-` and those that take their place behind
/// `+`.
fn planted() -> impl Iterator<Item = (&'static str, String, String)> {
    include_str!("../../mutants/planted.txt").split("\n@ ").skip(1).map(|entry| {
        let behind = |sign| entry.lines().filter_map(move |line| line.strip_prefix(sign));
        let text = |sign| behind(sign).collect::<Vec<_>>().join("\n");
        (entry.lines().next().unwrap_or_default(), text("- "), text("+ "))
    })
}

/// Those of alive.txt that have a reason: a change's name, or the beginning of several that nobody
/// wrote down, with `*` behind it, and below a line with the reason, which begins with a blank.
fn reasons(mutants: &[Mutant<'_>]) -> Result<Vec<&'static str>, String> {
    let mut waiting = None;
    let mut names = Vec::new();
    for line in lines(include_str!("../../mutants/alive.txt")) {
        waiting = (!line.starts_with(' ')).then_some(line);
        names.extend(waiting);
    }
    let is_unknown = |name: &&str| !mutants.iter().any(|it| is_of(name, it));
    match waiting.or(names.iter().copied().find(is_unknown)) {
        Some(name) => Err(format!("alive.txt has a reason without change, or none, at `{name}`")),
        None => Ok(names),
    }
}

/// Whether a name in alive.txt is of this change.
fn is_of(name: &str, mutant: &Mutant<'_>) -> bool {
    let of = &mutant.change.name;
    let begin = name.strip_suffix('*').filter(|_| !of.contains(" planted: "));
    of == name || begin.is_some_and(|it| of.starts_with(it))
}

/// Keeps a tenth of the changes, all of one area, whose tests alone have to be compiled.
fn choose_tenth(mutants: &mut Vec<Mutant<'_>>) -> Result<(), String> {
    let mut git = Command::new("git");
    let commit =
        crate::debian::output_of(git.args(["rev-parse", "--short=8", "HEAD"]).current_dir(root()))?;
    let chosen = usize::from_str_radix(commit.trim(), 16).map_err(|error| error.to_string())?;
    let (count, area) = (mutants.len() / 10, mutants[chosen % mutants.len()].area);
    mutants.retain(|it| std::ptr::eq(it.area, area));
    let begin = chosen % mutants.len();
    mutants.rotate_left(begin);
    mutants.truncate(count);
    Ok(())
}

/// Makes a copy of the tree with the changes, without those that the compiler refuses.
fn build(tree: &Tree, copy: &Path, mutants: &mut Vec<Mutant<'_>>) -> Result<(), String> {
    while !mutants.is_empty() {
        write_copy(tree, copy, mutants)?;
        let refused = refused(copy, mutants)?;
        if refused.is_empty() {
            return Ok(());
        }
        mutants.retain(|it| !refused.contains(&it.change.number));
    }
    Err("no change has such a name, or the compiler refuses it".into())
}

/// The changes that the compiler refuses now, by their numbers.
fn refused(copy: &Path, mutants: &[Mutant<'_>]) -> Result<BTreeSet<u32>, String> {
    let packages: BTreeSet<&str> = mutants.iter().map(|it| it.area.package).collect();
    let mut check = cargo(copy, &["check", "--lib", "--message-format=json"]);
    check.args(packages.iter().flat_map(|it| ["-p", it])).stderr(Stdio::null());
    let output = check.output().map_err(|error| error.to_string())?;
    let errors = messages(&output.stdout).filter(|it| it["message"]["level"] == "error");
    let refused: BTreeSet<u32> = errors
        .filter_map(|it| blamed(&it["message"], mutants))
        .map(|it| it.change.number)
        .collect();
    if refused.is_empty() && !output.status.success() {
        return Err(format!("the copy does not build: `cargo check` in {}", copy.display()));
    }
    Ok(refused)
}

/// Cargo's messages.
fn messages(said: &[u8]) -> impl Iterator<Item = Value> {
    said.split(|&it| it == b'\n').filter_map(|line| serde_json::from_slice(line).ok())
}

/// The innermost change around a place of a compiler's error, the main one if possible; otherwise
/// the statement left out next to it, which ended a borrow.
fn blamed<'m, 'a>(error: &Value, mutants: &'m [Mutant<'a>]) -> Option<&'m Mutant<'a>> {
    let mut spans: Vec<&Value> = error["spans"].as_array()?.iter().collect();
    spans.sort_by_key(|it| it["is_primary"] != true);
    let byte = |span: &Value, of: &str| usize::try_from(span[of].as_u64()?).ok();
    let of_file = |span: &Value| -> Vec<&'m Mutant<'a>> {
        mutants.iter().filter(|it| span["file_name"] == *it.file).collect()
    };
    let around = |span: &&Value| {
        let (start, end) = (byte(span, "byte_start")?, byte(span, "byte_end")?);
        let is_around = |it: &Range<usize>| it.start <= start && end <= it.end;
        let around = of_file(span).into_iter().filter(|it| is_around(&it.change.place));
        around.min_by_key(|it| it.change.place.len())
    };
    let beside = |span: &&Value| {
        let end = byte(span, "byte_end")?;
        let without = of_file(span).into_iter().filter(|it| it.change.name.contains(": without "));
        without.min_by_key(|it| it.change.place.start.abs_diff(end))
    };
    spans.iter().find_map(around).or_else(|| spans.iter().find_map(beside))
}

/// For changes that compare what never differs, and overflow.
const ALLOWED: &str =
    "#![allow(warnings, unsafe_code, arithmetic_overflow, unconditional_panic)]\n";

/// Writes the tree with a switch for each change.
fn write_copy(tree: &Tree, copy: &Path, mutants: &mut [Mutant<'_>]) -> Result<(), String> {
    for (mutant, number) in mutants.iter_mut().zip(1..) {
        mutant.change.number = number;
    }
    for file in tree.files() {
        let of_file = mutants.iter_mut().filter(|it| it.file == file.path);
        let mut changes: Vec<_> = of_file.map(|it| &mut it.change).collect();
        let mut text = changes::with_switches(&file.text, &mut changes);
        match file.path.as_str() {
            "crates/dmaspan/src/lib.rs" => text = format!("{ALLOWED}{text}\npub mod mutants;\n"),
            "crates/dmaspan-drivers/src/lib.rs" => {
                text = format!("{ALLOWED}{text}\nuse dmaspan::mutants;\n");
            }
            // Cargo takes packages of one name and version for the same in every copy of the tree.
            "Cargo.toml" => text = text.replacen("\"0.1.0\"", "\"0.1.0+mutants\"", 1),
            _ => {}
        }
        write_new(&copy.join(&file.path), &text)?;
    }
    let switch = include_str!("../../mutants/switch.rs");
    write_new(&copy.join("crates/dmaspan/src/mutants.rs"), switch)
}

/// Writes a file where something else is there: cargo looks at times.
fn write_new(path: &Path, text: &str) -> Result<(), String> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(path);
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(path, text));
    written.map_err(|error| format!("{}: {error}", path.display()))
}

/// Cargo in the copy, which builds what is of other origin where the tree builds it.
fn cargo(copy: &Path, arguments: &[&str]) -> Command {
    let mut cargo = crate::cargo(arguments);
    cargo.current_dir(copy).env("CARGO_TARGET_DIR", target_directory()).env("RUSTFLAGS", "");
    // The tests run a thousand times.
    cargo.env("CARGO_PROFILE_TEST_OPT_LEVEL", "1");
    cargo
}
