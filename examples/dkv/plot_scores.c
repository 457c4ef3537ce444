/* The picture of retrieval scores (paper, Figure 1): all heads sorted by where they peak; two heads of opposite taste;
   near against far. */
#include "plot.h"

#include <stdio.h>
#include <stdlib.h>

/* Bins that near and far stand for, each: they do not overlap but where there is one. */
static int64_t ends_of(const score_table *s) { return s->D >= 8 ? 4 : s->D > 1 ? s->D / 2 : 1; }

typedef struct {
    const float *S;         /* [D] */
    int l, h;
    int64_t peak;           /* the first bin of its highest score */
    double top, near, far;  /* that score; means over the first and the last bins */
} head_scores;

static head_scores look_at(const score_table *s, int64_t i) {
    const int64_t D = s->D, n = ends_of(s);
    head_scores x = {.S = s->score + i * D, .l = (int)(i / s->H), .h = (int)(i % s->H)};
    for (int64_t b = 0; b < D; b++)
        if (b == 0 || (double)x.S[b] > x.top) x.top = (double)x.S[b], x.peak = b;
    for (int64_t k = 0; k < n; k++) {
        x.near += (double)x.S[k] / (double)n;
        x.far += (double)x.S[D - 1 - k] / (double)n;
    }
    return x;
}

/* Near peaks first, of one bin the highest; heads that find nothing come last. */
static int by_peak(const void *a, const void *b) {
    const head_scores *x = a, *y = b;
    if ((x->top > 0) != (y->top > 0)) return x->top > 0 ? -1 : 1;
    if (x->peak != y->peak) return x->peak < y->peak ? -1 : 1;
    if (x->top != y->top) return x->top > y->top ? -1 : 1;
    return x->S < y->S ? -1 : x->S > y->S;
}

static void write_map(FILE *out, const head_scores *head, int64_t n, int64_t D) {
    fputs("$heads << EOD\n", out);
    for (int64_t i = 0; i < at_least_two(n); i++, fputc('\n', out))
        for (int64_t b = 0; b < at_least_two(D); b++) {
            const head_scores *x = &head[i % n];
            fprintf(out, "%.3f ", x->top > 0 ? (double)x->S[b % D] / x->top : 0);
        }
    fputs("EOD\n", out);
}

/* The head that prefers near most, and the one that prefers far most. */
static void write_pair(FILE *out, const head_scores *head, int64_t n, const score_table *s) {
    const head_scores *near = head, *far = head;
    for (const head_scores *x = head; x < head + n; x++) {
        if (x->near - x->far > near->near - near->far) near = x;
        if (x->far - x->near > far->far - far->near) far = x;
    }
    fprintf(out, "one = 'L%dH%d'; two = 'L%dH%d'\n$pair << EOD\n", near->l, near->h, far->l, far->h);
    for (int64_t b = 0; b < s->D; b++)
        fprintf(out, "%.1f %.5f %.5f\n", (double)s->R + (double)s->W * ((double)b + 0.5), (double)near->S[b],
                (double)far->S[b]);
    fputs("EOD\n", out);
}

static void write_ends(FILE *out, const head_scores *head, int64_t n) {
    double most = 0.1;
    fputs("$ends << EOD\n", out);
    for (const head_scores *x = head; x < head + n; x++) {
        fprintf(out, "%.5f %.5f\n", x->near, x->far);
        if (x->near > most) most = x->near;
        if (x->far > most) most = x->far;
    }
    fprintf(out, "EOD\nmost = %.5f\n", 1.04 * most);
}

static const char SCRIPT[] =
    "set terminal pngcairo size 1600,1200 font 'Sans,16' background 'white'\n"
    "set multiplot\n"
    "set border lc rgb '#444444' lw 1\n"
    "set tics nomirror out scale 0.5\n"
    "set palette defined (0 '#f7f7f5', 0.33 '#fdcc8a', 0.67 '#e34a33', 1 '#7f0000')\n"
    "set cbrange [0:1]\n"
    "unset key\n"
    "set xlabel 'distance from the end of the context, tokens'\n"
    "set xrange [near:far]\n"
    "if (far >= 10000) { set format x '%.0s%c' }\n"

    "set lmargin at screen 0.075; set rmargin at screen 0.50; set tmargin at screen 0.86; set bmargin at screen 0.08\n"
    "set label 1 summary at screen 0.5,0.970 center font ',22' noenhanced\n"
    "set label 2 detail at screen 0.5,0.935 center font ',16' tc rgb '#444444'\n"
    "set title 'Where each query head retrieves, relative to its best bin'\n"
    "set ylabel 'query heads, sorted by their best bin'\n"
    "set yrange [heads:0]\n"
    "set colorbox user origin screen 0.51,0.08 size screen 0.012,0.78\n"
    "set format cb '%.1f'\n"
    "plot $heads matrix using (near + width * ($1 + 0.5)):($2 + 0.5):3 with image\n"
    "unset label\n"

    "unset colorbox\n"
    "set grid lc rgb '#dddddd' lw 1 lt 1\n"
    "set lmargin at screen 0.645; set rmargin at screen 0.96; set tmargin at screen 0.86; set bmargin at screen 0.555\n"
    "set title 'Two heads of opposite taste'\n"
    "set ylabel 'retrieval score\\@5'\n"
    "set yrange [0:1.2]\nset ytics 0, 0.2, 1\n" /* the key stands above 1 */
    "set format y '%g'\n"
    "set key top center horizontal samplen 2\n"
    "plot $pair using 1:2 with linespoints pt 7 ps 0.6 lw 2 lc rgb '#d95f0e' title one, \\\n"
    "     $pair using 1:3 with linespoints pt 7 ps 0.6 lw 2 lc rgb '#2b6cb0' title two\n"

    "set tmargin at screen 0.425; set bmargin at screen 0.08\n"
    "set title 'Near against far, a point per query head'\n"
    "set xlabel sprintf('mean score of the nearest %d bins', ends)\n"
    "set ylabel sprintf('mean score of the farthest %d', ends)\n"
    "set format x '%g'\n"
    "set xrange [0:most]\n"
    "set yrange [0:most]\n"
    "unset key\n"
    "plot x with lines dt 2 lw 1.5 lc rgb '#888888', \\\n"
    "     $ends using 1:2 with points pt 7 ps 1 lc rgb '#702b6cb0'\n"
    "unset multiplot\n";

void draw_scores(FILE *out, const score_table *s) {
    int64_t n = (int64_t)s->L * s->H, found = 0;
    head_scores *head = allocate((size_t)n, sizeof *head);
    for (int64_t i = 0; i < n; i++) head[i] = look_at(s, i);
    qsort(head, (size_t)n, sizeof *head, by_peak);
    for (int64_t i = 0; i < n; i++) found += head[i].top >= 0.1;
    write_map(out, head, n, s->D);
    write_pair(out, head, n, s);
    write_ends(out, head, n);
    free(head);
    fprintf(out, "near = %lld; width = %lld; far = %lld; heads = %lld; ends = %d\n", (long long)s->R, (long long)s->W,
            (long long)(s->T_c - s->S), (long long)n, (int)ends_of(s));
    write_title(out, s->model, s->L, s->H, s->Hkv, s->D, s->W);
    fprintf(out, "detail = \"retrieval score: share of value tokens among a head's 5 highest; "
                 "it reaches 0.1 in some bin for %lld of %lld heads\"\n", (long long)found, (long long)n);
    fputs(SCRIPT, out);
}
