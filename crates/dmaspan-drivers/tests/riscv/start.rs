//! Bringing hardware up, and down.

use dmaspan::PhysAddr;
use dmaspan::iommu::Port as _;
use dmaspan_drivers::Error;
use dmaspan_drivers::riscv::{Capabilities, RiscvInterrupts, RiscvIommuConfig};

use crate::hardware::{
    BASE_FORMAT, FIRMWARE_DDTP, Fake, Fault, MSI_FLAT, SECOND, Tables, domain, stream,
};
use crate::host::PATIENCE;

const CONFIG: RiscvIommuConfig = RiscvIommuConfig {
    device_id_bits: 16,
    commands_lg2: 8,
    faults_lg2: 7,
    walks: dmaspan::Coherency::Coherent,
    interrupts: RiscvInterrupts::Off,
};

#[test]
fn everything_that_firmware_left_is_forgotten_while_the_hardware_is_off() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.start(CONFIG).unwrap();
    let fence = [2 | 1 << 12 | 1 << 13, 0];
    let all = [[3, 0], fence, [1, 0], fence, [1 | 1 << 7, 0], fence];
    assert_eq!(fake.take(), all);
    assert_eq!(fake.state.lock().ddtp & 0xf, 3, "two levels");
    let features = *iommu.features();
    assert_eq!((features.output_bits, features.device_id_bits), (46, 16));
    assert!(features.capabilities.contains(Capabilities::SV57 | Capabilities::SV57X4));
    // Commands that hardware without a stage does not have are not used.
    for (stage, rest) in [(0xe << 8, &all[4..]), (0xe << 16, &all[2..4])] {
        let fake = Fake::new(BASE_FORMAT & !stage);
        fake.start(CONFIG).unwrap();
        assert_eq!(fake.take(), [&all[..2], rest].concat());
    }
}

#[test]
fn the_fewest_levels_that_hardware_takes_are_used() {
    for (bits, format, modes, levels) in [
        (7, BASE_FORMAT, 0b11101, Some(1)),
        (7, BASE_FORMAT, 0b11001, Some(2)),
        (7, BASE_FORMAT, 0b10001, Some(3)),
        (8, BASE_FORMAT, 0b11101, Some(2)),
        (7, BASE_FORMAT | MSI_FLAT, 0b11101, Some(2)),
        (16, BASE_FORMAT | MSI_FLAT, 0b11101, Some(3)),
        (16, BASE_FORMAT, 0b00101, None),
        (24, BASE_FORMAT, 0b01101, None),
    ] {
        let fake = Fake::new(format);
        fake.state.lock().modes = modes;
        let started = fake.start(RiscvIommuConfig { device_id_bits: bits, ..CONFIG });
        assert_eq!(started.as_ref().ok().map(|iommu| iommu.features().directory_levels), levels);
        if levels.is_none() {
            assert!(matches!(started, Err(Error::Unsupported { .. })));
            assert_eq!((fake.state.lock().ddtp & 0xf, fake.host.count()), (0, 0));
        }
    }
}

#[test]
fn what_cannot_be_set_up_is_refused() {
    let refused = |capabilities, config| Fake::new(capabilities).start(config).unwrap_err();
    for config in [
        RiscvIommuConfig { device_id_bits: 25, ..CONFIG },
        RiscvIommuConfig { commands_lg2: 1, ..CONFIG },
        RiscvIommuConfig { commands_lg2: 16, ..CONFIG },
        RiscvIommuConfig { faults_lg2: 0, ..CONFIG },
        RiscvIommuConfig { faults_lg2: u32::MAX, ..CONFIG },
    ] {
        assert!(matches!(refused(BASE_FORMAT, config), Error::Config { .. }), "{config:?}");
    }
    let message = RiscvInterrupts::Message { address: PhysAddr::new(0x2800_0000), data: 7 };
    for (capabilities, config) in [
        (BASE_FORMAT & !0xf0 | 0x20, CONFIG),
        (BASE_FORMAT & !(0x3f << 32), CONFIG),
        (
            BASE_FORMAT & !(3 << 28),
            RiscvIommuConfig { interrupts: RiscvInterrupts::Wire, ..CONFIG },
        ),
        (BASE_FORMAT ^ 3 << 28, RiscvIommuConfig { interrupts: message, ..CONFIG }),
    ] {
        assert!(matches!(refused(capabilities, config), Error::Unsupported { .. }), "{config:?}");
    }
    assert!(matches!(refused(u64::MAX, CONFIG), Error::Hardware(_)));
    // Hardware that is big-endian, or has 32-bit guests, whatever is written.
    for fixed in [1, 4] {
        let fake = Fake::new(BASE_FORMAT);
        fake.state.lock().fctl_fixed = fixed;
        let error = Error::Unsupported {
            what: "little-endian tables with 64-bit entries",
            value: fixed.into(),
        };
        assert_eq!(fake.start(CONFIG).unwrap_err(), error);
    }
    // A directory that is elsewhere than was asked for.
    let fake = Fake::new(BASE_FORMAT);
    fake.state.lock().ddtp_kept = !0x3ff << 16;
    assert!(matches!(fake.start(CONFIG), Err(Error::Unsupported { .. })));
    assert_eq!((fake.state.lock().ddtp & 0xf, fake.host.count()), (0, 0));
}

#[test]
fn interrupts_are_set_up_as_asked_for() {
    let fake = Fake::new(BASE_FORMAT);
    let address = PhysAddr::new(0x1_2800_0000);
    let interrupts = RiscvInterrupts::Message { address, data: 7 };
    let iommu = fake.start(RiscvIommuConfig { interrupts, ..CONFIG }).unwrap();
    assert_eq!(fake.state.lock().ipsr, 0, "what firmware left is not an interrupt of ours");
    assert_eq!(fake.state.lock().msi, [0x2800_0000, 1, 7, 0]);
    assert_eq!(fake.state.lock().fctl, 0);
    assert_eq!(fake.state.lock().csr[1], 1 << 16 | 3);
    drop(iommu);
    let interrupts = RiscvInterrupts::Wire;
    let iommu = fake.start(RiscvIommuConfig { interrupts, ..CONFIG }).unwrap();
    assert_eq!(fake.state.lock().fctl, 2);
    assert_eq!(fake.state.lock().csr[1], 1 << 16 | 3);
    drop(iommu);
}

#[test]
fn no_allocation_that_fails_leaves_anything() {
    for config in [CONFIG, RiscvIommuConfig { device_id_bits: 24, ..CONFIG }] {
        for n in 1.. {
            let fake = Fake::new(BASE_FORMAT);
            fake.host.fail(n);
            match fake.start(config) {
                Err(Error::NoMemory(_)) => {
                    assert_eq!((fake.host.count(), fake.state.lock().ddtp & 0xf), (0, 0));
                }
                Err(error) => panic!("{error}"),
                Ok(iommu) => {
                    // The same for the tables of a stream.
                    for n in 1.. {
                        fake.host.fail(n.into());
                        let id = 0x100 * n;
                        match iommu.stream::<Tables>(id, Default::default()) {
                            Err(Error::NoMemory(_)) => assert_eq!(fake.context(id), [0; 4]),
                            Err(error) => panic!("{error}"),
                            Ok(claimed) => {
                                claimed.translate(&domain(&iommu, SECOND)).unwrap();
                                assert_eq!(fake.context(id)[0], 1);
                                break;
                            }
                        }
                        fake.host.fail(0);
                        drop(stream(&iommu, id));
                    }
                    break;
                }
            }
        }
    }
}

#[test]
fn dropped_hardware_is_off_and_memory_that_it_may_read_is_kept() {
    let fake = Fake::new(BASE_FORMAT);
    let iommu = fake.start(CONFIG).unwrap();
    drop(stream(&iommu, 1));
    assert!(fake.host.count() > 3);
    drop(iommu);
    assert_eq!((fake.state.lock().ddtp & 0xf, fake.host.count()), (0, 0));
    assert_eq!(fake.state.lock().csr, [0; 3]);

    let iommu = fake.start(CONFIG).unwrap();
    fake.state.lock().modes = 1 << 3;
    fake.state.lock().ddtp_busy = true;
    fake.host.polls();
    drop(iommu);
    assert!(fake.host.count() >= 3);
    assert_eq!(fake.host.polls(), PATIENCE);
}

#[test]
fn hardware_that_does_not_answer_is_an_error_in_bounded_time() {
    let cases: [(Fault, &str); 8] = [
        (Fault::Gone, "the IOMMU is gone: its registers read as all ones"),
        (Fault::Reads(72, 1 << 17), "the IOMMU did not turn off"),
        (Fault::Reads(72, 1 << 16), "the IOMMU did not turn off"),
        (Fault::Reads(72, 0), "the command queue did not start"),
        (Fault::Reads(76, 0), "the fault queue did not start"),
        (Fault::Reads(76, u32::MAX), "the IOMMU is gone: its registers read as all ones"),
        (Fault::Stuck, "the IOMMU did not complete its commands in time"),
        (
            Fault::Reads(16, u32::try_from(FIRMWARE_DDTP & 0xffff_ffff).unwrap()),
            "the IOMMU did not turn off",
        ),
    ];
    for (fault, what) in cases {
        let fake = Fake::new(BASE_FORMAT);
        fake.set(fault);
        match fake.start(CONFIG).unwrap_err() {
            Error::Hardware(error) => assert_eq!(error.what, what, "{fault:?}"),
            error => panic!("{fault:?}: {error}"),
        }
        assert!(fake.host.polls() <= 4 * PATIENCE);
    }
    let fake = Fake::new(BASE_FORMAT);
    fake.state.lock().ddtp_busy = true;
    let busy = "ddtp stayed busy";
    assert!(matches!(fake.start(CONFIG), Err(Error::Hardware(error)) if error.what == busy));
}
