/*
 * io-pgtable-arm and io-pgtable-arm-v7s under an SMMU driver that has no SMMU:
 * `io_pgtable lpae|v7s [CASE...]`
 */
#include "bench.h"
#include "race.h"
#include "contention.h"
#include <linux/iommu.h>
#include <linux/io-pgtable.h>
#include "tables.h"

static const struct arch {
	const char *name;
	enum io_pgtable_fmt fmt;
	unsigned long pgsizes;
	unsigned int bits;
	unsigned long iova_base;
	phys_addr_t pa_base;
	size_t iova_bytes;
	size_t checked; /* bytes that need every page size */
} arches[] = {
	{ "lpae", ARM_64_LPAE_S1, SZ_4K | SZ_2M | SZ_1G, 48, 0x4000000000, 0x100000000000,
	  1UL << 40, SZ_1G + 3 * SZ_2M + 5 * SZ_4K },
	{ "v7s", ARM_V7S, SZ_4K | SZ_64K | SZ_1M | SZ_16M, 32, 0x40000000, 0x50000000,
	  SZ_2G, 3 * SZ_16M + 3 * SZ_1M + 2 * SZ_64K + 5 * SZ_4K },
}, *arch;

static struct smmu_domain {
	struct iommu_domain domain;
	struct io_pgtable_ops *ops;
	struct io_pgtable_cfg cfg;
} smmu;

static struct iommu_domain *domain = &smmu.domain;

/* ---- the driver: it gathers as the SMMUv3 driver does, and has nothing to invalidate ---- */

static noinline void tlb_flush_all(void *cookie) { }
static noinline void tlb_flush_walk(unsigned long iova, size_t size, size_t granule, void *cookie)
{
}
static noinline void iotlb_sync(struct iommu_domain *d, struct iommu_iotlb_gather *gather) { }

static void tlb_add_page(struct iommu_iotlb_gather *gather, unsigned long iova, size_t granule,
			 void *cookie)
{
	iommu_iotlb_gather_add_page(&((struct smmu_domain *)cookie)->domain, gather, iova, granule);
}

#if LINUX < 515	/* a call maps or unmaps one page */
static int domain_map(struct iommu_domain *d, unsigned long iova, phys_addr_t pa, size_t pgsize,
		      int prot, gfp_t gfp)
{
	struct io_pgtable_ops *ops = container_of(d, struct smmu_domain, domain)->ops;

	return ops ? ops->map(ops, iova, pa, pgsize, prot, gfp) : -ENODEV;
}

static size_t domain_unmap(struct iommu_domain *d, unsigned long iova, size_t pgsize,
			   struct iommu_iotlb_gather *gather)
{
	struct io_pgtable_ops *ops = container_of(d, struct smmu_domain, domain)->ops;

	return ops ? ops->unmap(ops, iova, pgsize, gather) : 0;
}
#define DOMAIN_OPS struct iommu_ops domain_ops = { .map = domain_map, .unmap = domain_unmap,
#else
static int domain_map(struct iommu_domain *d, unsigned long iova, phys_addr_t pa, size_t pgsize,
		      size_t n, int prot, gfp_t gfp, size_t *mapped)
{
	struct io_pgtable_ops *ops = container_of(d, struct smmu_domain, domain)->ops;

	return ops ? ops->map_pages(ops, iova, pa, pgsize, n, prot, gfp, mapped) : -ENODEV;
}

static size_t domain_unmap(struct iommu_domain *d, unsigned long iova, size_t pgsize, size_t n,
			   struct iommu_iotlb_gather *gather)
{
	struct io_pgtable_ops *ops = container_of(d, struct smmu_domain, domain)->ops;

	return ops ? ops->unmap_pages(ops, iova, pgsize, n, gather) : 0;
}
#define DOMAIN_OPS struct iommu_domain_ops domain_ops = { .map_pages = domain_map, .unmap_pages = domain_unmap,
#endif

static const struct iommu_flush_ops flush_ops = {
	.tlb_flush_all = tlb_flush_all,
	.tlb_flush_walk = tlb_flush_walk,
	.tlb_add_page = tlb_add_page,
};

static const DOMAIN_OPS
	.iotlb_sync = iotlb_sync,
};

/* ---- what tables.h asks for ---- */

static void domain_create(unsigned long pgsizes)
{
	smmu.cfg = (struct io_pgtable_cfg){
		.pgsize_bitmap = arch->pgsizes,
		.ias = arch->bits,
		.oas = arch->bits,
		.coherent_walk = true,
		.tlb = &flush_ops,
	};
	smmu.domain = (struct iommu_domain){
		.type = __IOMMU_DOMAIN_PAGING,
		.ops = &domain_ops,
		.pgsize_bitmap = pgsizes,
	};
	smmu.ops = alloc_io_pgtable_ops(arch->fmt, &smmu.cfg, &smmu);
	if (!smmu.ops)
		die("%s: no page table", format);
}

static void domain_destroy(void)
{
	free_io_pgtable_ops(smmu.ops);
}

static phys_addr_t domain_lookup(unsigned long iova)
{
	return smmu.ops->iova_to_phys(smmu.ops, iova);
}

#if LINUX < 515
static __always_inline int map_pages(unsigned long iova, phys_addr_t pa, size_t pgsize, size_t n)
{
	for (; n; n--, iova += pgsize, pa += pgsize) {
		int err = smmu.ops->map(smmu.ops, iova, pa, pgsize, PROT, GFP_KERNEL);

		if (err)
			return err;
	}
	return 0;
}

static __always_inline size_t unmap_pages(unsigned long iova, size_t pgsize, size_t n,
					  struct iommu_iotlb_gather *gather)
{
	size_t total = n * pgsize, done = 0;

	while (done < total) {
		size_t unmapped = smmu.ops->unmap(smmu.ops, iova + done, pgsize, gather);

		if (!unmapped)
			break;
		done += unmapped;
	}
	return done;
}
#else
static __always_inline int map_pages(unsigned long iova, phys_addr_t pa, size_t pgsize, size_t n)
{
	while (n) {
		size_t mapped = 0;
		int err = smmu.ops->map_pages(smmu.ops, iova, pa, pgsize, n, PROT, GFP_KERNEL, &mapped);

		if (err)
			return err;
		iova += mapped;
		pa += mapped;
		n -= mapped >> __ffs(pgsize);
	}
	return 0;
}

static __always_inline size_t unmap_pages(unsigned long iova, size_t pgsize, size_t n,
					  struct iommu_iotlb_gather *gather)
{
	size_t total = n * pgsize, done = 0;

	while (done < total) {
		size_t unmapped = smmu.ops->unmap_pages(smmu.ops, iova + done, pgsize,
							(total - done) >> __ffs(pgsize), gather);

		if (!unmapped)
			break;
		done += unmapped;
	}
	return done;
}
#endif

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < ARRAY_SIZE(arches); i++)
		if (!strcmp(argv[1], arches[i].name))
			arch = &arches[i];
	if (!arch)
		die("usage: io_pgtable lpae|v7s [CASE...]");
	format = arch->name;
	iova_base = arch->iova_base;
	pa_base = arch->pa_base;
	iova_bytes = arch->iova_bytes;
	format_pgsizes = arch->pgsizes;
	wanted_cases = argv + 2;
	bench_init();
	if (!getenv("PEERS_CONTENTION"))
		self_check(arch->pgsizes, arch->checked);
	bench_all();
	return bench_exit();
}
