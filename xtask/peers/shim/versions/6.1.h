/* What Linux 6.1 wants of a kernel besides, or otherwise. */
#define DEFINE_DEBUGFS_ATTRIBUTE(name, get, set, format) static const int name __maybe_unused
#ifndef KSHIM_DMA	/* there dma_iommu.c has it */
#define PageHighMem(page) false
#define dev_warn_once kshim_silent
#define rounddown(x, y) ((x) / (y) * (y))
#endif
#ifdef KSHIM_USER
#define page_to_phys(page) ((phys_addr_t)page_to_pfn(page) << PAGE_SHIFT)
/* pages that a container tries a new domain with */
extern unsigned long kshim_first_pfn;
#undef alloc_pages
#define alloc_pages(gfp, order) pfn_to_page(kshim_first_pfn)
#undef __free_pages
#define __free_pages(page, order)
#define KSHIM_DOMAIN_ALLOC iommu_domain_alloc(struct bus_type *bus)

/* nothing waits */
typedef struct { int unused; } wait_queue_head_t;
enum vfio_iommu_notify_type { VFIO_IOMMU_CONTAINER_CLOSE };
#define init_waitqueue_head(head)
#define wake_up_all(head) ((void)(head))
#define DEFINE_WAIT(name) int name __maybe_unused
#define prepare_to_wait(head, wait, state) BUG()
#define finish_wait(head, wait)
#define schedule()
#define kthread_should_stop() false
#define fatal_signal_pending(task) false
#define untagged_addr(addr) (addr)
/* an entry that leads to registers, whatever the size of its leaf */
typedef struct { unsigned long pfn; } pte_t;
#define follow_pte(mm, addr, pte, lock) \
	({ static pte_t found; unsigned long mask; (void)(lock); *(pte) = &found; \
	   kshim_follow(addr, &found.pfn, &mask); })
#define pte_write(pte) true
#define pte_pfn(pte) ((pte).pfn)
#define pte_unmap_unlock(pte, lock) ((void)(lock), kshim_follow_end())
#define irq_domain_check_msi_remap() true
#define is_zero_pfn(pfn) false
#ifndef KSHIM_URING
#define unpin_user_page(page) BUG()
#endif
#endif
#ifdef KSHIM_URING
/* counts of what is in flight: a plain number while it is alive, as of one CPU */
#define atomic_set(v, n) WRITE_ONCE((v)->counter, n)
#define atomic_read(v) READ_ONCE((v)->counter)
#define atomic_inc(v) ((void)__atomic_add_fetch(&(v)->counter, 1, __ATOMIC_SEQ_CST))
#define atomic_dec_and_test(v) (!__atomic_add_fetch(&(v)->counter, -1, __ATOMIC_SEQ_CST))
#define percpu_ref_init(ref, fn, flags, gfp) ((ref)->count = 1, (ref)->release = (fn), 0)
#define percpu_ref_exit(ref) ((void)(ref))
#define percpu_ref_get_many(ref, n) ((void)((ref)->count += (n)))
#define percpu_ref_put_many(ref, n) do { if (!((ref)->count -= (n))) (ref)->release(ref); } while (0)
#define percpu_ref_kill(ref) percpu_ref_put_many(ref, 1)
/* work is done when it is asked for, and so is a grace period */
#define mod_delayed_work(queue, w, delay) (w)->work.func(&(w)->work)
#define flush_delayed_work(w) ((void)(w))
#define init_completion(done) ((void)(done))
#define reinit_completion(done) ((void)(done))
#define complete(done) ((void)(done))
#define wait_for_completion(done) BUG()
#define wait_for_completion_interruptible(done) ({ BUG(); 0; })
#define io_run_task_work_sig(...) 0
#define iov_iter_advance(part, bytes) /* within the first segment, alone */ \
	((void)((part)->count -= (bytes), (part)->iov_offset = (bytes)))
#define HZ 250
#define llist_entry container_of
#define llist_add(node, head) \
	({ bool was = !(head)->first; (node)->next = (head)->first; (head)->first = (node); was; })
#define llist_del_all(head) \
	({ struct llist_node *all = (head)->first; (head)->first = NULL; all; })
#define CONFIG_BASE_SMALL 0
#define IO_URING_F_UNLOCKED 0u	/* every call comes with the ring's lock */
#define IOU_OK 0
#define bvec_phys(segment) (page_to_phys((segment)->bv_page) + (segment)->bv_offset)
struct page;
struct file;
/* a process's memory is one area, that of no file */
struct vm_area_struct { struct file *vm_file; };
#define vma_is_shmem(vma) false
#define is_file_hugepages(file) false
long kshim_pin_pages(unsigned long start, unsigned long count, struct page **pages);
static inline long pin_user_pages(unsigned long start, unsigned long count, unsigned int flags,
				  struct page **pages, struct vm_area_struct **areas)
{
	static struct vm_area_struct area;
	long pinned = kshim_pin_pages(start, count, pages);

	for (long i = 0; i < pinned; i++)
		areas[i] = &area;
	return pinned;
}
void unpin_user_pages(struct page **pages, unsigned long count);
static inline void unpin_user_page(struct page *page) { unpin_user_pages(&page, 1); }
unsigned int io_file_get_flags(struct file *file);
#endif
