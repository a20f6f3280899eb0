/* What Linux 7.3 wants of a kernel besides, or otherwise. */
#define __context_unsafe(comment)
#define __guarded_by(...)
#define CONFIG_SWIOTLB_DEFAULT_SIZE_MB 64
#ifndef KSHIM_DMA	/* there <linux/dma-mapping.h> has it */
#define DMA_ATTR_CC_SHARED BIT(13)
#endif
/* no device is trusted with private memory, so none of it is encrypted */
#define phys_to_dma_encrypted(dev, addr) (addr)
struct kcov_common_handle_id { };
#define overflows_type(n, lvalue) __builtin_add_overflow_p(n, 0, (__typeof__(lvalue))0)
/* the benchmark of imports has the name that it had before */
#define bi_bvec_done bi_offset
