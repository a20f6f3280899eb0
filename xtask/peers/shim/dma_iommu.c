/*
 * Linux's DMA API over an IOMMU, with what it alone expects around it. Devices see the CPU's
 * caches, and no memory is that of a PCI device.
 *
 * What no benchmark calls (MSIs, coherent memory, PCI's windows, maps into processes) compiles, and
 * is left out when the program is linked.
 */
#define __read_mostly
#define MAX_PAGE_ORDER 10
#define max_t(t, a, b) max((t)(a), (t)(b))
#define struct_size(p, member, n) (sizeof(*(p)) + sizeof((p)->member[0]) * (n))
#define bits_per(n) fls64(n)
#define kstrtobool(str, result) (*(result) = *(str) == '1', 0)
#define dev_notice kshim_silent
#define dev_warn_once kshim_silent
#define dev_name(dev) ""
#define arch_initcall(fn) static void *initcall_##fn __maybe_unused = (void *)(fn)
#define guard(kind) (void)

/* counters: reads are plain loads, and what changes one is a locked instruction */
typedef struct { s64 counter; } atomic64_t;
#define atomic_read(v) READ_ONCE((v)->counter)
#define atomic_set(v, n) WRITE_ONCE((v)->counter, n)
#define atomic_xchg(v, n) __atomic_exchange_n(&(v)->counter, n, __ATOMIC_SEQ_CST)
#define atomic64_read atomic_read
#define atomic64_set atomic_set
#define atomic64_inc(v) ((void)__atomic_fetch_add(&(v)->counter, 1, __ATOMIC_SEQ_CST))

/* a branch that the kernel patches out */
#define DEFINE_STATIC_KEY_FALSE(name) bool name
#define static_branch_unlikely(key) ((void)(key), false)
#define static_branch_enable(key) (*(key) = true)
#define is_kdump_kernel() false

/* a timer that never fires: each round ends before it would */
struct timer_list { void (*fn)(struct timer_list *); };
#define timer_setup(t, function, flags) ((void)((t)->fn = (function)))
#define mod_timer(t, expires) ((void)(t))
#define timer_delete_sync(t)
#define timer_container_of(var, timer, field) container_of(timer, __typeof__(*(var)), field)
#define jiffies 0

#define vmalloc(size) aligned_alloc(PAGE_SIZE, PAGE_ALIGN(size))
#define vfree free
#define kvfree free
#define kvzalloc_objs kzalloc_objs

#include <linux/iommu.h>
#include <linux/iova.h>
#include <linux/dma-mapping.h>
#include <linux/swiotlb.h>

/* ---- devices ---- */

struct bus_dma_region;
#define dma_range_map_min(map) 0ULL
#define dma_range_map_max(map) U64_MAX
struct resource { u64 start, end; };
struct resource_entry { struct list_head node; struct resource *res; u64 offset; };
struct pci_host_bridge { struct list_head windows, dma_ranges; };
struct pci_host_bridge *pci_find_host_bridge(void *bus);
#define dev_is_pci(dev) ((dev)->bus == &pci_bus_type)
#define to_pci_dev(d) container_of(d, struct pci_dev, dev)
#define IORESOURCE_MEM 0x200
#define resource_type(r) IORESOURCE_MEM
#define resource_list_for_each_entry(entry, list) list_for_each_entry(entry, list, node)
void list_sort(void *priv, struct list_head *head,
	       int (*cmp)(void *, const struct list_head *, const struct list_head *));
#define is_of_node(fwnode) ((fwnode) != NULL)
void iort_iommu_get_resv_regions(struct device *dev, struct list_head *head);
void of_iommu_get_resv_regions(struct device *dev, struct list_head *list);
#define dev_is_dma_coherent(dev) true
#define dev_assign_dma_iommu(d, is) ((d)->dma_iommu = (is))
#define dev_clear_dma_iommu(d) ((d)->dma_iommu = false)
#define dma_kmalloc_needs_bounce(dev, size, dir) false
#define dma_kmalloc_safe(dev, dir) true
#define dma_kmalloc_size_aligned(size) true
#define arch_sync_dma_for_cpu(addr, size, dir)
#define arch_sync_dma_for_device(addr, size, dir)
#define arch_sync_dma_flush()
#define trace_swiotlb_bounced(dev, addr, size)
struct p2pdma_provider { u64 bus_offset; };
struct pci_p2pdma_map_state { struct p2pdma_provider *mem; };
enum {
	PCI_P2PDMA_MAP_NONE,
	PCI_P2PDMA_MAP_BUS_ADDR,
	PCI_P2PDMA_MAP_THRU_HOST_BRIDGE,
};
#define pci_p2pdma_state(state, dev, page) PCI_P2PDMA_MAP_NONE
#define pci_p2pdma_bus_addr_map(provider, phys) ((phys) + (provider)->bus_offset)

/* ---- called by no benchmark ---- */

typedef unsigned long pgprot_t;
struct vm_area_struct { unsigned long vm_pgoff, vm_start, vm_end; pgprot_t vm_page_prot; };
#define PAGE_KERNEL 0
#define VM_MAP 0
#define __GFP_NORETRY 0
#define __free_page(page) __free_pages(page, 0)
#define split_page(page, order)
#define vma_pages(vma) (((vma)->vm_end - (vma)->vm_start) >> PAGE_SHIFT)
#define dma_pgprot(dev, prot, attrs) (prot)
#define PageHighMem(page) false
#define arch_dma_prep_coherent(page, size)
void *vmap(struct page **pages, unsigned int count, unsigned long flags, pgprot_t prot);
int vm_map_pages(struct vm_area_struct *vma, struct page **pages, unsigned long num);
int remap_pfn_range(struct vm_area_struct *vma, unsigned long at, unsigned long pfn,
		    unsigned long size, pgprot_t prot);
struct page *vmalloc_to_page(const void *p);
unsigned long vmalloc_to_pfn(const void *p);
struct page **dma_common_find_pages(void *cpu_addr);
void dma_common_free_remap(void *cpu_addr, size_t size);
void *dma_common_pages_remap(struct page **pages, size_t size, pgprot_t prot, const void *caller);
void *dma_common_contiguous_remap(struct page *page, size_t size, pgprot_t prot,
				  const void *caller);
struct page *dma_alloc_contiguous(struct device *dev, size_t size, gfp_t gfp);
void dma_free_contiguous(struct device *dev, struct page *page, size_t size);
bool dma_free_from_pool(struct device *dev, void *start, size_t size);
struct page *kshim_alloc_from_pool(struct device *dev, size_t size, void **cpu_addr, gfp_t gfp);
#define dma_alloc_from_pool(dev, size, cpu_addr, gfp, ...) \
	kshim_alloc_from_pool(dev, size, cpu_addr, gfp)
int dma_mmap_from_dev_coherent(struct device *dev, struct vm_area_struct *vma, void *p, size_t size,
			       int *ret);
struct msi_desc;
struct device *msi_desc_to_dev(struct msi_desc *desc);
void msi_desc_set_iommu_msi_iova(struct msi_desc *desc, u64 iova, unsigned int shift);
void iommu_group_mutex_assert(struct device *dev);

#include "drivers/iommu/dma-iommu.c"

static_assert(sizeof(struct iova_fq) + IOVA_DEFAULT_FQ_SIZE * sizeof(struct iova_fq_entry) <=
	      PERCPU_STRIDE);

/* ---- a PCI bus without windows, and an IOMMU without reserved regions ---- */

const char pci_bus_type;
static struct pci_host_bridge bridge = { LIST_HEAD_INIT(bridge.windows),
					 LIST_HEAD_INIT(bridge.dma_ranges) };

struct pci_host_bridge *pci_find_host_bridge(void *bus) { return &bridge; }
void list_sort(void *priv, struct list_head *head,
	       int (*cmp)(void *, const struct list_head *, const struct list_head *))
{
}
void iommu_get_resv_regions(struct device *dev, struct list_head *list) { }
void iommu_put_resv_regions(struct device *dev, struct list_head *list) { }
bool device_iommu_capable(struct device *dev, enum iommu_cap cap) { return true; }
