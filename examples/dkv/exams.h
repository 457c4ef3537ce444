/* exams.h: what probe, train and score share: a model, questions about needles in contexts, and the contexts' caches.

   A round is a manifest of each wording and kind (needles.h), in this order: its halves are its wordings. Context c of
   all rounds is number c % per_round of round c / per_round; its questions are question[c * per_context ..]. Nothing of
   a context is kept but its questions and, as far as memory allows, its cache: tokens are made again where needed. */
#ifndef EXAMS_H
#define EXAMS_H

#include "tool.h"

#include "../llama/learn.h"
#include "../llama/needles.h"

typedef struct {
    const char *model_path, *filler_path;
    int place;                 /* lm_place */
    int64_t threads;           /* 0: all processors */
    int64_t T_c, W, S, R;      /* -1: find_lengths says */
    int64_t per_context, seed;
    int64_t rounds, queries;   /* rounds 0: as many as make at least so many queries */
    int split;
    bool once;                 /* every context comes only once */
    double kv_gb;              /* memory for caches of contexts, GB; 0: 8, on a GPU 64 */
} exam_options;

typedef struct {
    exam_options o;
    lm_model *m;
    lm_tokenizer *tokenizer;
    lm_chat chat;
    lm_needles *needles;
    lm_learner *learner;
    char name[64];             /* of the model, as in dkv_pattern */
    int64_t D, per_round, contexts, per_context; /* contexts of all rounds */
    lm_question *question;     /* [contexts][per_context] */
    int64_t *bin;              /* the same: which bin each asks about */
    int64_t suffix_tokens;     /* of all questions together */
    uint64_t data_hash;        /* of all contexts and questions */
    uint64_t run_hash;         /* and of the model file, by name, shape and size, and the place: for states */
    lm_cache **cache;          /* [contexts], NULL: not prefilled, or not kept */
    int64_t kept, group;       /* contexts 0 .. kept - 1 stay; of the others, so many exist at a time */
    int64_t prefilled;         /* contexts so far */
    double opened, prefill_s;  /* when, and how long prefills took, seconds */
} exams;

/* The options that all three commands have, with the words for a default; split, rounds and the rest are theirs. */
#define EXAM_OPTIONS(o, n)                                                                                          \
    {'m', "model", "MODEL.gguf", OPT_TEXT, &(o).model_path, 0, 0, "a Llama-family model"},                          \
    {0, "needles", "N", OPT_INT, &(o).per_context, 1, LM_MAX_NEEDLES,                                               \
     "in a context, each in a bin of its own (default: " n ")"},                                                    \
    {0, "filler", "FILE", OPT_TEXT, &(o).filler_path, 0, 0, "a text around the needles (default: a sentence)"},     \
    {0, "seed", "N", OPT_INT, &(o).seed, 0, TWO_53, "of everything that is random (default: 0)"},                   \
    {0, "device", "cpu|cuda", OPT_CHOICE, &(o).place, 0, 0, "where to run (default: cpu)"},                         \
    {'t', "threads", "N", OPT_INT, &(o).threads, 1, 1024, "(default: all processors)"},                             \
    {0, "kv-memory", "GB", OPT_REAL, &(o).kv_gb, 1e-6, 1e6, "for caches of contexts (default: 8; cuda: 64)"}

#define LENGTH_OPTIONS(o, T, W_, S_, R_)                                                                            \
    {0, "ctx", "T", OPT_INT, &(o).T_c, 1, TWO_31, "sink, recent and whole bins (default: " T ")"},                  \
    {0, "bin-width", "W", OPT_INT, &(o).W, 1, TWO_31, "tokens of a bin (default: " W_ ")"},                         \
    {0, "sink", "S", OPT_INT, &(o).S, 0, TWO_31, "first tokens, always kept (default: " S_ ")"},                    \
    {0, "recent", "R", OPT_INT, &(o).R, 0, TWO_31, "last tokens, always kept (default: " R_ ")"}
/* What find_lengths says. */
#define FREE_LENGTHS(o) \
    LENGTH_OPTIONS(o, "what fits; cpu: up to 2048", "128; cpu: 32", "128; cpu: 32", "1024; cpu: 256")

/* Fills lengths that were not given: what the model takes, 256 tokens left for questions; on the CPU 2,048 tokens in
   small bins. Fails when T_c is not S + R and whole bins, one for each needle. */
void find_lengths(exam_options *o, int64_t n_ctx);
int64_t whole_bins(const exam_options *o, int64_t most); /* sink, recent and whole bins, of at most that many tokens */

void open_exams(exams *x, const exam_options *o); /* fails with one line; x must not move */
void close_exams(exams *x);
__attribute__((noreturn)) void fail_model(const exams *x); /* with lm_error; caches share memory with everything */

int kind_of(const exams *x, int64_t context);      /* LM_NUM, LM_WORD */

/* Calls work for contexts [first, first + n) in order, batch after batch, with their caches filled: e[n] are those from
   context first of all rounds on. */
typedef void batch_work(void *user, const lm_exam *e, int64_t n, int64_t first);
void each_batch(exams *x, int64_t first, int64_t n, batch_work *work, void *user);

/* A cache of all of tokens[n]: made, and filled. */
lm_cache *prefill_context(exams *x, const int32_t *tokens, int64_t n);
int64_t context_bytes(const exams *x); /* of one cache */

/* What is ahead, in one line on standard error: contexts that will be prefilled, bytes that they keep, and the floating
   point operations of prefill and of work on `questions` questions, forward only or back too. */
void say_cost(const exams *x, const char *what, int64_t prefills, int64_t questions, bool back);

/* Seconds of a context: its prefill, and its share of work, which is called twice for the first batch, or as much of it
   as makes no difference. */
typedef struct {
    double prefill, work;
} pace;
pace time_batch(exams *x, batch_work *work, void *user);

/* ---- states of long runs: what goes on where it stopped ------------------- */

/* FILE holds data[bytes], once the run's settings are the same: config is a hash of them. False: no such file yet. */
bool read_state(const char *path, uint64_t config, void *data, size_t bytes);
__attribute__((noreturn)) void refuse_state(const char *path); /* one that is none, or with values out of range */
void write_state(const char *path, uint64_t config, const void *data, size_t bytes);
uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes); /* FNV-1a; hash: 0, or of what stands before */

/* ---- progress ------------------------------------------------------------ */

/* A line on a terminal's standard error that the next one replaces; "" clears it. Nothing where there is none. */
__attribute__((format(printf, 1, 2))) void show_line(const char *format, ...);
const char *hms(double s); /* "4 d 1:02:03", "1:02:03", "2:03"; valid until the next call but one */

#endif
