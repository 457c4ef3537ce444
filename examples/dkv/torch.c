#include "torch.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

typedef struct { const uint8_t *p; size_t n; } bytes; /* a stretch of the file; p NULL: none */

static uint32_t u16(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
static uint32_t u32(const uint8_t *p) { return u16(p) | u16(p + 2) << 16; }

/* ---- zip ----------------------------------------------------------------- */

enum { END_BYTES = 22, CENTRAL_BYTES = 46, LOCAL_BYTES = 30 };

/* The end record, which only a comment may follow. */
static const uint8_t *zip_end(bytes f) {
    for (size_t back = END_BYTES; back <= f.n && back <= END_BYTES + 65535; back++)
        if (!memcmp(f.p + f.n - back, "PK\5\6", 4)) return f.p + f.n - back;
    return NULL;
}

/* The data of a stored entry whose name ends in tail; from its central record, as local ones may lack sizes. */
static bytes zip_entry(bytes f, const char *tail) {
    const bytes none = {NULL, 0};
    const uint8_t *end = zip_end(f);
    if (!end || u32(end + 16) > f.n) return none;
    size_t at = u32(end + 16), tail_len = strlen(tail);
    for (uint32_t left = u16(end + 10); left > 0 && f.n - at >= CENTRAL_BYTES; left--) {
        const uint8_t *c = f.p + at;
        size_t name = u16(c + 28), size = u32(c + 24), local = u32(c + 42);
        size_t next = CENTRAL_BYTES + name + u16(c + 30) + u16(c + 32);
        if (memcmp(c, "PK\1\2", 4) || f.n - at < next) return none;
        at += next;
        if (name < tail_len || memcmp(c + CENTRAL_BYTES + name - tail_len, tail, tail_len)) continue;
        if (u16(c + 10) != 0 || u32(c + 20) != size || local > f.n || f.n - local < LOCAL_BYTES) return none;
        size_t data = local + LOCAL_BYTES + u16(f.p + local + 26) + u16(f.p + local + 28);
        if (memcmp(f.p + local, "PK\3\4", 4) || data > f.n || size > f.n - data) return none;
        return (bytes){f.p + data, size};
    }
    return none;
}

/* ---- pickle -------------------------------------------------------------- */

typedef enum { NONE, NUMBER, TEXT, NAME, TUPLE, MARK, OBJECT, STORAGE, TENSOR } kind;

typedef struct {
    kind kind;
    double number;
    const char *text; /* [n]: of TEXT and NAME ("module\nname") */
    int n;            /* or items of a TUPLE, and of the one that a STORAGE or TENSOR was made from: */
    int first;        /* in the machine's items */
} value;

enum { MAX_STACK = 64, MAX_MEMO = 256, MAX_ITEMS = 256 };

typedef struct {
    const uint8_t *at, *end;
    value stack[MAX_STACK], memo[MAX_MEMO], items[MAX_ITEMS];
    int n, n_memo, n_items;
    value pattern, keep_ratio; /* what a dict got under these names */
} machine;

static bool push(machine *m, value v) {
    if (m->n == MAX_STACK) return false;
    m->stack[m->n++] = v;
    return true;
}

static value pop(machine *m) { return m->n ? m->stack[--m->n] : (value){.kind = NONE}; }

static bool push_number(machine *m, double x) { return push(m, (value){.kind = NUMBER, .number = x}); }

/* The next n bytes, NULL when there are not as many. */
static const uint8_t *take(machine *m, size_t n) {
    if ((size_t)(m->end - m->at) < n) return NULL;
    m->at += n;
    return m->at - n;
}

static bool push_text(machine *m, size_t n) {
    const char *text = (const char *)take(m, n);
    return text && n < 4096 && push(m, (value){.kind = TEXT, .text = text, .n = (int)n});
}

static bool is(value v, kind k, const char *text) {
    return v.kind == k && (size_t)v.n == strlen(text) && !memcmp(v.text, text, (size_t)v.n);
}

/* The top n values become one tuple. */
static bool make_tuple(machine *m, int n) {
    if (n < 0 || m->n < n || MAX_ITEMS - m->n_items < n) return false;
    value v = {.kind = TUPLE, .n = n, .first = m->n_items};
    for (int i = 0; i < n; i++) m->items[m->n_items++] = m->stack[m->n - n + i];
    m->n -= n;
    return push(m, v);
}

/* Values above the last mark, which goes; -1 when there is none. */
static int above_mark(machine *m) {
    for (int i = m->n; i-- > 0;)
        if (m->stack[i].kind == MARK) {
            memmove(m->stack + i, m->stack + i + 1, (size_t)(m->n - i - 1) * sizeof *m->stack);
            m->n--;
            return m->n - i;
        }
    return -1;
}

/* Key, value pairs on top of a dict. */
static bool set_items(machine *m, int n) {
    if (n < 0 || n % 2 || m->n <= n || m->stack[m->n - n - 1].kind != OBJECT) return false;
    for (int i = m->n - n; i < m->n; i += 2) {
        if (is(m->stack[i], TEXT, "pattern")) m->pattern = m->stack[i + 1];
        if (is(m->stack[i], TEXT, "keep_ratio")) m->keep_ratio = m->stack[i + 1];
    }
    m->n -= n;
    return true;
}

/* ("storage", its class, key, device, elements) */
static bool load_storage(machine *m) {
    value v = pop(m);
    if (v.kind != TUPLE || v.n != 5) return false;
    const value *x = m->items + v.first;
    bool byte = is(x[1], NAME, "torch\nByteStorage") || is(x[1], NAME, "torch\nBoolStorage");
    v.kind = STORAGE;
    return is(x[0], TEXT, "storage") && byte && x[2].kind == TEXT && x[4].kind == NUMBER && push(m, v);
}

/* The two calls that a dict with a tensor makes. */
static bool reduce(machine *m) {
    value args = pop(m), call = pop(m);
    if (args.kind != TUPLE) return false;
    if (is(call, NAME, "collections\nOrderedDict") && args.n == 0) return push(m, (value){.kind = OBJECT});
    args.kind = TENSOR;
    return is(call, NAME, "torch._utils\n_rebuild_tensor_v2") && args.n >= 4 && push(m, args);
}

static bool push_name(machine *m) {
    const uint8_t *module = m->at, *middle = memchr(m->at, '\n', (size_t)(m->end - m->at));
    const uint8_t *end = middle ? memchr(middle + 1, '\n', (size_t)(m->end - middle - 1)) : NULL;
    if (!end || end - module > 256) return false;
    m->at = end + 1;
    return push(m, (value){.kind = NAME, .text = (const char *)module, .n = (int)(end - module)});
}

static bool memoize(machine *m, uint32_t i) {
    if (i >= MAX_MEMO || !m->n) return false;
    m->memo[i] = m->stack[m->n - 1];
    if ((int)i >= m->n_memo) m->n_memo = (int)i + 1;
    return true;
}

static bool recall(machine *m, uint32_t i) { return (int64_t)i < m->n_memo && push(m, m->memo[i]); }

static bool push_float(machine *m) { /* big-endian */
    const uint8_t *p = take(m, 8);
    uint64_t u = 0;
    double x;
    for (int i = 0; p && i < 8; i++) u = u << 8 | p[i];
    memcpy(&x, &u, 8);
    return p && push_number(m, x);
}

static bool push_long(machine *m) { /* a length, then as many little-endian bytes of two's complement */
    const uint8_t *n = take(m, 1), *p = n ? take(m, *n) : NULL;
    int64_t x = 0;
    if (!p || *n > 7) return false;
    for (int i = *n; i-- > 0;) x = x << 8 | p[i];
    if (*n && p[*n - 1] & 0x80) x -= (int64_t)1 << 8 * *n;
    return push_number(m, (double)x);
}

static bool step(machine *m, int op) {
    const uint8_t *p;
    switch (op) {
    case 0x80: return take(m, 1) != NULL;                                     /* PROTO */
    case '}': case ']': return push(m, (value){.kind = OBJECT});              /* EMPTY_DICT, EMPTY_LIST */
    case '(': return push(m, (value){.kind = MARK});
    case ')': return make_tuple(m, 0);
    case 't': return make_tuple(m, above_mark(m));
    case 0x85: case 0x86: case 0x87: return make_tuple(m, op - 0x84);         /* TUPLE1..3 */
    case 'N': return push(m, (value){.kind = NONE});
    case 0x88: case 0x89: return push_number(m, op == 0x88);                  /* NEWTRUE, NEWFALSE */
    case 'K': return (p = take(m, 1)) && push_number(m, p[0]);                /* BININT1 */
    case 'M': return (p = take(m, 2)) && push_number(m, u16(p));              /* BININT2 */
    case 'J': return (p = take(m, 4)) && push_number(m, (double)(int32_t)u32(p));
    case 0x8a: return push_long(m);                                           /* LONG1 */
    case 'G': return push_float(m);
    case 'X': return (p = take(m, 4)) && push_text(m, u32(p));                /* BINUNICODE */
    case 'c': return push_name(m);                                            /* GLOBAL */
    case 'q': return (p = take(m, 1)) && memoize(m, p[0]);                    /* BINPUT */
    case 'r': return (p = take(m, 4)) && memoize(m, u32(p));
    case 'h': return (p = take(m, 1)) && recall(m, p[0]);                     /* BINGET */
    case 'j': return (p = take(m, 4)) && recall(m, u32(p));
    case 'Q': return load_storage(m);                                         /* BINPERSID */
    case 'R': return reduce(m);
    case 's': return set_items(m, 2);
    case 'u': return set_items(m, above_mark(m));
    default: return false;
    }
}

/* ---- the tensor ---------------------------------------------------------- */

/* Three whole numbers in low..2^40. */
static bool read_three(const machine *m, value v, double low, int64_t out[3]) {
    if (v.kind != TUPLE || v.n != 3) return false;
    for (int i = 0; i < 3; i++) {
        value x = m->items[v.first + i];
        if (x.kind != NUMBER || !(x.number >= low && x.number <= 1099511627776.)) return false;
        out[i] = (int64_t)x.number;
    }
    return true;
}

static bool read_tensor(torch_pattern *out, const machine *m, bytes file) {
    if (m->pattern.kind != TENSOR) return false;
    const value *x = m->items + m->pattern.first;
    if (x[0].kind != STORAGE || x[1].kind != NUMBER || !(x[1].number >= 0 && x[1].number <= 1e15)) return false;
    if (!read_three(m, x[2], 1, out->dim) || !read_three(m, x[3], 0, out->stride)) return false;
    value key = m->items[x[0].first + 2];
    char tail[80];
    if (key.n > 64) return false;
    snprintf(tail, sizeof tail, "/data/%.*s", key.n, key.text);
    bytes storage = zip_entry(file, tail);
    double last = x[1].number;
    for (int i = 0; i < 3; i++) last += (double)(out->dim[i] - 1) * (double)out->stride[i];
    if (!storage.p || !(last < (double)storage.n)) return false;
    out->values = storage.p + (size_t)x[1].number;
    return true;
}

int torch_read_pattern(torch_pattern *out, const void *file, size_t size, char *err, size_t err_size) {
    bytes f = {file, size}, pickle = zip_entry(f, "/data.pkl");
    if (!pickle.p) return snprintf(err, err_size, "not a file that torch.save wrote (a zip, data.pkl stored)"), -1;
    machine m = {.at = pickle.p, .end = pickle.p + pickle.n};
    for (int op = 0; op != '.';) {
        size_t at = (size_t)(m.at - pickle.p);
        op = m.at < m.end ? *m.at++ : -1;
        if (op != '.' && !step(&m, op))
            return snprintf(err, err_size, "data.pkl, byte %zu: not what a dict with one byte tensor needs", at), -1;
    }
    if (!read_tensor(out, &m, f))
        return snprintf(err, err_size, "holds no uint8 tensor [L][H][D] under \"pattern\""), -1;
    out->keep_ratio = m.keep_ratio.kind == NUMBER ? m.keep_ratio.number : -1;
    return 0;
}
