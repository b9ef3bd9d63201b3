/* Attention of columns over the slots that they see. */

#pragma once

#include "abi.h"

enum { WIDEST = 256 }; /* the largest head size */

/* Scores of products of queries and keys. */
INLINE vec scored(const Layer *l, vec dots) {
    if (!l->is_eager) return dots * all(l->scaling);
    const vec scores = rounded(rounded(dots) * all(l->scaling)), cap = all(l->cap);
    return l->cap > 0 ? rounded(rounded(hyperbolic(rounded(scores / cap))) * cap) : scores;
}

/* Scores minus the highest one. transformers rounds that where there are sinks, and otherwise leaves it to its softmax. */
INLINE vec below(vec scores, vec most, int has_sinks) { return has_sinks ? rounded(scores - most) : scores - most; }

#ifdef DOTS

/* Sums of interleaved vectors times a share, in order. */
INLINE void store_in_order(bf16 *to, __m512 low, __m512 high, float share) {
    static const int16_t in_order[32] = {0,  1,  2,  3,  16, 17, 18, 19, 4,  5,  6,  7,  20, 21, 22, 23,
                                         8,  9,  10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const __m512 by = _mm512_set1_ps(share);
    const __m512i found = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, by), _mm512_mul_ps(low, by));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(in_order), found));
}

#endif

#ifdef TILED
#include "attention_tiles.h"
#else

#ifdef DOTS

typedef bf16 weight;

/* Sixteen sums of products; their sum is that of two vectors. */
INLINE vec dot(const number *one, const number *two, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(one + k), (__m512bh)_mm512_loadu_si512(two + k));
    return (vec)sum;
}

INLINE void store_weight(weight *to, vec value) { store(to, value); }

#else

typedef float weight;

INLINE vec dot(const number *one, const number *two, int64_t size) {
    vec sum = all(0);
    for (int64_t k = 0; k < size; k += WIDE) sum = plus_product(sum, load(one + k), load(two + k));
    return sum;
}

INLINE void store_weight(weight *to, vec value) {
    value = rounded(value);
    memcpy(to, &value, sizeof value);
}

#endif

/* The softmax of a query with the keys of these slots, times its divisor, rounded, over the first part of weights [count, rounded
   up to sixteen]. sink: the head's, or NULL. Returns one over the divisor. */
INLINE float attention_weights(
    const Layer *l, const number *query, const number *keys, const int64_t *slots, int64_t count, float *weights,
    const number *sink) {
    static const int32_t in_turn[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t size = l->head_size;
    ints lanes;
    memcpy(&lanes, in_turn, sizeof lanes);
    vec most = all(-INFINITY);
    for (int64_t j = 0; j < count; j += WIDE) {
        vec dots[WIDE];
        UNROLLED for (int i = 0; i < WIDE; i++) {
            const int64_t at = j + i < count ? j + i : count - 1;
            dots[i] = dot(query, keys + (slots ? slots[at] : at) * size, size);
        }
        const vec scores = scored(l, sums_of(dots));
        most = greater(most, scores);
        memcpy(weights + j, &scores, sizeof scores);
    }
    most = all(most_of(most));
    if (sink) most = greater(most, all(number_of(*sink)));
    vec sum = all(0);
    for (int64_t j = 0; j < count; j += WIDE) {
        const int32_t left = count - j < WIDE ? (int32_t)(count - j) : WIDE;
        const vec found = chosen(lanes < left, exponential(below(wide(weights + j), most, sink != NULL)), all(0));
        sum += rounded(found);
        store_weight((weight *)weights + j, found); /* over scores that have been read */
    }
    const float of_sink = sink ? rounded(exponential(below(all(number_of(*sink)), most, 1)))[0] : 0.0f;
    return count ? 1.0f / (sum_of(sum) + of_sink) : 0.0f;
}

#ifdef DOTS

enum { SPAN = 32 };

/* SPAN * parts numbers of the mean of values, for `heads` heads with weights [heads, stride]. Two slots at a time, whose values are
   interleaved; the result is in the order of the interleaved ones, and put in order at the end. */
INLINE void mean(
    const weight *weights, int64_t stride, const float *shares, const number *values, const int64_t *slots, int64_t count, int64_t size,
    number *y, int heads, int parts) {
    __m512 low[4][2], high[4][2];
    UNROLLED for (int h = 0; h < heads; h++)
        UNROLLED for (int i = 0; i < parts; i++) low[h][i] = high[h][i] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j += 2) {
        const int64_t next = j + 1 < count ? j + 1 : j; /* its weight is 0 if there is none */
        const number *one = values + (slots ? slots[j] : j) * size, *two = values + (slots ? slots[next] : next) * size;
        __m512bh first[2], second[2];
        UNROLLED for (int i = 0; i < parts; i++) {
            const __m512i a = _mm512_loadu_si512(one + 32 * i), b = _mm512_loadu_si512(two + 32 * i);
            first[i] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            second[i] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
        UNROLLED for (int h = 0; h < heads; h++) {
            const __m512bh both = two_of(weights + h * stride + j);
            UNROLLED for (int i = 0; i < parts; i++) {
                low[h][i] = _mm512_dpbf16_ps(low[h][i], first[i], both);
                high[h][i] = _mm512_dpbf16_ps(high[h][i], second[i], both);
            }
        }
    }
    UNROLLED for (int h = 0; h < heads; h++)
        UNROLLED for (int i = 0; i < parts; i++) store_in_order(y + h * size + 32 * i, low[h][i], high[h][i], shares[h]);
}

#else

enum { SPAN = WIDE == 16 ? 32 : WIDE, SPANS = 2 * SPAN / WIDE };

/* The same, one slot at a time. */
INLINE void mean(
    const weight *weights, int64_t stride, const float *shares, const number *values, const int64_t *slots, int64_t count,
    int64_t size, number *y, int heads, int parts) {
    vec sums[4][SPANS];
    const int vectors = parts * SPAN / WIDE;
    UNROLLED for (int h = 0; h < heads; h++) UNROLLED for (int i = 0; i < vectors; i++) sums[h][i] = all(0);
    for (int64_t j = 0; j < count; j++) {
        const number *value = values + (slots ? slots[j] : j) * size;
        vec found[SPANS];
        UNROLLED for (int i = 0; i < vectors; i++) found[i] = load(value + WIDE * i);
        UNROLLED for (int h = 0; h < heads; h++) {
            const vec own = all(weights[h * stride + j]);
            UNROLLED for (int i = 0; i < vectors; i++) sums[h][i] = plus_product(sums[h][i], found[i], own);
        }
    }
    UNROLLED for (int h = 0; h < heads; h++)
        UNROLLED for (int i = 0; i < vectors; i++) store(y + h * size + WIDE * i, sums[h][i] * all(shares[h]));
}

#endif

/* seen [query heads of the key head, head size]: attention of a column's queries to the slots that it sees. sinks: of these heads, or
   NULL. */
static void attend(
    const Layer *l, const number *queries, const number *keys, const number *values, const int64_t *slots, int64_t count, float *weights,
    const number *sinks, number *seen) {
    const int64_t size = l->head_size, group = l->query_heads / l->key_heads, stride = (count + 15) / 16 * 16;
    for (int64_t h = 0; h < group; h += 4) {
        const int heads = group - h < 4 ? (int)(group - h) : 4;
        float shares[4];
        for (int i = 0; i < heads; i++)
            shares[i] = attention_weights(
                l, queries + (h + i) * size, keys, slots, count, weights + i * stride, sinks ? sinks + h + i : NULL);
        const weight *own = (const weight *)weights;
        const int64_t apart = stride * (int64_t)(sizeof(float) / sizeof(weight));
        for (int64_t at = 0; at < size;) {
            const int parts = size - at < 2 * SPAN ? 1 : 2;
#define MEAN(heads, parts)                                                                                                  \
    case 8 * heads + parts:                                                                                                 \
        mean(own, apart, shares, values + at, slots, count, size, seen + h * size + at, heads, parts);                      \
        break;
            switch (8 * heads + parts) {
                MEAN(1, 1) MEAN(2, 1) MEAN(3, 1) MEAN(4, 1) MEAN(1, 2) MEAN(2, 2) MEAN(3, 2) MEAN(4, 2)
            }
            at += SPAN * parts;
        }
    }
}

/* Attention of n columns from `from` on, within a parallel region. */
static void attend_all(
    const Layer *l, const Pass *s, const number *heads, const number *keys, const number *values, int64_t capacity, number *seen,
    int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    const int64_t group = l->query_heads / l->key_heads, size = l->head_size;
#pragma omp for schedule(static, 1)
    for (int64_t i = 0; i < n * l->key_heads; i++) { /* in turn, because a prompt's columns see more and more slots */
        const int64_t c = i / l->key_heads, h = i % l->key_heads, at = from + c;
        const int64_t of = ((at / s->width * l->key_heads + h) * capacity + s->first) * size;
        attend(
            l, heads + c * l->heads.outputs + h * group * size, keys + of, values + of, s->slots ? s->slots + s->starts[at] : NULL,
            s->slots ? s->starts[at + 1] - s->starts[at] : s->places[at] - s->first + 1, own, l->sinks ? l->sinks + h * group : NULL,
            seen + c * l->output.inputs + h * group * size);
    }
}

#endif
