/*
 * Linux's registered buffers, as a ring calls them: a table of buffers registered and taken away, and
 * parts of a buffer imported, over simulated pins: `registered registered [CASE...]`
 *
 * Beside the times, `registered registered same` prints where buffers and parts of them are, and
 * `registered registered clones` what two rings of a user charge for buffers that share a large folio.
 */
#include "bench.h"
#include "ring.h"
#include "io_uring/rsrc.h"
#include "pins.h"

int kshim_ring_init(struct io_ring_ctx *ring);
bool kshim_ring_free(struct io_ring_ctx *ring);
int kshim_ring_clone(struct io_ring_ctx *from, unsigned int nth, struct io_ring_ctx *ring,
		     unsigned int slot);

#define FORMAT "registered"
#define TABLE_MOST 1024	/* buffers of a table */
#define PARTS 1024	/* imports of a round */
#define SECTOR 512	/* a part begins at a multiple of it */

static const struct kind {
	const char *name;
	unsigned long bytes;	/* of a buffer */
	unsigned int order;	/* log2 of the pages of a folio */
	enum lie lie;
	unsigned int buffers;	/* of the table */
} kinds[] = {
	{ "4k", SZ_4K, 0, SCATTERED, TABLE_MOST },
	{ "64k_base", SZ_64K, 0, SCATTERED, 256 },
	{ "64k_folio", SZ_64K, 4, SCATTERED, 256 },
	{ "16m_base", SZ_16M, 0, SCATTERED, 1 },
	{ "16m_run", SZ_16M, 0, NEIGHBOURS, 1 },
	{ "16m_thp", SZ_16M, 9, SCATTERED, 1 },
	{ "256m_base", SZ_256M, 0, SCATTERED, 1 },
	{ "256m_run", SZ_256M, 0, NEIGHBOURS, 1 },
	{ "256m_thp", SZ_256M, 9, SCATTERED, 1 },
	{ "1g_hugetlb", SZ_1G, 18, SCATTERED, 1 },
};

/* Parts are imported of the last four. */
#define FIRST_IMPORTED 6

static const struct { const char *name; struct cost cost; } costs[] = {
	{ "cheap", { .call = 100, .page = 4 } },
	{ "dear", { .call = 1000, .page = 200 } },
};

static const struct { const char *name; unsigned long bytes; } parts[] = {
	{ "4k", SZ_4K }, { "64k", SZ_64K }, { "1m", SZ_1M }, { "8m", SZ_8M },
};

/* ---- a ring ---- */

static struct user_struct owner;	/* is charged, as it has no privilege */
static struct io_ring_ctx ring;

static void ring_create(const struct kind *kind, struct cost cost)
{
	user_create(kind->buffers * (kind->bytes >> PAGE_SHIFT), kind->order, kind->lie, cost);
	memset(&ring, 0, sizeof(ring));
	if (kshim_ring_init(&ring))
		die(FORMAT ": no room for a ring");
	ring.user = &owner;
	ring.mm_account = current->mm;
}

/* Ends it, where nothing may be left. */
static void ring_destroy(void)
{
	if (kshim_ring_free(&ring) || owner.locked_vm.counter || current->mm->pinned_vm.counter)
		die(FORMAT ": %ld pages are still charged", owner.locked_vm.counter);
	user_destroy();
}

/* The lock of the ring is taken by each system call. */
static __always_inline void register_table(const struct kind *kind)
{
	struct iovec table[TABLE_MOST];
	int err;

	for (unsigned int nth = 0; nth < kind->buffers; nth++)
		table[nth] = (struct iovec){ (void *)(USER + nth * kind->bytes), kind->bytes };
	mutex_lock(&ring.uring_lock);
	err = io_sqe_buffers_register(&ring, table, kind->buffers, NULL);
	mutex_unlock(&ring.uring_lock);
	if (unlikely(err))
		die(FORMAT ": %s: not registered: %d", kind->name, err);
}

static __always_inline void unregister_table(void)
{
	int err;

	mutex_lock(&ring.uring_lock);
	err = io_sqe_buffers_unregister(&ring);
	mutex_unlock(&ring.uring_lock);
	if (unlikely(err))
		die(FORMAT ": not unregistered: %d", err);
}

/* ns a table and its end, by its buffers */
static void bench_register(const struct kind *kind, struct cost cost, const char *name)
{
	double ns[ROUNDS], start;

	ring_create(kind, cost);
	for (int round = -warm_up(2); round < timed(ROUNDS); round++) {
		start = now_ns();
		register_table(kind);
		unregister_table();
		if (round >= 0)
			ns[round] = (now_ns() - start) / kind->buffers;
	}
	ring_destroy();
	result(name, "pair", counted_rounds ? kind->buffers : median(ns, ROUNDS));
}

/* ---- parts ---- */

/* Where the parts begin: always the same places. */
static void places(const struct kind *kind, unsigned long bytes, unsigned long *offsets)
{
	unsigned long sectors = (kind->bytes - bytes) / SECTOR + 1, state = 1;

	for (unsigned int nth = 0; nth < PARTS; nth++) {
		state = state * 6364136223846793005UL + 1442695040888963407UL;
		offsets[nth] = (state >> 33) % sectors * SECTOR;
	}
}

/* A request begins, which finds its part and holds the buffer, and ends, as its kind of request has it. */
#if LINUX >= 613
static __always_inline int import(struct io_kiocb *request, struct iov_iter *part, unsigned long from,
				  unsigned long bytes)
{
	request->flags = 0;
	return io_import_reg_buf(request, part, from, bytes, ITER_DEST, 0);
}

static __always_inline void end(struct io_kiocb *request)
{
	if (request->flags & REQ_F_BUF_NODE)
		io_put_rsrc_node(request->ctx, request->buf_node);
}
#else
static __always_inline int import(struct io_kiocb *request, struct iov_iter *part, unsigned long from,
				  unsigned long bytes)
{
	struct io_ring_ctx *ctx = request->ctx;
	unsigned int index = request->buf_index;

	if (unlikely(index >= ctx->nr_user_bufs))
		return -EFAULT;
	request->rsrc_node = NULL;
	io_req_set_rsrc_node(request, ctx, 0);
	index = array_index_nospec(index, ctx->nr_user_bufs);
	return io_import_fixed(ITER_DEST, part, ctx->user_bufs[index], from, bytes);
}

static __always_inline void end(struct io_kiocb *request)
{
#if LINUX < 602
	io_req_put_rsrc_locked(request, request->ctx);
#else
	io_put_rsrc_node(request->ctx, request->rsrc_node);
#endif
}
#endif

static __always_inline struct bvec_iter begin(struct io_kiocb *request, struct iov_iter *part,
					      unsigned long offset, unsigned long bytes)
{
	if (unlikely(import(request, part, USER + offset, bytes)))
		die(FORMAT ": not imported");
	return (struct bvec_iter){ .bi_size = part->count, .bi_bvec_done = part->iov_offset };
}

/* A segment of a part, behind which the next one begins. */
static __always_inline struct bio_vec next_segment(const struct bio_vec *table, struct bvec_iter *at)
{
	struct bio_vec segment = mp_bvec_iter_bvec(table, *at);

	bvec_iter_advance_single(table, at, segment.bv_len);
	return segment;
}

/* Uses what is in two registers. */
static __always_inline void use(unsigned long address, unsigned long bytes)
{
	__asm__ __volatile__("" : : "r"(address), "r"(bytes));
}

static __always_inline void import_parts(const unsigned long *offsets, unsigned long bytes, bool all)
{
	struct io_kiocb request = { .ctx = &ring };
	struct iov_iter part;
	struct bvec_iter at;
	struct bio_vec segment;

	mutex_lock(&ring.uring_lock);
	for (unsigned int nth = 0; nth < PARTS; nth++) {
		at = begin(&request, &part, offsets[nth], bytes);
		do {
			segment = next_segment(part.bvec, &at);
			use(bvec_phys(&segment), segment.bv_len);
		} while (all && at.bi_size);
		end(&request);
	}
	mutex_unlock(&ring.uring_lock);
}

/* ns a part, of which all segments are looked at or the first one */
static __always_inline void bench_import(const struct kind *kind, unsigned long bytes, bool all,
					 const char *name)
{
	static unsigned long offsets[PARTS];
	double ns[ROUNDS], start;

	ring_create(kind, costs[0].cost);
	register_table(kind);
	places(kind, bytes, offsets);
	for (int round = -warm_up(2); round < timed(ROUNDS); round++) {
		start = now_ns();
		import_parts(offsets, bytes, all);
		if (round >= 0)
			ns[round] = (now_ns() - start) / PARTS;
	}
	unregister_table();
	ring_destroy();
	result(name, "pair", counted_rounds ? PARTS : median(ns, ROUNDS));
}

/* ---- where they are ---- */

static struct found {
	unsigned long bytes, segments, sum;
	unsigned long start, end;	/* the segment that the next one may follow */
} found;

static void add(unsigned long value) { found.sum = (found.sum ^ value) * 0x100000001b3UL; }

/* Segments that touch count as one. */
static void find_segment(unsigned long start, unsigned long bytes)
{
	found.bytes += bytes;
	if (start == found.end) {
		found.end += bytes;
		return;
	}
	add(found.start);
	add(found.end);
	found.segments++;
	found.start = start;
	found.end = start + bytes;
}

static void find(unsigned int index, unsigned long offset, unsigned long bytes)
{
	struct io_kiocb request = { .ctx = &ring, .buf_index = index };
	struct iov_iter part;
	struct bvec_iter at = begin(&request, &part, offset, bytes);
	struct bio_vec segment;

	found.start = found.end = 0;
	while (at.bi_size) {
		segment = next_segment(part.bvec, &at);
		find_segment(bvec_phys(&segment), segment.bv_len);
	}
	add(found.start);
	add(found.end);
	end(&request);
}

static void print_found(const char *name, const char *what)
{
	printf("%s %s: %lu bytes in %lu segments that lead to %016lx\n", name, what, found.bytes,
	       found.segments, found.sum);
	found = (struct found){ };
}

static void print_same(const struct kind *kind)
{
	unsigned long offsets[PARTS];

	ring_create(kind, costs[0].cost);
	register_table(kind);
	for (unsigned int nth = 0; nth < kind->buffers; nth++)
		find(nth, nth * kind->bytes, kind->bytes);
	print_found(kind->name, "registered");
	printf("%s: %lu folios pinned, %lu pages charged\n", kind->name, user_folios_pinned(),
	       owner.locked_vm.counter);
	for (size_t i = 0; kind->buffers == 1 && i < ARRAY_SIZE(parts); i++) {
		places(kind, parts[i].bytes, offsets);
		for (unsigned int nth = 0; nth < PARTS; nth++)
			find(0, offsets[nth], parts[i].bytes);
		print_found(kind->name, parts[i].name);
	}
	unregister_table();
	printf("%s: %lu folios pinned, %lu pages charged\n", kind->name, user_folios_pinned(),
	       owner.locked_vm.counter);
	ring_destroy();
}

/* ---- what a user is charged for clones ---- */

static struct io_ring_ctx rings[2];

static void rings_create(void)
{
	user_create(512, 9, NEIGHBOURS, costs[0].cost);
	for (int i = 0; i < 2; i++) {
		memset(&rings[i], 0, sizeof(rings[i]));
		if (kshim_ring_init(&rings[i]))
			die(FORMAT ": no room for a ring");
		rings[i].user = &owner;
		rings[i].mm_account = current->mm;
	}
}

/* A ring gets a table of halves of the folio: the first `n` from `half` on. */
static void register_halves(struct io_ring_ctx *to, unsigned int half, unsigned int n)
{
	struct iovec table[2];

	for (unsigned int i = 0; i < n; i++)
		table[i] = (struct iovec){ (void *)(USER + (half + i) * SZ_1M), SZ_1M };
	if (io_sqe_buffers_register(to, table, n, NULL))
		die(FORMAT ": halves of a folio are not registered");
}

/* The buffer of a slot is taken away: an update with nothing. */
static void take_away(struct io_ring_ctx *from, unsigned int slot)
{
	struct iovec nothing = { };
	struct io_uring_rsrc_update2 update = {
		.offset = slot, .data = (unsigned long)&nothing, .nr = 1,
	};

	if (io_register_rsrc_update(from, &update, sizeof(update), IORING_RSRC_BUFFER) != 1)
		die(FORMAT ": a buffer is not taken away");
}

static void print_charged(const char *what)
{
	printf("  %s: %ld pages charged, the folio is %spinned\n", what, owner.locked_vm.counter,
	       user_pins() ? "" : "not ");
}

/* Whether the account is as it should be at the end. */
static void print_end(void)
{
	long left = owner.locked_vm.counter;

	printf("  => %s\n\n", left ? "as found" : "not in this Linux");
	owner.locked_vm.counter = 0;
	current->mm->pinned_vm.counter = 0;
	user_destroy();
}

static int print_clones(void)
{
	rings_create();
	printf("io_uring: a clone that outlives its original gives back what a neighbour still pins\n");
	register_halves(&rings[0], 0, 2);
	print_charged("a ring registers both halves of a folio");
	if (kshim_ring_clone(&rings[0], 1, &rings[1], 0))
		die(FORMAT ": not cloned");
	print_charged("another ring clones the second half");
	take_away(&rings[0], 1);
	print_charged("the first ring takes the second half away");
	io_sqe_buffers_unregister(&rings[1]);
	print_charged("the other ring takes its clone away");
	io_sqe_buffers_unregister(&rings[0]);
	print_charged("the first ring takes the first half away");
	print_end();

	rings_create();
	printf("io_uring: a clone beside a buffer that its ring registered is never given back\n");
	register_halves(&rings[0], 0, 1);
	register_halves(&rings[1], 1, 1);
	print_charged("two rings register a half of a folio each");
	if (kshim_ring_clone(&rings[0], 0, &rings[1], 1))
		die(FORMAT ": not cloned");
	print_charged("the second ring clones the first one's half");
	io_sqe_buffers_unregister(&rings[0]);
	print_charged("the first ring takes its half away");
	io_sqe_buffers_unregister(&rings[1]);
	print_charged("the second ring takes both halves away");
	print_end();
	return bench_exit();
}

int main(int argc, char **argv)
{
	char name[64];

	if (argc < 2 || strcmp(argv[1], FORMAT))
		die("usage: registered " FORMAT " [same | clones | CASE...]");
	wanted_cases = argv + 2;
	bench_init();
	if (argc == 3 && !strcmp(argv[2], "clones"))
		return print_clones();
	for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
		if (argc == 3 && !strcmp(argv[2], "same")) {
			print_same(&kinds[i]);
			continue;
		}
		for (size_t cost = 0; cost < ARRAY_SIZE(costs); cost++) {
			snprintf(name, sizeof(name), "%s_%s", kinds[i].name, costs[cost].name);
			if (wanted(name))
				bench_register(&kinds[i], costs[cost].cost, name);
		}
		for (size_t part = 0; i >= FIRST_IMPORTED && part < ARRAY_SIZE(parts); part++) {
			snprintf(name, sizeof(name), "import_%s_%s", parts[part].name, kinds[i].name);
			if (wanted(name))
				bench_import(&kinds[i], parts[part].bytes, false, name);
			snprintf(name, sizeof(name), "walk_%s_%s", parts[part].name, kinds[i].name);
			if (wanted(name))
				bench_import(&kinds[i], parts[part].bytes, true, name);
		}
	}
	return bench_exit();
}
