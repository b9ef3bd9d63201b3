/* The gated delta rule over few columns, chains and token trees, in float32: what lies between the two products of a layer, as
   `engine/delta.py` computes it by operations of torch. Plain C, for any processor. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t key_heads, heads; /* heads: of values, a multiple */
    int64_t dk, dv;           /* numbers of a key and of a value */
    int64_t size;             /* of the convolution */
    float strongest;          /* factor of the write strength */
    float epsilon;            /* of the last norm */
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

/* Convolution, activation and norms of one row: of_conv [n, C] and the state [C, K] -> inputs [C, K + n], read [n, C]. */
static void convolve(
    const Shape *s, int64_t n, const int64_t *parents, Columns of_conv, const float *weight, const float *bias,
    const float *state, float *inputs, float *read
) {
    int64_t K = s->size, all = K + n, keys = s->key_heads * s->dk, C = 2 * keys + s->heads * s->dv;
    for (int64_t c = 0; c < C; c++) {
        memcpy(inputs + c * all, state + c * K, K * sizeof(float));
        for (int64_t i = 0; i < n; i++) inputs[c * all + K + i] = of_conv.data[i * of_conv.stride + c];
    }
    for (int64_t i = 0; i < n; i++) {
        float *to = read + i * C;
        int64_t on_path = i, past = K - 1;
        for (int64_t c = 0; c < C; c++) to[c] = bias ? bias[c] : 0.0f;
        for (int64_t k = K - 1; k >= 0; k--) {
            int64_t place = on_path >= 0 ? K + on_path : past--;
            if (on_path >= 0) on_path = before(parents, on_path);
            for (int64_t c = 0; c < C; c++) to[c] += weight[c * K + k] * inputs[c * all + place];
        }
        for (int64_t c = 0; c < C; c++) to[c] = silu(to[c]);
        for (int64_t part = 0; part < 2 * s->key_heads; part++) {
            float *one = to + part * s->dk, scale = part < s->key_heads ? 1.0f / sqrtf((float)s->dk) : 1.0f;
            scale /= sqrtf(dot(one, one, s->dk) + 1e-6f);
            for (int64_t d = 0; d < s->dk; d++) one[d] *= scale;
        }
    }
}

/* One head of one row. read: [n, C], from `convolve`. state: [dk, dv]. decay: [n], keys: [n, dk], written: [n, dv], as in `Read`.
   made: [n, dv], heads * dv apart. */
static void head(
    const Shape *s, int64_t h, int64_t n, const int64_t *parents, const float *read, Columns gate, Columns strength,
    Columns rate, float slope, float shift, const float *norm, const float *state, float *decay, float *keys,
    float *written, float *made
) {
    int64_t dk = s->dk, dv = s->dv, own = h / (s->heads / s->key_heads), all = s->key_heads * dk, C = 2 * all + s->heads * dv;
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
        float x = rate.data[i * rate.stride + h] + shift;
        float beta = s->strongest / (1.0f + expf(-strength.data[i * strength.stride + h]));
        int64_t parent = before(parents, i);
        decay[i] = slope * (x > 20.0f ? x : log1pf(expf(x))) + (parent < 0 ? 0.0f : decay[parent]);
        float left = expf(decay[i]), *to = written + i * dv, *out = found + i * dv;
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
        float scale = 1.0f / sqrtf(dot(out, out, dv) / dv + s->epsilon);
        const float *beside = gate.data + i * gate.stride + h * dv;
        for (int64_t v = 0; v < dv; v++) made[i * s->heads * dv + v] = out[v] * scale * norm[v] * silu(beside[v]);
    }
}

/* All rows. Columns are [R, n, any]; see `delta.py` for the other shapes. */
void mix(
    const Shape *s, int64_t rows, int64_t n, const int64_t *parents, Columns of_conv, Columns gate, Columns strength,
    Columns rate, const float *weight, const float *bias, const float *a_log, const float *shift, const float *norm,
    const float *before_conv, const float *state, float *inputs, float *decay, float *keys, float *written, float *made,
    float *read, int threads
) {
    int64_t H = s->heads, dk = s->dk, dv = s->dv, C = 2 * s->key_heads * dk + H * dv;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            Columns own = {of_conv.data + r * n * of_conv.stride, of_conv.stride};
            const int64_t *tree = parents ? parents + r * (n - 1) : parents;
            const float *past = before_conv + r * C * s->size;
            convolve(s, n, tree, own, weight, bias, past, inputs + r * C * (s->size + n), read + r * n * C);
        }
#pragma omp for
        for (int64_t at = 0; at < rows * H; at++) {
            int64_t r = at / H, h = at % H;
            Columns of_gate = {gate.data + r * n * gate.stride, gate.stride};
            Columns of_strength = {strength.data + r * n * strength.stride, strength.stride};
            Columns of_rate = {rate.data + r * n * rate.stride, rate.stride};
            head(
                s, h, n, parents ? parents + r * (n - 1) : parents, read + r * n * C, of_gate, of_strength, of_rate,
                -expf(a_log[h]), shift[h], norm, state + at * dk * dv, decay + at * n, keys + at * n * dk,
                written + at * n * dv, made + r * n * H * dv + h * dv
            );
        }
    }
}
