/* The structs that `structs.py` fills, which reads them here. Numbers lie one after the other unless a comment says otherwise. */

#pragma once

#include "vec.h"

typedef struct {
    const uint8_t *weights; /* of two tiles after two tiles, see `native.py` */
    const float *scales;    /* [outputs], of 8 bits only */
    const float *bias;      /* [outputs], or NULL */
    const number **rows; /* [outputs], weights of 32 or 16 bits where the model has them; NULL if they are packed */
    int64_t outputs;        /* a multiple of 32 */
    int64_t inputs;         /* a multiple of 32 */
    int64_t bits;           /* 32 of float32; 16, 8 or 4 of bfloat16 */
    int64_t input_bits;     /* 16, or 8 beside weights of 8 or 4 */
    float multiplier;       /* of the outputs before a residual is added */
} Product;

/* What norms do, see `norms.NormKind`. */
enum { NORMS = 1, ROUNDS = 2, ADDS_ONE = 4, ROUNDS_WEIGHT = 8, CENTERS = 16 };

typedef struct {
    const number *weight, *bias; /* [size], or NULL */
    int64_t size;                /* of the vectors, a multiple of 16 */
    int64_t apart;               /* numbers between the weights of two heads; 0 if all heads share them */
    int64_t kind;                /* 0: there is no norm */
    float epsilon;
} Norm;

/* How heads turn, see `native.Shape`. */
enum { HALVES = 1, PAIRS = 2, IN_FLOATS = 4 };

/* The gated delta rule of a layer, see `delta.h`. Its weights are copies in float32. */
typedef struct {
    const float *conv, *conv_bias; /* [size, channels], and [channels] or NULL; channels are queries, keys, values of all heads */
    const float *rates, *shift;    /* [heads]: the factor of decays, and what is added to them before their activation */
    const float *norm;             /* [dv], the weight of the last norm */
    int64_t heads, key_heads;      /* heads of values, a multiple of those of keys; 0 if the layer has attention */
    int64_t dk, dv, size;          /* numbers of a key and of a value; inputs of the convolution */
    int64_t rounds_norm;           /* whether the product with the last norm's weight is rounded */
    /* Where outputs of the first product begin, and how far apart they are for two key heads: queries and keys [dk], values and gates
       [heads of the key head, dv], write strengths and decays [heads of the key head]. */
    int64_t queries_at, keys_at, values_at, gates_at, strengths_at, decays_at, keys_apart, values_apart, small_apart;
    float strongest, epsilon;      /* the factor of write strengths, and of the last norm */
} Delta;

typedef struct {
    Product heads, output, gate_up, down; /* without outputs of the last one, the layer ends after its mixer */
    Norm before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
    int64_t hidden, inner, query_heads, key_heads, head_size;
    int64_t turned, turning, norms_turned, is_eager, beside; /* the rest is as in `native.Shape` */
    int64_t activation, is_gated;
    int64_t has_gates; /* each query head has a gate after it, which its output is multiplied by */
    float scaling, cap;
    const number *sinks; /* [query heads]: scores that take part in softmax and have no value; NULL for none */
    float xielu_above, xielu_below, xielu_beta, xielu_epsilon; /* what xIELU has learned, for positive and for negative numbers */
    Delta delta;
} Layer;

typedef struct {
    int64_t rows, width;   /* a pass runs over rows * width columns */
    const int64_t *parents; /* of layers with the delta rule, [rows, width - 1]; NULL for chains and texts */
    const number *cos, *sin; /* [angles, width, head size]; of float32 for layers that turn IN_FLOATS */
    int64_t angles;        /* rows, or 1 */
    const int64_t *places; /* [rows * width]: the slot that each column is written to; NULL if no layer has attention */
    int64_t first;         /* the first slot that columns may see; the next numbers count from it */
    const int64_t *slots;  /* the slots that the first column sees, in order, then those of the second, ... */
    const int64_t *starts; /* [rows * width + 1]: where a column's slots begin; both are NULL if columns see all up to their own */
    int64_t threads;
    int64_t at_once;   /* columns that are computed together */
    number *buffer;    /* at_once * `NativeLayer.sizes[0]` numbers */
    float *scratch;    /* for each thread, what products need of these columns' inputs, or sixteen times the slots of a column */
    int64_t of_thread; /* numbers of that for one thread */
} Pass;

/* What follows the layers of a model: a norm, and a product from which logits result. */
typedef struct {
    Product output;
    Norm norm;
} End;

typedef struct {
    Layer layer;
    Product output;           /* from states to logits of the draft vocabulary */
    const number *embeddings; /* of the target's tokens, [rows, hidden] */
    Norm token_norm, state_norm, end_norm;
    Product join;             /* from a normed embedding and state, side by side, to what the layer reads; without outputs, the layer's
                                 first product reads both */
    const int64_t *tokens;    /* [vocabulary]: the target's tokens that can be drafted; NULL for 0, 1, ... */
    int64_t rows, vocabulary;       /* logits, without padding */
    int64_t normed_residual, normed_output; /* the residual is the normed state; the state is what the last norm returns */
    Product fuse;             /* from features, the target's hidden states side by side, to states */
    const number *tap_norms;  /* of each of them, [fuse.inputs]; NULL if they are not normed */
    int64_t taps;
    float tap_epsilon;
} Head;

/* A token tree of one row while it grows. Nodes are candidates, in the order in which they were found; -1 is the committed text. */
typedef struct {
    int64_t depth, beam, candidates, nodes, room; /* see `Limits` */
    /* The rates of candidates: base + slope * probability by rank and bin of the probability, see `Rates`. */
    const double *base, *slope, *edges;
    int64_t ranks, bins;
    int64_t *tokens, *parents, *depths, *columns, *children; /* of nodes; a node's column and its first child, or -1 */
    double *scores;   /* log-probabilities of the paths */
    float *sure;      /* the head's probabilities */
    int64_t *best;    /* the most probable nodes, best first; one more than `nodes` */
    int64_t *reading; /* the nodes that are read next, [beam] */
    int64_t found, kept, width; /* how many nodes, best ones and ones to be read there are */
    int64_t read, last; /* columns, and the first of those that were read last */
    int64_t known;    /* slots of the committed text */
    number *states;   /* of the columns that were read last, [beam, hidden]; at first the state after the text */
    number *before, *space, *logits; /* [beam, hidden], [4 * beam, hidden], [beam, outputs] */
    number *angles;   /* [2, beam, head size] */
    int64_t *ids, *places, *slots, *starts; /* [beam], [beam], [beam * (known + depth + 1)], [beam + 1] */
    float *scratch;
} Tree;
