/* A kernel module: shows the table of the device in slot 5 by Linux's own code, in a kernel that was
   built without CONFIG_INTEL_IOMMU_DEBUGFS. shown.inc is a part of Linux's debugfs.c. */
#include <linux/debugfs.h>
#include <linux/dmar.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/seq_file.h>
#include "iommu.h"
#include "pasid.h"
static unsigned long units, find;
module_param(units, ulong, 0);
module_param(find, ulong, 0);
#undef for_each_active_iommu
#define for_each_active_iommu(found, unit) \
	list_for_each_entry_rcu(unit, (struct list_head *)units, list) \
		if (found = unit->iommu, unit->ignored) {} else
#define iommu_context_addr ((struct context_entry *(*)(struct intel_iommu *, u8, u8, int))find)
#include "shown.inc"
static int device_show(struct seq_file *m, void *unused)
{
	struct pci_dev *device = pci_get_domain_bus_and_slot(0, 0, PCI_DEVFN(5, 0));

	return domain_translation_struct_show(m, dev_iommu_priv_get(&device->dev), IOMMU_NO_PASID);
}
DEFINE_SHOW_ATTRIBUTE(device);
static int __init shower_init(void)
{
	debugfs_create_file("domain_translation_struct", 0444, NULL, NULL, &device_fops);
	return 0;
}
module_init(shower_init);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Shows a table of Intel's IOMMU");
