/* A kernel module: maps memory for the device in slot 5 by the kernel's own driver of its IOMMU, and
   leaves it mapped. */
#include <linux/iommu.h>
#include <linux/module.h>
#include <linux/mm.h>
#include <linux/pci.h>

static int map(struct iommu_domain *domain, u64 iova, unsigned int order, u64 pages, int prot)
{
	struct page *page = alloc_pages(GFP_KERNEL | __GFP_ZERO, order);

	if (!page)
		return -ENOMEM;
	return iommu_map(domain, iova, page_to_phys(page), pages << PAGE_SHIFT, prot, GFP_KERNEL);
}

static int __init mapper_init(void)
{
	struct pci_dev *device = pci_get_domain_bus_and_slot(0, 0, PCI_DEVFN(5, 0));
	struct iommu_domain *domain;
	int rw = IOMMU_READ | IOMMU_WRITE;
	u64 at;
	int error;

	if (!device)
		return -ENODEV;
	domain = iommu_paging_domain_alloc(&device->dev);
	if (IS_ERR(domain))
		return PTR_ERR(domain);
	error = iommu_attach_device(domain, &device->dev);
	if (error)
		return error;
	/* A large leaf, pages, 64K that may only be read; two of the pages go again. */
	error = map(domain, 0x40000000, 9, 512, rw);
	error = error ?: map(domain, 0x80001000, 4, 16, rw);
	for (at = 0; at < 16 && !error; at++)
		error = map(domain, 0x10000000 + 0x2000 * at, 0, 1, rw);
	error = error ?: map(domain, 0x20010000, 4, 16, IOMMU_READ);
	error = error ?: map(domain, 0x30000000, 3, 5, IOMMU_WRITE | IOMMU_READ | IOMMU_NOEXEC);
	error = error ?: map(domain, 0x3fffff000, 0, 1, rw);
	if (error)
		return error;
	iommu_unmap(domain, 0x10004000, PAGE_SIZE);
	iommu_unmap(domain, 0x30002000, PAGE_SIZE);
	return 0;
}
module_init(mapper_init);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Maps memory by the kernel's driver of an IOMMU");
