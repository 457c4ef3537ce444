#define _GNU_SOURCE
#include "device.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int lm_explain(lm_model *m, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(m->error, sizeof m->error, fmt, args);
    va_end(args);
    for (char *c = m->error; *c; c++) /* a tensor's name may hold anything; the line stays one */
        if ((unsigned char)*c < ' ') *c = '?';
    return -1;
}

void lm_dequantise(float *to, const quant_mat *w, int64_t first, int64_t rows) {
    size_t row_bytes = gguf_row_bytes(w->type, w->cols);
    #pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        quant_row_to_f32(to + r * w->cols, (const char *)w->data + (size_t)(first + r) * row_bytes, w->type, w->cols);
}

/* ==== what a file must hold ==== */

typedef struct {
    lm_model *m;
    char arch[16];
    bool *used;   /* [tensors of the file] */
    float *next;  /* free part of m->vectors */
} loader;

typedef struct { char text[96]; } name;

static name arch_key(const loader *o, const char *key) {
    name s;
    snprintf(s.text, sizeof s.text, "%s.%s", o->arch, key);
    return s;
}

/* An integer key in least..most; when it is absent, *out as it is, which must be in that range too. */
static bool get_size(const loader *o, const char *key, int64_t least, int64_t most, int64_t *out) {
    name k = arch_key(o, key);
    if (gguf_has(o->m->file, k.text) && !gguf_get_int(o->m->file, k.text, out)) *out = least - 1;
    if (*out >= least && *out <= most) return true;
    return lm_fail(o->m, "key %s is missing or not in %lld..%lld", k.text, (long long)least, (long long)most);
}

static bool get_positive(const loader *o, const char *key, double *out) {
    name k = arch_key(o, key);
    if (gguf_has(o->m->file, k.text) && !gguf_get_real(o->m->file, k.text, out)) *out = 0;
    if (*out > 0 && *out < 1e30) return true;
    return lm_fail(o->m, "key %s is missing or not a positive number", k.text);
}

static bool str_is(gguf_str s, const char *text) { return s.len == strlen(text) && !memcmp(s.ptr, text, s.len); }

static bool get_arch(loader *o) {
    static const struct { const char *name; bool half_split; } known[] = {{"llama", false}, {"qwen2", true}};
    gguf_str s = {0};
    gguf_get_str(o->m->file, "general.architecture", &s);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (str_is(s, known[i].name)) {
            snprintf(o->arch, sizeof o->arch, "%s", known[i].name);
            o->m->p.half_split = known[i].half_split;
            return true;
        }
    return lm_fail(o->m, "key general.architecture is neither llama nor qwen2");
}

static bool get_shape(const loader *o) {
    lm_params *p = &o->m->p;
    int64_t L = 0, H = 0, d, d_v;
    if (!get_size(o, "block_count", 1, 65536, &L) || !get_size(o, "attention.head_count", 1, 65536, &H) ||
        !get_size(o, "embedding_length", 1, 1 << 24, &p->E) || !get_size(o, "feed_forward_length", 1, 1 << 24, &p->F) ||
        !get_size(o, "context_length", 1, INT32_MAX, &p->n_ctx)) return false;
    int64_t Hkv = H;
    d = p->E / H;
    if (!get_size(o, "attention.head_count_kv", 1, H, &Hkv)) return false;
    if (H % Hkv) return lm_fail(o->m, "key %s.attention.head_count_kv does not divide head_count", o->arch);
    if (!get_size(o, "attention.key_length", 1, 576, &d)) return false;
    p->n_rot = d_v = d;
    if (!get_size(o, "attention.value_length", d, d, &d_v) || !get_size(o, "rope.dimension_count", 2, d, &p->n_rot))
        return false;
    if (p->n_rot % 2) return lm_fail(o->m, "key %s.rope.dimension_count is odd", o->arch);
    p->shape = (dkv_shape){(int32_t)L, (int32_t)H, (int32_t)Hkv, (int32_t)d, (int32_t)d};
    return true;
}

static bool get_numbers(const loader *o) {
    lm_params *p = &o->m->p;
    name scaling = arch_key(o, "rope.scaling.type");
    gguf_str type = {0};
    p->rope_base = 10000;
    p->rope_scale = 1;
    if (!get_positive(o, "attention.layer_norm_rms_epsilon", &p->eps)) return false;
    if (!get_positive(o, "rope.freq_base", &p->rope_base)) return false;
    if (gguf_has(o->m->file, scaling.text)) {
        gguf_get_str(o->m->file, scaling.text, &type);
        if (str_is(type, "none")) return true;
        if (!str_is(type, "linear")) return lm_fail(o->m, "key %s is neither none nor linear", scaling.text);
    }
    if (!get_positive(o, "rope.scale_linear", &p->rope_scale)) return false; /* its name in older files */
    return get_positive(o, "rope.scaling.factor", &p->rope_scale);
}

/* The tensor [rows][cols], or NULL with the error set. */
static const gguf_tensor *get_tensor(loader *o, const char *what, int64_t rows, int64_t cols) {
    const gguf_tensor *t = gguf_find(o->m->file, what);
    if (!t) return lm_explain(o->m, "tensor %s is missing", what), NULL;
    if (t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != 1 || t->dims[3] != 1)
        return lm_explain(o->m, "tensor %s has shape [%lld][%lld], not [%lld][%lld]", what, (long long)t->dims[1],
                       (long long)t->dims[0], (long long)rows, (long long)cols), NULL;
    o->used[t - gguf_tensor_at(o->m->file, 0)] = true;
    return t;
}

static bool get_vector(loader *o, const float **out, const char *what, int64_t n) {
    const gguf_tensor *t = get_tensor(o, what, 1, n);
    if (!t) return false;
    quant_row_to_f32(o->next, t->data, t->type, n);
    *out = o->next;
    o->next += n;
    return true;
}

static bool get_matrix(loader *o, lm_weight *w, const char *what, int64_t rows, int64_t cols) {
    const gguf_tensor *t = get_tensor(o, what, rows, cols);
    if (t) w->mat = (quant_mat){.type = t->type, .rows = rows, .cols = cols, .data = t->data};
    return t != NULL;
}

static name layer_tensor(int l, const char *what) {
    name s;
    snprintf(s.text, sizeof s.text, "blk.%d.%s", l, what);
    return s;
}

static bool get_layer(loader *o, int l) {
    const lm_params *p = &o->m->p;
    lm_layer *to = &o->m->layers[l];
    int64_t q = p->shape.H * p->shape.d_k, kv = p->shape.Hkv * p->shape.d_k, at = 0;
    const struct { const char *matrix, *bias; int64_t rows, cols; } part[LAYER_WEIGHTS] = {
        [WQ] = {"attn_q.weight", "attn_q.bias", q, p->E},
        [WK] = {"attn_k.weight", "attn_k.bias", kv, p->E},
        [WV] = {"attn_v.weight", "attn_v.bias", kv, p->E},
        [WO] = {"attn_output.weight", NULL, p->E, q},
        [GATE] = {"ffn_gate.weight", NULL, p->F, p->E},
        [UP] = {"ffn_up.weight", NULL, p->F, p->E},
        [DOWN] = {"ffn_down.weight", NULL, p->E, p->F},
    };
    bool biased = gguf_find(o->m->file, layer_tensor(l, part[WQ].bias).text);
    for (int k = 0; k < LAYER_WEIGHTS; k++) {
        if (!get_matrix(o, &to->w[k], layer_tensor(l, part[k].matrix).text, part[k].rows, part[k].cols)) return false;
        to->w[k].at = at;
        at += part[k].rows * part[k].cols;
        if (biased && part[k].bias &&
            !get_vector(o, &to->w[k].bias, layer_tensor(l, part[k].bias).text, part[k].rows)) return false;
    }
    return get_vector(o, &to->attn_norm, layer_tensor(l, "attn_norm.weight").text, p->E) &&
           get_vector(o, &to->ffn_norm, layer_tensor(l, "ffn_norm.weight").text, p->E);
}

/* Radians per position of each pair; rope_freqs.weight (Llama 3.1's scaling) divides them. */
static bool get_rope(loader *o) {
    lm_model *m = o->m;
    int64_t pairs = m->p.n_rot / 2;
    const float *divide = NULL;
    if (gguf_find(m->file, "rope_freqs.weight") && !get_vector(o, &divide, "rope_freqs.weight", pairs)) return false;
    for (int64_t j = 0; j < pairs; j++) {
        double factor = divide ? (double)divide[j] : 1;
        if (!(factor > 0)) return lm_fail(m, "tensor rope_freqs.weight holds a number that is not positive");
        m->inv_freq[j] = pow(m->p.rope_base, -2.0 * (double)j / (double)m->p.n_rot) / m->p.rope_scale / factor;
    }
    return true;
}

static bool get_tensors(loader *o) {
    lm_model *m = o->m;
    const gguf_tensor *embed = gguf_find(m->file, "token_embd.weight");
    m->p.V = embed ? embed->dims[1] : 1;
    if (m->p.V > INT32_MAX) return lm_fail(m, "tensor token_embd.weight has too many rows");
    m->embed = get_tensor(o, "token_embd.weight", m->p.V, m->p.E);
    const char *output = gguf_find(m->file, "output.weight") ? "output.weight" : "token_embd.weight"; /* tied */
    if (!m->embed || !get_matrix(o, &m->output, output, m->p.V, m->p.E) ||
        !get_vector(o, &m->output_norm, "output_norm.weight", m->p.E) || !get_rope(o)) return false;
    for (int l = 0; l < m->p.shape.L; l++)
        if (!get_layer(o, l)) return false;
    for (int64_t i = 0; i < gguf_tensor_count(m->file); i++) { /* another graph's: running on would be wrong */
        gguf_str s = gguf_tensor_at(m->file, i)->name;
        if (!o->used[i])
            return lm_fail(m, "tensor %.*s has no place in this graph", s.len < 64 ? (int)s.len : 64, s.ptr);
    }
    return true;
}

/* ==== opening ==== */

static bool load(loader *o) {
    lm_model *m = o->m;
    if (!get_arch(o) || !get_shape(o) || !get_numbers(o)) return false;
    const dkv_shape *s = &m->p.shape;
    int64_t layer_floats = 2 * m->p.E + (s->H + 2 * (int64_t)s->Hkv) * s->d_k; /* norms and biases */
    m->n_vectors = s->L * layer_floats + m->p.E + m->p.n_rot / 2;
    m->layers = calloc((size_t)s->L, sizeof *m->layers);
    m->inv_freq = malloc((size_t)(m->p.n_rot / 2) * sizeof *m->inv_freq);
    m->vectors = calloc((size_t)m->n_vectors, sizeof *m->vectors);
    o->used = calloc((size_t)gguf_tensor_count(m->file) + 1, sizeof *o->used);
    o->next = m->vectors;
    if (!m->layers || !m->inv_freq || !m->vectors || !o->used)
        return lm_fail(m, "no memory for a model of this shape");
    return get_tensors(o);
}

bool lm_load(lm_model *m) {
    loader o = {.m = m};
    bool ok = load(&o);
    free(o.used);
    return ok;
}
