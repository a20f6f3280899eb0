//! Pins of real memory, against what the kernel says about them.
//!
//! The tests read counters of the whole process and share its limit of locked memory, so they take
//! turns. Most need no more than 8 MiB, the limit that an ordinary user has by default.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dmaspan::pin::{Dirty, Kind, PinError, PinFailed, Pinner, SpanSink, Stopped};
use dmaspan::{Errno, HostAddr, PhysAddr, Promise, Prot, Span, UserRange};
use dmaspan_linux::pagemap::NoFrames;
use dmaspan_linux::pinner::LinuxPinError;
use dmaspan_linux::registration::RegisterError;
use dmaspan_linux::{
    FrameAddress, FrameMap, FrameMode, LinuxPin, LinuxPinner, Lookup, Memory, MemoryKind,
    PinMethod, PinnerOptions,
};

mod charged;

use charged::{charged, status};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The size of the kernel's own page.
fn page() -> u64 {
    MemoryKind::Base.page_size()
}

/// At least so long: of whole pages.
fn memory(kind: MemoryKind, len: u64) -> Arc<Memory> {
    Arc::new(Memory::new(kind, len.next_multiple_of(kind.page_size())).unwrap())
}

/// A pinner of virtual addresses, which every user can have.
fn with(method: PinMethod) -> Option<LinuxPinner<HostAddr>> {
    made(LinuxPinner::with(options(method)))
}

/// A pinner of physical addresses.
fn physical() -> Option<LinuxPinner> {
    made(LinuxPinner::new())
}

fn made<A: FrameAddress>(made: Result<LinuxPinner<A>, LinuxPinError>) -> Option<LinuxPinner<A>> {
    made.inspect_err(|error| eprintln!("SKIP: {error}")).ok()
}

fn options(method: PinMethod) -> PinnerOptions {
    PinnerOptions { method: Some(method), ..PinnerOptions::default() }
}

/// Pins a range. `None` where the limit of locked memory forbids it, which no test of root has.
fn pin<A: FrameAddress>(
    pinner: &LinuxPinner<A>,
    memory: &Arc<Memory>,
    range: UserRange,
) -> Option<(LinuxPin, Vec<Span<A>>)> {
    let mut spans = Vec::new();
    let pin = match pinner.pin(memory, range, Prot::READ_WRITE, &mut spans) {
        Ok(pin) => pin,
        Err(PinFailed {
            error: PinError::Failed(LinuxPinError::Register(error)),
            pin: None,
            ..
        }) if matches!(error, RegisterError::MemlockExceeded { .. }) && !is_root() => {
            eprintln!("SKIP: {error}");
            return None;
        }
        Err(failed) => panic!("{failed:?}"),
    };
    assert_eq!(Some(spans.iter().map(|span| span.len()).sum()), range.checked_len());
    Some((pin, spans))
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

fn end<A: FrameAddress>(pinner: &LinuxPinner<A>, mut pin: LinuxPin, spans: &[Span<A>]) {
    #[expect(unsafe_code, reason = "the tests are the pins' users")]
    // SAFETY: no device was given the spans.
    let promise = unsafe { Promise::new() };
    pinner.unpin(promise, &mut pin, spans, Kind::Memory, Dirty::Written);
    pinner.release(promise, pin);
}

/// Takes so many spans and no more.
struct Takes(usize);

impl<A> SpanSink<A> for Takes {
    fn push(&mut self, _span: Span<A>, _kind: Kind) -> Result<(), Stopped> {
        self.0 = self.0.checked_sub(1).ok_or(Stopped)?;
        Ok(())
    }
}

#[test]
fn the_kernel_counts_what_is_pinned_and_nothing_after() {
    let _turn = turn();
    let Some(pinner) = with(PinMethod::IoUring) else { return };
    let before = status("VmPin");
    for (kind, len) in [(MemoryKind::Thp, 4 << 20), (MemoryKind::Base, 5 << 20)] {
        let memory = memory(kind, len);
        let Some((held, spans)) = pin(&pinner, &memory, memory.user_range()) else { return };
        assert_eq!(status("VmPin") - before, charged(memory.len()), "{kind}");
        end(&pinner, held, &spans);
        assert_eq!(status("VmPin"), before, "{kind}");
    }
}

#[test]
fn a_pin_over_several_chunks_is_pinned_and_released_whole() {
    let _turn = turn();
    let Some(pinner) = with(PinMethod::IoUring) else { return };
    let before = status("VmPin");
    let memory = memory(MemoryKind::Thp, (2 << 30) + (6 << 20));
    let len = memory.len() - 2 * page();
    let range = memory.sub_range(page(), len).unwrap();
    let Some((held, spans)) = pin(&pinner, &memory, range) else { return };
    assert!(status("VmPin") - before >= charged(len));
    end(&pinner, held, &spans);
    assert_eq!(status("VmPin"), before);
}

#[test]
fn registration_is_undone_when_the_sink_stops() {
    let _turn = turn();
    for (method, counter) in [(PinMethod::IoUring, "VmPin"), (PinMethod::Mlock, "VmLck")] {
        let Some(pinner) = with(method) else { continue };
        let before = status(counter);
        let memory = memory(MemoryKind::Base, 1 << 20);
        let range = memory.user_range();
        let failed = pinner.pin(&memory, range, Prot::READ_WRITE, &mut Takes(0)).unwrap_err();
        assert_eq!(failed.error, PinError::Stopped);
        assert!(failed.pin.is_none());
        assert_eq!(status(counter), before);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}

#[test]
fn what_a_sink_took_before_it_stopped_stays_pinned_until_it_is_released() {
    let _turn = turn();
    let Some(pinner) = physical() else { return };
    let before = status("VmPin");
    let memory = memory(MemoryKind::Base, 4 << 20);
    let whole = memory.user_range();
    let Some((held, spans)) = pin(&pinner, &memory, whole) else { return };
    end(&pinner, held, &spans);
    if spans.len() < 2 {
        return eprintln!("SKIP: all of the memory is contiguous");
    }
    let failed = pinner.pin(&memory, whole, Prot::READ_WRITE, &mut Takes(1)).unwrap_err();
    assert_eq!(failed.error, PinError::Stopped);
    assert_eq!(status("VmPin") - before, charged(4 << 20));
    end(&pinner, failed.pin.unwrap(), &spans[..1]);
    assert_eq!(status("VmPin"), before);
}

#[test]
fn pinned_frames_survive_compaction() {
    let _turn = turn();
    let Some(pinner) = physical() else { return };
    let memory = memory(MemoryKind::Base, 32 << 20);
    let range = memory.user_range();
    let Some((held, spans)) = pin(&pinner, &memory, range) else { return };
    if let Err(error) = fs::write("/proc/sys/vm/compact_memory", "1") {
        eprintln!("SKIP: compaction cannot be asked for: {error}");
    }
    let mut after = Vec::new();
    pinner.frames().frames(&memory, range, Lookup::EveryPage, &mut after).unwrap();
    assert_eq!(after, spans);
    end(&pinner, held, &spans);
}

#[test]
fn a_dropped_pin_leaks_and_outlives_its_pinner_and_memory() {
    let _turn = turn();
    let Some(pinner) = with(PinMethod::IoUring) else { return };
    let before = status("VmPin");
    let memory = memory(MemoryKind::Base, 1 << 20);
    let weak = Arc::downgrade(&memory);
    let Some((held, _spans)) = pin(&pinner, &memory, memory.user_range()) else { return };
    drop(held);
    drop(pinner);
    drop(memory);
    assert!(weak.upgrade().is_some());
    assert_eq!(status("VmPin") - before, charged(1 << 20));
}

#[test]
fn overlapping_pins_end_one_by_one() {
    let _turn = turn();
    for (method, counter) in [(PinMethod::IoUring, "VmPin"), (PinMethod::Mlock, "VmLck")] {
        let (Some(one), Some(two)) = (with(method), with(method)) else { continue };
        let before = status(counter);
        let memory = memory(MemoryKind::Base, 1 << 20);
        let Some((first, first_spans)) = pin(&one, &memory, memory.user_range()) else { return };
        let Some((second, second_spans)) =
            pin(&two, &memory, memory.sub_range(page() + page() / 2, 2 * page()).unwrap())
        else {
            return;
        };
        end(&one, first, &first_spans);
        let counted = if counter == "VmPin" { charged(3 * page()) } else { 3 * page() };
        assert_eq!(status(counter) - before, counted, "{method}");
        end(&two, second, &second_spans);
        assert_eq!(status(counter), before, "{method}");
    }
}

#[test]
fn locked_memory_has_virtual_addresses_as_it_may_move() {
    let _turn = turn();
    let Some(pinner) = with(PinMethod::Mlock) else { return };
    assert_eq!(pinner.method(), PinMethod::Mlock);
    let memory = memory(MemoryKind::Base, 1 << 20);
    let Some((held, spans)) = pin(&pinner, &memory, memory.user_range()) else { return };
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].start().get(), memory.user_range().start().get());
    end(&pinner, held, &spans);
    let error = LinuxPinner::<PhysAddr>::with(options(PinMethod::Mlock)).unwrap_err();
    assert_eq!(error, LinuxPinError::NoFrames(NoFrames::MayMove));
}

#[test]
fn a_range_outside_the_memory_is_refused_and_named() {
    let _turn = turn();
    let pinner = LinuxPinner::<HostAddr>::new().unwrap();
    let memory = memory(MemoryKind::Base, 1 << 20);
    let start = memory.user_range().start();
    let beyond = UserRange::from_len(start, (1 << 20) + 1).unwrap();
    let failed = pinner.pin(&memory, beyond, Prot::READ, &mut Vec::new()).unwrap_err();
    assert!(failed.pin.is_none());
    let PinError::Failed(error) = failed.error else { panic!("{failed:?}") };
    assert!(matches!(error, LinuxPinError::Outside(_)));
    assert_eq!(pinner.errno(&error), Errno::EFAULT);
}

#[test]
fn statistics_count_and_are_reset() {
    let _turn = turn();
    statistics_of(&LinuxPinner::<HostAddr>::new().unwrap());
    if let Some(pinner) = physical() {
        statistics_of(&pinner);
    }
}

fn statistics_of<A: FrameAddress>(pinner: &LinuxPinner<A>) {
    let memory = memory(MemoryKind::Base, 4 << 20);
    let Some((held, spans)) = pin(pinner, &memory, memory.user_range()) else { return };
    end(pinner, held, &spans);
    let stats = pinner.reset_stats();
    assert!(stats.pin_ns > 0 && stats.unpin_ns > 0, "{stats:?}");
    if A::MODE == FrameMode::Physical {
        assert_eq!(stats.lookups, (4 << 20) / page());
        assert!(stats.lookup_ns > 0);
    }
    assert_eq!(pinner.stats().lookups, 0);
    assert_eq!(pinner.stats().pin_ns, 0);
}

#[test]
fn pins_of_many_threads_do_not_disturb_each_other() {
    let _turn = turn();
    let pinner = LinuxPinner::<HostAddr>::new().unwrap();
    let before = status("VmPin");
    let memory = memory(MemoryKind::Base, 256 * page());
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (pinner, memory) = (&pinner, &memory);
            scope.spawn(move || {
                for n in 0..50 {
                    let range = memory.sub_range(thread * 64 * page(), (n + 1) * page()).unwrap();
                    let Some((held, spans)) = pin(pinner, memory, range) else { return };
                    end(pinner, held, &spans);
                }
            });
        }
    });
    assert_eq!(status("VmPin"), before);
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn a_frame_map_finds_every_page_of_pinned_memory() {
    let _turn = turn();
    frame_map_finds_every_page(&LinuxPinner::<HostAddr>::new().unwrap());
    if let Some(pinner) = physical() {
        frame_map_finds_every_page(&pinner);
    }
}

fn frame_map_finds_every_page<A: FrameAddress>(pinner: &LinuxPinner<A>) {
    for kind in [MemoryKind::Thp, MemoryKind::Base, MemoryKind::Memfd] {
        let memory = memory(kind, 4 << 20);
        let range = memory.user_range();
        let Some((held, spans)) = pin(pinner, &memory, range) else { return };
        let map = FrameMap::new(&memory, range, &spans).unwrap();
        let mut pages = Vec::new();
        pinner.frames().page_frames(&memory, range, &mut pages).unwrap();
        for (number, paddr) in (0..).zip(&pages) {
            let (offset, left) = map.locate(*paddr).unwrap();
            assert_eq!(offset, number * page());
            assert!(left >= page());
        }
        end(pinner, held, &spans);
    }
}

/// Names the part that this program plays when a test starts it again as another user.
const ROLE: &str = "DMASPAN_TEST_ROLE";

/// The user `nobody`.
const NOBODY: u32 = 65534;

/// Runs the test `name` of this program again as an ordinary user, with `ROLE` set, and passes as
/// it does. `None` in that second run, which is to do the work.
fn again_unprivileged(name: &str) -> Option<()> {
    if env::var_os(ROLE).is_some() {
        return None;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(ROLE, name).uid(NOBODY).gid(NOBODY);
    match command.output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{text}\n{errors}");
            assert!(text.contains("1 passed"), "{text}");
            eprintln!("{errors}");
        }
        Err(error) => eprintln!("SKIP: cannot start a program as another user: {error}"),
    }
    Some(())
}

#[test]
fn pins_go_on_where_no_more_rings_can_be_opened() {
    let _turn = turn();
    let name = "pins_go_on_where_no_more_rings_can_be_opened";
    if env::var_os(ROLE).is_none() {
        let mut command = Command::new("sh");
        command.args(["-c", r#"ulimit -n 64 && exec "$0" "$@""#]).arg(env::current_exe().unwrap());
        let output = command.args(["--exact", name]).env(ROLE, name).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        return assert!(output.status.success() && text.contains("1 passed"), "{text}\n{errors}");
    }
    let Some(pinner) = with(PinMethod::IoUring) else { return };
    let before = status("VmPin");
    // Memory that far apart has different rings.
    let memory = memory(MemoryKind::Thp, (512 << 20) + (4 << 20));
    let ends = [0, memory.len() - page()].map(|at| memory.sub_range(at, page()).unwrap());
    let file = || fs::File::open("/dev/null");
    let mut files: Vec<_> = std::iter::from_fn(|| file().ok()).collect();
    let pinned = ends.map(|end| pinner.pin(&memory, end, Prot::READ_WRITE, &mut Vec::new()));
    assert!(file().is_err());
    files.clear();
    assert!(status("VmPin") - before >= 2 * charged(page()));
    for pin in pinned {
        pinner.give_back(pin.unwrap());
    }
    assert_eq!(status("VmPin"), before);
}

#[test]
fn without_privilege_pins_are_real_and_addresses_virtual() {
    let _turn = turn();
    if again_unprivileged("without_privilege_pins_are_real_and_addresses_virtual").is_some() {
        return;
    }
    let pinner = LinuxPinner::<HostAddr>::new().unwrap();
    let why = match pinner.method() {
        PinMethod::IoUring => NoFrames::NotPermitted,
        _ => NoFrames::MayMove,
    };
    let error = LinuxPinner::<PhysAddr>::new().unwrap_err();
    assert_eq!(error, LinuxPinError::NoFrames(why));
    let memory = memory(MemoryKind::Base, 64 << 10);
    let range = memory.user_range();
    let before = status("VmPin") + status("VmLck");
    let Some((held, spans)) = pin(&pinner, &memory, range) else { return };
    assert_eq!(status("VmPin") + status("VmLck") - before, 64 << 10);
    let expected = Span::new(HostAddr::new(range.start().get()), 64 << 10).unwrap();
    assert_eq!(spans, [expected]);
    end(&pinner, held, &spans);
}

#[test]
fn more_than_the_limit_of_locked_memory_is_an_error_that_says_what_to_do() {
    let _turn = turn();
    let name = "more_than_the_limit_of_locked_memory_is_an_error_that_says_what_to_do";
    if again_unprivileged(name).is_some() {
        return;
    }
    for method in [PinMethod::IoUring, PinMethod::Mlock] {
        let Some(pinner) = with(method) else { continue };
        let before = status("VmPin") + status("VmLck");
        // As much as several threads pin. The first 4 MiB, which the limit permits, are a buffer of
        // their own.
        let (len, first, step) = (1 << 30, 4 << 20, 64 << 20);
        let memory = memory(MemoryKind::Base, len + step);
        let start = memory.user_range().start().get();
        let offset = (start + first).next_multiple_of(step) - first - start;
        let range = memory.sub_range(offset, len).unwrap();
        let mut spans = Vec::new();
        let error = match pinner.pin(&memory, range, Prot::READ_WRITE, &mut spans) {
            Ok(pin) => {
                pinner.give_back(pin);
                return eprintln!("SKIP: this system does not limit locked memory");
            }
            Err(PinFailed {
                error: PinError::Failed(LinuxPinError::Register(error)),
                pin: None,
                ..
            }) => error,
            Err(failed) => panic!("{method}: {failed:?}"),
        };
        let RegisterError::MemlockExceeded { range: named, needed, limit } = error else {
            panic!("{method}: {error}")
        };
        assert_eq!(named, range);
        let text = error.to_string();
        let enough = format!("ulimit -l {}", (needed + limit).div_ceil(1024));
        assert!(needed == 1 << 30 && text.contains(&enough), "{text}");
        assert_eq!(error.errno(), Errno::ENOMEM);
        assert!(spans.is_empty());
        assert_eq!(status("VmPin") + status("VmLck"), before, "{method}");
    }
}
