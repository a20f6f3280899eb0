/* What Linux 6.12 wants of a kernel besides, or otherwise. */
