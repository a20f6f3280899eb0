//! Registered buffers.

mod descriptors;
