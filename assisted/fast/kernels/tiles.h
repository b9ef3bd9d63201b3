/* Products with packed weights by the matrix tiles of AMX.

   Sixteen columns take little longer than one. A block is up to sixteen columns; the last of several blocks ends with the last
   column, so that all are equally large and some columns are computed twice, with the same result. */

#pragma once

#include "packed.h"

#include <sys/syscall.h>
#include <unistd.h>

/* The sums of a block and two tiles of outputs. */
typedef float Sums[TILE][TILES * TILE];
enum { OF_SUMS = TILES * TILE * sizeof(float) };

/* Inputs whose weights are expanded at once; the most blocks of a product; and the most columns for which integer products of
   weights with 4 bits take less time without tiles, which find the same. Those of 8 bits always do: groups are as wide as half a
   tile, and adding up their sums takes longer than tiles save. */
enum { CHUNK = 256, BLOCKS = 16, ALONE = 64 };

/* Asks the system for the right to use tiles, which it grants a whole process. */
int may_use_tiles(void) {
    enum { ASK = 0x1023, TILE_DATA = 18 };
    return !syscall(SYS_arch_prctl, ASK, TILE_DATA);
}

/* Registers 0 to 3 hold the sums of two blocks (two tiles each), 4 and 5 their inputs, 6 and 7 the weights of two tiles. */
static void configure(int columns, int is_of_8) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } set = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        set.bytes[i] = i == 4 || i == 5 ? (is_of_8 ? GROUP : 2 * GROUP) : LINE;
        set.lines[i] = i < 6 ? columns : is_of_8 ? GROUP / 4 : GROUP / 2;
    }
    _tile_loadconfig(&set);
}

/* The weights of some groups in 8 or 4 bits as bfloat16, in the layout of 16 bits; for integer products as bytes, of each tile of
   a group eight lines of four inputs. */
INLINE void expand(const Product *p, const uint8_t *weights, int64_t groups, bf16 *to) {
    const __m512i levels = _mm512_loadu_si512(LEVELS), nibble = _mm512_set1_epi8(15);
    const int64_t bytes = p->bits == 4 ? BYTES4 : GROUP * TILES * TILE;
    for (int64_t g = 0; g < groups; g++, weights += bytes, to += GROUP * TILES * TILE) {
        for (int64_t i = 0; i < bytes; i += LINE) fetch(weights + i);
        if (p->bits == 8) {
            UNROLLED for (int i = 0; i < GROUP; i++) {
                const __m128i *packed = (const __m128i *)weights + 2 * i;
                const __m512bh both = _mm512_cvtne2ps_pbh(
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(packed + 1))),
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(packed))));
                _mm512_store_si512(to + 32 * i, (__m512i)both);
            }
        } else {
            UNROLLED for (int j = 0; j < 4; j++) UNROLLED for (int t = 0; t < TILES; t++) {
                __m512i packed = _mm512_loadu_si512(weights + (TILES * j + t) * LINE);
                if (p->input_bits == 8) {
                    uint8_t *line = (uint8_t *)to + (t * GROUP / 4 + 2 * j) * LINE;
                    _mm512_store_si512(line, _mm512_and_si512(packed, nibble));
                    _mm512_store_si512(line + LINE, _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble));
                    continue;
                }
                UNROLLED for (int n = 0; n < 4; n++) {
                    _mm512_store_si512(to + ((4 * j + n) * TILES + t) * 32, _mm512_permutexvar_epi16(packed, levels));
                    packed = _mm512_srli_epi16(packed, 4);
                }
            }
        }
    }
}

/* Loads the weights of a group and multiplies them with the inputs of one or two blocks. stride: of columns, in bytes. */
INLINE void multiply_group(const bf16 *weights, const bf16 *one, const bf16 *two, int64_t stride, int blocks) {
    _tile_loadd(6, weights, 2 * LINE);
    _tile_loadd(7, weights + LINE / 2, 2 * LINE);
    _tile_loadd(4, one, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (blocks == 1) return;
    _tile_loadd(5, two, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void put_sums(void *one, void *two, int blocks) {
    _tile_stored(0, one, OF_SUMS);
    _tile_stored(1, (float *)one + TILE, OF_SUMS);
    if (blocks == 1) return;
    _tile_stored(2, two, OF_SUMS);
    _tile_stored(3, (float *)two + TILE, OF_SUMS);
}

INLINE void begin_sums(int blocks) {
    _tile_zero(0);
    _tile_zero(1);
    if (blocks == 1) return;
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void get_sums(const void *one, const void *two, int blocks) {
    _tile_loadd(0, one, OF_SUMS);
    _tile_loadd(1, (const float *)one + TILE, OF_SUMS);
    if (blocks == 1) return;
    _tile_loadd(2, two, OF_SUMS);
    _tile_loadd(3, (const float *)two + TILE, OF_SUMS);
}

/* `multiply_group` with integers, of which `expand` makes bytes. */
INLINE void multiply_group_of_8(const uint8_t *weights, const int8_t *one, const int8_t *two, int64_t stride, int blocks) {
    _tile_loadd(6, weights, LINE);
    _tile_loadd(7, weights + GROUP * TILE, LINE);
    _tile_loadd(4, one, stride);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (blocks == 1) return;
    _tile_loadd(5, two, stride);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
}

/* Adds to the sums of a block those of a group of 4 bits. of_groups: of the block's first column. */
INLINE void add_group(
    const uint8_t *beside, Sums part, Sums sums, const float *of_groups, int64_t groups, int columns) {
    UNROLLED for (int t = 0; t < TILES; t++) {
        const bf16 *of_group = (const bf16 *)(beside + t * LINE);
        const __m512 scale = (__m512)load(of_group), zero = (__m512)load(of_group + TILE);
        for (int c = 0; c < columns; c++) {
            float *to = sums[c] + t * TILE;
            const __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(part[c] + t * TILE), scale, _mm512_load_ps(to));
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_set1_ps(of_groups[c * groups]), zero, sum));
        }
    }
}

/* The same with integer products, in the order of `accumulate4of8`. */
INLINE void add_group_of_8(
    const uint8_t *beside, Sums part, Sums sums, const Rounded *x, int64_t groups, int columns) {
    const __m512 eight = _mm512_set1_ps(8);
    UNROLLED for (int t = 0; t < TILES; t++) {
        const bf16 *of_group = (const bf16 *)(beside + t * LINE);
        const __m512 scale = (__m512)load(of_group), least = _mm512_fnmadd_ps(eight, scale, (__m512)load(of_group + TILE));
        for (int c = 0; c < columns; c++) {
            float *to = sums[c] + t * TILE;
            const Rounded *own = x + c * groups;
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(own->scale));
            const __m512 found = _mm512_cvtepi32_ps(_mm512_load_si512(part[c] + t * TILE));
            const __m512 sum = _mm512_fmadd_ps(found, both, _mm512_load_ps(to));
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_set1_ps(own->sum), least, sum));
        }
    }
}

/* What `blocks_of` knows of two tiles and its columns. */
typedef struct {
    const Product *p;
    const bf16 *x;
    const void *of_groups;
    int64_t groups, begin[BLOCKS]; /* begin: the first column of each block */
    int columns;                   /* of a block */
} Blocks;

/* Adds the products of groups [from, to) to the sums of blocks b and, if both is 2, the next one. */
INLINE void add_wide(const Blocks *s, const bf16 *weights, int64_t from, int64_t to, Sums *sums, int b, int both) {
    const int64_t inputs = s->p->inputs;
    const bf16 *one = s->x + s->begin[b] * inputs, *two = s->x + s->begin[b + both - 1] * inputs;
    if (from == 0)
        begin_sums(both);
    else
        get_sums(sums[b], sums[b + 1], both);
    for (int64_t g = from; g < to; g++, weights += GROUP * TILES * TILE)
        multiply_group(weights, one + g * GROUP, two + g * GROUP, inputs * sizeof(bf16), both);
    put_sums(sums[b], sums[b + 1], both);
}

/* The same for weights of 4 bits, whose groups have scales. own: the packed weights of these groups; expanded: of `expand`. */
INLINE void add_narrow(
    const Blocks *s, const uint8_t *own, const bf16 *expanded, int64_t from, int64_t to, Sums *sums, int b, int both) {
    _Alignas(LINE) Sums part[2];
    const int64_t inputs = s->p->inputs, one = s->begin[b], two = s->begin[b + both - 1];
    for (int64_t g = from; g < to; g++, own += BYTES4, expanded += GROUP * TILES * TILE) {
        const uint8_t *beside = own + TILES * LINES * LINE;
        begin_sums(both);
        if (s->p->input_bits == 16) {
            const float *sums_of_groups = (const float *)s->of_groups + g;
            multiply_group(
                expanded, s->x + one * inputs + g * GROUP, s->x + two * inputs + g * GROUP, inputs * sizeof(bf16), both);
            put_sums(part[0], part[1], both);
            for (int i = 0; i < both; i++)
                add_group(beside, part[i], sums[b + i], sums_of_groups + s->begin[b + i] * s->groups, s->groups, s->columns);
        } else {
            const Rounded *x = (const Rounded *)s->of_groups + g;
            multiply_group_of_8(
                (const uint8_t *)expanded, x[one * s->groups].steps, x[two * s->groups].steps, s->groups * sizeof(Rounded), both);
            put_sums(part[0], part[1], both);
            for (int i = 0; i < both; i++) {
                const Rounded *of_block = x + s->begin[b + i] * s->groups;
                add_group_of_8(beside, part[i], sums[b + i], of_block, s->groups, s->columns);
            }
        }
    }
}

/* Two tiles from output `first` on, of n columns, at most `BLOCKS` blocks; see `two_tiles_of`. */
static void blocks_of(
    const Product *p, int64_t first, const bf16 *x, const void *of_groups, const bf16 *residual, bf16 *y, int64_t n) {
    _Alignas(LINE) Sums sums[BLOCKS];
    _Alignas(LINE) bf16 panel[CHUNK * TILES * TILE];
    Blocks s = {.p = p, .x = x, .of_groups = of_groups, .groups = p->inputs / GROUP, .columns = n < TILE ? (int)n : TILE};
    const int blocks = (int)((n + TILE - 1) / TILE);
    for (int b = 0; b < blocks; b++) s.begin[b] = b < blocks - 1 ? b * TILE : n - s.columns;
    const int by_groups = p->bits == 4, expands = p->bits != 16;
    if (by_groups) memset(sums, 0, blocks * sizeof(Sums));
    const uint8_t *weights = weights_of(p, first);
    const int64_t bytes = p->bits == 4 ? BYTES4 : GROUP * TILES * TILE * p->bits / 8; /* of a group */
    const int64_t chunk = p->bits == 16 ? s.groups : CHUNK / GROUP;
    for (int64_t from = 0; from < s.groups; from += chunk) {
        const int64_t to = s.groups - from < chunk ? s.groups : from + chunk;
        const uint8_t *own = weights + from * bytes;
        if (expands) {
            expand(p, own, to - from, panel);
            __asm__ volatile("" ::: "memory"); /* not all compilers know that tiles are loaded from memory */
        }
        for (int b = 0; b < blocks; b += 2) {
            const int both = b + 1 < blocks ? 2 : 1;
            if (by_groups)
                add_narrow(&s, own, expands ? panel : (const bf16 *)own, from, to, sums, b, both);
            else
                add_wide(&s, expands ? panel : (const bf16 *)own, from, to, sums, b, both);
        }
    }
    for (int b = 0; b < blocks; b++)
        for (int c = 0; c < s.columns; c++) UNROLLED for (int t = 0; t < TILES; t++) {
            const int64_t at = first + TILE * t, to = (s.begin[b] + c) * p->outputs + at;
            finish(p, wide(sums[b][c] + TILE * t), at, residual ? residual + to : NULL, y + to);
        }
}
