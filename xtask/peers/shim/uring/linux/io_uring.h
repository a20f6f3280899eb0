/* Linux's own requests of rings, before those of this machine's headers. */
#include <uapi/linux/io_uring.h>
