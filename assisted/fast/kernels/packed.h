/* Products with packed weights, which are read once for several columns, two tiles of sixteen outputs at a time, in the order of
   memory: then the processor fetches ahead by itself. */

#pragma once

#include "integers.h"
#include "rows.h"

#ifdef FLOAT32

const int64_t most_of_group = SIDE_BY_SIDE ? GROUP : 0;

INLINE int64_t of_group(const Product *p) { return SIDE_BY_SIDE && p->rows ? GROUP : 0; }

static void groups_of(const Product *p, const number *x, int64_t n, int64_t from, int64_t to, float *scratch) {
    if (SIDE_BY_SIDE && p->rows) arrange(p, x, n, from, to, scratch);
}

INLINE void accumulate(
    vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const number *x, const void *of_groups, int columns) {
    for (int64_t k = 0; k < p->inputs; k++) {
        const float *line = (const float *)weights + k * TILES * TILE;
        vec one[MOST];
        UNROLLED for (int t = 0; t < TILES; t++) fetch(line + t * TILE);
        UNROLLED for (int c = 0; c < columns; c++) one[c] = all(x[c * p->inputs + k]);
        UNROLLED for (int t = 0; t < PARTS; t++) {
            const vec weight = wide(line + t * WIDE);
            UNROLLED for (int c = 0; c < columns; c++) sums[t][c] = plus_product(sums[t][c], weight, one[c]);
        }
    }
}

#else

/* ---- Products of bfloat16 ---- */

#ifdef DOTS

const int64_t most_of_group = GROUP / 2;
_Static_assert(sizeof(Rounded) <= GROUP / 2 * sizeof(float), "room for the inputs of a group, whether they are rounded or not");

/* The levels -8 to 7 of four bits; twice, because a permutation looks at five bits of its indices. */
static const bf16 LEVELS[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
};

/* Adds to sums[part][column] the products of two tiles with the columns x, [columns, inputs]; weights of 4 bits also take the
   sums of each column's groups of inputs. */
INLINE void accumulate4(
    vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const bf16 *x, const float *of_groups, int columns) {
    const __m512i levels = _mm512_loadu_si512(LEVELS);
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        __m512 part[TILES][MOST];
        UNROLLED for (int t = 0; t < TILES; t++) UNROLLED for (int c = 0; c < columns; c++) part[t][c] = _mm512_setzero_ps();
        UNROLLED for (int j = 0; j < 4; j++) {
            __m512i packed[TILES];
            UNROLLED for (int t = 0; t < TILES; t++) {
                packed[t] = _mm512_loadu_si512(weights + g * BYTES4 + (TILES * j + t) * LINE);
            }
            UNROLLED for (int n = 0; n < 4; n++) {
                __m512bh level[TILES];
                UNROLLED for (int t = 0; t < TILES; t++) {
                    level[t] = (__m512bh)_mm512_permutexvar_epi16(packed[t], levels);
                    packed[t] = _mm512_srli_epi16(packed[t], 4);
                }
                UNROLLED for (int c = 0; c < columns; c++) {
                    const __m512bh both = two_of(x + c * p->inputs + g * GROUP + 8 * j + 2 * n);
                    UNROLLED for (int t = 0; t < TILES; t++) part[t][c] = _mm512_dpbf16_ps(part[t][c], level[t], both);
                }
            }
        }
        UNROLLED for (int t = 0; t < TILES; t++) {
            const bf16 *of_group = (const bf16 *)(weights + g * BYTES4 + (TILES * LINES + t) * LINE);
            const __m512 scale = (__m512)load(of_group), zero = (__m512)load(of_group + TILE);
            UNROLLED for (int c = 0; c < columns; c++) {
                sums[t][c] = plus_product(sums[t][c], (vec)part[t][c], (vec)scale);
                sums[t][c] = plus_product(sums[t][c], all(of_groups[c * groups + g]), (vec)zero);
            }
        }
    }
}

INLINE void accumulate8(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const bf16 *x, int columns) {
    const int64_t pairs = p->inputs / 2;
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh level[TILES];
        UNROLLED for (int t = 0; t < TILES; t++) {
            const __m128i *packed = (const __m128i *)(weights + (k * TILES + t) * 2 * TILE);
            level[t] = _mm512_cvtne2ps_pbh(
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(packed + 1))),
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(packed))));
        }
        UNROLLED for (int c = 0; c < columns; c++) {
            const __m512bh both = two_of(x + c * p->inputs + 2 * k);
            UNROLLED for (int t = 0; t < TILES; t++) sums[t][c] = (vec)_mm512_dpbf16_ps((__m512)sums[t][c], level[t], both);
        }
    }
}

INLINE void accumulate16(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const bf16 *x, int columns) {
    const int64_t pairs = p->inputs / 2;
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh weight[TILES];
        UNROLLED for (int t = 0; t < TILES; t++) {
            weight[t] = (__m512bh)_mm512_loadu_si512(weights + (k * TILES + t) * 4 * TILE);
        }
        UNROLLED for (int c = 0; c < columns; c++) {
            const __m512bh both = two_of(x + c * p->inputs + 2 * k);
            UNROLLED for (int t = 0; t < TILES; t++) sums[t][c] = (vec)_mm512_dpbf16_ps((__m512)sums[t][c], weight[t], both);
        }
    }
}

/* What products need of groups [from, to) of the inputs x [n, inputs]: rounded or arranged ones, or, for weights of 4 bits, their
   sums. */
static void groups_of(const Product *p, const bf16 *x, int64_t n, int64_t from, int64_t to, float *scratch) {
    if (p->rows) {
        arrange(p, x, n, from, to, scratch);
    } else if (p->input_bits == 8) {
        for (int64_t g = from; g < to; g++) round_group(x + g * GROUP, (Rounded *)scratch + g);
    } else if (p->bits == 4) {
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        for (int64_t g = from; g < to; g++)
            scratch[g] = _mm512_reduce_add_ps(
                _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)_mm512_loadu_si512(x + g * GROUP), ones));
    }
}

/* Numbers that a group of inputs takes beside the inputs. */
INLINE int64_t of_group(const Product *p) {
    return p->rows ? GROUP / 2 : p->input_bits == 8 ? sizeof(Rounded) / sizeof(float) : p->bits == 4;
}

#define INPUTS x
#define INPUTS4 x, of_groups

#else

/* A column's inputs of a group in float32. */
typedef struct {
    float inputs[GROUP], sum;
} Expanded;

const int64_t most_of_group = sizeof(Expanded) / sizeof(float);

/* Adds to sums[part][column] the products of two tiles with the columns x, [columns, groups]. */
INLINE void accumulate4(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const Expanded *x, int columns) {
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *group = weights + g * BYTES4;
        const Expanded *own[MOST];
        vec part[PARTS][MOST];
        UNROLLED for (int line = 0; line < BYTES4; line += LINE) fetch(group + line);
        UNROLLED for (int c = 0; c < columns; c++) own[c] = x + c * groups + g;
        UNROLLED for (int t = 0; t < PARTS; t++) UNROLLED for (int c = 0; c < columns; c++) part[t][c] = all(0);
        for (int j = 0; j < 4; j++) UNROLLED for (int i = 0; i < 8; i++) {
            vec one[MOST];
            UNROLLED for (int c = 0; c < columns; c++) one[c] = all(own[c]->inputs[8 * j + i]);
            UNROLLED for (int t = 0; t < PARTS; t++) {
                const words packed = words_of(group + TILES * j * LINE + t * WIDE * 4);
                const vec level = __builtin_convertvector((ints)((packed >> (16 * (i % 2) + 4 * (i / 2))) & 15), vec);
                UNROLLED for (int c = 0; c < columns; c++) part[t][c] = plus_product(part[t][c], level, one[c]);
            }
        }
        UNROLLED for (int t = 0; t < PARTS; t++) {
            const vec scale = scale_of(group, t), least = plus_product(zero_of(group, t), scale, all(-8));
            UNROLLED for (int c = 0; c < columns; c++) {
                sums[t][c] = plus_product(sums[t][c], part[t][c], scale);
                sums[t][c] = plus_product(sums[t][c], all(own[c]->sum), least);
            }
        }
    }
}

INLINE void accumulate8(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const Expanded *x, int columns) {
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) for (int i = 0; i < GROUP; i += 2) {
        const uint8_t *line = weights + (g * GROUP + i) * TILES * TILE;
        fetch(line);
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            vec one[MOST];
            UNROLLED for (int c = 0; c < columns; c++) one[c] = all(x[c * groups + g].inputs[i + odd]);
            UNROLLED for (int t = 0; t < PARTS; t++) {
                shorts packed;
                memcpy(&packed, line + t * WIDE * 2, sizeof packed);
                const ints pair = __builtin_convertvector(packed, ints);
                const vec level = __builtin_convertvector(odd ? pair >> 8 : (pair << 24) >> 24, vec);
                UNROLLED for (int c = 0; c < columns; c++) sums[t][c] = plus_product(sums[t][c], level, one[c]);
            }
        }
    }
}

INLINE void accumulate16(vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const Expanded *x, int columns) {
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) for (int i = 0; i < GROUP; i += 2) {
        const uint8_t *line = weights + (g * GROUP + i) * TILES * TILE * 2;
        UNROLLED for (int t = 0; t < TILES; t++) fetch(line + t * LINE);
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            vec one[MOST];
            UNROLLED for (int c = 0; c < columns; c++) one[c] = all(x[c * groups + g].inputs[i + odd]);
            UNROLLED for (int t = 0; t < PARTS; t++) {
                const words pair = words_of(line + t * WIDE * 4);
                const vec weight = (vec)(odd ? pair & 0xffff0000 : pair << 16);
                UNROLLED for (int c = 0; c < columns; c++) sums[t][c] = plus_product(sums[t][c], weight, one[c]);
            }
        }
    }
}

/* What products need of groups [from, to) of the inputs x [n, inputs]. */
static void groups_of(const Product *p, const bf16 *x, int64_t n, int64_t from, int64_t to, float *scratch) {
    if (p->rows) {
        arrange(p, x, n, from, to, scratch);
        return;
    }
    for (int64_t g = from; g < to; g++) {
        if (p->input_bits == 8) {
            round_group(x + g * GROUP, (Rounded *)scratch + g);
            continue;
        }
        Expanded *own = (Expanded *)scratch + g;
        vec sum = all(0);
        UNROLLED for (int i = 0; i < GROUP; i += WIDE) {
            const vec found = expanded(x + g * GROUP + i);
            sum += found;
            memcpy(own->inputs + i, &found, sizeof found);
        }
        own->sum = sum_of(sum);
    }
}

/* Numbers that a group of inputs takes beside the inputs. */
INLINE int64_t of_group(const Product *p) {
    return p->input_bits == 8 ? sizeof(Rounded) / sizeof(float) : p->rows ? GROUP : sizeof(Expanded) / sizeof(float);
}

#define INPUTS of_groups
#define INPUTS4 of_groups

#endif

INLINE void accumulate(
    vec sums[PARTS][MOST], const Product *p, const uint8_t *weights, const number *x, const void *of_groups, int columns) {
    if (p->input_bits == 8 && p->bits == 4)
        accumulate4of8(sums, p, weights, of_groups, columns);
    else if (p->input_bits == 8)
        accumulate8of8(sums, p, weights, of_groups, columns);
    else if (p->bits == 4)
        accumulate4(sums, p, weights, INPUTS4, columns);
    else if (p->bits == 8)
        accumulate8(sums, p, weights, INPUTS, columns);
    else
        accumulate16(sums, p, weights, INPUTS, columns);
}

#endif

INLINE const uint8_t *weights_of(const Product *p, int64_t first) {
    const int64_t bytes = p->bits == 4 ? p->inputs / GROUP * BYTES4 : p->inputs * TILES * TILE * p->bits / 8;
    return p->weights + first / (TILES * TILE) * bytes;
}

/* Two tiles from output `first` on, of at most MOST columns. residual: added to the rounded result, or NULL. */
INLINE void two_tiles_of(
    const Product *p, int64_t first, const number *x, const void *of_groups, const number *residual, number *y, int columns) {
    vec sums[PARTS][MOST];
    UNROLLED for (int t = 0; t < PARTS; t++) UNROLLED for (int c = 0; c < columns; c++) sums[t][c] = all(0);
    accumulate(sums, p, weights_of(p, first), x, of_groups, columns);
    UNROLLED for (int t = 0; t < PARTS; t++) UNROLLED for (int c = 0; c < columns; c++) {
        const int64_t at = first + WIDE * t, to = c * p->outputs + at;
        finish(p, sums[t][c], at, residual ? residual + to : NULL, y + to);
    }
}

#define COLUMNS(columns)                                                        \
    case columns:                                                               \
        two_tiles_of(p, first, x, of_groups, residual, y, columns);             \
        break;

static void two_tiles(
    const Product *p, int64_t first, const number *x, const void *of_groups, const number *residual, number *y, int columns) {
    switch (columns) {
        COLUMNS(1) COLUMNS(2)
#if WIDE > 4
        COLUMNS(3)
#endif
#if WIDE > 8
        COLUMNS(4) COLUMNS(5) COLUMNS(6) COLUMNS(7) COLUMNS(8)
#endif
    }
}
