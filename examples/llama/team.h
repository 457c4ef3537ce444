/* team.h: threads for work that comes in pieces of microseconds, as decoding does.
   Who waits spins, then lets others run, then sleeps: a piece that follows soon starts at once, and a core that another
   program needs, or another thread of the team, is not held for a time slice. */
#ifndef TEAM_H
#define TEAM_H

typedef struct team team;

team *team_open(int n);    /* n threads, the caller's own included; NULL: no memory, or no thread */
void  team_close(team *t); /* NULL is allowed */
int   team_size(const team *t);

/* Calls task(arg, i, n) for i = 0..n-1, each on its thread, and returns when all are done. n is the team's size. A
   dkv_parallel's run. One caller at a time. */
void team_run(void *team, int n, void (*task)(void *arg, int i, int n), void *arg);

#endif
