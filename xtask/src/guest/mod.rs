//! Guests with an IOMMU, whose kernels have VFIO, and the project's own program in them.
//!
//! Machines are QEMU's, emulated: neither hardware nor `/dev/kvm` is needed. What each guest does
//! is the table in `boots.rs`; which kernels there are, and where they come from, `kernels.rs`. In
//! a guest runs `dmaspan-guest`, which documents the lines that it says.

mod boots;
mod cpio;
mod figures;
mod initrd;
mod kernels;
mod log;
mod nested;
mod options;
mod packages;
mod qemu;
mod server;
mod source;
mod tools;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use boots::{BOOTS, Boot, Iommu, REGISTERED, Served};
use initrd::{Programs, Wanted};
use kernels::{Cpu, KERNELS, Ready};
use log::Report;
use options::{Action, LeftOver, OneCommand};
use qemu::{Limits, Machine, Stopped, Time};
use server::{Blocks, Server};

use crate::debian::{cannot_write, lock};
use crate::{Checked, Outcome, hw};

pub use options::Options;

/// The lines of a failed guest's console that are shown.
const TAIL: usize = 25;

/// How long a guest is given to begin, attempt by attempt; the last has all the time that the guest
/// has. So one that hangs costs little, and one that is slow is not given up.
const BEGIN: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(120)];

/// A guest to run.
struct Guest<'r> {
    name: String,
    kernel: &'r Ready,
    machine: Machine<'r>,
    commands: Vec<String>,
    limit: Duration,
    /// Whether it has QEMU.
    nested: bool,
    /// The disk of a server that it has.
    served: Served,
    /// What a second guest runs on that disk.
    again: &'static [&'static str],
}

/// How a guest ended.
struct Ended {
    report: Report,
    problems: Vec<String>,
    seconds: f64,
}

/// Does what was asked for. What cannot run here is skipped with the reason, unless the environment
/// says that this is a failure.
///
/// # Errors
///
/// What failed, in one line; more was said by then.
pub fn run(options: &Options) -> Checked {
    match check(options)? {
        Outcome::Skipped(why) if hw::is_required() => Err(why),
        outcome => Ok(outcome),
    }
}

fn check(options: &Options) -> Checked {
    if options.action == Action::List {
        list();
        return Ok(Outcome::Passed);
    }
    if !cfg!(target_arch = "x86_64") {
        return options.cannot("the guests' programs are built on x86-64 alone".to_owned());
    }
    let program = match qemu::find() {
        Ok(program) => program,
        Err(why) => return options.cannot(why),
    };
    let folder = crate::target_directory().join("guest");
    let lock = lock(&folder)?;
    let mut work = Work::new(folder, program, options.left_over)?;
    let kernels = kernels::get(&options.kernels, &work.folder.join("kernels"), &lock);
    let mut tools = Vec::new();
    if options.serves(Served::Judged) {
        tools = match tools::file_systems(&work.folder.join("kernels"), &lock) {
            Ok(tools) => tools,
            Err(why) => return options.cannot(why),
        };
    }
    if options.serves(Served::Measured) {
        work.storage = match tools::storage(&work.folder.join("kernels"), &lock) {
            Ok(storage) => storage,
            Err(why) => return options.cannot(why),
        };
    }
    let mut skipped = Vec::new();
    let mut ready = Vec::new();
    for (kernel, got) in kernels {
        match got {
            Ok(kernel) => ready.push(kernel),
            Err(why) => skipped.push(format!("kernel {}: {why}", kernel.name)),
        }
    }
    for cpu in [Cpu::X86, Cpu::Arm] {
        let ready: Vec<Ready> =
            ready.iter().filter(|ready| ready.kernel.cpu == cpu).cloned().collect();
        if ready.is_empty() {
            continue;
        }
        let mut programs = initrd::programs(cpu, &work.folder.join("build"), options.programs())?;
        programs.tools.clone_from(&tools);
        match &options.action {
            Action::Command(one) => work.run_command(one, &ready, &programs)?,
            _ => work.run_boots(options, &ready, &programs)?,
        }
    }
    match skipped.is_empty() {
        true => Ok(Outcome::Passed),
        false => options.cannot(skipped.join("; ")),
    }
}

impl Options {
    /// The programs that its guests run.
    fn programs(&self) -> Wanted {
        let runs = |word: &str| match &self.action {
            Action::Command(one) => one.line.starts_with(word),
            _ => {
                let mut lines =
                    BOOTS.iter().filter(|boot| self.asks(boot)).flat_map(|boot| boot.commands);
                lines.any(|line| line.starts_with(word))
            }
        };
        let benchmarks = runs("dmaspan-bench") || runs(REGISTERED);
        Wanted { benchmarks, tests: runs("tests-") }
    }

    /// Whether one of its guests has such a disk of a server.
    fn serves(&self, served: Served) -> bool {
        let mut boots = BOOTS.iter().filter(|boot| boot.served == served);
        self.action == Action::Boots && boots.any(|boot| self.asks(boot))
    }

    /// Whether a boot is to run.
    fn asks(&self, boot: &Boot) -> bool {
        match self.boots.is_empty() {
            true => boot.named().next().is_none(),
            false => self.boots.iter().any(|name| name == boot.name),
        }
    }

    /// What is said where something cannot run here: boots are skipped, and a command that somebody
    /// wanted to run has failed.
    fn cannot(&self, why: String) -> Checked {
        match self.action {
            Action::Command(_) => Err(why),
            Action::List | Action::Boots => Ok(Outcome::Skipped(why)),
        }
    }
}

fn list() {
    crate::say("kernels, those with * where none is named:");
    for kernel in KERNELS {
        let mark = if kernel.by_default { "* " } else { "  " };
        crate::say(&format!("  {mark}{}", kernel.name));
    }
    crate::say("boots, and the kernels that each is for:");
    for boot in BOOTS {
        let kernels = KERNELS.iter().filter(|kernel| kernel.is_one_of(boot.on));
        let kernels: Vec<&str> = kernels.map(|kernel| kernel.name).collect();
        crate::say(&format!("  {}: {}", boot.name, kernels.join(", ")));
    }
}

/// Where guests run, and by what.
struct Work {
    folder: PathBuf,
    program: PathBuf,
    /// The folder of QEMU's storage daemon, where a boot needs it.
    storage: PathBuf,
    /// What the disk hashes to of which each guest has a copy.
    hash: String,
    /// Arguments that end QEMU with this process.
    leash: &'static [&'static str],
    left_over: LeftOver,
}

impl Work {
    fn new(folder: PathBuf, program: PathBuf, left_over: LeftOver) -> Result<Self, String> {
        let write = || -> io::Result<()> {
            for part in ["logs", "run"] {
                fs::create_dir_all(folder.join(part))?;
            }
            qemu::write_disk(&folder.join("disk.img"))
        };
        write().map_err(|error| cannot_write(&folder, &error))?;
        let hash = crate::sha256(&folder.join("disk.img"))?;
        let leash = qemu::leash(&program);
        Ok(Self { folder, program, storage: PathBuf::new(), hash, leash, left_over })
    }

    /// Runs the boots that were asked for, several at once, and says how each ended.
    fn run_boots(
        &self,
        options: &Options,
        kernels: &[Ready],
        programs: &Programs,
    ) -> Result<(), String> {
        let wanted = |boot: &&Boot| options.asks(boot);
        let mut guests = Vec::new();
        for boot in BOOTS.iter().filter(wanted) {
            let kernels = kernels.iter().filter(|ready| ready.kernel.is_one_of(boot.on));
            guests.extend(kernels.map(|kernel| Guest::of_boot(boot, kernel)));
        }
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(Vec::new());
        let measured = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..options.jobs {
                scope.spawn(|| {
                    while let Some(guest) = guests.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let ended = self.run(guest, programs);
                        let Ok(mut failed) = failed.lock() else { return };
                        if !say(guest, &ended, &self.console(guest)) {
                            failed.push(guest.title());
                        }
                        if let (Ok(ended), Ok(mut measured)) = (ended, measured.lock()) {
                            let kernel = guest.kernel.kernel.name;
                            measured.push((guest.name.clone(), kernel, ended.report.figures));
                        }
                    }
                });
            }
        });
        let measured = measured.into_inner().map_err(|_| "a guest could not be said".to_owned())?;
        for boot in BOOTS.iter().filter(wanted) {
            let of = measured.iter().filter(|(name, ..)| name == boot.name);
            let of: Vec<_> = of.map(|(_, kernel, figures)| (*kernel, figures.as_slice())).collect();
            figures::table(boot, &of).iter().for_each(|line| println!("{line}"));
        }
        let failed = failed.into_inner().map_err(|_| "a guest could not be said".to_owned())?;
        match failed.is_empty() {
            true => Ok(()),
            false => Err(format!("failed: {}", failed.join(", "))),
        }
    }

    /// Runs one command in a guest of each kernel and prints what it printed.
    fn run_command(
        &self,
        one: &OneCommand,
        kernels: &[Ready],
        programs: &Programs,
    ) -> Result<(), String> {
        for kernel in kernels {
            let guest = Guest::of_command(one, kernel);
            let Ended { report, problems, .. } = self.run(&guest, programs)?;
            let release = report.release.as_deref().unwrap_or("no kernel");
            eprintln!("guest: {release}: {}", one.line);
            for line in
                report.commands.iter().skip(guest.commands.len() - 1).flat_map(|ran| &ran.output)
            {
                println!("{line}");
            }
            if !problems.is_empty() {
                let console = self.console(&guest);
                return Err(format!(
                    "{}; {} has the whole console",
                    problems.join("; "),
                    console.display()
                ));
            }
        }
        Ok(())
    }

    fn console(&self, guest: &Guest<'_>) -> PathBuf {
        self.folder.join("logs").join(format!("{}.log", guest.file_name()))
    }

    /// Runs a guest to its end, and where it has a server, that beside it; the second guest on the
    /// server's disk, too.
    fn run(&self, guest: &Guest<'_>, programs: &Programs) -> Result<Ended, String> {
        if guest.served == Served::No {
            return self.run_beside(guest, programs, None).map(|(ended, _)| ended);
        }
        let program = server::build(guest.served)?;
        let place = self.folder.join("run").join(guest.file_name());
        let server = match guest.served {
            Served::Measured => Server::start(&program, &place, Blocks::New(qemu::DISK_BYTES))?
                .with_storage(&self.storage, &place)?,
            _ => Server::start(&program, &place, Blocks::New(server::DISK_BYTES))?,
        };
        let (mut ended, disks) = self.run_beside(guest, programs, Some(server))?;
        if !guest.again.is_empty() {
            let flushed = ended.report.flushed.map_or_else(String::new, |last| last.to_string());
            let lines = guest.again.iter().map(|line| line.replace("FLUSHED", &flushed));
            let again = Guest {
                name: format!("{}-again", guest.name),
                commands: lines.collect(),
                machine: guest.machine.clone(),
                ..*guest
            };
            let server = Server::start(&program, &place, Blocks::Left)?;
            let (second, _) = self.run_beside(&again, programs, Some(server))?;
            let of_second = second.problems.into_iter().map(|why| format!("again: {why}"));
            ended.problems.extend(of_second);
            ended.report.passed += second.report.passed;
            ended.seconds += second.seconds;
        }
        for disk in disks.iter().filter(|_| self.left_over == LeftOver::Removed) {
            fs::remove_file(disk).map_err(|error| cannot_write(disk, &error))?;
        }
        Ok(ended)
    }

    /// Runs a guest to its end; also the disks of its server.
    fn run_beside(
        &self,
        guest: &Guest<'_>,
        programs: &Programs,
        server: Option<Server>,
    ) -> Result<(Ended, Vec<PathBuf>), String> {
        let fail = |error: io::Error| cannot_write(&self.folder, &error);
        let place = |kind| self.folder.join("run").join(format!("{}.{kind}", guest.file_name()));
        let (initrd, disk) = (place("cpio"), place("img"));
        let nested = guest.nested.then_some(self.program.as_path());
        let (kernel, iommu) = (guest.kernel, guest.machine.iommu);
        let lines: Vec<String> =
            guest.commands.iter().map(|line| line.replace("SHA256", &self.hash)).collect();
        let archive = initrd::write(programs, kernel, (iommu, guest.served), &lines, nested)?;
        fs::write(&initrd, archive).map_err(fail)?;
        let image = self.folder.join("disk.img");
        fs::copy(&image, &disk).map_err(fail)?;
        let console = self.console(guest);
        let arguments = guest.machine.arguments(&guest.kernel.image, &initrd, &disk);
        let image = image.display().to_string().replace(',', ",,");
        let mut arguments: Vec<String> =
            arguments.iter().map(|word| word.replace("IMAGE", &image)).collect();
        arguments.extend(self.leash.iter().map(|&word| word.to_owned()));
        let disks = server.as_ref().map(|server| server.disks()).unwrap_or_default();
        if let Some(server) = &server {
            server.arguments(&mut arguments);
            // What a former guest said is not for this server.
            fs::write(&console, "").map_err(fail)?;
        }
        let watch = server.map(|server| server.watch(&console));
        let begun = Instant::now();
        let mut boots = 0;
        let (ran, report) = attempts(guest, &mut |begin| {
            boots += 1;
            let limits = Limits { begin, end: guest.limit };
            let program = guest.kernel.kernel.cpu.program(&self.program);
            let ran = qemu::run(&program, &arguments, &console, limits);
            let text = fs::read(&console).map_err(fail)?;
            let mut report = Report::parse(&String::from_utf8_lossy(&text));
            if let Ok(run) = &ran {
                report.host_cpu(&run.marks);
            }
            Ok((ran.map(|run| run.took), report))
        })?;
        if self.left_over == LeftOver::Removed {
            fs::remove_file(&initrd).and_then(|()| fs::remove_file(&disk)).map_err(fail)?;
        }
        let seconds = *ran.as_ref().unwrap_or(&begun.elapsed());
        let (is_killed, of_server) =
            watch.map(|watch| watch.end(boots, &report.sums)).unwrap_or_default();
        let mut problems = match ran.err() {
            // Of a guest whose machine ended nothing but this is known.
            Some(stopped) if is_killed && qemu::has_aborted(&console) => {
                println!("   FOUND as the server was killed, {}: {}", stopped.why(), qemu::ABORT);
                report.failures()
            }
            stopped => {
                let mut problems: Vec<String> = stopped.map(Stopped::why).into_iter().collect();
                problems.extend(report.problems());
                let missing = guest.commands.len().saturating_sub(report.commands.len());
                if missing > 0 {
                    problems.push(format!("{missing} of its commands did not begin"));
                }
                problems
            }
        };
        problems.extend(of_server);
        Ok((Ended { report, problems, seconds: seconds.as_secs_f64() }, disks))
    }
}

/// Boots a guest until it begins, at most once more than [`BEGIN`] has times. Firmware and kernels
/// have clocks to calibrate, which fails on a machine that is too busy: they end or hang then.
fn attempts<T>(
    guest: &Guest<'_>,
    boot: &mut dyn FnMut(Duration) -> Result<(Result<Duration, Stopped>, T), String>,
) -> Result<(Result<Duration, Stopped>, T), String> {
    for begin in BEGIN.into_iter().filter(|&begin| begin < guest.limit) {
        match boot(begin)? {
            (Err(Stopped::NotBegun(why)), _) => {
                eprintln!("guest: {}: {why}; once more", guest.title());
            }
            ended => return Ok(ended),
        }
    }
    boot(guest.limit)
}

impl<'r> Guest<'r> {
    fn of_boot(boot: &'r Boot, kernel: &'r Ready) -> Self {
        Self {
            name: boot.name.to_owned(),
            kernel,
            machine: Machine {
                iommu: boot.iommu,
                memory: boot.memory,
                time: boot.time,
                extra: boot.qemu.iter().map(|&word| word.to_owned()).collect(),
                cmdline: boot.cmdline,
            },
            commands: boot.lines(),
            limit: Duration::from_secs(boot.seconds),
            nested: boot.nested,
            served: boot.served,
            again: boot.again,
        }
    }

    /// The controller is bound before the command, and the device with the BAR where there is one;
    /// the disk of virtio is there for who binds it.
    /// Where instructions are counted, the kernel first ends what it does after it started.
    fn of_command(one: &'r OneCommand, kernel: &'r Ready) -> Self {
        let mut commands = vec!["bind 0000:00:05.0".to_owned()];
        let mut extra = boots::WITH_VIRTIO.map(str::to_owned).to_vec();
        if let Some(size) = &one.membar {
            let device = format!("pci-testdev,membar={size},addr=07");
            extra.extend(["-device".to_owned(), device]);
            commands.push("bind 0000:00:07.0".to_owned());
        }
        commands.extend(one.prepare.iter().cloned());
        if one.time == Time::Counted {
            commands.push("settle 20".to_owned());
        }
        commands.push(one.line.clone());
        Self {
            name: "command".to_owned(),
            kernel,
            machine: Machine {
                iommu: match kernel.kernel.cpu {
                    Cpu::X86 => one.iommu,
                    Cpu::Arm => Iommu::Smmu,
                },
                memory: &one.memory,
                time: one.time,
                extra,
                cmdline: "",
            },
            commands,
            limit: Duration::from_secs(one.seconds),
            nested: one.nested,
            served: Served::No,
            again: &[],
        }
    }

    fn title(&self) -> String {
        format!("{} on {}", self.name, self.kernel.kernel.name)
    }

    fn file_name(&self) -> String {
        format!("{}-{}", self.name, self.kernel.kernel.name)
    }
}

/// Says how a guest ended, with the end of its console where it failed, and returns whether it did
/// what it was told.
fn say(guest: &Guest<'_>, ended: &Result<Ended, String>, console: &Path) -> bool {
    let title = guest.title();
    let Ended { report, problems, seconds } = match ended {
        Ok(ended) => ended,
        Err(why) => {
            println!("guest: {title}: FAILED: {why}");
            return false;
        }
    };
    let release = report.release.as_deref().unwrap_or("no kernel");
    let (passed, skipped) = (report.passed, report.skipped.len());
    println!("guest: {title}: {release}, {seconds:.1} s: {passed} passed, {skipped} skipped");
    for skipped in &report.skipped {
        println!("   SKIP {skipped}");
    }
    for problem in problems {
        println!("   FAILED {problem}");
    }
    if !problems.is_empty() {
        println!("   the end of {}:", console.display());
        let text = fs::read(console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(TAIL)..).unwrap_or_default();
        tail.iter().for_each(|line| println!("   | {}", log::clean(line)));
    }
    problems.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_guest(limit: Duration, test: impl FnOnce(&Guest<'_>)) {
        let (image, modules, shell) = (PathBuf::new(), Vec::new(), None);
        let kernel = Ready { kernel: KERNELS[0], image, modules, shell };
        let mut guest = Guest::of_boot(&BOOTS[0], &kernel);
        guest.limit = limit;
        test(&guest);
    }

    fn hung() -> Result<(Result<Duration, Stopped>, ()), String> {
        Ok((Err(Stopped::NotBegun("it hung".to_owned())), ()))
    }

    #[test]
    fn a_guest_that_hangs_before_it_begins_is_booted_again_and_has_all_its_time_at_last() {
        let limit = Duration::from_secs(300);
        with_guest(limit, |guest| {
            let mut given = Vec::new();
            let ended = attempts(guest, &mut |begin| {
                given.push(begin);
                hung()
            });
            assert_eq!(ended, hung());
            assert_eq!(given, [BEGIN[0], BEGIN[1], limit]);
        });
    }

    #[test]
    fn a_guest_that_begins_is_booted_no_more() {
        for ends in [Ok(Duration::ZERO), Err(Stopped::Failed("it failed".to_owned()))] {
            with_guest(Duration::from_secs(300), |guest| {
                let mut boots = 0;
                let ended = attempts(guest, &mut |_| {
                    boots += 1;
                    if boots == 1 { hung() } else { Ok((ends.clone(), ())) }
                });
                assert_eq!((ended, boots), (Ok((ends.clone(), ())), 2));
            });
        }
    }

    #[test]
    fn a_command_that_cannot_run_has_failed_and_boots_are_skipped() {
        let why = || "there is no kernel".to_owned();
        let command = Options::parse(&["--", "true"]).unwrap();
        assert_eq!(command.cannot(why()), Err(why()));
        let boots = Options::parse(&[]).unwrap();
        assert_eq!(boots.cannot(why()), Ok(Outcome::Skipped(why())));
    }
}
