//! The program `dmaspan-bench`, run as its users run it.

mod fixed;
mod program;
mod series;
mod swiotlb;

#[test]
fn every_help_fits_a_terminal() {
    for name in ["swiotlb", "fixed"] {
        program::shown(&[name, "--help"], &[&format!("Usage: dmaspan-bench {name}")]);
    }
    program::shown(&["--help"], &["Usage: dmaspan-bench"]);
}

#[test]
fn wrong_usage_is_one_line_and_exit_code_2() {
    for (args, part) in [
        (&["swiotlb", "--quick", "4"][..], "unexpected argument '4'"),
        (&["iotlb"], "unrecognized subcommand 'iotlb'"),
        (&["fixed", "/dev/null"], "neither a file nor a disk"),
        (&["fixed", "/nowhere"], "name a file or a disk that is there"),
        (&["fixed", "/nowhere", "--depth", "0"], "--depth takes whole numbers from 1 to"),
    ] {
        program::is_refused(args, &[part]);
    }
}
