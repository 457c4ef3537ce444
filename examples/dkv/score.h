/* score.h: what dkv score grades, and the report of it. */
#ifndef SCORE_H
#define SCORE_H

#include "exams.h"

enum { DENSE, FIRST, MAX_METHODS = 256, MAX_WINDOWS = 16, WINDOW = 512 };

/* One way to attend: a pattern's cells, or everything. */
typedef struct {
    char name[1024];
    int against;                     /* the method it is compared with besides dense; DENSE: none */
    unsigned char *cells;            /* [L][Hkv][D], NULL: dense */
    lm_gating gating;
    int64_t n_cells;                 /* kept */
    double logical, physical, total; /* at T_c; total: with sink and recent */
    lm_grade_result *grade;          /* [questions] */
    double text_loss[MAX_WINDOWS], text_kl;
} method;

typedef struct {
    const exams *x;
    const method *m;                 /* [n], dense first */
    int n;
    int64_t windows, window;         /* of a text, and their tokens; 0: none */
    const char *text, *split;
} gradings;

void print_gradings(const gradings *g);
void print_gradings_json(const gradings *g);

#endif
