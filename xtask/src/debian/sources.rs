//! The mirror and the keyring that a Debian machine takes its own packages from.

/// Where the keys are if nothing names others.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A mirror of Debian and the keys that sign what it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Its address.
    pub(crate) uri: String,
    /// A keyring's path, or the key itself in the lines of a field.
    pub(crate) signed_by: String,
}

/// The first mirror in a file of paragraphs, `debian.sources` (sources.list(5), "DEB822-STYLE
/// FORMAT").
pub(crate) fn of_paragraphs(text: &str) -> Option<Source> {
    paragraphs(text).iter().find_map(|paragraph| {
        let field = |name: &str| {
            let mut fields = paragraph.iter().filter(|field| field.0.eq_ignore_ascii_case(name));
            fields.next().map(|field| field.1.as_str())
        };
        let words = |name: &str| field(name).unwrap_or_default().split_whitespace();
        if words("Enabled").any(|word| ["no", "false", "off", "0"].contains(&word))
            || !words("Types").any(|word| word == "deb")
            || !words("Components").any(|word| word == "main")
            || !words("Suites").any(is_of_the_archive)
        {
            return None;
        }
        let uri = words("URIs").find(|uri| is_mirror(uri))?;
        let signed_by = field("Signed-By").filter(|keys| !keys.is_empty()).unwrap_or(KEYRING);
        Some(Source { uri: uri.to_owned(), signed_by: signed_by.to_owned() })
    })
}

/// The first mirror in a file of lines, `sources.list` (sources.list(5), "ONE-LINE-STYLE FORMAT").
pub(crate) fn of_lines(text: &str) -> Option<Source> {
    text.lines().find_map(|line| {
        let line = line.split('#').next().unwrap_or_default().trim();
        let rest = line.strip_prefix("deb")?;
        let rest = rest.strip_prefix(char::is_whitespace)?.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(inside) => inside.split_once(']')?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let uri = words.next().filter(|uri| is_mirror(uri))?;
        let suite = words.next()?;
        if !is_of_the_archive(suite) || !words.any(|word| word == "main") {
            return None;
        }
        let keyring = options.split_whitespace().find_map(|word| word.strip_prefix("signed-by="));
        let signed_by = keyring.unwrap_or(KEYRING).to_owned();
        Some(Source { uri: uri.to_owned(), signed_by })
    })
}

/// Whether a suite is one of the main archive, whose mirrors have all releases; security updates
/// come from elsewhere.
fn is_of_the_archive(suite: &str) -> bool {
    !suite.contains('/') && !suite.ends_with("-security")
}

fn is_mirror(uri: &str) -> bool {
    !uri.starts_with("cdrom:")
}

/// The fields of each paragraph. Lines that go on keep their line breaks.
fn paragraphs(text: &str) -> Vec<Vec<(String, String)>> {
    let mut all = vec![Vec::new()];
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if line.trim().is_empty() {
            all.push(Vec::new());
            continue;
        }
        let Some(fields) = all.last_mut() else { continue };
        let fields: &mut Vec<(String, String)> = fields;
        if line.starts_with(char::is_whitespace) {
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.to_owned(), value.trim().to_owned()));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(uri: &str, signed_by: &str) -> Option<Source> {
        Some(Source { uri: uri.to_owned(), signed_by: signed_by.to_owned() })
    }

    #[test]
    fn the_mirror_of_paragraphs_is_the_first_of_the_main_archive() {
        let text = "\
# comment
Types: deb-src
URIs: https://mirror.example/sources
Suites: bookworm
Components: main

Types: deb
URIs: https://mirror.example/security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: https://mirror.example/disabled
Suites: bookworm
Components: main

types: deb deb-src
# comment between
uris: https://mirror.example/debian
  https://mirror.example/second
suites: bookworm bookworm-updates
components: main contrib
signed-by: /usr/share/keyrings/example.gpg
";
        let expected = source("https://mirror.example/debian", "/usr/share/keyrings/example.gpg");
        assert_eq!(of_paragraphs(text), expected);
        let without_keys = text.replace("signed-by: /usr/share/keyrings/example.gpg\n", "");
        assert_eq!(of_paragraphs(&without_keys), source("https://mirror.example/debian", KEYRING));
        for nothing in ["", "# Types: deb", "Types: deb\n", " goes on\nno field\n"] {
            assert_eq!(of_paragraphs(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_key_within_a_paragraph_keeps_its_lines() {
        let key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQIN\n -----END";
        let text = format!(
            "Types: deb\nURIs: a:b\nSuites: trixie\nComponents: main\nSigned-By:\n {key}\nX: y"
        );
        assert_eq!(of_paragraphs(&text), source("a:b", &format!("\n {key}")));
    }

    #[test]
    fn the_mirror_of_lines_is_the_first_of_the_main_archive() {
        let text = "\
# deb https://mirror.example/comment bookworm main
deb-src https://mirror.example/sources bookworm main
deb cdrom:[Debian GNU/Linux 12]/ bookworm main
deb https://mirror.example/security bookworm-security main
deb https://mirror.example/flat ./
deb https://mirror.example/other bookworm contrib
deb\t[ arch=amd64 signed-by=/a.gpg ] https://mirror.example/debian bookworm contrib main # first
deb https://mirror.example/second bookworm main
";
        assert_eq!(of_lines(text), source("https://mirror.example/debian", "/a.gpg"));
        let plain = "deb https://mirror.example/debian/ trixie main";
        assert_eq!(of_lines(plain), source("https://mirror.example/debian/", KEYRING));
        for nothing in ["", "deb", "deb [a https://mirror.example b main", "debian a b main"] {
            assert_eq!(of_lines(nothing), None, "{nothing}");
        }
    }
}
