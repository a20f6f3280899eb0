//! Commands of the admin queue (NVM Express Base Specification 2.0, section 5).

use dmaspan::Prot;
use parking_lot::MutexGuard;

use super::Shared;
use super::block::{MDTS, NAMESPACE};
use super::command::{Command, Status};
use super::prp;
use super::state::{CompletionQueue, MOST_ENTRIES, PAIRS, State, SubmissionQueue, VECTORS};
use crate::bytes::put;
use crate::disk::BLOCK_LG2;

/// The version of the specification that Identify and the registers name: 1.4.
pub(super) const VERSION: u32 = 0x0001_0400;
/// How many requests for events may be outstanding.
const MOST_EVENTS: u32 = 4;
/// A name that no other namespace has, of the kind that a vendor's own is.
const NAMESPACE_ID: u64 = 0x646d_6173_7061_6e01;

/// Does a command; the result of its completion, or nothing where it gets none.
///
/// # Errors
///
/// How it ends instead.
pub(super) fn execute(shared: &Shared, command: &Command) -> Result<Option<u32>, Status> {
    if command.is_unusual() {
        return Err(Status::INVALID_FIELD);
    }
    let done = |()| Some(0);
    match command.opcode() {
        0x00 => delete_submission(shared, command).map(done),
        0x01 => create_submission(&mut shared.state.lock(), command).map(done),
        0x02 => log(shared, command).map(done),
        0x04 => delete_completion(&mut shared.state.lock(), command).map(done),
        0x05 => create_completion(&mut shared.state.lock(), command).map(done),
        0x06 => identify(shared, command).map(done),
        // Nothing was aborted, which is always allowed.
        0x08 => Ok(Some(1)),
        0x09 => features(command, Direction::Set).map(Some),
        0x0a => features(command, Direction::Get).map(Some),
        0x0c => event(&mut shared.state.lock()),
        _ => Err(Status::INVALID_OPCODE),
    }
}

/// The queue that a command is about, and its size.
fn queue(command: &Command) -> Result<(u16, u32), Status> {
    let (id, size) = (command.dword(10) & 0xffff, (command.dword(10) >> 16) + 1);
    match u16::try_from(id) {
        Ok(id) if (1..=PAIRS).contains(&id) => Ok((id, size)),
        _ => Err(Status::INVALID_QUEUE),
    }
}

/// Refuses a queue that cannot be made: of too few entries or too many, or not in one piece.
fn check(command: &Command, size: u32) -> Result<(), Status> {
    if !(2..=MOST_ENTRIES).contains(&size) {
        return Err(Status::INVALID_QUEUE_SIZE);
    }
    if command.dword(11) & 1 == 0 {
        return Err(Status::INVALID_FIELD);
    }
    if !command.prp1().is_multiple_of(4096) {
        return Err(Status::PRP_OFFSET);
    }
    Ok(())
}

fn create_completion(state: &mut State, command: &Command) -> Result<(), Status> {
    let (id, size) = queue(command)?;
    if state.completions.contains_key(&id) {
        return Err(Status::INVALID_QUEUE);
    }
    check(command, size)?;
    let is_signalled = command.dword(11) & 2 != 0;
    let vector = u16::try_from(command.dword(11) >> 16).unwrap_or(u16::MAX);
    if is_signalled && vector >= VECTORS {
        return Err(Status::INVALID_VECTOR);
    }
    let vector = is_signalled.then_some(vector);
    state.completions.insert(id, CompletionQueue::new(command.prp1(), size, vector));
    Ok(())
}

fn create_submission(state: &mut State, command: &Command) -> Result<(), Status> {
    let (id, size) = queue(command)?;
    if state.submissions.contains_key(&id) {
        return Err(Status::INVALID_QUEUE);
    }
    check(command, size)?;
    let completion = u16::try_from(command.dword(11) >> 16).unwrap_or(u16::MAX);
    // The admin queue's is its own.
    if completion == 0 || !state.completions.contains_key(&completion) {
        return Err(Status::INVALID_COMPLETION_QUEUE);
    }
    state.submissions.insert(id, SubmissionQueue::new(command.prp1(), size, completion));
    Ok(())
}

fn delete_completion(state: &mut State, command: &Command) -> Result<(), Status> {
    let (id, _) = queue(command)?;
    if !state.completions.contains_key(&id) {
        return Err(Status::INVALID_QUEUE);
    }
    if state.submissions.values().any(|queue| queue.completion == id) {
        return Err(Status::INVALID_DELETION);
    }
    state.completions.remove(&id);
    Ok(())
}

/// Waits for the queue's commands.
fn delete_submission(shared: &Shared, command: &Command) -> Result<(), Status> {
    let (id, _) = queue(command)?;
    let mut state = shared.state.lock();
    let generation = state.generation;
    if !state.delete(id) {
        return Err(Status::INVALID_QUEUE);
    }
    while in_flight(&state, id, generation) {
        shared.ended.wait(&mut state);
    }
    forget(&mut state, id, generation);
    Ok(())
}

fn in_flight(state: &State, id: u16, generation: u64) -> bool {
    state.generation == generation
        && !state.is_stopped
        && state.submissions.get(&id).is_some_and(|queue| queue.is_in_use())
}

fn forget(state: &mut MutexGuard<'_, State>, id: u16, generation: u64) {
    if state.generation == generation {
        state.submissions.remove(&id);
    }
}

/// A request for an event is answered when there is one: never.
fn event(state: &mut State) -> Result<Option<u32>, Status> {
    if state.events == MOST_EVENTS {
        return Err(Status::TOO_MANY_EVENTS);
    }
    state.events += 1;
    Ok(None)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Get,
    Set,
}

/// Features: what can be set is what there is already.
fn features(command: &Command, direction: Direction) -> Result<u32, Status> {
    match command.dword(10) & 0xff {
        // Arbitration, power, temperature, errors, interrupts, atomicity, events.
        0x01 | 0x02 | 0x04 | 0x05 | 0x08 | 0x09 | 0x0a | 0x0b => Ok(0),
        // A volatile write cache, which cannot be turned off.
        0x06 => match direction {
            Direction::Set if command.dword(11) & 1 == 0 => Err(Status::INVALID_FIELD),
            _ => Ok(1),
        },
        // Queues of each kind, counted from 0.
        0x07 => Ok(u32::from(PAIRS - 1) * 0x1_0001),
        _ => Err(Status::INVALID_FIELD),
    }
}

/// Pages of a log, all of which are empty.
fn log(shared: &Shared, command: &Command) -> Result<(), Status> {
    if !(1..=3).contains(&(command.dword(10) & 0xff)) {
        return Err(Status::INVALID_LOG);
    }
    let dwords = u64::from(command.dword(11) & 0xffff) << 16 | u64::from(command.dword(10) >> 16);
    let len = (dwords + 1) * 4;
    if len > 4096 {
        return Err(Status::INVALID_FIELD);
    }
    give(shared, command, &vec![0; usize::try_from(len).unwrap_or_default()])
}

fn identify(shared: &Shared, command: &Command) -> Result<(), Status> {
    let mut bytes = vec![0; 4096];
    let namespace = command.namespace();
    match command.dword(10) & 0xff {
        0x00 if namespace == NAMESPACE => identify_namespace(shared, &mut bytes),
        0x01 => identify_controller(&mut bytes),
        // Numbers of namespaces above the one that is named.
        0x02 if namespace >= u32::MAX - 1 => return Err(Status::INVALID_NAMESPACE),
        0x02 => {
            if namespace < NAMESPACE {
                put(&mut bytes, 0, &NAMESPACE.to_le_bytes());
            }
        }
        // One descriptor: an EUI-64, of 8 bytes.
        0x03 if namespace == NAMESPACE => {
            put(&mut bytes, 0, &[1, 8]);
            put(&mut bytes, 4, &NAMESPACE_ID.to_be_bytes());
        }
        0x00 | 0x03 => return Err(Status::INVALID_NAMESPACE),
        _ => return Err(Status::INVALID_FIELD),
    }
    give(shared, command, &bytes)
}

fn identify_namespace(shared: &Shared, bytes: &mut [u8]) {
    let blocks = shared.disk.blocks().to_le_bytes();
    // Size, capacity, utilisation.
    [0, 8, 16].iter().for_each(|&at| put(bytes, at, &blocks));
    // The EUI-64, and the only format.
    put(bytes, 120, &NAMESPACE_ID.to_be_bytes());
    put(bytes, 130, &[u8::try_from(BLOCK_LG2).unwrap_or_default()]);
}

fn identify_controller(bytes: &mut [u8]) {
    let mut text = |at: usize, len: usize, text: &str| {
        put(bytes, at, &vec![b' '; len]);
        put(bytes, at, text.as_bytes());
    };
    text(4, 20, "dmaspan");
    text(24, 40, "dmaspan vfio-user");
    text(64, 8, env!("CARGO_PKG_VERSION"));
    put(bytes, 0, &0x1b36_u16.to_le_bytes());
    put(bytes, 77, &[MDTS]);
    put(bytes, 80, &VERSION.to_le_bytes());
    // It is an I/O controller.
    put(bytes, 111, &[1]);
    // Requests for events, counted from 0.
    put(bytes, 259, &[u8::try_from(MOST_EVENTS - 1).unwrap_or_default()]);
    // The sizes of entries, at least and at most.
    put(bytes, 512, &[0x66, 0x44]);
    put(bytes, 516, &NAMESPACE.to_le_bytes());
    // A volatile write cache.
    put(bytes, 525, &[1]);
    put(bytes, 768, b"nqn.2026-01.invalid.dmaspan:nvme-server");
}

/// Writes data of a command.
fn give(shared: &Shared, command: &Command, bytes: &[u8]) -> Result<(), Status> {
    let mut rest = bytes;
    let len = u64::try_from(bytes.len()).unwrap_or_default();
    for held in prp::hold(&shared.dma, command, len, Prot::WRITE)? {
        let here = usize::try_from(held.len()).unwrap_or_default().min(rest.len());
        let (now, behind) = rest.split_at(here);
        held.write(0, now).map_err(|_| Status::DATA_TRANSFER)?;
        rest = behind;
    }
    Ok(())
}
