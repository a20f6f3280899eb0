//! Messages for people, by the crate `log`, where the feature of that name is on. Without the
//! feature they are no code: their arguments are looked at by the compiler alone.
//!
//! They stand where something goes wrong or changes for long, and on no way that a driver's packet
//! takes.

/// Says something at a level. Which crate it is said in decides whether there is that feature.
#[doc(hidden)]
#[macro_export]
macro_rules! __say {
    ($level:ident, $($message:tt)+) => {{
        #[cfg(feature = "log")]
        ::log::$level!($($message)+);
        #[cfg(not(feature = "log"))]
        if false {
            let _ = ::core::format_args!($($message)+);
        }
    }};
}

#[doc(hidden)]
#[macro_export]
macro_rules! __warn {
    ($($message:tt)+) => { $crate::__say!(warn, $($message)+) };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __info {
    ($($message:tt)+) => { $crate::__say!(info, $($message)+) };
}

pub(crate) use {__info as info, __warn as warn};
