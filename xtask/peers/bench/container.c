/*
 * Linux's container, VFIO type1, as a process calls it: VFIO_IOMMU_MAP_DMA and its unmap, over
 * io-pgtable-arm or, where VTDSS is defined, generic_pt's vtdss, and over simulated pins:
 * `container FORMAT [CASE...]`
 *
 * Beside the times, `container FORMAT same` prints what each kind of memory is mapped to.
 */
#include "bench.h"
#include <linux/iommu.h>
#include <linux/vfio.h>
#include "vfio.h"
#include "pins.h"

#ifdef VTDSS
#define FORMAT "container_vtdss"
#else
#define FORMAT "container_lpae"
#endif
#define PGSIZES (SZ_4K | SZ_2M | SZ_1G)
#include "driver.h"

#define IOVA 0x4000000000UL
#define FLAGS (VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE)

extern const struct vfio_iommu_driver_ops *kshim_container;
int kshim_vfio_iommu_type1_init(void);

/* Each is measured with cheap pins and with dear ones. */
static const struct container_case {
	const char *name;
	unsigned long bytes;	/* of a mapping */
	unsigned int order;	/* log2 of the pages of a folio */
	enum lie lie;
	unsigned int held;	/* mappings that are made before the first is unmapped */
} cases[] = {
	{ "4k", SZ_4K, 0, SCATTERED, 1024 },
	{ "64k_base", SZ_64K, 0, SCATTERED, 256 },
	{ "64k_folio", SZ_64K, 4, SCATTERED, 256 },
	{ "16m_base", SZ_16M, 0, SCATTERED, 4 },
	{ "16m_run", SZ_16M, 0, NEIGHBOURS, 4 },
	{ "256m_base", SZ_256M, 0, SCATTERED, 1 },
	{ "256m_run", SZ_256M, 0, NEIGHBOURS, 1 },
	{ "256m_thp", SZ_256M, 9, SCATTERED, 1 },
	{ "1g_hugetlb", SZ_1G, 18, SCATTERED, 1 },
	{ "1g_bar_by_1g", SZ_1G, 18, REGISTERS, 1 },
	{ "1g_bar_by_2m", SZ_1G, 9, REGISTERS, 1 },
	{ "1g_bar_by_4k", SZ_1G, 0, REGISTERS, 1 },
};

static const struct { const char *name; struct cost cost; } costs[] = {
	{ "cheap", { .call = 100, .page = 4 } },
	{ "dear", { .call = 1000, .page = 200 } },
};

static void *container;
static struct iommu_group *const group = (void *)&container;	/* nobody looks into it */

struct iommu_domain *KSHIM_DOMAIN_ALLOC
{
	table_create();
	domain->type = IOMMU_DOMAIN_UNMANAGED;
	return domain;
}

void iommu_domain_free(struct iommu_domain *d)
{
	table_destroy();
}

static void container_create(const struct container_case *c, struct cost cost)
{
	user_create(c->held * (c->bytes >> PAGE_SHIFT), c->order, c->lie, cost);
	container = kshim_container->open(VFIO_TYPE1v2_IOMMU);
	if (IS_ERR(container) || kshim_container->attach_group(container, group, VFIO_IOMMU))
		die(FORMAT ": no container");
}

/* Ends it, where nothing may be left. */
static void container_destroy(void)
{
	kshim_container->detach_group(container, group);
	kshim_container->release(container);
	if (current->mm->locked_vm)
		die(FORMAT ": %lu pages are still locked", current->mm->locked_vm);
	user_destroy();
}

static __always_inline void map(const struct container_case *c, unsigned int nth)
{
	struct vfio_iommu_type1_dma_map request = {
		.argsz = sizeof(request),
		.flags = FLAGS,
		.vaddr = USER + nth * c->bytes,
		.iova = IOVA + nth * c->bytes,
		.size = c->bytes,
	};
	long err = kshim_container->ioctl(container, VFIO_IOMMU_MAP_DMA, (unsigned long)&request);

	if (unlikely(err))
		die(FORMAT ": %s: no mapping: %ld", c->name, err);
}

static __always_inline void unmap(const struct container_case *c, unsigned int nth)
{
	struct vfio_iommu_type1_dma_unmap request = {
		.argsz = sizeof(request),
		.iova = IOVA + nth * c->bytes,
		.size = c->bytes,
	};
	long err = kshim_container->ioctl(container, VFIO_IOMMU_UNMAP_DMA, (unsigned long)&request);

	if (unlikely(err || request.size != c->bytes))
		die(FORMAT ": %s: not unmapped: %ld", c->name, err);
}

/* ns a map and an unmap, of as many as are held */
static void bench(const struct container_case *c, struct cost cost, const char *name)
{
	double map_ns[ROUNDS], unmap_ns[ROUNDS], pair_ns[ROUNDS], start, mapped, unmapped;

	container_create(c, cost);
	for (int round = -warm_up(2); round < timed(ROUNDS); round++) {
		start = now_ns();
		count_only(round, "map");
		for (unsigned int nth = 0; nth < c->held; nth++)
			map(c, nth);
		count_only(round, "map");
		mapped = now_ns();
		count_only(round, "unmap");
		for (unsigned int nth = 0; nth < c->held; nth++)
			unmap(c, nth);
		count_only(round, "unmap");
		unmapped = now_ns();
		if (round >= 0) {
			map_ns[round] = (mapped - start) / c->held;
			unmap_ns[round] = (unmapped - mapped) / c->held;
			pair_ns[round] = (unmapped - start) / c->held;
		}
	}
	container_destroy();
	if (counted_rounds)
		return result(name, "pair", c->held);
	result(name, "map", median(map_ns, ROUNDS));
	result(name, "unmap", median(unmap_ns, ROUNDS));
	result(name, "pair", median(pair_ns, ROUNDS));
}

/* ---- what is mapped ---- */

/* How many pages of a mapping lead somewhere, and a sum over where, in order. */
static void print_leads(const struct container_case *c, const char *when)
{
	unsigned long pages = 0, sum = 0;

	for (unsigned long at = 0; at < c->held * c->bytes; at += SZ_4K) {
		phys_addr_t pa = iommu_iova_to_phys(domain, IOVA + at + 0x123);

		pages += pa != 0;
		sum = (sum ^ pa) * 0x100000001b3UL;
	}
	printf("%s %s: %lu pages lead to %016lx, %lu pins, %lu pages locked\n", c->name, when, pages,
	       sum, user_pins(), current->mm->locked_vm);
}

static void print_same(const struct container_case *c)
{
	container_create(c, costs[0].cost);
	for (unsigned int nth = 0; nth < c->held; nth++)
		map(c, nth);
	print_leads(c, "mapped");
	for (unsigned int nth = 0; nth < c->held; nth++)
		unmap(c, nth);
	print_leads(c, "unmapped");
	container_destroy();
}

int main(int argc, char **argv)
{
	char name[64];

	if (argc < 2 || strcmp(argv[1], FORMAT))
		die("usage: container " FORMAT " [same | CASE...]");
	wanted_cases = argv + 2;
	if (getenv("PEERS_INVALIDATION_NS"))
		invalidation_ns = atof(getenv("PEERS_INVALIDATION_NS"));
	bench_init();
	if (kshim_vfio_iommu_type1_init())
		die(FORMAT ": VFIO has no container");
	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		if (argc == 3 && !strcmp(argv[2], "same")) {
			print_same(&cases[i]);
			continue;
		}
		for (size_t cost = 0; cost < ARRAY_SIZE(costs); cost++) {
			snprintf(name, sizeof(name), "%s_%s", cases[i].name, costs[cost].name);
			if (wanted(name))
				bench(&cases[i], costs[cost].cost, name);
		}
	}
	return bench_exit();
}
