/* What Linux 5.10 wants of a kernel besides, or otherwise. */
