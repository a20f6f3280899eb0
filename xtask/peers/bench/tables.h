/*
 * The cases, for every format. The file that includes this one defines where to
 * map and how to call its format:
 */
static const char *format;
static struct iommu_domain *domain;
static unsigned long iova_base;
static phys_addr_t pa_base;
static unsigned long format_pgsizes;
static size_t iova_bytes;	/* how much of the space behind iova_base may be used */

/* An empty domain that iommu_map() may use these page sizes in. */
static void domain_create(unsigned long pgsizes);
static void domain_destroy(void);
static phys_addr_t domain_lookup(unsigned long iova);
/* n pages in as few calls as the format allows */
static __always_inline int map_pages(unsigned long iova, phys_addr_t pa, size_t pgsize, size_t n);
static __always_inline size_t unmap_pages(unsigned long iova, size_t pgsize, size_t n,
					  struct iommu_iotlb_gather *gather);

#if LINUX < 603
#define iommu_map(domain, iova, pa, size, prot, gfp) iommu_map(domain, iova, pa, size, prot)
#endif

#define PROT (IOMMU_READ | IOMMU_WRITE | IOMMU_CACHE)
#define TOUCHED 16384UL	/* pages mapped and unmapped a round, where the space has so many */
#define SCATTER 3	/* scattered spans: one of so many places is used */

enum how {
	RANGE,	/* the format's own call, once a range */
	SINGLE,	/* the format's own call, once a page */
	CORE,	/* iommu_map() and iommu_unmap() */
	SCATTERED,	/* a call of iommu_map() for each page, one of iommu_unmap() */
};

static void map_range(enum how how, unsigned long iova, phys_addr_t pa, size_t pgsize, size_t n)
{
	int err = 0;

	switch (how) {
	case RANGE:
		err = map_pages(iova, pa, pgsize, n);
		break;
	case SINGLE:
		for (size_t i = 0; i < n; i++)
			err |= map_pages(iova + i * pgsize, pa + i * pgsize, pgsize, 1);
		break;
	case CORE:
		err = iommu_map(domain, iova, pa, pgsize * n, PROT, GFP_KERNEL);
		break;
	case SCATTERED:
		for (size_t i = 0; i < n; i++)
			err |= iommu_map(domain, iova + i * pgsize, pa + SCATTER * i * pgsize,
					 pgsize, PROT, GFP_KERNEL);
		break;
	}
	if (unlikely(err))
		die("%s: map of %zu x %zu failed: %d", format, n, pgsize, err);
}

static void unmap_range(enum how how, unsigned long iova, size_t pgsize, size_t n)
{
	struct iommu_iotlb_gather gather;
	size_t done = 0;

	if (how == CORE || how == SCATTERED) {
		done = iommu_unmap(domain, iova, pgsize * n);
	} else {
		iommu_iotlb_gather_init(&gather);
		if (how == SINGLE)
			for (size_t i = 0; i < n; i++)
				done += unmap_pages(iova + i * pgsize, pgsize, 1, &gather);
		else
			done = unmap_pages(iova, pgsize, n, &gather);
		iommu_iotlb_sync(domain, &gather);
	}
	if (unlikely(done != pgsize * n))
		die("%s: unmap of %zu x %zu stopped after %zu bytes", format, n, pgsize, done);
}

/* ns to map, and to unmap, a range of n pages; other ranges are mapped in the same round */
static void bench_ranges(const char *name, enum how how, size_t pgsize, size_t n)
{
	double map_ns[ROUNDS], unmap_ns[ROUNDS];
	size_t ranges = min(TOUCHED, iova_bytes / pgsize) / n, bytes = n * pgsize;

	domain_create(pgsize);
	for (int round = -warm_up(2); round < timed(ROUNDS); round++) {
		double start = now_ns(), mapped, unmapped;

		count_only(round, "map");
		for (size_t i = 0; i < ranges; i++)
			map_range(how, iova_base + i * bytes, pa_base + i * bytes, pgsize, n);
		count_only(round, "map");
		mapped = now_ns();
		count_only(round, "unmap");
		for (size_t i = 0; i < ranges; i++)
			unmap_range(how, iova_base + i * bytes, pgsize, n);
		count_only(round, "unmap");
		unmapped = now_ns();
		if (round >= 0) {
			map_ns[round] = (mapped - start) / ranges;
			unmap_ns[round] = (unmapped - mapped) / ranges;
		}
	}
	domain_destroy();
	if (counted_rounds)
		return result(name, "pair", ranges);
	result(name, "map", median(map_ns, ROUNDS));
	result(name, "unmap", median(unmap_ns, ROUNDS));
	result(name, "pair", map_ns[ROUNDS / 2] + unmap_ns[ROUNDS / 2]);
}

/* ns to map, and to unmap, 16 GiB in one range in a fresh domain */
static void bench_fresh(const char *name, size_t pgsize)
{
	double map_ns[FRESH_ROUNDS], unmap_ns[FRESH_ROUNDS];
	size_t n = (16UL << 30) / pgsize;

	for (int round = -warm_up(1); round < timed(FRESH_ROUNDS); round++) {
		double start, mapped, unmapped;

		domain_create(pgsize);
		start = now_ns();
		map_range(RANGE, iova_base, pa_base, pgsize, n);
		mapped = now_ns();
		unmap_range(RANGE, iova_base, pgsize, n);
		unmapped = now_ns();
		domain_destroy();
		if (round >= 0) {
			map_ns[round] = mapped - start;
			unmap_ns[round] = unmapped - mapped;
		}
	}
	if (counted_rounds)
		return result(name, "pair", 1);
	result(name, "map", median(map_ns, FRESH_ROUNDS));
	result(name, "unmap", median(unmap_ns, FRESH_ROUNDS));
}

/*
 * Unmaps a range and learns what memory it led to: where memory goes on is looked
 * up step by step, and what hangs together is unmapped in one call.
 */
static void unmap_looked_up(unsigned long iova, unsigned long end, size_t step)
{
	struct iommu_iotlb_gather gather;
	phys_addr_t pa = domain_lookup(iova), next = 0;

	iommu_iotlb_gather_init(&gather);
	while (iova < end) {
		size_t len = step;

		while (iova + len < end && (next = domain_lookup(iova + len)) == pa + len)
			len += step;
		if (unlikely(iommu_unmap_fast(domain, iova, len, &gather) != len))
			die("%s: unmap of %#zx bytes at %#lx stopped", format, len, iova);
		iova += len;
		pa = next;
	}
	iommu_iotlb_sync(domain, &gather);
}

/* ns to unmap 1 GiB of 2M leaves and to learn what memory it led to */
static void bench_looked_up(const char *name, enum how how, size_t step)
{
	double unmap_ns[FRESH_ROUNDS];

	domain_create(SZ_2M);
	for (int round = -warm_up(1); round < timed(FRESH_ROUNDS); round++) {
		double start;

		map_range(how, iova_base, pa_base, SZ_2M, SZ_1G / SZ_2M);
		start = now_ns();
		unmap_looked_up(iova_base, iova_base + SZ_1G, step);
		if (round >= 0)
			unmap_ns[round] = now_ns() - start;
	}
	domain_destroy();
	if (counted_rounds)
		return result(name, "pair", 1);
	result(name, "unmap", median(unmap_ns, FRESH_ROUNDS));
}

/* ---- threads in one domain: ns a map and unmap of n pages, a region for each thread ---- */

#define PAIR_REPEATS 4	/* how often a thread goes through its region in a round */

struct pair {
	enum how how;
	size_t n;
};

static double map_unmap_pairs(int id, void *arg)
{
	const int repeats = PAIR_REPEATS;
	const struct pair *pair = arg;
	enum how how = pair->how;
	size_t n = pair->n, ranges = TOUCHED / n, bytes = n * SZ_4K;
	size_t offset = id * (TOUCHED * SZ_4K);
	double start;

	wait_for_start();
	start = now_ns();
	for (int repeat = 0; repeat < repeats; repeat++) {
		for (size_t i = 0; i < ranges; i++)
			map_range(how, iova_base + offset + i * bytes,
				  pa_base + offset + i * bytes, SZ_4K, n);
		for (size_t i = 0; i < ranges; i++)
			unmap_range(how, iova_base + offset + i * bytes, SZ_4K, n);
	}
	return (now_ns() - start) / repeats / ranges;
}

static void bench_threads(const char *name, int threads, struct pair pair)
{
	domain_create(SZ_4K);
	race_result(name, threads, PAIR_REPEATS * (TOUCHED / pair.n), map_unmap_pairs, &pair);
	domain_destroy();
}

/* Ranges of n pages mapped and unmapped, in 2 MiB or more of each CPU's own. */
static void turn(int cpu, void *arg)
{
	size_t n = *(size_t *)arg, bytes = n * SZ_4K;
	size_t offset = cpu * ALIGN(BATCH * bytes, SZ_2M);

	for (int i = 0; i < BATCH; i++) {
		begins(MAP);
		map_range(RANGE, iova_base + offset + i * bytes, pa_base + offset + i * bytes,
			  SZ_4K, n);
		ends(MAP);
	}
	for (int i = 0; i < BATCH; i++) {
		begins(UNMAP);
		unmap_range(RANGE, iova_base + offset + i * bytes, SZ_4K, n);
		ends(UNMAP);
	}
}

/* Of what this counts there is the case `pair_4k_1`, or `pair_4k_512`. */
static void bench_contention(void)
{
	size_t n = wanted("pair_4k_512") ? 512 : 1;

	domain_create(SZ_4K);
	take_turns(turn, &n);
	domain_destroy();
}

/* ---- the names ---- */

static const struct range_case {
	const char *name;
	enum how how;
	size_t pgsize, n;
} range_cases[] = {
	{ "4k_1", RANGE, SZ_4K, 1 },
	{ "4k_8", RANGE, SZ_4K, 8 },
	{ "4k_64", RANGE, SZ_4K, 64 },
	{ "4k_256", RANGE, SZ_4K, 256 },
	{ "4k_512", RANGE, SZ_4K, 512 },
	{ "4k_8_paged", SINGLE, SZ_4K, 8 },
	{ "4k_32_paged", SINGLE, SZ_4K, 32 },
	{ "4k_64_paged", SINGLE, SZ_4K, 64 },
	{ "4k_256_paged", SINGLE, SZ_4K, 256 },
	{ "4k_512_paged", SINGLE, SZ_4K, 512 },
	{ "4k_1_core", CORE, SZ_4K, 1 },
	{ "4k_8_core", CORE, SZ_4K, 8 },
	{ "4k_32_core", CORE, SZ_4K, 32 },
	{ "4k_64_core", CORE, SZ_4K, 64 },
	{ "4k_256_core", CORE, SZ_4K, 256 },
	{ "64k_512", RANGE, SZ_64K, 512 },
	{ "1m_512", RANGE, SZ_1M, 512 },
	{ "2m_1", RANGE, SZ_2M, 1 },
	{ "2m_512", RANGE, SZ_2M, 512 },
	{ "scattered_4k_512", SCATTERED, SZ_4K, 512 },
	{ "scattered_2m_8192", SCATTERED, SZ_2M, 8192 },
};

static const struct pair_case {
	const char *name;
	int threads;
	struct pair pair;
} pair_cases[] = {
	{ "pair_4k_1_threads_1", 1, { RANGE, 1 } },
	{ "pair_4k_1_threads_2", 2, { RANGE, 1 } },
	{ "pair_4k_512_threads_1", 1, { RANGE, 512 } },
	{ "pair_4k_512_threads_2", 2, { RANGE, 512 } },
	{ "pair_4k_64_paged_threads_1", 1, { SINGLE, 64 } },
	{ "pair_4k_64_paged_threads_2", 2, { SINGLE, 64 } },
};

static void bench_all(void)
{
	if (getenv("PEERS_CONTENTION"))
		return bench_contention();
	for (size_t i = 0; i < ARRAY_SIZE(range_cases); i++) {
		const struct range_case *c = &range_cases[i];

		if (wanted(c->name) && (format_pgsizes & c->pgsize) && c->n * c->pgsize <= iova_bytes)
			bench_ranges(c->name, c->how, c->pgsize, c->n);
	}
	if (!(format_pgsizes & SZ_2M))
		return;
	if (wanted("16g_4k"))
		bench_fresh("16g_4k", SZ_4K);
	if (wanted("16g_2m"))
		bench_fresh("16g_2m", SZ_2M);
	if (wanted("spans_1g_by_4k"))
		bench_looked_up("spans_1g_by_4k", SCATTERED, SZ_4K);
	if (wanted("spans_1g_by_2m"))
		bench_looked_up("spans_1g_by_2m", SCATTERED, SZ_2M);
	if (wanted("contiguous_1g_by_4k"))
		bench_looked_up("contiguous_1g_by_4k", RANGE, SZ_4K);
	if (wanted("contiguous_1g_by_2m"))
		bench_looked_up("contiguous_1g_by_2m", RANGE, SZ_2M);
	for (size_t i = 0; i < ARRAY_SIZE(pair_cases); i++)
		if (wanted(pair_cases[i].name))
			bench_threads(pair_cases[i].name, pair_cases[i].threads, pair_cases[i].pair);
}

/* Do these tables translate? All page sizes at once, then 4K pages across tables. */
static void self_check(unsigned long pgsizes, size_t bytes)
{
	long pages_before = kshim_pages_live();

	domain_create(pgsizes);
	for (int pass = 0; pass < 2; pass++) {
		enum how how = pass ? RANGE : CORE;
		size_t n = pass ? 600 : bytes / SZ_4K;

		map_range(how, iova_base, pa_base, SZ_4K, n);
		for (size_t off = 7; off < n * SZ_4K; off += 3 * SZ_4K)
			if (domain_lookup(iova_base + off) != pa_base + off)
				die("%s: wrong translation at offset %#zx", format, off);
		unmap_range(how, iova_base, SZ_4K, n);
		for (size_t off = 0; off < n * SZ_4K; off += 3 * SZ_4K)
			if (domain_lookup(iova_base + off))
				die("%s: still mapped at offset %#zx", format, off);
	}
	domain_destroy();
	if (kshim_pages_live() != pages_before)
		die("%s: %ld table pages lost", format, kshim_pages_live() - pages_before);
}
