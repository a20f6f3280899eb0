/* What VFIO's drivers know of each other, as far as its container asks for it. */
#ifndef __counted_by
#define __counted_by(member)
#endif
#include <uapi/linux/vfio.h>

struct vfio_device;
struct vfio_device_ops {
	void (*dma_unmap)(struct vfio_device *vdev, u64 iova, u64 length);
};
struct vfio_device {
	const struct vfio_device_ops *ops;
	struct list_head iommu_entry;
};
struct vfio_info_cap {
	struct vfio_info_cap_header *buf;
	size_t size;
};
struct vfio_info_cap_header *vfio_info_cap_add(struct vfio_info_cap *caps, size_t size, u16 id,
					       u16 version);
void vfio_info_cap_shift(struct vfio_info_cap *caps, size_t offset);
int vfio_info_add_capability(struct vfio_info_cap *caps, struct vfio_info_cap_header *cap,
			     size_t size);
