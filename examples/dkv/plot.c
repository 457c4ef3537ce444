/* dkv plot: one picture of a pattern or of retrieval scores, drawn by gnuplot. Of a pattern (paper, Figure 6): heads x
   bins, layers x bins, retention by layer, heads that keep only some bins, retention by distance.

   gnuplot reads script and data from a pipe and writes the PNG to its standard output, which the shell opens: no file
   name is ever part of the script. */
#define _GNU_SOURCE
#include "plot.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static const char *output;

/* ---- data blocks --------------------------------------------------------- */

typedef struct {
    int l, h;
    int64_t kept, reach; /* bins kept, and the sum of their indices */
} head_row;

/* Heads that keep most come first; among equals, those that look nearer. */
static int by_retention(const void *a, const void *b) {
    const head_row *x = a, *y = b;
    if (x->kept != y->kept) return x->kept < y->kept ? 1 : -1;
    if (x->reach != y->reach) return x->reach > y->reach ? 1 : -1;
    return x->l != y->l ? x->l - y->l : x->h - y->h;
}

static void write_heads(FILE *out, const dkv_pattern *p) {
    int64_t n = (int64_t)p->L * p->H;
    head_row *rows = allocate((size_t)n, sizeof *rows);
    for (int64_t i = 0; i < n; i++) {
        head_row *r = &rows[i];
        r->l = (int)(i / p->H), r->h = (int)(i % p->H);
        for (int64_t b = 0; b < p->D; b++)
            if (dkv_pattern_get(p, r->l, r->h, b)) r->kept++, r->reach += b;
    }
    qsort(rows, (size_t)n, sizeof *rows, by_retention);
    fputs("$heads << EOD\n", out);
    for (int64_t i = 0; i < at_least_two(n); i++, fputc('\n', out))
        for (int64_t b = 0; b < at_least_two(p->D); b++)
            fputs(dkv_pattern_get(p, rows[i % n].l, rows[i % n].h, b % p->D) ? "1 " : "0 ", out);
    fputs("EOD\n", out);
    free(rows);
}

/* Shares of query heads and of KV heads that keep bins [b0, b1) in layers [l0, l1). */
typedef struct {
    double logical, physical;
} shares;

static shares measure(const dkv_pattern *p, int l0, int l1, int64_t b0, int64_t b1) {
    int64_t bits = 0, cells = 0, area = (l1 - l0) * (b1 - b0);
    for (int l = l0; l < l1; l++)
        for (int64_t b = b0; b < b1; b++) {
            for (int h = 0; h < p->H; h++) bits += dkv_pattern_get(p, l, h, b);
            for (int g = 0; g < p->Hkv; g++) cells += dkv_union_get(p, l, g, b);
        }
    return (shares){(double)bits / (double)(area * p->H), (double)cells / (double)(area * p->Hkv)};
}

static void write_layers(FILE *out, const dkv_pattern *p) {
    fputs("$layers << EOD\n", out);
    for (int i = 0; i < at_least_two(p->L); i++, fputc('\n', out))
        for (int64_t j = 0; j < at_least_two(p->D); j++) {
            int l = i % p->L;
            int64_t b = j % p->D;
            fprintf(out, "%.3f ", measure(p, l, l + 1, b, b + 1).physical);
        }
    fputs("EOD\n$by_layer << EOD\n", out);
    for (int l = 0; l < p->L; l++) {
        shares s = measure(p, l, l + 1, 0, p->D);
        fprintf(out, "%d %.4f %.4f\n", l, 100 * s.physical, 100 * s.logical);
    }
    fputs("EOD\n$by_distance << EOD\n", out);
    for (int64_t b = 0; b < p->D; b++) {
        shares s = measure(p, 0, p->L, b, b + 1);
        fprintf(out, "%lld %.4f %.4f\n", (long long)(p->R + p->W * b), 100 * s.physical, 100 * s.logical);
    }
    fputs("EOD\n", out);
}

/* How many of layer l's query heads keep all bins, some, none; counted into n[3]. */
static void count_heads(const dkv_pattern *p, int l, int64_t n[3]) {
    for (int h = 0; h < p->H; h++) {
        int64_t kept = 0;
        for (int64_t b = 0; b < p->D; b++) kept += dkv_pattern_get(p, l, h, b);
        n[kept == p->D ? 0 : kept ? 1 : 2]++;
    }
}

static void write_partial(FILE *out, const dkv_pattern *p) {
    int64_t all[3] = {0};
    fputs("$partial << EOD\n", out);
    for (int l = 0; l < p->L; l++) {
        int64_t n[3] = {0};
        count_heads(p, l, n), count_heads(p, l, all);
        fprintf(out, "%d %.4f %.4f %.4f\n", l, 100. * (double)n[0] / p->H, 100. * (double)n[1] / p->H,
                100. * (double)n[2] / p->H);
    }
    double heads = (double)p->L * p->H / 100;
    fprintf(out, "EOD\npartial = 'Heads that keep some bins only: %.1f %%'\n", (double)all[1] / heads);
}

/* ---- script -------------------------------------------------------------- */

static const char SCRIPT[] =
    "set terminal pngcairo size 1800,1200 font 'Sans,16' background 'white'\n"
    "set multiplot\n"
    "set border lc rgb '#444444' lw 1\n"
    "set tics nomirror out scale 0.5\n"
    "set palette defined (0 '#f4f6f9', 0.33 '#9ecae1', 0.67 '#3182bd', 1 '#08306b')\n"
    "set cbrange [0:1]\n"
    "unset key\n"
    "unset colorbox\n"
    "set xlabel 'distance from the end of the context, tokens'\n"
    "set xrange [near:far]\n"
    "if (far >= 10000) { set format x '%.0s%c' }\n"

    "set tmargin at screen 0.86; set bmargin at screen 0.52\n"
    "set lmargin at screen 0.075; set rmargin at screen 0.47\n"
    "set label 1 summary at screen 0.5,0.970 center font ',22' noenhanced\n"
    "set label 2 ratios at screen 0.5,0.935 center font ',16' tc rgb '#444444'\n"
    "set title 'What each query head keeps'\n"
    "set ylabel 'query heads, most retentive first'\n"
    "set yrange [heads:0]\n"
    "plot $heads matrix using (near + width * ($1 + 0.5)):($2 + 0.5):3 with image\n"
    "unset label\n"

    "set lmargin at screen 0.55; set rmargin at screen 0.945\n"
    "set title 'Share of KV heads that keep a bin'\n"
    "set ylabel 'layer'\n"
    "set yrange [layers - 0.5:-0.5]\n"
    "set colorbox user origin graph 1.02,0 size graph 0.02,1\n"
    "set format cb '%.1f'\n"
    "plot $layers matrix using (near + width * ($1 + 0.5)):2:3 with image\n"

    "unset colorbox\n"
    "set tmargin at screen 0.385; set bmargin at screen 0.075\n"
    "set grid ytics lc rgb '#dddddd' lw 1 lt 1\n"
    "set yrange [0:both ? 122 : 104]\n" /* the key stands above 100 % */
    "set ytics 0,20,100\n"
    "set key top right samplen 1.5\n"
    "set boxwidth 1\n"
    "set style fill solid border lc rgb '#6baed6'\n"
    "kv = both ? 'physical: KV heads' : ''\n"
    "query = both ? 'logical: query heads' : ''\n"

    "set lmargin at screen 0.075; set rmargin at screen 0.32\n"
    "set title 'Retention by layer'\n"
    "set xlabel 'layer'\n"
    "set ylabel 'kept, %'\n"
    "set format x '%g'\n"
    "set xrange [-0.7:layers - 0.3]\n"
    "plot $by_layer using 1:2 with boxes lc rgb '#6baed6' title kv, \\\n"
    "     $by_layer using 1:(both ? $3 : NaN) with points pt 7 ps 1 lc rgb '#08306b' title query\n"

    "set lmargin at screen 0.39; set rmargin at screen 0.635\n"
    "set title partial\n"
    "set ylabel 'query heads, %'\n"
    "set yrange [0:122]\n"
    "set key top center horizontal maxrows 1 samplen 1 width 1\n"
    "set style fill solid border lc rgb '#ffffff'\n"
    "plot $partial using 1:(100) with boxes lc rgb '#e3e7ec' title 'none', \\\n"
    "     $partial using 1:($2 + $3) with boxes lc rgb '#fd8d3c' title 'some', \\\n"
    "     $partial using 1:2 with boxes lc rgb '#08306b' title 'all'\n"

    "set lmargin at screen 0.70; set rmargin at screen 0.975\n"
    "set title 'Retention by distance'\n"
    "set xlabel 'distance from the end of the context, tokens'\n"
    "set ylabel 'kept, %'\n"
    "set yrange [0:both ? 122 : 104]\n"
    "set key top right vertical maxrows auto width 0 samplen 1.5\n"
    "set style fill solid border lc rgb '#6baed6'\n"
    "set xrange [near:far]\n"
    "if (far >= 10000) { set format x '%.0s%c' }\n"
    "plot $by_distance using ($1 + width / 2.):2:(width) with boxes lc rgb '#6baed6' title kv, \\\n"
    "     $by_distance using ($1 + width / 2.):(both ? $3 : NaN) with lines lw 2.5 lc rgb '#08306b' title query\n"
    "unset multiplot\n";

void write_title(FILE *out, const char *model, int64_t L, int64_t H, int64_t Hkv, int64_t D, int64_t W) {
    fputs("summary = '", out);
    for (const char *c = model; *c; c++) fputs(*c == '\'' ? "''" : (char[]){*c, 0}, out);
    fprintf(out, "%s%lld layers, %lld query heads, %lld KV heads, %lld bins of %lld tokens'\n", *model ? ": " : "",
            (long long)L, (long long)H, (long long)Hkv, (long long)D, (long long)W);
}

static void draw_pattern(FILE *out, const dkv_pattern *p) {
    shares all = measure(p, 0, p->L, 0, p->D);
    write_heads(out, p);
    write_layers(out, p);
    write_partial(out, p);
    fprintf(out, "near = %lld; width = %lld; far = %lld; layers = %d; heads = %lld; both = %d\n", (long long)p->R,
            (long long)p->W, (long long)(p->R + p->W * p->D), p->L, (long long)p->L * p->H,
            all.logical < all.physical);
    write_title(out, p->model, p->L, p->H, p->Hkv, p->D, p->W);
    fprintf(out, "ratios = \"kept between the first %lld and the last %lld tokens: ", (long long)p->S, (long long)p->R);
    fprintf(out, "%.1f %% of the KV cache (physical), %.1f %% of the query heads' bins (logical)\"\n",
            100 * all.physical, 100 * all.logical);
    fputs(SCRIPT, out);
}

/* ---- the command --------------------------------------------------------- */

/* gnuplot does not say whether all of it could be written; a PNG ends in this chunk. */
static bool is_whole(const char *png, size_t bytes) {
    static const char END[] = "IEND\xae\x42\x60\x82";
    return bytes > 8 && !memcmp(png + bytes - 8, END, 8);
}

int command_plot(int argc, char **argv) {
    const tool_option options[] = {
        {'o', "output", "FILE.png", OPT_TEXT, &output, 0, 0, "the picture to write"},
        {0, NULL, NULL, OPT_END, NULL, 0, 0, NULL},
    };
    argv = parse_options(&argc, argv, options, "dkv plot PATTERN.dkv|SCORES.dks -o FILE.png", NULL);
    if (argc != 1) usage("give one pattern or score file; see dkv plot --help");
    if (!output) usage("where to? give -o FILE.png");
    const bool of_scores = is_score_file(argv[0]);
    dkv_pattern p = {0};
    score_table s = {0};
    if (of_scores) load_scores(&s, argv[0]);
    else load_pattern(&p, argv[0]);
    if (system("command -v gnuplot >/dev/null 2>&1")) fail("plot needs gnuplot; install it (Debian: gnuplot-nox)");
    check_writable(output);
    char drawn[32], command[64];
    FILE *nameless = tmpfile();
    if (!nameless) fail("cannot make a temporary file: %s", strerror(errno));
    snprintf(drawn, sizeof drawn, "/dev/fd/%d", fileno(nameless));
    snprintf(command, sizeof command, "exec gnuplot >%s", drawn);
    signal(SIGPIPE, SIG_IGN); /* a gnuplot that stops early is reported below */
    FILE *out = popen(command, "w");
    if (!out) fail("cannot start gnuplot: %s", strerror(errno));
    if (of_scores) draw_scores(out, &s);
    else draw_pattern(out, &p);
    if (pclose(out)) fail("gnuplot could not draw %s (its own message is above)", output);
    size_t bytes;
    char *png = read_file(drawn, &bytes);
    if (!is_whole(png, bytes)) fail("gnuplot could not write all of a picture; is the disk of temporary files full?");
    write_file(output, png, bytes);
    free(png);
    fclose(nameless);
    free_scores(&s);
    dkv_pattern_free(&p, NULL);
    return 0;
}
