/* Products of inputs that are rounded to 8 bits with packed weights of 8 or 4 bits: exact sums of integers, and the same bits with all
   instructions. */

#pragma once

#include "abi.h"

#ifndef FLOAT32

/* A column's inputs of a group in 8 bits: as in llama.cpp, with a scale of their own, so that an outlier costs its group only.
   Each eight are in the order of the bytes that nibbles are expanded to. */
typedef struct {
    int8_t steps[GROUP];
    float scale, sum; /* sum: of the rounded inputs */
    int32_t whole;    /* sum of the steps */
} Rounded;

/* The scales and zero points of a part's outputs, of a group with 4 bits. */
INLINE vec scale_of(const uint8_t *group, int part) {
    return expanded((const bf16 *)(group + (TILES * LINES + part * WIDE / TILE) * LINE) + part * WIDE % TILE);
}

INLINE vec zero_of(const uint8_t *group, int part) {
    return expanded((const bf16 *)(group + (TILES * LINES + part * WIDE / TILE) * LINE) + part * WIDE % TILE + TILE);
}

/* ---- Four levels, from 0 on, times four steps for each output. ---- */

INLINE ints four_of(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return four - (ints){0};
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

INLINE ints plus_fours(ints sums, ints levels, ints steps) {
#if WIDE == 16
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)levels, (__m512i)steps);
#else
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)levels, (__m256i)steps);
#endif
}

#elif WIDE > 4

/* Sixteen bits suffice for two products of levels from -127 to 127, and for those of a group of nibbles. */
#if WIDE == 16
#define BY_PAIRS(levels, steps) _mm512_maddubs_epi16((__m512i)(levels), (__m512i)(steps))
#define PLUS_PAIRS(one, two) (ints)_mm512_add_epi16((__m512i)(one), two)
#define OF_PAIRS(pairs) (ints)_mm512_madd_epi16((__m512i)(pairs), _mm512_set1_epi16(1))
#else
#define BY_PAIRS(levels, steps) _mm256_maddubs_epi16((__m256i)(levels), (__m256i)(steps))
#define PLUS_PAIRS(one, two) (ints)_mm256_add_epi16((__m256i)(one), two)
#define OF_PAIRS(pairs) (ints)_mm256_madd_epi16((__m256i)(pairs), _mm256_set1_epi16(1))
#endif

/* Levels less 128, with the signs of the steps: their products with the steps' absolute values are the same. */
INLINE ints signed_levels(ints levels, ints steps) {
    levels ^= (int32_t)0x80808080;
#if WIDE == 16
    return (ints)_mm512_mask_sub_epi8((__m512i)levels, _mm512_movepi8_mask((__m512i)steps), _mm512_setzero_si512(), (__m512i)levels);
#else
    return (ints)_mm256_sign_epi8((__m256i)levels, (__m256i)steps);
#endif
}

INLINE ints without_signs(ints steps) {
#if WIDE == 16
    return (ints)_mm512_abs_epi8((__m512i)steps);
#else
    return (ints)_mm256_abs_epi8((__m256i)steps);
#endif
}

#elif defined(__ARM_FEATURE_DOTPROD)

/* Of levels from -128 to 127, which nibbles are, too. */
#define SIGNED_FOURS

INLINE ints plus_fours(ints sums, ints levels, ints steps) {
    return (ints)vdotq_s32((int32x4_t)sums, (int8x16_t)levels, (int8x16_t)steps);
}

#else

INLINE ints plus_fours(ints sums, ints levels, ints steps) {
    UNROLLED for (int i = 0; i < 4; i++) sums += ((levels >> (8 * i)) & 255) * ((steps << (24 - 8 * i)) >> 24);
    return sums;
}

#endif

/* A group's sums of nibbles times steps are collected as this, */
INLINE ints plus_nibbles(ints sums, ints levels, ints steps) {
#ifdef BY_PAIRS
    return PLUS_PAIRS(sums, BY_PAIRS(levels, steps));
#else
    return plus_fours(sums, levels, steps);
#endif
}

/* which is turned into whole numbers at its end. */
INLINE ints sums_of_nibbles(ints sums) {
#ifdef BY_PAIRS
    return OF_PAIRS(sums);
#else
    return sums;
#endif
}

/* The same of bytes, which are stored plus 128, begin with this, */
INLINE ints before_bytes(const Rounded *x) {
#if defined(BY_PAIRS) || defined(SIGNED_FOURS)
    return (ints){0};
#else
    return -ZERO8 * x->whole - (ints){0};
#endif
}

INLINE ints plus_bytes(ints sums, ints levels, ints steps) {
#ifdef BY_PAIRS
    return sums + OF_PAIRS(BY_PAIRS(without_signs(steps), signed_levels(levels, steps)));
#elif defined(SIGNED_FOURS)
    return plus_fours(sums, levels ^ (int32_t)0x80808080, steps);
#else
    return plus_fours(sums, levels, steps);
#endif
}

/* Adds to sums[part][column] the products of two tiles with the columns x, [columns, groups]. */
INLINE void accumulate4of8(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const Rounded *x, int columns) {
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *group = weights + g * BYTES4;
        const Rounded *own[MOST];
        ints part[PARTS][MOST];
        if (FETCHES) UNROLLED for (int line = 0; line < BYTES4; line += LINE) fetch(group + line);
        UNROLLED for (int c = 0; c < columns; c++) own[c] = x + c * groups + g;
        UNROLLED for (int t = 0; t < PARTS; t++) UNROLLED for (int c = 0; c < columns; c++) part[t][c] = (ints){0};
        UNROLLED for (int j = 0; j < 4; j++) {
            ints low[PARTS], high[PARTS];
            UNROLLED for (int t = 0; t < PARTS; t++) {
                const ints packed = ints_of(group + TILES * j * LINE + t * WIDE * 4);
                low[t] = packed & 0x0f0f0f0f;
                high[t] = (packed >> 4) & 0x0f0f0f0f;
            }
            UNROLLED for (int c = 0; c < columns; c++) {
                const ints one = four_of(own[c]->steps + 8 * j), two = four_of(own[c]->steps + 8 * j + 4);
                UNROLLED for (int t = 0; t < PARTS; t++) part[t][c] = plus_nibbles(part[t][c], low[t], one);
                UNROLLED for (int t = 0; t < PARTS; t++) part[t][c] = plus_nibbles(part[t][c], high[t], two);
            }
        }
        UNROLLED for (int t = 0; t < PARTS; t++) {
            const vec scale = scale_of(group, t), least = plus_product(zero_of(group, t), scale, all(-8));
            UNROLLED for (int c = 0; c < columns; c++) {
                const vec found = __builtin_convertvector(sums_of_nibbles(part[t][c]), vec);
                sums[t][c] = plus_product(sums[t][c], found, scale * all(own[c]->scale));
                sums[t][c] = plus_product(sums[t][c], all(own[c]->sum), least);
            }
        }
    }
}

/* The same for weights of 8 bits. */
INLINE void accumulate8of8(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const Rounded *x, int columns) {
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *group = weights + g * BYTES8;
        const Rounded *own[MOST];
        ints part[PARTS][MOST];
        if (FETCHES && columns > 1) UNROLLED for (int line = 0; line < BYTES8; line += LINE) fetch(group + line);
        UNROLLED for (int c = 0; c < columns; c++) {
            own[c] = x + c * groups + g;
            UNROLLED for (int t = 0; t < PARTS; t++) part[t][c] = before_bytes(own[c]);
        }
        UNROLLED for (int j = 0; j < FOURS; j++) {
            ints level[PARTS];
            UNROLLED for (int t = 0; t < PARTS; t++)
                level[t] = ints_of(group + (t * WIDE / TILE * FOURS + j) * LINE + t * WIDE % TILE * 4);
            UNROLLED for (int c = 0; c < columns; c++) {
                const ints four = four_of(own[c]->steps + 4 * j);
                UNROLLED for (int t = 0; t < PARTS; t++) part[t][c] = plus_bytes(part[t][c], level[t], four);
            }
        }
        UNROLLED for (int t = 0; t < PARTS; t++) UNROLLED for (int c = 0; c < columns; c++)
            sums[t][c] = plus_product(sums[t][c], __builtin_convertvector(part[t][c], vec), all(own[c]->scale));
    }
}

/* A group of inputs in 8 bits. */
INLINE void round_group(const bf16 *x, Rounded *to) {
    static const int8_t order[TILE] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
    vec most = all(0);
    UNROLLED for (int i = 0; i < GROUP; i += WIDE) most = greater(most, without_sign(expanded(x + i)));
    const float largest = most_of(most);
    const vec per_unit = all(largest > 0 ? 127 / largest : 0), shift = all(12582912.0f); /* numbers near 1.5 * 2^23 are whole */
    int8_t steps[GROUP];
    ints whole = {0};
    UNROLLED for (int i = 0; i < GROUP; i += WIDE) {
        const ints found = __builtin_convertvector((expanded(x + i) * per_unit + shift) - shift, ints);
        const bytes narrow = __builtin_convertvector(found, bytes);
        memcpy(steps + i, &narrow, sizeof narrow);
        whole += found;
    }
#ifdef __SSSE3__
    const __m128i places = _mm_loadu_si128((const __m128i *)order);
    UNROLLED for (int i = 0; i < GROUP; i += TILE)
        _mm_storeu_si128((__m128i *)(to->steps + i), _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(steps + i)), places));
#else
    for (int i = 0; i < GROUP; i++) to->steps[i] = steps[i / TILE * TILE + order[i % TILE]];
#endif
    to->whole = 0;
    UNROLLED for (int i = 0; i < WIDE; i++) to->whole += whole[i];
    to->scale = largest / 127;
    to->sum = to->scale * (float)to->whole;
}

#endif
