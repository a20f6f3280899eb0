//! Operations that change nothing where an allocation fails, unless that ends the program.

use crate::failing;

/// Whether an operation may end the program where there is no memory: in small memory of its own,
/// or in the simulated memory.
#[derive(PartialEq, Eq)]
pub(crate) enum Ends {
    Maybe,
    Never,
}

/// What an error says. Nothing fails any more, as that may need memory.
pub(crate) fn said(error: impl std::error::Error) -> String {
    failing::fail(0);
    error.to_string()
}

/// Lets each allocation of each operation fail.
pub(crate) fn sweep<'a>(operations: impl Iterator<Item = (&'a str, &'a Ends)>) {
    for (number, (name, ends)) in operations.enumerate() {
        let ended = failing::programs_that_end(number, name);
        assert!(ended == 0 || *ends == Ends::Maybe, "{name}: {ended} allocations end the program");
    }
}
