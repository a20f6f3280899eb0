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

#include "iommu_core.inc"
