// Logits of llama.cpp on the CPU, for tests/logits_oracle.py: token ids as text on stdin, raw f32 logits
// [N - FIRST][vocab] on stdout. f32 KV cache and no flash attention, so that with a file of f32 weights nothing is
// rounded below f32. Built by bench/build_peers.sh against the tree that it unpacks.
//
//   llama_logits MODEL.gguf FIRST THREADS < ids.txt > logits.f32
#include "llama.h"
#include <stdio.h>
#include <stdlib.h>

static void die(const char *what)
{
    fprintf(stderr, "llama_logits: %s\n", what);
    exit(1);
}

static void quiet(enum ggml_log_level level, const char *text, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

int main(int argc, char **argv)
{
    if (argc != 4) die("usage: llama_logits MODEL.gguf FIRST THREADS < ids.txt > logits.f32");
    enum { N_MAX = 8192 };
    int first = atoi(argv[2]), threads = atoi(argv[3]), n = 0;
    static llama_token ids[N_MAX];
    while (n < N_MAX && scanf("%d", &ids[n]) == 1) n++;
    if (first < 0 || first >= n) die("FIRST must be below the number of ids");

    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model *model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) die("cannot load the model");
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = p.n_batch = (uint32_t)n;
    p.n_threads = p.n_threads_batch = threads;
    p.type_k = p.type_v = GGML_TYPE_F32;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *ctx = llama_init_from_model(model, p);
    if (!ctx) die("cannot make a context");

    struct llama_batch batch = llama_batch_init(n, 0, 1);
    for (int i = 0; i < n; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i >= first;
    }
    batch.n_tokens = n;
    if (llama_decode(ctx, batch)) die("llama_decode failed");
    size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = first; i < n; i++)
        if (fwrite(llama_get_logits_ith(ctx, i), sizeof(float), vocab, stdout) != vocab) die("cannot write");
    return 0;
}
