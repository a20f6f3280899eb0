//! The mirror and the keyring that a Debian machine takes its own packages from.

use std::fs;
use std::process::Command;

use super::output_of;

/// The files that Debian's own mirrors stand in, in the order in which they are asked.
const FILES: [&str; 2] = ["/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"];
/// Where the keys are if nothing names others.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A mirror of Debian and the keys that sign what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its address.
    pub(crate) uri: String,
    /// The path of a keyring.
    pub(crate) signed_by: String,
}

impl Source {
    /// What the machine's apt is configured for, whether it has asked the mirror before or not.
    ///
    /// # Errors
    ///
    /// That there is no mirror of Debian, or what apt says, in one line.
    pub(crate) fn of_machine() -> Result<Self, String> {
        let mut targets = Command::new("apt-get");
        targets.args(["indextargets", "--no-release-info", "Created-By: Packages"]);
        targets.args(["Component: main", "--format", "$(SOURCESENTRY) $(RELEASE) $(SITE)"]);
        let none = || format!("{} names no mirror of Debian", FILES.join(" or "));
        let (file, uri) = mirror(&output_of(&mut targets)?).ok_or_else(none)?;
        let text = fs::read_to_string(file).unwrap_or_default();
        let signed_by = keyring(&text).unwrap_or(KEYRING).to_owned();
        Ok(Self { uri, signed_by })
    }
}

/// The first mirror of the main archive among the lists of packages, each a line of its place in a
/// file, its suite and its mirror, and the file. The mirrors of the main archive have all releases;
/// security updates come from elsewhere.
fn mirror(targets: &str) -> Option<(&'static str, String)> {
    FILES.into_iter().find_map(|file| {
        let in_file = targets.lines().filter_map(|line| line.strip_prefix(file)?.strip_prefix(':'));
        let mut mirrors = in_file.filter_map(|rest| {
            let (suite, uri) = rest.split_once(' ')?.1.split_once(' ')?;
            let is_of_the_archive = !suite.contains('/') && !suite.ends_with("-security");
            (is_of_the_archive && !uri.starts_with("cdrom:")).then_some(uri)
        });
        Some((file, mirrors.next()?.to_owned()))
    })
}

/// The first keyring that a file of sources names (sources.list(5)).
fn keyring(text: &str) -> Option<&str> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let words = lines.flat_map(|line| line.split(|each: char| " \t[]=:".contains(each)));
    let mut words = words.filter(|word| !word.is_empty());
    words.find(|word| word.eq_ignore_ascii_case("signed-by"))?;
    words.next().filter(|word| word.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_first_of_the_main_archive_in_debians_own_file() {
        let line = "/etc/apt/sources.list:1 trixie http://mirror.example/lines\n";
        let paragraph = "/etc/apt/sources.list.d/debian.sources:";
        let others = format!(
            "/etc/apt/sources.list.d/another.sources:1 trixie http://mirror.example/another\n\
             {paragraph}1 trixie-security http://mirror.example/security\n\
             {paragraph}2 ./ http://mirror.example/flat\n\
             {paragraph}3 trixie cdrom://[Debian GNU/Linux 13]\n"
        );
        assert_eq!(mirror(&others), None);
        assert_eq!(mirror(""), None);
        let lines = Some((FILES[1], "http://mirror.example/lines".to_owned()));
        assert_eq!(mirror(&format!("{others}{line}")), lines);
        let text = format!(
            "{line}{others}{paragraph}4 trixie-updates https://mirror.example/debian\n\
             {paragraph}5 trixie https://mirror.example/second\n"
        );
        let paragraphs = Some((FILES[0], "https://mirror.example/debian".to_owned()));
        assert_eq!(mirror(&text), paragraphs);
    }

    #[test]
    fn a_keyring_is_found_in_both_styles() {
        let paragraphs = "Types: deb\n# Signed-By: /b.gpg\nsigned-by: /a.gpg\nSigned-By: /c.gpg\n";
        assert_eq!(keyring(paragraphs), Some("/a.gpg"));
        assert_eq!(keyring("Signed-By:\n /a.gpg\n"), Some("/a.gpg"));
        for options in ["[signed-by=/a.gpg]", "[ arch=amd64 signed-by=/a.gpg ]"] {
            let line = format!("deb\t{options} https://mirror.example trixie main");
            assert_eq!(keyring(&line), Some("/a.gpg"), "{line}");
        }
        for none in ["", "deb https://a.example trixie main", "# Signed-By: /b.gpg", "Signed-By:"] {
            assert_eq!(keyring(none), None, "{none}");
        }
        assert_eq!(keyring("Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n"), None);
    }
}
