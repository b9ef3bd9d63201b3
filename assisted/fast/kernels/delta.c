/* Hybrids in float32: the gated delta rule over few columns, chains and token trees, as `engine/delta.py` computes it by operations
   of torch, and whole layers with it or with attention. Plain C with vectors of GCC and Clang, for any processor. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

int omp_get_thread_num(void); /* not every compiler brings omp.h */

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t key_heads, heads; /* heads: of values, a multiple */
    int64_t dk, dv;           /* numbers of a key and of a value */
    int64_t size;             /* of the convolution */
    float strongest;          /* factor of the write strength */
    float epsilon;            /* of the last norm */
    /* whether numbers are rounded to bfloat16 where layers of that dtype round them, and the last norm's product with its weight */
    int64_t rounds, rounds_norm;
} Shape;

/* A tensor [columns, any], whose columns may lie apart. */
typedef struct {
    const float *data;
    int64_t stride;
} Columns;

/* exp by a polynomial (Cephes), within two units in the last place, which compilers can vectorize; 1e-38 for less. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float whole = __builtin_rintf(x * 1.44269504f);
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float made = 1.9875691500e-4f;
    made = made * rest + 1.3981999507e-3f;
    made = made * rest + 8.3334519073e-3f;
    made = made * rest + 4.1665795894e-2f;
    made = made * rest + 1.6666665459e-1f;
    made = made * rest + 5.0000001201e-1f;
    made = made * rest * rest + rest + 1.0f;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return made * power;
}

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

static inline float dot(const float *one, const float *two, int64_t count) {
    float sum = 0.0f;
    for (int64_t at = 0; at < count; at++) sum += one[at] * two[at];
    return sum;
}

static inline void add(float *to, float factor, const float *from, int64_t count) {
    for (int64_t at = 0; at < count; at++) to[at] += factor * from[at];
}

/* The column before column i on its path; -1 before the first. parents: [n - 1], or NULL for a chain. */
static inline int64_t before(const int64_t *parents, int64_t i) { return i == 0 ? -1 : parents ? parents[i - 1] : i - 1; }

/* The nearest number of bfloat16 if numbers are rounded. */
static inline float rounded(float x, int64_t rounds) {
    uint32_t bits, low = rounds ? 0xffff : 0;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + (low >> 1) + (bits >> 16 & low & 1)) & ~low;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int64_t channels(const Shape *s) { return 2 * s->key_heads * s->dk + s->heads * s->dv; }

/* What the convolution reads of one row, of_conv [n, C] after the state [C, K], as inputs [C, K + n]. */
static void note(const Shape *s, int64_t n, Columns of_conv, const float *state, float *inputs) {
    int64_t K = s->size, all = K + n, C = channels(s);
    for (int64_t c = 0; c < C; c++) {
        memcpy(inputs + c * all, state + c * K, K * sizeof(float));
        for (int64_t i = 0; i < n; i++) inputs[c * all + K + i] = of_conv.data[i * of_conv.stride + c];
    }
}

/* Convolution, activation and norms of one row: of_conv [n, C] and the state [C, K] -> read [n, C]. weight: [K, C]. */
static void convolve(
    const Shape *s, int64_t n, const int64_t *parents, Columns of_conv, const float *weight, const float *bias,
    const float *state, float *read
) {
    int64_t K = s->size, C = channels(s);
    for (int64_t i = 0; i < n; i++) {
        float *to = read + i * C;
        int64_t on_path = i, past = K - 1;
        for (int64_t c = 0; c < C; c++) to[c] = bias ? bias[c] : 0.0f;
        for (int64_t k = K - 1; k >= 0; k--) {
            const float *own = weight + k * C, *from = of_conv.data + on_path * of_conv.stride;
            if (on_path >= 0) {
                for (int64_t c = 0; c < C; c++) to[c] += own[c] * from[c];
                on_path = before(parents, on_path);
            } else {
                for (int64_t c = 0; c < C; c++) to[c] += own[c] * state[c * K + past];
                past--;
            }
        }
        for (int64_t c = 0; c < C; c++) to[c] = rounded(silu(rounded(to[c], s->rounds)), s->rounds);
        for (int64_t part = 0; part < 2 * s->key_heads; part++) {
            float *one = to + part * s->dk, scale = part < s->key_heads ? 1.0f / sqrtf((float)s->dk) : 1.0f;
            scale /= sqrtf(dot(one, one, s->dk) + 1e-6f);
            for (int64_t d = 0; d < s->dk; d++) one[d] *= scale;
        }
    }
}

/* The small inputs of one head: those of its gate, write strength and decay, and the weights of these. */
typedef struct {
    Columns gate, strength, rate;
    float slope, shift;
    const float *norm;
} Beside;

static Beside beside_of(
    const Shape *s, int64_t r, int64_t h, int64_t n, Columns gate, Columns strength, Columns rate, const float *a_log,
    const float *shift, const float *norm
) {
    Beside b = {gate, strength, rate, -expf(a_log[h]), shift[h], norm};
    b.gate.data += r * n * gate.stride + h * s->dv;
    b.strength.data += r * n * strength.stride + h;
    b.rate.data += r * n * rate.stride + h;
    return b;
}

static float strength_of(const Shape *s, const Beside *b, int64_t i) {
    return s->strongest * rounded(1.0f / (1.0f + expf(-b->strength.data[i * b->strength.stride])), s->rounds);
}

static float decay_of(const Beside *b, int64_t i) {
    float x = b->rate.data[i * b->rate.stride] + b->shift;
    return b->slope * (x > 20.0f ? x : log1pf(expf(x)));
}

/* The norm of a column's output, which is changed, and the product with its gate. */
static void finish(const Shape *s, const Beside *b, int64_t i, float *out, float *made) {
    const float *gate = b->gate.data + i * b->gate.stride;
    for (int64_t v = 0; v < s->dv; v++) out[v] = rounded(out[v], s->rounds);
    float scale = 1.0f / sqrtf(dot(out, out, s->dv) / s->dv + s->epsilon);
    for (int64_t v = 0; v < s->dv; v++) {
        float normed = rounded(b->norm[v] * rounded(out[v] * scale, s->rounds), s->rounds_norm);
        made[v] = rounded(normed * silu(gate[v]), s->rounds);
    }
}

/* One head of one row. read: [n, C], from `convolve`. state: [dk, dv]. decay: [n], keys: [n, dk], written: [n, dv], as in `Read`.
   made: [n, dv], heads * dv apart. */
static void head(
    const Shape *s, int64_t h, int64_t n, const int64_t *parents, const float *read, Beside b, const float *state, float *decay,
    float *keys, float *written, float *made
) {
    int64_t dk = s->dk, dv = s->dv, own = h / (s->heads / s->key_heads), all = s->key_heads * dk, C = channels(s);
    float recalled[n * dv], found[n * dv];
    memset(recalled, 0, sizeof recalled);
    memset(found, 0, sizeof found);
    for (int64_t d = 0; d < dk; d++)
        for (int64_t i = 0; i < n; i++) {
            add(found + i * dv, read[i * C + own * dk + d], state + d * dv, dv);
            add(recalled + i * dv, read[i * C + all + own * dk + d], state + d * dv, dv);
        }
    for (int64_t i = 0; i < n; i++) {
        const float *query = read + i * C + own * dk, *key = query + all, *value = read + i * C + 2 * all + h * dv;
        int64_t parent = before(parents, i);
        decay[i] = decay_of(&b, i) + (parent < 0 ? 0.0f : decay[parent]);
        float beta = strength_of(s, &b, i), left = expf(decay[i]), *to = written + i * dv, *out = found + i * dv;
        memcpy(keys + i * dk, key, dk * sizeof(float));
        for (int64_t v = 0; v < dv; v++) {
            to[v] = value[v] - left * recalled[i * dv + v];
            out[v] *= left;
        }
        for (int64_t j = parent; j >= 0; j = before(parents, j)) {
            float between = expf(decay[i] - decay[j]);
            add(to, -between * dot(key, keys + j * dk, dk), written + j * dv, dv);
            add(out, between * dot(query, keys + j * dk, dk), written + j * dv, dv);
        }
        for (int64_t v = 0; v < dv; v++) to[v] *= beta;
        add(out, dot(query, key, dk), to, dv);
        finish(s, &b, i, out, made + i * s->heads * dv);
    }
}

/* The same of a text, token by token: its state [dk, dv] becomes that after the last one. */
static void head_of_text(const Shape *s, int64_t h, int64_t n, const float *read, Beside b, float *state, float *made) {
    int64_t dk = s->dk, dv = s->dv, own = h / (s->heads / s->key_heads), all = s->key_heads * dk, C = channels(s);
    float written[dv], out[dv];
    for (int64_t i = 0; i < n; i++) {
        const float *query = read + i * C + own * dk, *key = query + all, *value = read + i * C + 2 * all + h * dv;
        float left = expf(decay_of(&b, i)), beta = strength_of(s, &b, i);
        memset(written, 0, sizeof written);
        memset(out, 0, sizeof out);
        for (int64_t d = 0; d < dk; d++) add(written, key[d], state + d * dv, dv);
        for (int64_t v = 0; v < dv; v++) written[v] = beta * (value[v] - left * written[v]);
        for (int64_t d = 0; d < dk; d++) {
            float *line = state + d * dv;
            for (int64_t v = 0; v < dv; v++) {
                line[v] = left * line[v] + key[d] * written[v];
                out[v] += query[d] * line[v];
            }
        }
        finish(s, &b, i, out, made + i * s->heads * dv);
    }
}

/* All rows. Columns are [R, n, any]; see `delta.py` for the other shapes. inputs: NULL if they are not noted. */
void mix(
    const Shape *s, int64_t rows, int64_t n, const int64_t *parents, Columns of_conv, Columns gate, Columns strength,
    Columns rate, const float *weight, const float *bias, const float *a_log, const float *shift, const float *norm,
    const float *before_conv, const float *state, float *inputs, float *decay, float *keys, float *written, float *made,
    float *read, int threads
) {
    int64_t H = s->heads, dk = s->dk, dv = s->dv, C = channels(s);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            Columns own = {of_conv.data + r * n * of_conv.stride, of_conv.stride};
            const float *past = before_conv + r * C * s->size;
            if (inputs) note(s, n, own, past, inputs + r * C * (s->size + n));
            convolve(s, n, parents ? parents + r * (n - 1) : parents, own, weight, bias, past, read + r * n * C);
        }
#pragma omp for
        for (int64_t at = 0; at < rows * H; at++) {
            int64_t r = at / H, h = at % H;
            head(
                s, h, n, parents ? parents + r * (n - 1) : NULL, read + r * n * C,
                beside_of(s, r, h, n, gate, strength, rate, a_log, shift, norm), state + at * dk * dv, decay + at * n,
                keys + at * n * dk, written + at * n * dv, made + r * n * H * dv + h * dv
            );
        }
    }
}

/* The same of texts, whose recurrent states become those after them. */
void mix_texts(
    const Shape *s, int64_t rows, int64_t n, Columns of_conv, Columns gate, Columns strength, Columns rate, const float *weight,
    const float *bias, const float *a_log, const float *shift, const float *norm, const float *before_conv, float *state,
    float *made, float *read, int threads
) {
    int64_t H = s->heads, C = channels(s);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            Columns own = {of_conv.data + r * n * of_conv.stride, of_conv.stride};
            convolve(s, n, NULL, own, weight, bias, before_conv + r * C * s->size, read + r * n * C);
        }
#pragma omp for
        for (int64_t at = 0; at < rows * H; at++) {
            int64_t r = at / H, h = at % H;
            head_of_text(
                s, h, n, read + r * n * C, beside_of(s, r, h, n, gate, strength, rate, a_log, shift, norm),
                state + at * s->dk * s->dv, made + r * n * H * s->dv + h * s->dv
            );
        }
    }
}

/* ---- Whole layers ---- */

typedef float Tile __attribute__((vector_size(64), aligned(4), may_alias));
enum { TILE = 16, BLOCK = 32 };
#ifdef __AVX512F__
enum { TILES = 2, MOST = 8 };
#else
enum { TILES = 1, MOST = 5 }; /* as many as sixteen registers of half a tile can hold */
#endif

typedef struct {
    const float *weights; /* [outputs / 32, inputs, 32], filled up with zeros */
    const float *bias;    /* [outputs], or NULL */
    int64_t outputs, inputs;
} Product;

typedef struct {
    Product in, out, gate_up, down;
    const float *before_mixer, *before_mlp; /* what the norms multiply by, [hidden] */
    float mixer_epsilon, mlp_epsilon;
    int64_t hidden, inner, is_attention;
    /* of attention; outputs of `in` are queries, keys, values, gates */
    int64_t query_heads, key_heads, head_size, turned, is_gated;
    const float *query_norm, *key_norm; /* [head_size], or NULL */
    float query_epsilon, key_epsilon, scaling;
    /* of the delta rule; outputs of `in` are queries, keys, values, gates, strengths, rates */
    Shape shape;
    const float *conv, *conv_bias, *a_log, *shift, *norm;
} Layer;

typedef struct {
    int64_t rows, width;
    const int64_t *parents; /* [rows, width - 1], or NULL for chains */
    const float *cos, *sin; /* [angles, width, head size] */
    int64_t angles;         /* rows, or 1 */
    const int64_t *places;  /* [rows * width]: the slot that each column is written to */
    int64_t first;          /* the first slot that columns may see; the next numbers count from it */
    const int64_t *slots;   /* the slots that the first column sees, in order, then those of the second, ... */
    const int64_t *starts;  /* [rows * width + 1]: where a column's slots begin; both are NULL if columns see all up to their own */
    int64_t capacity;       /* slots of a head */
    int64_t threads;
    float *buffer; /* see `layers_sizes` */
    int64_t top;   /* numbers of a thread for the weights of attention */
    float *scratch;
} Pass;

INLINE void tiles_of(const Product *p, int64_t first, const float *x, const float *residual, float *y, int columns) {
    Tile sums[TILES][MOST];
    for (int t = 0; t < TILES; t++)
        for (int c = 0; c < columns; c++) sums[t][c] = (Tile){0};
    const float *weights = p->weights + first / BLOCK * BLOCK * p->inputs + first % BLOCK;
    for (int64_t k = 0; k < p->inputs; k++) {
        Tile own[TILES];
        for (int t = 0; t < TILES; t++) own[t] = *(const Tile *)(weights + k * BLOCK + t * TILE);
        for (int c = 0; c < columns; c++)
            for (int t = 0; t < TILES; t++) sums[t][c] += own[t] * x[c * p->inputs + k];
    }
    for (int t = 0; t < TILES; t++) {
        int64_t at = first + t * TILE, count = p->outputs - at < TILE ? p->outputs - at : TILE;
        for (int c = 0; c < columns; c++) {
            float made[TILE], *to = y + c * p->outputs + at;
            memcpy(made, &sums[t][c], sizeof made);
            for (int64_t i = 0; i < count; i++)
                to[i] = made[i] + (p->bias ? p->bias[at + i] : 0.0f) + (residual ? residual[c * p->outputs + at + i] : 0.0f);
        }
    }
}

#define COLUMNS(columns)                                 \
    case columns:                                        \
        tiles_of(p, first, x, residual, y, columns);     \
        break;

static void tiles(const Product *p, int64_t first, const float *x, const float *residual, float *y, int columns) {
    switch (columns) {
        COLUMNS(1) COLUMNS(2) COLUMNS(3) COLUMNS(4) COLUMNS(5)
#ifdef __AVX512F__
        COLUMNS(6) COLUMNS(7) COLUMNS(8)
#endif
    }
}

/* y [n, outputs] = x [n, inputs] times the weights, plus a residual or NULL, within a parallel region. */
static void product(const Product *p, const float *x, int64_t n, const float *residual, float *y) {
    const int64_t step = TILE * TILES;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < (p->outputs + step - 1) / step; t++)
        for (int64_t c = 0; c < n; c += MOST) {
            const int64_t to = c * p->outputs;
            tiles(
                p, t * step, x + c * p->inputs, residual ? residual + to : NULL, y + to, n - c < MOST ? (int)(n - c) : MOST);
        }
}

/* The same on its own. */
void multiply(const Product *p, const float *x, int64_t n, float *y, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    product(p, x, n, NULL, y);
}

static void norm_of(const float *x, const float *weight, int64_t size, float epsilon, float *y) {
    float scale = 1.0f / sqrtf(dot(x, x, size) / size + epsilon);
    for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

/* The norm of a head and its turn by the angles of its position; sin is negative in the first half. */
static void turn(float *head, const float *weight, float epsilon, const float *cos, const float *sin, int64_t size, int64_t turned) {
    if (weight) norm_of(head, weight, size, epsilon, head);
    for (int64_t i = 0, half = turned / 2; i < half; i++) {
        float one = head[i], two = head[half + i];
        head[i] = one * cos[i] + two * sin[i];
        head[half + i] = two * cos[half + i] + one * sin[half + i];
    }
}

/* seen [head size]: attention of a query to these slots. */
static void attend(
    const float *query, const float *keys, const float *values, const int64_t *slots, int64_t count, int64_t size, float scaling,
    float *weights, float *seen) {
    float most = -INFINITY, sum = 0.0f;
    for (int64_t j = 0; j < count; j++) {
        weights[j] = scaling * dot(query, keys + (slots ? slots[j] : j) * size, size);
        most = weights[j] > most ? weights[j] : most;
    }
    for (int64_t j = 0; j < count; j++) weights[j] = exponential(weights[j] - most);
    for (int64_t j = 0; j < count; j++) sum += weights[j];
    memset(seen, 0, size * sizeof(float));
    for (int64_t j = 0; j < count; j++) add(seen, weights[j] / sum, values + (slots ? slots[j] : j) * size, size);
}

/* From the outputs `made` of the first product to the inputs `mixed` of the second, within a parallel region. */
static void by_attention(const Layer *l, const Pass *s, float *made, float *keys, float *values, float *mixed) {
    const int64_t size = l->head_size, group = l->query_heads / l->key_heads, n = s->rows * s->width, outputs = l->in.outputs;
    const int64_t turned = l->query_heads + l->key_heads;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) {
        const int64_t at = (s->angles == 1 ? c % s->width : c) * size;
        float *heads = made + c * outputs;
        for (int64_t h = 0; h < turned; h++)
            turn(
                heads + h * size, h < l->query_heads ? l->query_norm : l->key_norm,
                h < l->query_heads ? l->query_epsilon : l->key_epsilon, s->cos + at, s->sin + at, size, l->turned);
        for (int64_t h = 0; h < l->key_heads; h++) {
            const int64_t to = ((c / s->width * l->key_heads + h) * s->capacity + s->places[c]) * size;
            memcpy(keys + to, heads + (l->query_heads + h) * size, size * sizeof(float));
            memcpy(values + to, heads + (turned + h) * size, size * sizeof(float));
        }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n * l->query_heads; i++) {
        const int64_t c = i / l->query_heads, h = i % l->query_heads;
        const int64_t of = ((c / s->width * l->key_heads + h / group) * s->capacity + s->first) * size;
        float *to = mixed + i * size;
        attend(
            made + c * outputs + h * size, keys + of, values + of, s->slots ? s->slots + s->starts[c] : NULL,
            s->slots ? s->starts[c + 1] - s->starts[c] : s->places[c] - s->first + 1, size, l->scaling,
            s->scratch + omp_get_thread_num() * s->top, to);
        const float *gate = made + c * outputs + (turned + l->key_heads + h) * size;
        if (l->is_gated)
            for (int64_t d = 0; d < size; d++) to[d] /= 1.0f + exponential(-gate[d]);
    }
}

/* The state of a convolution after inputs [n, C]: the last ones. state: [C, K]. */
static void shift(int64_t n, Columns inputs, float *state, int64_t C, int64_t K) {
    for (int64_t c = 0; c < C; c++)
        for (int64_t k = 0; k < K; k++) {
            const int64_t at = n - K + k;
            state[c * K + k] = at < 0 ? state[c * K + K + at] : inputs.data[at * inputs.stride + c];
        }
}

/* The same by the delta rule. notes: inputs, decay, keys, written of the columns, as in `Read`; NULL for a text, after which the
   states are those after it. */
static void by_delta_rule(
    const Layer *l, const Pass *s, const float *made, float *before_conv, float *state, float *const *notes, float *read,
    float *mixed) {
    const Shape *shape = &l->shape;
    const int64_t H = shape->heads, dk = shape->dk, dv = shape->dv, C = channels(shape), n = s->width, stride = l->in.outputs;
    Columns gate = {made + C, stride}, strength = {gate.data + H * dv, stride}, rate = {strength.data + H, stride};
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s->rows; r++) {
        Columns own = {made + r * n * stride, stride};
        float *past = before_conv + r * C * shape->size;
        if (notes) note(shape, n, own, past, notes[0] + r * C * (shape->size + n));
        convolve(shape, n, s->parents ? s->parents + r * (n - 1) : NULL, own, l->conv, l->conv_bias, past, read + r * n * C);
        if (!notes) shift(n, own, past, C, shape->size);
    }
#pragma omp for schedule(static)
    for (int64_t at = 0; at < s->rows * H; at++) {
        int64_t r = at / H, h = at % H;
        Beside beside = beside_of(shape, r, h, n, gate, strength, rate, l->a_log, l->shift, l->norm);
        float *to = mixed + r * n * H * dv + h * dv, *own = state + at * dk * dv;
        if (notes)
            head(
                shape, h, n, s->parents ? s->parents + r * (n - 1) : NULL, read + r * n * C, beside, own, notes[1] + at * n,
                notes[2] + at * n * dk, notes[3] + at * n * dv, to);
        else
            head_of_text(shape, h, n, read + r * n * C, beside, own, to);
    }
}

/* 0 if all columns are written to slots that are there; else minus one less the first column that is not. */
static int64_t without_slot(const Pass *s) {
    for (int64_t c = 0; s->places && c < s->rows * s->width; c++)
        if (s->places[c] < s->first || s->places[c] >= s->capacity) return -c - 1;
    return 0;
}

static int64_t most(int64_t one, int64_t two) { return one > two ? one : two; }

/* Numbers of the buffer for a column. */
int64_t layer_numbers(const Layer *l) { return 2 * l->hidden + most(2 * l->in.outputs + l->out.inputs, 3 * l->inner); }

/* A layer over all columns, within a parallel region. hidden, out: [columns, hidden]. stores: of attention, keys and values [rows,
   key heads, capacity, head size]; of the delta rule, the states before [rows, C, K] and [rows, H, dk, dv]. */
static void layer(const Layer *l, const Pass *s, const float *hidden, float *const *stores, float *const *notes, float *out) {
    const int64_t n = s->rows * s->width;
    float *normed = s->buffer, *middle = normed + n * l->hidden, *made = middle + n * l->hidden;
    float *mixed = made + n * l->in.outputs, *read = mixed + n * l->out.inputs, *wide = made, *narrow = wide + 2 * n * l->inner;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++)
        norm_of(hidden + c * l->hidden, l->before_mixer, l->hidden, l->mixer_epsilon, normed + c * l->hidden);
    product(&l->in, normed, n, NULL, made);
    if (l->is_attention)
        by_attention(l, s, made, stores[0], stores[1], mixed);
    else
        by_delta_rule(l, s, made, stores[0], stores[1], notes, read, mixed);
    product(&l->out, mixed, n, hidden, middle);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++)
        norm_of(middle + c * l->hidden, l->before_mlp, l->hidden, l->mlp_epsilon, normed + c * l->hidden);
    product(&l->gate_up, normed, n, NULL, wide);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) {
        const float *gate = wide + 2 * c * l->inner, *up = gate + l->inner;
        for (int64_t i = 0; i < l->inner; i++) narrow[c * l->inner + i] = silu(gate[i]) * up[i];
    }
    product(&l->down, narrow, n, middle, out);
}

/* Layers, one after the other. stores: two for each. notes: four for each, of attention not read; NULL for a text. out: [count,
   columns, hidden]. Returns what `without_slot` does, and computes nothing unless that is 0. */
int64_t layers(
    const Layer *const *each, int64_t count, const Pass *s, const float *hidden, float *const *stores, float *const *notes,
    float *out) {
    const int64_t wrong = without_slot(s);
    if (wrong) return wrong;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    for (int64_t i = 0; i < count; i++) {
        float *to = out + i * s->rows * s->width * each[i]->hidden;
        layer(each[i], s, i ? to - s->rows * s->width * each[i]->hidden : hidden, stores + 2 * i, notes ? notes + 4 * i : NULL, to);
    }
    return 0;
}

/* An MTP head: one layer, after the norms of embedding and state and the product of both, before a norm. */
typedef struct {
    Product fuse;
    const float *embed_norm, *hidden_norm, *end_norm; /* what they multiply by, [hidden]; the last one may be NULL */
    float embed_epsilon, hidden_epsilon, end_epsilon;
} Head;

/* embeddings, states, out: [columns, hidden]. The buffer has 4 * hidden more numbers for a column. Returns as `layers`. */
int64_t step_of_states(
    const Head *h, const Layer *l, const Pass *s, const float *embeddings, const float *states, float *const *stores, float *out) {
    const int64_t n = s->rows * s->width, size = l->hidden;
    const int64_t wrong = without_slot(s);
    if (wrong) return wrong;
    float *both = s->buffer + n * layer_numbers(l), *fused = both + 2 * n * size, *made = fused + n * size;
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++) {
            norm_of(embeddings + c * size, h->embed_norm, size, h->embed_epsilon, both + 2 * c * size);
            norm_of(states + c * size, h->hidden_norm, size, h->hidden_epsilon, both + (2 * c + 1) * size);
        }
        product(&h->fuse, both, n, NULL, fused);
        layer(l, s, fused, stores, NULL, h->end_norm ? made : out);
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++)
            if (h->end_norm) norm_of(made + c * size, h->end_norm, size, h->end_epsilon, out + c * size);
    }
    return 0;
}

/* The same over columns of tokens ids [columns], whose embeddings [rows, hidden] are looked up. The buffer has `hidden` more numbers
   for a column. Returns one more than the first column whose id has no embedding, and then computes nothing; else as `layers`. */
int64_t step_of_tokens(
    const Head *h, const Layer *l, const Pass *s, const float *embeddings, int64_t rows, const int64_t *ids, const float *states,
    float *const *stores, float *out) {
    const int64_t n = s->rows * s->width, size = l->hidden;
    for (int64_t c = 0; c < n; c++)
        if (ids[c] < 0 || ids[c] >= rows) return c + 1;
    float *found = s->buffer + n * (layer_numbers(l) + 4 * size);
    for (int64_t c = 0; c < n; c++) memcpy(found + c * size, embeddings + ids[c] * size, size * sizeof(float));
    return step_of_states(h, l, s, found, states, stores, out);
}

/* Where the largest number is; where one is that is not a number, if there is one. */
static int64_t largest(const float *x, int64_t count) {
    int64_t found = 0;
    float most = x[0];
    for (int64_t i = 1; i < count; i++)
        if (x[i] > most || x[i] != x[i]) most = x[found = i];
    return found;
}

/* A greedy chain of one row: each of `count` tokens is the most probable one after `state` [hidden], which then becomes the state
   after it, except for the last. s: of one column, that of the first token; those after it have the next slots and positions.
   tokens, best: [count], with their logits. logits: [outputs], of the last token. Returns what `step_of_tokens` does
   after the last step, or the first that fails. */
int64_t greedy_chain(
    const Head *h, const Layer *l, const Pass *s, const float *embeddings, int64_t rows, const Product *output, float *state,
    float *const *stores, int64_t count, int64_t *tokens, float *best, float *logits) {
    Pass own = *s;
    for (int64_t i = 0; i < count; i++) {
        multiply(output, state, 1, logits, (int)s->threads);
        best[i] = logits[tokens[i] = largest(logits, output->outputs)];
        if (i + 1 == count) break;
        const int64_t wrong = step_of_tokens(h, l, &own, embeddings, rows, tokens + i, state, stores, state);
        if (wrong) return wrong < 0 ? wrong : i + 1;
        own.cos += l->head_size, own.sin += l->head_size, own.places++;
    }
    return 0;
}

/* The states of one row after a column. notes: the row's, the states too. */
static void advance_row(
    const Shape *s, int64_t n, const int64_t *parents, int64_t last, const float *inputs, const float *decay, const float *keys,
    const float *written, float *conv, float *state) {
    int64_t K = s->size, all = K + n, dk = s->dk, dv = s->dv, C = channels(s);
    for (int64_t k = K - 1, on_path = last, past = K - 1; k >= 0; k--) {
        int64_t place = on_path >= 0 ? K + on_path : past--;
        if (on_path >= 0) on_path = before(parents, on_path);
        for (int64_t c = 0; c < C; c++) conv[c * K + k] = inputs[c * all + place];
    }
    for (int64_t h = 0; h < s->heads; h++) {
        const float *to_column = decay + h * n;
        float *own = state + h * dk * dv, left = expf(to_column[last]);
        for (int64_t i = 0; i < dk * dv; i++) own[i] *= left;
        for (int64_t j = last; j >= 0; j = before(parents, j)) {
            const float rest = expf(to_column[last] - to_column[j]), *key = keys + (h * n + j) * dk;
            for (int64_t d = 0; d < dk; d++) add(own + d * dv, rest * key[d], written + (h * n + j) * dv, dv);
        }
    }
}

/* The states of all rows after each row's column in last [rows], those of rows with -1 as they are. stores, notes: of `layers`. */
void advance(
    const Layer *const *each, int64_t count, int64_t rows, int64_t n, const int64_t *parents, const int64_t *last,
    float *const *stores, float *const *notes, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count * rows; i++) {
        const Layer *l = each[i / rows];
        const Shape *s = &l->shape;
        int64_t r = i % rows, H = s->heads, C = channels(s);
        float *const *own = stores + 2 * (i / rows), *const *of = notes + 4 * (i / rows);
        if (!l->is_attention && last[r] >= 0)
            advance_row(
                s, n, parents ? parents + r * (n - 1) : NULL, last[r], of[0] + r * C * (s->size + n), of[1] + r * H * n,
                of[2] + r * H * n * s->dk, of[3] + r * H * n * s->dv, own[0] + r * C * s->size, own[1] + r * H * s->dk * s->dv);
    }
}

/* Sizes and offsets of the structs, which `structs.py` mirrors in this order. */
#define AT(type, field) offsetof(type, field)
const int64_t layout[] = {
    sizeof(Shape), AT(Shape, key_heads), AT(Shape, heads), AT(Shape, dk), AT(Shape, dv), AT(Shape, size), AT(Shape, strongest),
    AT(Shape, epsilon), AT(Shape, rounds), AT(Shape, rounds_norm),
    sizeof(Columns), AT(Columns, data), AT(Columns, stride),
    sizeof(Product), AT(Product, weights), AT(Product, bias), AT(Product, outputs), AT(Product, inputs),
    sizeof(Layer), AT(Layer, in), AT(Layer, out), AT(Layer, gate_up), AT(Layer, down), AT(Layer, before_mixer), AT(Layer, before_mlp),
    AT(Layer, mixer_epsilon), AT(Layer, mlp_epsilon), AT(Layer, hidden), AT(Layer, inner), AT(Layer, is_attention),
    AT(Layer, query_heads), AT(Layer, key_heads), AT(Layer, head_size), AT(Layer, turned), AT(Layer, is_gated), AT(Layer, query_norm),
    AT(Layer, key_norm), AT(Layer, query_epsilon), AT(Layer, key_epsilon), AT(Layer, scaling), AT(Layer, shape), AT(Layer, conv),
    AT(Layer, conv_bias), AT(Layer, a_log), AT(Layer, shift), AT(Layer, norm),
    sizeof(Pass), AT(Pass, rows), AT(Pass, width), AT(Pass, parents), AT(Pass, cos), AT(Pass, sin), AT(Pass, angles), AT(Pass, places),
    AT(Pass, first), AT(Pass, slots), AT(Pass, starts), AT(Pass, capacity), AT(Pass, threads), AT(Pass, buffer), AT(Pass, top),
    AT(Pass, scratch),
    sizeof(Head), AT(Head, fuse), AT(Head, embed_norm), AT(Head, hidden_norm), AT(Head, end_norm), AT(Head, embed_epsilon),
    AT(Head, hidden_epsilon), AT(Head, end_epsilon),
};
const int64_t layout_numbers = sizeof layout / sizeof *layout;
