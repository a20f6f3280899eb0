//! A thread that does commands.

use std::sync::atomic::{Ordering, fence};

use dmaspan::Prot;

use super::command::{COMMAND, COMMAND_LG2, Command, Completion, Status};
use super::state::{Place, Work};
use super::{Shared, admin, block};

/// Does what there is to do until the controller is gone.
pub(super) fn run(shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        if state.is_stopped {
            return;
        }
        let Some(work) = state.begin() else {
            shared.begun.wait(&mut state);
            continue;
        };
        let generation = state.generation;
        drop(state);
        match work {
            Work::Command(queue) => command(shared, generation, queue),
            Work::Completions(queue) => completions(shared, generation, queue),
        }
        state = shared.state.lock();
        state.running -= 1;
        shared.ended.notify_all();
        // Another of this queue may have become work meanwhile.
        if !state.work.is_empty() {
            shared.begun.notify_one();
        }
    }
}

/// Reads the next command of a queue, does it, and writes its completion.
fn command(shared: &Shared, generation: u64, id: u16) {
    let Some(command) = fetch(shared, generation, id) else { return };
    let done = match id {
        0 => admin::execute(shared, &command),
        _ => {
            let done = block::execute(&command, &shared.dma, &shared.disk);
            shared.commands.fetch_add(1, Ordering::Relaxed);
            shared.failed.fetch_add(u64::from(done.is_err()), Ordering::Relaxed);
            done.map(|()| Some(0))
        }
    };
    let completion = match done {
        Ok(None) => None,
        Ok(Some(result)) => Some((result, Status::SUCCESS)),
        Err(status) => Some((0, status)),
    };
    let mut state = shared.state.lock();
    if state.generation != generation {
        return;
    }
    let place = completion.and_then(|(result, status)| {
        let (command, head) = (command.id(), 0);
        let completion = Completion { command, submission: id, head, result, status };
        // Its head is read with its place: that is what has been read by then.
        let head = state.submissions.get(&id).and_then(|queue| u16::try_from(queue.head).ok());
        let place = state.place(completion)?;
        Some((Completion { head: head.unwrap_or_default(), ..completion }, place))
    });
    drop(state);
    if let Some((completion, place)) = place {
        write(shared, generation, completion, &place);
    }
    let mut state = shared.state.lock();
    if state.generation == generation {
        state.ended(id);
    }
}

/// Reads the command at the head of a queue; nothing where the queue is gone.
fn fetch(shared: &Shared, generation: u64, id: u16) -> Option<Command> {
    let state = shared.state.lock();
    let queue = state.submissions.get(&id).filter(|_| state.generation == generation)?;
    let address = queue.base.checked_add(u64::from(queue.head) << COMMAND_LG2);
    drop(state);
    let mut bytes = [0; COMMAND];
    let read = address.and_then(|address| {
        let held = shared.dma.hold_settled(address, 1 << COMMAND_LG2, Prot::READ).ok()?;
        held.read(0, &mut bytes).ok()
    });
    let mut state = shared.state.lock();
    if state.generation != generation {
        return None;
    }
    match read {
        Some(()) if !state.fetched(id) => return None,
        Some(()) => {}
        None => {
            state.fail();
            return None;
        }
    }
    if !state.work.is_empty() {
        shared.begun.notify_one();
    }
    Some(Command::new(bytes))
}

/// Writes completions that waited for room.
fn completions(shared: &Shared, generation: u64, id: u16) {
    loop {
        let mut state = shared.state.lock();
        if state.generation != generation {
            return;
        }
        let Some((completion, place)) = state.unblocked(id) else { return };
        drop(state);
        write(shared, generation, completion, &place);
    }
}

/// Writes a completion, its phase tag last, by which the guest sees it: the byte behind it has the
/// rest of the status.
fn write(shared: &Shared, generation: u64, completion: Completion, place: &Place) {
    let bytes = completion.bytes(place.phase);
    let ([first @ .., tag, rest], tag_at) = (&bytes, 14);
    let held = shared.dma.hold_settled(place.address, 16, Prot::WRITE);
    let written = held.is_ok_and(|held| {
        let begun = held.write(0, first).and_then(|()| held.write(tag_at + 1, &[*rest]));
        fence(Ordering::Release);
        begun.and_then(|()| held.write(tag_at, &[*tag])).is_ok()
    });
    if written {
        if let Some(interrupt) = &place.interrupt {
            // A kernel that has no memory for it loses an interrupt, as a device may.
            let _ = interrupt.signal();
        }
        return;
    }
    let mut state = shared.state.lock();
    if state.generation == generation {
        state.fail();
    }
}
