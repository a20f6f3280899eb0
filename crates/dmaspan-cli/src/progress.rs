//! A bar on a terminal shows what is being done.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on standard error; nothing where that is no terminal.
///
/// It is drawn by the thread that does the work, and only between measurements: a thread of its own
/// would take time from what is measured.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// On this process's standard error.
    pub fn on_stderr() -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(1), target);
        if let Ok(style) = ProgressStyle::with_template("{msg:44} {bar:40} {percent:>3} %") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Begins something of `steps` steps.
    pub fn begin(&self, what: String, steps: u64) {
        self.bar.set_length(steps.max(1));
        self.bar.set_position(0);
        self.bar.set_message(what);
        self.bar.tick();
    }

    /// Some steps are done.
    pub fn advance(&self, steps: u64) {
        self.bar.inc(steps);
    }

    /// Everything is done: leaves no trace.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}
