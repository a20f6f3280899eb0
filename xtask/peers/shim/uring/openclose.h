/* Files have no ring here. */
#define __io_close_fixed(ctx, flags, offset) BUG()
