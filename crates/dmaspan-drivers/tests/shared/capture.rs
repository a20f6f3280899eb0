//! A logger that keeps what each thread says.

use std::cell::RefCell;
use std::sync::Once;

use log::{Level, LevelFilter, Log, Metadata, Record};

thread_local! {
    static SAID: RefCell<Vec<(Level, String)>> = const { RefCell::new(Vec::new()) };
}

struct Capture;

impl Log for Capture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("dmaspan")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            SAID.with_borrow_mut(|said| said.push((record.level(), record.args().to_string())));
        }
    }

    fn flush(&self) {}
}

/// What `f` returns, and what this thread said in it.
pub(crate) fn said<R>(f: impl FnOnce() -> R) -> (R, Vec<(Level, String)>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Capture).unwrap();
        log::set_max_level(LevelFilter::Trace);
    });
    let before = SAID.take();
    let result = f();
    (result, SAID.replace(before))
}

/// Whether one of the messages, at this level, has all of the words.
#[track_caller]
pub(crate) fn assert_said(said: &[(Level, String)], level: Level, words: &[&str]) {
    let has = |(of, message): &&(Level, String)| {
        *of == level && words.iter().all(|words| message.contains(words))
    };
    assert!(said.iter().any(|message| has(&message)), "no {level} with {words:?} in {said:#?}");
}
