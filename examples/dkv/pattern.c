/* dkv pattern: makes pattern files.

   All kinds fill one grid, [L][rows][D] of bits, nearest bin first, where a row is a KV head (what memory is spent on:
   a physical budget) or a query head (a logical budget). A KV head's row goes to every query head of its group. */
#include "tool.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FULL, HEADS, MASK, STREAMING, RANDOM, OTHERS }; /* from STREAMING on, kind - STREAMING is a control */

static int64_t L, H, Hkv, d, D, W = -1, S = -1, R = -1, context, seed;
static double rho = -1, physical = -1;
static const char *like, *match, *scores, *heads, *mask, *model, *output;
static int kind = -1;

static const char NOTES[] =
    "The shape comes from --like, or from --layers, --query-heads, --kv-heads and --head-dim.\n"
    "\n"
    "kinds\n"
    "  full       every bit\n"
    "  heads      every bin of the query heads listed, nothing else:  --heads 7:0,7:1,14:6\n"
    "  mask       a text file; '#' starts a comment, every other line is one row:\n"
    "                 LAYER HEAD 1101000...     D characters, nearest bin first, 1 = keep\n"
    "             in any order, each row once: L * Hkv rows by KV head, or L * H by query head.\n"
    "  streaming  the nearest bins of all heads, as far as the budget reaches; the last bin by layer, then head\n"
    "  random     as many bits, anywhere (--seed)\n"
    "The budget of streaming and random is --physical (share of the (layer, KV head, bin) cells) or --rho (share\n"
    "of the (layer, query head, bin) bits), or, with --like PATTERN.dkv, as many cells as that pattern keeps.\n"
    "\n"
    "kinds with --match PATTERN.dkv: what a pattern is worth without part of what it learned, at as many cells\n"
    "  streaming, random  as above\n"
    "  head-only          all bins of the KV heads that keep most, and the nearest of one more\n"
    "  distance-only      in each layer all heads keep the bins that most of them kept; the last bin, its first heads\n"
    "  distance-shuffled  the bins of each KV head in another order (--seed)\n"
    "  fully-shuffled     cells of all layers, heads and bins in another order (--seed)\n"
    "  scores-only        the cells of the highest retrieval scores (--scores FILE.dks), without any learning\n";

/* ---- shape --------------------------------------------------------------- */

static void shape_of_model(const char *path) {
    static model_shape m; /* model points into it */
    m = read_model_shape(path);
    L = m.L, H = m.H, Hkv = m.Hkv, d = m.d;
    if (!D && !context) context = m.context;
    if (!model) model = m.name;
}

static void shape_of_pattern(const char *path) {
    static dkv_pattern p; /* model points into it */
    load_pattern(&p, path);
    L = p.L, H = p.H, Hkv = p.Hkv, d = p.d;
    if (W < 0) W = p.W;
    if (S < 0) S = p.S;
    if (R < 0) R = p.R;
    if (!D && !context) D = p.D;
    if (!model) model = p.model;
    if ((kind == STREAMING || kind == RANDOM) && rho < 0 && physical < 0)
        physical = (double)count_cells(&p) / (double)(L * Hkv * p.D);
    dkv_pattern_free(&p, NULL);
}

static void find_shape(void) {
    if (like) {
        size_t n = strlen(like);
        if (L || H || Hkv || d) usage("--like gives the shape; leave --layers and the other shape options out");
        if (n > 4 && !strcmp(like + n - 4, ".dkv")) shape_of_pattern(like);
        else shape_of_model(like);
    }
    if (!L || !H) usage("which shape? give --like FILE, or --layers and --query-heads; see dkv pattern --help");
    if (!Hkv) Hkv = H;
    if (W < 0) W = 128;
    if (S < 0) S = 128;
    if (R < 0) R = 1024;
    if (H % Hkv) fail("%lld query heads cannot share %lld KV heads evenly", (long long)H, (long long)Hkv);
}

static void find_bins(void) {
    if (D && context) usage("--bins and --ctx say the same thing; give one");
    if (!D && context > S + R) D = (context - S - R + W - 1) / W;
    if (!D && context) fail("a context of %lld tokens is all sink and recent (%lld + %lld); lower --sink or --recent",
                            (long long)context, (long long)S, (long long)R);
    if (!D) usage("how many bins? give --bins, or --ctx with the longest context");
    if (D > MAX_BINS) fail("%lld bins are more than the format holds (%d); raise --bin-width", (long long)D, MAX_BINS);
}

/* ---- kinds --------------------------------------------------------------- */

/* Each set of wanted ones of n is as likely as another: selection sampling, Knuth's algorithm S. */
static void mark_random(unsigned char *to, int64_t n, int64_t wanted, uint64_t state) {
    for (int64_t i = 0; i < n; i++)
        if (uniform(&state) * (double)(n - i) < (double)wanted) to[i] = 1, wanted--;
}

static void fill_budget(dkv_pattern *p, int64_t rows) {
    const int64_t n = L * rows * D, wanted = llrint(p->rho * (double)n);
    unsigned char *mark = allocate((size_t)n, 1);
    if (kind == RANDOM) mark_random(mark, n, wanted, p->seed);
    else mark_nearest(mark, L * rows, D, wanted);
    for (int64_t i = 0; i < n; i++)
        if (mark[i]) set_row_bit(p, i / D / rows, i / D % rows, rows, i % D);
    free(mark);
}

static void fill_heads(dkv_pattern *p) {
    const char *c = heads;
    for (int n; *c; c += n, c += *c == ',') {
        long long l, h;
        if (sscanf(c, "%lld:%lld%n", &l, &h, &n) != 2 || (c[n] && c[n] != ','))
            usage("--heads must be layer:head,layer:head,...; cannot read '%s'", c);
        if (l < 0 || l >= L || h < 0 || h >= H)
            fail("--heads %lld:%lld is outside %lld layers of %lld query heads", l, h, (long long)L, (long long)H);
        for (int64_t b = 0; b < D; b++) set_row_bit(p, l, h, H, b);
    }
}

/* ---- text masks ---------------------------------------------------------- */

typedef struct {
    char *next;       /* rest of the text */
    int line;
    int64_t l, row;   /* LAYER HEAD, -1: not a number */
    const char *bits; /* [n_bits] of '0' and '1' */
    int64_t n_bits;
} mask_reader;

static int64_t read_index(char **c) {
    char *start = *c;
    int64_t value = strtoll(start, c, 10);
    return *c > start && value >= 0 ? value : -1;
}

/* The next row of the mask, false at its end. */
static bool next_mask_row(mask_reader *m) {
    for (char *c; *(c = m->next);) {
        char *end = c + strcspn(c, "#\r\n");
        m->next = c + strcspn(c, "\n");
        m->next += *m->next == '\n';
        m->line++;
        c += strspn(c, " \t");
        if (c >= end) continue;
        m->l = read_index(&c);
        m->row = read_index(&c);
        m->bits = c + strspn(c, " \t");
        m->n_bits = (int64_t)strspn(m->bits, "01");
        c = (char *)(uintptr_t)m->bits + m->n_bits;
        if (m->l < 0 || m->row < 0 || !m->n_bits || c + strspn(c, " \t") != end)
            fail("%s:%d: expected LAYER HEAD and a row of 0 and 1", mask, m->line);
        return true;
    }
    return false;
}

/* Counts the rows and takes D from them: L * Hkv rows or L * H. Returns rows per layer. */
static int64_t measure_mask(char *text) {
    mask_reader m = {.next = text};
    int64_t n = 0, wanted = D;
    for (D = 0; next_mask_row(&m); n++, D = m.n_bits)
        if (n && m.n_bits != D)
            fail("%s:%d: %lld bins, the rows above have %lld", mask, m.line, (long long)m.n_bits, (long long)D);
    if (n != L * Hkv && n != L * H)
        fail("%s has %lld rows; %lld layers need %lld (by KV head) or %lld (by query head)", mask, (long long)n,
             (long long)L, (long long)(L * Hkv), (long long)(L * H));
    if (wanted && wanted != D) fail("%s has %lld bins, not --bins %lld", mask, (long long)D, (long long)wanted);
    return n / L;
}

static void fill_mask(dkv_pattern *p, char *text, int64_t rows) {
    static bool *seen; /* [L][rows]; static, as it must stay reachable where fail ends the program */
    mask_reader m = {.next = text};
    seen = allocate((size_t)(L * rows), sizeof *seen);
    while (next_mask_row(&m)) {
        if (m.l < 0 || m.l >= L || m.row < 0 || m.row >= rows)
            fail("%s:%d: no layer %lld head %lld in %lld layers of %lld", mask, m.line, (long long)m.l,
                 (long long)m.row, (long long)L, (long long)rows);
        if (seen[m.l * rows + m.row]) fail("%s:%d: this row came before", mask, m.line);
        seen[m.l * rows + m.row] = true;
        for (int64_t b = 0; b < D; b++)
            if (m.bits[b] == '1') set_row_bit(p, m.l, m.row, rows, b);
    }
    free(seen);
}

/* ---- the command --------------------------------------------------------- */

static void check_match(void) {
    bool shuffles = kind == RANDOM || kind == STREAMING + CONTROL_DISTANCE_SHUFFLED ||
                    kind == STREAMING + CONTROL_FULLY_SHUFFLED;
    if (like || L || H || Hkv || d || D || context || W >= 0 || S >= 0 || R >= 0)
        usage("--match gives shape and bins; leave --like and the other shape options out");
    if (rho >= 0 || physical >= 0) usage("--match gives the budget; leave --rho and --physical out");
    if (kind < STREAMING) usage("--match goes with the controls; see dkv pattern --help");
    if (!shuffles && seed) usage("--seed goes with the kinds that shuffle");
    if ((kind == STREAMING + CONTROL_SCORES_ONLY) != !!scores)
        usage("--scores goes with --kind scores-only, and it needs them");
}

static void check_arguments(void) {
    bool budget = kind == STREAMING || kind == RANDOM;
    if (match) check_match();
    if (kind < 0) usage("which --kind? see dkv pattern --help");
    if (!output) usage("where to? give -o FILE.dkv");
    if (kind == HEADS && !(heads && *heads)) usage("--kind heads needs --heads layer:head,...");
    if (kind == MASK && !mask) usage("--kind mask needs --mask FILE");
    if (kind != HEADS && heads) usage("--heads goes with --kind heads only");
    if (kind != MASK && mask) usage("--mask goes with --kind mask only");
    if (kind >= OTHERS && !match) usage("--kind %s needs --match PATTERN.dkv", control_name(kind - STREAMING));
    if (scores && !match) usage("--scores goes with --match only");
    if (kind != RANDOM && !match && seed) usage("--seed goes with --kind random only");
    if (rho >= 0 && physical >= 0) usage("--rho and --physical are two budgets; give one");
    if (!budget && (rho >= 0 || physical >= 0)) usage("a budget belongs to --kind streaming or random");
    check_model_id(model);
    if (kind == FULL) rho = 1;
}

static void make_match(void) {
    dkv_pattern p;
    score_table s = {0};
    load_pattern(&p, match);
    if (scores) {
        load_scores(&s, scores);
        check_scores_match(&s, scores, &p, match);
    }
    unsigned char *cells = allocate((size_t)(p.L * (int64_t)p.Hkv * p.D), 1);
    make_control(cells, kind - STREAMING, &p, s.score, (uint64_t)seed);
    dkv_pattern q = pattern_of_cells(&p, cells);
    if (model) memset(q.model, 0, sizeof q.model), snprintf(q.model, sizeof q.model, "%s", model);
    memset(q.tool, 0, sizeof q.tool);
    snprintf(q.tool, sizeof q.tool, "dkv %s pattern --kind %s", dkv_version(), control_name(kind - STREAMING));
    q.seed = (uint64_t)seed;
    save_pattern(&q, output);
    printf("%s: %lld of %lld cells (layer, KV head, bin), as %s has\n", control_name(kind - STREAMING),
           (long long)count_cells(&q), (long long)q.L * q.Hkv * q.D, base_name(match));
    free((void *)(uintptr_t)q.bits);
    free(cells);
    free_scores(&s);
    dkv_pattern_free(&p, NULL);
}

int command_pattern(int argc, char **argv) {
    const tool_option options[] = {
        {0, "kind", "full|heads|mask|" CONTROL_CHOICES, OPT_CHOICE, &kind, 0, 0, "what to make, see below"},
        {'o', "output", "FILE", OPT_TEXT, &output, 0, 0, "the pattern file to write"},
        {0, "like", "FILE", OPT_TEXT, &like, 0, 0, "shape of a model (.gguf) or of a pattern (.dkv)"},
        {0, "match", "P.dkv", OPT_TEXT, &match, 0, 0, "a control of this pattern: as many cells, see below"},
        {0, "scores", "S.dks", OPT_TEXT, &scores, 0, 0, "of --kind scores-only"},
        {0, "layers", "L", OPT_INT, &L, 1, MAX_SIDE, "or the shape by hand"},
        {0, "query-heads", "H", OPT_INT, &H, 1, MAX_SIDE, "query heads per layer"},
        {0, "kv-heads", "HKV", OPT_INT, &Hkv, 1, MAX_SIDE, "KV heads per layer (default: H)"},
        {0, "head-dim", "d", OPT_INT, &d, 1, MAX_DIM, "head dimension (default: any)"},
        {0, "bins", "D", OPT_INT, &D, 1, MAX_BINS, "distance bins"},
        {0, "ctx", "T", OPT_INT, &context, 1, TWO_36, "or as many bins as a context of T tokens has"},
        {0, "bin-width", "W", OPT_INT, &W, 1, TWO_36, "tokens per bin (default: 128)"},
        {0, "sink", "S", OPT_INT, &S, 0, TWO_36, "first tokens, always kept (default: 128)"},
        {0, "recent", "R", OPT_INT, &R, 0, TWO_36, "last tokens, always kept (default: 1024)"},
        {0, "physical", "RATIO", OPT_REAL, &physical, 0, 1, "budget in (layer, KV head, bin) cells"},
        {0, "rho", "RATIO", OPT_REAL, &rho, 0, 1, "budget in (layer, query head, bin) bits"},
        {0, "seed", "N", OPT_INT, &seed, 0, TWO_53, "of the kinds that draw (default: 0)"},
        {0, "heads", "l:h,...", OPT_TEXT, &heads, 0, 0, "of --kind heads"},
        {0, "mask", "FILE", OPT_TEXT, &mask, 0, 0, "of --kind mask"},
        {0, "model", "TEXT", OPT_TEXT, &model, 0, 0, "model id to store (default: the GGUF's name)"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, "dkv pattern --kind KIND -o FILE [options]", NOTES);
    if (argc) usage("what is '%s'? see dkv pattern --help", argv[0]);
    check_arguments();
    if (match) return make_match(), 0;
    find_shape();
    char *text = kind == MASK ? read_text(mask) : NULL;
    int64_t rows = physical >= 0 ? Hkv : H;
    if (text) rows = measure_mask(text);
    else find_bins();

    dkv_pattern p = {.L = (int32_t)L, .H = (int32_t)H, .Hkv = (int32_t)Hkv, .D = (int32_t)D, .d = (int32_t)d,
                     .W = W, .S = S, .R = R, .seed = (uint64_t)seed, .rho = physical >= 0 ? physical : rho,
                     .budget = rows < H || physical >= 0 ? DKV_BUDGET_PHYSICAL : DKV_BUDGET_LOGICAL};
    snprintf(p.model, sizeof p.model, "%s", model ? model : "");
    snprintf(p.tool, sizeof p.tool, "dkv %s", dkv_version());
    void *bits = allocate((size_t)(L * H), (size_t)dkv_pattern_words(D) * 8);
    p.bits = bits;
    if (kind == MASK) fill_mask(&p, text, rows);
    else if (kind == HEADS) fill_heads(&p);
    else if (p.rho < 0) usage("how much? give --physical RATIO or --rho RATIO");
    else fill_budget(&p, rows);
    save_pattern(&p, output);
    free(text);
    free(bits);
    return 0;
}
