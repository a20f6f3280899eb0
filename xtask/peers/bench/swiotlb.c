/*
 * Linux's bounce pool, 64 MiB of slots of 2 KiB, with as many areas as threads:
 * `swiotlb FORMAT [CASE...]`, where FORMAT is swiotlb_copy where COPY is defined,
 * and otherwise swiotlb, whose copies are left out.
 */
#include "bench.h"
#include "race.h"
#include "contention.h"
#include <linux/swiotlb.h>

void swiotlb_create(unsigned int areas);
void swiotlb_init_device(struct device *dev);

#ifdef COPY
#define FORMAT "swiotlb_copy"
#define COPIES 1
#else
#define FORMAT "swiotlb"
#define COPIES 0
#endif

#define BUFFER SZ_64K
#define PAIRS 16384
#define MAX_BURST 4096

struct burst {
	size_t size;
	int mapped;	/* buffers mapped before the first is unmapped */
};

static u64 dma_mask = ~0ULL;
static struct device dev = { .dma_mask = &dma_mask, .seg_boundary = ~0UL };
static char *buffer[KSHIM_CPUS];
static struct { phys_addr_t at[MAX_BURST]; } __attribute__((aligned(128))) slots[KSHIM_CPUS];

#if LINUX < 511	/* a slot is as long as it is told to be, and aligned as its device wants it */
#define tbl_map(phys, size) swiotlb_tbl_map_single(&dev, phys, size, size, DMA_TO_DEVICE, 0)
#define tbl_unmap(slot, size) swiotlb_tbl_unmap_single(&dev, slot, size, size, DMA_TO_DEVICE, 0)
#else
#if LINUX < 610
#define tbl_map(phys, size) swiotlb_tbl_map_single(&dev, phys, size, size, 0, DMA_TO_DEVICE, 0)
#else
#define tbl_map(phys, size) swiotlb_tbl_map_single(&dev, phys, size, 0, DMA_TO_DEVICE, 0)
#endif
#define tbl_unmap(slot, size) swiotlb_tbl_unmap_single(&dev, slot, size, DMA_TO_DEVICE, 0)
#endif

static phys_addr_t map(char *orig, size_t size)
{
	phys_addr_t slot = tbl_map(virt_to_phys(orig), size);

	if (unlikely(slot == (phys_addr_t)DMA_MAPPING_ERROR))
		die("swiotlb: the pool is full");
	return slot;
}

static void unmap(phys_addr_t slot, size_t size)
{
	tbl_unmap(slot, size);
}

/* ns a map and unmap */
static double map_unmap(int id, void *arg)
{
	const struct burst *b = arg;
	phys_addr_t *slot = slots[id].at;
	double start;

	wait_for_start();
	start = now_ns();
	for (int done = 0; done < PAIRS; done += b->mapped) {
		for (int i = 0; i < b->mapped; i++)
			slot[i] = map(buffer[id], b->size);
		for (int i = 0; i < b->mapped; i++)
			unmap(slot[i], b->size);
	}
	return (now_ns() - start) / PAIRS;
}

/* slots taken and released */
static void turn(int cpu, void *arg)
{
	phys_addr_t *slot = slots[cpu].at;

	for (int i = 0; i < BATCH; i++) {
		begins(MAP);
		slot[i] = map(buffer[cpu], SZ_4K);
		ends(MAP);
	}
	for (int i = 0; i < BATCH; i++) {
		begins(UNMAP);
		unmap(slot[i], SZ_4K);
		ends(UNMAP);
	}
}

/* Two slots at a time, which are not the same and hold copies, unless these are left out. */
static void self_check(void)
{
	phys_addr_t a, b;

	swiotlb_create(1);
	swiotlb_init_device(&dev);
	a = map(buffer[0], SZ_4K);
	b = map(buffer[1], SZ_4K);
	if (max(a, b) - min(a, b) < SZ_4K)
		die("swiotlb: the slots %#llx and %#llx overlap", a, b);
	if (COPIES != !memcmp(phys_to_virt(a), buffer[0], SZ_4K) ||
	    COPIES != !memcmp(phys_to_virt(b), buffer[1], SZ_4K))
		die("swiotlb: wrong contents of a slot");
	unmap(a, SZ_4K);
	unmap(b, SZ_4K);
	swiotlb_exit();
}

int main(int argc, char **argv)
{
	static const struct { const char *name; struct burst burst; } cases[] = {
		{ "pair_4k", { SZ_4K, 1 } },
#ifndef COPY
		{ "burst64_4k", { SZ_4K, 64 } },
		{ "burst256_4k", { SZ_4K, 256 } },
		{ "burst4096_4k", { SZ_4K, 4096 } },
		{ "pair_64k", { SZ_64K, 1 } },
#endif
	};

	if (argc < 2 || strcmp(argv[1], FORMAT))
		die("usage: " FORMAT " " FORMAT " [CASE...]");
	wanted_cases = argv + 2;
	bench_init();
	for (int i = 0; i < KSHIM_CPUS; i++)
		buffer[i] = memset(aligned_alloc(PAGE_SIZE, BUFFER), i + 1, BUFFER);
	if (getenv("PEERS_CONTENTION")) {
		swiotlb_adjust_size(SZ_1M);	/* what is zeroed there would outweigh the rest */
		swiotlb_create(KSHIM_CPUS);
		swiotlb_init_device(&dev);
		take_turns(turn, NULL);
		return bench_exit();
	}
	self_check();

	for (int threads = 1; threads <= KSHIM_CPUS; threads++) {
		swiotlb_create(threads);
		swiotlb_init_device(&dev);
		for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
			struct burst burst = cases[i].burst;
			char name[64];

			snprintf(name, sizeof(name), "%s%s_threads_%d", cases[i].name,
				 COPIES ? "_copy" : "", threads);
			if (wanted(name))
				race_result(name, threads, PAIRS, map_unmap, &burst);
		}
		swiotlb_exit();
	}
	return bench_exit();
}
