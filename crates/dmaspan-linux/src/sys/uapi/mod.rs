//! Structures and numbers of the kernel's interfaces.
//!
//! Each structure of ioctl(2) begins with its own length, which [`request`](super::request) writes.

pub(crate) mod io_uring;
pub(crate) mod iommufd;
pub(crate) mod vfio;

/// Declares structures as C lays them out, and asserts the size of each and the place of each
/// field.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident ($size:literal) {
        $($(#[$field_doc:meta])* $field:ident: $type:ty = $offset:literal,)*
    })*) => {
    $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $type,)*
        }

        const _: () = assert!(size_of::<$name>() == $size);
        $(const _: () = assert!(core::mem::offset_of!($name, $field) == $offset);)*
    )*

        /// What is declared here, to be compared with the C headers.
        #[cfg(test)]
        pub(crate) const STRUCTURES: &[super::tests::Structure] = &[$(super::tests::Structure {
            name: stringify!($name),
            doc: concat!($(stringify!($doc),)*),
            size: $size,
            fields: &[$((stringify!($field), size_of::<$type>(), $offset),)*],
        },)*];
    };
}

use structures;

#[cfg(test)]
mod tests;
