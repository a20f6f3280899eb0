//! Configurations that the architecture lacks, and memory that has no room.

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, ArmLpaeS1, ArmLpaeS1Config, ConfigError, DirtyTracking, Entry, Error,
    Format, Geometry, Groups, PageTable,
};
use dmaspan::{Errno, PhysAddr, Prot};
use dmaspan_sim::mock::MockFormat;

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
fn a_number_of_levels_that_there_is_not_is_named_as_that() {
    let config = AmdV1Config { first_levels: 7, ..AmdV1Config::new(64, 52) };
    let error = AmdV1::new(config).unwrap_err();
    assert_eq!(error.to_string(), "the tree cannot have 7 levels: the format has 1 to 6");
    assert_eq!(error.errno(), Errno::EINVAL);
}

#[test]
fn an_arena_too_small_for_the_root_is_an_error() {
    let small = dmaspan::io_pgtable::Arena::new(PhysAddr::new(1 << 40), 1 << 20);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 36)).unwrap();
    let error = PageTable::new(format, small).unwrap_err();
    assert_eq!(error.errno(), Errno::ENOMEM);
}

/// A format of somebody else's, with page sizes of its own.
#[derive(Debug)]
struct Sizes(MockFormat, u64);

// SAFETY: all entries are the inner format's. The page sizes are what the test is about.
unsafe impl Format for Sizes {
    type Word = u64;
    const GRANULE_LG2: u32 = MockFormat::GRANULE_LG2;
    const LG2_ENTRIES: u32 = MockFormat::LG2_ENTRIES;
    const GROUPS: Groups = MockFormat::GROUPS;

    fn geometry(&self) -> Geometry {
        Geometry { page_sizes: self.1, ..self.0.geometry() }
    }

    fn template(&self, level: u32, lg2: u32, prot: Prot) -> u64 {
        self.0.template(level, lg2, prot)
    }

    fn leaf(&self, template: u64, paddr: PhysAddr) -> u64 {
        self.0.leaf(template, paddr)
    }

    fn advance(&self, leaf: u64, bytes: u64) -> u64 {
        self.0.advance(leaf, bytes)
    }

    fn link(&self, level: u32, table: PhysAddr) -> u64 {
        self.0.link(level, table)
    }

    fn decode(&self, level: u32, word: u64) -> Entry {
        self.0.decode(level, word)
    }

    fn prot(&self, level: u32, leaf: u64) -> Prot {
        self.0.prot(level, leaf)
    }
}

#[test]
fn a_format_whose_smallest_page_is_not_its_granule_has_no_table() {
    let tables = crate::common::arena();
    let new = |page_sizes| {
        let inner = MockFormat::new(40, DirtyTracking::Off).unwrap();
        PageTable::new(Sizes(inner, page_sizes), tables.clone()).map(|_| ())
    };
    let granule = 1 << 11;
    for page_sizes in [0, 1 << 19, 1 << 19 | 1 << 27, 1 << 10, granule | 1 << 10] {
        let expected = Error::PageSize { page_size: granule, page_sizes };
        assert_eq!(new(page_sizes), Err(expected), "{page_sizes:#x}");
        assert_eq!(tables.tables(), 0);
    }
    assert_eq!(new(granule | 1 << 19), Ok(()));
}
