/* How a ring pins. */
struct page **io_pin_pages(unsigned long uaddr, unsigned long len, int *npages);
