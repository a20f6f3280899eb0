/* What Linux 5.10 wants of a kernel besides, or otherwise. */
#define DEFINE_SPINLOCK(name) spinlock_t name
#define PageHighMem(page) false
#define dev_warn_once kshim_silent
#define swiotlb_adjust_size(bytes)
#define rounddown(x, y) ((x) / (y) * (y))
#define panic(...) BUG()
#define memblock_free_early(addr, size) free(phys_to_virt(addr))
#define mem_encrypt_active() false
