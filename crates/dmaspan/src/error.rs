//! All errors have an errno in common: each system has one error enum, and each of its variants an
//! [`Errno`].
//!
//! The errno lets a VFIO or iommufd front end answer as Linux does. One meaning each, over all
//! systems: overlap is `EEXIST`, out of reach is `ERANGE`, wrapping is `EOVERFLOW`, nothing there
//! is `ENOENT`, and no memory, tables or charge left is `ENOMEM`.

use core::fmt;

/// A Linux error number (`include/uapi/asm-generic/errno-base.h` and `errno.h`), as a positive
/// number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident = $value:literal: $doc:literal,)*) => {
        impl Errno {
            $(#[doc = $doc] pub const $name: Self = Self($value);)*

            /// The symbolic name, `"E?"` for a number without one here.
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($value => stringify!($name),)*
                    _ => "E?",
                }
            }
        }
    };
}

errnos! {
    EPERM = 1: "Operation not permitted.",
    ENOENT = 2: "Nothing there.",
    ESRCH = 3: "No such process.",
    EINTR = 4: "Interrupted.",
    EIO = 5: "Input/output error.",
    ENXIO = 6: "No such device or address.",
    ENOMEM = 12: "Out of memory, tables or charge.",
    EACCES = 13: "Permission denied.",
    EFAULT = 14: "Bad user address.",
    EBUSY = 16: "In use.",
    EEXIST = 17: "Something is there already.",
    ENODEV = 19: "No such device.",
    EINVAL = 22: "Invalid argument.",
    ENOTTY = 25: "No such request.",
    ENOSPC = 28: "No room for another.",
    ERANGE = 34: "Out of the range that can be represented.",
    EOVERFLOW = 75: "The range wraps.",
    EOPNOTSUPP = 95: "Not supported.",
    EADDRINUSE = 98: "The addresses are in use.",
    EREMOTEIO = 121: "Another device cannot be reached.",
}

/// One text of an error, where the first is so, or the other.
pub(crate) struct Either<'a>(
    pub(crate) bool,
    pub(crate) fmt::Arguments<'a>,
    pub(crate) fmt::Arguments<'a>,
);

impl fmt::Display for Either<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_fmt(if self.0 { self.1 } else { self.2 })
    }
}

impl Errno {
    /// The number, positive.
    pub const fn get(self) -> i32 {
        self.0
    }

    /// The error with that number, which a system call gave.
    pub const fn from_raw(number: i32) -> Self {
        Self(number)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            "E?" => write!(f, "errno {}", self.0),
            name => f.write_str(name),
        }
    }
}
