//! The options of `cargo xtask guest`.

use std::str::FromStr;

use super::boots::{BOOTS, Boot, Iommu};
use super::kernels::{KERNELS, Kernel};
use super::qemu::Time;

/// What a guest with one command may take by default: counted instructions pass slowly.
const COMMAND_SECONDS: u64 = 900;

/// The arguments behind `guest`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The kernels; those that run by default where none is named.
    pub(super) kernels: Vec<Kernel>,
    /// The names of boots; none means all.
    pub(super) boots: Vec<String>,
    pub(super) action: Action,
    /// How many guests run at once.
    pub(super) jobs: usize,
    pub(super) left_over: LeftOver,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// To say what there is.
    List,
    /// To run the boots.
    Boots,
    /// To run one command in each kernel's guest.
    Command(OneCommand),
}

/// Whether the disk and the archive of a guest stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeftOver {
    /// They do not.
    Removed,
    /// They do.
    Kept,
}

/// A guest that runs one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OneCommand {
    /// The lines before it, for init.
    pub(super) prepare: Vec<String>,
    /// The command.
    pub(super) line: String,
    pub(super) iommu: Iommu,
    pub(super) time: Time,
    /// Memory, as QEMU writes sizes.
    pub(super) memory: String,
    /// How long it may take.
    pub(super) seconds: u64,
    /// The size of the BAR of a device at 0000:00:07.0.
    pub(super) membar: Option<String>,
    /// Whether the guest has QEMU, to be a host itself.
    pub(super) nested: bool,
}

impl Options {
    /// Reads the command line's arguments behind `guest`.
    ///
    /// # Errors
    ///
    /// What is wrong with them, in one line.
    pub fn parse(arguments: &[&str]) -> Result<Self, String> {
        let mut options = Self {
            kernels: Vec::new(),
            boots: Vec::new(),
            action: Action::Boots,
            jobs: 2,
            left_over: LeftOver::Removed,
        };
        let mut one = OneCommand {
            prepare: Vec::new(),
            line: String::new(),
            iommu: Iommu::Intel,
            time: Time::Real,
            memory: "2G".to_owned(),
            seconds: COMMAND_SECONDS,
            membar: None,
            nested: false,
        };
        let mut of_one = None;
        let mut arguments = arguments.iter();
        while let Some(&argument) = arguments.next() {
            let mut value = || arguments.next().copied().ok_or(format!("{argument} needs a value"));
            match argument {
                "--" => break,
                "--kernel" => options.kernels.push(kernel(value()?)?),
                "--boot" => options.boots.push(boot(value()?)?),
                "--jobs" => options.jobs = count(value()?, "guests")?,
                "--series" => options.boots.extend(series().map(|boot| boot.name.to_owned())),
                "--keep" => options.left_over = LeftOver::Kept,
                "--list" => options.action = Action::List,
                _ => {
                    match argument {
                        "--prepare" => one.prepare.push(value()?.to_owned()),
                        "--memory" => one.memory = value()?.to_owned(),
                        "--seconds" => one.seconds = count(value()?, "seconds")?,
                        "--membar" => one.membar = Some(value()?.to_owned()),
                        "--virtio-iommu" => one.iommu = Iommu::Virtio,
                        "--nested" => one.nested = true,
                        "--icount" => one.time = Time::Counted,
                        other => return Err(format!("`{other}` is not understood")),
                    }
                    of_one = Some(argument);
                }
            }
        }
        one.line = arguments.copied().collect::<Vec<_>>().join(" ");
        match (one.line.is_empty(), of_one) {
            (false, _) => options.action = Action::Command(one),
            (true, Some(option)) => return Err(format!("{option} needs a command behind --")),
            (true, None) => {}
        }
        if options.kernels.is_empty() {
            options.kernels = match &options.action {
                Action::Command(_) => vec![kernel("iommufd")?],
                _ => usual(&options.boots),
            };
        }
        Ok(options)
    }
}

/// The boots that compare kernels.
fn series() -> impl Iterator<Item = &'static Boot> {
    BOOTS.iter().filter(|boot| boot.named().next().is_some())
}

/// The kernels that run by default and, where boots are asked for, those that they name.
fn usual(boots: &[String]) -> Vec<Kernel> {
    let asked = BOOTS.iter().filter(|boot| boots.iter().any(|name| name == boot.name));
    let (named, others): (Vec<_>, Vec<_>) = asked.partition(|boot| boot.named().next().is_some());
    let is_default = named.is_empty() || !others.is_empty();
    let is_named = |kernel: &Kernel| named.iter().any(|boot| kernel.is_one_of(boot.on));
    let wanted = |kernel: &Kernel| (is_default && kernel.by_default) || is_named(kernel);
    KERNELS.into_iter().filter(wanted).collect()
}

fn kernel(name: &str) -> Result<Kernel, String> {
    KERNELS.into_iter().find(|kernel| kernel.name == name).ok_or_else(|| {
        format!(
            "there is no kernel `{name}`, only {}",
            KERNELS.map(|kernel| kernel.name).join(", ")
        )
    })
}

fn boot(name: &str) -> Result<String, String> {
    let is_one = BOOTS.iter().any(|boot| boot.name == name);
    is_one.then(|| name.to_owned()).ok_or_else(|| format!("there is no boot `{name}`; see --list"))
}

fn count<N: FromStr + Default + PartialEq>(text: &str, of: &str) -> Result<N, String> {
    let count = text.parse().ok().filter(|count| *count != N::default());
    count.ok_or_else(|| format!("`{text}` is not a number of {of}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().collect::<Vec<_>>())
    }

    fn kernels(line: &str) -> Vec<&'static str> {
        parse(line).unwrap().kernels.iter().map(|kernel| kernel.name).collect()
    }

    #[test]
    fn without_arguments_the_default_kernels_boot() {
        assert_eq!(kernels(""), ["6.1", "newest", "iommufd"]);
        assert_eq!(kernels("--kernel 6.18 --kernel 6.1"), ["6.18", "6.1"]);
        assert_eq!(kernels("-- dmaspan devices"), ["iommufd"]);
        assert_eq!(kernels("--boot swiotlb"), ["5.10", "6.1"]);
        let series = parse("--series").unwrap();
        assert!(series.boots.iter().any(|name| name == "swiotlb"), "{series:?}");
        assert!(!series.boots.iter().any(|name| name == "type1"), "{series:?}");
        assert!(series.kernels.iter().any(|kernel| kernel.name == "arm64-5.10"));
        assert_eq!(kernels("--boot swiotlb --boot counted"), ["5.10", "6.1", "newest", "iommufd"]);
        assert_eq!(kernels("--boot noiommu"), ["iommufd-built"]);
        assert_eq!(parse("").unwrap().action, Action::Boots);
        assert_eq!(parse("--").unwrap().action, Action::Boots);
        assert_eq!(parse("--list").unwrap().action, Action::List);
    }

    #[test]
    fn a_command_has_a_machine_of_its_own() {
        let line = "--kernel 6.17 --icount --membar 32G --memory 4G --seconds 60 \
                    --jobs 1 --keep -- a --list";
        let options = parse(line).unwrap();
        assert_eq!((options.jobs, options.left_over), (1, LeftOver::Kept));
        let Action::Command(one) = options.action else { panic!("no command") };
        assert_eq!((one.line.as_str(), one.time, one.seconds), ("a --list", Time::Counted, 60));
        assert_eq!((one.memory.as_str(), one.membar.as_deref()), ("4G", Some("32G")));
    }

    #[test]
    fn bad_arguments_are_refused_by_name() {
        for (line, named) in [
            ("--kernel", "--kernel"),
            ("--kernel 5.9", "`5.9`"),
            ("--boot nothing", "`nothing`"),
            ("--jobs 0", "`0`"),
            ("--seconds x -- a", "`x`"),
            ("--fast", "`--fast`"),
            ("--icount", "--icount"),
            ("6.1", "`6.1`"),
        ] {
            assert!(parse(line).is_err_and(|why| why.contains(named)), "{line}");
        }
    }
}
