//! `cargo xtask tidy | lines | no-std | msrv | package | book | pages | picture | ci | hw | …`.

use std::path::Path;
use std::process::ExitCode;

use xtask::problem::Problem;
use xtask::tree::Tree;
use xtask::{
    Checked, Outcome, book, ci, cross, guest, hw, kernel, lines, msrv, mutants, no_std, package,
    pages, peers, picture, sanitize, tidy,
};

const USAGE: &str = "\
usage: cargo xtask <command>

  tidy    check the rules about the source tree
  lines [CHECKOUT]
          count the lines of code of each package, without blanks and comments,
          and apart from them the lines of tests, of benchmarks and of C
  no-std  prove that core and drivers link and run without the standard library
  msrv    prove that the published libraries build with the oldest Rust that
          they state, by rustup
  package package the workspace, and prove that what is published builds and
          passes the examples of its documentation once it is unpacked
  book    build the book in docs/ and look for dead links in it; mdBook is put
          into the target directory where it is not installed
  pages   open the reports of plan, inspect and map in a headless Chromium, wide and
          narrow, by day, by night and without script; HTML Tidy, axe and promtool
          check them; their pictures are in the target directory then
  picture [FILE]
          draw the README's picture from rows of `peers --format json`: those of
          the file, or those in docs/
  ci [--full] [CHECK...]
          check everything that must hold before a change lands, or only the
          checks that are named, in their quick form; --full runs them at full
          length: every command of README and book as it stands, soaks of ten
          million operations, and fifty times the tests that count, on a busy
          machine
  hw [--install] [-- ARGUMENTS OF CARGO TEST]
          run the tests against QEMU's IOMMUs; where no QEMU on this machine
          serves, put one from Debian's packages into the target directory,
          which needs a network and no privileges; --install only does that
  kernel [aarch64|aarch64-el2|riscv64|riscv64-pci|x86_64-vtd|x86_64-amd]...
          boot the operating system in examples/kernel on QEMU's machines, whose
          drivers reach what they were given: as it is, with faults that are planted,
          and with firmware that does not say what it should; without a name on all
  cross [bare|registers|quick|user|copies|guest]...
          build for other CPUs, and run there what can be run: without the standard
          library; registers by one instruction each; tests under an emulator of
          programs, all or a quick part of them; bounce copies in instructions;
          and a guest of Arm with pages of 16 KiB; without a name all but `quick`;
          targets come by rustup, tools from Debian's packages
  sanitize [planted|miri|at-once|big-endian|thread|address]...
          look for undefined behaviour, races and wrong accesses to memory, by Miri
          and the compiler's sanitizers; `planted` shows that they find what they
          are for; needs nightly Rust, which rustup fetches
  guest [--kernel NAME]... [--boot NAME]... [--series] [--jobs N] [--keep]
        [--list]
          boot guests whose kernels have VFIO and run the project's program in
          them; --series are the boots that measure kernels before and after what
          the book calls the five series, and print a table; the kernels come from
          Debian's packages, and the one with iommufd is the image that
          DMASPAN_GUEST_KERNEL names, or is built from its source; iommufd-built
          is built whatever that names
  guest [--kernel NAME]... [--icount] [--virtio-iommu] [--memory SIZE]
        [--membar SIZE] [--nested] [--seconds N] [--prepare LINE]...
        -- COMMAND...
          run one command in a guest, whose NVMe controller is bound to
          vfio-pci at 0000:00:05.0, and print its output; --icount counts
          instructions, --membar adds a device with a BAR of that size at
          0000:00:07.0, --nested puts QEMU and the guest's kernel, /vmlinuz, into
          the guest, which ends after --seconds, 900 by default; each --prepare is
          a line for the guest's init before the command, such as `hugepages 64`;
          without --kernel the kernel with iommufd runs
          Both: --list prints the kernels and boots. QEMU is the one of `hw`, or
          any of PATH; where there is no QEMU or no kernel, guests are skipped,
          and DMASPAN_HW=require makes that a failure. The consoles are in
          guest/logs of the target directory; --keep leaves the disks and the
          archives of guests in guest/run
  peers [--runs N] [--work DIR] [--format table|json] [--case SUBSTRING]
        [--invalidation-ns N] [--linux VERSION[,VERSION...]]
          time Linux's own page tables and DMA API beside dmaspan's; takes the
          source of Linux from the distribution, and needs apt, gcc, xz and, the
          first time, a network; with --linux, also of `--instructions`, other
          versions than 7.2: 5.10, 6.1, 6.12, 7.3, or several beside each other;
          xtask/peers/README.md says more
  peers --series [NAME[,NAME...]] [--runs N] [--work DIR] [--format table|json]
          the five series for Linux: count instructions and take times of Linux's
          own code before each series and of that behind it, and of dmaspan, and
          print them beside what the series' authors claim; names are map-pages,
          swiotlb, large-folios, huge-pfnmaps and registered
  peers --instructions [--work DIR] [--format table|json] [--case SUBSTRING]
          count the instructions of both sides instead, by valgrind
  peers --contention [--work DIR] [--format table|json] [--case SUBSTRING]
                     [--program \"PATH ARGUMENT...\"]
          count what CPUs do to each other instead: atomic read-modify-writes and
          accesses to cache lines that another CPU writes, by valgrind, and what
          they come to on 64 and 256 CPUs; --program counts a program that marks
          its operations, as xtask/peers/README.md says
  peers --bytes [--seed N] [--configurations N] [--work DIR] [--case SUBSTRING]
          compare the tables themselves, entry by entry, after the same random
          operations; a difference that is not in the README's list fails
  peers --findings [--work DIR]
          show what was found in Linux's page tables and in io_uring's account of
          registered buffers, by their own code
  mutants [--tenth | NAME]
          change the program in one place after the other, where an error would be
          worst, and fail where no test notices; those that change nothing are in
          xtask/mutants/alive.txt with the reason; --tenth tries a tenth of the
          changes, which the commit chooses, and NAME those whose name, which begins
          with the file, contains it";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["tidy"] => run_tidy(),
        ["lines"] => ended("lines", print_lines(&xtask::root())),
        ["lines", checkout] if !checkout.starts_with('-') => {
            ended("lines", print_lines(Path::new(checkout)))
        }
        ["no-std"] => ended("no-std", no_std::check()),
        ["package"] => ended("package", package::check()),
        ["msrv"] => ended("msrv", msrv::check()),
        ["pages"] => ended("pages", pages::check()),
        ["book"] => ended("book", book::check()),
        ["picture"] => ended("picture", picture::draw(None)),
        ["picture", file] if !file.starts_with('-') => ended("picture", picture::draw(Some(file))),
        ["ci", "--full", names @ ..] => run_ci(ci::Extent::Full, names),
        ["ci", names @ ..] if !names.iter().any(|name| name.starts_with('-')) => {
            run_ci(ci::Extent::Quick, names)
        }
        ["help" | "--help" | "-h"]
        | ["lines" | "hw" | "guest" | "kernel" | "cross" | "sanitize" | "peers", "--help" | "-h"] =>
        {
            xtask::say(USAGE);
            ExitCode::SUCCESS
        }
        ["mutants", arguments @ ..] => {
            with_options("mutants", mutants::parse(arguments), mutants::run)
        }
        ["hw", arguments @ ..] => with_options("hw", hw::Options::parse(arguments), hw::run),
        ["kernel", arguments @ ..] => with_options("kernel", kernel::parse(arguments), kernel::run),
        ["cross", arguments @ ..] => with_options("cross", cross::parse(arguments), cross::run),
        ["sanitize", arguments @ ..] => {
            with_options("sanitize", sanitize::parse(arguments), sanitize::run)
        }
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

fn with_options<T>(name: &str, options: Result<T, String>, run: fn(&T) -> Checked) -> ExitCode {
    match options {
        Ok(options) => ended(name, run(&options)),
        Err(error) => {
            eprintln!("{name}: {error}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn ended(name: &str, ended: Checked) -> ExitCode {
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

fn print_lines(checkout: &Path) -> Checked {
    let tree = Tree::read(checkout);
    let tree = tree.map_err(|error| format!("{} cannot be read: {error}", checkout.display()))?;
    xtask::say(&lines::table(&lines::count(&tree)));
    Ok(Outcome::Passed)
}

fn run_tidy() -> ExitCode {
    let problems = match Tree::of_workspace() {
        Ok(tree) => tidy::check(tree),
        Err(why) => vec![Problem::of_file(".", why.to_owned())],
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
