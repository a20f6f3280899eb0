//! The program `dmaspan` shares this with the project's other programs. It is no API.
//!
//! ```text
//! program (errors, exit codes) ── options ── size
//! text, units, json (how reports look) ── stats ── progress
//! series (what others measured)
//! machine (what may be used) ── hold, left_over (hugetlb pages, given back however a process ends)
//! ```
//!
//! The users' API is in [`dmaspan`] and [`dmaspan_linux`]. The [guide for operators] says what the
//! program answers.
//!
//! [guide for operators]: ../book/guides/operating.html

pub mod hold;
pub mod json;
pub mod left_over;
pub mod machine;
pub mod options;
pub mod program;
pub mod progress;
pub mod series;
pub mod size;
pub mod stats;
pub mod text;
pub mod units;
