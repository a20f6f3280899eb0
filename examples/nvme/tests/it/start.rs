//! Starting, identifying, making and deleting queues, shutting down.

use dmaspan_nvme::{Awaited, Controller, Error, IoQueue, Opcode, QueueConfig, Sgls};

use crate::access::{Machine, gave_up_in_time};
use crate::fake::{Habit, Model};

#[test]
fn a_controller_says_what_it_is() {
    let machine = Machine::new(Model { mdts: 5, sgls: 2, ..Model::default() });
    let mut controller = machine.start().unwrap();
    let info = controller.info();
    assert_eq!((info.serial.as_str(), info.model.as_str()), ("SERIAL-7", "A fake controller"));
    assert_eq!((info.max_transfer, info.sgls), (Some(128 << 10), Sgls::Dwords));
    let namespace = controller.namespace(1).unwrap();
    assert_eq!((namespace.id(), namespace.blocks(), namespace.block_bytes()), (1, 8192, 512));
    let error = controller.namespace(2).unwrap_err();
    assert!(matches!(error, Error::NoNamespace { id: 2 }), "{error}");
    controller.shutdown([]).unwrap();
    assert_eq!((machine.ram.live(), machine.ram.violations()), (0, vec![]));
}

#[test]
fn the_block_format_is_the_one_in_use() {
    // Format 18, whose index has bits in both parts of FLBAS.
    for (flbas, block_lg2) in [(3, 12), (1 << 5 | 2, 16), (0, 9)] {
        let model = Model { flbas, block_lg2, blocks: 64, ..Model::default() };
        let mut controller = Machine::new(model).start().unwrap();
        assert_eq!(controller.namespace(1).unwrap().block_bytes(), 1 << block_lg2);
    }
}

#[test]
fn blocks_with_metadata_or_of_no_sensible_size_are_refused() {
    for (lg2, bytes) in [(9, 8), (0, 0), (8, 0), (32, 0), (255, 0)] {
        let machine = Machine::new(Model { blocks: 8, ..Model::default() });
        let mut controller = machine.start().unwrap();
        let mut fake = machine.fake.lock();
        (fake.model.block_lg2, fake.model.metadata) = (lg2, bytes);
        drop(fake);
        let error = controller.namespace(1).unwrap_err();
        let Error::BlockFormat { id: 1, block_lg2, metadata } = error else { panic!("{error}") };
        assert_eq!((block_lg2, metadata), (lg2.into(), bytes.into()));
    }
}

#[test]
fn queues_are_as_many_and_as_deep_as_the_controller_grants() {
    let machine = Machine::new(Model { queues: 2, ..Model::default() });
    let mut controller = machine.start().unwrap();
    for depth in [0, 1, 65] {
        let error = controller.create_queue(QueueConfig::new(depth)).unwrap_err();
        assert!(matches!(error, Error::Depth { max: 64, .. }), "{error}");
    }
    let error = controller.create_queue(QueueConfig { list_pages: 5, ..QueueConfig::new(2) });
    assert!(matches!(error, Err(Error::ListPages { pages: 5, max: 4 })));
    let first = controller.create_queue(QueueConfig::new(2)).unwrap();
    let second = controller.create_queue(QueueConfig::new(64)).unwrap();
    let error = controller.create_queue(QueueConfig::new(2)).unwrap_err();
    assert!(matches!(error, Error::NoQueue { count: 2 }), "{error}");
    controller.delete_queue(first).unwrap();
    let third = controller.create_queue(QueueConfig::new(3)).unwrap();
    controller.shutdown([second, third]).unwrap();
    assert_eq!((machine.ram.live(), machine.ram.violations()), (0, vec![]));
}

#[test]
fn a_queue_that_is_refused_leaves_nothing() {
    let machine = Machine::new(Model { queues: 1, ..Model::default() });
    let mut controller = machine.start().unwrap();
    let before = machine.ram.live();
    for (opcode, said) in [(5, Opcode::CreateCompletionQueue), (1, Opcode::CreateSubmissionQueue)] {
        machine.set_habit(Habit::Refuses { admin: true, opcode, status: 0x4102 });
        let error = controller.create_queue(QueueConfig::new(8)).unwrap_err();
        let Error::Command { opcode, status } = error else { panic!("{error}") };
        assert_eq!((opcode, status.kind(), status.code(), status.is_final()), (said, 1, 2, true));
        assert_eq!(machine.ram.live(), before);
    }
    machine.set_habit(Habit::None);
    let queue = controller.create_queue(QueueConfig::new(8)).unwrap();
    controller.shutdown([queue]).unwrap();
    assert_eq!(machine.ram.live(), 0);
}

#[test]
fn what_never_starts_is_reported_in_bounded_time_and_leaves_nothing() {
    for (habit, model) in [
        (Habit::NeverReady, Model::default()),
        (Habit::FatalWhenEnabled, Model::default()),
        (Habit::SilentFrom(0), Model::default()),
        (Habit::Gone, Model::default()),
    ] {
        let machine = Machine::new(model);
        machine.set_habit(habit);
        let error = machine.start().unwrap_err();
        match habit {
            Habit::NeverReady => {
                assert!(matches!(error, Error::Timeout { what: Awaited::Enabled, .. }), "{error}");
            }
            Habit::FatalWhenEnabled => {
                assert!(matches!(error, Error::Fatal { csts: 2 }), "{error}")
            }
            Habit::SilentFrom(_) => {
                let what = Awaited::Completion { queue: 0, command: 0 };
                assert!(matches!(error, Error::Timeout { what: w, .. } if w == what), "{error}");
            }
            _ => assert!(matches!(error, Error::Gone), "{error}"),
        }
        // What its status says is no matter of time.
        let is_said = matches!(habit, Habit::Gone | Habit::FatalWhenEnabled);
        assert_eq!(gave_up_in_time(&machine), !is_said, "{habit:?}");
        assert_eq!((machine.ram.live(), machine.ram.violations()), (0, vec![]));
    }
}

#[test]
fn what_this_driver_cannot_use_is_refused() {
    let usual = Model::default().cap;
    // Doorbells 128 KiB apart, in 8 KiB of registers.
    let error = Machine::new(Model { cap: usual | 15 << 32, ..Model::default() }).start();
    assert!(matches!(error, Err(Error::Registers { needed: 0x2_1004, len: 0x2000 })), "{error:?}");
    let error = Machine::new(Model { cap: usual & !(1 << 37), ..Model::default() }).start();
    assert!(matches!(error, Err(Error::CommandSet { .. })), "{error:?}");
}

#[test]
fn what_is_not_disabled_keeps_its_memory() {
    let machine = Machine::new(Model::default());
    let (controller, _, queue) = machine.ready(QueueConfig::new(8));
    let before = machine.ram.live();
    machine.set_habit(Habit::NeverDisabled);
    let error = controller.shutdown([queue]).unwrap_err();
    assert!(matches!(error, Error::Timeout { what: Awaited::Disabled, .. }), "{error}");
    assert_eq!(machine.ram.live(), before);
}

#[test]
fn a_shutdown_that_takes_too_long_is_said_and_the_memory_freed() {
    let machine = Machine::new(Model::default());
    let (controller, _, queue) = machine.ready(QueueConfig::new(8));
    machine.set_habit(Habit::NeverShutDown);
    let error = controller.shutdown([queue]).unwrap_err();
    assert!(matches!(error, Error::Timeout { what: Awaited::ShutDown, .. }), "{error}");
    assert_eq!(machine.ram.live(), 0);
}

#[test]
fn what_is_dropped_leaks() {
    let machine = Machine::new(Model::default());
    let (controller, _, queue) = machine.ready(QueueConfig::new(8));
    let before = machine.ram.live();
    drop((controller, queue));
    assert_eq!(machine.ram.live(), before);
}

#[test]
fn a_queue_of_another_controller_is_refused() {
    let (one, other) = (Machine::new(Model::default()), Machine::new(Model::default()));
    let (mut controller, _, queue) = one.ready(QueueConfig::new(8));
    let (theirs, _, their_queue) = other.ready(QueueConfig::new(8));
    assert!(matches!(controller.delete_queue(their_queue), Err(Error::Foreign)));
    controller.shutdown([queue]).unwrap();
    theirs.shutdown([]).unwrap();
    // The queue is leaked: nobody knows whether its controller uses it.
    assert_eq!((one.ram.live(), other.ram.live()), (0, 3));
}

/// Another thread can have the queue.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<IoQueue<Machine>>();
    is_send::<Controller<Machine>>();
};
