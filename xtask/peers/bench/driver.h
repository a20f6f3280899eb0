/*
 * An IOMMU's driver that gathers as Linux's do and has no hardware, or one that takes so many ns for an
 * invalidation. Below it is io-pgtable-arm or, where VTDSS is defined, generic_pt's vtdss. Who includes this
 * has named its FORMAT, and the PGSIZES that the domain may use.
 */
#ifdef VTDSS
#include <linux/generic_pt/iommu.h>
#include "drivers/iommu/iommu-pages.h"
#else
#include <linux/io-pgtable.h>
#endif

static double invalidation_ns;

static noinline void invalidate(void)
{
	double start;

	if (likely(!invalidation_ns))
		return;
	for (start = now_ns(); now_ns() - start < invalidation_ns;)
		__builtin_ia32_pause();
}

static void flush_iotlb_all(struct iommu_domain *d) { invalidate(); }

#ifdef VTDSS
static union {
	struct iommu_domain domain;
	struct pt_iommu pt;
	struct pt_iommu_vtdss vtdss;
} table;
static struct iommu_domain *domain = &table.domain;
static struct device walker;

static void iotlb_sync(struct iommu_domain *d, struct iommu_iotlb_gather *gather)
{
	invalidate();
	iommu_put_pages_list(&gather->freelist);
}

static const struct pt_iommu_driver_ops driver_ops = { };
static const struct iommu_domain_ops domain_ops = {
	IOMMU_PT_DOMAIN_OPS(vtdss),
	.iotlb_sync = iotlb_sync,
	.flush_iotlb_all = flush_iotlb_all,
};

static void table_create(void)
{
	struct pt_iommu_vtdss_cfg cfg = {
		.common = {
			.features = BIT(PT_FEAT_FLUSH_RANGE),
			.hw_max_vasz_lg2 = 48,
			.hw_max_oasz_lg2 = 52,
		},
		.top_level = 3,
	};

	memset(&table, 0, sizeof(table));
	table.pt.driver_ops = &driver_ops;
	table.pt.iommu_device = &walker;
	table.pt.nid = NUMA_NO_NODE;
	table.domain.ops = &domain_ops;
	if (pt_iommu_vtdss_init(&table.vtdss, &cfg, GFP_KERNEL))
		die(FORMAT ": no page table");
	table.domain.pgsize_bitmap &= PGSIZES;
}

static void table_destroy(void)
{
	pt_iommu_deinit(&table.pt);
}
#else
static struct smmu_domain {
	struct iommu_domain domain;
	struct io_pgtable_ops *ops;
	struct io_pgtable_cfg cfg;
} smmu;
static struct iommu_domain *domain = &smmu.domain;

#define to_ops(d) (container_of(d, struct smmu_domain, domain)->ops)

static noinline void tlb_flush_all(void *cookie) { }
static noinline void tlb_flush_walk(unsigned long iova, size_t size, size_t granule, void *cookie)
{
	invalidate();
}
static void iotlb_sync(struct iommu_domain *d, struct iommu_iotlb_gather *gather) { invalidate(); }

static void tlb_add_page(struct iommu_iotlb_gather *gather, unsigned long iova, size_t granule,
			 void *cookie)
{
	iommu_iotlb_gather_add_page(&((struct smmu_domain *)cookie)->domain, gather, iova, granule);
}

static int domain_map(struct iommu_domain *d, unsigned long iova, phys_addr_t pa, size_t pgsize,
		      size_t n, int prot, gfp_t gfp, size_t *mapped)
{
	struct io_pgtable_ops *ops = to_ops(d);

	return ops ? ops->map_pages(ops, iova, pa, pgsize, n, prot, gfp, mapped) : -ENODEV;
}

static size_t domain_unmap(struct iommu_domain *d, unsigned long iova, size_t pgsize, size_t n,
			   struct iommu_iotlb_gather *gather)
{
	struct io_pgtable_ops *ops = to_ops(d);

	return ops ? ops->unmap_pages(ops, iova, pgsize, n, gather) : 0;
}

static phys_addr_t domain_iova_to_phys(struct iommu_domain *d, dma_addr_t iova)
{
	struct io_pgtable_ops *ops = to_ops(d);

	return ops ? ops->iova_to_phys(ops, iova) : 0;
}

/* The same where it is left out of what is counted. */
static phys_addr_t uncounted_iova_to_phys(struct iommu_domain *d, dma_addr_t iova)
{
	phys_addr_t pa;

	if (!is_counting)
		return domain_iova_to_phys(d, iova);
	count_toggle();
	pa = domain_iova_to_phys(d, iova);
	count_toggle();
	return pa;
}

static const struct iommu_flush_ops flush_ops = {
	.tlb_flush_all = tlb_flush_all,
	.tlb_flush_walk = tlb_flush_walk,
	.tlb_add_page = tlb_add_page,
};

static const struct iommu_domain_ops domain_ops = {
	.map_pages = domain_map,
	.unmap_pages = domain_unmap,
	.iotlb_sync = iotlb_sync,
	.flush_iotlb_all = flush_iotlb_all,
	.iova_to_phys = domain_iova_to_phys,
};
static const struct iommu_domain_ops uncounted_ops = {
	.map_pages = domain_map,
	.unmap_pages = domain_unmap,
	.iotlb_sync = iotlb_sync,
	.flush_iotlb_all = flush_iotlb_all,
	.iova_to_phys = uncounted_iova_to_phys,
};

static void table_create(void)
{
	smmu.cfg = (struct io_pgtable_cfg){
		.pgsize_bitmap = SZ_4K | SZ_2M | SZ_1G,
		.ias = 48,
		.oas = 48,
		.coherent_walk = true,
		.tlb = &flush_ops,
	};
	smmu.domain = (struct iommu_domain){
		.ops = counted_op && !strcmp(counted_op, "unmap_rest") ? &uncounted_ops : &domain_ops,
		.pgsize_bitmap = PGSIZES,
		.geometry = { .aperture_end = DMA_BIT_MASK(48), .force_aperture = true },
	};
	smmu.ops = alloc_io_pgtable_ops(ARM_64_LPAE_S1, &smmu.cfg, &smmu);
	if (!smmu.ops)
		die(FORMAT ": no page table");
}

static void table_destroy(void)
{
	free_io_pgtable_ops(smmu.ops);
}
#endif
