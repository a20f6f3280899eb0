/* What of the ring its buffers need. */
#include "ring.h"
#include "io_uring/alloc_cache.h"
