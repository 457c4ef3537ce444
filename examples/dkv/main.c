/* dkv: learn, make, show, draw, test and run distance patterns. One file per command; tool.h is what they share. */
#define _GNU_SOURCE
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run",     "answer a question about a long text from a compressed KV cache", command_run},
    {"probe",   "measure where each head retrieves, from a model", command_probe},
    {"train",   "learn a pattern from those scores", command_train},
    {"score",   "ask held-out questions: dense, patterns and their controls", command_score},
    {"info",    "show a pattern, and what it does to a context of a given length", command_info},
    {"pattern", "make a pattern: full, by heads, from a text mask; or the control of one", command_pattern},
    {"plot",    "draw a pattern, or scores, as a PNG", command_plot},
    {"data",    "show the questions that patterns are learned from", command_data},
    {"import",  "make a pattern from a DuoAttention folder or a reference .pt file", command_import},
};

enum { N_COMMANDS = sizeof commands / sizeof *commands };

static void help(void) {
    puts("usage: dkv COMMAND ...      KV-cache compression by relative distance\n");
    for (int i = 0; i < N_COMMANDS; i++) printf("  %-8s  %s\n", commands[i].name, commands[i].what);
    puts("\n`dkv COMMAND --help` lists a command's options; `dkv --version` prints the version.\n"
         "Exit status: 0 done, 1 bad data, 2 bad arguments.");
}

/* A full disk shows only when the last bytes are written. */
static void flush_output(void) {
    if (!fflush(stdout) && !ferror(stdout)) return;
    fputs("dkv: the output cannot be written\n", stderr);
    _exit(1);
}

/* libgomp's threads, which prefill, spin for each other, and where another program holds a core they spin whole time
   slices: 1,500 tokens on 2 cores beside four busy programs take 15 to 22 s, with 1000 spins 7 to 10. It reads its
   setting before main, so the program starts itself once more. */
static void let_threads_sleep(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv("/proc/self/exe", argv); /* where there is none, it runs on as it is */
}

int main(int argc, char **argv) {
    let_threads_sleep(argv);
    atexit(flush_output);
    if (argc < 2) usage("which command? see dkv --help");
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return help(), 0;
    if (!strcmp(argv[1], "--version")) return printf("dkv %s\n", dkv_version()), 0;
    for (int i = 0; i < N_COMMANDS; i++)
        if (!strcmp(argv[1], commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    usage("no command '%s'; see dkv --help", argv[1]);
}
