/* How VFIO calls its containers. */
#ifndef KSHIM_VFIO_CONTAINER_H
#define KSHIM_VFIO_CONTAINER_H

struct iommu_group;
struct vfio_device;
enum vfio_group_type { VFIO_IOMMU, VFIO_EMULATED_IOMMU, VFIO_NO_IOMMU };

struct vfio_iommu_driver_ops {
	const char *name;
	const void *owner;
	void *(*open)(unsigned long kind);
	void (*release)(void *container);
	long (*ioctl)(void *container, unsigned int request, unsigned long arg);
	int (*attach_group)(void *container, struct iommu_group *group, enum vfio_group_type type);
	void (*detach_group)(void *container, struct iommu_group *group);
	int (*pin_pages)(void *container, struct iommu_group *group, dma_addr_t iova, int count,
			 int prot, struct page **pages);
	void (*unpin_pages)(void *container, dma_addr_t iova, int count);
	void (*register_device)(void *container, struct vfio_device *device);
	void (*unregister_device)(void *container, struct vfio_device *device);
	int (*dma_rw)(void *container, dma_addr_t iova, void *data, size_t count, bool write);
	struct iommu_domain *(*group_iommu_domain)(void *container, struct iommu_group *group);
#if LINUX < 602
	void (*notify)(void *container, enum vfio_iommu_notify_type event);
#endif
};

int vfio_register_iommu_driver(const struct vfio_iommu_driver_ops *ops);
void vfio_unregister_iommu_driver(const struct vfio_iommu_driver_ops *ops);

#endif
