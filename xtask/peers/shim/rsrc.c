/*
 * Linux's registered buffers of io_uring, with what they alone expect around them: Linux's own tree
 * that counts huge pages (xarray.c) and cache of small memory (alloc_cache.c), whole, and of other
 * files io_pin_pages() and iov_iter_bvec(). The memory is a process's whose pins are simulated
 * elsewhere.
 *
 * What nobody calls (files, buffers that a block driver lends, vectors) compiles, and ends the program
 * if it is called.
 */
#include "blocks.h"
#include "ring.h"

#define struct_size(p, member, n) (sizeof(*(p)) + sizeof((p)->member[0]) * (n))
#define struct_size_t(type, member, n) (sizeof(type) + sizeof(((type *)0)->member[0]) * (n))
#define kvmalloc_flex(type, member, n, ...) \
	((type *)block_alloc(struct_size_t(type, member, n)))
#define kmalloc_objs(type, n, ...) ((__typeof__(type) *)block_alloc(sizeof(type) * (size_t)(n)))
static __always_inline void *kshim_alloc(size_t bytes, gfp_t gfp)
{
	void *p = block_alloc(bytes);

	return gfp & __GFP_ZERO ? memset(p, 0, bytes) : p;
}
#define kshim_gfp(unused, gfp, ...) (gfp)
#define kvmalloc_objs(type, n, ...) \
	((__typeof__(type) *)kshim_alloc(sizeof(type) * (size_t)(n), kshim_gfp(0, ##__VA_ARGS__, 0)))
#define kvmalloc_array(n, size, gfp) block_alloc((size_t)(n) * (size))
#define kvmalloc(size, gfp) block_alloc(size)
#define kasan_mempool_poison_object(p) true
#define cond_resched()

/* ---- numbers: each change is one locked instruction ---- */

#define atomic_long_read(v) READ_ONCE((v)->counter)
#define atomic_long_sub(n, v) ((void)kshim_add(&(v)->counter, -(long)(n)))
#define atomic_long_try_cmpxchg(v, old, new) kshim_try_cmpxchg(&(v)->counter, (long *)(old), (long)(new))
#define atomic64_add(n, v) ((void)kshim_add(&(v)->counter, (s64)(n)))
#define atomic64_sub(n, v) ((void)kshim_add(&(v)->counter, -(s64)(n)))
#define refcount_set(r, n) WRITE_ONCE((r)->counter, n)
#define refcount_read(r) READ_ONCE((r)->counter)
#define refcount_dec_and_test(r) (!kshim_add(&(r)->counter, -1))
#define refcount_inc(r) ((void)kshim_add(&(r)->counter, 1))
#define refcount_dec(r) ((void)kshim_add(&(r)->counter, -1))

/* ---- the process ---- */

static struct mm_struct kshim_mm = { .users = 1, .count = 1 };
struct task_struct kshim_task = {
	.mm = &kshim_mm, .group_leader = &kshim_task, .usage = 1, .memlock = 1UL << 40,
};
#define RLIMIT_NOFILE 7
#define RLIMIT_MEMLOCK 8
#define rlimit(which) READ_ONCE(kshim_task.memlock)

/* of this process, in which pointers are what they are */
#define copy_from_user(to, from, n) (memcpy(to, from, n), 0UL)
#define get_user(x, p) ((x) = *(p), 0)
#define put_user(x, p) (*(p) = (x), 0)
struct compat_iovec { u32 base, len; };
static inline struct iovec *iovec_from_user(const struct iovec *from, unsigned long n,
					    unsigned long fast, struct iovec *to, bool compat)
{
	if (n > fast || compat)
		BUG();
	for (unsigned long i = 0; i < n; i++) {
		to[i] = from[i];
		if ((ssize_t)to[i].iov_len < 0)
			return ERR_PTR(-EINVAL);
	}
	return to;
}

/* ---- the ring ---- */

#define io_is_compat(ctx) false
#define IOU_COMPLETE 0

/* ---- called by nobody ---- */

struct request;
struct req_iterator { int unused; };
#define io_post_aux_cqe(...) BUG()
#define req_set_fail(req) BUG()
#define io_req_set_res(req, res, flags) BUG()
#define fget(fd) ({ (void)(fd); BUG(); (struct file *)NULL; })
#define fput(file) BUG()
#define io_is_uring_fops(file) false
#define io_uring_ctx_get_file(fd, registered) ({ (void)(registered); BUG(); (struct file *)NULL; })
#define memchr_inv(p, c, n) ({ BUG(); NULL; })
#define blk_rq_nr_phys_segments(rq) ({ BUG(); 0; })
#define blk_rq_bytes(rq) 0
#define rq_data_dir(rq) READ
#define rq_for_each_bvec(bv, rq, iter) for ((void)(iter), (bv) = (struct bio_vec){ };;)
#ifndef iov_iter_advance
#define iov_iter_advance(iter, bytes) BUG()
#endif

/* ---- nodes of the tree: a list of free ones ---- */

#define kmem_cache_alloc_lru(cache, lru, gfp) kshim_node()
static struct xa_node *free_nodes;

void radix_tree_node_rcu_free(struct rcu_head *head)
{
	struct xa_node *freed = (struct xa_node *)((char *)head - offsetof(struct xa_node, rcu_head));

	*freed = (struct xa_node){ .parent = free_nodes };
	INIT_LIST_HEAD(&freed->private_list);
	free_nodes = freed;
}

static noinline void more_nodes(void)
{
	struct xa_node *nodes = aligned_alloc(64, 64 * ALIGN(sizeof(*nodes), 64));

	for (int n = 0; n < 64; n++)
		radix_tree_node_rcu_free(&nodes[n].rcu_head);
}

static struct xa_node *kshim_node(void)
{
	struct xa_node *node;

	if (unlikely(!free_nodes))
		more_nodes();
	node = free_nodes;
	free_nodes = node->parent;
	return node;
}

#include "lib/xarray.c"
#if __has_include("io_uring/alloc_cache.c")
#include "io_uring/alloc_cache.c"
#endif
#include "io_pin_pages.inc"
#include "iov_iter_bvec.inc"
#if LINUX < 613
#include "io_uring/filetable.h"
#endif
#include "io_uring/rsrc.c"

/* ---- those that take files, of which there are none ---- */

#if LINUX >= 613
bool io_alloc_file_tables(struct io_ring_ctx *ctx, struct io_file_table *table, unsigned int n)
{
	BUG();
}
void io_free_file_tables(struct io_ring_ctx *ctx, struct io_file_table *table) { BUG(); }
#else
bool io_alloc_file_tables(struct io_file_table *table, unsigned int n) { BUG(); }
void io_free_file_tables(struct io_file_table *table) { BUG(); }
#endif
int io_fixed_fd_install(struct io_kiocb *req, unsigned int flags, struct file *file,
			unsigned int slot)
{
	BUG();
}
#if LINUX >= 606
io_req_flags_t io_file_get_flags(struct file *file) { BUG(); }
#endif

/* A buffer of a ring gets a slot of another, too, as a request for a clone has it. */
int kshim_ring_clone(struct io_ring_ctx *from, unsigned int nth, struct io_ring_ctx *ring,
		     unsigned int slot)
{
#if LINUX >= 702
	struct io_uring_clone_buffers request = {
		.flags = IORING_REGISTER_DST_REPLACE, .src_off = nth, .dst_off = slot, .nr = 1,
	};
	int err;

	lock_two_rings(ring, from);
	err = io_clone_buffers(ring, from, &request);
	mutex_unlock(&ring->uring_lock);
	mutex_unlock(&from->uring_lock);
	return err;
#else
	return -ENOSYS;
#endif
}

/* ---- a ring begins and ends, as io_uring.c has it ---- */

int kshim_ring_init(struct io_ring_ctx *ring)
{
#if LINUX >= 613
	xa_init(&ring->hpage_acct);
	return io_rsrc_cache_init(ring);
#elif LINUX < 602
	INIT_LIST_HEAD(&ring->rsrc_ref_list);
	INIT_DELAYED_WORK(&ring->rsrc_put_work, io_rsrc_put_work);
	if (io_rsrc_node_switch_start(ring))
		return -ENOMEM;
	io_rsrc_node_switch(ring, NULL);
	ring->dummy_ubuf = kzalloc(sizeof(*ring->dummy_ubuf), GFP_KERNEL);
	return ring->dummy_ubuf ? 0 : -ENOMEM;
#else
	INIT_LIST_HEAD(&ring->rsrc_ref_list);
	if (io_alloc_cache_init(&ring->rsrc_node_cache, IO_NODE_ALLOC_CACHE_MAX,
				sizeof(struct io_rsrc_node)))
		return -ENOMEM;
	return io_rsrc_init(ring);
#endif
}

/* Says whether huge pages are still counted. */
bool kshim_ring_free(struct io_ring_ctx *ring)
{
#if LINUX >= 613
	io_rsrc_cache_free(ring);
	return !xa_empty(&ring->hpage_acct);
#elif LINUX < 602
	io_rsrc_refs_drop(ring);
	io_rsrc_node_destroy(ring->rsrc_node);
	if (ring->rsrc_backup_node)
		io_rsrc_node_destroy(ring->rsrc_backup_node);
	kfree(ring->dummy_ubuf);
	return false;
#else
	io_rsrc_node_destroy(ring, ring->rsrc_node);
	io_alloc_cache_free(&ring->rsrc_node_cache, block_free);
	return false;
#endif
}
