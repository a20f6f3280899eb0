/*
 * The small memory of units that pin: a list of free blocks for each size, last in, first out, as a
 * slab's. What is larger comes from the C library.
 */
#define BLOCK 64
#define BLOCK_SIZES 129	/* to 8 KiB, as the kernel's slabs */
#define CHUNK SZ_64K

/* begins on a multiple of CHUNK and has blocks of one size, or a single one */
struct chunk { size_t size; };
static struct block { struct block *next; } *free_blocks[BLOCK_SIZES];

static struct chunk *new_chunk(size_t bytes, size_t size)
{
	struct chunk *chunk = aligned_alloc(CHUNK, ALIGN(bytes, CHUNK));

	if (!chunk)
		BUG();
	chunk->size = size;
	return chunk;
}

static void block_free(const void *p)
{
	struct chunk *chunk = (void *)ALIGN_DOWN((unsigned long)p, CHUNK);
	struct block *b = (void *)p;

	if (!p)
		return;
	if (unlikely(chunk->size >= BLOCK_SIZES))
		return free(chunk);
	b->next = free_blocks[chunk->size];
	free_blocks[chunk->size] = b;
}

static noinline void more_blocks(size_t size)
{
	struct chunk *chunk = new_chunk(CHUNK, size);

	for (size_t n = (CHUNK / BLOCK - 1) / size; n; n--)
		block_free((char *)chunk + BLOCK + (n - 1) * size * BLOCK);
}

static void *block_alloc(size_t bytes)
{
	size_t size = DIV_ROUND_UP(bytes, BLOCK);
	struct block *b;

	if (unlikely(size >= BLOCK_SIZES))
		return (char *)new_chunk(bytes + BLOCK, size) + BLOCK;
	if (unlikely(!free_blocks[size]))
		more_blocks(size);
	b = free_blocks[size];
	free_blocks[size] = b->next;
	return b;
}

#undef kmalloc
#undef kzalloc
#undef kcalloc
#undef kfree
#undef kmalloc_obj
#undef kzalloc_obj
#define kmalloc(size, gfp) block_alloc(size)
#define kzalloc(size, gfp) memset(block_alloc(size), 0, size)
#define kcalloc(n, size, gfp) kzalloc((size_t)(n) * (size), gfp)
#define kfree block_free
#define kmalloc_obj(var, ...) ((__typeof__(var) *)kmalloc(sizeof(var), 0))
#define kzalloc_obj(var, ...) ((__typeof__(var) *)kzalloc(sizeof(var), 0))
#define kvzalloc(size, gfp) kzalloc(size, gfp)
#define kvfree kfree
