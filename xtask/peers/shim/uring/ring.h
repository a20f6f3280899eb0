/*
 * A ring with registered buffers: what Linux's declarations of it name, of which the buffers need
 * next to nothing, and the arithmetic of folios.
 */
#ifndef KSHIM_URING_RING_H
#define KSHIM_URING_RING_H

#include <sys/uio.h>
#include "user_mm.h"

#define __force
#define __bitwise
#define __cold __attribute__((__cold__))
#define __packed __attribute__((__packed__))
#define __aligned(n) __attribute__((__aligned__(n)))
#define __counted_by(member)
#define __must_check
#define __must_hold(lock)
#define __acquires(lock)
#define __releases(lock)
#define __nonstring
#define ____cacheline_aligned_in_smp __attribute__((__aligned__(64)))
#define max_t(t, a, b) max((t)(a), (t)(b))
#define BUILD_BUG_ON(cond) ((void)(cond))
#define ULONG_CMP_GE(a, b) ((a) >= (b))
#define MAX_ERRNO 4095
#define IS_ERR_VALUE(x) ((unsigned long)(void *)(x) >= (unsigned long)-MAX_ERRNO)
#define IS_ERR_OR_NULL(p) (!(p) || IS_ERR(p))
#define BITS_TO_LONGS(n) DIV_ROUND_UP(n, BITS_PER_LONG)
#define DECLARE_BITMAP(name, bits) unsigned long name[BITS_TO_LONGS(bits)]
#define MAX_RW_COUNT (INT_MAX & PAGE_MASK)
#define READ 0
#define WRITE 1
#define ITER_SOURCE WRITE
#define ITER_DEST READ
#define lockdep_assert_held(lock)
#define might_alloc(gfp)
#define u64_to_user_ptr(x) ((void *)(uintptr_t)(x))
#define __GFP_ACCOUNT 0x400000u
#define __GFP_BITS_SHIFT 27
#define GFP_KERNEL_ACCOUNT (GFP_KERNEL | __GFP_ACCOUNT)

/* ---- bits ---- */

#define test_bit(nr, map) ((READ_ONCE((map)[(nr) / BITS_PER_LONG]) >> ((nr) % BITS_PER_LONG)) & 1)
#define __set_bit(nr, map) ((void)((map)[(nr) / BITS_PER_LONG] |= 1UL << ((nr) % BITS_PER_LONG)))
#define __clear_bit(nr, map) ((void)((map)[(nr) / BITS_PER_LONG] &= ~(1UL << ((nr) % BITS_PER_LONG))))
static inline bool __test_and_set_bit(unsigned int nr, unsigned long *map)
{
	bool was = test_bit(nr, map);

	__set_bit(nr, map);
	return was;
}
static inline bool __test_and_clear_bit(unsigned int nr, unsigned long *map)
{
	bool was = test_bit(nr, map);

	__clear_bit(nr, map);
	return was;
}

static inline unsigned long find_next_bit(const unsigned long *map, unsigned long size,
					  unsigned long from)
{
	for (; from < size && !test_bit(from, map); from++)
		;
	return from;
}
#define bitmap_empty(map, bits) (find_next_bit(map, bits, 0) == (bits))
#define bitmap_fill(map, bits) memset(map, 0xff, BITS_TO_LONGS(bits) * sizeof(long))
#define bitmap_clear(map, from, count) BUG()

/* ---- locks of which none is waited for, and readers that nobody waits for ---- */

#define spin_lock_bh spin_lock
#define spin_unlock_bh spin_unlock
#define spin_lock_irq spin_lock
#define spin_unlock_irq spin_unlock
#define rcu_read_lock()
#define rcu_read_unlock()
#define rcu_dereference_check(p, cond) READ_ONCE(p)
#define rcu_dereference_protected(p, cond) (p)
#define call_rcu(head, fn) fn(head)
#define RCU_INIT_POINTER(p, v) WRITE_ONCE(p, v)
#define SINGLE_DEPTH_NESTING 1
#define mutex_lock_nested(lock, depth) mutex_lock(lock)

/* 0 for an index that is too large, which the compiler cannot make a branch of */
static __always_inline unsigned long kshim_bounded(unsigned long index, unsigned long size)
{
	unsigned long is_below = index < size;

	__asm__("" : "+r"(is_below));
	return index & (0UL - is_below);
}
#define array_index_nospec(index, size) ((__typeof__(index))kshim_bounded(index, size))

/* ---- what a ring has besides ---- */

typedef u64 sector_t;
typedef unsigned int __poll_t;
typedef int clockid_t;
typedef spinlock_t raw_spinlock_t;
enum tk_offsets { TK_OFFS_REAL };
enum task_work_notify_mode { TWA_NONE };
struct llist_node { struct llist_node *next; };
struct llist_head { struct llist_node *first; };
struct callback_head { void *unused; };
struct percpu_ref { unsigned long count; void (*release)(struct percpu_ref *ref); };
struct percpu_counter { s64 count; };
struct wait_queue_head { spinlock_t lock; };
struct completion { unsigned int done; };
struct blk_plug { void *unused; };
struct cred;
struct file { void *private_data; };
struct io_uring_cmd;
struct user_struct { atomic_long_t locked_vm; };	/* pages */

#include <linux/xarray.h>
#include "iov_iter.inc"
#include <linux/io_uring_types.h>

#define kshim_ring(what, ctx, flags) \
	do { if ((flags) & IO_URING_F_UNLOCKED) what(&(ctx)->uring_lock); } while (0)
#define io_ring_submit_lock(ctx, flags) kshim_ring(mutex_lock, ctx, flags)
#define io_ring_submit_unlock(ctx, flags) kshim_ring(mutex_unlock, ctx, flags)

/* ---- a user's folios ---- */

#define compound_head(p) ((struct page *)kshim_head(p))
static __always_inline unsigned long kshim_head(const struct page *page)
{
	unsigned long head = READ_ONCE(page->head);

	return unlikely(head & 1) ? head - 1 : (unsigned long)page;
}
#define page_folio(page) ((struct folio *)kshim_head(page))
#define kshim_is_large(page) ((READ_ONCE((page)->flags) & PG_HEAD) != 0)
#define PageCompound(page) (kshim_is_large(page) || (READ_ONCE((page)->head) & 1))
static __always_inline unsigned int folio_order(const struct folio *folio)
{
	return kshim_is_large(&folio->page) ? folio->page.order : 0;
}
#define folio_nr_pages(folio) (1UL << folio_order(folio))
#define folio_shift(folio) (PAGE_SHIFT + folio_order(folio))
#define folio_size(folio) (PAGE_SIZE << folio_order(folio))
#define folio_page_idx(folio, p) ((unsigned long)((p) - &(folio)->page))
#define folio_page(folio, n) (&(folio)->page + (n))
#define page_size(page) folio_size((struct folio *)(page))
#define page_to_phys(page) ((phys_addr_t)page_to_pfn(page) << PAGE_SHIFT)
#define offset_in_page(p) ((unsigned long)(p) & ~PAGE_MASK)
#define PageHighMem(page) false
/* nobody touches the bytes of a buffer */
#define kmap_local_page(page) ({ BUG(); (void *)(page); })
#define memcpy_from_page(to, page, offset, len) BUG()
#define memcpy_to_page(page, offset, from, len) BUG()
#define memzero_page(page, offset, len) BUG()

#include <linux/bvec.h>

void iov_iter_bvec(struct iov_iter *i, unsigned int direction, const struct bio_vec *bvec,
		   unsigned long nr_segs, size_t count);

#endif
