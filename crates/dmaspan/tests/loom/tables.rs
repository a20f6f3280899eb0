//! Table memory whose words are loom's.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use dmaspan::io_pgtable::{Fresh, NoTables, TableAddr, TableMemory, TableShape};
use dmaspan::{Coherency, PhysAddr, Promise};
use loom::sync::atomic::{AtomicU64, Ordering};

/// What a table has in it before it is filled and after it was freed: no entry of the format. A
/// load that sees it, because no ordering keeps it from doing so, finds an occupied entry.
const POISON: u64 = 0xdead_0000;
const WORDS: usize = 2;
const TABLES: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Reserved,
    Published,
    Retired,
}

/// Eight tables. Clones share them.
#[derive(Clone)]
pub(crate) struct Tables {
    words: Arc<[[AtomicU64; WORDS]]>,
    /// By table: a thread that takes it sees what was done before it was freed. A thread that
    /// enters it reads this without an order, so that loom tries what else can happen right before.
    handed: Arc<[AtomicU64]>,
    /// Of the standard library: one of loom's would put the threads in an order that the tables'
    /// own accesses have to keep.
    states: Arc<Mutex<States>>,
}

struct States {
    of: [State; TABLES],
    /// The one freed last comes first.
    free: VecDeque<usize>,
}

/// Tables in no tree, by their number. Dropped, it leaks them.
#[derive(Debug, Default)]
pub(crate) struct List(Vec<usize>);

impl Tables {
    pub(crate) fn new() -> Self {
        let words = (0..TABLES).map(|_| [AtomicU64::new(POISON), AtomicU64::new(POISON)]).collect();
        let states = States { of: [State::Free; TABLES], free: (0..TABLES).collect() };
        let handed = (0..TABLES).map(|_| AtomicU64::new(0)).collect();
        Self { words, handed, states: Arc::new(Mutex::new(states)) }
    }

    /// How many tables are not free.
    pub(crate) fn in_use(&self) -> usize {
        TABLES - self.states.lock().unwrap().free.len()
    }

    fn change(&self, table: usize, from: State, to: State) {
        let mut states = self.states.lock().unwrap();
        assert_eq!(states.of[table], from, "table {table} was to be {to:?}");
        states.of[table] = to;
        if to == State::Free {
            states.free.push_front(table);
        }
    }
}

fn number(paddr: PhysAddr) -> usize {
    usize::try_from(paddr.get() >> 12).unwrap() - 1
}

// SAFETY: 1. A fresh table's memory is allocated for it alone, and copied to the table's words when
// it is published; no hardware reads it. 2. `entries` returns the words of the table with that
// number, which no other has. 3. Only `publish` and `free` write the words beside the walker, of
// tables in no tree. 4. A list is numbers. 5. Clones share all.
unsafe impl TableMemory<u64> for Tables {
    type List = List;

    fn reserve(&self, _shape: TableShape, count: usize) -> Result<List, NoTables> {
        let taken: Vec<usize> = {
            let mut states = self.states.lock().unwrap();
            if states.free.len() < count {
                return Err(NoTables { asked: count });
            }
            states.free.drain(..count).collect()
        };
        for &table in &taken {
            self.change(table, State::Free, State::Reserved);
            self.handed[table].fetch_add(0, Ordering::Acquire);
            for cell in &self.words[table] {
                assert_eq!(cell.load(Ordering::Relaxed), POISON, "table {table} was written, free");
            }
        }
        Ok(List(taken))
    }

    fn take(
        &self,
        _promise: Promise<'_>,
        _shape: TableShape,
        list: &mut List,
    ) -> Option<Fresh<'_, u64>> {
        let table = list.0.pop()?;
        // One that lost a race is in the list, too.
        self.states.lock().unwrap().of[table] = State::Reserved;
        let words = Box::leak(Box::new([POISON; WORDS]));
        // SAFETY: the memory is this table's alone, and no hardware reads it.
        unsafe { Some(Fresh::new(PhysAddr::new((table as u64 + 1) << 12), words)) }
    }

    fn coherency(&self) -> Coherency {
        Coherency::Coherent
    }

    fn publish(&self, mut fresh: Fresh<'_, u64>) {
        let table = number(fresh.paddr());
        for (cell, word) in self.words[table].iter().zip(fresh.words()) {
            cell.store(*word, Ordering::Relaxed);
        }
        self.change(table, State::Reserved, State::Published);
    }

    fn entries(&self, table: &TableAddr) -> &[AtomicU64] {
        let number = number(table.paddr());
        self.handed[number].load(Ordering::Relaxed);
        let state = self.states.lock().unwrap().of[number];
        assert!(matches!(state, State::Published | State::Retired), "table {number} is {state:?}");
        &self.words[number]
    }

    fn retire(&self, list: &mut List, table: TableAddr) {
        let number = number(table.paddr());
        self.change(number, State::Published, State::Retired);
        list.0.push(number);
    }

    fn append(&self, _promise: Promise<'_>, list: &mut List, other: List) {
        list.0.extend(other.0);
    }

    fn free(&self, _promise: Promise<'_>, _shape: TableShape, list: List) {
        for table in list.0 {
            let state = self.states.lock().unwrap().of[table];
            assert!(
                matches!(state, State::Reserved | State::Retired),
                "table {table} is {state:?}"
            );
            for cell in &self.words[table] {
                cell.store(POISON, Ordering::Relaxed);
            }
            self.handed[table].fetch_add(1, Ordering::Release);
            self.change(table, state, State::Free);
        }
    }
}
