//! Pictures of trees, beside how the manuals draw them.

use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, Arena, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS1Config, ArmLpaeS2,
    ArmLpaeS2Config, ArmV7s, ArmV7sConfig, ArmV7sVariant, DirtyTracking, ExecuteDisable, Format,
    PageTable, Riscv, RiscvConfig, RiscvMode, RiscvStage, VtdSs, VtdSsConfig, X86_64, X86_64Config,
};
use dmaspan::{Iova, PhysAddr, Prot};

use crate::common::{PROT, range, span};

/// Large leaves, pages behind them in the same memory, a page alone, and a group where there are
/// any: where, from where, how long and with which permissions.
const MAPPED: [(u64, u64, u64, Prot); 3] = [
    (0x4000_0000, 0x8000_0000, 0x40_3000, PROT),
    (0x4040_8000, 0x9000_0000, 0x1000, Prot::READ.union(Prot::NOEXEC)),
    (0x4041_0000, 0x9001_0000, 0x1_0000, PROT),
];

#[track_caller]
fn table<F: Format>(format: F, mapped: &[(u64, u64, u64, Prot)]) -> PageTable<F, Arena> {
    let mut table = PageTable::new(format, Arena::default()).unwrap();
    for &(iova, paddr, len, prot) in mapped {
        table.whole().map_spans(Iova::new(iova), &[span(paddr, len)], prot).unwrap();
    }
    table
}

fn picture<F: Format>(format: F) -> String {
    table(format, &MAPPED).dump().to_string()
}

/// Each line was looked up in the manual that the format's file names: the names and numbers of
/// levels, the names of entries, and each bit of the words.
#[test]
fn the_picture_of_each_format_is_as_its_manual_draws_it() {
    let s1 = ArmLpaeS1Config {
        page_sizes: Some(ArmLpaeS1::<12>::PAGE_SIZES | ArmLpaeS1::<12>::CONTIGUOUS_SIZES),
        dirty: DirtyTracking::Hardware,
        ..ArmLpaeS1Config::new(48, 48)
    };
    let long = ArmLpaeS1Config::new(32, 40);
    let mediatek = ArmV7sConfig { variant: ArmV7sVariant::MediaTek, ..ArmV7sConfig::new(34, 35) };
    let x86 = X86_64Config {
        execute_disable: ExecuteDisable::Enabled,
        dirty: DirtyTracking::Hardware,
        ..X86_64Config::new(57, 48)
    };
    let sv39 = RiscvConfig {
        page_sizes: Some(1 << 12 | 1 << 16 | 1 << 21 | 1 << 30),
        ..RiscvConfig::new(RiscvMode::Sv39, 56)
    };
    let sv48x4 = RiscvConfig { stage: RiscvStage::Second, ..RiscvConfig::new(RiscvMode::Sv48, 56) };
    let pictures = [
        picture(ArmLpaeS1::<12>::new(s1).unwrap()),
        picture(ArmLpaeS2::<12>::new(ArmLpaeS2Config::new(40, 40)).unwrap()),
        picture(ArmLpae32S1::new(long).unwrap()),
        picture(ArmLpae32S2::new(ArmLpaeS2Config::new(32, 40)).unwrap()),
        picture(ArmV7s::new(ArmV7sConfig::new(32, 32)).unwrap()),
        {
            let mapped = [(0x1_4000_0000, 0x7_8000_0000, 0x30_1000, PROT)];
            table(ArmV7s::new(mediatek).unwrap(), &mapped).dump().to_string()
        },
        picture(VtdSs::new(VtdSsConfig::new(48, 48)).unwrap()),
        picture(X86_64::new(x86).unwrap()),
        picture(AmdV1::new(AmdV1Config::new(48, 48)).unwrap()),
        picture(Riscv::new(sv39).unwrap()),
        picture(Riscv::new(sv48x4).unwrap()),
    ];
    let pictures = pictures.join("\n");
    assert_eq!(pictures, include_str!("dump.txt"), "what is drawn:\n{pictures}");
}

#[test]
fn the_lines_for_programs_are_as_documented() {
    let format = X86_64::new(X86_64Config::new(48, 46)).unwrap();
    let table = table(format, &[(0x20_0000, 0x8000_0000, 0x20_2000, Prot::READ_WRITE)]);
    let expected = "\
tree title=x86-64_page_tables first=0x0 last=0x7fffffffffff
table level=3 at=0x40000000
link level=3 index=0 word=0x40003027 first=0x0 last=0x7fffffffff table=0x40003000
link level=2 index=0 word=0x40002027 first=0x0 last=0x3fffffff table=0x40002000
leaf level=1 index=1 entries=1 word=0x800000e7 first=0x200000 last=0x3fffff paddr=0x80000000 \
size=0x200000 prot=READ|WRITE|CACHE
link level=1 index=2 word=0x40001027 first=0x400000 last=0x5fffff table=0x40001000
leaf level=0 index=0 entries=2 word=0x80200067 first=0x400000 last=0x401fff paddr=0x80200000 \
size=0x1000 prot=READ|WRITE|CACHE
";
    assert_eq!(table.dump().lines().to_string(), expected);
    // A part of it, which begins in a leaf, and one beside all that can be mapped.
    let part = table.dump().of(range(0x3f_f000, 0x2000)).lines().to_string();
    let expected = "\
tree title=x86-64_page_tables first=0x3ff000 last=0x400fff
table level=3 at=0x40000000
link level=3 index=0 word=0x40003027 first=0x3ff000 last=0x400fff table=0x40003000
link level=2 index=0 word=0x40002027 first=0x3ff000 last=0x400fff table=0x40002000
leaf level=1 index=1 entries=1 word=0x800000e7 first=0x3ff000 last=0x3fffff paddr=0x801ff000 \
size=0x200000 prot=READ|WRITE|CACHE
link level=1 index=2 word=0x40001027 first=0x400000 last=0x400fff table=0x40001000
leaf level=0 index=0 entries=1 word=0x80200067 first=0x400000 last=0x400fff paddr=0x80200000 \
size=0x1000 prot=READ|WRITE|CACHE
";
    assert_eq!(part, expected);
    let beside = table.dump().of(range(1 << 48, 0x1000)).lines().to_string();
    assert_eq!(beside.lines().count(), 2, "{beside}");
}

/// A device wrote into the tables: a word that no operation wrote, a link to what is no table, and
/// one to a table that is linked elsewhere, too.
#[test]
fn a_corrupt_entry_is_drawn_as_that_and_all_else_around_it() {
    let format = X86_64::new(X86_64Config::new(48, 46)).unwrap();
    let table = table(format, &[(0, 0x8000_0000, 0x3000, PROT), (1 << 21, 0, 0x1000, PROT)]);
    let arena = table.memory();
    let lines = table.dump().lines().to_string();
    let root = table.root();
    let directory = lines.lines().filter_map(|line| line.split_once(" table=")).nth(1).unwrap().1;
    let directory = u64::from_str_radix(directory.trim_start_matches("0x"), 16).unwrap();
    let set = |paddr: u64, new: u64| {
        let paddr = PhysAddr::new(paddr);
        let old = arena.load::<u64>(paddr).unwrap();
        // SAFETY: nobody else reads the table, and its walks follow what they find.
        let promise = unsafe { dmaspan::Promise::new() };
        arena.exchange(promise, paddr, old, new).unwrap();
    };
    let first_link = arena.load::<u64>(PhysAddr::new(directory)).unwrap();
    set(directory + 8, 0x7777_7027);
    set(directory + 16, first_link);
    set(root.get() + 8, 0x8000_0000_0000_0002);
    let picture = table.dump().to_string();
    let corrupt: Vec<_> = picture.lines().filter(|line| line.contains("corrupt")).collect();
    let [inner, outer] = corrupt[..] else { panic!("{picture}") };
    assert!(inner.trim_start().starts_with("[0] corrupt") && inner.ends_with(": 0x200000"));
    assert!(outer.starts_with("  [1] corrupt 0x8000000000000002: 0x8000000000"), "{outer}");
    let twice = picture.lines().filter(|line| line.contains("[0-2] PTE")).count();
    assert_eq!(twice, 2, "{picture}");
}
