/* What Linux 6.12 wants of a kernel besides, or otherwise. */
/* statistics of table pages, which the kernel keeps for each node and nobody reads here */
enum { NR_IOMMU_PAGES, NR_SECONDARY_PAGETABLE };
#define mod_node_page_state(node, item, delta)
#define mod_lruvec_page_state(page, item, delta)
#define alloc_pages(gfp, order) virt_to_page((void *)__get_free_pages(gfp, order))
#define put_page(page) BUG()	/* lists of table pages are generic_pt's, which this Linux has not */
#ifndef KSHIM_DMA	/* there dma_iommu.c has it */
#define PageHighMem(page) false
#endif
#ifdef KSHIM_USER
#define page_to_phys(page) ((phys_addr_t)page_to_pfn(page) << PAGE_SHIFT)
/* pages that a container tries a new domain with */
extern unsigned long kshim_first_pfn;
#undef alloc_pages
#define alloc_pages(gfp, order) pfn_to_page(kshim_first_pfn)
#undef __free_pages
#define __free_pages(page, order)
#define KSHIM_DOMAIN_ALLOC iommu_paging_domain_alloc(struct device *dev)
#endif
#ifdef KSHIM_URING
/* nothing is in flight, so an end of a table waits for nothing */
#define DEFINE_WAIT(name) int name __maybe_unused
#define TASK_INTERRUPTIBLE 1
#define prepare_to_wait(head, wait, state) BUG()
#define finish_wait(head, wait)
#define schedule()
#define wake_up_all(head) ((void)(head))
#define io_run_task_work_sig(ring) 0
#define atomic_set(v, n) WRITE_ONCE((v)->counter, n)
#define kasan_mempool_unpoison_object(p, size)
#define IOU_OK 0
#endif
