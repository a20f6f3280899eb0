//! A controller that misbehaves: errors in bounded time, and no memory is let go of too early.

use dmaspan_nvme::{Awaited, Error, Opcode, QueueConfig, Transfer};

use crate::access::{Machine, gave_up_in_time};
use crate::fake::{Habit, Model};
use dmaspan_sim::rng::Rng;

#[test]
fn a_status_is_an_error_of_its_command_alone() {
    let machine = Machine::new(Model::default());
    let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    // Unrecovered Read Error, do not retry.
    machine.set_habit(Habit::Refuses { admin: false, opcode: 2, status: 0x4281 });
    let error = queue.read(&namespace, 0, &buffer, 0..512).unwrap_err();
    let Error::Command { opcode: Opcode::Read, status } = error else { panic!("{error}") };
    assert_eq!((status.kind(), status.code(), status.is_final()), (2, 0x81, true));
    assert_eq!(status.to_string(), "status type 0x2, code 0x81, do not retry");
    queue.write(&namespace, 0, &buffer, 0..512).unwrap();
    queue.submit(Transfer::Read, &namespace, 0, &buffer, 0..512).unwrap();
    queue.submit(Transfer::Write, &namespace, 0, &buffer, 0..512).unwrap();
    machine.run();
    let mut results = Vec::new();
    queue.reap(|done| results.push(done.result)).unwrap();
    assert_eq!(results, [Err(status), Ok(())]);
    controller.shutdown([queue]).unwrap();
}

#[test]
fn a_command_that_never_ends_keeps_its_buffer_until_it_does() {
    let machine = Machine::new(Model::default());
    let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(3));
    let before = machine.ram.live();
    machine.set_habit(Habit::SilentFrom(1));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    let error = queue.read(&namespace, 0, &buffer, 0..512).unwrap_err();
    let what = Awaited::Completion { queue: 1, command: 0 };
    assert!(matches!(error, Error::Timeout { what: said, .. } if said == what), "{error}");
    assert!(gave_up_in_time(&machine));
    drop(buffer);
    assert_eq!((queue.in_flight(), machine.ram.live()), (1, before + 1));

    // The completion comes late: the memory is let go of, and nobody is told.
    machine.set_habit(Habit::None);
    machine.run();
    assert_eq!(queue.reap(|done| panic!("{done:?}")).unwrap(), 0);
    assert_eq!((queue.in_flight(), machine.ram.live()), (0, before));
    controller.shutdown([queue]).unwrap();
    assert_eq!((machine.ram.live(), machine.ram.violations()), (0, vec![]));
}

#[test]
fn deleting_a_queue_lets_go_of_what_never_ended() {
    let machine = Machine::new(Model::default());
    let (mut controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    machine.set_habit(Habit::SilentFrom(1));
    for lba in 0..7 {
        queue.submit(Transfer::Read, &namespace, lba, &buffer, 0..512).unwrap();
    }
    drop(buffer);
    controller.delete_queue(queue).unwrap();
    // The admin queues are left.
    assert_eq!(machine.ram.live(), 2);
    controller.shutdown([]).unwrap();
    assert_eq!((machine.ram.live(), machine.ram.violations()), (0, vec![]));
}

#[test]
fn a_queue_that_cannot_be_deleted_leaks_with_what_is_in_flight() {
    let machine = Machine::new(Model::default());
    let (mut controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    queue.submit(Transfer::Read, &namespace, 0, &buffer, 0..512).unwrap();
    drop(buffer);
    let before = machine.ram.live();
    machine.set_habit(Habit::SilentFrom(0));
    let error = controller.delete_queue(queue).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert_eq!(machine.ram.live(), before);
    // Late, the controller still finds all of it.
    machine.set_habit(Habit::None);
    machine.run();
    assert_eq!(machine.ram.violations(), Vec::<String>::new());
}

#[test]
fn the_status_of_the_controller_tells_why_nothing_ends() {
    let machine = Machine::new(Model::default());
    let (_controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    machine.set_habit(Habit::SilentFrom(0));
    let timeout = queue.read(&namespace, 0, &buffer, 0..512);
    assert!(matches!(timeout, Err(Error::Timeout { .. })), "{timeout:?}");
    assert!(gave_up_in_time(&machine) && queue.check().is_ok());
    // Whatever time is left: that it is dead is seen at once.
    machine.fake.lock().fail();
    machine.forget_polls();
    let fatal = queue.read(&namespace, 0, &buffer, 0..512);
    assert!(matches!(fatal, Err(Error::Fatal { csts: 3 })), "{fatal:?}");
    assert!(matches!(queue.check(), Err(Error::Fatal { csts: 3 })));
    machine.set_habit(Habit::Gone);
    let gone = queue.read(&namespace, 0, &buffer, 0..512);
    assert!(matches!(gone, Err(Error::Gone)), "{gone:?}");
    assert!(matches!(queue.check(), Err(Error::Gone)) && !gave_up_in_time(&machine));
    // Each of them keeps its slot.
    assert_eq!(queue.in_flight(), 3);
}

#[test]
fn completions_of_what_is_not_in_flight_are_errors() {
    for habit in [Habit::WrongCommand(3), Habit::WrongCommand(0xffff), Habit::WrongQueue(2)] {
        let machine = Machine::new(Model::default());
        let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
        let buffer = machine.map(machine.ram.scattered(0, &[4096]));
        machine.set_habit(habit);
        let error = queue.read(&namespace, 0, &buffer, 0..512).unwrap_err();
        let Error::UnexpectedCompletion { queue: 1, sq, command } = error else {
            panic!("{error}")
        };
        match habit {
            Habit::WrongCommand(wrong) => assert_eq!((sq, command), (1, wrong)),
            _ => assert_eq!((sq, command), (2, 0)),
        }
        // The queue goes on behind it.
        machine.set_habit(Habit::None);
        queue.read(&namespace, 0, &buffer, 0..512).unwrap();
        assert_eq!(queue.in_flight(), 1);
        controller.shutdown([queue]).unwrap();
    }
}

#[test]
fn a_completion_that_comes_twice_is_an_error() {
    let machine = Machine::new(Model::default());
    let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    let id = queue.submit(Transfer::Read, &namespace, 0, &buffer, 0..512).unwrap();
    machine.run();
    machine.fake.lock().complete(1, 0, 0, 0);
    let mut ended = Vec::new();
    let error = queue.reap(|done| ended.push(done.id)).unwrap_err();
    assert!(matches!(error, Error::UnexpectedCompletion { command: 0, .. }), "{error}");
    assert_eq!((ended, queue.in_flight()), (vec![id], 0));
    controller.shutdown([queue]).unwrap();
}

#[test]
fn an_old_phase_tag_is_no_completion() {
    let machine = Machine::new(Model::default());
    let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(8));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    machine.set_habit(Habit::WrongPhase);
    let error = queue.read(&namespace, 0, &buffer, 0..512).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    controller.shutdown([queue]).unwrap();
}

#[test]
fn garbage_in_the_completion_queue_neither_hangs_nor_panics() {
    let machine = Machine::new(Model::default());
    let (controller, namespace, mut queue) = machine.ready(QueueConfig::new(16));
    let buffer = machine.map(machine.ram.scattered(0, &[4096]));
    let (base, depth) = machine.fake.lock().completion_memory(1);
    machine.set_habit(Habit::SilentFrom(1));
    let mut rng = Rng::new(3);
    let (mut errors, mut ends) = (0, 0);
    for _ in 0..3000 {
        let _ = queue.submit(Transfer::Read, &namespace, 0, &buffer, 0..512);
        for word in 0..u64::from(depth) * 2 {
            // Half of them have a likely command and queue.
            let (command, phase) = (rng.below(16) << 32, rng.below(2) << 48);
            let likely = 1 << 16 | command | phase;
            let value = if rng.below(2) == 0 { likely } else { rng.next() };
            machine.ram.set_word(base + word * 8, value);
        }
        match queue.reap(|_| ends += 1) {
            Ok(count) => assert!(count <= 16),
            Err(Error::UnexpectedCompletion { .. }) => errors += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(errors > 1000 && ends > 100, "{errors} {ends}");
    controller.shutdown([queue]).unwrap();
    assert_eq!(machine.ram.violations(), Vec::<String>::new());
}

#[test]
fn a_completion_queue_that_is_always_full_ends_a_poll() {
    let machine = Machine::new(Model::default());
    let (controller, _, mut queue) = machine.ready(QueueConfig::new(16));
    let (base, depth) = machine.fake.lock().completion_memory(1);
    // All entries look new at any pass, and each is an error at once.
    for place in 0..u64::from(depth) {
        machine.ram.set_word(base + place * 16 + 8, 1 << 48);
    }
    for _ in 0..u64::from(depth) {
        assert!(queue.reap(drop).is_err());
    }
    assert_eq!(queue.reap(drop).unwrap(), 0);
    controller.shutdown([queue]).unwrap();
}

#[test]
fn an_admin_queue_full_of_what_never_ended_refuses() {
    let machine = Machine::new(Model::default());
    let mut controller = machine.start().unwrap();
    machine.set_habit(Habit::SilentFrom(0));
    for _ in 0..15 {
        assert!(matches!(controller.namespace(1), Err(Error::Timeout { .. })));
    }
    assert!(matches!(controller.namespace(1), Err(Error::Full { in_flight: 15 })));
    // Their pages are the controller's until it is disabled.
    assert_eq!(machine.ram.live(), 2 + 15);
    machine.set_habit(Habit::None);
    machine.run();
    controller.namespace(1).unwrap();
    assert_eq!(machine.ram.live(), 2);
    controller.shutdown([]).unwrap();
    assert_eq!((machine.ram.live(), machine.ram.violations()), (0, vec![]));
}
