/* Vectors of any width, and the numbers that a library is compiled for: bfloat16, or float32 with -DFLOAT32. */

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

int omp_get_thread_num(void); /* not every compiler brings omp.h */

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

typedef uint16_t bf16;
#ifdef FLOAT32
typedef float number;
#else
typedef bf16 number;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && !defined(FLOAT32)
#define DOTS
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define TILED
#endif
#endif

/* WIDE: floats of a vector. MOST: columns whose sums fit in the registers. */
#if defined(__AVX512F__)
#define WIDE 16
enum { MOST = 8 };
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDE 8
enum { MOST = 3 };
#else
#define WIDE 4
enum { MOST = 2 };
#endif
typedef float vec __attribute__((vector_size(4 * WIDE)));
typedef int32_t ints __attribute__((vector_size(4 * WIDE)));
typedef uint32_t words __attribute__((vector_size(4 * WIDE)));
typedef int16_t shorts __attribute__((vector_size(2 * WIDE)));
typedef bf16 halves __attribute__((vector_size(2 * WIDE)));
typedef int8_t bytes __attribute__((vector_size(WIDE)));

enum { TILE = 16, TILES = 2, PARTS = TILES * TILE / WIDE, FEW = 8, GROUP = 32 };
/* A group with 4 bits: lines of both tiles in turn, so that memory is read in order; the fifth has scales and zero points. */
enum { LINE = 64, LINES = TILE * GROUP / 2 / LINE, BYTES4 = (LINES + 1) * TILES * LINE };
/* A group with 8 bits for integer products: of each tile eight lines of four inputs, whose levels are stored plus 128. */
enum { FOURS = GROUP / 4, BYTES8 = FOURS * TILES * LINE, ZERO8 = 128 };

/* ---- Vectors ---- */

INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec wide(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE ints ints_of(const void *from) {
    ints found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE words words_of(const void *from) { return (words)ints_of(from); }

INLINE vec expanded(const bf16 *from) {
    halves found;
    memcpy(&found, from, sizeof found);
    return (vec)(__builtin_convertvector(found, words) << 16);
}

INLINE vec chosen(ints where, vec one, vec other) { return (vec)((where & (ints)one) | (~where & (ints)other)); }

INLINE vec greater(vec one, vec other) { return chosen(one > other, one, other); }

INLINE vec without_sign(vec v) { return (vec)((ints)v & 0x7fffffff); }

/* sum + one * two, rounded once where the processor can. */
INLINE vec plus_product(vec sum, vec one, vec two) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)one, (__m512)two, (__m512)sum);
#elif WIDE == 8
    return (vec)_mm256_fmadd_ps((__m256)one, (__m256)two, (__m256)sum);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)one, (float32x4_t)two);
#else
    return sum + one * two;
#endif
}

/* The sum of all, by halves. */
INLINE float sum_of(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float parts[WIDE];
    memcpy(parts, &v, sizeof parts);
    UNROLLED for (int half = WIDE / 2; half; half /= 2) UNROLLED for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#endif
}

INLINE float most_of(vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float parts[WIDE];
    memcpy(parts, &v, sizeof parts);
    UNROLLED for (int half = WIDE / 2; half; half /= 2)
        UNROLLED for (int i = 0; i < half; i++) parts[i] = parts[i + half] > parts[i] ? parts[i + half] : parts[i];
    return parts[0];
#endif
}

/* The sums of as many vectors as a vector has floats, each in the same order. */
INLINE vec sums_of(const vec v[WIDE]) {
#if defined(__AVX512F__)
    __m512 a[8], b[4];
    UNROLLED for (int i = 0; i < 8; i++) {
        const __m512 one = (__m512)v[2 * i], two = (__m512)v[2 * i + 1];
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(one, two), _mm512_unpackhi_ps(one, two));
    }
    UNROLLED for (int i = 0; i < 4; i++) {
        const __m512d one = _mm512_castps_pd(a[2 * i]), two = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(one, two)), _mm512_castpd_ps(_mm512_unpackhi_pd(one, two)));
    }
    const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return (vec)_mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
#elif WIDE == 8
    __m256 a[4], b[2];
    UNROLLED for (int i = 0; i < 4; i++) a[i] = _mm256_hadd_ps((__m256)v[2 * i], (__m256)v[2 * i + 1]);
    UNROLLED for (int i = 0; i < 2; i++) b[i] = _mm256_hadd_ps(a[2 * i], a[2 * i + 1]);
    return (vec)_mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
#else
    vec sums;
    UNROLLED for (int i = 0; i < WIDE; i++) sums[i] = sum_of(v[i]);
    return sums;
#endif
}

/* exp(x) for x <= 0, to about one unit in the last place. */
INLINE vec exponential(vec x) {
    const vec shift = all(12582912.0f); /* numbers near 1.5 * 2^23 are whole */
    x = greater(x, all(-87.0f));
    const vec n = (x * all(1.44269504f) + shift) - shift;
    vec r = plus_product(x, -n, all(0.693145752f));
    r = plus_product(r, -n, all(1.42860677e-6f));
    vec e = all(1.0f / 720);
    const float terms[6] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    UNROLLED for (int i = 0; i < 6; i++) e = plus_product(all(terms[i]), e, r);
    return e * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* exp(x) - 1 for x <= 0, to about one unit in its last place, near zero, too. */
INLINE vec exponential_less_one(vec x) {
    const vec shift = all(12582912.0f);
    x = greater(x, all(-87.0f));
    const vec n = (x * all(1.44269504f) + shift) - shift;
    vec r = plus_product(x, -n, all(0.693145752f));
    r = plus_product(r, -n, all(1.42860677e-6f));
    vec e = all(1.0f / 5040);
    const float terms[6] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1};
    UNROLLED for (int i = 0; i < 6; i++) e = plus_product(all(terms[i]), e, r);
    const vec power = (vec)((__builtin_convertvector(n, ints) + 127) << 23);
    return plus_product(power - all(1), power, e * r);
}

/* x / (1 + exp(-by)), with an exponent that is never positive. */
INLINE vec gated_by(vec x, vec by) {
    const vec one = all(1), small = exponential(-without_sign(by));
    return x * chosen(by < all(0), small, one) / (one + small);
}

INLINE vec silu(vec x) { return gated_by(x, x); }

/* tanh(x): near zero its series, elsewhere (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) with the sign of x. */
INLINE vec hyperbolic(vec x) {
    const vec size = without_sign(x), square = x * x, small = exponential(size * all(-2));
    const float terms[4] = {-17.0f / 315, 2.0f / 15, -1.0f / 3, 1};
    vec series = all(62.0f / 2835);
    UNROLLED for (int i = 0; i < 4; i++) series = plus_product(all(terms[i]), series, square);
    const vec far = (all(1) - small) / (all(1) + small);
    return chosen(size < all(0.25f), x * series, chosen(x < all(0), -far, far));
}

/* The error function, by formula 7.1.26 of Abramowitz and Stegun, "Handbook of Mathematical Functions". */
INLINE vec error_of(vec x) {
    const float terms[4] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    const vec size = without_sign(x), t = all(1) / plus_product(all(1), all(0.3275911f), size);
    vec sum = all(1.061405429f);
    UNROLLED for (int i = 0; i < 4; i++) sum = plus_product(all(terms[i]), sum, t);
    const vec far = all(1) - sum * t * exponential(-size * size);
    return chosen(x < all(0), -far, far);
}

/* ---- Numbers ---- */

#ifdef FLOAT32

INLINE vec load(const number *from) { return wide(from); }

INLINE float number_of(number x) { return x; }

INLINE void store(number *to, vec value) { memcpy(to, &value, sizeof value); }

INLINE vec rounded(vec value) { return value; }

#else

INLINE vec load(const number *from) { return expanded(from); }

INLINE float number_of(number x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* To the nearest number, in the upper half of each word; to the even one of two. */
INLINE words nearest(vec value) {
    const words bits = (words)value, nan = (words)(value != value);
    return (nan & (bits | 0x400000)) | (~nan & (bits + 0x7fff + ((bits >> 16) & 1)));
}

INLINE void store(number *to, vec value) {
#ifdef DOTS
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    const halves found = __builtin_convertvector(nearest(value) >> 16, halves);
    memcpy(to, &found, sizeof found);
#endif
}

INLINE vec rounded(vec value) {
#ifdef DOTS
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value)), 16);
#else
    return (vec)(nearest(value) & 0xffff0000);
#endif
}

#endif

#ifdef DOTS

INLINE __m512bh two_of(const bf16 *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

#endif

/* ---- Memory ---- */

enum { AHEAD = 4096 };

/* Weights that are multiplied soon: while several columns are computed, the processor would not fetch enough by itself. */
INLINE void fetch(const void *line) { __builtin_prefetch((const char *)line + AHEAD); }

/* Where AVX512-BF16 multiplies without tiles, some processors read more slowly then, and others much faster, see `native.py`. */
#if defined(DOTS) && !defined(TILED)
int64_t fetches = 0;
#define FETCHES fetches
#else
int64_t fetches = 1;
#define FETCHES 1
#endif
