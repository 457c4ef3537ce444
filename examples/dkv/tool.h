/* tool.h: what the commands of dkv share. Every error is one line, "dkv: ...", that says what to do. */
#ifndef TOOL_H
#define TOOL_H

#include "../../distance_kv.h"

#include <stdbool.h>

/* ---- errors -------------------------------------------------------------- */

#define TOOL_PRINTF __attribute__((noreturn, format(printf, 1, 2)))
TOOL_PRINTF void fail(const char *format, ...);  /* bad data: exit status 1 */
TOOL_PRINTF void usage(const char *format, ...); /* bad arguments: exit status 2 */

void *allocate(size_t count, size_t size); /* zeroed; fails when memory is short */

/* ---- options ------------------------------------------------------------- */

typedef enum { OPT_FLAG, OPT_INT, OPT_REAL, OPT_TEXT, OPT_CHOICE, OPT_END } option_type;

/* Bounds of options: dkv_pattern's ranges, lengths, and the integers that a double holds. */
enum { MAX_SIDE = 4096, MAX_DIM = 576, MAX_BINS = 1 << 20 };
#define TWO_31 2147483648.
#define TWO_36 68719476736.
#define TWO_53 9007199254740992.

/* One option: what it is called, what --help says, where its value goes. */
typedef struct {
    char key;           /* short name, 0: none */
    const char *name;
    const char *value;  /* what --help calls its value; for OPT_CHOICE the choices, "one|two|three" */
    option_type type;
    void *target;       /* bool, int64_t, double, const char *, int (index of the choice) */
    double min, max;    /* of OPT_INT and OPT_REAL, inclusive */
    const char *help;
} tool_option;

/* Fills the targets and returns the operands, argc of them. --help prints synopsis, options and notes, and exits. */
char **parse_options(int *argc, char **argv, const tool_option *options, const char *synopsis, const char *notes);

#define BEYOND_CHOICES "error|clamp|keep|drop" /* dkv_beyond */
#define TYPE_CHOICES   "f32|f16|bf16|i8|fp8"          /* dkv_type */

struct cJSON;

/* ---- files --------------------------------------------------------------- */

char *read_file(const char *path, size_t *bytes);   /* with a zero behind the last byte */
char *read_text(const char *path);                  /* the same, without zeros inside */
/* PATH.tmp, renamed: a failure loses nothing. A device, a pipe or what a symbolic link leads to is written in place. */
void write_file(const char *path, const void *data, size_t bytes);
void check_writable(const char *path);              /* fails where write_file would, before long work */
/* usage fails where path, of -o, is the file of another option, too; other: its value, or NULL. */
void check_apart(const char *path, const char *option, const char *other);
void load_pattern(dkv_pattern *out, const char *path);
const char *base_name(const char *path);

/* The shape that a GGUF states; context 0 where it states none. */
typedef struct {
    int64_t L, H, Hkv, d, context;
    char name[64]; /* printable ASCII */
} model_shape;

model_shape read_model_shape(const char *path);

/* ---- patterns: a row is a query head (rows = H) or a KV head with its whole group (rows = Hkv) ---- */

void set_row_bit(dkv_pattern *p, int64_t l, int64_t row, int64_t rows, int64_t b);
void mark_nearest(unsigned char *to, int64_t rows, int64_t D, int64_t left); /* to[rows][D]: by bin, then by row */
int64_t count_cells(const dkv_pattern *p);                       /* (layer, KV head, bin) that stay */
void check_model_id(const char *model);                          /* of --model; NULL is fine */
void save_pattern(dkv_pattern *p, const char *path);             /* K, and rho if negative, follow from the bits */
dkv_pattern cut_pattern(const dkv_pattern *p, int64_t D);        /* its nearest D bins; bits are the caller's to free */

/* As cells, [L][Hkv][D] of 0 and 1, and back: shape and model of `like`, all of a group or none, physical budget; bits
   are the caller's to free. */
void pattern_cells(unsigned char *cells, const dkv_pattern *p);
dkv_pattern pattern_of_cells(const dkv_pattern *like, const unsigned char *cells);

/* ---- controls: as many cells as a pattern, without part of what it learned ---- */

enum {
    CONTROL_STREAMING, CONTROL_RANDOM, CONTROL_HEAD_ONLY, CONTROL_DISTANCE_ONLY, CONTROL_DISTANCE_SHUFFLED,
    CONTROL_FULLY_SHUFFLED, CONTROL_SCORES_ONLY, CONTROLS
};
#define CONTROL_CHOICES "streaming|random|head-only|distance-only|distance-shuffled|fully-shuffled|scores-only"

const char *control_name(int kind);
/* to[L][Hkv][D] <- the control of p. S[L][H][D]: of CONTROL_SCORES_ONLY, else NULL. */
void make_control(unsigned char *to, int kind, const dkv_pattern *p, const float *S, uint64_t seed);

/* ---- retrieval scores: .dks files ---------------------------------------- */

/* S[l][h][b]: the share of value tokens in bin b that query head h of layer l has among its 5 highest (paper 3.1), and
   where that was measured. */
typedef struct {
    int32_t L, H, Hkv, D;
    int64_t W, S, R, T_c;
    uint64_t seed, data_hash;
    char model[64], tool[64]; /* as in dkv_pattern */
    uint32_t *count;          /* [D] examples */
    float *score;             /* [L][H][D], in 0..1 */
} score_table;

/* Safe for untrusted bytes. NULL, or what is wrong with them; then nothing needs to be freed. */
const char *read_scores(score_table *out, const void *data, size_t bytes);
void load_scores(score_table *out, const char *path);
void save_scores(const score_table *s, const char *path);
void free_scores(score_table *s);
bool is_score_file(const char *path); /* by its first bytes */
/* Fails unless the scores were measured on that model. A name may be unknown: empty. */
void check_scored_model(const score_table *s, const char *path, const char *model);
/* Fails unless the scores were measured on a model and with bins such as the pattern has. */
void check_scores_match(const score_table *s, const char *s_path, const dkv_pattern *p, const char *p_path);

/* ---- output, time and chance --------------------------------------------- */

double seconds(void);                    /* of a clock that only goes forward */
void print_json_object(struct cJSON *o); /* and frees it */
double uniform(uint64_t *state);         /* in [0, 1), 53 bits: splitmix64, whose whole state is *state */

/* ---- commands ------------------------------------------------------------ */

int command_pattern(int argc, char **argv);
int command_info(int argc, char **argv);
int command_plot(int argc, char **argv);
int command_run(int argc, char **argv);
int command_data(int argc, char **argv);
int command_import(int argc, char **argv);
int command_probe(int argc, char **argv);
int command_train(int argc, char **argv);
int command_score(int argc, char **argv);

#endif
