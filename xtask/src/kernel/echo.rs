//! Echoes that a network card is sent, and what must come back: RFC 826, 791 and 792.

use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How many are sent.
pub(super) const ECHOES: u32 = 3;

const HERE: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const OUR_ADDRESS: [u8; 4] = [10, 0, 0, 1];
const ADDRESS: [u8; 4] = [10, 0, 0, 2];
/// How long an answer is waited for before the question is asked again.
const PATIENCE: Duration = Duration::from_millis(200);

/// Asks who has the address until somebody answers, sends that one echoes, and returns how many
/// came back as they were sent. It ends when `ends` says so.
pub(super) fn send(socket: &UnixDatagram, ends: &AtomicBool) -> u32 {
    if socket.set_read_timeout(Some(PATIENCE)).is_err() {
        return 0;
    }
    let Some(there) = ask(socket, ends) else { return 0 };
    let sizes = [56, 1000, 1472];
    let echoes = (0u16..).zip(sizes).map(|(number, size)| echo(there, number, size));
    // Nothing is lost on the way: each is sent once.
    let came_back = echoes.filter(|frame| {
        socket.send(frame).is_ok() && receive(socket, ends, |answer| answers(answer, frame))
    });
    came_back.map(|_| 1).sum()
}

/// The address of the card's.
fn ask(socket: &UnixDatagram, ends: &AtomicBool) -> Option<[u8; 6]> {
    let mut question = ethernet([0xff; 6], [8, 6]);
    question.extend([0, 1, 8, 0, 6, 4, 0, 1]);
    question.extend(HERE.iter().chain(&OUR_ADDRESS).chain(&[0; 6]).chain(&ADDRESS));
    question.resize(60, 0);
    let mut there = None;
    while there.is_none() && !ends.load(Ordering::Relaxed) {
        // Where the machine is not there yet, it is sent again.
        let _ = socket.send(&question);
        there = one(socket).and_then(|frame| {
            let is_answer =
                frame.get(12..14) == Some(&[8, 6]) && frame.get(20..22) == Some(&[0, 2]);
            let is_of = frame.get(28..32) == Some(&ADDRESS[..]);
            frame.get(22..28).filter(|_| is_answer && is_of)?.try_into().ok()
        });
    }
    there
}

/// A frame, where there is one within the patience.
fn one(socket: &UnixDatagram) -> Option<Vec<u8>> {
    let mut frame = vec![0; 2048];
    let len = socket.recv(&mut frame).ok()?;
    frame.truncate(len);
    Some(frame)
}

/// Waits for a frame of which `is_it` says so.
fn receive(socket: &UnixDatagram, ends: &AtomicBool, is_it: impl Fn(&[u8]) -> bool) -> bool {
    while !ends.load(Ordering::Relaxed) {
        if one(socket).is_some_and(|frame| is_it(&frame)) {
            return true;
        }
    }
    false
}

fn ethernet(to: [u8; 6], kind: [u8; 2]) -> Vec<u8> {
    [&to[..], &HERE, &kind].concat()
}

/// A question with as many bytes.
fn echo(to: [u8; 6], number: u16, size: usize) -> Vec<u8> {
    let [high, low] = number.to_be_bytes();
    let mut message = vec![8, 0, 0, 0, 0xda, 0x5a, high, low];
    message.extend((0..=u8::MAX).cycle().take(size));
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum);
    let [.., high, low] = (20 + message.len()).to_be_bytes();
    let mut header = vec![0x45, 0, high, low, 0, 0, 0, 0, 64, 1, 0, 0];
    header.extend(OUR_ADDRESS.iter().chain(&ADDRESS));
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    [ethernet(to, [8, 0]), header, message].concat()
}

/// Whether a frame answers the echo in another: the addresses are exchanged, and all behind the
/// checksum is the same.
fn answers(frame: &[u8], question: &[u8]) -> bool {
    const MESSAGE: usize = 14 + 20;
    let is_echoed = frame.get(MESSAGE + 4..) == question.get(MESSAGE + 4..);
    let is_answer = frame.get(MESSAGE..MESSAGE + 2) == Some(&[0, 0]);
    let is_right = frame.get(MESSAGE..).is_some_and(|message| checksum(message) == [0, 0]);
    let is_ours = frame.get(26..34) == Some(&[ADDRESS, OUR_ADDRESS].concat()[..]);
    is_echoed && is_answer && is_right && is_ours
}

/// The Internet's checksum: RFC 1071. Of a message that has its own, it is 0.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words =
        bytes.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(*two.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let [.., high, low] = (!sum).to_be_bytes();
    [high, low]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_the_question_with_addresses_exchanged() {
        let question = echo([1; 6], 2, 56);
        assert_eq!(question.len(), 14 + 20 + 8 + 56);
        assert_eq!(checksum(&question[34..]), [0, 0]);
        assert_eq!(checksum(&question[14..34]), [0, 0]);
        assert!(!answers(&question, &question));
        let mut answer = question.clone();
        answer[26..30].copy_from_slice(&ADDRESS);
        answer[30..34].copy_from_slice(&OUR_ADDRESS);
        answer[34] = 0;
        assert!(!answers(&answer, &question), "the checksum is the question's");
        answer[36..38].fill(0);
        let sum = checksum(&answer[34..]);
        answer[36..38].copy_from_slice(&sum);
        assert!(answers(&answer, &question));
        answer[60] ^= 1;
        assert!(!answers(&answer, &question));
        assert!(!answers(&[], &question));
    }
}
