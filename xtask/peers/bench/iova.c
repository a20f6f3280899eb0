/* Linux's allocator of IOVAs, in a 48-bit space of 4K pages: `iova iova [CASE...]` */
#include "bench.h"
#include "race.h"
#include "contention.h"
#include <linux/iova.h>

#define LIMIT ((1UL << 36) - 1)	/* the last page of the space */
#define LIMIT_32 ((1UL << 20) - 1)
#define PAIRS 20000
#define LIVE 100000UL
#define REFUSED_ROUNDS 9

static struct iova_domain iovad;

static void create(unsigned long first_pfn)
{
	memset(&iovad, 0, sizeof(iovad));
	init_iova_domain(&iovad, SZ_4K, first_pfn);
	if (iova_domain_init_rcaches(&iovad))
		die("iova: no caches");
}

/* ns an allocation and its release; what is longer than 32 pages goes to the tree */
static double alloc_free(int id, void *arg)
{
	unsigned long pages = *(unsigned long *)arg, pfn;
	double start;

	free_iova_fast(&iovad, alloc_iova_fast(&iovad, pages, LIMIT, true), pages);
	wait_for_start();
	start = now_ns();
	for (int i = 0; i < PAIRS; i++) {
		pfn = alloc_iova_fast(&iovad, pages, LIMIT, true);
		if (unlikely(!pfn))
			die("iova: the space is full");
		free_iova_fast(&iovad, pfn, pages);
	}
	return (now_ns() - start) / PAIRS;
}

static void bench_pairs(const char *name, int threads, unsigned long pages)
{
	create(1);
	race_result(name, threads, PAIRS, alloc_free, &pages);
	put_iova_domain(&iovad);
}

/*
 * ns until a 32-bit space of LIVE ranges of a page, with a hole of a page between
 * them, refuses four pages, each time after one of the ranges was freed. The nodes
 * of the tree lie in memory as in a slab that has been used for a while.
 */
static void bench_refused(const char *name)
{
	double ns[REFUSED_ROUNDS], start;
	unsigned long pfn;

	create(LIMIT_32 + 1 - 2 * LIVE);
	for (int pass = 0; pass < 2; pass++) {
		for (unsigned long i = 0; i < 2 * LIVE; i++)
			if (!(pfn = alloc_iova_fast(&iovad, 1, LIMIT_32, false)))
				die("iova: cannot fill the 32-bit space");
		for (unsigned long i = 0; i < 2 * LIVE; i += pass + 1)
			free_iova(&iovad, LIMIT_32 - i);
	}
	for (int round = 0; round < timed(REFUSED_ROUNDS); round++) {
		/* Each joins its two holes to three pages, and no two of them are neighbours. */
		free_iova_fast(&iovad, LIMIT_32 - 1 - 4 * (LIVE / 40) * (round + 1), 1);
		start = now_ns();
		if (alloc_iova_fast(&iovad, 4, LIMIT_32, true))
			die("iova: four pages in a hole of three");
		ns[round] = now_ns() - start;
	}
	put_iova_domain(&iovad);
	if (counted_rounds)
		return result(name, "pair", 1);
	result(name, "refuse", median(ns, REFUSED_ROUNDS));
}

/* ranges of so many pages allocated and released */
static void turn(int cpu, void *arg)
{
	unsigned long pages = *(unsigned long *)arg, pfn[BATCH];

	for (int i = 0; i < BATCH; i++) {
		begins(MAP);
		pfn[i] = alloc_iova_fast(&iovad, pages, LIMIT, true);
		ends(MAP);
		if (unlikely(!pfn[i]))
			die("iova: the space is full");
	}
	for (int i = 0; i < BATCH; i++) {
		begins(UNMAP);
		free_iova_fast(&iovad, pfn[i], pages);
		ends(UNMAP);
	}
}

static void self_check(void)
{
	unsigned long a, b;

	create(1);
	a = alloc_iova_fast(&iovad, 64, LIMIT, true);
	b = alloc_iova_fast(&iovad, 64, LIMIT, true);
	if (!a || !b || max(a, b) - min(a, b) < 64 || max(a, b) + 63 > LIMIT)
		die("iova: ranges %#lx and %#lx overlap or pass the limit", a, b);
	put_iova_domain(&iovad);
}

int main(int argc, char **argv)
{
	if (argc < 2 || strcmp(argv[1], "iova"))
		die("usage: iova iova [CASE...]");
	wanted_cases = argv + 2;
	bench_init();
	if (iova_cache_get())
		die("iova: no slab");
	self_check();
	if (getenv("PEERS_CONTENTION")) {
		unsigned long pages = wanted("pair_64") ? 64 : 1;

		create(1);
		take_turns(turn, &pages);
		return bench_exit();
	}
	for (int threads = 1; threads <= KSHIM_CPUS; threads++) {
		const char *one = threads == 1 ? "pair_1_threads_1" : "pair_1_threads_2";
		const char *many = threads == 1 ? "pair_64_threads_1" : "pair_64_threads_2";

		if (wanted(one))
			bench_pairs(one, threads, 1);
		if (wanted(many))
			bench_pairs(many, threads, 64);
	}
	if (wanted("refused_4"))
		bench_refused("refused_4");
	return bench_exit();
}
