//! How long a case takes, and what it looks up.

use std::time::Instant;

use dmaspan_linux::Instructions;
use serde::Serialize;

use super::work::{ContainerBenchError, Piece, Way};
use crate::crew::{self, Gate};
use dmaspan_cli::stats::{median, nanoseconds};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    Map,
    Unmap,
}

impl Op {
    pub(crate) const ALL: [Self; 2] = [Self::Map, Self::Unmap];
}

/// One operation of a case, over several runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    ns: Vec<u64>,
    /// Of all threads; of none where one could not count.
    instructions: Vec<u64>,
    /// The same in every run.
    pub(crate) lookups: u64,
}

impl Series {
    pub(crate) fn ns(&self) -> u64 {
        median(&self.ns)
    }

    pub(crate) fn instructions(&self) -> Option<u64> {
        (!self.instructions.is_empty()).then(|| median(&self.instructions))
    }
}

/// A case one way.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    map: Series,
    unmap: Series,
    /// Entries of the IOMMU's tables that map it all.
    pub(crate) leaves: u64,
}

impl Measured {
    pub(crate) fn of(&self, op: Op) -> &Series {
        match op {
            Op::Map => &self.map,
            Op::Unmap => &self.unmap,
        }
    }

    fn of_mut(&mut self, op: Op) -> &mut Series {
        match op {
            Op::Map => &mut self.map,
            Op::Unmap => &mut self.unmap,
        }
    }
}

/// When a thread began and ended, and its instructions between.
#[derive(Clone, Copy)]
struct Took {
    begin: Instant,
    end: Instant,
    instructions: Option<u64>,
}

/// Maps and unmaps everything once.
pub(crate) fn run(
    way: &impl Way,
    shares: &[Vec<Piece>],
    measured: &mut Measured,
) -> Result<(), ContainerBenchError> {
    let cpu = way.cpu_lookups();
    all(way, shares, Op::Map, measured)?;
    measured.map.lookups = way.cpu_lookups() - cpu;
    measured.leaves = way.census().total();
    let steps = way.iommu_lookups();
    all(way, shares, Op::Unmap, measured)?;
    let leaves = measured.leaves;
    measured.unmap.lookups =
        way.iommu_lookups().zip(steps).map_or(leaves, |(after, before)| after - before);
    Ok(())
}

/// One operation on everything, by all threads at once.
fn all(
    way: &impl Way,
    shares: &[Vec<Piece>],
    op: Op,
    measured: &mut Measured,
) -> Result<(), ContainerBenchError> {
    let took = match shares {
        [only] => vec![share(way, only, op, &Gate::default())?],
        many => {
            let work = |pieces: &Vec<Piece>, gate: &Gate| share(way, pieces, op, gate);
            let took =
                crew::at_once(many.iter(), work, || ()).map_err(ContainerBenchError::NoThread)?;
            took.into_iter().collect::<Result<_, _>>()?
        }
    };
    let begin = took.iter().map(|took| took.begin).min();
    let end = took.iter().map(|took| took.end).max();
    let ns = begin.zip(end).map_or(0, |(begin, end)| nanoseconds(end - begin));
    let instructions: Option<u64> = took.iter().map(|took| took.instructions).sum();
    let series = measured.of_mut(op);
    series.ns.push(ns);
    series.instructions.extend(instructions);
    Ok(())
}

/// What one thread does.
fn share(
    way: &impl Way,
    pieces: &[Piece],
    op: Op,
    gate: &Gate,
) -> Result<Took, ContainerBenchError> {
    let counter = Instructions::of_this_thread().ok();
    let count = || counter.as_ref().and_then(|counter| counter.read().ok());
    gate.pass();
    let before = count();
    let begin = Instant::now();
    for piece in pieces {
        match op {
            Op::Map => way.map(piece)?,
            Op::Unmap => way.unmap(piece)?,
        }
    }
    let end = Instant::now();
    let instructions = count().zip(before).map(|(after, before)| after - before);
    Ok(Took { begin, end, instructions })
}
