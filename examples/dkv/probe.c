/* dkv probe: where each head retrieves. S[l][h][b] = the share of value tokens in bin b whose source is among the 5
   highest of head h (paper 3.1): mean over a question's value tokens, then over the questions of a bin and condition,
   then over the conditions (kinds x wordings x rounds). Questions that the model answers wrongly count like others. */
#define _GNU_SOURCE
#include "exams.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static exam_options o = {.T_c = -1, .W = -1, .S = -1, .R = -1, .per_context = 4, .rounds = 4, .split = LM_TRAIN,
                         .once = true};
static const char *output, *resume;
static bool dry_run;

/* What is known after some conditions; as a state it is one block. */
typedef struct {
    int64_t done;   /* conditions */
    int64_t cells;  /* L * H * D */
    double total[]; /* [L][H][D] sum over conditions, then [D] examples so far */
} tally;

/* One condition. */
typedef struct {
    exams *x;
    double *sum;     /* [L][H][D] */
    int64_t *count;  /* [D] */
} condition;

static void rank_batch(void *user, const lm_exam *e, int64_t n, int64_t first) {
    condition *c = user;
    const exams *x = c->x;
    const dkv_shape *s = &lm_get_params(x->m)->shape;
    const int64_t heads = (int64_t)s->L * s->H;
    float *hits = allocate((size_t)(n * x->per_context * heads), sizeof *hits), *hit = hits;
    if (lm_rank(x->learner, e, n, hits)) fail_model(x);
    for (int64_t q = first * x->per_context; q < (first + n) * x->per_context; q++, hit += heads) {
        c->count[x->bin[q]]++;
        for (int64_t i = 0; i < heads; i++) c->sum[i * x->D + x->bin[q]] += (double)hit[i];
    }
    free(hits);
}

static condition open_condition(exams *x) {
    const dkv_shape *s = &lm_get_params(x->m)->shape;
    return (condition){x, allocate((size_t)(s->L * s->H * x->D), sizeof(double)),
                       allocate((size_t)x->D, sizeof(int64_t))};
}

static void close_condition(condition *c) {
    free(c->sum);
    free(c->count);
}

static void take_condition(exams *x, tally *t) {
    const int64_t contexts = x->per_round / (LM_KINDS * LM_WORDINGS);
    condition c = open_condition(x);
    each_batch(x, t->done * contexts, contexts, rank_batch, &c);
    for (int64_t i = 0; i < t->cells; i++) t->total[i] += c.sum[i] / (double)c.count[i % x->D];
    for (int64_t b = 0; b < x->D; b++) t->total[t->cells + b] += (double)c.count[b];
    t->done++;
    close_condition(&c);
}

/* What that many contexts will take. */
static void say_time(exams *x, int64_t contexts) {
    condition c = open_condition(x);
    const pace each = time_batch(x, rank_batch, &c);
    fprintf(stderr, "probe: a context takes %.3g s to prefill and %.3g s to rank; all %s\n", each.prefill, each.work,
            hms((each.prefill + each.work) * (double)contexts));
    close_condition(&c);
}

static void save(const exams *x, const tally *t) {
    const dkv_shape *shape = &lm_get_params(x->m)->shape;
    score_table s = {.L = shape->L, .H = shape->H, .Hkv = shape->Hkv, .D = (int32_t)x->D, .W = x->o.W, .S = x->o.S,
                     .R = x->o.R, .T_c = x->o.T_c, .seed = (uint64_t)x->o.seed, .data_hash = x->data_hash};
    memcpy(s.model, x->name, sizeof s.model);
    snprintf(s.tool, sizeof s.tool, "dkv %s probe", dkv_version());
    s.count = allocate((size_t)x->D, sizeof *s.count);
    s.score = allocate((size_t)t->cells, sizeof *s.score);
    double mean = 0, questions = 0;
    for (int64_t b = 0; b < x->D; b++) {
        s.count[b] = (uint32_t)t->total[t->cells + b];
        questions += t->total[t->cells + b];
    }
    for (int64_t i = 0; i < t->cells; i++) {
        double share = t->total[i] / (double)t->done;
        s.score[i] = (float)(share < 1 ? share : 1); /* a sum of shares may round above */
        mean += share / (double)t->cells;
    }
    save_scores(&s, output);
    printf("%s: %.0f questions about %lld bins in %lld conditions, mean score %.4f\n", base_name(output), questions,
           (long long)x->D, (long long)t->done, mean);
    free_scores(&s);
}

int command_probe(int argc, char **argv) {
    const tool_option options[] = {
        EXAM_OPTIONS(o, "4"),
        FREE_LENGTHS(o),
        {'o', "output", "S.dks", OPT_TEXT, &output, 0, 0, "the score file to write"},
        {0, "rounds", "N", OPT_INT, &o.rounds, 1, 1000, "that ask about every bin in every condition (default: 4)"},
        {0, "resume", "FILE", OPT_TEXT, &resume, 0, 0, "keep the state there, and go on from it"},
        {0, "dry-run", NULL, OPT_FLAG, &dry_run, 0, 0, "say what it would cost"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, "dkv probe -m MODEL.gguf -o S.dks [options]", NULL);
    if (argc) usage("what is '%s'? see dkv probe --help", argv[0]);
    if (!o.model_path) usage("which model? give -m MODEL.gguf");
    if (!output && !dry_run) usage("where to? give -o S.dks");
    if (!dry_run) check_writable(output), check_apart(output, "--resume", resume);
    if (resume) check_writable(resume);
    exams x;
    open_exams(&x, &o);
    const dkv_shape *s = &lm_get_params(x.m)->shape;
    const int64_t cells = (int64_t)s->L * s->H * x.D, conditions = o.rounds * LM_KINDS * LM_WORDINGS;
    const size_t bytes = sizeof(tally) + (size_t)(cells + x.D) * sizeof(double);
    tally *t = allocate(1, bytes);
    t->cells = cells;
    if (resume && read_state(resume, x.run_hash, t, bytes) &&
        (t->cells != cells || t->done < 0 || t->done > conditions)) refuse_state(resume);
    const int64_t before = t->done, left = (conditions - before) * x.per_round / (LM_KINDS * LM_WORDINGS);
    if (dry_run || isatty(STDERR_FILENO)) say_cost(&x, "probe", left, left * x.per_context, false);
    if (dry_run && left) say_time(&x, left);
    const double start = seconds();
    while (!dry_run && t->done < conditions) {
        take_condition(&x, t);
        if (resume) write_state(resume, x.run_hash, t, bytes);
        show_line("probe: %lld of %lld conditions, %s left", (long long)t->done, (long long)conditions,
                  hms((seconds() - start) / (double)(t->done - before) * (double)(conditions - t->done)));
    }
    show_line("%s", "");
    if (!dry_run) save(&x, t);
    free(t);
    close_exams(&x);
    return 0;
}
