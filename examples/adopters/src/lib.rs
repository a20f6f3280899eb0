//! Programs that adopt dmaspan: each is a file of `src/bin`, written from the documentation alone.
//!
//! What a program must write to join dmaspan with a foreign crate, a kernel or a device is its
//! glue, which stands between `// ANCHOR: glue` and `// ANCHOR_END: glue`; all else demonstrates.
//! The first comment of each program says how much glue and unsafe code it has. The test
//! `programs` counts both, holds them to their limits, and compares what a program prints with the
//! `.txt` beside it.
