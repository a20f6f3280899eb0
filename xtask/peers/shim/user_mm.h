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

#define FOLL_WRITE 0x1u
#define FOLL_LONGTERM 0x100u

#define PG_RESERVED 1UL
#define PG_HEAD 2UL	/* the first page of a folio that has more */

long pin_user_pages_remote(struct mm_struct *mm, unsigned long start, unsigned long count,
			   unsigned int flags, struct page **pages, int *locked);
void unpin_user_pages_dirty_lock(struct page **pages, unsigned long count, bool dirty);
void unpin_user_page_range_dirty_lock(struct page *page, unsigned long count, bool dirty);
int pin_user_pages_fast(unsigned long start, int count, unsigned int flags, struct page **pages);
void unpin_user_folio(struct folio *folio, unsigned long count);

#endif
