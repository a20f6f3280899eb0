use super::*;

/// Moves page 0 to another frame, and says whether the new one is seen.
fn page_0_moved(smmu: &TestSmmu) {
    set(smmu.tables(), 0x3000, 0x55_0000 | PAGE);
}

const OLD: Result<u64, FaultKind> = Ok(0x10_0000);
const NEW: Result<u64, FaultKind> = Ok(0x55_0000);

/// The argument of AArch64: VA\[55:12\], and the ASID in 63:48.
fn va(va: u64, asid: u64) -> u64 {
    asid << 48 | va >> 12 & ((1 << 44) - 1)
}

/// Page 0 is cached and then moved.
fn stale() -> TestSmmu {
    let smmu = attached();
    assert_eq!(read(&smmu, 0), OLD);
    page_0_moved(&smmu);
    smmu
}

#[test]
fn entries_are_used_until_the_sync_is_done() {
    let smmu = stale();
    assert_eq!(read(&smmu, 0), OLD);
    smmu.write64(cb(0, TLBIVA), va(0, 5));
    assert_eq!((read(&smmu, 0), smmu.pending_invalidations()), (OLD, 1));
    smmu.write32(cb(0, SYNC), 0);
    assert_eq!(read(&smmu, 0), OLD);
    assert_eq!(smmu.read32(cb(0, STATUS)), 1);
    assert_eq!(read(&smmu, 0), OLD);
    assert_eq!(smmu.read32(cb(0, STATUS)), 0);
    assert_eq!((read(&smmu, 0), smmu.pending_invalidations()), (NEW, 0));
    let counters = smmu.counters();
    assert_eq!((counters.commands.by_va, counters.commands.total()), (1, 1));
    assert_eq!((counters.bank_syncs, counters.global_syncs, counters.status_reads), (1, 0, 2));
}

#[test]
fn a_sync_does_nothing_without_an_invalidation() {
    let smmu = stale();
    sync(&smmu);
    assert_eq!(read(&smmu, 0), OLD);
}

#[test]
fn a_sync_takes_as_many_polls_as_asked_for() {
    for polls in [0, 3] {
        let smmu = stale();
        smmu.set_behaviour(Behaviour {
            sync: SyncCompletion::AfterPolls(polls),
            ..Default::default()
        });
        smmu.write32(cb(0, TLBIASID), 5);
        smmu.write32(cb(0, SYNC), 0);
        for _ in 0..polls {
            assert_eq!((read(&smmu, 0), smmu.read32(cb(0, STATUS))), (OLD, 1));
        }
        assert_eq!(smmu.read32(cb(0, STATUS)), 0);
        assert_eq!(read(&smmu, 0), NEW);
    }
}

#[test]
fn a_sync_covers_only_what_was_written_before_it() {
    let smmu = stale();
    smmu.write32(cb(0, SYNC), 0);
    smmu.write32(cb(0, TLBIASID), 5);
    assert_eq!((smmu.read32(cb(0, STATUS)), smmu.read32(cb(0, STATUS))), (1, 0));
    assert_eq!((read(&smmu, 0), smmu.pending_invalidations()), (OLD, 1));
}

#[test]
fn a_sync_of_a_bank_covers_that_bank_and_the_global_one_covers_all() {
    let smmu = stale();
    smmu.write32(cbar(1), 1 << 16);
    smmu.write64(cb(0, TLBIVA), va(0, 5));
    smmu.write32(cb(1, SYNC), 0);
    assert_eq!((smmu.read32(cb(1, STATUS)), smmu.read32(cb(1, STATUS))), (1, 0));
    assert_eq!(read(&smmu, 0), OLD);
    smmu.write32(GSYNC, 0);
    assert_eq!((smmu.read32(GSTATUS), smmu.read32(GSTATUS)), (1, 0));
    assert_eq!(read(&smmu, 0), NEW);

    // What is written to the global space is for the global sync.
    let smmu = stale();
    smmu.write32(TLBIVMID, 0);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), OLD);
    smmu.write32(GSYNC, 0);
    assert_eq!((smmu.read32(GSTATUS), smmu.read32(GSTATUS)), (1, 0));
    assert_eq!(read(&smmu, 0), NEW);
}

#[test]
fn an_invalidation_may_take_effect_before_its_sync() {
    let smmu = attached();
    smmu.set_behaviour(Behaviour { invalidations: TakesEffect::AtOnce, ..Default::default() });
    assert_eq!(read(&smmu, 0), OLD);
    smmu.write64(cb(0, TLBIVA), va(0, 5));
    // The old entry comes back between the invalidation and the change of the tables.
    assert_eq!(read(&smmu, 0), OLD);
    page_0_moved(&smmu);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), OLD);
}

#[test]
fn invalidations_of_another_asid_address_or_vmid_leave_the_entry() {
    let smmu = stale();
    stage1(&smmu, 1, 7, 5, 0x1000);
    smmu.write64(cb(0, TLBIVA), va(0, 6));
    smmu.write64(cb(0, TLBIVA), va(0x1000, 5));
    smmu.write32(cb(0, TLBIASID), 6);
    smmu.write32(cb(0, TLBIASID), 0x105);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), OLD);
    // Bank 1 has VMID 7.
    smmu.write64(cb(1, TLBIVA), va(0, 5));
    smmu.write32(cb(1, TLBIASID), 5);
    smmu.write32(cb(1, TLBIALL), 0);
    smmu.write32(TLBIVMID, 7);
    // The hypervisor's entries.
    smmu.write32(0x6c, 0);
    smmu.write32(GSYNC, 0);
    assert_eq!((smmu.read32(GSTATUS), smmu.read32(GSTATUS)), (1, 0));
    assert_eq!(read(&smmu, 0), OLD);
    assert_eq!(smmu.counters().commands.total(), 9);
}

#[test]
fn the_right_invalidations_forget_the_entry() {
    let ways: [fn(&TestSmmu); 9] = [
        |smmu| smmu.write64(cb(0, TLBIVA), va(0xfff, 5)),
        |smmu| smmu.write64(cb(0, TLBIVAL), va(0, 5)),
        |smmu| smmu.write64(cb(0, TLBIVAA), va(0, 99)),
        |smmu| smmu.write64(cb(0, 0x628), va(0, 99)),
        |smmu| smmu.write32(cb(0, TLBIASID), 5),
        |smmu| smmu.write32(cb(0, TLBIALL), 0),
        |smmu| smmu.write32(TLBIVMID, 0),
        |smmu| smmu.write32(TLBIALLNSNH, 0),
        // From another bank with the same VMID.
        |smmu| {
            stage1(smmu, 9, 0, 1, 0x1000);
            smmu.write64(cb(9, TLBIVA), va(0, 5));
        },
    ];
    for (number, way) in ways.iter().enumerate() {
        let smmu = stale();
        way(&smmu);
        smmu.write32(GSYNC, 0);
        assert_eq!((smmu.read32(GSTATUS), smmu.read32(GSTATUS)), (1, 0));
        assert_eq!((number, read(&smmu, 0)), (number, NEW));
        assert_eq!(smmu.counters().undefined_writes, 0);
    }
}

/// The table of level 3 is replaced by one at 0x9000, and page 2 there is elsewhere.
fn table_moved(smmu: &TestSmmu) {
    smmu.tables().add_table(PhysAddr::new(0x9000), 512);
    set(smmu.tables(), 0x9010, 0x66_0000 | PAGE);
    set(smmu.tables(), 0x2000, 0x9003);
}

#[test]
fn last_level_invalidations_leave_cached_tables() {
    let smmu = attached();
    assert_eq!(read(&smmu, 0), OLD);
    assert_eq!((smmu.cached_leaves(), smmu.cached_links()), (1, 2));
    table_moved(&smmu);
    smmu.write64(cb(0, TLBIVAL), va(0x2000, 5));
    smmu.write64(cb(0, 0x628), va(0x2000, 5));
    sync(&smmu);
    // Page 2 was never used, and yet the old table answers.
    assert_eq!(read(&smmu, 0x2000), Ok(0x10_2000));
    assert_eq!(smmu.counters().walks_from_link, 1);
    smmu.write64(cb(0, TLBIVA), va(0x2000, 5));
    sync(&smmu);
    assert_eq!(read(&smmu, 0x2000), Ok(0x66_0000));
}

#[test]
fn an_invalidation_by_va_forgets_the_tables_on_the_way_to_it() {
    let smmu = attached();
    assert_eq!(read(&smmu, 0), OLD);
    table_moved(&smmu);
    // Elsewhere in the gigabyte: the table of level 3 stays, that of level 2 goes.
    smmu.write64(cb(0, TLBIVA), va(0x4000_0000 - 0x1000, 5));
    sync(&smmu);
    assert_eq!((smmu.cached_leaves(), smmu.cached_links()), (1, 1));
    assert_eq!(read(&smmu, 0x2000), Ok(0x10_2000));
    // In the same 2 MiB: both go, and the leaf of page 0 stays.
    smmu.write64(cb(0, TLBIVA), va(0x2000, 5));
    sync(&smmu);
    assert_eq!((smmu.cached_leaves(), smmu.cached_links()), (1, 0));
}

#[test]
fn a_freed_table_behind_a_cached_one_is_an_external_abort() {
    let smmu = attached();
    assert_eq!(read(&smmu, 0), OLD);
    set(smmu.tables(), 0x2000, 0);
    smmu.tables().free_table(PhysAddr::new(0x3000));
    assert!(matches!(read(&smmu, 0x2000), Err(FaultKind::ExternalAbort(_))));
    // EF; PTWF, level 3.
    assert_eq!(smmu.read32(cb(0, FSR)) & 0x1ff, 1 << 4);
    assert_eq!(smmu.read32(cb(0, FSYNR0)), 1 << 10 | 3);
}

#[test]
fn absent_entries_are_not_cached() {
    let smmu = attached();
    assert_eq!(read_once(&smmu, 0x8000), Err(FaultKind::Translation));
    set(smmu.tables(), 0x3040, 0x44_0000 | PAGE);
    assert_eq!(read_once(&smmu, 0x8000), Ok(0x44_0000));
}

#[test]
fn a_leaf_that_refused_is_cached() {
    let smmu = attached();
    set(smmu.tables(), 0x3000, 0x10_0000 | READ_ONLY);
    let write = |smmu: &TestSmmu| {
        let outcome = paddr(smmu, 1, 0, Access::Write);
        smmu.write32(cb(0, FSR), u32::MAX);
        outcome.is_ok()
    };
    assert!(!write(&smmu));
    set(smmu.tables(), 0x3000, 0x10_0000 | PAGE);
    assert!(!write(&smmu));
    smmu.write64(cb(0, TLBIVAL), va(0, 5));
    sync(&smmu);
    assert!(write(&smmu));
}

#[test]
fn banks_of_one_asid_share_entries_and_those_of_two_do_not() {
    for (asid, second) in [(5, OLD), (6, NEW)] {
        let smmu = attached();
        assert_eq!(read(&smmu, 0), OLD);
        tables(smmu.tables(), 0x8000);
        set(smmu.tables(), 0xa000, 0x55_0000 | PAGE);
        stage1(&smmu, 1, 0, asid, 0x8000);
        stream(&smmu, 2, 1);
        assert_eq!(paddr(&smmu, 2, 0, Access::Read).map_err(|_| FaultKind::Translation), second);
    }
}

#[test]
fn a_bank_that_gets_other_tables_keeps_its_entries() {
    let smmu = attached();
    assert_eq!(read(&smmu, 0), OLD);
    tables(smmu.tables(), 0x8000);
    set(smmu.tables(), 0xa000, 0x55_0000 | PAGE);
    smmu.write64(cb(0, TTBR0), 5 << 48 | 0x8000);
    assert_eq!(read(&smmu, 0), OLD);
    smmu.write64(cb(0, TTBR0), 6 << 48 | 0x8000);
    assert_eq!(read(&smmu, 0), NEW);
}

#[test]
fn global_leaves_are_for_every_asid() {
    let smmu = attached();
    set(smmu.tables(), 0x3000, 0x10_0000 | PAGE & !(1 << 11));
    assert_eq!(read(&smmu, 0), OLD);
    page_0_moved(&smmu);
    smmu.write64(cb(0, TTBR0), 6 << 48 | 0x1000);
    assert_eq!(read(&smmu, 0), OLD);
    // By ASID they stay, by VA they go.
    smmu.write32(cb(0, TLBIASID), 6);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), OLD);
    smmu.write64(cb(0, TLBIVA), va(0, 6));
    sync(&smmu);
    assert_eq!(read(&smmu, 0), NEW);
}

#[test]
fn contiguous_groups_answer_as_one_entry_and_are_forgotten_page_by_page() {
    let smmu = attached();
    for page in 0..16 {
        set(smmu.tables(), 0x3000 + page * 8, (0x10_0000 + page * 0x1000) | PAGE | 1 << 52);
    }
    assert_eq!(read(&smmu, 0xf000), Ok(0x10_f000));
    assert_eq!((read(&smmu, 0x3000), smmu.cached_leaves()), (Ok(0x10_3000), 1));
    assert_eq!(smmu.access(1, Iova::new(0), Access::Read).unwrap().block.last().get(), 0xffff);
    (0..16).for_each(|page| set(smmu.tables(), 0x3000 + page * 8, 0));
    for left in (0..16).rev() {
        smmu.write64(cb(0, TLBIVAL), va(left << 12, 5));
        sync(&smmu);
        assert_eq!(smmu.cached_leaves(), usize::try_from(left).unwrap());
        assert!((0..left).all(|page| read(&smmu, page << 12).is_ok()));
    }
    assert_eq!(read(&smmu, 0), Err(FaultKind::Translation));
}

#[test]
fn eight_bit_asids_ignore_the_upper_half() {
    let smmu = attached();
    smmu.write32(cb(0, TCR2), 7 << 15 | 5);
    smmu.write64(cb(0, TTBR0), 0x305 << 48 | 0x1000);
    assert_eq!(read(&smmu, 0), OLD);
    page_0_moved(&smmu);
    smmu.write32(cb(0, TLBIASID), 0x905);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), NEW);
    set(smmu.tables(), 0x3000, 0x10_0000 | PAGE);
    smmu.write64(cb(0, TLBIVA), va(0, 0x905));
    sync(&smmu);
    assert_eq!(read(&smmu, 0), OLD);
}

#[test]
fn stage_2_is_invalidated_by_ipa() {
    let map = |smmu: &TestSmmu, frame| set(smmu.tables(), 0x3000, frame | PAGE2);
    let smmu = smmu();
    stage2(&smmu, 0, 3, 0x1000);
    stage2(&smmu, 1, 4, 0x1000);
    stream(&smmu, 1, 0);
    map(&smmu, 0x10_0000);
    assert_eq!(read(&smmu, 0), OLD);
    map(&smmu, 0x55_0000);
    // Another IPA, and another VMID.
    smmu.write64(cb(0, TLBIIPAS2), 1);
    smmu.write64(cb(1, TLBIIPAS2), 0);
    smmu.write32(GSYNC, 0);
    assert_eq!((smmu.read32(GSTATUS), smmu.read32(GSTATUS)), (1, 0));
    assert_eq!(read(&smmu, 0), OLD);
    // The last level alone leaves tables.
    smmu.write64(cb(0, TLBIIPAS2L), 0);
    sync(&smmu);
    assert_eq!((read(&smmu, 0), smmu.cached_links()), (NEW, 2));
    map(&smmu, 0x10_0000);
    smmu.write64(cb(0, TLBIIPAS2), 0);
    sync(&smmu);
    assert_eq!((smmu.cached_leaves(), smmu.cached_links()), (0, 0));
    let commands = smmu.counters().commands;
    assert_eq!((commands.by_ipa, commands.by_ipa_last), (3, 1));
}

#[test]
fn vmids_of_16_bits_are_in_cba2r() {
    let smmu = smmu_with(SmmuConfig { vmid16: true, ..Default::default() });
    smmu.write32(CR0, ENABLED | 1 << 31);
    stage1(&smmu, 0, 7, 5, 0x1000);
    smmu.write32(cba2r(0), 0x1207 << 16 | 1);
    stream(&smmu, 1, 0);
    assert_eq!(read(&smmu, 0), OLD);
    page_0_moved(&smmu);
    for (vmid, expected) in [(7, OLD), (0x1207, NEW)] {
        smmu.write32(TLBIVMID, vmid);
        smmu.write32(GSYNC, 0);
        assert_eq!((smmu.read32(GSTATUS), smmu.read32(GSTATUS)), (1, 0));
        assert_eq!(read(&smmu, 0), expected);
    }
}

#[test]
fn an_argument_in_two_halves_begins_with_the_lower_one() {
    let smmu = stale();
    smmu.write32(cb(0, TLBIVA) + 4, 5 << 16);
    assert_eq!(smmu.counters().commands.total(), 0);
    smmu.write32(cb(0, TLBIVA), 0);
    assert_eq!(smmu.counters().commands.by_va, 1);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), NEW);
    // The upper half was for one operation: this one has ASID 0.
    set(smmu.tables(), 0x3000, 0x10_0000 | PAGE);
    smmu.write32(cb(0, TLBIVA), 0);
    sync(&smmu);
    assert_eq!(read(&smmu, 0), NEW);
}

#[test]
fn a_sync_waits_for_accesses_in_flight() {
    let smmu = stale();
    smmu.write64(cb(0, TLBIVA), va(0, 5));
    smmu.write32(cb(0, SYNC), 0);
    let (entered, leave) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            smmu.access_with(1, Iova::new(0), Access::Read, |_| {
                entered.wait();
                leave.wait();
                done.store(true, std::sync::atomic::Ordering::SeqCst);
            })
            .unwrap();
        });
        entered.wait();
        let poller = scope.spawn(|| {
            while smmu.read32(cb(0, STATUS)) != 0 {}
            assert!(done.load(std::sync::atomic::Ordering::SeqCst));
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!poller.is_finished());
        leave.wait();
        poller.join().unwrap();
    });
    assert_eq!(read(&smmu, 0), NEW);
}
