//! Arm's stage 2: start levels, tables side by side, forced memory types, dirty state.

use dmaspan::io_pgtable::{
    Arena, ArmLpaeS2, ArmLpaeS2Config, DirtyTracking, Format, S2MemoryTypes,
};
use dmaspan::{IovaRange, PhysAddr, Prot};
use dmaspan_sim::format_suite;
use dmaspan_sim::suite::Subject;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS2Walker, ArmS2WalkRegisters, MemAttr};

use super::{WIDTHS, checked};

pub(crate) struct ArmS2<const G: u32>;

impl<const G: u32> Subject for ArmS2<G> {
    type Format = ArmLpaeS2<G>;
    type Walker = ArmLpaeS2Walker;

    fn configs() -> Vec<(String, Self::Format)> {
        let most = if G == 16 { 52 } else { 48 };
        let plain = ArmLpaeS2Config::new(40, 44);
        let singles = ArmLpaeS2::<G>::new(plain).unwrap().geometry().page_sizes;
        let page_sizes = Some(singles | ArmLpaeS2::<G>::CONTIGUOUS_SIZES);
        let (dirty, memory_types) = (DirtyTracking::Hardware, S2MemoryTypes::Forced);
        let config = |name: &str, config| (name.to_owned(), ArmLpaeS2::new(config).unwrap());
        let mut configs = vec![
            config("groups, dirty", ArmLpaeS2Config { page_sizes, dirty, ..plain }),
            config("forced types", ArmLpaeS2Config { memory_types, ..plain }),
            config("the most bits", ArmLpaeS2Config::new(most, most)),
            config("25 to 32 bits", ArmLpaeS2Config::new(25, 32)),
        ];
        // Start levels that are not chosen unless asked for.
        for (bits, level) in [(25, 3), (40, 0), (40, 1), (44, 1)] {
            let chosen = ArmLpaeS2Config::new(bits, 44);
            let asked = ArmLpaeS2Config { start_level: Some(level), ..chosen };
            let is_chosen = ArmLpaeS2::<G>::new(chosen).unwrap().start_level() == level;
            if let (Ok(format), false) = (ArmLpaeS2::new(asked), is_chosen) {
                configs.push((format!("{bits} bits from level {level}"), format));
            }
        }
        // Those of Linux's self-test.
        for (ias, oas) in WIDTHS {
            configs.push(config(&format!("{ias} to {oas} bits"), ArmLpaeS2Config::new(ias, oas)));
        }
        configs
    }

    fn walker(format: &Self::Format, root: PhysAddr, _top_level: u32) -> Self::Walker {
        let registers = format.registers(root);
        // MemAttr of write-back memory is 0b1111 where the types of both stages are combined.
        let mem_attr = match format.template(0, G, Prot::READ | Prot::CACHE) >> 2 & 0b1111 {
            0b1111 => MemAttr::Combined,
            _ => MemAttr::Forced,
        };
        ArmLpaeS2Walker::new(ArmS2WalkRegisters {
            vttbr: registers.vttbr,
            vtcr: registers.vtcr,
            mem_attr,
            ..Default::default()
        })
        .unwrap()
    }

    fn strict(walker: &Self::Walker, tables: &Arena, range: IovaRange) -> Result<(), String> {
        checked(walker, tables, range)
    }
}

format_suite!(granule_4k, ArmS2<12>);
format_suite!(granule_16k, ArmS2<14>);
format_suite!(granule_64k, ArmS2<16>);
