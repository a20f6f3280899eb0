//! Messages for people, by the crate `log`, where the feature of that name is on. Without the
//! feature they are no code: their arguments are looked at by the compiler alone.
//!
//! They stand where something leaks, or a device is attached or goes, and on no way that a request
//! takes.

macro_rules! say {
    ($level:ident, $($message:tt)+) => {{
        #[cfg(feature = "log")]
        ::log::$level!($($message)+);
        #[cfg(not(feature = "log"))]
        if false {
            let _ = ::core::format_args!($($message)+);
        }
    }};
}

macro_rules! warn_ {
    ($($message:tt)+) => { $crate::log::say!(warn, $($message)+) };
}

macro_rules! info_ {
    ($($message:tt)+) => { $crate::log::say!(info, $($message)+) };
}

pub(crate) use {info_ as info, say, warn_ as warn};
