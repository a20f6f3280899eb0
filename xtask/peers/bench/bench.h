/* What the benchmarks share: the clock, CPU pinning, medians, results. */
#include <sched.h>
#include <stdarg.h>
#include <time.h>

#define ROUNDS 41	/* timed rounds a result is the median of; two more warm up */
#define FRESH_ROUNDS 9	/* the same for long rounds, where one warms up */

static inline double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

__attribute__((__format__(__printf__, 1, 2), __noreturn__))
static void die(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

/* ---- cases: the names after the format's on the command line; without any, all ---- */

static char **wanted_cases;

static bool wanted(const char *name)
{
	for (char **c = wanted_cases; *c; c++)
		if (!strcmp(*c, name))
			return true;
	return !*wanted_cases;
}

/*
 * Under a counter of instructions: so many rounds, none of which warms up. A result is then how many
 * operations a round has.
 */
static int counted_rounds;

/*
 * The operation that alone is counted, where PEERS_COUNTED_OP names one: the counter begins without counting,
 * and is switched on and off. `map`, `unmap`, or `unmap_rest`: without look-ups of addresses.
 */
static const char *counted_op;
static bool is_counting;

static noinline __maybe_unused void count_toggle(void)
{
	unsigned long request[6] = { 0x43540002 };	/* CALLGRIND_TOGGLE_COLLECT */
	unsigned long answer = 0;

	__asm__ __volatile__("rolq $3, %%rdi; rolq $13, %%rdi; rolq $61, %%rdi; rolq $51, %%rdi\n\t"
			     "xchgq %%rbx, %%rbx"
			     : "+d"(answer) : "a"(request) : "cc", "memory");
}

/* Begins and ends what is counted, in every round but the first one. */
static __maybe_unused void count_only(int round, const char *op)
{
	if (!counted_op || !round || strncmp(counted_op, op, strlen(op)))
		return;
	is_counting = !is_counting;
	count_toggle();
}

static int timed(int rounds) { return counted_rounds ? min(counted_rounds, rounds) : rounds; }
static __maybe_unused int warm_up(int rounds) { return counted_rounds ? 0 : rounds; }

static void result(const char *name, const char *op, double ns)
{
	printf("%s %s %.3f\n", name, op, ns);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double median(double *v, int n)
{
	qsort(v, n, sizeof(*v), by_value);
	return v[n / 2];
}

/* ---- CPUs: single threads run on the second one allowed, away from most interrupts ---- */

static int cpus_allowed;
static int cpu_allowed[CPU_SETSIZE];

static void pin(int nth)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu_allowed[nth % cpus_allowed], &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		perror("sched_setaffinity");
}

static void bench_init(void)
{
	cpu_set_t set;

	if (getenv("PEERS_COUNTED_ROUNDS"))
		counted_rounds = atoi(getenv("PEERS_COUNTED_ROUNDS"));
	counted_op = getenv("PEERS_COUNTED_OP");
	if (sched_getaffinity(0, sizeof(set), &set))
		die("sched_getaffinity failed");
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &set))
			cpu_allowed[cpus_allowed++] = cpu;
	pin(1);
	kshim_init(96UL << 20);
	setvbuf(stdout, NULL, _IOLBF, 0);
}

static int bench_exit(void)
{
	return kshim_warns != 0;
}
