//! The parts of a check, which a command line names.

/// The parts that were asked for, in the order in which they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts(Vec<&'static str>);

impl Parts {
    /// Reads the names of parts; without one it is the `usual` ones.
    pub(crate) fn parse(
        arguments: &[&str],
        known: &[&'static str],
        usual: &[&'static str],
    ) -> Result<Self, String> {
        let part = |name: &&str| {
            let found = known.iter().copied().find(|part| part == name);
            found.ok_or_else(|| format!("there is no part `{name}`, only {}", known.join(", ")))
        };
        let parts: Vec<_> = arguments.iter().map(part).collect::<Result<_, _>>()?;
        Ok(if parts.is_empty() { Self::of(usual) } else { Self(parts) })
    }

    pub(crate) fn of(names: &[&'static str]) -> Self {
        Self(names.to_vec())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_named_and_others_refused() {
        let parts = |line: &[&str]| Parts::parse(line, &["one", "two", "three"], &["one", "two"]);
        assert_eq!(parts(&[]), Ok(Parts::of(&["one", "two"])));
        assert_eq!(parts(&["three", "one"]), Ok(Parts::of(&["three", "one"])));
        assert!(parts(&["fast"]).is_err_and(|why| why.contains("`fast`") && why.contains("three")));
    }
}
