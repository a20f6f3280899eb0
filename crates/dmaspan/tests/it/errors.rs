//! Configurations that the architecture lacks, and memory that has no room.

use dmaspan::Errno;
use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ConfigError, PageTable};

#[test]
fn configurations_that_the_architecture_lacks_are_refused() {
    let new = |config| ArmLpaeS1::<12>::new(config).map(|_| ());
    let base = ArmLpaeS1Config::new(48, 48);
    for input_bits in [0, 12, 24, 49, 52, 64, u32::MAX] {
        let expected = ConfigError::InputBits { input_bits, supported: "25 to 48" };
        assert_eq!(new(ArmLpaeS1Config { input_bits, ..base }), Err(expected));
    }
    for output_bits in [0, 31, 39, 47, 49, 52, 64] {
        let supported = "32, 36, 40, 42, 44, 48, and 52 with the 64K granule";
        let expected = ConfigError::OutputBits { output_bits, supported };
        assert_eq!(new(ArmLpaeS1Config { output_bits, ..base }), Err(expected));
    }
    for page_sizes in [0, 1 << 21, 1 << 12 | 1 << 13] {
        let config = ArmLpaeS1Config { page_sizes: Some(page_sizes), ..base };
        assert!(matches!(new(config), Err(ConfigError::PageSizes { .. })));
    }
    let other = ArmLpaeS1::<13>::new(base).map(|_| ());
    assert_eq!(
        other,
        Err(ConfigError::Granule { granule_lg2: 13, supported: "2^12, 2^14 and 2^16" })
    );
    assert!(ArmLpaeS1::<16>::new(ArmLpaeS1Config::new(52, 52)).is_ok());
}

#[test]
fn an_arena_too_small_for_the_root_is_an_error() {
    let small = dmaspan_sim::Arena::new(PhysAddr::new(1 << 40), 1 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 36)).unwrap();
    let error = PageTable::new(format, small).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
}
