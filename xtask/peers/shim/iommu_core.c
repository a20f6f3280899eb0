/*
 * iommu_map() and iommu_unmap() of Linux: build.sh cuts these functions and their
 * helpers out of drivers/iommu/iommu.c. Tracing and debugging are off.
 */
#include <linux/iommu.h>
#if __has_include(<linux/generic_pt/iommu.h>)
#include <linux/generic_pt/iommu.h>
#endif

#define trace_map(...)
#define trace_unmap(...)
#define iommu_debug_map(...)
#define iommu_debug_unmap_begin(...)
#define iommu_debug_unmap_end(...)

#ifdef KSHIM_DMA
#include <linux/dma-mapping.h>
#endif

#if defined(KSHIM_DMA) || defined(KSHIM_USER)
/* what callers of the core call besides, with what of a group it needs */
struct iommu_group { struct iommu_domain *default_domain; };

#include "iommu_dma.inc"
#endif

#include "iommu_core.inc"

#ifdef KSHIM_DMA
#include "iommu_map_sg.inc"

struct iommu_group *kshim_group(struct iommu_domain *domain)
{
	static struct iommu_group group;

	group.default_domain = domain;
	return &group;
}
#endif
