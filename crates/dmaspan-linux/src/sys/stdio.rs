//! Standard output as programs print to it: for those that ship with the library.
//!
//! The standard library opens `/dev/null` for a standard stream that is closed when the program
//! starts, so that writing to it succeeds and what was written is lost; and it hands a closed pipe
//! to the program as an error.

use std::env;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Run by the C library before `main`, and so before the standard library looks at the streams.
// SAFETY:
// 1. `.init_array` holds pointers to functions of C that take what `main` does and return nothing;
//    one that takes less may be called so by the C ABIs of Linux.
// 2. The function needs nothing of the standard library that `main` would have to set up.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_STREAMS: extern "C" fn() = note_streams;

extern "C" fn note_streams() {
    // SAFETY:
    // 1. `F_GETFD` takes a number, and touches neither memory nor the file.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    WAS_CLOSED.store(flags < 0, Ordering::Relaxed);
}

/// Says what came of writing to standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Printed {
    /// All of it was written.
    All,
    /// Nobody reads it any more: a program ends quietly then.
    NobodyReads,
}

/// Writes bytes to standard output as they are.
///
/// # Errors
///
/// Whatever write(2) says but `EPIPE`, and `EBADF` where standard output was closed when the
/// program started.
pub fn write(bytes: &[u8]) -> io::Result<Printed> {
    // A reference, so that the linker takes what notes it into the program.
    std::hint::black_box(&NOTE_STREAMS);
    if WAS_CLOSED.load(Ordering::Relaxed) {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(Printed::All),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Printed::NobodyReads),
        Err(error) => Err(error),
    }
}

/// Whether a terminal, or who reads the text, may take a character for a command: control
/// characters, and what changes the direction of the text behind it (Unicode Standard Annex #9),
/// but the end of a line.
pub fn is_command(sign: char) -> bool {
    let directs = ['\u{61c}', '\u{200e}', '\u{200f}'].contains(&sign)
        || matches!(sign, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    sign != '\n' && (sign.is_control() || directs)
}

/// A text with `?` for every character that [is a command](is_command): names in what a program has
/// read are anybody's.
///
/// ```
/// use dmaspan_linux::stdio::clean;
///
/// assert_eq!(clean("a name\u{1b}[2J\nand another"), "a name?[2J\nand another");
/// ```
pub fn clean(text: &str) -> String {
    text.chars().map(|sign| if is_command(sign) { '?' } else { sign }).collect()
}

/// JSON with escapes for every character that [is a command](is_command), which says the same.
pub fn clean_json(json: &str) -> String {
    escaped(json, is_command)
}

/// A message in one line, with an escape for every character that [is a command](is_command).
pub fn clean_line(message: &str) -> String {
    let mut line = String::with_capacity(message.len());
    for sign in message.chars() {
        match sign == '\n' || is_command(sign) {
            true => line.extend(sign.escape_default()),
            false => line.push(sign),
        }
    }
    line
}

/// Prints a text for people, [cleaned](clean). In a locale that is not of UTF-8 marks, lines and
/// signs are ASCII characters of the same width; other characters stay.
///
/// # Errors
///
/// As [`write()`].
pub fn print(text: &str) -> io::Result<Printed> {
    print_styled(&clean(text))
}

/// Prints a text that is clean but for the program's own colours, as [`print()`].
///
/// # Errors
///
/// As [`write()`].
pub fn print_styled(text: &str) -> io::Result<Printed> {
    if is_ascii() {
        write(text.chars().map(ascii).collect::<String>().as_bytes())
    } else {
        write(text.as_bytes())
    }
}

/// Prints JSON, [cleaned](clean_json). In a locale that is not of UTF-8 all of it is ASCII, by its
/// escapes.
///
/// # Errors
///
/// As [`write()`].
pub fn print_json(json: &str) -> io::Result<Printed> {
    let is_ascii = is_ascii();
    write(escaped(json, |sign| is_ascii && !sign.is_ascii() || is_command(sign)).as_bytes())
}

/// Whether the user's locale says that text is not UTF-8. Where no variable names a locale, as in
/// containers, text is UTF-8.
fn is_ascii() -> bool {
    let named = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(env::var_os);
    named.into_iter().find(|value| !value.is_empty()).is_some_and(|value| !is_utf8(&value))
}

/// Whether a locale like `C.UTF-8` or `de_DE.utf8` is of UTF-8.
fn is_utf8(locale: &OsStr) -> bool {
    let locale = locale.to_string_lossy().to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// What stands for a character that ASCII has not.
const fn ascii(sign: char) -> char {
    match sign {
        '✓' => '+',
        '✗' | '×' => 'x',
        'µ' => 'u',
        '─' => '-',
        '→' => '>',
        '└' => '`',
        sign => sign,
    }
}

/// JSON with escapes for some characters, all of which stand in strings.
fn escaped(json: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut text = String::with_capacity(json.len());
    for sign in json.chars() {
        if is_escaped(sign) {
            for unit in sign.encode_utf16(&mut [0; 2]) {
                text.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            text.push(sign);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locales_of_utf_8_are_known_however_they_are_written() {
        for locale in ["C.UTF-8", "de_DE.utf8", "en_US.UTF-8@euro"] {
            assert!(is_utf8(OsStr::new(locale)), "{locale}");
        }
        for locale in ["C", "POSIX", "de_DE.ISO-8859-1", "de_DE"] {
            assert!(!is_utf8(OsStr::new(locale)), "{locale}");
        }
    }

    #[test]
    fn signs_become_ascii_of_the_same_width() {
        let text = "✓ 1.2 µs 3× a → b ──\n └ ✗";
        let plain: String = text.chars().map(ascii).collect();
        assert_eq!(plain, "+ 1.2 us 3x a > b --\n ` x");
        assert_eq!(plain.chars().count(), text.chars().count());
    }

    #[test]
    fn no_terminal_takes_a_text_for_commands() {
        let hostile = "a\u{1b}[31m\r\t\u{7f}\u{9b}2J\u{202e}\u{2066}\u{200f}\u{2028}é\n";
        assert_eq!(clean(hostile), "a?[31m????2J????é\n");
        assert_eq!(clean_line("\u{1b}]0;x\u{7}\n\u{202e}é"), "\\u{1b}]0;x\\u{7}\\n\\u{202e}é");
        assert_eq!(clean_json("{\n\"\u{7f}\": \"\u{9b}é\"}"), "{\n\"\\u007f\": \"\\u009bé\"}");
        for sign in (0..=0x1f).chain(0x7f..=0x9f).filter_map(char::from_u32) {
            assert_eq!(is_command(sign), sign != '\n', "{sign:?}");
        }
    }

    #[test]
    fn json_says_the_same_by_its_escapes() {
        assert_eq!(
            escaped("{\"2M (128 × 16K)\": \"µ𝄞\"}", |sign| !sign.is_ascii()),
            "{\"2M (128 \\u00d7 16K)\": \"\\u00b5\\ud834\\udd1e\"}"
        );
    }
}
