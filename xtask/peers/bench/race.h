/* Races: the same work on one or two CPUs at once. */
#include <pthread.h>

struct racer {
	pthread_t thread;
	int id, cpu;
	double (*work)(int id, void *arg);
	void *arg;
	double ns;
};

static pthread_barrier_t starting_line;

/* Called by the work when it is prepared, right before it reads the clock. */
static void wait_for_start(void)
{
	pthread_barrier_wait(&starting_line);
}

static void *racer_main(void *p)
{
	struct racer *r = p;

	pin(r->cpu);
	kshim_cpu = r->id;
	r->ns = r->work(r->id, r->arg);
	return NULL;
}

/* Runs work on that many CPUs at once; returns the slowest thread's result. */
static double race(int threads, double (*work)(int id, void *arg), void *arg)
{
	struct racer racers[KSHIM_CPUS];
	double slowest = 0;

	pthread_barrier_init(&starting_line, NULL, threads);
	for (int i = 0; i < threads; i++) {
		racers[i] = (struct racer){ .id = i, .cpu = threads == 1 ? 1 : i,
					    .work = work, .arg = arg };
		if (pthread_create(&racers[i].thread, NULL, racer_main, &racers[i]))
			die("pthread_create failed");
	}
	for (int i = 0; i < threads; i++) {
		pthread_join(racers[i].thread, NULL);
		slowest = max(slowest, racers[i].ns);
	}
	pthread_barrier_destroy(&starting_line);
	return slowest;
}

/*
 * The median of ROUNDS races, in each of which every thread does so many pairs; no result where there
 * are fewer CPUs than threads.
 */
static void race_result(const char *name, int threads, int pairs,
			double (*work)(int id, void *arg), void *arg)
{
	double ns[ROUNDS];

	if (threads > cpus_allowed)
		return;
	if (!counted_rounds)
		race(threads, work, arg);
	for (int round = 0; round < timed(ROUNDS); round++)
		ns[round] = race(threads, work, arg);
	if (counted_rounds)
		return result(name, "pair", pairs);
	result(name, "pair", median(ns, ROUNDS));
}
