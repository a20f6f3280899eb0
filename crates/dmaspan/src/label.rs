//! [`Label`] and [`Caller`] say who made a mapping, to whoever looks at it.

use core::fmt;
use core::panic::Location;

/// Says who asked for a mapping: a name that the program gave, or the place in its source.
///
/// ```
/// use dmaspan::Label;
///
/// assert_eq!(Label::from("rx ring").to_string(), "rx ring");
/// assert!(Label::caller().to_string().contains(".rs:"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Label {
    /// The name.
    Name(&'static str),
    /// The place of the call.
    Place(&'static Location<'static>),
}

impl Label {
    /// The place of this call; in a function with `#[track_caller]`, that of its own call.
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub const fn caller() -> Self {
        Self::Place(Location::caller())
    }
}

impl From<&'static str> for Label {
    fn from(name: &'static str) -> Self {
        Self::Name(name)
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.pad(name),
            Self::Place(place) => write!(f, "{place}"),
        }
    }
}

/// Says who asked a domain for something: which device's driver, and from where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    /// The name of the device, where its [`DeviceConfig`](crate::dma::DeviceConfig) has one.
    pub device: Option<&'static str>,
    /// The place of the call.
    pub label: Label,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device {
            Some(device) => write!(f, "{device} at {}", self.label),
            None => write!(f, "{}", self.label),
        }
    }
}
