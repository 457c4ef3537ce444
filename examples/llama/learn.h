/* learn.h: the loss of questions about a context as a function of gates over it, and its gradient by the gates' logits
   through the frozen model (paper 3.3).

   lm_exam exam = {context, question, n_questions, id};       context: of lm_prefill under the full plan of T_c
   lm_gating g = {.gates = gates, .W = W, .S = S, .R = R, .a = a, .seed = seed, .step = t};
   lm_learner *x; double loss;
   if (lm_learner_open(&x, m) || lm_learn(x, &exam, 1, &g, da, &loss, NULL)) return puts(lm_error(m)), 1;

   The context is constant: no gradient flows into it, and none is taken by weights. Every question is a suffix of its
   own at positions T_c, T_c + 1, ..; all questions of all contexts pass a layer together, in chunks that bound memory
   (learn.c: what is kept per token). The same call gives the same bits, on the CPU for any number of threads.
   CPU: f32 over dequantised weights; contexts of any type. CUDA: products and attention in 16 bits with sums in f32,
   gradients in f32 between them; contexts of f16 or bf16. */
#ifndef LEARN_H
#define LEARN_H

#include "model.h"

enum { LM_QUESTION_MAX = 1024 };

/* A question after a context, teacher-forced: tokens[first .. n) is the value, each predicted from the token before it.
   1 <= first < n <= LM_QUESTION_MAX, and T_c + n tokens fit the model's context. */
typedef struct {
    const int32_t *tokens;
    int64_t n, first;
    double weight;          /* of its mean cross-entropy over the value in the loss; 0 where only graded */
    int64_t source;         /* lm_rank only: context position of the value's first token, the rest follow */
} lm_question;

typedef struct {
    lm_cache *context;      /* the learner's model's, all T_c positions packed, tail empty; not changed */
    const lm_question *question;
    int64_t n_questions;    /* >= 1; they share one draw of the gates */
    uint32_t id;            /* dkv_draw.context of its noise */
} lm_exam;

/* Gates of the whole model, for T_c <= S + R + W * D of any context. The arrays are [L][H][D], or [L][Hkv][D] if tied
   (a), and [L][Hkv][D] (open). */
typedef struct {
    dkv_gates gates;
    int64_t W, S, R;
    const float *a;             /* logits, dkv_gates_count; NULL: no noise, u = 1 where open and 0 elsewhere */
    const unsigned char *open;  /* NULL, or with a: straight-through; without a: the binary pattern. Both NULL: dense */
    uint64_t seed;
    uint32_t step;
} lm_gating;

typedef struct {            /* of one question */
    double loss;            /* mean cross-entropy over its value tokens, natural log */
    double kl;              /* mean KL(dense || this) over its value tokens; 0 without a reference */
    int64_t right, n_value; /* value tokens that are the argmax (the first of equals); exact match: right == n_value */
} lm_grade_result;

typedef struct lm_learner lm_learner; /* its workspaces grow with what it is asked for; one thread at a time */

/* All return 0, or -1 and lm_error(m) says why; outputs are then untouched. e[n], n >= 1; result, hits: of all
   questions in order. */
int  lm_learner_open(lm_learner **out, lm_model *m);
void lm_learner_close(lm_learner *x); /* before its model; NULL is allowed */

/* *loss <- sum over all questions of weight * mean cross-entropy under the gates; da[dkv_gates_count] += its gradient
   by a. With open, the loss is that of the open cells, and its gradient goes straight through (METHOD: P_relaxed +
   stopgrad(P_binary - P_relaxed)). g->a is not NULL; result may be. Penalties are the caller's: dkv_gates_penalty. */
int lm_learn(lm_learner *x, const lm_exam *e, int64_t n, const lm_gating *g, float *da, double *loss,
             lm_grade_result *result);

/* Only forward, with any gating. */
int lm_grade(lm_learner *x, const lm_exam *e, int64_t n, const lm_gating *g, lm_grade_result *result);

/* lm_grade with dense gates, and remembers the value tokens' distributions, 4 V bytes each: later calls of lm_grade
   with the same exams fill kl. */
int lm_grade_reference(lm_learner *x, const lm_exam *e, int64_t n, lm_grade_result *result);

/* hits[questions][L][H] <- share of a question's value tokens whose source, the context position that holds the same
   token, is among the 5 highest logits of the row that predicts it (paper 3.1; dkv_score). Dense. */
int lm_rank(lm_learner *x, const lm_exam *e, int64_t n, float *hits);

#endif
