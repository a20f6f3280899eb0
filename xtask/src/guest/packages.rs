//! This finds the packages of Debian that have a kernel.

/// Suites that have kernels from 6.1 on.
pub(super) const SUITES: &str = "bookworm trixie trixie-updates trixie-backports";
/// Suites that have one before those, and shells.
pub(super) const OLD_SUITES: &str = "bullseye trixie";

const IMAGE: &str = "linux-image-";
/// A kernel among the names of packages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// What the kernel calls itself.
    pub(super) release: String,
    /// The packages with its image and its modules.
    pub(super) packages: Vec<String>,
}

/// The newest release of a series as `6.12`, or of all, that ends so; nothing where there is none.
/// Other flavours may end alike, with more in front: `-rt-arm64`.
pub(super) fn choose(names: &[String], series: Option<&str>, flavour: &str) -> Option<Choice> {
    let is_wanted = |release: &&str| {
        let Some(release) = release.strip_suffix(flavour) else { return false };
        if release.contains("-cloud") || release.contains("-rt") {
            return false;
        }
        let rest = match series {
            None => return release.starts_with(|first: char| first.is_ascii_digit()),
            Some(series) => release.strip_prefix(series),
        };
        rest.is_some_and(|rest| rest.starts_with('.'))
    };
    let releases = names.iter().filter_map(|name| name.strip_prefix(IMAGE));
    let releases = releases.filter(is_wanted);
    let release = releases.max_by_key(|release| numbers(release))?;
    // Where the image is a package of its own, this one only stands on the two.
    let split = ["linux-binary-", "linux-modules-"].map(|kind| format!("{kind}{release}"));
    let packages = match split.iter().all(|name| names.contains(name)) {
        true => split.to_vec(),
        false => vec![format!("{IMAGE}{release}")],
    };
    Some(Choice { release: release.to_owned(), packages })
}

/// The newest source of at least this version, of all `linux-source-MAJOR.MINOR`.
pub(super) fn newest_source(names: &[String], least: [u64; 2]) -> Option<&str> {
    let sources = names.iter().filter_map(|name| {
        let version = name.strip_prefix("linux-source-")?;
        let numbers: Vec<u64> =
            version.split('.').map(str::parse).collect::<Result<_, _>>().ok()?;
        (numbers.as_slice() >= least.as_slice()).then_some((numbers, name.as_str()))
    });
    Some(sources.max()?.1)
}

/// The numbers in a text, by which releases are ordered.
fn numbers(release: &str) -> Vec<u64> {
    let parts = release.split(|each: char| !each.is_ascii_digit());
    parts.filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOUD: &str = "-cloud-amd64";

    fn names(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_newest_release_of_a_series_is_chosen_by_its_numbers() {
        let names = names(
            "linux-image-6.1.0-9-cloud-amd64 linux-image-6.1.0-50-cloud-amd64 \
             linux-image-6.1.0-60-cloud-amd64-unsigned linux-image-6.1.0-61-amd64 \
             linux-image-6.18.2+deb13-cloud-amd64 linux-image-cloud-amd64 \
             linux-image-6.1.0-70-cloud-amd64-dbg",
        );
        let choice = choose(&names, Some("6.1"), CLOUD).unwrap();
        assert_eq!(choice.release, "6.1.0-50-cloud-amd64");
        assert_eq!(choice.packages, ["linux-image-6.1.0-50-cloud-amd64"]);
        assert_eq!(choose(&names, None, CLOUD).unwrap().release, "6.18.2+deb13-cloud-amd64");
        assert_eq!(choose(&names, Some("6.12"), CLOUD), None);
        assert_eq!(choose(&[], None, CLOUD), None);
    }

    #[test]
    fn a_flavour_is_told_from_those_that_end_alike() {
        let names = names(
            "linux-image-6.12.9+deb13-arm64 linux-image-6.12.10+deb13-rt-arm64 \
             linux-image-6.12.8+deb13-arm64-16k linux-image-6.12.11+deb13-cloud-arm64",
        );
        let choice = |flavour| choose(&names, Some("6.12"), flavour).unwrap().release;
        assert_eq!(choice("-arm64"), "6.12.9+deb13-arm64");
        assert_eq!(choice("-arm64-16k"), "6.12.8+deb13-arm64-16k");
    }

    #[test]
    fn a_kernel_in_two_packages_is_both() {
        let names = names(
            "linux-image-7.3.4+deb13-cloud-amd64 linux-binary-7.3.4+deb13-cloud-amd64 \
             linux-modules-7.3.4+deb13-cloud-amd64 linux-binary-unsigned-7.3.4+deb13-cloud-amd64",
        );
        let packages = choose(&names, None, CLOUD).unwrap().packages;
        assert_eq!(
            packages,
            ["linux-binary-7.3.4+deb13-cloud-amd64", "linux-modules-7.3.4+deb13-cloud-amd64"]
        );
    }

    #[test]
    fn the_newest_source_is_one_that_is_new_enough() {
        let names = names("linux-source-7.2 linux-source-6.12 linux-source linux-source-7.10");
        assert_eq!(newest_source(&names, [7, 2]), Some("linux-source-7.10"));
        assert_eq!(newest_source(&names[1..3], [7, 2]), None);
    }
}
