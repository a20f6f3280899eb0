//! Tables that change while operations are in flight.

use std::fs::File;
use std::io::{self, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dmaspan::Errno;
use dmaspan_linux::fixed::{AttachMethod, FixedRing, OperationError, Sharing};

use crate::fixed::support::{Random, again, base, charged, file_with, pattern, pinned, ring, wait};

/// The end of a pipe to read, as a file, and the other one.
fn pipe() -> (Arc<File>, PipeWriter) {
    let (reader, writer) = io::pipe().unwrap();
    (Arc::new(File::from(OwnedFd::from(reader))), writer)
}

#[test]
fn a_detached_buffer_is_read_into_to_the_end_and_not_reused_before() {
    let pool = base(4096, 4);
    let Some(mut ring) = ring(&pool, 4) else { return };
    let (reader, mut writer) = pipe();
    let buffer = pool.take().unwrap();
    let index = buffer.index();
    ring.read(buffer, 1..7, &reader, 0, 1).unwrap();
    ring.submit().unwrap();
    ring.detach().unwrap();

    let others: Vec<_> = (0..3).map(|_| pool.take().unwrap()).collect();
    assert!(others.iter().all(|other| other.index() != index));
    assert!(pool.take().is_none());
    let refused = ring.read(others.into_iter().next().unwrap(), 0..1, &reader, 0, 2).unwrap_err();
    assert_eq!(refused.error, OperationError::NotAttached);
    assert!(ring.completion().is_none());

    writer.write_all(b"queued").unwrap();
    let done = wait(&mut ring);
    assert_eq!((done.token, done.result.unwrap()), (1, 6));
    assert_eq!(&done.buffer[..8], b"\0queued\0");
    assert_eq!(done.buffer.index(), index);

    ring.renew(Sharing::Auto).unwrap();
    writer.write_all(b"again").unwrap();
    ring.read(done.buffer, 3..8, &reader, 0, 3).unwrap();
    assert_eq!(&wait(&mut ring).buffer[3..8], b"again");
}

#[test]
fn memory_stays_pinned_until_the_last_operation_is_done() {
    if again("load::memory_stays_pinned_until_the_last_operation_is_done").is_some() {
        return;
    }
    let (before, pool) = (pinned(), base(1 << 20, 4));
    let Ok(mut ring) = FixedRing::with(&pool, 4, Sharing::Register) else { return };
    assert_eq!(ring.attachment().method(), AttachMethod::Registered { refused: None });
    assert_eq!(pinned() - before, charged(4 << 20));
    let (reader, mut writer) = pipe();
    ring.read(pool.take().unwrap(), 0..6, &reader, 0, 1).unwrap();
    ring.submit().unwrap();
    ring.detach().unwrap();
    assert_eq!(pinned() - before, charged(4 << 20));
    writer.write_all(b"queued").unwrap();
    drop(wait(&mut ring));
    assert_eq!(pinned(), before);
}

#[test]
fn an_entry_that_is_submitted_after_its_buffer_went_fails_and_gives_it_back() {
    let pool = base(4096, 1);
    let Some(mut ring) = ring(&pool, 2) else { return };
    let file = file_with(b"bytes", 0).unwrap();
    ring.read(pool.take().unwrap(), 0..5, &file, 0, 1).unwrap();
    ring.detach().unwrap();
    let done = wait(&mut ring);
    assert_eq!(done.result.unwrap_err().raw_os_error(), Some(Errno::EFAULT.get()));
    assert_eq!(&done.buffer[..5], [0; 5]);
    drop(done.buffer);
    assert_eq!(pool.free_slices(), 1);
}

#[test]
fn updates_and_unregistering_under_load_change_no_byte() {
    if again("load::updates_and_unregistering_under_load_change_no_byte").is_some() {
        return;
    }
    let before = pinned();
    change_under_load(0, 1);
    // The kernel answers what is in its cache at once; these are in flight for longer.
    change_under_load(libc::O_DIRECT, 4096);
    assert_eq!(pinned(), before);
}

/// Reads at multiples of `grain` of a file that is opened with `flags`, while the table changes.
fn change_under_load(flags: i32, grain: usize) {
    const LEN: usize = 8192;
    let seed = 0x0bad_cafe;
    let pool = base(16 << 10, 32);
    let Some(mut ring) = ring(&pool, 16) else { return };
    let bytes: Vec<u8> = (0..4 << 20).map(pattern).collect();
    let Some(file) = file_with(&bytes, flags) else { return };
    let mut random = Random(seed);
    let (mut begun, mut ended, mut renewals, mut detached) = (0, 0, 0, 0);
    while ended < 4000 {
        while begun < 4000 && ring.in_flight() < ring.depth() {
            let offset = random.below((bytes.len() - LEN) / grain + 1) * grain;
            let start = random.below(LEN / grain + 1) * grain;
            let token = u64::try_from(offset << 16 | start).unwrap();
            let offset = u64::try_from(offset).unwrap();
            let range = start..start + LEN;
            ring.read(pool.take().unwrap(), range, &file, offset, token).unwrap();
            begun += 1;
        }
        ring.submit().unwrap();
        if random.below(4) == 0 {
            // All is submitted: what is in flight keeps its registration.
            if random.below(2) == 0 {
                ring.detach().unwrap();
                detached += 1;
            }
            let sharing = [Sharing::Auto, Sharing::Register][random.below(2)];
            ring.renew(sharing).unwrap();
            renewals += 1;
        }
        let done = wait(&mut ring);
        let token = usize::try_from(done.token).unwrap();
        let (offset, start) = (token >> 16, token & 0xffff);
        assert_eq!(done.result.unwrap(), LEN, "seed {seed:#x}");
        assert!(done.buffer[start..start + LEN] == bytes[offset..offset + LEN], "{seed:#x}");
        ended += 1;
    }
    assert!(renewals > 500 && detached > 200, "{renewals}, {detached}");
    assert_eq!(pool.free_slices(), 32);
}

#[test]
fn a_dropped_ring_cancels_what_waits_and_gives_its_buffer_back() {
    let pool = base(4096, 2);
    let Some(mut ring) = ring(&pool, 2) else { return };
    let (reader, mut writer) = pipe();
    ring.read(pool.take().unwrap(), 0..4096, &reader, 0, 0).unwrap();
    ring.submit().unwrap();
    assert_eq!(pool.free_slices(), 1);
    drop(ring);
    if pool.free_slices() == 1 {
        return eprintln!("SKIP: this kernel cancels nothing in time (Linux 6.0 does)");
    }
    // Nobody reads into it any more.
    writer.write_all(b"late").unwrap();
    let buffers = [pool.take().unwrap(), pool.take().unwrap()];
    assert!(buffers.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0)));
}

#[test]
fn what_was_never_submitted_is_given_back_when_the_ring_goes_and_never_done() {
    let pool = base(4096, 3);
    let Some(mut ring) = ring(&pool, 3) else { return };
    let (reader, _writer) = pipe();
    let file = file_with(b"bytes", 0).unwrap();
    ring.read(pool.take().unwrap(), 0..5, &reader, 0, 0).unwrap();
    ring.submit().unwrap();
    for offset in 0..2 {
        ring.write(pool.take().unwrap(), 0..1, &file, offset, 0).unwrap();
    }
    assert_eq!(pool.free_slices(), 0);
    drop(ring);
    if pool.free_slices() == 0 {
        return eprintln!("SKIP: this kernel cancels nothing in time (Linux 6.0 does)");
    }
    assert_eq!(pool.free_slices(), 3);
    let mut found = [0; 5];
    file.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(&found, b"bytes");
}
