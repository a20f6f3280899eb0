/*
 * A server that does to Linux's page tables what it is told, and shows them: `bytes`.
 *
 * Requests come from stdin and replies go to stdout, all in words of 64 bits. A request is what to
 * do (enum request), how many words follow, and these words. A reply is a result, how often Linux
 * warned meanwhile, how many words follow, and these words. A negative result is -errno.
 */
#include <stdarg.h>
#include <linux/iommu.h>
#include <linux/io-pgtable.h>
#include <linux/generic_pt/iommu.h>
#include "drivers/iommu/iommu-pages.h"

#if LINUX < 603
#define iommu_map(domain, iova, pa, size, prot, gfp) iommu_map(domain, iova, pa, size, prot)
#endif

enum request {
	OPEN,		/* a table: struct config */
	SIZES,		/* use only these page sizes: sizes */
	MAP,		/* through the IOMMU core: iova, paddr, bytes, prot */
	MAP_PAGES,	/* through io-pgtable: iova, paddr, page size, pages, prot; replies bytes */
	UNMAP,		/* through the IOMMU core: iova, bytes; replies bytes */
	UNMAP_PAGES,	/* through io-pgtable: iova, page size, pages; replies bytes */
	ROOT,		/* replies what hardware is told of the root now */
	READ,		/* which memory (0 the CPU's, 1 hardware's), bytes of a table, tables...; replies words */
	POKE,		/* as hardware does: paddr, bytes, value */
	DIRTY,		/* iova, bytes, flags; replies pairs of iova and bytes */
	CLOSE,		/* replies how many pages of tables are left */
	TRANSLATE,	/* through io-pgtable: iova, what the stack has; replies paddr */
};

/* formats: what comes before FIRST_PT is an enum io_pgtable_fmt */
enum { FIRST_PT = 100, AMDV1 = FIRST_PT, VTDSS, X86_64, RISCV_64 };

struct config {
	u64 format;
	u64 features;	/* quirks of io-pgtable, features of generic_pt */
	u64 pgsizes;
	u64 ias, oas;
	u64 coherent;
	u64 top_level;	/* of generic_pt */
	u64 phys;	/* where the arena's memory is, for hardware */
	u64 sme_mask;
};

#define ARENA_BYTES (128UL << 20)
#define WORDS_MAX (4UL << 20)

static u64 in[1 << 16], out[WORDS_MAX];
static size_t replied;

__attribute__((__format__(__printf__, 1, 2), __noreturn__))
static void die(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

/* ---- what the shim asks for ---- */

u64 kshim_phys_offset, kshim_sme_mask;
static char *image;	/* what hardware sees of the arena where it does not see the CPU's caches */

static bool in_arena(const void *p, size_t size)
{
	uintptr_t start = (uintptr_t)p - ARENA_BASE;

	return start < ARENA_BYTES && size <= ARENA_BYTES - start;
}

/* whole cache lines, as hardware writes them back */
void kshim_write_back(const void *p, size_t size)
{
	uintptr_t start = ALIGN_DOWN((uintptr_t)p, 64), end = ALIGN((uintptr_t)p + size, 64);

	if (!in_arena((void *)start, end - start))
		BUG();
	memcpy(image + (start - ARENA_BASE), (void *)start, end - start);
}

static void reply(u64 word)
{
	if (replied == WORDS_MAX)
		die("bytes: a reply of more than %lu words", WORDS_MAX);
	out[replied++] = word;
}

void iova_bitmap_set(struct iova_bitmap *bitmap, unsigned long iova, size_t length)
{
	reply(iova);
	reply(length);
}

/* ---- the tables, under drivers without hardware ---- */

static struct {
	union {
		struct iommu_domain domain;
		struct pt_iommu pt;
		struct pt_iommu_amdv1 amdv1;
		struct pt_iommu_vtdss vtdss;
		struct pt_iommu_x86_64 x86_64;
		struct pt_iommu_riscv_64 riscv_64;
	};
	struct io_pgtable_ops *ops;	/* of io-pgtable only */
	struct io_pgtable_cfg cfg;
	struct config config;
	bool open;
} table;

static struct device walker;
static spinlock_t top_lock;
static void change_top(struct pt_iommu *pt, phys_addr_t top, unsigned int level) { }
static spinlock_t *get_top_lock(struct pt_iommu *pt) { return &top_lock; }
static const struct pt_iommu_driver_ops driver_ops = { change_top, get_top_lock };

static void flush_all(void *cookie) { }
static void flush_walk(unsigned long iova, size_t size, size_t granule, void *cookie) { }
static void add_page(struct iommu_iotlb_gather *gather, unsigned long iova, size_t granule,
		     void *cookie)
{
	iommu_iotlb_gather_add_page(&table.domain, gather, iova, granule);
}
static const struct iommu_flush_ops flush_ops = { flush_all, flush_walk, add_page };

static void iotlb_sync(struct iommu_domain *d, struct iommu_iotlb_gather *gather)
{
	if (table.config.format >= FIRST_PT)
		iommu_put_pages_list(&gather->freelist);
}

static int domain_map(struct iommu_domain *d, unsigned long iova, phys_addr_t pa, size_t pgsize,
		      size_t n, int prot, gfp_t gfp, size_t *mapped)
{
	return table.ops->map_pages(table.ops, iova, pa, pgsize, n, prot, gfp, mapped);
}

static size_t domain_unmap(struct iommu_domain *d, unsigned long iova, size_t pgsize, size_t n,
			   struct iommu_iotlb_gather *gather)
{
	return table.ops->unmap_pages(table.ops, iova, pgsize, n, gather);
}

static const struct iommu_domain_ops io_pgtable_ops = {
	.map_pages = domain_map,
	.unmap_pages = domain_unmap,
	.iotlb_sync = iotlb_sync,
};
static const struct iommu_domain_ops pt_ops = { .iotlb_sync = iotlb_sync };

static s64 open_io_pgtable(const struct config *c)
{
	struct io_pgtable_cfg *cfg = &table.cfg;

	*cfg = (struct io_pgtable_cfg){
		.quirks = c->features,
		.pgsize_bitmap = c->pgsizes,
		.ias = c->ias,
		.oas = c->oas,
		.coherent_walk = c->coherent,
		.tlb = &flush_ops,
		.iommu_dev = &walker,
	};
	table.ops = alloc_io_pgtable_ops(c->format, cfg, &table);
	if (!table.ops)
		return -EINVAL;
	table.domain.type = __IOMMU_DOMAIN_PAGING;
	table.domain.ops = &io_pgtable_ops;
	table.domain.pgsize_bitmap = cfg->pgsize_bitmap;
	return 0;
}

static s64 open_pt(const struct config *c)
{
	struct pt_iommu_cfg common = {
		.features = c->features,
		.hw_max_vasz_lg2 = c->ias,
		.hw_max_oasz_lg2 = c->oas,
	};
	struct pt_iommu_amdv1_cfg amdv1 = { common, c->top_level };
	struct pt_iommu_vtdss_cfg vtdss = { common, c->top_level };
	struct pt_iommu_x86_64_cfg x86_64 = { common, c->top_level };

	table.pt.driver_ops = &driver_ops;
	table.pt.iommu_device = &walker;
	table.pt.nid = NUMA_NO_NODE;
	table.domain.ops = &pt_ops;
	switch (c->format) {
	case AMDV1:
		return pt_iommu_amdv1_init(&table.amdv1, &amdv1, GFP_KERNEL);
	case VTDSS:
		return pt_iommu_vtdss_init(&table.vtdss, &vtdss, GFP_KERNEL);
	case X86_64:
		return pt_iommu_x86_64_init(&table.x86_64, &x86_64, GFP_KERNEL);
	case RISCV_64: {
		struct pt_iommu_riscv_64_cfg riscv_64 = { common };

		return pt_iommu_riscv_64_init(&table.riscv_64, &riscv_64, GFP_KERNEL);
	}
	default:
		return -ENOENT;
	}
}

static s64 do_open(const struct config *c)
{
	s64 ret;

	memset(&table, 0, sizeof(table));
	table.config = *c;
	kshim_phys_offset = c->phys - ARENA_BASE;
	kshim_sme_mask = c->sme_mask;
	ret = c->format < FIRST_PT ? open_io_pgtable(c) : open_pt(c);
	table.open = !ret;
	reply(table.domain.pgsize_bitmap);
	return ret;
}

static s64 do_close(void)
{
	if (table.config.format < FIRST_PT)
		free_io_pgtable_ops(table.ops);
	else
		pt_iommu_deinit(&table.pt);
	table.open = false;
	reply(kshim_pages_live());
	return 0;
}

static void root_pt(void)
{
	struct pt_iommu_amdv1_hw_info amdv1;
	struct pt_iommu_vtdss_hw_info vtdss;
	struct pt_iommu_x86_64_hw_info x86_64;
	struct pt_iommu_riscv_64_hw_info riscv_64;

	switch (table.config.format) {
	case AMDV1:
		pt_iommu_amdv1_hw_info(&table.amdv1, &amdv1);
		reply(amdv1.host_pt_root);
		reply(amdv1.mode);
		break;
	case VTDSS:
		pt_iommu_vtdss_hw_info(&table.vtdss, &vtdss);
		reply(vtdss.ssptptr);
		reply(vtdss.aw);
		break;
	case X86_64:
		pt_iommu_x86_64_hw_info(&table.x86_64, &x86_64);
		reply(x86_64.gcr3_pt);
		reply(x86_64.levels);
		break;
	case RISCV_64:
		pt_iommu_riscv_64_hw_info(&table.riscv_64, &riscv_64);
		reply(riscv_64.ppn << PAGE_SHIFT);
		reply(riscv_64.fsc_iosatp_mode);
		break;
	}
}

static s64 do_root(void)
{
	const struct io_pgtable_cfg *cfg = &table.cfg;

	switch (table.config.format) {
	case ARM_64_LPAE_S1:
	case ARM_32_LPAE_S1:
		reply(cfg->arm_lpae_s1_cfg.ttbr);
		reply(cfg->arm_lpae_s1_cfg.tcr.tsz);
		reply(cfg->arm_lpae_s1_cfg.tcr.irgn);
		reply(cfg->arm_lpae_s1_cfg.tcr.orgn);
		reply(cfg->arm_lpae_s1_cfg.tcr.sh);
		reply(cfg->arm_lpae_s1_cfg.tcr.tg);
		reply(cfg->arm_lpae_s1_cfg.tcr.ips);
		reply(cfg->arm_lpae_s1_cfg.mair);
		break;
	case ARM_64_LPAE_S2:
	case ARM_32_LPAE_S2:
		reply(cfg->arm_lpae_s2_cfg.vttbr);
		reply(cfg->arm_lpae_s2_cfg.vtcr.tsz);
		reply(cfg->arm_lpae_s2_cfg.vtcr.irgn);
		reply(cfg->arm_lpae_s2_cfg.vtcr.orgn);
		reply(cfg->arm_lpae_s2_cfg.vtcr.sh);
		reply(cfg->arm_lpae_s2_cfg.vtcr.tg);
		reply(cfg->arm_lpae_s2_cfg.vtcr.ps);
		reply(cfg->arm_lpae_s2_cfg.vtcr.sl);
		break;
	case ARM_V7S:
		reply(cfg->arm_v7s_cfg.ttbr);
		reply(cfg->arm_v7s_cfg.tcr);
		reply(cfg->arm_v7s_cfg.prrr);
		reply(cfg->arm_v7s_cfg.nmrr);
		break;
	default:
		root_pt();
	}
	return 0;
}

/* ---- operations ---- */

static s64 do_map_pages(unsigned long iova, phys_addr_t pa, size_t pgsize, size_t n, int prot)
{
	size_t done = 0;
	int err = 0;

	while (!err && done < n * pgsize) {
		size_t mapped = 0;

		err = domain_map(&table.domain, iova + done, pa + done, pgsize,
				 n - done / pgsize, prot, GFP_KERNEL, &mapped);
		done += mapped;
		if (!err && !mapped)
			die("bytes: map_pages made no progress");
	}
	reply(done);
	return err;
}

static s64 do_unmap_pages(unsigned long iova, size_t pgsize, size_t n)
{
	struct iommu_iotlb_gather gather;
	size_t done = 0, unmapped;

	iommu_iotlb_gather_init(&gather);
	do {
		unmapped = domain_unmap(&table.domain, iova + done, pgsize,
					n - done / pgsize, &gather);
		done += unmapped;
	} while (unmapped && done < n * pgsize);
	iommu_iotlb_sync(&table.domain, &gather);
	reply(done);
	return 0;
}

static s64 do_dirty(unsigned long iova, size_t size, unsigned long flags)
{
	struct iommu_iotlb_gather gather;
	struct iommu_dirty_bitmap dirty;

	iommu_dirty_bitmap_init(&dirty, (void *)&dirty, &gather);
	switch (table.config.format) {
	case AMDV1:
		return pt_iommu_amdv1_read_and_clear_dirty(&table.domain, iova, size, flags, &dirty);
	case VTDSS:
		return pt_iommu_vtdss_read_and_clear_dirty(&table.domain, iova, size, flags, &dirty);
	default:
		return table.ops->read_and_clear_dirty(table.ops, iova, size, flags, &dirty);
	}
}

/* leaves a word all over the stack that the next call will use */
static __attribute__((__noinline__)) void fill_stack(u64 word)
{
	volatile u64 words[256];

	for (size_t i = 0; i < ARRAY_SIZE(words); i++)
		words[i] = word;
}

static s64 do_translate(u64 iova, u64 stack)
{
	if (!table.ops)
		return -EOPNOTSUPP;
	fill_stack(stack);
	reply(table.ops->iova_to_phys(table.ops, iova));
	return 0;
}

static s64 do_read(bool hardware, size_t bytes, const u64 *tables, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const char *from = phys_to_virt(tables[i]);

		if (!in_arena(from, bytes) || bytes % 8 || replied + bytes / 8 > WORDS_MAX)
			return -EFAULT;
		if (hardware)
			from = image + ((uintptr_t)from - ARENA_BASE);
		memcpy(&out[replied], from, bytes);
		replied += bytes / 8;
	}
	return 0;
}

static s64 do_poke(u64 paddr, size_t bytes, u64 value)
{
	char *at = phys_to_virt(paddr);

	if (!in_arena(at, bytes) || bytes > sizeof(value))
		return -EFAULT;
	memcpy(at, &value, bytes);
	kshim_write_back(at, bytes);
	return 0;
}

static s64 serve(u64 what, size_t n)
{
	static const u8 least[] = {
		[OPEN] = sizeof(struct config) / 8, [SIZES] = 1, [MAP] = 4, [MAP_PAGES] = 5,
		[UNMAP] = 2, [UNMAP_PAGES] = 3, [ROOT] = 0, [READ] = 2, [POKE] = 3, [DIRTY] = 3,
		[CLOSE] = 0, [TRANSLATE] = 2,
	};

	if (what >= ARRAY_SIZE(least) || n < least[what] || (what == OPEN) == table.open)
		die("bytes: request %llu of %zu words is none, or not now", what, n);
	switch ((enum request)what) {
	case OPEN:
		return do_open((const struct config *)in);
	case SIZES:
		table.domain.pgsize_bitmap = in[0];
		return 0;
	case MAP:
		return iommu_map(&table.domain, in[0], in[1], in[2], in[3], GFP_KERNEL);
	case MAP_PAGES:
		return do_map_pages(in[0], in[1], in[2], in[3], in[4]);
	case UNMAP:
		reply(iommu_unmap(&table.domain, in[0], in[1]));
		return 0;
	case UNMAP_PAGES:
		return do_unmap_pages(in[0], in[1], in[2]);
	case ROOT:
		return do_root();
	case READ:
		return do_read(in[0], in[1], in + 2, n - 2);
	case POKE:
		return do_poke(in[0], in[1], in[2]);
	case DIRTY:
		return do_dirty(in[0], in[1], in[2]);
	case CLOSE:
		return do_close();
	case TRANSLATE:
		return do_translate(in[0], in[1]);
	}
	return -EINVAL;
}

int main(void)
{
	u64 header[3];

	kshim_init(ARENA_BYTES);
	image = calloc(1, ARENA_BYTES);
	while (fread(header, sizeof(u64), 2, stdin) == 2) {
		u64 what = header[0], n = header[1];
		unsigned long warned = kshim_warns;

		if (n > ARRAY_SIZE(in) || fread(in, sizeof(u64), n, stdin) != n)
			die("bytes: a request that is cut off");
		replied = 0;
		header[0] = serve(what, n);
		header[1] = kshim_warns - warned;
		header[2] = replied;
		if (fwrite(header, sizeof(u64), 3, stdout) != 3 ||
		    fwrite(out, sizeof(u64), replied, stdout) != replied || fflush(stdout))
			die("bytes: nobody reads the replies");
	}
	return 0;
}
