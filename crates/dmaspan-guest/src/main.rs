//! The program that runs in the guests of `cargo xtask guest`.
//!
//! As the guest's first process it is its [`init`]: it makes the machine ready, runs a list of
//! commands and powers off. Called by a command of that list it runs [`cases`], which need VFIO and
//! a device behind an IOMMU, or measures the kernel ([`measure`]).
//!
//! The book has what the cases found ([real kernels]); `cargo xtask book` builds the book beside
//! these pages.
//!
//! [real kernels]: ../book/measured.html
//!
//! The program that started the guest reads what it says on the console, in lines that begin with
//! `guest: `.

mod cases;
mod commands;
mod init;
mod kmsg;
mod measure;
mod served;

use std::process::ExitCode;

const USAGE: &str = "\
usage: dmaspan-guest cases [--backend vfio|iommufd|compat] [--device BDF] [NAME...]
       dmaspan-guest list
       dmaspan-guest measure NAME
       dmaspan-guest served STEP...

Runs the cases whose names begin with a NAME, or all. As the first process of a
guest it is started without arguments.";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        return init::run();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["list"] => {
            cases::all().for_each(|case| println!("{}", case.name));
            ExitCode::SUCCESS
        }
        ["cases", rest @ ..] => match cases::Options::parse(rest) {
            Ok(options) => cases::run(&options),
            Err(error) => refuse(&error),
        },
        ["measure", name] => {
            measure::run(name).unwrap_or_else(|| refuse(&format!("nothing measures `{name}`")))
        }
        ["served", steps @ ..] => {
            served::run(steps).unwrap_or_else(|| refuse("a disk is not served by such steps"))
        }
        // What a case starts to kill it.
        ["victim", rest @ ..] => match cases::Options::parse(rest).map(|wanted| wanted.be_killed())
        {
            Ok(Ok(())) => ExitCode::SUCCESS,
            Ok(Err(error)) => refuse(&error.to_string()),
            Err(error) => refuse(&error),
        },
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => refuse("a command is missing"),
    }
}

fn refuse(why: &str) -> ExitCode {
    eprintln!("dmaspan-guest: {why}\n\n{USAGE}");
    ExitCode::from(2)
}
