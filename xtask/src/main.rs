//! `cargo xtask tidy | lines | no-std | msrv | package | ci | hw | guest | peers`.

use std::path::Path;
use std::process::ExitCode;

use xtask::problem::Problem;
use xtask::tree::Tree;
use xtask::{Outcome, ci, guest, hw, lines, msrv, no_std, package, peers, tidy};

const USAGE: &str = "\
usage: cargo xtask <command>

  tidy    check the rules about the source tree
  lines [CHECKOUT]
          count lines of code by package, without blanks and comments; tests
          and benchmarks stand apart
  no-std  prove that core and drivers link and run without the standard library
  msrv    prove that the published libraries build with the oldest Rust that
          they state, by rustup
  package package the workspace, and prove that what is published builds and
          passes the examples of its documentation once it is unpacked
  ci [--full] [CHECK...]
          check everything that must hold before a change lands, or the checks
          that are named, in its quick form; with --full at full length: every
          command of the README as it stands there, soaks of ten million
          operations, and the tests that count fifty times on a busy machine
  hw [--install] [-- ARGUMENTS OF CARGO TEST]
          run the tests against QEMU's IOMMUs; where there is no QEMU that
          serves, takes one from Debian's packages into the target directory,
          which needs no privileges but a network; with --install nothing more
  guest [--kernel NAME]... [--boot NAME]... [--jobs N] [--keep] [--list]
          boot guests whose kernels have VFIO and run the project's program in
          them; kernels come from Debian's packages, that with iommufd is the
          image that DMASPAN_GUEST_KERNEL names or is built from its source
  guest [--kernel NAME]... [--icount] [--virtio-iommu] [--memory SIZE]
        [--membar SIZE] [--prepare LINE]... -- COMMAND...
          run one command in a guest, whose NVMe controller is bound to
          vfio-pci at 0000:00:05.0, and print what it prints; --icount counts
          instructions, --membar adds a device with such a BAR at
          0000:00:07.0, each --prepare is a line for the guest's init before
          the command, such as `hugepages 64`; without --kernel the one with
          iommufd runs
          Both: --list says which kernels and boots there are. QEMU is that of
          `hw`, or any of PATH; where none can be had, or a kernel, guests are
          skipped, which DMASPAN_HW=require makes a failure. Consoles are in
          guest/logs of the target directory; --keep leaves the disks and the
          archives of guests in guest/run
  peers [--runs N] [--work DIR] [--format table|json] [--case SUBSTRING]
          compare with Linux's own page tables; takes its source from the
          distribution and needs apt, gcc, xz and a network the first time;
          xtask/peers/README.md says more
  peers --bytes [--seed N] [--configurations N] [--work DIR] [--case SUBSTRING]
          compare the tables themselves, entry by entry, after the same random
          operations; whatever is not in the README's list of differences fails";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["tidy"] => run_tidy(),
        ["lines"] => run_lines(&xtask::root()),
        ["lines", checkout] if !checkout.starts_with('-') => run_lines(Path::new(checkout)),
        ["no-std"] => match no_std::check() {
            Ok(said) => {
                xtask::say(&said);
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("no-std: {error}");
                ExitCode::FAILURE
            }
        },
        ["package"] => ended("package", package::check().map(|()| Outcome::Passed)),
        ["msrv"] => ended("msrv", msrv::check()),
        ["ci", "--full", names @ ..] => run_ci(ci::Extent::Full, names),
        ["ci", names @ ..] if !names.iter().any(|name| name.starts_with('-')) => {
            run_ci(ci::Extent::Quick, names)
        }
        ["help" | "--help" | "-h"] | ["lines" | "hw" | "guest" | "peers", "--help" | "-h"] => {
            xtask::say(USAGE);
            ExitCode::SUCCESS
        }
        ["hw", arguments @ ..] => with_options("hw", hw::Options::parse(arguments), hw::run),
        ["guest", arguments @ ..] => {
            with_options("guest", guest::Options::parse(arguments), guest::run)
        }
        ["peers", arguments @ ..] => {
            with_options("peers", peers::Options::parse(arguments), peers::run)
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn with_options<T>(
    name: &str,
    options: Result<T, String>,
    run: fn(&T) -> Result<(), String>,
) -> ExitCode {
    match options.map(|options| run(&options)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{name}: {error}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn ended(name: &str, ended: Result<Outcome, String>) -> ExitCode {
    match ended {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Skipped(why)) => {
            xtask::say(&format!("{name}: SKIP: {why}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_ci(extent: ci::Extent, names: &[&str]) -> ExitCode {
    match ci::run(extent, names) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ci: {error}");
            ExitCode::from(2)
        }
    }
}

fn run_lines(checkout: &Path) -> ExitCode {
    match Tree::read(checkout) {
        Ok(tree) => {
            xtask::say(&lines::table(&lines::count(&tree)));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lines: {} cannot be read: {error}", checkout.display());
            ExitCode::FAILURE
        }
    }
}

fn run_tidy() -> ExitCode {
    let problems = match Tree::read(&xtask::root()) {
        Ok(tree) => tidy::check(&tree),
        Err(error) => vec![Problem::of_file(".", format!("the tree cannot be read: {error}"))],
    };
    for problem in &problems {
        eprintln!("{problem}");
    }
    if problems.is_empty() {
        xtask::say(&format!("tidy: {} rules hold", tidy::RULES.len()));
        ExitCode::SUCCESS
    } else {
        eprintln!("tidy: {} problems", problems.len());
        ExitCode::FAILURE
    }
}
