/*
 * Linux's container, VFIO type1, with what it alone expects around it. Its memory is a process's
 * whose pins are simulated elsewhere, or registers of a device, and nothing waits for anything.
 *
 * What no benchmark calls (emulated devices, dirty bitmaps, capabilities) compiles,
 * and ends the program if it is called.
 */
#include "user_mm.h"

#define U16_MAX UINT16_MAX
#define BITS_PER_BYTE 8
#define BITS_PER_TYPE(type) (sizeof(type) * BITS_PER_BYTE)
#define max_t(t, a, b) max((t)(a), (t)(b))
#define struct_size(p, member, n) (sizeof(*(p)) + sizeof((p)->member[0]) * (n))
#define __read_mostly
#define __exit
#define THIS_MODULE NULL
#define module_param_named(name, variable, type, mode)
#define MODULE_PARM_DESC(name, text)
#define MODULE_VERSION(text)
#define module_init(fn) int kshim_##fn(void) { return fn(); }
#define module_exit(fn) void kshim_##fn(void) { fn(); }
#define cond_resched()
#define GFP_KERNEL_ACCOUNT GFP_KERNEL
#define __get_free_page(gfp) __get_free_pages(gfp, 0)
#define free_page(addr) free_pages(addr, 0)
#define copy_from_user(to, from, n) (memcpy(to, from, n), 0UL)
#define copy_to_user(to, from, n) (memcpy(to, from, n), 0UL)
#define access_ok(p, n) true

#include "blocks.h"

/* ---- the process ---- */

static struct mm_struct kshim_mm = { .users = 1, .count = 1 };
struct task_struct kshim_task = {
	.mm = &kshim_mm, .group_leader = &kshim_task, .usage = 1, .memlock = 1UL << 40,
};

#define RLIMIT_MEMLOCK 8
#define rlimit(which) READ_ONCE(kshim_task.memlock)
#define task_rlimit(task, which) READ_ONCE((task)->memlock)
#define task_pid_nr(task) 1
#define CAP_IPC_LOCK 14
#define capable(cap) false

/* counts of references: each change is one locked instruction */
static inline bool mmget_not_zero(struct mm_struct *mm)
{
	int users = READ_ONCE(mm->users);

	while (users && !kshim_try_cmpxchg(&mm->users, &users, users + 1))
		;
	return users;
}
static inline void kshim_put(int *count)
{
	if (unlikely(!kshim_add(count, -1)))
		BUG();
}
#define mmput(mm) kshim_put(&(mm)->users)
#define mmgrab(mm) ((void)kshim_add(&(mm)->count, 1))
#define mmdrop(mm) kshim_put(&(mm)->count)
static inline struct task_struct *get_task_struct(struct task_struct *task)
{
	kshim_add(&task->usage, 1);
	return task;
}
#define put_task_struct(task) kshim_put(&(task)->usage)

/* Counts locked pages, against the limit of a process that has no privilege. */
static noinline int __account_locked_vm(struct mm_struct *mm, unsigned long pages, bool inc,
					struct task_struct *task, bool bypass)
{
	unsigned long limit = task_rlimit(task, RLIMIT_MEMLOCK) >> PAGE_SHIFT;

	if (!inc) {
		WARN_ON_ONCE(pages > mm->locked_vm);
		mm->locked_vm -= pages;
		return 0;
	}
	if (!bypass && mm->locked_vm + pages > limit)
		return -ENOMEM;
	mm->locked_vm += pages;
	return 0;
}

/* ---- its memory: nobody reserved a frame of the simulation, and registers have none ---- */

extern unsigned long kshim_first_pfn, kshim_frames;
#define pfn_valid(pfn) ((pfn) - kshim_first_pfn < kshim_frames)
#define PageReserved(page) ((READ_ONCE((page)->flags) & PG_RESERVED) != 0)
/* frames of one node, whose map has no sections */
#define memdesc_section(flags) 0UL
#define page_to_section(page) 0UL

struct vm_area_struct { unsigned long vm_flags; struct mm_struct *vm_mm; };
struct follow_pfnmap_args {
	struct vm_area_struct *vma;
	unsigned long address, pfn, addr_mask;
	bool writable;
};
#define VM_PFNMAP 0x400UL
#define FAULT_FLAG_WRITE 0x1u
#define FAULT_FLAG_REMOTE 0x80u
#define untagged_addr_remote(mm, addr) (addr)
static struct vm_area_struct kshim_registers = { VM_PFNMAP, &kshim_mm };
#define vma_lookup(mm, addr) (kshim_has_registers(addr) ? &kshim_registers : NULL)
static int follow_pfnmap_start(struct follow_pfnmap_args *args)
{
	args->writable = true;
	return kshim_follow(args->address, &args->pfn, &args->addr_mask);
}
#define follow_pfnmap_end(args) ((void)(args), kshim_follow_end())
#define fixup_user_fault(mm, addr, flags, unlocked) ({ (void)(unlocked); -EFAULT; })
#define kthread_use_mm(mm) BUG()
#define kthread_unuse_mm(mm) BUG()

#include <linux/rbtree.h>
#include <linux/iommu.h>
#include "num_pages_contiguous.inc"

/* ---- called by no benchmark ---- */

#define bitmap_set(map, start, count) BUG()
#define bitmap_clear(map, start, count) BUG()
#define bitmap_shift_left(to, from, shift, count) BUG()
#define bitmap_or(to, a, b, count) ({ (void)(b); BUG(); })
#define mutex_init(m) ((void)((m)->held = 0))

#include "drivers/vfio/vfio_iommu_type1.c"

struct vfio_info_cap_header *vfio_info_cap_add(struct vfio_info_cap *caps, size_t size, u16 id,
					       u16 version)
{
	BUG();
}
void vfio_info_cap_shift(struct vfio_info_cap *caps, size_t offset) { BUG(); }
int vfio_info_add_capability(struct vfio_info_cap *caps, struct vfio_info_cap_header *cap,
			     size_t size)
{
	BUG();
}

/* ---- VFIO, which has this container alone ---- */

const struct vfio_iommu_driver_ops *kshim_container;

int vfio_register_iommu_driver(const struct vfio_iommu_driver_ops *ops)
{
	kshim_container = ops;
	return 0;
}
void vfio_unregister_iommu_driver(const struct vfio_iommu_driver_ops *ops) { }

/* ---- a group of one device, whose interrupts are isolated and which has no reserved regions ---- */

static struct device kshim_device;

int iommu_group_for_each_dev(struct iommu_group *group, void *data,
			     int (*fn)(struct device *, void *))
{
	return fn(&kshim_device, data);
}
int iommu_get_group_resv_regions(struct iommu_group *group, struct list_head *head) { return 0; }
bool iommu_group_has_isolated_msi(struct iommu_group *group) { return true; }
int iommu_attach_group(struct iommu_domain *domain, struct iommu_group *group) { return 0; }
void iommu_detach_group(struct iommu_domain *domain, struct iommu_group *group) { }
bool device_iommu_capable(struct device *dev, enum iommu_cap cap) { return true; }
int iommu_enable_nesting(struct iommu_domain *domain) { BUG(); }
