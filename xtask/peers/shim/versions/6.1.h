/* What Linux 6.1 wants of a kernel besides, or otherwise. */
