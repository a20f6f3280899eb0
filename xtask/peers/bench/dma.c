/*
 * Linux's whole DMA API, as a driver calls it: dma-iommu.c with its IOVAs, its flush queue and
 * swiotlb, over io-pgtable-arm or, where VTDSS is defined, generic_pt's vtdss:
 * `dma FORMAT [CASE...]`
 *
 * Beside the times, `dma FORMAT same` prints what each kind of mapping leads to.
 */
#include "bench.h"
#include "race.h"
#include "contention.h"
#include <linux/iommu.h>
#include <linux/dma-mapping.h>
#include <linux/iommu-dma.h>
#include <linux/iova.h>
#include <linux/swiotlb.h>
#include "drivers/iommu/dma-iommu.h"

#ifdef VTDSS
#define FORMAT "dma_vtdss"
#else
#define FORMAT "dma_lpae"
#endif
#define PGSIZES (SZ_4K | SZ_2M)

#define DIR DMA_BIDIRECTIONAL
#define PADDR 0x100000000000ULL
#define SCATTER 3	/* pieces of a list: one of so many places is used */
#define HELD 16		/* mappings at a time, as of a ring of descriptors */
#define REPEATS 64	/* how often so many are mapped and unmapped in a round */
#define MAX_PIECES 64
#define OFFSET 0x200	/* where a bounced buffer begins in its page */

void swiotlb_create(unsigned int areas);
struct iommu_group *kshim_group(struct iommu_domain *domain);

enum how { SINGLE, LIST, STEPS, BOUNCED };

/* Each has a lazy and a strict row, but where nothing untrusted is ever lazy. */
static const struct dma_case {
	const char *name;
	enum how how;
	unsigned int pieces;	/* of a page each */
	size_t bytes;		/* of a single buffer */
} cases[] = {
	{ "single_1", SINGLE, 1, SZ_4K },
	{ "single_8", SINGLE, 1, 8 * SZ_4K },
	{ "single_64", SINGLE, 1, 64 * SZ_4K },
	{ "single_512", SINGLE, 1, 512 * SZ_4K },
	{ "list_2", LIST, 2 },
	{ "list_4", LIST, 4 },
	{ "list_8", LIST, 8 },
	{ "list_64", LIST, 64 },
	{ "steps_1", STEPS, 1 },
	{ "steps_8", STEPS, 8 },
	{ "steps_64", STEPS, 64 },
	{ "bounced_2k", BOUNCED, 1, SZ_2K },
	{ "bounced_64k", BOUNCED, 1, SZ_64K },
};

#include "driver.h"

/* ---- the device: PCI's, which Linux trusts or does not ---- */

static u64 dma_mask = DMA_BIT_MASK(48);
static struct device_dma_parameters parameters = {
	.max_segment_size = SZ_64K,
	.min_align_mask = SZ_4K - 1,	/* as NVMe's driver asks for */
	.segment_boundary_mask = 0xffffffff,
};
static struct dev_iommu dev_iommu;
static struct pci_dev pdev;
static struct device *const dev = &pdev.dev;

static void device_create(bool lazy, bool trusted)
{
	table_create();
	pdev = (struct pci_dev){
		.dev = {
			.iommu = &dev_iommu,
			.iommu_group = kshim_group(domain),
			.dma_mask = &dma_mask,
			.dma_parms = &parameters,
			.seg_boundary = ~0UL,
			.min_align_mask = SZ_4K - 1,
			.bus = trusted ? NULL : &pci_bus_type,
		},
		.untrusted = !trusted,
	};
	/* no search of the lower 4 GiB first, which many PCI devices still get */
	iommu_dma_forcedac = true;
	domain->type = lazy ? IOMMU_DOMAIN_DMA_FQ : IOMMU_DOMAIN_DMA;
	swiotlb_dev_init(dev);
	if (iommu_get_dma_cookie(domain))
		die(FORMAT ": no IOVAs");
	iommu_setup_dma_ops(dev, domain);
	if (!use_dma_iommu(dev) || domain->type != (lazy ? IOMMU_DOMAIN_DMA_FQ : IOMMU_DOMAIN_DMA))
		die(FORMAT ": the device has another domain than was asked for");
}

static void device_destroy(void)
{
	iommu_put_dma_cookie(domain);
	table_destroy();
}

/* ---- a driver with some mappings at a time ---- */

static struct buffer {
	phys_addr_t pa;
	dma_addr_t addr;
	struct dma_iova_state state;
	struct scatterlist sg[MAX_PIECES];
	int segments;
} buffers[HELD];
static char *bounced;	/* what is bounced is memory, since it is copied */

static phys_addr_t piece(const struct buffer *b, unsigned int n)
{
	return b->pa + SCATTER * n * SZ_4K;
}

static void buffers_prepare(const struct dma_case *c)
{
	for (int i = 0; i < HELD; i++) {
		struct buffer *b = &buffers[i];

		memset(b, 0, sizeof(*b));
		if (c->how == BOUNCED)
			b->pa = virt_to_phys(bounced) + i * (SZ_64K + SZ_4K) + OFFSET;
		else
			b->pa = PADDR + i * (c->how == SINGLE ? c->bytes : SCATTER * SZ_4K * MAX_PIECES);
		if (c->how != LIST)
			continue;
		sg_init_marker(b->sg, c->pieces);
		for (unsigned int n = 0; n < c->pieces; n++)
			sg_set_page(&b->sg[n], pfn_to_page(PHYS_PFN(piece(b, n))), SZ_4K, 0);
	}
}

static __always_inline void map(const struct dma_case *c, struct buffer *b)
{
	unsigned int n;

	switch (c->how) {
	case SINGLE:
	case BOUNCED:
		b->addr = iommu_dma_map_phys(dev, b->pa, c->bytes, DIR, 0);
		if (unlikely(dma_mapping_error(dev, b->addr)))
			die(FORMAT ": %s: no mapping", c->name);
		break;
	case LIST:
		b->segments = iommu_dma_map_sg(dev, b->sg, c->pieces, DIR, 0);
		if (unlikely(b->segments <= 0))
			die(FORMAT ": %s: no mapping", c->name);
		break;
	case STEPS:
		if (unlikely(!dma_iova_try_alloc(dev, &b->state, b->pa, c->pieces * SZ_4K)))
			die(FORMAT ": %s: no IOVAs", c->name);
		for (n = 0; n < c->pieces; n++)
			if (unlikely(dma_iova_link(dev, &b->state, piece(b, n), n * SZ_4K, SZ_4K, DIR, 0)))
				die(FORMAT ": %s: no link", c->name);
		if (unlikely(dma_iova_sync(dev, &b->state, 0, c->pieces * SZ_4K)))
			die(FORMAT ": %s: no sync", c->name);
		break;
	}
}

static __always_inline void unmap(const struct dma_case *c, struct buffer *b)
{
	switch (c->how) {
	case SINGLE:
	case BOUNCED:
		iommu_dma_unmap_phys(dev, b->addr, c->bytes, DIR, 0);
		break;
	case LIST:
		iommu_dma_unmap_sg(dev, b->sg, c->pieces, DIR, 0);
		break;
	case STEPS:
		dma_iova_destroy(dev, &b->state, c->pieces * SZ_4K, DIR, 0);
		break;
	}
}

/* ns a map and its unmap, by code of its own for each way */
static noinline void turn(const struct dma_case *c)
{
	for (int i = 0; i < HELD; i++)
		map(c, &buffers[i]);
	for (int i = 0; i < HELD; i++)
		unmap(c, &buffers[i]);
}

static void bench(const struct dma_case *c, bool lazy, const char *name)
{
	double ns[ROUNDS], start;

	device_create(lazy, c->how != BOUNCED);
	buffers_prepare(c);
	for (int round = -warm_up(2); round < timed(ROUNDS); round++) {
		start = now_ns();
		for (int i = 0; i < REPEATS; i++)
			turn(c);
		if (round >= 0)
			ns[round] = (now_ns() - start) / (REPEATS * HELD);
	}
	device_destroy();
	result(name, "pair", counted_rounds ? REPEATS * HELD : median(ns, ROUNDS));
}

/* ---- the same by several CPUs at once or in turn, each with buffers of its own ---- */

static struct { struct buffer held[BATCH]; } __attribute__((aligned(128))) of_cpu[KSHIM_CPUS];

static void turn_of(int cpu, void *arg)
{
	const struct dma_case *c = arg;
	struct buffer *held = of_cpu[cpu].held;

	for (int i = 0; i < BATCH; i++) {
		begins(MAP);
		map(c, &held[i]);
		ends(MAP);
	}
	for (int i = 0; i < BATCH; i++) {
		begins(UNMAP);
		unmap(c, &held[i]);
		ends(UNMAP);
	}
}

static void create_for_all(const struct dma_case *c, bool lazy)
{
	device_create(lazy, c->how != BOUNCED);
	for (int cpu = 0; cpu < KSHIM_CPUS; cpu++) {
		buffers_prepare(c);
		memcpy(of_cpu[cpu].held, buffers, sizeof(of_cpu[cpu].held));
	}
}

static void count_contention(const struct dma_case *c, bool lazy)
{
	create_for_all(c, lazy);
	take_turns(turn_of, (void *)c);
	device_destroy();
}

/* ns a map and its unmap */
static double turns_at_once(int id, void *arg)
{
	const struct dma_case *c = arg;
	struct buffer *held = of_cpu[id].held;
	double start;

	wait_for_start();
	start = now_ns();
	for (int turn = 0; turn < REPEATS; turn++) {
		for (int i = 0; i < HELD; i++)
			map(c, &held[i]);
		for (int i = 0; i < HELD; i++)
			unmap(c, &held[i]);
	}
	return (now_ns() - start) / (REPEATS * HELD);
}

/* Single pages by one thread and by two, `single_1_lazy_threads_2` and the like. */
static void bench_threads(const struct dma_case *c, bool lazy, const char *name)
{
	char full[80];

	for (int threads = 1; threads <= 2; threads++) {
		snprintf(full, sizeof(full), "%s_threads_%d", name, threads);
		if (!wanted(full))
			continue;
		create_for_all(c, lazy);
		race_result(full, threads, REPEATS * HELD, turns_at_once, (void *)c);
		device_destroy();
	}
}

/* ---- what is mapped ---- */

/* Where `len` bytes lead, as the fewest runs. */
static void print_runs(dma_addr_t addr, size_t len)
{
	phys_addr_t start = 0;
	size_t run = 0;

	while (len) {
		size_t part = min(len, SZ_4K - (addr & (SZ_4K - 1)));
		phys_addr_t pa = iommu_iova_to_phys(domain, addr);

		if (run && pa == start + run) {
			run += part;
		} else {
			if (run)
				printf(" %#llx+%#zx", start, run);
			start = pa;
			run = part;
		}
		addr += part;
		len -= part;
	}
	printf(" %#llx+%#zx\n", start, run);
}

/* A bounced buffer as its device sees it: its bytes, what lies around them, and what comes back. */
static void print_bounced(const struct dma_case *c, const struct buffer *b)
{
	char *orig = phys_to_virt(b->pa);
	size_t same = 0, zero = 0, around = 0;

	for (size_t i = 0; i < c->bytes; i++) {
		char *at = phys_to_virt(iommu_iova_to_phys(domain, b->addr + i));

		same += *at == orig[i];
		*at ^= 0x55;	/* the device writes */
	}
	for (dma_addr_t at = b->addr & ~(SZ_4K - 1ULL); at < b->addr; at++, around++)
		zero += !*(char *)phys_to_virt(iommu_iova_to_phys(domain, at));
	for (dma_addr_t at = b->addr + c->bytes; at & (SZ_4K - 1); at++, around++)
		zero += !*(char *)phys_to_virt(iommu_iova_to_phys(domain, at));
	printf("%s at 0x%llx of its page: %zu of %zu bytes read, %zu of %zu around them zero\n",
	       c->name, b->addr & (SZ_4K - 1), same, c->bytes, zero, around);
}

static void print_same(const struct dma_case *c, bool lazy)
{
	struct buffer *b = &buffers[1];
	dma_addr_t first;
	size_t back = 0;

	device_create(lazy, c->how != BOUNCED);
	buffers_prepare(c);
	for (size_t i = 0; c->how == BOUNCED && i < c->bytes; i++)
		((char *)phys_to_virt(b->pa))[i] = 1 + i % 0x50;
	map(c, b);
	first = c->how == LIST ? sg_dma_address(b->sg) : c->how == STEPS ? b->state.addr : b->addr;
	switch (c->how) {
	case SINGLE:
		printf("%s at 0x%llx of its page:", c->name, b->addr & (SZ_4K - 1));
		print_runs(b->addr, c->bytes);
		break;
	case BOUNCED:
		print_bounced(c, b);
		break;
	case LIST:
		for (int n = 0; n < b->segments; n++) {
			printf("%s segment %d of %#x bytes:", c->name, n, sg_dma_len(&b->sg[n]));
			print_runs(sg_dma_address(&b->sg[n]), sg_dma_len(&b->sg[n]));
		}
		break;
	case STEPS:
		printf("%s:", c->name);
		print_runs(b->state.addr, c->pieces * SZ_4K);
		break;
	}
	unmap(c, b);
	for (size_t i = 0; c->how == BOUNCED && i < c->bytes; i++)
		back += ((char *)phys_to_virt(b->pa))[i] == ((1 + i % 0x50) ^ 0x55);
	printf("%s unmapped: %s, %zu bytes back\n", c->name,
	       iommu_iova_to_phys(domain, first) ? "still there" : "gone", back);
	device_destroy();
}

int main(int argc, char **argv)
{
	static const char *const ways[] = { "strict", "lazy" };
	char name[64];

	if (argc < 2 || strcmp(argv[1], FORMAT))
		die("usage: dma " FORMAT " [same | CASE...]");
	wanted_cases = argv + 2;
	if (getenv("PEERS_INVALIDATION_NS"))
		invalidation_ns = atof(getenv("PEERS_INVALIDATION_NS"));
	bench_init();
	if (iova_cache_get())
		die(FORMAT ": no slab");
	bounced = aligned_alloc(SZ_2M, SZ_2M);
	memset(bounced, 0xa5, SZ_2M);
	if (counted_rounds)
		swiotlb_adjust_size(SZ_4M);	/* what is zeroed there would outweigh the rest */
	swiotlb_create(1);
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
		for (int lazy = 0; lazy < (cases[i].how == BOUNCED ? 1 : 2); lazy++) {
			snprintf(name, sizeof(name), "%s_%s", cases[i].name, ways[lazy]);
			if (argc == 3 && !strcmp(argv[2], "same"))
				print_same(&cases[i], lazy);
			else if (wanted(name) && getenv("PEERS_CONTENTION"))
				count_contention(&cases[i], lazy);
			else if (wanted(name))
				bench(&cases[i], lazy, name);
			if (cases[i].how == SINGLE && cases[i].bytes == SZ_4K)
				bench_threads(&cases[i], lazy, name);
		}
	return bench_exit();
}
