/* examples/llama/team.c: every part runs once a round, on its own thread, and sees what was written before. */
#define _GNU_SOURCE
#include "../examples/llama/team.h"
#include "test.h"

static const int sizes[] = {1, 2, 3, 8};

typedef struct round_work {
    int64_t turn, seen[8];
    pthread_t thread[8];
    int slow; /* this part sleeps 3 ms, longer than anyone spins; -1: none */
} round_work;

static void part(void *arg, int i, int n) {
    round_work *w = arg;
    if (i == w->slow) usleep(3000);
    w->seen[i] += w->turn; /* plain memory: ThreadSanitizer sees a missing order */
    w->thread[i] = pthread_self();
    (void)n;
}

static void check_round(team *t, round_work *w, int64_t *sum) {
    int n = team_size(t);
    w->turn++;
    *sum += w->turn;
    team_run(t, n, part, w);
    for (int i = 0; i < n; i++) {
        CHECK_INT(w->seen[i], *sum);
        for (int j = 0; j < i; j++) CHECK(!pthread_equal(w->thread[i], w->thread[j]));
    }
}

static void rounds(void) {
    for (int s = 0; s < COUNT(sizes); s++) {
        team *t = team_open(sizes[s]);
        round_work w = {.slow = -1};
        int64_t sum = 0;
        CHECK_INT(team_size(t), sizes[s]);
        for (int i = 0; i < 2000; i++) check_round(t, &w, &sum);
        CHECK(pthread_equal(w.thread[0], pthread_self()));
        team_close(t);
    }
}

/* Members that fell asleep are woken, and so is a caller that waits for a slow one. */
static void sleepers(void) {
    for (int s = 0; s < COUNT(sizes); s++) {
        team *t = team_open(sizes[s]);
        round_work w = {.slow = -1};
        int64_t sum = 0;
        for (int i = 0; i < 20; i++) {
            w.slow = i % 3 ? i % sizes[s] : -1;
            if (i % 2) usleep(3000);
            check_round(t, &w, &sum);
        }
        team_close(t);
    }
}

static void open_and_close(void) {
    team_close(NULL);
    for (int i = 0; i < 50; i++) {
        team *t = team_open(sizes[i % COUNT(sizes)]);
        if (i % 3 == 0) usleep(3000); /* asleep by then */
        team_close(t);
    }
}

int main(void) {
    static const test_case cases[] = {
        {"every part once a round", rounds, 0},
        {"sleepers are woken", sleepers, 0},
        {"opened and closed", open_and_close, 0},
    };
    return run_cases("team", cases, COUNT(cases));
}
