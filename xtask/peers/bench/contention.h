/*
 * The same operations by all CPUs, for a reader of what they access: CPUs take turns, so that no lock
 * is waited for, and each operation begins and ends with a store to an address of its own. These
 * addresses, and what else the reader has to know, are announced on stderr, where valgrind's lackey
 * writes as well.
 */
#include <pthread.h>
#include <unistd.h>

#define BATCH 16	/* operations of each kind in a turn */
#define TURNS_BEFORE 48	/* turns of each CPU that fill caches, and are not marked */
#define TURNS 32

enum operation { MAP, UNMAP, OPERATIONS };

/* By CPU and operation, where it begins and where it ends; the second half is announced to nobody. */
static volatile char marks[2][KSHIM_CPUS][OPERATIONS][2][64] __attribute__((aligned(4096)));
static __thread volatile char (*mark)[2][64];

static __always_inline void begins(enum operation operation)
{
	barrier();
	mark[operation][0][0] = 1;
	barrier();
}

static __always_inline void ends(enum operation operation)
{
	barrier();
	mark[operation][1][0] = 1;
	barrier();
}

static struct turns {
	void (*work)(int cpu, void *arg);
	void *arg;
	int token[KSHIM_CPUS][2];
} turns;

static void *turns_of_cpu(void *p)
{
	int cpu = (int (*)[2])p - turns.token;
	pthread_attr_t attr;
	char token, *stack;
	size_t bytes;

	kshim_cpu = cpu;
	if (pthread_getattr_np(pthread_self(), &attr) ||
	    pthread_attr_getstack(&attr, (void **)&stack, &bytes))
		die("where is the stack?");
	pthread_attr_destroy(&attr);
	dprintf(2, "contention stack %d %zx %zx\n", cpu, (size_t)stack, (size_t)stack + bytes);
	for (int turn = 0; turn < TURNS_BEFORE + TURNS; turn++) {
		if (read(turns.token[cpu][0], &token, 1) != 1)
			die("a turn was not given");
		usleep(2000);	/* by then the CPU that gave the turn waits for its next one */
		mark = marks[turn < TURNS_BEFORE][cpu];
		turns.work(cpu, turns.arg);
		if (write(turns.token[(cpu + 1) % KSHIM_CPUS][1], &token, 1) != 1)
			die("a turn was not given");
	}
	/* A thread that ends does much, which is to be in no operation of another's. */
	if (read(turns.token[cpu][0], &token, 1) != 1 ||
	    write(turns.token[(cpu + 1) % KSHIM_CPUS][1], &token, 1) != 1)
		die("a turn was not given");
	return NULL;
}

/* Announces what the reader has to know, and lets all CPUs do their work in turn. */
static void take_turns(void (*work)(int cpu, void *arg), void *arg)
{
	static const char *const names[OPERATIONS] = { "map", "unmap" };
	pthread_t threads[KSHIM_CPUS];
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");

	while (maps && fgets(line, sizeof(line), maps))
		dprintf(2, "contention mapping %s", line);
	dprintf(2, "contention tables %zx %zx\n", (size_t)ARENA_BASE, (size_t)ARENA_BASE + (96UL << 20));
	for (int cpu = 0; cpu < KSHIM_CPUS; cpu++)
		for (int operation = 0; operation < OPERATIONS; operation++)
			for (int edge = 0; edge < 2; edge++)
				dprintf(2, "contention mark %zx %d %s %s\n",
					(size_t)&marks[0][cpu][operation][edge][0], cpu,
					names[operation], edge ? "end" : "begin");
	turns.work = work;
	turns.arg = arg;
	for (int cpu = 0; cpu < KSHIM_CPUS; cpu++)
		if (pipe(turns.token[cpu]))
			die("no pipe");
	for (int cpu = 0; cpu < KSHIM_CPUS; cpu++)
		if (pthread_create(&threads[cpu], NULL, turns_of_cpu, turns.token[cpu]))
			die("pthread_create failed");
	if (write(turns.token[0][1], "", 1) != 1)
		die("a turn was not given");
	for (int cpu = 0; cpu < KSHIM_CPUS; cpu++)
		pthread_join(threads[cpu], NULL);
}
