/*
 * Linux's bounce pool, with what it alone expects around it. NOCOPY leaves out the
 * copies between originals and slots.
 */
#include <sys/mman.h>

#define SMP_CACHE_BYTES 64
#define MAX_PAGE_ORDER 10
#define isdigit(c) ((c) >= '0' && (c) <= '9')
#define simple_strtoul strtoul

/* Huge pages, touched before, as the kernel's direct mapping has them. */
static inline void *memblock_alloc(size_t size, size_t align)
{
	void *p = aligned_alloc(SZ_2M, ALIGN(size, SZ_2M));

	if (!p)
		return NULL;
	madvise(p, ALIGN(size, SZ_2M), MADV_HUGEPAGE);
	/* new memory is zero; where instructions are counted it need not be touched */
	return getenv("PEERS_COUNTED_ROUNDS") ? p : memset(p, 0, size);
}
#define memblock_alloc_low memblock_alloc
#define memblock_free(p, size) free(p)
#define memblock_phys_free(addr, size) free(phys_to_virt(addr))
#define memblock_free_late(addr, size) free(phys_to_virt(addr))
#define set_memory_decrypted(addr, pages) 0
#define set_memory_encrypted(addr, pages) 0
#define cc_platform_has(attr) 0

#define INVALID_PHYS_ADDR (~(phys_addr_t)0)
#define phys_to_dma(dev, addr) (addr)
#define phys_to_dma_unencrypted(dev, addr) (addr)
#define dma_get_seg_boundary(dev) ((dev)->seg_boundary)
#define dma_get_min_align_mask(dev) ((dev)->min_align_mask)
#define dma_capable(dev, addr, size, ...) true
#define dev_is_dma_coherent(dev) true
#define dma_reset_need_sync(dev) \
	((void)(unlikely((dev)->dma_skip_sync) && ((dev)->dma_skip_sync = false)))
#define arch_sync_dma_for_device(addr, size, dir)
#define arch_sync_dma_flush()
#define trace_swiotlb_bounced(...)

/* There is no high memory: what copies it is never reached. */
#define PhysHighMem(pfn) 0
#define pfn_to_page(pfn) NULL
#define memcpy_from_page(to, page, off, n)
#define memcpy_to_page(page, off, from, n)
#define kmsan_unpoison_memory(p, n)
#define local_irq_save(flags) ((void)(flags))
#define local_irq_restore(flags)

#ifdef NOCOPY
#define memcpy(to, from, n) ((void)(to), (void)(from), (void)(n))
#endif

#include "kernel/dma/swiotlb.c"

/* The default pool, with so many areas, each of which has its own lock; before Linux 6.0 there is one. */
void swiotlb_create(unsigned int areas)
{
#if LINUX < 600
	swiotlb_init(0);
#else
	swiotlb_adjust_nareas(areas);
	swiotlb_init(true, 0);
#endif
}

void swiotlb_init_device(struct device *dev)
{
#if LINUX >= 606
	swiotlb_dev_init(dev);
#elif LINUX >= 515
	dev->dma_io_tlb_mem = &io_tlb_default_mem;
#endif
}
