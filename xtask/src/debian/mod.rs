//! Packages of Debian, got through a private root of apt.
//!
//! The machine's apt and dpkg keep what they know and have; no privileges are needed.

mod place;
mod sources;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) use place::{cannot_write, lock, remove, replace};
use sources::Source;

/// A processor that Debian's QEMU runs on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Architecture {
    /// What Debian calls it.
    pub(crate) name: &'static str,
    /// The folder of its libraries below `usr/lib`.
    pub(crate) libraries: &'static str,
    /// The program in there that loads programs.
    pub(crate) loader: &'static str,
}

const ARCHITECTURES: [Architecture; 2] = [
    Architecture { name: "amd64", libraries: "x86_64-linux-gnu", loader: "ld-linux-x86-64.so.2" },
    Architecture { name: "arm64", libraries: "aarch64-linux-gnu", loader: "ld-linux-aarch64.so.1" },
];

/// The machine, as far as getting packages needs to know it.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Its processor.
    pub(crate) architecture: &'static Architecture,
    source: Source,
}

impl Machine {
    /// This machine.
    ///
    /// # Errors
    ///
    /// Why packages of Debian are nothing for it, in one line.
    pub(crate) fn here() -> Result<Self, String> {
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        if !is_debian(&release) {
            return Err("packages can be got on Debian alone, which this is not".to_owned());
        }
        output_of(Command::new("dpkg-deb").arg("--version"))?;
        let name = output_of(Command::new("dpkg").arg("--print-architecture"))?;
        let name = name.trim();
        let architecture = ARCHITECTURES.iter().find(|one| one.name == name);
        let architecture = architecture
            .ok_or(format!("there are packages for amd64 and arm64, and this machine is {name}"))?;
        Ok(Self { architecture, source: Source::of_machine()? })
    }

    /// The same, for packages that another processor's machines have.
    ///
    /// # Errors
    ///
    /// That nothing is known of it, in one line.
    pub(crate) fn of_architecture(&self, name: &str) -> Result<Self, String> {
        let architecture = ARCHITECTURES.iter().find(|one| one.name == name);
        let architecture = architecture.ok_or(format!("there are no packages for {name}"))?;
        Ok(Self { architecture, source: self.source.clone() })
    }

    /// A root of apt in a folder that knows what these suites have now. Downloads what they list.
    ///
    /// # Errors
    ///
    /// What failed, in one line.
    pub(crate) fn root<'l>(
        &self,
        folder: &Path,
        suites: &str,
        lock: &'l File,
    ) -> Result<Root<'l>, String> {
        eprintln!("xtask: asking {} for its packages", self.source.uri);
        let config =
            self.write_root(folder, suites).map_err(|error| cannot_write(folder, &error))?;
        let root = Root { folder: folder.to_path_buf(), config, lock };
        root.apt("apt-get", &["-qq", "-o", "APT::Update::Error-Mode=any", "update"])
            .map_err(|error| self.explain(error))?;
        Ok(root)
    }

    /// Writes what apt reads instead of the machine's configuration, and returns the main file.
    fn write_root(&self, folder: &Path, suites: &str) -> std::io::Result<PathBuf> {
        for each in ["etc/parts", "lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(each))?;
        }
        fs::write(folder.join("status"), "")?;
        let Source { uri, signed_by } = &self.source;
        let sources = format!(
            "Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\nSigned-By: {signed_by}\n"
        );
        fs::write(folder.join("etc/debian.sources"), sources)?;
        let dump = output_of(Command::new("apt-config").arg("dump")).unwrap_or_default();
        let config = folder.join("apt.conf");
        fs::write(&config, self.config(folder, &dump))?;
        Ok(config)
    }

    /// The configuration of apt (apt.conf(5)): everything in one folder, nothing installed, and of
    /// the machine's own settings those alone that say how to reach a mirror.
    fn config(&self, folder: &Path, machines: &str) -> String {
        let folder = folder.display();
        let name = self.architecture.name;
        let mut config = format!(
            "Dir::State \"{folder}\";\n\
             Dir::State::lists \"{folder}/lists\";\n\
             Dir::State::status \"{folder}/status\";\n\
             Dir::Cache \"{folder}/cache\";\n\
             Dir::Etc \"{folder}/etc\";\n\
             Dir::Etc::sourceparts \"{folder}/etc\";\n\
             Dir::Etc::parts \"{folder}/etc/parts\";\n\
             APT::Architecture \"{name}\";\n\
             APT::Architectures {{ \"{name}\"; }};\n\
             APT::Sandbox::User \"root\";\n\
             Acquire::Languages \"none\";\n"
        );
        for line in machines.lines() {
            if line.to_ascii_lowercase().starts_with("acquire::http") {
                config.push_str(line);
                config.push('\n');
            }
        }
        config
    }

    fn explain(&self, error: String) -> String {
        if !error.contains("not signed") {
            return error;
        }
        let keys = &self.source.signed_by;
        format!("{error} (the keys in {keys} may be too old: update debian-archive-keyring)")
    }
}

/// A root of apt: what it knows and downloads lies in one folder.
#[derive(Debug)]
pub(crate) struct Root<'l> {
    folder: PathBuf,
    config: PathBuf,
    lock: &'l File,
}

impl Root<'_> {
    /// Downloads packages of a suite, and all that they stand on, and returns the files.
    ///
    /// # Errors
    ///
    /// What failed, in one line.
    pub(crate) fn download_closure(
        &self,
        suite: &str,
        packages: &[&str],
    ) -> Result<Vec<PathBuf>, String> {
        eprintln!("xtask: downloading {} and what they need", packages.join(", "));
        let mut install = vec!["-qq", "-y", "--download-only", "--no-install-recommends"];
        install.extend(["-t", suite, "install"]);
        install.extend(packages);
        self.apt("apt-get", &install)?;
        packages_in(&self.folder.join("cache/archives"))
    }

    /// Downloads packages alone, into a folder that is made for them, and returns the files.
    ///
    /// # Errors
    ///
    /// What failed, in one line.
    pub(crate) fn download(
        &self,
        folder: &Path,
        packages: &[&str],
    ) -> Result<Vec<PathBuf>, String> {
        eprintln!("xtask: downloading {}", packages.join(", "));
        fs::create_dir_all(folder).map_err(|error| cannot_write(folder, &error))?;
        let mut command = self.command("apt-get", &["-qq", "download"]);
        output_under(self.lock, command.args(packages).current_dir(folder))?;
        packages_in(folder)
    }

    /// The names of all packages that begin so.
    ///
    /// # Errors
    ///
    /// What failed, in one line.
    pub(crate) fn names(&self, beginning: &str) -> Result<Vec<String>, String> {
        let names = self.apt("apt-cache", &["pkgnames", beginning])?;
        Ok(names.lines().map(|line| line.trim().to_owned()).collect())
    }

    fn apt(&self, program: &str, arguments: &[&str]) -> Result<String, String> {
        output_under(self.lock, &mut self.command(program, arguments))
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", &self.config).args(arguments);
        command
    }
}

/// Unpacks packages into a folder.
///
/// # Errors
///
/// Which failed, in one line.
pub(crate) fn unpack(packages: &[PathBuf], folder: &Path, lock: &File) -> Result<(), String> {
    eprintln!("xtask: unpacking {} packages", packages.len());
    for package in packages {
        output_under(lock, Command::new("dpkg-deb").arg("-x").arg(package).arg(folder))?;
    }
    Ok(())
}

fn is_debian(os_release: &str) -> bool {
    os_release.lines().any(|line| matches!(line, "ID=debian" | "ID=\"debian\""))
}

fn packages_in(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let cannot_read = |error| format!("{} cannot be read: {error}", folder.display());
    let mut packages = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot_read)? {
        let path = entry.map_err(cannot_read)?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            packages.push(path);
        }
    }
    packages.sort();
    Ok(packages)
}

/// As [`output_of`], for a command that writes. It holds the lock too, as its input: where it
/// outlives this process, the next one waits for it.
pub(crate) fn output_under(lock: &File, command: &mut Command) -> Result<String, String> {
    let lock =
        lock.try_clone().map_err(|error| format!("the lock cannot be passed on: {error}"))?;
    output_of(command.stdin(lock))
}

/// What a command prints; its first line about an error where it fails.
pub(crate) fn output_of(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.env("LC_ALL", "C").output();
    let output = output.map_err(|error| format!("{name} did not start: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name}: {}", first_error(&said).unwrap_or(&output.status.to_string())))
}

/// The first line that says what is wrong: apt marks errors with `E: `, others begin with them.
fn first_error(said: &str) -> Option<&str> {
    let mut lines = said.lines().filter(|line| !line.trim().is_empty());
    let marked = lines.clone().find_map(|line| line.strip_prefix("E: "));
    marked.or_else(|| lines.next()).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let source = Source { uri: "a:b".to_owned(), signed_by: "/a.gpg".to_owned() };
        Machine { architecture: &ARCHITECTURES[1], source }
    }

    #[test]
    fn debian_is_told_from_what_is_like_it() {
        assert!(is_debian("PRETTY_NAME=\"Debian GNU/Linux 12\"\nID=debian\n"));
        for other in
            ["", "ID=ubuntu\nID_LIKE=debian\n", "NAME=debian\nID=devuan", "VERSION_ID=debian"]
        {
            assert!(!is_debian(other), "{other}");
        }
    }

    #[test]
    fn apt_is_configured_for_one_folder_and_reaches_mirrors_as_the_machine_does() {
        let dump = "APT::Update::Post-Invoke:: \"rm x\";\nAcquire::HTTPS::Proxy \"a:1\";\n\
                    Acquire::AllowInsecureRepositories \"1\";\nDir \"/\";\n";
        let config = machine().config(Path::new("/there"), dump);
        let places = config.lines().filter(|line| line.starts_with("Dir::"));
        assert!(places.clone().all(|line| line.contains(" \"/there")), "{config}");
        assert_eq!(places.count(), 7);
        assert!(config.contains("APT::Architectures { \"arm64\"; };\n"));
        assert!(config.ends_with("\nAcquire::HTTPS::Proxy \"a:1\";\n"));
        assert!(!config.contains("Invoke") && !config.contains("Insecure"));
    }

    #[test]
    fn errors_are_one_line_and_old_keys_are_named() {
        let said = "W: one\nE: The repository 'x' is not signed.\nE: three\n";
        assert_eq!(first_error(said), Some("The repository 'x' is not signed."));
        assert_eq!(first_error("\n  dpkg-deb: error: x\nmore\n"), Some("dpkg-deb: error: x"));
        assert_eq!(first_error("\n"), None);
        let explained = machine().explain("'x' is not signed.".to_owned());
        assert!(explained.contains("/a.gpg") && explained.contains("debian-archive-keyring"));
        assert_eq!(machine().explain("no network".to_owned()), "no network");
    }

    #[test]
    fn a_program_that_is_missing_or_fails_is_named() {
        let missing = output_of(&mut Command::new("no-such-program-at-all"));
        assert!(missing.unwrap_err().starts_with("no-such-program-at-all did not start: "));
        let failing = output_of(&mut Command::new("false"));
        assert!(failing.unwrap_err().starts_with("false: exit status"));
    }
}
