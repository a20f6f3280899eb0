//! `cargo xtask pages` opens the reports of `plan`, `inspect` and `map` in a browser.
//!
//! Each page is opened wide and narrow, by day and by night: nothing is wider than the window, the
//! console has no error, axe finds nothing, and the tables sort. Without script it has the same
//! rows and pictures. HTML Tidy has nothing to say of its text. The figures of the same reports are
//! what `promtool` takes. Pictures of the pages stay in the target directory, to be looked at.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::debian::output_of;
use crate::{Checked, Outcome};

/// Names of the browser: Debian's small one, and whole ones.
const BROWSERS: [&str; 3] = ["chromium-headless-shell", "chromium", "google-chrome"];
/// What puts the programs on a machine of Debian.
const INSTALL: &str = "apt-get install chromium-headless-shell tidy prometheus npm";
/// The package of npm that looks for what keeps people from using a page, and its version.
const AXE: &str = "axe-core@4.14.1";
const AXE_SCRIPT: &str = "package/axe.min.js";
/// Keeps scripts from running.
const SCRIPTLESS: &str =
    "<meta http-equiv=\"Content-Security-Policy\" content=\"script-src 'none'\">";
/// Collects errors from the start; all other scripts come later.
const COLLECT: &str = "<script>var problems = [];\
    addEventListener('error', (event) => problems.push(event.message));\
    console.error = console.warn = (...words) => problems.push(words.join(' '));</script>";
const PROBE: &str = include_str!("probe.js");

const WIDTHS: [u32; 2] = [1280, 400];
const SCHEMES: [&str; 2] = ["dark", "light"];
/// The number that Blink has for each scheme.
const fn number_of(scheme: &str) -> u32 {
    (scheme.len() == SCHEMES[1].len()) as u32
}

/// The reports, and the arguments of the program that make them.
const PAGES: [(&str, &[&str]); 6] = [
    ("plan", &["plan", "--layout", "docs/layouts/q35-64g.toml"]),
    ("plan-fails", &["plan", "--layout", "docs/layouts/laptop-39-bits.toml"]),
    ("inspect-text", &["inspect", "crates/dmaspan-cli/tests/dumps/vtd-legacy.debugfs"]),
    (
        "inspect-memory",
        &[
            "inspect",
            "crates/dmaspan-cli/tests/dumps/smmuv3.core",
            "--iommu=smmuv3",
            "--root=nvme=0x434fe000",
            "--iova=0x10000000",
            "--phys=0x201000",
        ],
    ),
    (
        "inspect-wrong",
        &[
            "inspect",
            "crates/dmaspan-cli/tests/dumps/vtd.core",
            "--iommu=amd-v2",
            "--root=0x97f000",
            "--root=again=0x97f000",
            "--diff=crates/dmaspan-cli/tests/dumps/vtd.core",
        ],
    ),
    ("map", &["map", "16M", "--runs", "1"]),
];

/// Opens the pages and checks them. Skipped where a program is missing.
///
/// # Errors
///
/// What is wrong with which page, a line each.
pub fn check() -> Checked {
    let runs = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    let Some(browser) = BROWSERS.into_iter().find(runs) else {
        return Ok(Outcome::Skipped(format!("there is no Chromium: {INSTALL}")));
    };
    if let Some(missing) = ["tidy", "promtool", "npm"].iter().find(|name| !runs(name)) {
        return Ok(Outcome::Skipped(format!("there is no {missing}: {INSTALL}")));
    }
    let folder = crate::target_directory().join("pages");
    let cannot = |error| format!("{} cannot be written: {error}", folder.display());
    fs::create_dir_all(&folder).map_err(cannot)?;
    let axe = match axe(&folder) {
        Ok(axe) => axe,
        Err(why) => return Ok(Outcome::Skipped(format!("{AXE} cannot be had: {why}"))),
    };
    crate::run(&mut crate::cargo(&["build", "--quiet", "-p", "dmaspan-cli"]))?;
    let mut problems = Vec::new();
    for (name, arguments) in PAGES {
        let page = Page { name, browser, folder: &folder };
        problems
            .extend(page.problems(arguments, &axe)?.into_iter().map(|it| format!("{name}: {it}")));
    }
    if problems.is_empty() {
        crate::say(&format!("pages: their pictures are in {}", folder.display()));
        Ok(Outcome::Passed)
    } else {
        Err(problems.join("\n   "))
    }
}

/// The script of axe, which npm fetches where it is not there.
fn axe(folder: &Path) -> Result<String, String> {
    let folder = folder.join(AXE);
    let script = folder.join(AXE_SCRIPT);
    if !script.exists() {
        fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let mut pack = Command::new("npm");
        let packed = output_of(pack.args(["pack", "--silent", AXE]).current_dir(&folder))?;
        let archive = packed.trim().lines().last().unwrap_or_default().to_owned();
        output_of(Command::new("tar").args(["-xzf", &archive]).current_dir(&folder))?;
    }
    fs::read_to_string(&script).map_err(|error| format!("{}: {error}", script.display()))
}

/// A page that is looked at.
struct Page<'p> {
    name: &'static str,
    browser: &'p str,
    folder: &'p Path,
}

impl Page<'_> {
    fn file(&self, ending: &str) -> PathBuf {
        self.folder.join(format!("{}{ending}", self.name))
    }

    /// What is wrong with it.
    fn problems(&self, arguments: &[&str], axe: &str) -> Result<Vec<String>, String> {
        let text = report(arguments, "html")?;
        let (page, probed) = (self.file(".html"), self.file("-probed.html"));
        let behind = format!("<script>{axe}</script><script>{PROBE}</script></body>");
        let begin = |what: &str| text.replacen("<head>", &format!("<head>{what}"), 1);
        let with = begin(COLLECT).replacen("</body>", &behind, 1);
        let scriptless = self.file("-scriptless.html");
        for (file, text) in [(&page, &text), (&probed, &with), (&scriptless, &begin(SCRIPTLESS))] {
            fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
        }
        let mut problems = Vec::new();
        let tidy = Command::new("tidy")
            .args(["-quiet", "-errors", "--drop-empty-elements", "no"])
            .arg(&page)
            .output();
        let tidy = tidy.map_err(|error| format!("tidy did not start: {error}"))?;
        problems.extend(String::from_utf8_lossy(&tidy.stderr).lines().map(str::to_owned));
        problems.extend(refused(&report(arguments, "prometheus")?)?);
        let plain = self.open(&scriptless, 1280, "light", None)?;
        if plain.contains("<button") {
            problems.push("the tables have buttons although no script runs".to_owned());
        }
        let counts = ["<tr", "<svg"].map(|what| plain.matches(what).count() as u64);
        for width in WIDTHS {
            for scheme in SCHEMES {
                let said = self.open(&probed, width, scheme, None)?;
                let found = probed_by(&said).ok_or_else(|| {
                    format!("{} at {width}: the probe did not come to its end", self.name)
                })?;
                let at = format!("{width} pixels, {scheme}");
                let is_so = (found["width"].as_u64(), found["dark"].as_bool());
                if is_so != (Some(u64::from(width)), Some(scheme == "dark")) {
                    problems.push(format!("{at}: the browser showed {is_so:?}"));
                }
                if found["overflow"].as_u64() != Some(0) {
                    problems.push(format!("{at}: {} pixels too wide", found["overflow"]));
                }
                if [&found["rows"], &found["pictures"]].map(Value::as_u64) != counts.map(Some) {
                    problems.push(format!("{at}: other rows or pictures than without script"));
                }
                let each = found["problems"].as_array().into_iter().flatten();
                problems.extend(each.map(|it| format!("{at}: {it}")));
                let picture = self.file(&format!("-{width}-{scheme}.png"));
                self.open(&page, width, scheme, Some(&picture))?;
            }
        }
        Ok(problems)
    }

    /// Opens a file and returns the document as it is then, or makes a picture of it.
    fn open(
        &self,
        file: &Path,
        width: u32,
        scheme: &str,
        picture: Option<&Path>,
    ) -> Result<String, String> {
        let mut browser = Command::new(self.browser);
        browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]);
        browser.arg(format!("--blink-settings=preferredColorScheme={}", number_of(scheme)));
        browser.arg(format!("--window-size={width},1600"));
        match picture {
            Some(picture) => browser.arg(format!("--screenshot={}", picture.display())),
            None => browser.args(["--dump-dom", "--virtual-time-budget=20000"]),
        };
        browser.arg(format!("file://{}", file.display())).stderr(Stdio::null());
        output_of(&mut browser)
    }
}

/// What the program prints.
fn report(arguments: &[&str], format: &str) -> Result<String, String> {
    let mut program = Command::new(crate::target_directory().join("debug/dmaspan"));
    program.args(arguments).args(["--format", format]).current_dir(crate::root());
    let output = program.output().map_err(|error| format!("dmaspan did not start: {error}"))?;
    // 1 is a plan that would fail.
    if !matches!(output.status.code(), Some(0 | 1)) || output.stdout.is_empty() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("dmaspan {}: {why}", arguments.join(" ")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What `promtool` says of figures.
fn refused(figures: &str) -> Result<Vec<String>, String> {
    let cannot = |error: std::io::Error| format!("promtool: {error}");
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = promtool.stderr(Stdio::piped()).spawn().map_err(cannot)?;
    if let Some(mut input) = child.stdin.take() {
        std::io::Write::write_all(&mut input, figures.as_bytes()).map_err(cannot)?;
    }
    let output = child.wait_with_output().map_err(cannot)?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    Ok(said.lines().map(|line| format!("promtool: {line}")).collect())
}

/// What the probe left in a document.
fn probed_by(document: &str) -> Option<Value> {
    let (_, rest) = document.split_once("<pre id=\"probe\">")?;
    let (text, _) = rest.split_once("</pre>")?;
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&text).ok()
}
