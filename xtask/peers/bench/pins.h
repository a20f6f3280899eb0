/*
 * The simulation of pins, the same as in crates/dmaspan-bench/benches/peers/pins.rs: a process has
 * memory in folios, and a pin finds them by the leaves of its page table. For each folio it adds to
 * a count. What else the kernel does is so many instructions. Or it has registers of a device, which are
 * followed leaf by leaf.
 */
#include <sys/mman.h>
#include "user_mm.h"

#define FIRST_FRAME 0x100000000UL	/* at 16 TiB */
#define REGISTERS_FRAME 0x200000000UL	/* at 32 TiB */
#define USER 0x7e0000000000UL
#define PLACES 4	/* folios that are scattered: one of so many places is used */
#define STRIDE 40503UL	/* odd, so that each folio has a place of its own */

enum lie { NEIGHBOURS, SCATTERED, REGISTERS };

/* What a pin costs beside what is done here, in instructions; an unpin costs its pages alone. */
struct cost { unsigned long call, page; };

static struct user {
	unsigned int order;	/* log2 of the pages of a folio */
	unsigned long leaves;
	unsigned long *pfns;	/* where each folio begins */
	unsigned long registers;	/* pages of a device, which take the place of memory */
	struct cost cost;
} user;
static spinlock_t table_lock;	/* of the table that the registers' leaves are in */
unsigned long kshim_first_pfn = FIRST_FRAME, kshim_frames;

/* So many instructions, an even number. */
static __always_inline void spend(unsigned long instructions)
{
	if (instructions)
		__asm__ __volatile__("1: sub $2, %0\n\tja 1b" : "+r"(instructions) : : "cc");
}

static void user_create(unsigned long pages, unsigned int order, enum lie lie, struct cost cost)
{
	unsigned long places;
	void *map;

	user = (struct user){ .order = order, .leaves = pages >> order, .cost = cost };
	if (lie == REGISTERS) {
		user.registers = pages;
		user.leaves = 0;
		return;
	}
	user.pfns = malloc(user.leaves * sizeof(*user.pfns));
	places = roundup_pow_of_two(user.leaves) * PLACES;
	for (unsigned long n = 0; n < user.leaves; n++)
		user.pfns[n] = FIRST_FRAME +
			       ((lie == SCATTERED ? n * STRIDE & (places - 1) : n) << order);
	kshim_frames = places << order;
	map = mmap(pfn_to_page(FIRST_FRAME), kshim_frames * sizeof(struct page),
		   PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
	if (map != pfn_to_page(FIRST_FRAME))
		die("no room for the map of the user's pages");
	for (unsigned long n = 0; order && n < user.leaves; n++) {
		struct page *head = pfn_to_page(user.pfns[n]);

		head->flags = PG_HEAD;
		head->order = order;
		for (unsigned long i = 1; i < 1UL << order; i++)
			head[i].head = (unsigned long)head | 1;
	}
}

/* Ends a user, of whom nothing may be pinned. */
static void user_destroy(void)
{
	if (user.registers)
		return;
	for (unsigned long n = 0; n < user.leaves; n++)
		if (pfn_to_page(user.pfns[n])->pins)
			die("pages are still pinned");
	munmap(pfn_to_page(FIRST_FRAME), kshim_frames * sizeof(struct page));
	free(user.pfns);
}

static __maybe_unused unsigned long user_pins(void)
{
	unsigned long pins = 0;

	for (unsigned long n = 0; n < user.leaves; n++)
		pins += pfn_to_page(user.pfns[n])->pins;
	return pins;
}

/* How many folios have pins. */
static __maybe_unused unsigned long user_folios_pinned(void)
{
	unsigned long pinned = 0;

	for (unsigned long n = 0; n < user.leaves; n++)
		pinned += pfn_to_page(user.pfns[n])->pins > 0;
	return pinned;
}

static __always_inline long pin_pages(unsigned long start, unsigned long count, struct page **pages)
{
	unsigned long next = (start - USER) >> PAGE_SHIFT, done = 0;
	unsigned long in_folio = (1UL << user.order) - 1;

	while (done < count && next >> user.order < user.leaves) {
		unsigned long offset = next & in_folio;
		unsigned long n = min(in_folio + 1 - offset, count - done);
		struct page *head = pfn_to_page(user.pfns[next >> user.order]);

		__atomic_fetch_add(&head->pins, n, __ATOMIC_RELAXED);
		for (unsigned long i = 0; i < n; i++)
			pages[done + i] = head + offset + i;
		done += n;
		next += n;
	}
	spend(user.cost.call + done * user.cost.page);
	return done ? (long)done : -EFAULT;
}

long kshim_pin_pages(unsigned long start, unsigned long count, struct page **pages)
{
	return pin_pages(start, count, pages);
}

int pin_user_pages_fast(unsigned long start, int count, unsigned int flags, struct page **pages)
{
	return pin_pages(start, count, pages);
}

void unpin_user_page_range_dirty_lock(struct page *page, unsigned long count, bool dirty)
{
	unsigned long in_folio = (1UL << user.order) - 1, done = 0;

	while (done < count) {
		unsigned long offset = (page_to_pfn(page) + done) & in_folio;
		unsigned long n = min(in_folio + 1 - offset, count - done);
		struct page *head = page + done - offset;

		if (dirty && !READ_ONCE(head->dirty))
			WRITE_ONCE(head->dirty, true);
		__atomic_fetch_sub(&head->pins, n, __ATOMIC_RELAXED);
		done += n;
	}
	spend(count * user.cost.page);
}

void unpin_user_pages_dirty_lock(struct page **pages, unsigned long count, bool dirty)
{
	for (unsigned long i = 0; i < count; i++)
		unpin_user_page_range_dirty_lock(pages[i], 1, dirty);
}

void unpin_user_pages(struct page **pages, unsigned long count)
{
	for (unsigned long i = 0; i < count; i++)
		unpin_user_page_range_dirty_lock(pages[i], 1, false);
}

void unpin_user_folio(struct folio *folio, unsigned long count)
{
	__atomic_fetch_sub(&folio->page.pins, count, __ATOMIC_RELAXED);
	spend(count * user.cost.page);
}

/* ---- registers of a device, whose leaves are as large as its folios would be ---- */

bool kshim_has_registers(unsigned long addr)
{
	return (addr - USER) >> PAGE_SHIFT < user.registers;
}

/* A look-up of an entry costs as much as the call of a pin. It holds the lock of the entry's table. */
int kshim_follow(unsigned long addr, unsigned long *pfn, unsigned long *leaf_mask)
{
	spin_lock(&table_lock);
	*pfn = REGISTERS_FRAME + ((addr - USER) >> PAGE_SHIFT);
	*leaf_mask = ~((PAGE_SIZE << user.order) - 1);
	spend(user.cost.call);
	return 0;
}

void kshim_follow_end(void)
{
	spin_unlock(&table_lock);
}
