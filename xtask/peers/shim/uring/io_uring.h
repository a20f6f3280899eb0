/* What of the ring its buffers need. */
#include "ring.h"
#if __has_include("io_uring/alloc_cache.h")
#include "io_uring/alloc_cache.h"
#endif
