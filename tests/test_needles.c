/* Training data: every bin asked about once, lines inside their bins, source positions exact; with a vocabulary of
   bytes, and with the real one where the model is (MODEL, or the file in build/model). */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
/* after the above */
#include <cmocka.h>

#include "../examples/llama/needles.h"
#include "gguf_build.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static lm_tokenizer *tokenizer;
static lm_chat chat;
static gguf *file_gguf;

/* ---- vocabularies -------------------------------------------------------- */

static void open_chat(const char *format) {
    char err[256];
    if (lm_tokenizer_open(&tokenizer, file_gguf, err, sizeof err)) fail_msg("%s", err);
    if (lm_chat_open(&chat, file_gguf, tokenizer, format, NULL, err, sizeof err)) fail_msg("%s", err);
}

/* 256 bytes in GPT-2's spelling, and one merge. */
static int bytes_only(void **state) {
    (void)state;
    static file f;
    f.n = 0;
    put_head(&f, 0, 4);
    put_key_str(&f, "tokenizer.ggml.model", "gpt2");
    put_key_str(&f, "tokenizer.ggml.pre", "gpt2");
    put_array(&f, "tokenizer.ggml.tokens", T_STR, 257);
    for (int b = 0, others = 0; b < 256; b++) {
        int hidden = b <= 32 || (b >= 127 && b <= 160) || b == 173, c = hidden ? 256 + others++ : b;
        char s[3] = {(char)c, 0, 0};
        if (c >= 128) s[0] = (char)(0xc0 | c >> 6), s[1] = (char)(0x80 | (c & 63));
        put_str(&f, s);
    }
    put_str(&f, "th");
    put_array(&f, "tokenizer.ggml.merges", T_STR, 1);
    put_str(&f, "t h");
    char err[256];
    if (gguf_open_memory(&file_gguf, f.bytes, f.n, err, sizeof err)) fail_msg("%s", err);
    open_chat("raw");
    return 0;
}

static int real(void **state) {
    (void)state;
    const char *path = getenv("MODEL") ? getenv("MODEL") : "build/model/SmolLM2-135M-Instruct.Q4_1.gguf";
    char err[256];
    if (access(path, R_OK)) return 0; /* the test skips itself */
    if (gguf_open(&file_gguf, path, err, sizeof err)) fail_msg("%s", err);
    open_chat(NULL);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    if (!file_gguf) return 0;
    lm_chat_close(&chat);
    lm_tokenizer_close(tokenizer);
    gguf_close(file_gguf);
    file_gguf = NULL;
    return 0;
}

/* ---- what must hold of any data ------------------------------------------ */

static lm_needles *must_open(const lm_needle_options *o) {
    lm_needles *n;
    char err[256];
    if (lm_needles_open(&n, tokenizer, &chat, o, err, sizeof err)) fail_msg("%s", err);
    return n;
}

static void must_make(const lm_needles *n, lm_haystack *h, int32_t *ids, int kind, int wording, int64_t round,
                      int64_t index) {
    char err[256];
    if (lm_needles_context(n, h, ids, kind, wording, round, index, err, sizeof err)) fail_msg("%s", err);
}

/* Text of ids; to be freed. */
static char *text_of(const int32_t *ids, int64_t n) {
    char *text = calloc(1, 1);
    size_t len = 0, more;
    for (int64_t i = 0; i < n; i++) {
        const char *piece = lm_decode(tokenizer, ids[i], &more);
        text = realloc(text, len + more + 1);
        memcpy(text + len, piece, more);
        text[len += more] = 0;
    }
    return text;
}

static void expect_text(const int32_t *ids, int64_t n, const char *want) {
    char *text = text_of(ids, n);
    assert_string_equal(text, want);
    free(text);
}

/* A needle's line and suffix: where they are, what they say, and the same value tokens in both. */
static void check_needle(const lm_needles *n, const lm_needle_options *o, const lm_haystack *h, const int32_t *ids,
                         int i) {
    const lm_needle *x = &h->needle[i];
    const char *kind = h->kind == LM_NUM ? "num" : "word";
    int64_t end = o->T_c - o->R - o->W * x->bin, margin = o->W / 8, first;
    char lead[128], line[256];
    snprintf(lead, sizeof lead, "The %s value for record key %s is", kind, x->key);
    snprintf(line, sizeof line, "\n%s%s.\n", lead, x->value);
    assert_true(x->begin >= end - o->W + margin && x->end <= end - margin);
    assert_true(end - o->W >= o->S);
    assert_true(x->end - x->begin <= 3 * o->W / 4);
    assert_true(x->begin < x->source && x->source + x->n_value < x->end && x->n_value > 0);
    expect_text(ids + x->begin, x->end - x->begin, line);
    expect_text(ids + x->source, x->n_value, x->value);

    lm_ids suffix = {0};
    assert_int_equal(lm_needles_query(n, h, i, &suffix, &first), 0);
    assert_int_equal(suffix.n - first, x->n_value);
    assert_memory_equal(suffix.v + first, ids + x->source, (size_t)x->n_value * sizeof *ids);
    char *asked = text_of(suffix.v, first);
    assert_non_null(strstr(asked, x->key));
    assert_string_equal(asked + strlen(asked) - strlen(lead), lead);
    assert_true(strstr(asked, x->key) < asked + strlen(asked) - strlen(lead)); /* the question names it too */
    free(asked);
    free(suffix.v);
}

/* All of a manifest: each bin once, and in the last context those dealt before, all different. */
static void check_manifest(const lm_needle_options *o, int kind, int wording, int64_t round) {
    lm_needles *n = must_open(o);
    int64_t bins = lm_needles_bins(n), contexts = lm_needles_contexts(n), per = o->per_context ? o->per_context : 4;
    int *seen = calloc((size_t)bins, sizeof *seen);
    int32_t *ids = malloc((size_t)o->T_c * sizeof *ids);
    assert_int_equal(bins, (o->T_c - o->S - o->R) / o->W);
    assert_int_equal(contexts, (bins + per - 1) / per);
    for (int64_t c = 0; c < contexts; c++) {
        lm_haystack h;
        memset(ids, 0xff, (size_t)o->T_c * sizeof *ids);
        must_make(n, &h, ids, kind, wording, round, c);
        assert_int_equal(h.n, per);
        for (int64_t i = 0; i < o->T_c; i++) assert_true(ids[i] >= 0);
        for (int i = 0; i < h.n; i++) {
            assert_in_range(h.needle[i].bin, 0, bins - 1);
            seen[h.needle[i].bin]++;
            check_needle(n, o, &h, ids, i);
            for (int k = 0; k < i; k++) {
                assert_int_not_equal(h.needle[i].bin, h.needle[k].bin);
                assert_string_not_equal(h.needle[i].key, h.needle[k].key);
                assert_string_not_equal(h.needle[i].value, h.needle[k].value);
            }
        }
    }
    int64_t again = contexts * per - bins;
    for (int64_t b = 0; b < bins; b++) {
        assert_in_range(seen[b], 1, 2);
        again -= seen[b] - 1;
    }
    assert_int_equal(again, 0);
    free(seen);
    free(ids);
    lm_needles_close(n);
}

static const lm_needle_options shapes[] = {
    {.T_c = 2048, .W = 128, .S = 128, .R = 256, .seed = 1},
    {.T_c = 2111, .W = 128, .S = 100, .R = 256, .seed = 2, .per_context = 3, .groups = 3}, /* a ragged farthest bin */
    {.T_c = 4096, .W = 256, .S = 0, .R = 0, .seed = 3, .per_context = 16, .split = LM_REPORT},
    {.T_c = 1 << 14, .W = 128, .S = 128, .R = 1024, .seed = 4, .per_context = 64, .split = LM_CHOOSE},
};

static void manifests(void **state) {
    (void)state;
    for (int i = 0; i < COUNT(shapes); i++)
        for (int kind = 0; kind < LM_KINDS; kind++)
            for (int wording = 0; wording < LM_WORDINGS; wording++) check_manifest(&shapes[i], kind, wording, i);
}

/* With the real vocabulary, at the sizes that it is trained at; and a line's tokens are those of the whole line. */
static void real_manifests(void **state) {
    (void)state;
    if (!file_gguf) skip();
    lm_needle_options o = {.T_c = 7936, .W = 128, .S = 128, .R = 1024, .seed = 5};
    for (int kind = 0; kind < LM_KINDS; kind++) check_manifest(&o, kind, 1, 2);
    o = (lm_needle_options){.T_c = 2048, .W = 64, .S = 64, .R = 256, .seed = 6, .split = LM_CHOOSE, .per_context = 8};
    check_manifest(&o, LM_WORD, 0, 0);
    lm_needles *n = must_open(&o);
    int32_t *ids = malloc((size_t)o.T_c * sizeof *ids), whole[128];
    for (int c = 0; c < 6; c++) {
        lm_haystack h;
        must_make(n, &h, ids, c % 2, 0, 0, c / 2);
        for (int i = 0; i < h.n; i++) {
            int64_t len = h.needle[i].end - h.needle[i].begin;
            char *line = text_of(ids + h.needle[i].begin, len);
            assert_int_equal(lm_encode(tokenizer, line, strlen(line), false, whole, COUNT(whole)), len);
            assert_memory_equal(whole, ids + h.needle[i].begin, (size_t)len * sizeof *ids);
            free(line);
        }
    }
    free(ids);
    lm_needles_close(n);
}

static void weights(void **state) {
    (void)state;
    for (int s = 0; s < COUNT(shapes); s++) {
        lm_needles *n = must_open(&shapes[s]);
        int64_t bins = lm_needles_bins(n);
        double *weight = malloc((size_t)bins * sizeof *weight), *sum = calloc((size_t)bins, sizeof *sum);
        int32_t *ids = malloc((size_t)shapes[s].T_c * sizeof *ids);
        assert_int_equal(lm_needles_weights(n, 3, weight), 0);
        for (int m = 0; m < LM_KINDS * LM_WORDINGS; m++)
            for (int64_t c = 0; c < lm_needles_contexts(n); c++) {
                lm_haystack h;
                must_make(n, &h, ids, m / LM_WORDINGS, m % LM_WORDINGS, 3, c);
                for (int i = 0; i < h.n; i++) sum[h.needle[i].bin] += weight[h.needle[i].bin];
            }
        for (int64_t b = 0; b < bins; b++) {
            double off = sum[b] * (double)bins - 1;
            assert_true(off > -1e-12 && off < 1e-12);
        }
        free(ids);
        free(sum);
        free(weight);
        lm_needles_close(n);
    }
}

/* ---- splits, filler, chance ---------------------------------------------- */

enum { KEYS_OF_SPLIT = 400 };

/* Keys, questions' beginnings and filler of a split. */
static void collect(int split, char key[KEYS_OF_SPLIT][32], char asked[LM_WORDINGS][512], char **filler) {
    lm_needle_options o = shapes[0];
    o.split = split, o.per_context = 4;
    lm_needles *n = must_open(&o);
    int32_t *ids = malloc((size_t)o.T_c * sizeof *ids);
    lm_haystack h;
    for (int k = 0; k < KEYS_OF_SPLIT; k++) {
        must_make(n, &h, ids, k % 2, k / 2 % LM_WORDINGS, k / 12, k % 3);
        memcpy(key[k], h.needle[k % 4].key, sizeof h.needle->key);
    }
    for (int w = 0; w < LM_WORDINGS; w++) {
        lm_ids suffix = {0};
        int64_t first;
        must_make(n, &h, ids, LM_NUM, w, 0, 0);
        assert_int_equal(lm_needles_query(n, &h, 0, &suffix, &first), 0);
        char *text = text_of(suffix.v, first);
        snprintf(asked[w], sizeof asked[w], "%.*s", (int)strcspn(text + 2, " ") + 12, text + 2);
        free(text);
        free(suffix.v);
    }
    *filler = text_of(ids, h.needle[0].begin);
    free(ids);
    lm_needles_close(n);
}

static void splits_share_nothing(void **state) {
    (void)state;
    static char key[LM_SPLITS][KEYS_OF_SPLIT][32], asked[LM_SPLITS][LM_WORDINGS][512];
    char *filler[LM_SPLITS];
    for (int s = 0; s < LM_SPLITS; s++) collect(s, key[s], asked[s], &filler[s]);
    for (int a = 0; a < LM_SPLITS; a++)
        for (int b = 0; b < a; b++) {
            assert_true(strncmp(filler[a], filler[b], 40) != 0);
            for (int i = 0; i < LM_WORDINGS * LM_WORDINGS; i++)
                assert_string_not_equal(asked[a][i % LM_WORDINGS], asked[b][i / LM_WORDINGS]);
            for (int i = 0; i < KEYS_OF_SPLIT; i++)
                for (int k = 0; k < KEYS_OF_SPLIT; k++) assert_string_not_equal(key[a][i], key[b][k]);
        }
    for (int s = 0; s < LM_SPLITS; s++) {
        assert_string_not_equal(asked[s][0], asked[s][1]);
        assert_null(strpbrk(filler[s], "0123456789"));
        assert_null(strstr(filler[s], "value"));
        assert_null(strstr(filler[s], "record"));
        assert_null(strstr(filler[s], "key"));
        for (int i = 0; i < KEYS_OF_SPLIT; i++) assert_null(strstr(filler[s], key[s][i]));
        free(filler[s]);
    }
}

static void same_options_same_data(void **state) {
    (void)state;
    int32_t *a = malloc((size_t)shapes[0].T_c * sizeof *a), *b = malloc((size_t)shapes[0].T_c * sizeof *b);
    size_t bytes = (size_t)shapes[0].T_c * sizeof *a;
    lm_needle_options o = shapes[0];
    lm_needles *n = must_open(&o), *again = must_open(&o);
    lm_haystack h;
    must_make(n, &h, a, LM_NUM, 0, 0, 2);
    must_make(again, &h, b, LM_WORD, 1, 5, 0); /* what was made before does not matter */
    must_make(again, &h, b, LM_NUM, 0, 0, 2);
    assert_memory_equal(a, b, bytes);
    lm_needles_close(again);
    must_make(n, &h, b, LM_NUM, 0, 1, 2);
    assert_memory_not_equal(a, b, bytes);
    must_make(n, &h, b, LM_NUM, 1, 0, 2);
    assert_memory_not_equal(a, b, bytes);
    o.seed++;
    again = must_open(&o);
    must_make(again, &h, b, LM_NUM, 0, 0, 2);
    assert_memory_not_equal(a, b, bytes);
    lm_needles_close(again);
    lm_needles_close(n);
    free(a);
    free(b);
}

/* A filler with all numbers but one leaves that one; with all, none. */
static void fillers(void **state) {
    (void)state;
    char text[8192] = "Some words first, then numbers:", err[256];
    size_t at = strlen(text);
    for (int i = 100; i < 1000; i++)
        if (i != 777) at += (size_t)snprintf(text + at, sizeof text - at, " %d", i);
    lm_needle_options o = {.T_c = 2048, .W = 128, .S = 128, .R = 256, .per_context = 1, .groups = 1, .filler = text};
    int32_t *ids = malloc((size_t)o.T_c * sizeof *ids);
    lm_haystack h;
    int found = 0;
    for (int seed = 0; seed < 20; seed++) { /* a thousand draws may miss one of nine hundred */
        o.seed = (uint64_t)seed;
        lm_needles *n = must_open(&o);
        if (lm_needles_context(n, &h, ids, LM_NUM, 0, 0, 0, err, sizeof err) == 0) {
            assert_string_equal(h.needle[0].value, " 777");
            found++;
        }
        lm_needles_close(n);
    }
    assert_true(found > 0);
    snprintf(text + at, sizeof text - at, " 777");
    lm_needles *n = must_open(&o);
    assert_int_equal(lm_needles_context(n, &h, ids, LM_NUM, 0, 0, 0, err, sizeof err), -1);
    assert_non_null(strstr(err, "no key and value are left"));
    must_make(n, &h, ids, LM_WORD, 0, 0, 0);
    lm_needles_close(n);
    free(ids);
}

/* A context's filler is one piece of the text, repeated, and every context has another. */
static void places(void **state) {
    (void)state;
    static char text[1 << 13];
    size_t at = 0;
    for (int i = 0; i < 500; i++) at += (size_t)snprintf(text + at, sizeof text / 2 - at, "line %d. ", i * i);
    lm_needle_options o = {.T_c = 2048, .W = 128, .S = 128, .R = 256, .per_context = 1, .filler = text};
    lm_needles *n = must_open(&o);
    int32_t *ids = malloc((size_t)o.T_c * sizeof *ids);
    int64_t first[4];
    char *twice;
    assert_true(asprintf(&twice, "%s%s", text, text) > 0);
    for (int i = 0; i < COUNT(first); i++) {
        lm_haystack h;
        must_make(n, &h, ids, LM_NUM, 0, 0, i);
        int64_t begin = h.needle[0].begin, end = h.needle[0].end;
        memmove(ids + begin, ids + end, (size_t)(o.T_c - end) * sizeof *ids); /* without the needle */
        char *filler = text_of(ids, o.T_c - (end - begin)), *found = strstr(twice, filler);
        assert_non_null(found);
        first[i] = found - twice;
        for (int k = 0; k < i; k++) assert_int_not_equal(first[i], first[k]);
        free(filler);
    }
    free(twice);
    free(ids);
    lm_needles_close(n);
}

static void refused(void **state) {
    (void)state;
    static const struct { lm_needle_options o; const char *reason; } table[] = {
        {{.T_c = 2048, .W = 0, .S = 128, .R = 256}, "outside its range"},
        {{.T_c = 2048, .W = 128, .S = -1, .R = 256}, "outside its range"},
        {{.T_c = 2048, .W = 128, .S = 128, .R = 256, .per_context = 65}, "1..64"},
        {{.T_c = 2048, .W = 128, .S = 128, .R = 256, .groups = 9}, "1..8 groups"},
        {{.T_c = 800, .W = 128, .S = 128, .R = 256}, "hold 3 full bins"},
        {{.T_c = 100, .W = 128, .S = 128, .R = 256}, "hold 0 full bins"},
        {{.T_c = 2048, .W = 128, .S = 128, .R = 256, .filler = "The record key of"}, "record key"},
        {{.T_c = 2048, .W = 128, .S = 128, .R = 256, .filler = ""}, "no text in the filler"},
    };
    for (int i = 0; i < COUNT(table); i++) {
        char err[256] = "";
        lm_needles *n = (lm_needles *)(void *)err;
        assert_int_equal(lm_needles_open(&n, tokenizer, &chat, &table[i].o, err, sizeof err), -1);
        assert_null(n);
        if (!strstr(err, table[i].reason)) fail_msg("case %d: %s", i, err);
    }
    lm_needle_options narrow = {.T_c = 2048, .W = 32, .S = 128, .R = 256}; /* a line has more bytes than a bin */
    lm_needles *n = must_open(&narrow);
    int32_t *ids = malloc((size_t)narrow.T_c * sizeof *ids);
    char err[256];
    lm_haystack h;
    assert_int_equal(lm_needles_context(n, &h, ids, LM_NUM, 0, 0, 0, err, sizeof err), -1);
    assert_non_null(strstr(err, "does not fit a bin of 32"));
    free(ids);
    lm_needles_close(n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(manifests, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(weights, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(splits_share_nothing, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(same_options_same_data, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(fillers, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(places, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(refused, bytes_only, close_all),
        cmocka_unit_test_setup_teardown(real_manifests, real, close_all),
    };
    return cmocka_run_group_tests_name("needles", tests, NULL, NULL);
}
