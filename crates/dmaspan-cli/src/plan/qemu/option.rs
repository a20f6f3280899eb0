//! The words of a command line of QEMU, and its options.

use super::QemuError;
use crate::plan::layout_file;

/// The words of a command line, as a shell splits them, or as `/proc/PID/cmdline` has them.
pub(super) fn split(text: &str) -> Result<Vec<String>, QemuError> {
    if text.contains('\0') {
        return Ok(text.split('\0').filter(|word| !word.is_empty()).map(str::to_owned).collect());
    }
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), _) if character == open => quote = None,
            (Some('"') | None, '\\') => match characters.next() {
                // A line that goes on.
                Some('\n') | None => {}
                Some(next) => word.get_or_insert_default().push(next),
            },
            (Some(_), _) => word.get_or_insert_default().push(character),
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, _) if character.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(character),
        }
    }
    match quote {
        Some(open) => Err(QemuError::Quote(open)),
        None => {
            words.extend(word);
            Ok(words)
        }
    }
}

/// Which of the words is the program: what stands before it, as `sudo` or `HOME=/root`, is not
/// QEMU's.
pub(super) fn program_of(words: &[String]) -> Option<usize> {
    let is_option = |index: Option<usize>| {
        index.and_then(|index| words.get(index)).is_some_and(|word| word.starts_with('-'))
    };
    words.iter().enumerate().position(|(index, word)| {
        let file = word.rsplit('/').next().unwrap_or_default().trim_start_matches('.');
        let is_other = matches!(file, "qemu" | "kvm" | "qemu-kvm");
        file.starts_with("qemu-system-") || (is_other && !is_option(index.checked_sub(1)))
    })
}

/// An option with its value, whose parts are `name=value` or a name alone, or an object of JSON.
pub(super) struct QemuOption<'w> {
    pub(super) name: &'w str,
    pub(super) value: &'w str,
    parts: Vec<(String, String)>,
}

impl<'w> QemuOption<'w> {
    pub(super) fn new(name: &'w str, value: &'w str) -> Self {
        let parts = if value.starts_with('{') { object_parts(value) } else { parts(value) };
        Self { name, value, parts }
    }

    pub(super) fn wrong(&self, what: impl Into<String>) -> QemuError {
        let option = format!("-{} {}", self.name, self.value);
        QemuError::Option { option: option.trim_end().to_owned(), what: what.into() }
    }

    /// Whether it begins as an object of JSON and is none.
    pub(super) fn is_bad_object(&self) -> bool {
        self.value.starts_with('{') && self.parts.is_empty()
    }

    /// What stands before the first comma, or what an object calls so.
    pub(super) fn head(&self) -> &str {
        let of_object = || self.get("qom-type").or(self.get("driver"));
        match self.parts.first() {
            Some((name, value)) if value.is_empty() => name,
            _ => of_object().unwrap_or_default(),
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        // The last one counts.
        let found = self.parts.iter().rfind(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(super) fn is_on(&self, name: &str) -> bool {
        // A name alone switches it on.
        matches!(self.get(name), Some("on" | "yes" | "true" | "y" | ""))
    }

    /// A size, whose unit is `unit` where it has none.
    pub(super) fn size(&self, text: &str, unit: u64) -> Result<u64, QemuError> {
        let size = match text.parse::<u64>() {
            Ok(number) => number.checked_mul(unit),
            Err(_) => layout_file::bytes(text).ok(),
        };
        size.ok_or_else(|| self.wrong(format!("`{text}` is no size like 4096, 512M or 4G")))
    }

    /// A size that the option may have.
    pub(super) fn size_of(&self, name: &str) -> Result<Option<u64>, QemuError> {
        self.get(name).map(|text| self.size(text, 1)).transpose()
    }
}

/// The parts between commas. Two commas are one that belongs to a value.
fn parts(value: &str) -> Vec<(String, String)> {
    let joined = value.replace(",,", "\u{0}");
    let comma = |text: &str| text.replace('\u{0}', ",");
    let part = |part: &str| match part.split_once('=') {
        Some((name, value)) => (comma(name), comma(value)),
        None => (comma(part), String::new()),
    };
    joined.split(',').map(part).collect()
}

/// The members of an object, as libvirt passes them; none where it is no JSON.
fn object_parts(value: &str) -> Vec<(String, String)> {
    use serde_json::Value;
    let members: serde_json::Map<String, Value> = serde_json::from_str(value).unwrap_or_default();
    let text = |value: Value| match value {
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::String(text) => text,
        Value::Array(all) if all.len() == 1 => {
            all.first().map_or_else(String::new, ToString::to_string)
        }
        other => other.to_string(),
    };
    members.into_iter().map(|(name, value)| (name, text(value))).collect()
}
