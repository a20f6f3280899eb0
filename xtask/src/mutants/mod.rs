//! `cargo xtask mutants`: changes of the program that a test has to notice.
//!
//! A copy of the tree has all of them, each behind a switch, so that it is compiled once. First
//! each test runs by itself, and it is noted which changes it comes by; then, change by change,
//! those tests run with its switch on, the quickest first, until one fails. Of a change that none
//! notices `xtask/mutants/alive.txt` has to say why it changes nothing that anybody could see.

mod changes;
mod trial;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::tree::Tree;
use crate::{Checked, Outcome, root, target_directory};
use changes::Change;

/// Files whose changes the same tests notice.
struct Area {
    name: &'static str,
    package: &'static str,
    /// `lib` for the tests in the library.
    programs: &'static [&'static str],
    files: &'static [&'static str],
}

const AREAS: &[Area] = &[
    Area {
        name: "io_pgtable",
        package: "dmaspan",
        programs: &["lib", "it"],
        files: &[
            "io_pgtable/unmap.rs",
            "io_pgtable/retired.rs",
            "io_pgtable/collect.rs",
            "io_pgtable/walk.rs",
        ],
    },
    Area {
        name: "iommu",
        package: "dmaspan",
        programs: &["lib", "dma", "it"],
        files: &["iommu/gather.rs", "iommu/flush_queue.rs"],
    },
    Area {
        name: "container",
        package: "dmaspan",
        programs: &["lib", "container"],
        files: &[
            "container/takedown.rs",
            "container/unmap.rs",
            "container/alone.rs",
            "container/quarantine.rs",
            "container/unconfirmed.rs",
        ],
    },
    Area {
        name: "swiotlb",
        package: "dmaspan",
        programs: &["lib", "swiotlb", "dma"],
        files: &["swiotlb/"],
    },
    Area {
        name: "regbuf",
        package: "dmaspan",
        programs: &["lib", "regbuf"],
        files: &["regbuf/import.rs"],
    },
    Area {
        name: "drivers",
        package: "dmaspan-drivers",
        programs: &["lib", "vtd", "amd_vi", "arm_smmu", "arm_smmu_v3", "riscv"],
        files: &[
            "ring.rs",
            "blocks.rs",
            "vtd/ops.rs",
            "amd_vi/ops.rs",
            "arm_smmu/ops.rs",
            "arm_smmu_v3/ops.rs",
            "arm_smmu_v3/tlbi.rs",
            "riscv/ops.rs",
        ],
    },
];

/// Which changes are tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Those in files whose path contains this.
    file: String,
    /// Those whose name contains this.
    name: String,
    /// A tenth of all, of one area, by the commit.
    tenth: bool,
}

impl Options {
    /// # Errors
    ///
    /// The argument that there is not.
    pub fn parse(arguments: &[&str]) -> Result<Self, String> {
        match *arguments {
            [] => Ok(Self::default()),
            ["--tenth"] => Ok(tenth()),
            [file] if !file.starts_with('-') => {
                Ok(Self { file: file.to_owned(), ..Self::default() })
            }
            [file, name] if !file.starts_with('-') => {
                Ok(Self { file: file.to_owned(), name: name.to_owned(), tenth: false })
            }
            _ => {
                Err("there is `--tenth`, or a part of a file's path and one of a change's name"
                    .into())
            }
        }
    }
}

/// A tenth of the changes.
pub(crate) fn tenth() -> Options {
    Options { tenth: true, ..Options::default() }
}

/// A change in its place, with its number.
struct Mutant {
    number: usize,
    file: String,
    change: Change,
    area: usize,
}

impl Mutant {
    fn name(&self) -> String {
        format!("{} {}", self.file, self.change.name)
    }
}

/// Tries changes, and says which of them no test notices.
///
/// # Errors
///
/// Those that have no reason to live, and reasons of changes that are not there or do not live.
pub fn run(options: &Options) -> Checked {
    let tree = Tree::of_workspace().map_err(str::to_owned)?;
    let reasons = Reasons::read()?;
    let mut mutants = all(&tree, &planted()?)?;
    if options.tenth {
        choose_tenth(&mut mutants)?;
    }
    let copy = target_directory().join("mutants");
    build(tree, &copy, &mut mutants)?;
    mutants.retain(|it| it.file.contains(&options.file) && it.change.name.contains(&options.name));
    crate::say(&format!("{} changes", mutants.len()));
    let mut failed = Vec::new();
    let mut reasoned = 0;
    for (n, area) in AREAS.iter().enumerate() {
        let of_area: Vec<&Mutant> = mutants.iter().filter(|it| it.area == n).collect();
        if of_area.is_empty() {
            continue;
        }
        let started = Instant::now();
        for lives in trial::living(area, &copy, &of_area)? {
            if reasons.has(lives) {
                reasoned += 1;
            } else {
                failed.push(lives.name());
            }
        }
        let seconds = started.elapsed().as_secs();
        crate::say(&format!("{}: {} changes tried in {seconds} s", area.name, of_area.len()));
    }
    failed.sort();
    if failed.is_empty() {
        crate::say(&format!("all are noticed but {reasoned}, which change nothing"));
        return Ok(Outcome::Passed);
    }
    Err(format!("no test notices, and alive.txt has no reason:\n   {}", failed.join("\n   ")))
}

/// All changes of the areas' files.
fn all(tree: &Tree, planted: &[Planted]) -> Result<Vec<Mutant>, String> {
    let mut mutants = Vec::new();
    let mut place = 0;
    for (n, area) in AREAS.iter().enumerate() {
        let source = format!("crates/{}/src/", area.package);
        for file in tree.files() {
            let of_area = |part: &&str| {
                file.path.strip_prefix(&source).is_some_and(|it| it.starts_with(*part))
            };
            if !file.path.ends_with(".rs") || !area.files.iter().any(|part| of_area(&part)) {
                continue;
            }
            let mut found =
                changes::find(&file.text).map_err(|why| format!("{}: {why}", file.path))?;
            for planted in planted.iter().filter(|it| it.file == file.path) {
                place += 1;
                let change = changes::planted(&file.text, &planted.from, &planted.to);
                let unknown = || format!("{}: once there should be:\n{}", file.path, planted.from);
                found.push(change.ok_or_else(unknown)?);
            }
            let mut seen = HashMap::<String, usize>::new();
            for mut change in found {
                let count = seen.entry(change.name.clone()).or_default();
                *count += 1;
                if *count > 1 {
                    change.name = format!("{} #{count}", change.name);
                }
                mutants.push(Mutant { number: 0, file: file.path.clone(), change, area: n });
            }
        }
    }
    if place != planted.len() {
        return Err("planted.txt names a file that no area has".into());
    }
    Ok(mutants)
}

/// A change that somebody wrote down.
struct Planted {
    file: String,
    from: String,
    to: String,
}

/// Those of planted.txt: a file behind `@`, lines behind `-` and those that take their place behind
/// `+`.
fn planted() -> Result<Vec<Planted>, String> {
    let path = root().join("xtask/mutants/planted.txt");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let mut all: Vec<Planted> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (kind, rest) = line.split_at(1);
        let rest = rest.strip_prefix(' ').unwrap_or(rest);
        match (kind, all.last_mut()) {
            ("@", _) => {
                all.push(Planted { file: rest.into(), from: String::new(), to: String::new() });
            }
            ("-", Some(last)) => add_line(&mut last.from, rest),
            ("+", Some(last)) => add_line(&mut last.to, rest),
            _ => return Err(format!("planted.txt has a line `{line}`")),
        }
    }
    Ok(all)
}

fn add_line(to: &mut String, line: &str) {
    if !to.is_empty() {
        to.push('\n');
    }
    to.push_str(line);
}

/// Why changes that live change nothing.
struct Reasons(BTreeMap<String, String>);

impl Reasons {
    /// Those of alive.txt: a change's name, or the begin of several that nobody wrote down, with
    /// `*` behind it, and a line with the reason, which begins with a blank.
    fn read() -> Result<Self, String> {
        let path = root().join("xtask/mutants/alive.txt");
        let text =
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut all = BTreeMap::new();
        let mut names = Vec::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if line.starts_with(' ') {
                for name in names.drain(..) {
                    all.insert(name, line.trim().to_owned());
                }
            } else {
                names.push(line.to_owned());
            }
        }
        match names.first() {
            Some(name) => Err(format!("alive.txt has no reason behind `{name}`")),
            None => Ok(Self(all)),
        }
    }

    fn has(&self, mutant: &Mutant) -> bool {
        let name = mutant.name();
        self.0.keys().any(|key| match key.strip_suffix('*') {
            Some(begin) => name.starts_with(begin) && !mutant.change.name.starts_with("planted"),
            None => name == *key,
        })
    }
}

/// Keeps a tenth of the changes, all of one area, whose tests alone have to be compiled.
fn choose_tenth(mutants: &mut Vec<Mutant>) -> Result<(), String> {
    let commit = crate::debian::output_of(
        Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root()),
    )?;
    let chosen = commit.get(..8).and_then(|it| usize::from_str_radix(it, 16).ok());
    let chosen = chosen.ok_or("git names no commit")?;
    let wanted = mutants.len() / 10;
    let area = mutants[chosen % mutants.len()].area;
    mutants.retain(|it| it.area == area);
    let step = (mutants.len() / wanted.max(1)).max(1);
    let mut n = chosen;
    mutants.retain(|_| {
        n += 1;
        n.is_multiple_of(step)
    });
    Ok(())
}

/// Makes a copy of the tree with the changes, without those that the compiler refuses.
fn build(tree: &Tree, copy: &Path, mutants: &mut Vec<Mutant>) -> Result<(), String> {
    // What it refused before it refuses again, mostly.
    let known = copy.join("refused.txt");
    let mut refused = fs::read_to_string(&known).unwrap_or_default();
    let before: HashSet<String> = refused.lines().map(str::to_owned).collect();
    mutants.retain(|it| !before.contains(&it.name()));
    loop {
        mutants.iter_mut().zip(1..).for_each(|(mutant, number)| mutant.number = number);
        let mut places = HashMap::new();
        write_copy(tree, copy, mutants, &mut places)?;
        let mut packages: Vec<_> = mutants.iter().map(|it| AREAS[it.area].package).collect();
        packages.dedup();
        let mut check = cargo(copy, &["check", "--lib", "--message-format=json"]);
        check.args(packages.iter().flat_map(|it| ["-p", it]));
        let output = check.stderr(Stdio::null()).output().map_err(|error| error.to_string())?;
        if output.status.success() {
            break;
        }
        let mut bad = Vec::new();
        for message in String::from_utf8_lossy(&output.stdout).lines() {
            bad.extend(blamed(message, &places, mutants));
        }
        bad.sort_unstable();
        bad.dedup();
        if bad.is_empty() {
            return Err(format!(
                "the copy in {} does not build: `cargo check` there",
                copy.display()
            ));
        }
        mutants.retain(|it| {
            let is_bad = bad.binary_search(&it.number).is_ok();
            if is_bad {
                refused.push_str(&it.name());
                refused.push('\n');
            }
            !is_bad
        });
        write_new(&known, &refused)?;
    }
    Ok(())
}

/// The innermost changes that the places of a compiler's error are in.
fn blamed(
    message: &str,
    places: &HashMap<String, Vec<(usize, Range<usize>)>>,
    mutants: &[Mutant],
) -> Vec<usize> {
    let Ok(message) = serde_json::from_str::<Value>(message) else { return Vec::new() };
    let message = &message["message"];
    if message["level"] != "error" {
        return Vec::new();
    }
    let spans = message["spans"].as_array().map_or(&[][..], Vec::as_slice);
    let place = |span: &Value| {
        let byte = |of: &str| usize::try_from(span[of].as_u64()?).ok();
        Some((places.get(span["file_name"].as_str()?)?, byte("byte_start")?, byte("byte_end")?))
    };
    let at = |span: &Value| {
        let (places, start, end) = place(span)?;
        let around = places.iter().filter(|(_, it)| it.start <= start && end <= it.end);
        around.min_by_key(|(_, it)| it.len()).map(|&(number, _)| number)
    };
    let primary = spans.iter().filter(|it| it["is_primary"] == true);
    let mut found: Vec<usize> = primary.clone().filter_map(at).collect();
    if found.is_empty() {
        found = spans.iter().filter_map(at).collect();
    }
    if found.is_empty() {
        // What would have ended a borrow is somewhere near.
        for (places, _, end) in primary.filter_map(place) {
            let is = |number: usize, what: &str| mutants[number - 1].change.name.contains(what);
            let drops = |it: &&(usize, Range<usize>)| it.1.end <= end && is(it.0, "without drop(");
            let near = |it: &&(usize, Range<usize>)| it.1.end.abs_diff(end);
            let without = || places.iter().filter(|it| is(it.0, "without ")).min_by_key(near);
            let nearest = places.iter().filter(drops).min_by_key(near).or_else(without);
            found.extend(nearest.map(|(number, _)| number));
        }
    }
    found
}

fn write_copy(
    tree: &Tree,
    copy: &Path,
    mutants: &[Mutant],
    places: &mut HashMap<String, Vec<(usize, Range<usize>)>>,
) -> Result<(), String> {
    let of_file = |path: &str| -> Vec<(usize, &Change)> {
        mutants.iter().filter(|it| it.file == path).map(|it| (it.number, &it.change)).collect()
    };
    for file in tree.files() {
        let of_file = of_file(&file.path);
        let mut text = file.text.clone();
        if !of_file.is_empty() {
            let (with, at) = changes::with_switches(&text, &of_file);
            text = with;
            places.insert(file.path.clone(), at);
        }
        if file.path == "Cargo.toml" {
            // Cargo takes packages of one name and version for the same in every copy of the tree.
            text = text.replacen("\nversion = \"0.1.0\"", "\nversion = \"0.1.0+mutants\"", 1);
        }
        let switch = match file.path.as_str() {
            "crates/dmaspan/src/lib.rs" => "\n#[doc(hidden)]\npub mod mutants;\n",
            "crates/dmaspan-drivers/src/lib.rs" => "\nuse dmaspan::mutants;\n",
            _ => "",
        };
        if !switch.is_empty() {
            // Changes compare what never differs, and overflow.
            let allowed = "warnings, unsafe_code, arithmetic_overflow, unconditional_panic";
            text = format!("#![allow({allowed})]\n{text}{switch}");
        }
        write_new(&copy.join(&file.path), &text)?;
    }
    let count = format!("const COUNT: usize = {};\n", mutants.len() + 1);
    let switch =
        fs::read_to_string(root().join("xtask/mutants/switch.rs")).map_err(|it| it.to_string())?;
    write_new(&copy.join("crates/dmaspan/src/mutants.rs"), &(switch + &count))
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
    let target = target_directory();
    cargo.current_dir(copy).env("CARGO_TARGET_DIR", target).env("RUSTFLAGS", "");
    cargo
}
