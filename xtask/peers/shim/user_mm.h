/*
 * A process whose memory a container or a ring pins, and how: what of the kernel's mm both these and
 * who simulates the pins need.
 */
#ifndef KSHIM_USER_MM_H
#define KSHIM_USER_MM_H

/* a lock of many readers or one writer: one locked instruction to take it, and one to leave it */
struct rw_semaphore { long count; };	/* readers, or -1 */

struct mm_struct {
	unsigned long locked_vm;	/* pages */
	struct { s64 counter; } pinned_vm;
	int users, count;
	struct rw_semaphore mmap_lock;
};
struct task_struct {
	struct mm_struct *mm;
	struct task_struct *group_leader;
	int usage;
	unsigned long memlock;	/* RLIMIT_MEMLOCK, in bytes */
	const char *comm;
};
extern struct task_struct kshim_task;
#define current (&kshim_task)

#define kshim_add(p, n) __atomic_add_fetch(p, n, __ATOMIC_SEQ_CST)

static inline void mmap_read_lock(struct mm_struct *mm)
{
	if (unlikely(kshim_add(&mm->mmap_lock.count, 1) <= 0))
		BUG();
}
static inline void mmap_read_unlock(struct mm_struct *mm)
{
	kshim_add(&mm->mmap_lock.count, -1);
}
static inline int mmap_write_lock_killable(struct mm_struct *mm)
{
	long free = 0;

	if (unlikely(!kshim_try_cmpxchg(&mm->mmap_lock.count, &free, -1)))
		BUG();
	return 0;
}
static inline void mmap_write_unlock(struct mm_struct *mm)
{
	kshim_add(&mm->mmap_lock.count, 1);
}

#define FOLL_WRITE 0x1u
#define FOLL_LONGTERM 0x100u

#define PG_RESERVED 1UL
#define PG_HEAD 2UL	/* the first page of a folio that has more */

/* what follows the pages differs from Linux to Linux, and nothing of it is given */
#define pin_user_pages_remote(mm, start, count, flags, pages, ...) kshim_pin_pages(start, count, pages)
long kshim_pin_pages(unsigned long start, unsigned long count, struct page **pages);
void unpin_user_pages_dirty_lock(struct page **pages, unsigned long count, bool dirty);
void unpin_user_page_range_dirty_lock(struct page *page, unsigned long count, bool dirty);
int pin_user_pages_fast(unsigned long start, int count, unsigned int flags, struct page **pages);
void unpin_user_pages(struct page **pages, unsigned long count);
void unpin_user_folio(struct folio *folio, unsigned long count);

/* a process's registers of a device, which one leaf after the other of its page table leads to */
bool kshim_has_registers(unsigned long addr);
int kshim_follow(unsigned long addr, unsigned long *pfn, unsigned long *leaf_mask);
void kshim_follow_end(void);

#endif
