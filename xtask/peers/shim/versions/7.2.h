/* What Linux 7.2 wants of a kernel besides, or otherwise. */
