//! Ranges in the caches of others, and the edges of apertures and granules.

use super::*;

/// Half magazines of one range: two in the magazine, and one in the depot.
#[test]
fn what_lies_in_the_depot_alone_is_collected() {
    const LARGE: u64 = 1024;
    let space = space(range(LARGE * PAGE, 3 * LARGE * PAGE), 1);
    let all = [(); 3].map(|()| space.alloc(pages(LARGE, u64::MAX)).unwrap());
    all.into_iter().for_each(|iovas| space.free(iovas).unwrap());
    assert_eq!(space.stats().cached, 3);
    let _two = [(); 2].map(|()| space.alloc(pages(LARGE, u64::MAX)).unwrap());
    assert_eq!(space.stats().cached, 1);
    assert_eq!(space.alloc(pages(4, u64::MAX)).unwrap().range().start().get() % PAGE, 0);
}

#[test]
fn what_a_cpu_got_from_the_depot_is_collected_too() {
    const PAGES: u64 = 1 << 14;
    let space = space(range(PAGE, PAGES * PAGE), 2);
    let all: Vec<_> = (0..PAGES).map(|_| space.alloc(pages(1, u64::MAX)).unwrap()).collect();
    all.into_iter().for_each(|iovas| space.free(iovas).unwrap());
    assert!(space.stats().cached > 2 * 64, "the depot has some");
    CPU.set(1);
    let one = space.alloc(pages(1, u64::MAX)).unwrap();
    CPU.set(0);
    let whole = Request { align: Align::To(1), ..pages(PAGES, u64::MAX) };
    assert!(space.alloc(whole).is_err());
    assert_eq!(space.stats().cached, 0);
    space.free(one).unwrap();
    assert_eq!(space.alloc(whole).unwrap().range(), space.aperture());
}

/// More CPUs than a word has bits, each with something.
#[test]
fn caches_of_many_cpus_are_collected() {
    const CPUS: u64 = 130;
    let space = space(range(PAGE, CPUS * PAGE), 130);
    let all: Vec<_> = (0..CPUS).map(|_| space.alloc(pages(1, u64::MAX)).unwrap()).collect();
    for (cpu, iovas) in all.into_iter().enumerate() {
        CPU.set(cpu);
        space.free(iovas).unwrap();
    }
    all_is_free(&space, 0);
}

#[test]
fn an_aperture_within_another_takes_nothing_from_it() {
    let apertures = [range(0x2000, PAGE), range(PAGE, 4 * PAGE), range(0x8000, PAGE)];
    let space = Space::with_apertures(&apertures, 12, 1, Machine).unwrap();
    let starts = [(); 5].map(|()| space.alloc(pages(1, u64::MAX)).unwrap().range().start().get());
    assert_eq!(starts, [0x1000, 0x2000, 0x3000, 0x4000, 0x8000]);
    assert!(space.alloc(pages(1, u64::MAX)).is_err());
}

#[test]
fn an_aperture_without_a_whole_granule_is_refused() {
    let top = range(u64::MAX - 0x7ff, 0x800);
    for aperture in [range(0, 1), range(0, 0x800), range(0, PAGE), range(0x1800, 0x800), top] {
        let refused = Space::new(aperture, 12, 1, Machine).unwrap_err();
        assert_eq!(refused, Error::Config { aperture, granule_lg2: 12 });
    }
}

#[test]
fn a_given_range_of_part_of_a_granule_is_refused() {
    let space = space(range(PAGE, 16 * PAGE), 1);
    for range in [range(2 * PAGE, 1), range(2 * PAGE + 1, PAGE - 1), range(2 * PAGE, PAGE + 1)] {
        assert_eq!(space.alloc_at(range), Err(Error::Unaligned { range, granule: PAGE }));
    }
    assert_eq!(space.stats().live, 0);
}

/// The whole 64-bit space but IOVA 0, with granules of each size.
#[test]
fn the_last_granule_of_64_bits_is_handed_out() {
    for granule_lg2 in [0, 11, 12, 14, 16, 30, 62] {
        let all = IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap();
        let space = Space::new(all, granule_lg2, 1, Machine).unwrap();
        let granule = space.granule();
        let request = Request { bytes: 1, align: Align::Natural, limit: Iova::new(u64::MAX) };
        let last = IovaRange::from_len(Iova::new(u64::MAX - (granule - 1)), granule).unwrap();
        let iovas = space.alloc_at(last).unwrap();
        assert_eq!(iovas.range(), last);
        space.free(iovas).unwrap();
        assert_eq!(space.alloc(request).unwrap().range().start().get(), granule);
        let half = Request { bytes: 1 << 63, ..request };
        assert_eq!(space.alloc(half).unwrap().range().start().get(), 1 << 63);
        assert!(space.alloc(Request { bytes: (1 << 63) + 1, ..request }).is_err());
    }
}

#[test]
fn ranges_that_outlive_their_spaces_fit_no_other_one() {
    let aperture = range(0, 1 << 20);
    let first: Vec<_> = (0..50).map(|_| space(aperture, 1)).collect();
    let mut left: Vec<_> = first.iter().map(|s| s.alloc(pages(1, u64::MAX)).unwrap()).collect();
    drop(first);
    // All live, so that whatever was freed by the first ones is used again.
    let others: Vec<_> = (0..100).map(|_| space(aperture, 1)).collect();
    for other in &others {
        left = left.into_iter().map(|iovas| other.free(iovas).unwrap_err().iovas).collect();
    }
}
