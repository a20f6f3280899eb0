//! [`PoolParams`] read what an administrator asked for at boot.

use super::config::{MAX_AREAS, PoolConfig};

/// The bytes of a slot of which the text counts (`IO_TLB_SIZE`).
const SLOT: u64 = 2048;
/// Slots are rounded up to a multiple of this (`IO_TLB_SEGSIZE`).
const SEGMENT: u64 = 128;

/// What the value of Linux's parameter `swiotlb=` asks for: `nslabs[,nareas][,force|noforce]`, or
/// one of the words alone (Documentation/admin-guide/kernel-parameters.txt).
///
/// ```
/// use dmaspan::swiotlb::PoolParams;
///
/// let params = PoolParams::parse("65536,4,force").unwrap();
/// assert_eq!((params.bytes(), params.areas), (Some(128 << 20), Some(4)));
/// assert_eq!((params.force, params.config(8).areas), (Some(true), 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PoolParams {
    /// How many slots of 2 KiB, a multiple of 128; `None` where the text has no number.
    pub slots: Option<u64>,
    /// How many areas, a power of two; `None` where the text does not say.
    pub areas: Option<usize>,
    /// Whether all buffers are bounced (`force`) or none ever (`noforce`); `None` where the text
    /// leaves it to what each device reaches.
    pub force: Option<bool>,
}

/// The reason why a text is no parameter: which part of it, by the offset of its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParamsError {
    /// Nothing between two commas, or no text at all.
    #[error("there is nothing at offset {at}: give nslabs[,nareas][,force|noforce]")]
    Empty {
        /// Where.
        at: usize,
    },
    /// It begins with a digit and is no number: decimal, octal behind `0` or hexadecimal behind
    /// `0x`.
    #[error("what begins at offset {at} is no number of 64 bits")]
    Number {
        /// Where.
        at: usize,
    },
    /// The number is out of bounds.
    #[error("the number at offset {at} is {value}: it has to be from 1 to {most}")]
    Bounds {
        /// Where.
        at: usize,
        /// The number.
        value: u64,
        /// The largest that is possible.
        most: u64,
    },
    /// A word that means nothing there.
    #[error("what begins at offset {at} is neither a number nor force or noforce")]
    Word {
        /// Where.
        at: usize,
    },
    /// More than two numbers, or something behind a word.
    #[error("nothing may stand at offset {at}: at most two numbers and then a word")]
    Behind {
        /// Where.
        at: usize,
    },
}

impl PoolParams {
    /// Reads the text behind `swiotlb=`. As Linux does, it rounds slots up to a multiple of 128 and
    /// areas up to a power of two; unlike Linux it takes nothing that it does not understand.
    ///
    /// # Errors
    ///
    /// [`ParamsError`], for the first part that is wrong.
    pub fn parse(text: &str) -> Result<Self, ParamsError> {
        let mut params = Self::default();
        let mut at = 0;
        for part in text.split(',') {
            if params.force.is_some() {
                return Err(ParamsError::Behind { at });
            }
            match part {
                "" => return Err(ParamsError::Empty { at }),
                "force" => params.force = Some(true),
                "noforce" => params.force = Some(false),
                _ if !part.starts_with(|first: char| first.is_ascii_digit()) => {
                    return Err(ParamsError::Word { at });
                }
                _ if params.slots.is_none() => {
                    let slots = bounded(part, at, 1 << 31)?;
                    params.slots = Some(slots.next_multiple_of(SEGMENT));
                }
                _ if params.areas.is_none() => {
                    let areas = bounded(part, at, MAX_AREAS as u64)?.next_power_of_two();
                    params.areas = usize::try_from(areas).ok();
                }
                _ => return Err(ParamsError::Behind { at }),
            }
            at += part.len() + 1;
        }
        Ok(params)
    }

    /// Returns how many bytes of slots that are, where the text says it.
    pub fn bytes(&self) -> Option<u64> {
        self.slots.map(|slots| slots * SLOT)
    }

    /// The configuration of such a pool: as many areas as the text says, or as there are CPUs.
    pub const fn config(&self, cpus: usize) -> PoolConfig {
        match self.areas {
            Some(areas) => PoolConfig::new(areas),
            None => PoolConfig::new(cpus),
        }
    }
}

/// The number that a part is, if it is from 1 to `most`.
fn bounded(part: &str, at: usize, most: u64) -> Result<u64, ParamsError> {
    // As simple_strtoul does with a base of 0.
    let (digits, base) = match part.strip_prefix("0x").or_else(|| part.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None if part.len() > 1 && part.starts_with('0') => (&part[1..], 8),
        None => (part, 10),
    };
    if digits.starts_with('+') {
        return Err(ParamsError::Number { at });
    }
    let value = u64::from_str_radix(digits, base).map_err(|_| ParamsError::Number { at })?;
    if (1..=most).contains(&value) {
        return Ok(value);
    }
    Err(ParamsError::Bounds { at, value, most })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(slots: Option<u64>, areas: Option<usize>, force: Option<bool>) -> PoolParams {
        PoolParams { slots, areas, force }
    }

    #[test]
    fn every_form_of_linuxs_parameter_is_read() {
        for (text, expected) in [
            ("65536", params(Some(65536), None, None)),
            ("65536,8", params(Some(65536), Some(8), None)),
            ("65536,force", params(Some(65536), None, Some(true))),
            ("0x8000,3,noforce", params(Some(32768), Some(4), Some(false))),
            ("0200", params(Some(128), None, None)),
            ("1,1", params(Some(128), Some(1), None)),
            ("129", params(Some(256), None, None)),
            ("force", params(None, None, Some(true))),
            ("noforce", params(None, None, Some(false))),
            ("2147483648,128", params(Some(1 << 31), Some(128), None)),
        ] {
            assert_eq!(PoolParams::parse(text), Ok(expected), "{text}");
        }
        let asked = PoolParams::parse("65536").unwrap();
        assert_eq!((asked.bytes(), asked.config(6).areas), (Some(128 << 20), 6));
    }

    #[test]
    fn what_is_wrong_says_where() {
        use ParamsError::{Behind, Bounds, Empty, Number, Word};
        for (text, expected) in [
            ("", Empty { at: 0 }),
            ("64,", Empty { at: 3 }),
            ("64,,force", Empty { at: 3 }),
            ("often", Word { at: 0 }),
            ("64,Force", Word { at: 3 }),
            ("-1", Word { at: 0 }),
            ("64k", Number { at: 0 }),
            ("0x", Number { at: 0 }),
            ("0x+1", Number { at: 0 }),
            ("08", Number { at: 0 }),
            ("99999999999999999999", Number { at: 0 }),
            ("0", Bounds { at: 0, value: 0, most: 1 << 31 }),
            ("2147483649", Bounds { at: 0, value: (1 << 31) + 1, most: 1 << 31 }),
            ("64,129", Bounds { at: 3, value: 129, most: 128 }),
            ("64,0", Bounds { at: 3, value: 0, most: 128 }),
            ("64,2,3", Behind { at: 5 }),
            ("force,64", Behind { at: 6 }),
            ("64,2,force,noforce", Behind { at: 11 }),
        ] {
            assert_eq!(PoolParams::parse(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn no_text_panics() {
        for text in ["é", "1é", ",", "0xé,1", "1,é,force", "\0", "00", "0X1F,0x2"] {
            let _ = PoolParams::parse(text);
        }
    }
}
