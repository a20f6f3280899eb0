//! The lines of a guest's list of commands.
//!
//! Each is a program and its arguments, separated by blanks, or one of these words:
//!
//! | line | what init does |
//! |---|---|
//! | `settle SECONDS` | sleeps |
//! | `bind BDF` | gives the function to vfio-pci |
//! | `hugepages N` | has the kernel set N pages of 2 MiB aside |
//! | `limit memlock BYTES` or `unlimited` | sets RLIMIT_MEMLOCK of the commands after it |
//! | `drop ipc_lock` | takes CAP_IPC_LOCK and CAP_SYS_RESOURCE from the commands after it |
//!
//! Empty lines, and those that begin with `#`, say nothing.

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command<'l> {
    /// To sleep, for seconds.
    Settle(u64),
    /// To bind a PCI function to vfio-pci.
    Bind(&'l str),
    /// To have so many hugepages of 2 MiB.
    Hugepages(u64),
    /// To limit the memory that may be locked, in bytes; `None` is no limit.
    LimitMemlock(Option<u64>),
    /// To take the capabilities away that lift that limit.
    DropIpcLock,
    /// To run a program.
    Run {
        /// Its name or path.
        program: &'l str,
        /// Its arguments.
        arguments: Vec<&'l str>,
    },
}

impl<'l> Command<'l> {
    /// Reads a line; nothing for one that says nothing.
    ///
    /// # Errors
    ///
    /// What a word of init's own is wrong about.
    pub(crate) fn parse(line: &'l str) -> Result<Option<Self>, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no number"));
        Ok(Some(match words.as_slice() {
            [] => return Ok(None),
            [first, ..] if first.starts_with('#') => return Ok(None),
            ["settle", seconds] => Self::Settle(number(seconds)?),
            ["bind", bdf] => Self::Bind(bdf),
            ["hugepages", count] => Self::Hugepages(number(count)?),
            ["limit", "memlock", "unlimited"] => Self::LimitMemlock(None),
            ["limit", "memlock", bytes] => Self::LimitMemlock(Some(number(bytes)?)),
            ["drop", "ipc_lock"] => Self::DropIpcLock,
            [word @ ("settle" | "bind" | "hugepages" | "limit" | "drop"), ..] => {
                return Err(format!("`{word}` is not followed by what it needs"));
            }
            [program, arguments @ ..] => Self::Run { program, arguments: arguments.to_vec() },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_init_and_programs_are_told_apart() {
        for (line, command) in [
            ("settle 20", Command::Settle(20)),
            (" bind  0000:00:05.0 ", Command::Bind("0000:00:05.0")),
            ("hugepages 64", Command::Hugepages(64)),
            ("limit memlock 65536", Command::LimitMemlock(Some(65536))),
            ("limit memlock unlimited", Command::LimitMemlock(None)),
            ("drop ipc_lock", Command::DropIpcLock),
            ("dmaspan", Command::Run { program: "dmaspan", arguments: vec![] }),
            (
                "/bin/dmaspan map 1G",
                Command::Run { program: "/bin/dmaspan", arguments: vec!["map", "1G"] },
            ),
        ] {
            assert_eq!(Command::parse(line), Ok(Some(command)), "{line}");
        }
        for nothing in ["", "  ", "# settle", "#"] {
            assert_eq!(Command::parse(nothing), Ok(None), "{nothing}");
        }
    }

    #[test]
    fn a_word_of_init_without_what_it_needs_is_no_program() {
        for (line, named) in [
            ("settle", "`settle`"),
            ("settle soon", "`soon`"),
            ("bind a b", "`bind`"),
            ("hugepages -1", "`-1`"),
            ("limit nofile 3", "`limit`"),
            ("limit memlock 1G", "`1G`"),
            ("drop sys_admin", "`drop`"),
        ] {
            assert!(Command::parse(line).is_err_and(|why| why.contains(named)), "{line}");
        }
    }
}
