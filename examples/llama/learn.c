#include "learn.h"
#include "device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Between the way up and the way back there stay, per token and layer, x before each norm, q, k, v as attention took
   them, its outputs and log-sums, and gate and up: 8 E + 8 (H + Hkv) d + 8 F bytes and, if straight-through, 4 H d more
   (on a GPU q, k, v take half). Norms and silu are computed again. Grading keeps one layer of it. Logits exist for
   LOGIT_ROWS value tokens at a time. */
enum { LOGIT_ROWS = 256, TOP = 5 };

/* A question where it lies in a call. */
typedef struct {
    const lm_exam *exam;
    const lm_question *question;
} item;

/* Questions that pass the layers together, at most device.rows tokens of them. A piece is those of one exam. */
typedef struct {
    const item *items;
    int64_t n, rows, values, pieces;
    int32_t *token, *index; /* [rows], [values] row that predicts */
    int64_t *pos, *source;  /* [rows] */
    float *scale;           /* [values] of a value token's cross-entropy in the loss */
    const lm_exam **exam;   /* [pieces] */
    dkv_suffix *suffix;     /* [n], of the layer at hand; gated [pieces], too */
    dkv_gated *gated;
    dkv_attention *ask;     /* [n] */
    int64_t *rank;          /* [rows][H] */
} chunk;

/* What the device has of a chunk. Slots are layers when there is a way back, and otherwise one. */
typedef struct {
    lm_activations a;       /* of the layer at hand */
    float *x;               /* [2 slots + 1][rows][E]; [1] */
    char *qkv;              /* [slots][rows][H + 2 Hkv][d] element */
    float *out, *relaxed;   /* [slots][rows][H][d] */
    float *lse, *lse_relaxed; /* [slots][rows][H] */
    float *gate_up;         /* [slots][rows][2][F] */
    float *q;               /* [rows][H + 2 Hkv][d], unless qkv has it */
    void *o;                /* [rows][H][d] element, unless out is it */
    int32_t *token, *index, *target;
    int64_t *pos, *rank;
    float *scale, *picked, *logits; /* [values], [LOGIT_ROWS][E], [LOGIT_ROWS][V] */
    lm_mark *mark;          /* [values] */
    float *dx, *d_norm;     /* [rows][E] */
    float *d_wide;          /* [rows][F] by act, [rows][H][d] by out */
    float *d_gate_up, *dq, *dk, *dv;
} board;

/* Gates on the device: ln_u and d_ln_u [pieces][L][Hkv][D]; without a, one ln_u serves all. */
typedef struct {
    float *a, *da, *ln_u, *d_ln_u;
    unsigned char *open;    /* straight-through only */
} gates;

struct lm_learner {
    lm_model *m;
    chunk chunk;
    void *chunk_memory;
    lm_memory board, gates;
    lm_memory reference;    /* [reference_values][V] logits of the tokens reference_target */
    int64_t reference_values;
    int32_t *reference_target;
};

typedef enum { GRADE, REMEMBER, LEARN, RANK } purpose;

typedef struct {
    lm_learner *x;
    lm_model *m;
    const lm_device *d;
    purpose why;
    const lm_gating *g;
    dkv_type type;          /* of q, k, v on the device */
    item *items;            /* [n] */
    int64_t n, values;
    int32_t *target;        /* [values] */
    lm_mark *mark;          /* [values] */
    float *hits;            /* RANK: [n][L][H] */
    int64_t rows, chunk_values, pieces; /* at most, in a chunk */
    int64_t cells;          /* L Hkv D */
    const float *reference; /* NULL, or [values][V] to measure from */
    board b;
    gates u;
} call;

/* ==== memory ==== */

/* Hands out pieces of a block; of none, NULLs that only count. */
typedef struct {
    char *block;
    size_t used;
} arena;

static void *take(arena *m, int64_t count, int64_t bytes) {
    size_t at = m->used;
    m->used += ((size_t)count * (size_t)bytes + 255) / 256 * 256;
    return m->block && count ? m->block + at : NULL;
}

static void place_chunk(arena *m, chunk *h, int64_t rows, int64_t H) {
    h->token = take(m, rows, sizeof *h->token), h->index = take(m, rows, sizeof *h->index);
    h->pos = take(m, rows, sizeof *h->pos), h->source = take(m, rows, sizeof *h->source);
    h->scale = take(m, rows, sizeof *h->scale), h->exam = take(m, rows, sizeof *h->exam);
    h->suffix = take(m, rows, sizeof *h->suffix), h->gated = take(m, rows, sizeof *h->gated);
    h->ask = take(m, rows, sizeof *h->ask), h->rank = take(m, rows * H, sizeof *h->rank);
}

static int64_t head_floats(const lm_model *m) { return m->p.shape.H * (int64_t)m->p.shape.d_k; }
static int64_t row_floats(const lm_model *m) { return head_floats(m) + 2 * m->p.shape.Hkv * (int64_t)m->p.shape.d_k; }

static bool straight(const call *c) { return c->g->a && c->g->open; }
static int64_t slot(const call *c, int l) { return c->why == LEARN ? l : 0; }

static void place_kept(arena *m, const call *c, board *b) {
    const lm_params *p = &c->m->p;
    const int64_t slots = c->why == LEARN ? p->shape.L : 1, n = c->rows * slots, q = head_floats(c->m), f32 = 4;
    b->x = take(m, (c->why == LEARN ? 2 * slots + 1 : 1) * c->rows, p->E * f32);
    b->qkv = take(m, n, row_floats(c->m) * c->d->element);
    b->out = take(m, n, q * f32), b->relaxed = take(m, straight(c) ? n : 0, q * f32);
    b->lse = take(m, n, p->shape.H * f32), b->lse_relaxed = take(m, straight(c) ? n : 0, p->shape.H * f32);
    b->gate_up = take(m, n, 2 * p->F * f32);
}

static void place_layer(arena *m, const call *c, board *b) {
    const lm_params *p = &c->m->p;
    const int64_t n = c->rows, e = c->d->element, f32 = 4, apart = e == f32 ? 0 : n;
    b->a.n_all = b->a.n = n;
    b->a.rope = take(m, n, p->n_rot * f32), b->a.out = take(m, n, p->E * f32);
    b->a.norm = take(m, n, p->E * e), b->a.act = take(m, n, p->F * e);
    b->q = take(m, apart, row_floats(c->m) * f32), b->o = take(m, apart, head_floats(c->m) * e);
    b->token = take(m, n, sizeof *b->token), b->pos = take(m, n, sizeof *b->pos);
    b->rank = take(m, c->why == RANK ? n : 0, p->shape.H * (int64_t)sizeof *b->rank);
}

static void place_values(arena *m, const call *c, board *b) {
    const int64_t n = c->why == RANK ? 0 : c->chunk_values, some = n < LOGIT_ROWS ? n : LOGIT_ROWS;
    b->index = take(m, n, sizeof *b->index), b->target = take(m, n, sizeof *b->target);
    b->scale = take(m, n, sizeof *b->scale), b->mark = take(m, n, sizeof *b->mark);
    b->picked = take(m, some, c->m->p.E * (int64_t)sizeof *b->picked);
    b->logits = take(m, some, c->m->p.V * (int64_t)sizeof *b->logits);
}

static void place_gradients(arena *m, const call *c, board *b) {
    const lm_params *p = &c->m->p;
    const int64_t n = c->why == LEARN ? c->rows : 0, q = head_floats(c->m), kv = (row_floats(c->m) - q) / 2, f32 = 4;
    b->dx = take(m, n, p->E * f32), b->d_norm = take(m, n, p->E * f32);
    b->d_wide = take(m, n, (p->F > q ? p->F : q) * f32), b->d_gate_up = take(m, n, 2 * p->F * f32);
    b->dq = take(m, n, q * f32), b->dk = take(m, n, kv * f32), b->dv = take(m, n, kv * f32);
}

static void place_gates(arena *m, const call *c, gates *u) {
    const int64_t count = c->g->a ? dkv_gates_count(&c->g->gates) : 0, each = c->cells * (int64_t)sizeof *u->ln_u;
    u->a = take(m, count, sizeof *u->a), u->da = take(m, c->why == LEARN ? count : 0, sizeof *u->da);
    u->open = take(m, straight(c) ? c->cells : 0, sizeof *u->open);
    u->ln_u = take(m, c->g->a ? c->pieces : 1, each), u->d_ln_u = take(m, c->why == LEARN ? c->pieces : 0, each);
}

static size_t place_all(call *c, char *board_block, char *gate_block, size_t *gate_bytes) {
    arena b = {board_block, 0}, u = {gate_block, 0};
    place_kept(&b, c, &c->b);
    place_layer(&b, c, &c->b);
    place_values(&b, c, &c->b);
    place_gradients(&b, c, &c->b);
    place_gates(&u, c, &c->u);
    *gate_bytes = u.used;
    return b.used;
}

static bool need_memory(call *c) {
    size_t gate_bytes, bytes = place_all(c, NULL, NULL, &gate_bytes);
    if (!c->d->hold(c->m, &c->x->board, bytes) || !c->d->hold(c->m, &c->x->gates, gate_bytes)) return false;
    place_all(c, c->x->board.data, c->x->gates.data, &gate_bytes);
    return true;
}

/* ==== what is asked ==== */

static bool check_question(lm_model *m, const lm_exam *e, const lm_question *q, purpose why) {
    const int64_t T_c = e->context->plan->T_c;
    if (q->first < 1 || q->first >= q->n || q->n > LM_QUESTION_MAX)
        return lm_fail(m, "a question of %lld tokens with its value at %lld; 1 <= first < n <= %d is needed",
                       (long long)q->n, (long long)q->first, LM_QUESTION_MAX);
    if (q->n > m->p.n_ctx - T_c)
        return lm_fail(m, "a question of %lld tokens after %lld exceeds the model's context of %lld", (long long)q->n,
                       (long long)T_c, (long long)m->p.n_ctx);
    if (why == RANK && (q->source < 0 || q->source + q->n - q->first > T_c))
        return lm_fail(m, "a value's source at %lld does not lie in its context of %lld", (long long)q->source,
                       (long long)T_c);
    for (int64_t i = 0; i < q->n; i++)
        if (q->tokens[i] < 0 || q->tokens[i] >= m->p.V)
            return lm_fail(m, "token %d is not in the vocabulary", q->tokens[i]);
    return true;
}

static bool check_exam(lm_model *m, const lm_exam *e, dkv_type type, purpose why) {
    const dkv_plan *plan = e->context->plan;
    if (e->context->m != m) return lm_fail(m, "the context was made for another model");
    if (e->context->type != type) return lm_fail(m, "contexts of one call must have one type");
    if (e->context->tail) return lm_fail(m, "a context must have no tail; lm_cache_truncate empties it");
    for (int64_t i = 0; i < plan->L * (int64_t)plan->Hkv; i++)
        if (plan->rows[i] != plan->T_c) return lm_fail(m, "a context must keep all its positions");
    if (e->n_questions < 1) return lm_fail(m, "an exam without questions");
    for (int64_t i = 0; i < e->n_questions; i++)
        if (!check_question(m, e, &e->question[i], why)) return false;
    return true;
}

static bool check_gating(lm_model *m, const lm_gating *g, purpose why) {
    const dkv_shape *s = &m->p.shape;
    if (dkv_gates_check(&g->gates) || g->gates.L != s->L || g->gates.H != s->H || g->gates.Hkv != s->Hkv)
        return lm_fail(m, "the gates were made for another model");
    return why != LEARN || g->a ? true : lm_fail(m, "gates without logits have no gradient");
}

/* All questions in order. */
static bool list_items(call *c, const lm_exam *e, int64_t n) {
    if (n < 1) return lm_fail(c->m, "no exams");
    for (int64_t i = 0; i < n; i++) {
        if (!check_exam(c->m, &e[i], e->context->type, c->why)) return false;
        c->n += e[i].n_questions;
        for (int64_t k = 0; k < e[i].n_questions; k++) c->values += e[i].question[k].n - e[i].question[k].first;
    }
    c->items = malloc((size_t)c->n * sizeof *c->items);
    c->target = malloc((size_t)c->values * sizeof *c->target);
    c->mark = calloc((size_t)c->values, sizeof *c->mark);
    c->hits = c->why == RANK ? calloc((size_t)(c->n * c->m->p.shape.L * c->m->p.shape.H), sizeof *c->hits) : NULL;
    if (!c->items || !c->target || !c->mark || (c->why == RANK && !c->hits))
        return lm_fail(c->m, "no memory for %lld questions", (long long)c->n);
    int32_t *target = c->target;
    item *at = c->items;
    for (int64_t i = 0; i < n; i++)
        for (const lm_question *q = e[i].question; q < e[i].question + e[i].n_questions; q++) {
            *at++ = (item){&e[i], q};
            memcpy(target, q->tokens + q->first, (size_t)(q->n - q->first) * sizeof *target);
            target += q->n - q->first;
        }
    return true;
}

/* The questions from this one on that fit, and what they amount to. */
static void cut_chunk(const call *c, const item *from, chunk *h) {
    h->items = from;
    h->n = h->rows = h->values = h->pieces = 0;
    for (; from < c->items + c->n && h->rows + from->question->n <= c->d->rows; from++) {
        if (!h->n || from->exam != from[-1].exam) h->exam[h->pieces++] = from->exam;
        h->n++;
        h->rows += from->question->n;
        h->values += from->question->n - from->question->first;
    }
}

static void measure_chunks(call *c) {
    chunk *h = &c->x->chunk;
    for (const item *at = c->items; at < c->items + c->n; at += h->n) {
        cut_chunk(c, at, h);
        if (h->rows > c->rows) c->rows = h->rows;
        if (h->values > c->chunk_values) c->chunk_values = h->values;
        if (h->pieces > c->pieces) c->pieces = h->pieces;
    }
}

static void fill_chunk(chunk *h) {
    int64_t row = 0, value = 0;
    for (const item *it = h->items; it < h->items + h->n; it++) {
        const lm_question *q = it->question;
        const int64_t T_c = it->exam->context->plan->T_c, n_value = q->n - q->first;
        for (int64_t i = 0; i < q->n; i++, row++) {
            const bool predicts = i >= q->first - 1 && i < q->n - 1;
            h->token[row] = q->tokens[i];
            h->pos[row] = T_c + i;
            h->source[row] = predicts ? q->source + i - (q->first - 1) : -1;
            if (!predicts) continue;
            h->index[value] = (int32_t)row;
            h->scale[value++] = (float)(q->weight / (double)n_value);
        }
    }
}

/* ==== gates ==== */

/* Without logits: ln 1 where open, ln 0 elsewhere. */
static bool put_pattern(const call *c) {
    const unsigned char *open = c->g->open;
    float *ln_u = malloc((size_t)c->cells * sizeof *ln_u);
    if (!ln_u) return lm_fail(c->m, "no memory for %lld gates", (long long)c->cells);
    for (int64_t i = 0; i < c->cells; i++) ln_u[i] = !open || open[i] ? 0.0f : -INFINITY;
    double now;
    bool ok = c->d->copy(c->m, c->u.ln_u, ln_u, (size_t)c->cells * sizeof *ln_u) && c->d->wait(c->m, &now);
    free(ln_u);
    return ok;
}

static bool put_gates(const call *c) {
    if (!c->g->a) return put_pattern(c);
    const size_t bytes = (size_t)dkv_gates_count(&c->g->gates) * sizeof *c->u.a;
    return c->d->copy(c->m, c->u.a, c->g->a, bytes) && (c->why != LEARN || c->d->zero(c->m, c->u.da, bytes)) &&
           (!straight(c) || c->d->copy(c->m, c->u.open, c->g->open, (size_t)c->cells));
}

static dkv_draw draw_of(const call *c, const lm_exam *e) { return (dkv_draw){c->g->seed, c->g->step, e->id}; }

static bool draw_gates(const call *c, const chunk *h) {
    for (int64_t i = 0; i < h->pieces && c->g->a; i++)
        if (!c->d->gates(c->m, c->u.ln_u + i * c->cells, &c->g->gates, c->u.a, draw_of(c, h->exam[i]))) return false;
    return true;
}

static bool gates_back(const call *c, const chunk *h) {
    for (int64_t i = 0; i < h->pieces; i++)
        if (!c->d->gates_back(c->m, c->u.da, &c->g->gates, c->u.a, draw_of(c, h->exam[i]),
                              c->u.d_ln_u + i * c->cells)) return false;
    return true;
}

/* ==== a layer ==== */

static float *x_before(const call *c, int l, int norm) { /* norm 0: attention's, 1: the feed-forward's */
    return c->b.x + (c->why == LEARN ? 2 * l + norm : 0) * c->rows * c->m->p.E;
}

/* Points the activations at layer l. */
static void enter_layer(call *c, int l) {
    const lm_params *p = &c->m->p;
    const int64_t q = head_floats(c->m), row = row_floats(c->m), at = slot(c, l) * c->rows;
    lm_activations *a = &c->b.a;
    a->qkv = c->b.qkv + at * row * c->d->element;
    a->q = (lm_rows){c->b.q ? c->b.q : a->qkv, row};
    a->k = (lm_rows){a->q.data + q, row}, a->v = (lm_rows){a->k.data + (row - q) / 2, row};
    a->o = c->b.o ? c->b.o : c->b.out + at * q;
    a->gate = (lm_rows){c->b.gate_up + at * 2 * p->F, 2 * p->F}, a->up = (lm_rows){a->gate.data + p->F, 2 * p->F};
}

/* The rows from row on of q, k or v, by the head they begin with. */
static dkv_tensor view(const call *c, int64_t row, int64_t head) {
    const int64_t e = c->d->element, d = c->m->p.shape.d_k, stride = row_floats(c->m) * e;
    return (dkv_tensor){(char *)c->b.a.qkv + row * stride + head * d * e, c->type, stride, d * e, e};
}

static dkv_tensor of_heads(float *x, int64_t at, int64_t heads, const call *c) {
    const int64_t d = c->m->p.shape.d_k;
    return dkv_thd(x ? x + at * heads * d : NULL, DKV_F32, heads, d);
}

/* The question whose rows begin at row, in layer l. */
static dkv_suffix suffix_of(const call *c, const lm_question *q, int64_t row, int l) {
    const board *b = &c->b;
    const int64_t H = c->m->p.shape.H, Hkv = c->m->p.shape.Hkv, at = slot(c, l) * c->rows + row;
    return (dkv_suffix){
        .N_q = q->n, .q = view(c, row, 0), .k = view(c, row, H), .v = view(c, row, H + Hkv),
        .out = of_heads(b->out, at, H, c), .lse = b->lse + at * H,
        .out_relaxed = of_heads(b->relaxed, at, H, c), .lse_relaxed = b->relaxed ? b->lse_relaxed + at * H : NULL,
        .d_out = of_heads(b->d_wide, row, H, c), .dq = of_heads(b->dq, row, H, c), .dk = of_heads(b->dk, row, Hkv, c),
        .dv = of_heads(b->dv, row, Hkv, c)};
}

static void aim_attention(const call *c, chunk *h, int l) {
    const dkv_shape *s = &c->m->p.shape;
    const dkv_gates *g = &c->g->gates;
    const int64_t layer = (int64_t)l * s->Hkv * g->D;
    int64_t row = 0, i = 0;
    for (int64_t k = 0; k < h->pieces; k++) {
        const lm_cache *context = h->exam[k]->context;
        dkv_gated *to = &h->gated[k];
        *to = (dkv_gated){
            .H = s->H, .Hkv = s->Hkv, .d_k = s->d_k, .d_v = s->d_v, .T_c = context->plan->T_c,
            .W = c->g->W, .S = c->g->S, .R = c->g->R, .D = g->D, .context = c->d->context(context, l),
            .ln_u = c->u.ln_u + (c->g->a ? k * c->cells : 0) + layer, .open = c->u.open ? c->u.open + layer : NULL,
            .suffix = h->suffix + i, .d_ln_u = c->u.d_ln_u ? c->u.d_ln_u + k * c->cells + layer : NULL};
        for (; i < h->n && h->items[i].exam == h->exam[k]; i++, to->n_suffix++) {
            h->suffix[i] = suffix_of(c, h->items[i].question, row, l);
            row += h->items[i].question->n;
        }
    }
}

/* ==== up ==== */

static bool add_into(const call *c, float *y, const float *x, const lm_weight *w, const void *from, int64_t n) {
    const size_t bytes = (size_t)(n * c->m->p.E) * sizeof *x;
    return (y == x || c->d->copy(c->m, y, x, bytes)) && c->d->matmul_add(c->m, &c->b.a, y, w, from, n);
}

/* The questions of a piece about layer l as plain attention. */
static int64_t ask(const chunk *h, const dkv_gated *piece, int64_t *rows) {
    const int64_t first = piece->suffix - h->suffix;
    *rows = 0;
    for (int64_t i = first; i < first + piece->n_suffix; i++) {
        const dkv_suffix *x = &h->suffix[i];
        h->ask[i] = (dkv_attention){.H = piece->H, .Hkv = piece->Hkv, .d_k = piece->d_k, .d_v = piece->d_v,
                                    .N_q = x->N_q, .q = x->q, .context = piece->context,
                                    .tail = dkv_strided(x->k, x->v, x->N_q)};
        *rows += x->N_q;
    }
    return first;
}

/* Ranks of the sources in layer l, and how many of a question's are among the first. */
static bool count_hits(const call *c, const chunk *h, int l) {
    const int64_t H = c->m->p.shape.H;
    int64_t row = 0, rows;
    for (const dkv_gated *piece = h->gated; piece < h->gated + h->pieces; piece++, row += rows) {
        const dkv_attention *a = h->ask + ask(h, piece, &rows);
        if (!c->d->score(c->m, c->b.rank + row * H, a, piece->n_suffix, h->source + row)) return false;
    }
    double now;
    if (!c->d->copy(c->m, h->rank, c->b.rank, (size_t)(h->rows * H) * sizeof *h->rank) || !c->d->wait(c->m, &now))
        return false;
    const int64_t *rank = h->rank;
    for (const item *it = h->items; it < h->items + h->n; it++) {
        float *hits = c->hits + ((it - c->items) * c->m->p.shape.L + l) * H;
        for (int64_t i = 0; i < it->question->n * H; i++, rank++) hits[i % H] += *rank >= 0 && *rank < TOP;
        for (int64_t i = 0; i < H; i++) hits[i] /= (float)(it->question->n - it->question->first);
    }
    return true;
}

static bool layer_up(call *c, chunk *h, int l) {
    const lm_layer *w = &c->m->layers[l];
    lm_activations *a = &c->b.a;
    float *x = x_before(c, l, 0), *mid = x_before(c, l, 1), *end = x_before(c, l + 1, 0);
    enter_layer(c, l);
    aim_attention(c, h, l);
    if ((c->d->load && !c->d->load(c->m, w, a)) ||
        !lm_project(c->m, w, a, x, a->rope, h->rows, (lm_target){.cache = h->exam[0]->context, .layer = l}) ||
        (c->why == RANK && !count_hits(c, h, l))) return false;
    if (c->why == RANK && l == c->m->p.shape.L - 1) return true; /* nobody reads what comes out of it */
    return c->d->gated(c->m, a, h->gated, h->pieces) && add_into(c, mid, x, &w->w[WO], a->o, h->rows) &&
           lm_feed(c->m, w, a, mid, h->rows) && add_into(c, end, mid, &w->w[DOWN], a->act, h->rows);
}

static bool up(call *c, chunk *h) {
    lm_activations *a = &c->b.a;
    a->n_all = a->n = h->rows, a->x = c->b.x;
    if (!c->d->copy(c->m, c->b.token, h->token, (size_t)h->rows * sizeof *h->token) ||
        !c->d->copy(c->m, c->b.pos, h->pos, (size_t)h->rows * sizeof *h->pos) ||
        !c->d->start(c->m, a, c->b.token, c->b.pos) || !draw_gates(c, h)) return false;
    for (int l = 0; l < c->m->p.shape.L; l++)
        if (!layer_up(c, h, l)) return false;
    return true;
}

/* ==== value tokens ==== */

/* n of them from the chunk's value on, which is the call's value first + it. */
static bool judge_some(const call *c, int64_t first, int64_t value, int64_t n) {
    const lm_device *d = c->d;
    const board *b = &c->b;
    const int64_t V = c->m->p.V;
    const float *x = x_before(c, c->m->p.shape.L, 0), *reference = c->reference;
    const int32_t *index = b->index + value;
    if (!d->pick(c->m, b->picked, x, index, n) || !d->norm(c->m, b->a.norm, b->picked, c->m->output_norm, n) ||
        !d->logits_some(c->m, b->logits, b->a.norm, n)) return false;
    if (c->why == REMEMBER && !d->copy(c->m, (float *)c->x->reference.data + (first + value) * V, b->logits,
                                       (size_t)(n * V) * sizeof *b->logits)) return false;
    if (!d->judge(c->m, b->mark + value, b->logits, b->target + value, c->why == LEARN ? b->scale + value : NULL,
                  reference ? reference + (first + value) * V : NULL, n)) return false;
    return c->why != LEARN || (d->logits_back(c->m, b->d_norm, b->logits, n) &&
                               d->norm_back(c->m, b->dx, b->d_norm, x, index, c->m->output_norm, n));
}

/* Their marks, and when learning the gradient by the last layer's output. */
static bool judge(const call *c, const chunk *h, int64_t first) {
    const lm_device *d = c->d;
    const size_t n = (size_t)h->values;
    double now;
    if (!d->copy(c->m, c->b.index, h->index, n * sizeof *h->index) ||
        !d->copy(c->m, c->b.target, c->target + first, n * sizeof *c->target) ||
        !d->copy(c->m, c->b.scale, h->scale, n * sizeof *h->scale) ||
        (c->why == LEARN && !d->zero(c->m, c->b.dx, (size_t)(h->rows * c->m->p.E) * sizeof *c->b.dx))) return false;
    for (int64_t i = 0; i < h->values; i += LOGIT_ROWS)
        if (!judge_some(c, first, i, h->values - i < LOGIT_ROWS ? h->values - i : LOGIT_ROWS)) return false;
    return d->copy(c->m, c->mark + first, c->b.mark, n * sizeof *c->mark) && d->wait(c->m, &now);
}

/* ==== back ==== */

static bool feed_back(call *c, const chunk *h, int l) {
    const lm_device *d = c->d;
    const lm_layer *w = &c->m->layers[l];
    const board *b = &c->b;
    const int64_t n = h->rows, F = c->m->p.F;
    const lm_rows d_ffn[] = {{b->d_gate_up, 2 * F}, {b->d_gate_up + F, 2 * F}}, dx = {b->dx, c->m->p.E};
    return d->matmul_back(c->m, &b->a, b->d_wide, &w->w[DOWN], 1, &dx, n) &&
           d->swiglu_back(c->m, &b->a, d_ffn[0], d_ffn[1], b->d_wide, n) &&
           d->matmul_back(c->m, &b->a, b->d_norm, &w->w[GATE], 2, d_ffn, n) &&
           d->norm_back(c->m, b->dx, b->d_norm, x_before(c, l, 1), NULL, w->ffn_norm, n);
}

/* Down to ln u; below layer 0 there is nothing that learns. */
static bool attention_back(call *c, chunk *h, int l) {
    const lm_device *d = c->d;
    const lm_layer *w = &c->m->layers[l];
    const board *b = &c->b;
    const int64_t n = h->rows, q = head_floats(c->m), kv = (row_floats(c->m) - q) / 2;
    const lm_rows d_qkv[] = {{b->dq, q}, {b->dk, kv}, {b->dv, kv}}, dx = {b->dx, c->m->p.E};
    aim_attention(c, h, l);
    if (!d->matmul_back(c->m, &b->a, b->d_wide, &w->w[WO], 1, &dx, n) || !d->gated_back(c->m, h->gated, h->pieces))
        return false;
    return l == 0 || (d->rotate_back(c->m, d_qkv[0], d_qkv[1], b->a.rope, n) &&
                      d->matmul_back(c->m, &b->a, b->d_norm, &w->w[WQ], 3, d_qkv, n) &&
                      d->norm_back(c->m, b->dx, b->d_norm, x_before(c, l, 0), NULL, w->attn_norm, n));
}

static bool back(call *c, chunk *h) {
    for (int l = c->m->p.shape.L - 1; l >= 0; l--) {
        enter_layer(c, l);
        if ((c->d->load && !c->d->load(c->m, &c->m->layers[l], &c->b.a)) || !feed_back(c, h, l) ||
            !attention_back(c, h, l)) return false;
    }
    return gates_back(c, h);
}

/* ==== a call ==== */

/* GRADE: the reference if it is of these value tokens. REMEMBER: room for it. */
static bool find_reference(call *c) {
    lm_learner *x = c->x;
    const size_t bytes = (size_t)c->values * sizeof *c->target;
    if (c->why == GRADE && c->values == x->reference_values && !memcmp(c->target, x->reference_target, bytes))
        c->reference = x->reference.data;
    if (c->why != REMEMBER) return true;
    x->reference_values = 0;
    return c->d->hold(c->m, &x->reference, (size_t)(c->values * c->m->p.V) * sizeof *c->reference);
}

static bool run_chunks(call *c) {
    chunk *h = &c->x->chunk;
    int64_t first = 0;
    for (const item *at = c->items; at < c->items + c->n; at += h->n, first += h->values) {
        cut_chunk(c, at, h);
        fill_chunk(h);
        if (!up(c, h) || (c->why != RANK && !judge(c, h, first)) || (c->why == LEARN && !back(c, h))) return false;
    }
    return true;
}

static bool run(call *c, const lm_exam *e, int64_t n) {
    if (!check_gating(c->m, c->g, c->why) || !list_items(c, e, n)) return false;
    const dkv_gates *g = &c->g->gates;
    c->cells = (int64_t)g->L * g->Hkv * g->D;
    c->type = c->d->element == sizeof(float) ? DKV_F32 : dkv_tail_type(e->context->type);
    measure_chunks(c);
    return need_memory(c) && find_reference(c) && put_gates(c) && run_chunks(c);
}

/* Of every question, and their weighted sum. */
static double report(const call *c, lm_grade_result *result) {
    const lm_mark *mark = c->mark;
    double loss = 0;
    for (int64_t i = 0; i < c->n; i++) {
        const lm_question *q = c->items[i].question;
        lm_grade_result r = {.n_value = q->n - q->first};
        for (int64_t k = 0; k < r.n_value; k++, mark++) {
            r.loss += mark->loss / (double)r.n_value;
            r.kl += mark->kl / (double)r.n_value;
            r.right += mark->right;
        }
        loss += q->weight * r.loss;
        if (result) result[i] = r;
    }
    return loss;
}

static call open_call(lm_learner *x, purpose why, const lm_gating *g) {
    return (call){.x = x, .m = x->m, .d = x->m->device, .why = why, .g = g};
}

static int close_call(call *c, bool ok) {
    free(c->items);
    free(c->target);
    free(c->mark);
    free(c->hits);
    return ok ? 0 : -1;
}

/* da += the device's */
static bool add_gradient(const call *c, float *da) {
    const int64_t n = dkv_gates_count(&c->g->gates);
    float *sum = malloc((size_t)n * sizeof *sum);
    double now;
    bool ok = sum ? c->d->copy(c->m, sum, c->u.da, (size_t)n * sizeof *sum) && c->d->wait(c->m, &now)
                  : lm_fail(c->m, "no memory for %lld gates", (long long)n);
    for (int64_t i = 0; i < n && ok; i++) da[i] += sum[i];
    free(sum);
    return ok;
}

/* One bin, as long as the longest context, and open. */
static lm_gating dense_gating(const lm_model *m, const lm_exam *e, int64_t n) {
    const dkv_shape *s = &m->p.shape;
    int64_t W = 1;
    for (int64_t i = 0; i < n; i++)
        if (e[i].context->plan->T_c > W) W = e[i].context->plan->T_c;
    return (lm_gating){.gates = {s->L, s->H, s->Hkv, 1, 0}, .W = W};
}

int lm_learn(lm_learner *x, const lm_exam *e, int64_t n, const lm_gating *g, float *da, double *loss,
             lm_grade_result *result) {
    call c = open_call(x, LEARN, g);
    bool ok = run(&c, e, n) && add_gradient(&c, da);
    if (ok) *loss = report(&c, result);
    return close_call(&c, ok);
}

int lm_grade(lm_learner *x, const lm_exam *e, int64_t n, const lm_gating *g, lm_grade_result *result) {
    call c = open_call(x, GRADE, g);
    bool ok = run(&c, e, n);
    if (ok) report(&c, result);
    return close_call(&c, ok);
}

int lm_grade_reference(lm_learner *x, const lm_exam *e, int64_t n, lm_grade_result *result) {
    const lm_gating dense = dense_gating(x->m, e, n);
    call c = open_call(x, REMEMBER, &dense);
    bool ok = run(&c, e, n);
    if (ok) {
        report(&c, result);
        free(x->reference_target);
        x->reference_target = c.target, x->reference_values = c.values;
        c.target = NULL;
    }
    return close_call(&c, ok);
}

int lm_rank(lm_learner *x, const lm_exam *e, int64_t n, float *hits) {
    const lm_gating dense = dense_gating(x->m, e, n);
    call c = open_call(x, RANK, &dense);
    bool ok = run(&c, e, n);
    if (ok) memcpy(hits, c.hits, (size_t)(c.n * x->m->p.shape.L * x->m->p.shape.H) * sizeof *hits);
    return close_call(&c, ok);
}

/* ==== opening ==== */

int lm_learner_open(lm_learner **out, lm_model *m) {
    lm_learner *x = calloc(1, sizeof *x);
    arena size = {NULL, 0};
    chunk none;
    *out = NULL;
    place_chunk(&size, &none, m->device->rows, m->p.shape.H);
    if (!x || !(x->chunk_memory = malloc(size.used))) return free(x), lm_explain(m, "no memory for a learner");
    x->m = m;
    place_chunk(&(arena){x->chunk_memory, 0}, &x->chunk, m->device->rows, m->p.shape.H);
    *out = x;
    return 0;
}

void lm_learner_close(lm_learner *x) {
    if (!x) return;
    x->m->device->drop(x->m, &x->board);
    x->m->device->drop(x->m, &x->gates);
    x->m->device->drop(x->m, &x->reference);
    free(x->chunk_memory);
    free(x->reference_target);
    free(x);
}
