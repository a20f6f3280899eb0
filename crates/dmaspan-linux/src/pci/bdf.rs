//! A [`Bdf`] is the address of a PCI function.

use std::fmt;
use std::str::FromStr;

/// The address of a PCI function: domain, bus, device and function, written `0000:00:05.0`.
///
/// ```
/// use dmaspan_linux::pci::Bdf;
///
/// let bdf: Bdf = "0000:3b:00.1".parse()?;
/// assert_eq!((bdf.bus(), bdf.device(), bdf.function()), (0x3b, 0, 1));
/// assert_eq!("3b:00.1".parse::<Bdf>()?, bdf);
/// Ok::<(), dmaspan_linux::pci::BadBdf>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bdf {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// The most digits of a domain: Linux has domains beyond 16 bits, of virtual bridges.
const DOMAIN_DIGITS: usize = 8;

impl Bdf {
    /// 0000:00:00.0.
    #[cfg(feature = "iommufd-test")]
    pub(crate) const ZERO: Self = Self { domain: 0, bus: 0, device: 0, function: 0 };

    /// The domain, which other systems call segment.
    pub const fn domain(self) -> u32 {
        self.domain
    }

    /// The bus, 0 to 255.
    pub const fn bus(self) -> u8 {
        self.bus
    }

    /// The device on its bus, 0 to 31.
    pub const fn device(self) -> u8 {
        self.device
    }

    /// The function of the device, 0 to 7.
    pub const fn function(self) -> u8 {
        self.function
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

/// No address of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no address of a PCI function: it has the form 0000:00:05.0, as lspci -D prints it"
)]
pub struct BadBdf {
    /// What was given.
    pub text: String,
}

impl FromStr for Bdf {
    type Err = BadBdf;

    /// Reads `domain:bus:device.function`, all hexadecimal; without a domain it is 0.
    fn from_str(text: &str) -> Result<Self, BadBdf> {
        parse(text).ok_or_else(|| BadBdf { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<Bdf> {
    let (rest, function) = text.split_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let byte = |text, digits| u8::try_from(hex(text, digits)?).ok();
    let bdf = Bdf {
        domain: hex(domain, DOMAIN_DIGITS)?,
        bus: byte(bus, 2)?,
        device: byte(device, 2)?,
        function: byte(function, 1)?,
    };
    (bdf.device < 32 && bdf.function < 8).then_some(bdf)
}

/// A number of at most so many hexadecimal digits, and nothing else.
fn hex(text: &str, most: usize) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !digits || text.len() > most { None } else { u32::from_str_radix(text, 16).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_written() {
        for text in ["0000:00:05.0", "0000:ff:1f.7", "10000:e1:00.0"] {
            assert_eq!(text.parse::<Bdf>().unwrap().to_string(), text);
        }
        assert_eq!("0:5.0".parse::<Bdf>().unwrap().to_string(), "0000:00:05.0");
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_form_of_one() {
        for text in [
            "",
            "5",
            "00:05",
            "00:20.0",
            "00:05.8",
            "00:05.00",
            "100:00:100.0",
            "0000:100:05.0",
            "00:+5.0",
            "0:0000:00:05.0",
            "0000:00:05.0 ",
            "g0:00.0",
            "123456789:00:00.0",
        ] {
            let error = text.parse::<Bdf>().unwrap_err().to_string();
            assert!(error.contains("0000:00:05.0"), "{text}");
        }
    }
}
