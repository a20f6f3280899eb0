/*
 * generic_pt under a driver without hardware: `generic_pt amdv1|vtdss|x86_64 [CASE...]`,
 * of which the Linux at hand may lack some (WITH_...)
 */
#include "bench.h"
#include "race.h"
#include "contention.h"
#include <linux/iommu.h>
#include <linux/generic_pt/iommu.h>
#include "drivers/iommu/iommu-pages.h"
#include "tables.h"

static union {
	struct iommu_domain domain;
	struct pt_iommu pt;
#ifdef WITH_amdv1
	struct pt_iommu_amdv1 amdv1;
#endif
#ifdef WITH_vtdss
	struct pt_iommu_vtdss vtdss;
#endif
#ifdef WITH_x86_64
	struct pt_iommu_x86_64 x86_64;
#endif
} table;

static struct iommu_domain *domain = &table.domain;
static struct device walker;	/* the IOMMU whose table walks may not see the CPU's cache */

/* ---- the driver ---- */

static spinlock_t top_lock;
static void change_top(struct pt_iommu *pt, phys_addr_t top, unsigned int level) { }
static spinlock_t *get_top_lock(struct pt_iommu *pt) { return &top_lock; }
static const struct pt_iommu_driver_ops driver_ops = { change_top, get_top_lock };

static noinline void iotlb_sync(struct iommu_domain *d, struct iommu_iotlb_gather *gather)
{
	iommu_put_pages_list(&gather->freelist);
}
static const struct iommu_domain_ops domain_ops = { .iotlb_sync = iotlb_sync };

/* ---- formats: the features that Linux's drivers ask for ---- */

#ifdef WITH_amdv1
static int amdv1_init(void)
{
	struct pt_iommu_amdv1_cfg cfg = {
		.common = {
			.features = BIT(PT_FEAT_DYNAMIC_TOP) | BIT(PT_FEAT_AMDV1_ENCRYPT_TABLES) |
				    BIT(PT_FEAT_AMDV1_FORCE_COHERENCE) | BIT(PT_FEAT_FLUSH_RANGE),
			.hw_max_vasz_lg2 = 64,
			.hw_max_oasz_lg2 = 52,
		},
		.starting_level = 2,
	};
	return pt_iommu_amdv1_init(&table.amdv1, &cfg, GFP_KERNEL);
}
#endif

#ifdef WITH_vtdss
static int vtdss_init(void)
{
	struct pt_iommu_vtdss_cfg cfg = {
		.common = {
			.features = BIT(PT_FEAT_FLUSH_RANGE),
			.hw_max_vasz_lg2 = 48,
			.hw_max_oasz_lg2 = 52,
		},
		.top_level = 3,
	};
	return pt_iommu_vtdss_init(&table.vtdss, &cfg, GFP_KERNEL);
}
#endif

#ifdef WITH_x86_64
static int x86_64_init(void)
{
	struct pt_iommu_x86_64_cfg cfg = {
		.common = {
			.features = BIT(PT_FEAT_FLUSH_RANGE),
			.hw_max_vasz_lg2 = 47,
			.hw_max_oasz_lg2 = 52,
		},
		.top_level = 3,
	};
	return pt_iommu_x86_64_init(&table.x86_64, &cfg, GFP_KERNEL);
}
#endif

static const struct format {
	const char *name;
	int (*init)(void);
	phys_addr_t (*lookup)(struct iommu_domain *d, dma_addr_t iova);
} formats[] = {
#ifdef WITH_amdv1
	{ "amdv1", amdv1_init, pt_iommu_amdv1_iova_to_phys },
#endif
#ifdef WITH_vtdss
	{ "vtdss", vtdss_init, pt_iommu_vtdss_iova_to_phys },
#endif
#ifdef WITH_x86_64
	{ "x86_64", x86_64_init, pt_iommu_x86_64_iova_to_phys },
#endif
}, *fmt;

/* ---- what tables.h asks for ---- */

static void domain_create(unsigned long pgsizes)
{
	memset(&table, 0, sizeof(table));
	table.pt.driver_ops = &driver_ops;
	table.pt.iommu_device = &walker;
	table.pt.nid = NUMA_NO_NODE;
	table.domain.ops = &domain_ops;
	if (fmt->init())
		die("%s: no page table", format);
	table.domain.pgsize_bitmap &= pgsizes;
}

static void domain_destroy(void)
{
	pt_iommu_deinit(&table.pt);
}

static phys_addr_t domain_lookup(unsigned long iova)
{
	return fmt->lookup(domain, iova);
}

static __always_inline int map_pages(unsigned long iova, phys_addr_t pa, size_t pgsize, size_t n)
{
	size_t mapped = 0;

	return table.pt.ops->map_range(&table.pt, iova, pa, pgsize * n, PROT, GFP_KERNEL, &mapped);
}

static __always_inline size_t unmap_pages(unsigned long iova, size_t pgsize, size_t n,
					  struct iommu_iotlb_gather *gather)
{
	return table.pt.ops->unmap_range(&table.pt, iova, pgsize * n, gather);
}

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < ARRAY_SIZE(formats); i++)
		if (!strcmp(argv[1], formats[i].name))
			fmt = &formats[i];
	if (!fmt)
		die("usage: generic_pt amdv1|vtdss|x86_64 [CASE...]");
	format = fmt->name;
	iova_base = 0x4000000000;
	pa_base = 0x100000000000;
	iova_bytes = 1UL << 40;
	format_pgsizes = SZ_4K | SZ_2M;
	wanted_cases = argv + 2;
	bench_init();
	if (!getenv("PEERS_CONTENTION"))
		self_check(~0UL, 2UL * SZ_1G + 3 * SZ_2M + 5 * SZ_4K);
	bench_all();
	return bench_exit();
}
