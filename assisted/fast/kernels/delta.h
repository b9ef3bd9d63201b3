/* The gated delta rule (2412.06464): convolution, recurrence and norm, over chains and token trees as `engine/delta.py` computes
   them, and over texts. Inputs and outputs are numbers, states and sums float32. Loops run over any counts, with a part of a vector
   at the end. */

#pragma once

#include "abi.h"

enum { TOGETHER = 8 }; /* columns of a head that are read together */
/* columns and vectors of the state's products that the registers hold */
enum { RECALLED = WIDE == 16 ? 4 : 2, STRIP = 2 };

INLINE int64_t filled_up(int64_t count) { return (count + WIDE - 1) / WIDE * WIDE; }

INLINE void put(float *to, vec value) { memcpy(to, &value, sizeof value); }

/* Vectors of which only the first `left` numbers are there, and zeros. */
INLINE vec wide_part(const float *from, int64_t left) {
    if (left >= WIDE) return wide(from);
    float part[WIDE] = {0};
    memcpy(part, from, left * sizeof(float));
    return wide(part);
}

INLINE vec load_part(const number *from, int64_t left) {
    if (left >= WIDE) return load(from);
    number part[WIDE] = {0};
    memcpy(part, from, left * sizeof(number));
    return load(part);
}

INLINE void put_part(float *to, vec value, int64_t left) { memcpy(to, &value, (left < WIDE ? left : WIDE) * sizeof(float)); }

INLINE void store_part(number *to, vec value, int64_t left) {
    number part[WIDE];
    store(part, value);
    memcpy(to, part, (left < WIDE ? left : WIDE) * sizeof(number));
}

INLINE float number_near(float x) { return rounded(all(x))[0]; }

static float inner(const float *one, const float *two, int64_t count) {
    vec sum = all(0);
    for (int64_t at = 0; at < count; at += WIDE)
        sum = plus_product(sum, wide_part(one + at, count - at), wide_part(two + at, count - at));
    return sum_of(sum);
}

static void add(float *to, float factor, const float *from, int64_t count) {
    int64_t at = 0;
    for (; at + WIDE <= count; at += WIDE) put(to + at, plus_product(wide(to + at), all(factor), wide(from + at)));
    for (; at < count; at++) to[at] += factor * from[at];
}

/* The column before column i on its path; -1 before the first. parents: [n - 1], or NULL for a chain. */
INLINE int64_t before(const int64_t *parents, int64_t i) { return i == 0 ? -1 : parents ? parents[i - 1] : i - 1; }

static int64_t channels_of(const Delta *d) { return 2 * d->key_heads * d->dk + d->heads * d->dv; }

/* A row while the rule runs over it. */
typedef struct {
    const Delta *delta;
    const number *made;     /* outputs of the layer's first product, [n, stride] */
    const number *past;     /* the state of the convolution, [channels, size] */
    const int64_t *parents; /* [n - 1], or NULL for a chain */
    int64_t n, stride;
    number *mixed; /* what the layer's last product reads, [n, pitch] */
    int64_t pitch;
} Row;

/* Channels [channel, channel + count) of column i, whose inputs begin at output `at`, after convolution and activation.
   to: [count, filled up]. */
static void convolve(const Row *r, int64_t i, int64_t at, int64_t channel, int64_t count, float *to) {
    const Delta *d = r->delta;
    const int64_t all_channels = channels_of(d);
    for (int64_t c = 0; c < count; c += WIDE) {
        const int64_t left = count - c;
        vec sum = d->conv_bias ? wide_part(d->conv_bias + channel + c, left) : all(0);
        int64_t on_path = i, past = d->size - 1;
        for (int64_t k = d->size - 1; k >= 0; k--) {
            vec given;
            if (on_path >= 0) {
                given = load_part(r->made + on_path * r->stride + at + c, left);
                on_path = before(r->parents, on_path);
            } else {
                float own[WIDE] = {0};
                for (int64_t l = 0; l < WIDE && l < left; l++) own[l] = number_of(r->past[(channel + c + l) * d->size + past]);
                given = wide(own);
                past--;
            }
            sum = plus_product(sum, wide_part(d->conv + k * all_channels + channel + c, left), given);
        }
        put(to + c, rounded(silu(rounded(sum))));
    }
}

/* Gives a vector the norm `size`, as far as it is not near zero. */
static void scale_to(float *x, int64_t count, float size) {
    const vec by = all(size / sqrtf(inner(x, x, count) + 1e-6f));
    for (int64_t at = 0; at < count; at += WIDE) put(x + at, wide(x + at) * by);
}

/* What a head has read of some columns, each vector filled up. */
typedef struct {
    float *queries, *keys, *values; /* [TOGETHER, any] */
    float decays[TOGETHER], strengths[TOGETHER];
    int64_t of_key, of_value; /* the last two sizes */
} Some;

/* Reads column i of a head into the place `c`. */
static void read_column(const Row *r, int64_t h, int64_t i, Some *some, int64_t c) {
    const Delta *d = r->delta;
    const int64_t shared = d->heads / d->key_heads, group = h / shared, own = h % shared, keys = d->key_heads * d->dk;
    const int64_t of_keys = group * d->keys_apart, of_values = group * d->values_apart + own * d->dv;
    float *query = some->queries + c * some->of_key, *key = some->keys + c * some->of_key;
    convolve(r, i, d->queries_at + of_keys, group * d->dk, d->dk, query);
    convolve(r, i, d->keys_at + of_keys, keys + group * d->dk, d->dk, key);
    convolve(r, i, d->values_at + of_values, 2 * keys + h * d->dv, d->dv, some->values + c * some->of_value);
    scale_to(query, d->dk, 1.0f / sqrtf((float)d->dk));
    scale_to(key, d->dk, 1.0f);
    const number *small = r->made + i * r->stride + group * d->small_apart + own;
    const float rate = number_of(small[d->decays_at]) + d->shift[h];
    some->decays[c] = d->rates[h] * (rate > 20.0f ? rate : log1pf(expf(rate)));
    some->strengths[c] = d->strongest * number_near(1.0f / (1.0f + expf(-number_of(small[d->strengths_at]))));
}

/* The norm of a column's output [dv, filled up], and the product with its gate. */
static void gate(const Row *r, int64_t h, int64_t i, float *out) {
    const Delta *d = r->delta;
    const int64_t shared = d->heads / d->key_heads, dv = d->dv;
    const number *gates = r->made + i * r->stride + d->gates_at + h / shared * d->values_apart + h % shared * dv;
    number *to = r->mixed + i * r->pitch + h * dv;
    for (int64_t v = 0; v < dv; v += WIDE) put(out + v, rounded(wide(out + v)));
    const vec scale = all(1.0f / sqrtf(inner(out, out, dv) / (float)dv + d->epsilon));
    for (int64_t v = 0; v < dv; v += WIDE) {
        vec normed = wide_part(d->norm + v, dv - v) * rounded(wide(out + v) * scale);
        if (d->rounds_norm) normed = rounded(normed);
        store_part(to + v, normed * silu(load_part(gates + v, dv - v)), dv - v);
    }
}

/* STRIP or fewer vectors of what a state [dk, dv] has for the queries and for the keys of some columns. left: numbers of the state's
   lines from here on. */
INLINE void recall_strip(
    const float *state, int64_t dk, int64_t dv, int64_t left, const Some *some, int64_t first, float *found, float *recalled, int columns,
    int vectors) {
    vec of_queries[RECALLED][STRIP], of_keys[RECALLED][STRIP];
    UNROLLED for (int c = 0; c < columns; c++)
        UNROLLED for (int i = 0; i < vectors; i++) of_queries[c][i] = of_keys[c][i] = all(0);
    const float *queries = some->queries + first * some->of_key, *keys = some->keys + first * some->of_key;
    for (int64_t k = 0; k < dk; k++) {
        vec line[STRIP];
        UNROLLED for (int i = 0; i < vectors; i++)
            line[i] = vectors == STRIP ? wide(state + k * dv + i * WIDE) : wide_part(state + k * dv, left);
        UNROLLED for (int c = 0; c < columns; c++) {
            const vec query = all(queries[c * some->of_key + k]), key = all(keys[c * some->of_key + k]);
            UNROLLED for (int i = 0; i < vectors; i++) {
                of_queries[c][i] = plus_product(of_queries[c][i], query, line[i]);
                of_keys[c][i] = plus_product(of_keys[c][i], key, line[i]);
            }
        }
    }
    UNROLLED for (int c = 0; c < columns; c++)
        UNROLLED for (int i = 0; i < vectors; i++) {
            put(found + (first + c) * some->of_value + i * WIDE, of_queries[c][i]);
            put(recalled + (first + c) * some->of_value + i * WIDE, of_keys[c][i]);
        }
}

static void recall(const Delta *d, const float *state, const Some *some, int64_t count, float *found, float *recalled) {
    for (int64_t v = 0, wide_enough; v < d->dv; v += wide_enough ? STRIP * WIDE : WIDE) {
        wide_enough = d->dv - v >= STRIP * WIDE;
        for (int64_t c = 0; c < count; c += RECALLED) {
            const int64_t columns = count - c < RECALLED ? count - c : RECALLED;
#define RECALL(columns, vectors)                                                                                            \
    case 2 * columns + vectors:                                                                                             \
        recall_strip(state + v, d->dk, d->dv, d->dv - v, some, c, found + v, recalled + v, columns, vectors);               \
        break;
            switch (2 * columns + (wide_enough ? STRIP : 1)) {
                RECALL(1, 1) RECALL(1, 2) RECALL(2, 1) RECALL(2, 2)
#if WIDE == 16
                RECALL(3, 1) RECALL(3, 2) RECALL(4, 1) RECALL(4, 2)
#endif
            }
        }
    }
}

/* A head over a chain or a token tree after a state [dk, dv], which stays. decay [n], keys [n, dk], written [n, dv]: as in `Read`. */
static void head_of_columns(const Row *r, int64_t h, const float *state, float *decay, float *keys, float *written) {
    const Delta *d = r->delta;
    const int64_t dk = d->dk, dv = d->dv, of_key = filled_up(dk), of_value = filled_up(dv);
    float queries[TOGETHER * of_key], own[TOGETHER * of_key], values[TOGETHER * of_value];
    float found[TOGETHER * of_value], recalled[TOGETHER * of_value];
    Some some = {.queries = queries, .keys = own, .values = values, .of_key = of_key, .of_value = of_value};
    for (int64_t first = 0; first < r->n; first += TOGETHER) {
        const int64_t count = r->n - first < TOGETHER ? r->n - first : TOGETHER;
        for (int64_t c = 0; c < count; c++) {
            read_column(r, h, first + c, &some, c);
            memcpy(keys + (first + c) * dk, own + c * of_key, dk * sizeof(float));
        }
        recall(d, state, &some, count, found, recalled);
        for (int64_t c = 0; c < count; c++) {
            const int64_t i = first + c, parent = before(r->parents, i);
            const float *query = queries + c * of_key, *key = own + c * of_key;
            decay[i] = some.decays[c] + (parent < 0 ? 0.0f : decay[parent]);
            const float left = expf(decay[i]);
            float *to = written + i * dv, *out = found + c * of_value;
            for (int64_t v = 0; v < dv; v++) {
                to[v] = values[c * of_value + v] - left * recalled[c * of_value + v];
                out[v] *= left;
            }
            for (int64_t j = parent; j >= 0; j = before(r->parents, j)) {
                const float between = expf(decay[i] - decay[j]);
                add(to, -between * inner(key, keys + j * dk, dk), written + j * dv, dv);
                add(out, between * inner(query, keys + j * dk, dk), written + j * dv, dv);
            }
            for (int64_t v = 0; v < dv; v++) to[v] *= some.strengths[c];
            add(out, inner(query, key, dk), to, dv);
            gate(r, h, i, out);
        }
    }
}

/* Some columns of a text over STRIP or fewer vectors of a state's lines, which become those after them. */
INLINE void read_strip(
    float *state, int64_t dk, int64_t dv, int64_t left, const Some *some, int64_t count, const float *values, float *found, int vectors) {
    for (int64_t c = 0; c < count; c++) {
        const float *query = some->queries + c * some->of_key, *key = some->keys + c * some->of_key;
        const vec stays = all(expf(some->decays[c]));
        vec written[STRIP], out[STRIP];
        UNROLLED for (int i = 0; i < vectors; i++) written[i] = out[i] = all(0);
        for (int64_t k = 0; k < dk; k++)
            UNROLLED for (int i = 0; i < vectors; i++)
                written[i] = plus_product(
                    written[i], all(key[k]), vectors == STRIP ? wide(state + k * dv + i * WIDE) : wide_part(state + k * dv, left));
        UNROLLED for (int i = 0; i < vectors; i++)
            written[i] = all(some->strengths[c]) * (wide(values + c * some->of_value + i * WIDE) - stays * written[i]);
        for (int64_t k = 0; k < dk; k++)
            UNROLLED for (int i = 0; i < vectors; i++) {
                float *line = state + k * dv + i * WIDE;
                const vec old = vectors == STRIP ? wide(line) : wide_part(line, left);
                const vec now = plus_product(stays * old, all(key[k]), written[i]);
                out[i] = plus_product(out[i], all(query[k]), now);
                if (vectors == STRIP)
                    put(line, now);
                else
                    put_part(line, now, left);
            }
        UNROLLED for (int i = 0; i < vectors; i++) put(found + c * some->of_value + i * WIDE, out[i]);
    }
}

/* A head over a text, whose state [dk, dv] becomes that after it. */
static void head_of_text(const Row *r, int64_t h, float *state) {
    const Delta *d = r->delta;
    const int64_t dk = d->dk, dv = d->dv, of_key = filled_up(dk), of_value = filled_up(dv);
    float queries[TOGETHER * of_key], keys[TOGETHER * of_key], values[TOGETHER * of_value], found[TOGETHER * of_value];
    Some some = {.queries = queries, .keys = keys, .values = values, .of_key = of_key, .of_value = of_value};
    for (int64_t first = 0; first < r->n; first += TOGETHER) {
        const int64_t count = r->n - first < TOGETHER ? r->n - first : TOGETHER;
        for (int64_t c = 0; c < count; c++) read_column(r, h, first + c, &some, c);
        int64_t v = 0;
        for (; v + STRIP * WIDE <= dv; v += STRIP * WIDE)
            read_strip(state + v, dk, dv, dv - v, &some, count, values + v, found + v, STRIP);
        for (; v < dv; v += WIDE) read_strip(state + v, dk, dv, dv - v, &some, count, values + v, found + v, 1);
        for (int64_t c = 0; c < count; c++) gate(r, h, first + c, found + c * of_value);
    }
}

/* What the convolution reads, of channel c of column i. */
static number input_of(const Delta *d, const number *column, int64_t c) {
    const int64_t keys = d->key_heads * d->dk, of_values = d->heads / d->key_heads * d->dv;
    if (c < 2 * keys) return column[(c < keys ? d->queries_at : d->keys_at) + c % keys / d->dk * d->keys_apart + c % d->dk];
    c -= 2 * keys;
    return column[d->values_at + c / of_values * d->values_apart + c % of_values];
}

/* The columns [from, from + n) of rows of `width`, within a parallel region. made [n, stride] and mixed [n, pitch] begin with the
   first of them. past [rows, channels, size], state [rows, heads, dk, dv]: before the rows. notes: inputs [rows, channels, size +
   width], decay, keys and written of all columns, as in `Read`, with all columns at once; NULL for texts, after which the states are
   those after them. */
static void mix_columns(
    const Delta *d, int64_t width, const int64_t *parents, const number *made, int64_t stride, number *past, float *state,
    void *const *notes, number *mixed, int64_t pitch, int64_t from, int64_t n) {
    const int64_t H = d->heads, K = d->size, C = channels_of(d), of_state = d->dk * d->dv;
    const int64_t first = from / width, rows = (from + n - 1) / width + 1 - first;
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows * H; at++) {
        const int64_t r = first + at / H, h = at % H, begin = from > r * width ? from : r * width;
        const int64_t end = from + n < (r + 1) * width ? from + n : (r + 1) * width, place = r * H + h;
        const Row row = {
            d, made + (begin - from) * stride, past + r * C * K, parents ? parents + r * (width - 1) : NULL, end - begin, stride,
            mixed + (begin - from) * pitch, pitch};
        if (notes)
            head_of_columns(
                &row, h, state + place * of_state, (float *)notes[1] + place * width, (float *)notes[2] + place * width * d->dk,
                (float *)notes[3] + place * width * d->dv);
        else
            head_of_text(&row, h, state + place * of_state);
    }
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows * C; at++) {
        const int64_t r = first + at / C, c = at % C, begin = from > r * width ? from : r * width;
        const int64_t count = (from + n < (r + 1) * width ? from + n : (r + 1) * width) - begin;
        const number *own = made + (begin - from) * stride;
        number *before_text = past + (r * C + c) * K;
        if (notes) {
            number *inputs = (number *)notes[0] + (r * C + c) * (K + width);
            memcpy(inputs, before_text, K * sizeof(number));
            for (int64_t i = 0; i < width; i++) inputs[K + i] = input_of(d, own + i * stride, c);
        } else {
            for (int64_t k = 0; k < K; k++) {
                const int64_t i = count - K + k;
                before_text[k] = i < 0 ? before_text[K + i] : input_of(d, own + i * stride, c);
            }
        }
    }
}

/* The rule by itself, over rows [rows, width]. made: [rows * width, stride]. mixed: [rows * width, heads * dv]. The rest is as in
   `mix_columns`. */
void mix(
    const Delta *d, int64_t rows, int64_t width, const int64_t *parents, const number *made, int64_t stride, number *past, float *state,
    void *const *notes, number *mixed, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    mix_columns(d, width, parents, made, stride, past, state, notes, mixed, d->heads * d->dv, 0, rows * width);
}

/* The states of one row after a column. notes: the row's, the states too. */
static void advance_row(
    const Delta *d, int64_t n, const int64_t *parents, int64_t last, const number *inputs, const float *decay, const float *keys,
    const float *written, number *past, float *state) {
    const int64_t K = d->size, dk = d->dk, dv = d->dv, C = channels_of(d);
    for (int64_t k = K - 1, on_path = last, older = K - 1; k >= 0; k--) {
        const int64_t place = on_path >= 0 ? K + on_path : older--;
        if (on_path >= 0) on_path = before(parents, on_path);
        for (int64_t c = 0; c < C; c++) past[c * K + k] = inputs[c * (K + n) + place];
    }
    for (int64_t h = 0; h < d->heads; h++) {
        const float *to_column = decay + h * n, left = expf(to_column[last]);
        float *own = state + h * dk * dv;
        for (int64_t i = 0; i < dk * dv; i++) own[i] *= left;
        for (int64_t j = last; j >= 0; j = before(parents, j)) {
            const float rest = expf(to_column[last] - to_column[j]), *key = keys + (h * n + j) * dk;
            for (int64_t k = 0; k < dk; k++) add(own + k * dv, rest * key[k], written + (h * n + j) * dv, dv);
        }
    }
}

/* The states of all rows after each row's column in last [rows], those of rows with -1 as they are. stores: two of each layer, notes:
   four, as `layers` has them. */
void advance(
    const Layer *const *each, int64_t count, int64_t rows, int64_t n, const int64_t *parents, const int64_t *last, void *const *stores,
    void *const *notes, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count * rows; i++) {
        const Delta *d = &each[i / rows]->delta;
        const int64_t r = i % rows, H = d->heads, C = channels_of(d);
        void *const *own = stores + 2 * (i / rows), *const *of = notes + 4 * (i / rows);
        if (H && last[r] >= 0)
            advance_row(
                d, n, parents ? parents + r * (n - 1) : NULL, last[r], (number *)of[0] + r * C * (d->size + n), (float *)of[1] + r * H * n,
                (float *)of[2] + r * H * n * d->dk, (float *)of[3] + r * H * n * d->dv, (number *)own[0] + r * C * d->size,
                (float *)own[1] + r * H * d->dk * d->dv);
    }
}
