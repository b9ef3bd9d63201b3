/* Forward passes over few columns on a processor with AVX512-BF16: products with weights of 16, 8 or 4 bits, and the layers of
   the Llama family made of them.

   Every column is computed by the same operations in the same order, however many columns come along, wherever it stands among
   them, and whatever the slots hold that it does not see. So a pass over a draft has the bits of passes over single columns.
   Weights are read once for up to eight columns, two tiles of sixteen outputs at a time, in the order of memory: then the
   processor fetches ahead by itself. Numbers are bfloat16 and sums float32; results are rounded where transformers
   rounds them. */

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef uint16_t bf16;

enum { TILE = 16, TILES = 2, MOST = 8, GROUP = 32 };
/* A group with 4 bits: lines of both tiles in turn, so that memory is read in order; the fifth has scales and zero points. */
enum { LINE = 64, LINES = TILE * GROUP / 2 / LINE, BYTES4 = (LINES + 1) * TILES * LINE };

INLINE __m512 load(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

INLINE void store(bf16 *to, __m512 value) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(value)); }

INLINE __m512 rounded(__m512 value) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
}

INLINE __m512bh two_of(const bf16 *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

INLINE __m512i four_of(const int8_t *from) { return (__m512i)_mm512_broadcastss_ps(_mm_load_ss((const float *)from)); }

/* ---- Products ---- */

typedef struct {
    const uint8_t *weights; /* of two tiles after two tiles, see `native.py` */
    const float *scales;    /* [outputs], of 8 bits only */
    const float *bias;      /* [outputs], or NULL */
    int64_t outputs;        /* a multiple of 32 */
    int64_t inputs;         /* a multiple of 32 */
    int64_t bits;           /* 16, 8 or 4 */
    int64_t input_bits;     /* 16, or 8 beside weights of 4 */
} Product;

/* A column's inputs of a group in 8 bits: as in llama.cpp, with a scale of their own, so that an outlier costs its group only.
   Each eight are in the order of the bytes that nibbles are expanded to. */
typedef struct {
    int8_t steps[GROUP];
    float scale, sum; /* sum: of the rounded inputs */
} Rounded;

/* The levels -8 to 7 of four bits; twice, because a permutation looks at five bits of its indices. */
static const bf16 LEVELS[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
};

/* Adds to sums[tile][column] the products of two tiles with the columns x, [columns, inputs]; weights of 4 bits also take the
   sums of each column's groups of inputs. */
INLINE void accumulate4(
    __m512 sums[TILES][MOST], const Product *p, const uint8_t *weights, const bf16 *x, const float *of_groups, int columns) {
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
            const __m512 scale = load(of_group), zero = load(of_group + TILE);
            UNROLLED for (int c = 0; c < columns; c++) {
                sums[t][c] = _mm512_fmadd_ps(part[t][c], scale, sums[t][c]);
                sums[t][c] = _mm512_fmadd_ps(_mm512_set1_ps(of_groups[c * groups + g]), zero, sums[t][c]);
            }
        }
    }
}

/* The same for rounded inputs, [columns, groups], with integer products. */
INLINE void accumulate4of8(
    __m512 sums[TILES][MOST], const Product *p, const uint8_t *weights, const Rounded *x, int columns) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512 eight = _mm512_set1_ps(8);
    const int64_t groups = p->inputs / GROUP;
    for (int64_t g = 0; g < groups; g++) {
        __m512i part[TILES][MOST];
        UNROLLED for (int t = 0; t < TILES; t++) UNROLLED for (int c = 0; c < columns; c++) part[t][c] = _mm512_setzero_si512();
        UNROLLED for (int j = 0; j < 4; j++) {
            __m512i low[TILES], high[TILES];
            UNROLLED for (int t = 0; t < TILES; t++) {
                const __m512i packed = _mm512_loadu_si512(weights + g * BYTES4 + (TILES * j + t) * LINE);
                low[t] = _mm512_and_si512(packed, nibble);
                high[t] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
            }
            UNROLLED for (int c = 0; c < columns; c++) {
                const __m512i one = four_of(x[c * groups + g].steps + 8 * j), two = four_of(x[c * groups + g].steps + 8 * j + 4);
                UNROLLED for (int t = 0; t < TILES; t++) part[t][c] = _mm512_dpbusd_epi32(part[t][c], low[t], one);
                UNROLLED for (int t = 0; t < TILES; t++) part[t][c] = _mm512_dpbusd_epi32(part[t][c], high[t], two);
            }
        }
        UNROLLED for (int t = 0; t < TILES; t++) {
            const bf16 *of_group = (const bf16 *)(weights + g * BYTES4 + (TILES * LINES + t) * LINE);
            const __m512 scale = load(of_group), least = _mm512_fnmadd_ps(eight, scale, load(of_group + TILE));
            UNROLLED for (int c = 0; c < columns; c++) {
                const Rounded *own = x + c * groups + g;
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(own->scale));
                sums[t][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[t][c]), both, sums[t][c]);
                sums[t][c] = _mm512_fmadd_ps(_mm512_set1_ps(own->sum), least, sums[t][c]);
            }
        }
    }
}

/* A group of inputs in 8 bits. */
INLINE void round_group(const bf16 *x, Rounded *to) {
    const __m512 one = load(x), two = load(x + TILE);
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(two)));
    const __m512 per_unit = _mm512_set1_ps(most > 0 ? 127 / most : 0);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(one, per_unit));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(two, per_unit));
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128((__m128i *)to->steps, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(first), order));
    _mm_storeu_si128((__m128i *)(to->steps + TILE), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(second), order));
    to->scale = most / 127;
    to->sum = to->scale * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
}

INLINE void accumulate8(
    __m512 sums[TILES][MOST], const Product *p, const uint8_t *weights, const bf16 *x, int columns) {
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
            UNROLLED for (int t = 0; t < TILES; t++) sums[t][c] = _mm512_dpbf16_ps(sums[t][c], level[t], both);
        }
    }
}

INLINE void accumulate16(
    __m512 sums[TILES][MOST], const Product *p, const uint8_t *weights, const bf16 *x, int columns) {
    const int64_t pairs = p->inputs / 2;
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh weight[TILES];
        UNROLLED for (int t = 0; t < TILES; t++)
            weight[t] = (__m512bh)_mm512_loadu_si512(weights + (k * TILES + t) * 4 * TILE);
        UNROLLED for (int c = 0; c < columns; c++) {
            const __m512bh both = two_of(x + c * p->inputs + 2 * k);
            UNROLLED for (int t = 0; t < TILES; t++) sums[t][c] = _mm512_dpbf16_ps(sums[t][c], weight[t], both);
        }
    }
}

/* The sixteen outputs of a column from `at` on. residual: added to the rounded result, or NULL. */
INLINE void finish(const Product *p, __m512 sum, int64_t at, const bf16 *residual, bf16 *y) {
    if (p->bits == 8) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(p->scales + at));
    if (p->bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(p->bias + at));
    if (residual) sum = _mm512_add_ps(rounded(sum), load(residual));
    store(y, sum);
}

INLINE const uint8_t *weights_of(const Product *p, int64_t first) {
    const int64_t bytes = p->bits == 4 ? p->inputs / GROUP * BYTES4 : p->inputs * TILES * TILE * p->bits / 8;
    return p->weights + first / (TILES * TILE) * bytes;
}

/* Two tiles from output `first` on, of at most eight columns. residual: added to the rounded result, or NULL. */
INLINE void two_tiles_of(
    const Product *p, int64_t first, const bf16 *x, const void *of_groups, const bf16 *residual, bf16 *y, int columns) {
    __m512 sums[TILES][MOST];
    const uint8_t *weights = weights_of(p, first);
    UNROLLED for (int t = 0; t < TILES; t++) UNROLLED for (int c = 0; c < columns; c++) sums[t][c] = _mm512_setzero_ps();
    if (p->bits == 4 && p->input_bits == 8)
        accumulate4of8(sums, p, weights, of_groups, columns);
    else if (p->bits == 4)
        accumulate4(sums, p, weights, x, of_groups, columns);
    else if (p->bits == 8)
        accumulate8(sums, p, weights, x, columns);
    else
        accumulate16(sums, p, weights, x, columns);
    UNROLLED for (int t = 0; t < TILES; t++) UNROLLED for (int c = 0; c < columns; c++) {
        const int64_t at = first + TILE * t, to = c * p->outputs + at;
        finish(p, sums[t][c], at, residual ? residual + to : NULL, y + to);
    }
}

#define COLUMNS(columns)                                                        \
    case columns:                                                               \
        two_tiles_of(p, first, x, of_groups, residual, y, columns);             \
        break;

static void two_tiles(
    const Product *p, int64_t first, const bf16 *x, const void *of_groups, const bf16 *residual, bf16 *y, int columns) {
    switch (columns) { COLUMNS(1) COLUMNS(2) COLUMNS(3) COLUMNS(4) COLUMNS(5) COLUMNS(6) COLUMNS(7) COLUMNS(8) }
}

#ifdef __AMX_BF16__
/* ---- Products of a processor with matrix tiles (AMX) ---- */

/* Sixteen columns take little longer than one. A block is up to sixteen columns; the last of several blocks ends with the last
   column, so that all are equally large and some columns are computed twice, with the same result. Sums of a block and two
   tiles of outputs: */
typedef float Sums[TILE][TILES * TILE];
enum { OF_SUMS = TILES * TILE * sizeof(float) };

/* Inputs whose weights are expanded at once, and the most blocks of a product. */
enum { CHUNK = 256, BLOCKS = 16, FEW = 4 };

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
    for (int64_t g = 0; g < groups; g++, weights += bytes, to += GROUP * TILES * TILE)
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

/* `multiply_group` with integers: weights of `expand_to_bytes`. */
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
        const __m512 scale = load(of_group), zero = load(of_group + TILE);
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
        const __m512 scale = load(of_group), least = _mm512_fnmadd_ps(eight, scale, load(of_group + TILE));
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

/* The same for weights of 4 bits, whose groups have scales. own: the packed weights of these groups; wide: the expanded ones. */
INLINE void add_narrow(
    const Blocks *s, const uint8_t *own, const bf16 *wide, int64_t from, int64_t to, Sums *sums, int b, int both) {
    _Alignas(LINE) Sums part[2];
    const int64_t inputs = s->p->inputs, one = s->begin[b], two = s->begin[b + both - 1];
    for (int64_t g = from; g < to; g++, own += BYTES4, wide += GROUP * TILES * TILE) {
        const uint8_t *beside = own + TILES * LINES * LINE;
        begin_sums(both);
        if (s->p->input_bits == 16) {
            const float *sums_of_groups = (const float *)s->of_groups + g;
            multiply_group(
                wide, s->x + one * inputs + g * GROUP, s->x + two * inputs + g * GROUP, inputs * sizeof(bf16), both);
            put_sums(part[0], part[1], both);
            for (int i = 0; i < both; i++)
                add_group(beside, part[i], sums[b + i], sums_of_groups + s->begin[b + i] * s->groups, s->groups, s->columns);
        } else {
            const Rounded *x = (const Rounded *)s->of_groups + g;
            multiply_group_of_8(
                (const uint8_t *)wide, x[one * s->groups].steps, x[two * s->groups].steps, s->groups * sizeof(Rounded), both);
            put_sums(part[0], part[1], both);
            for (int i = 0; i < both; i++)
                add_group_of_8(beside, part[i], sums[b + i], x + s->begin[b + i] * s->groups, s->groups, s->columns);
        }
    }
}

/* Two tiles from output `first` on, of n columns, at most `BLOCKS` blocks; see `two_tiles_of`. */
static void blocks_of(
    const Product *p, int64_t first, const bf16 *x, const void *of_groups, const bf16 *residual, bf16 *y, int64_t n) {
    _Alignas(LINE) Sums sums[BLOCKS];
    _Alignas(LINE) bf16 expanded[CHUNK * TILES * TILE];
    Blocks s = {.p = p, .x = x, .of_groups = of_groups, .groups = p->inputs / GROUP, .columns = n < TILE ? (int)n : TILE};
    const int blocks = (int)((n + TILE - 1) / TILE);
    for (int b = 0; b < blocks; b++) s.begin[b] = b < blocks - 1 ? b * TILE : n - s.columns;
    if (p->bits == 4) memset(sums, 0, blocks * sizeof(Sums));
    const uint8_t *weights = weights_of(p, first);
    const int64_t bytes = p->bits == 4 ? BYTES4 : GROUP * TILES * TILE * p->bits / 8; /* of a group */
    const int64_t chunk = p->bits == 16 ? s.groups : CHUNK / GROUP;
    for (int64_t from = 0; from < s.groups; from += chunk) {
        const int64_t to = s.groups - from < chunk ? s.groups : from + chunk;
        const uint8_t *own = weights + from * bytes;
        if (p->bits < 16) {
            expand(p, own, to - from, expanded);
            __asm__ volatile("" ::: "memory"); /* not all compilers know that tiles are loaded from memory */
        }
        for (int b = 0; b < blocks; b += 2) {
            const int both = b + 1 < blocks ? 2 : 1;
            if (p->bits == 4)
                add_narrow(&s, own, expanded, from, to, sums, b, both);
            else
                add_wide(&s, p->bits == 16 ? (const bf16 *)own : expanded, from, to, sums, b, both);
        }
    }
    for (int b = 0; b < blocks; b++)
        for (int c = 0; c < s.columns; c++) UNROLLED for (int t = 0; t < TILES; t++) {
            const int64_t at = first + TILE * t, to = (s.begin[b] + c) * p->outputs + at;
            finish(p, _mm512_load_ps(sums[b][c] + TILE * t), at, residual ? residual + to : NULL, y + to);
        }
}
#endif

/* What weights of 4 bits need of groups [from, to) of the inputs: rounded ones, or their sums. */
static void groups_of(const Product *p, const bf16 *x, int64_t from, int64_t to, float *scratch) {
    if (p->input_bits == 8) {
        for (int64_t g = from; g < to; g++) round_group(x + g * GROUP, (Rounded *)scratch + g);
    } else if (p->bits == 4) {
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        for (int64_t g = from; g < to; g++)
            scratch[g] = _mm512_reduce_add_ps(
                _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)_mm512_loadu_si512(x + g * GROUP), ones));
    }
}

/* y [n, outputs] = x [n, inputs] times the weights, within a parallel region. scratch: n * inputs / 32 `Rounded`, shared by all
   threads; own: a thread's own, as large. For few columns, computing the same in each thread takes less time than waiting. */
static void product(const Product *p, const bf16 *x, int64_t n, const bf16 *residual, bf16 *y, float *scratch, float *own) {
    const int64_t groups = p->inputs / GROUP, of_group = p->input_bits == 8 ? sizeof(Rounded) / sizeof(float) : 1;
    if (n > MOST && p->bits == 4) {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++) groups_of(p, x, c * groups, (c + 1) * groups, scratch);
    } else {
        groups_of(p, x, 0, n * groups, scratch = own);
    }
#ifdef __AMX_BF16__
    if (p->input_bits == 16 || n > FEW) {
        for (int64_t c = 0; c < n; c += BLOCKS * TILE) {
            const int64_t to = c * p->outputs, columns = n - c < BLOCKS * TILE ? n - c : BLOCKS * TILE;
            configure(columns < TILE ? (int)columns : TILE, p->input_bits == 8);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < p->outputs / (TILE * TILES); t++)
                blocks_of(
                    p, t * TILE * TILES, x + c * p->inputs, scratch + c * groups * of_group, residual ? residual + to : NULL, y + to,
                    columns);
            _tile_release();
        }
        return;
    }
#endif
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p->outputs / (TILE * TILES); t++)
        for (int64_t c = 0; c < n; c += MOST) {
            const int64_t to = c * p->outputs;
            two_tiles(
                p, t * TILE * TILES, x + c * p->inputs, scratch + c * groups * of_group, residual ? residual + to : NULL, y + to,
                n - c < MOST ? (int)(n - c) : MOST);
        }
}

/* The same on its own. scratch: n * inputs / 32 `Rounded` for each thread. */
void multiply(const Product *p, const bf16 *x, int64_t n, bf16 *y, float *scratch, int threads) {
    const int64_t of_thread = n * (p->inputs / GROUP) * (sizeof(Rounded) / sizeof(float));
#pragma omp parallel num_threads(threads)
    product(p, x, n, NULL, y, scratch, scratch + omp_get_thread_num() * of_thread);
}

/* ---- Layers ---- */

typedef struct {
    Product heads, output, gate_up, down;
    const bf16 *before_attention, *before_mlp; /* weights of the norms, [hidden] */
    const bf16 *query_norm, *key_norm;         /* [head size], or NULL */
    int64_t hidden, inner, query_heads, key_heads, head_size;
    float epsilon, scaling;
} Layer;

typedef struct {
    int64_t rows, width;   /* a pass runs over rows * width columns */
    const bf16 *cos, *sin; /* [angles, width, head size] */
    int64_t angles;        /* rows, or 1 */
    const int64_t *places; /* [rows * width]: the slot that each column is written to */
    int64_t first;         /* the first slot that columns may see; the next numbers count from it */
    const int64_t *slots;  /* the slots that the first column sees, in order, then those of the second, ... */
    const int64_t *starts; /* [rows * width + 1]: where a column's slots begin; both are NULL if columns see all up to their own */
    int64_t threads;
    int64_t at_once;   /* columns that are computed together */
    bf16 *buffer;      /* at_once * (4 * hidden + outputs of heads + query heads * head size + 3 * inner) numbers */
    float *scratch;    /* for each thread, `Rounded` of these columns' inputs, or sixteen times the slots of a column */
    int64_t of_thread; /* numbers of that for one thread */
} Pass;

/* RMSNorm of a vector whose size is a multiple of 16. */
INLINE void norm(const bf16 *x, const bf16 *weight, int64_t size, float epsilon, bf16 *y) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 v = load(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)size + epsilon));
    for (int64_t i = 0; i < size; i += 16)
        store(y + i, _mm512_mul_ps(rounded(_mm512_mul_ps(load(x + i), scale)), load(weight + i)));
}

/* The same of n vectors. */
void norms(const bf16 *x, const bf16 *weight, int64_t n, int64_t size, float epsilon, bf16 *y) {
    for (int64_t c = 0; c < n; c++) norm(x + c * size, weight, size, epsilon, y + c * size);
}

/* Turns a head by the angles of its position; sin is negative in the first half. */
INLINE void turn(bf16 *head, const bf16 *cos, const bf16 *sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const __m512 one = load(head + i), two = load(head + half + i);
        const __m512 first = rounded(_mm512_mul_ps(one, load(cos + i)));
        const __m512 second = rounded(_mm512_mul_ps(two, load(cos + half + i)));
        store(head + i, _mm512_add_ps(first, rounded(_mm512_mul_ps(two, load(sin + i)))));
        store(head + half + i, _mm512_add_ps(second, rounded(_mm512_mul_ps(one, load(sin + half + i)))));
    }
}

/* exp(x) for x <= 0, to about one unit in the last place. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 e = _mm512_set1_ps(1.0f / 720);
    const float terms[6] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1, 1};
    UNROLLED for (int i = 0; i < 6; i++) e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(e, n);
}

/* Sums of interleaved vectors times a share, in order. */
INLINE void store_in_order(bf16 *to, __m512 low, __m512 high, float share) {
    static const int16_t in_order[32] = {0,  1,  2,  3,  16, 17, 18, 19, 4,  5,  6,  7,  20, 21, 22, 23,
                                         8,  9,  10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
    const __m512 by = _mm512_set1_ps(share);
    const __m512i found = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, by), _mm512_mul_ps(low, by));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(in_order), found));
}

#ifdef __AMX_BF16__
/* ---- Attention with matrix tiles ---- */

/* Up to sixteen queries of a key head, each of a column and a query head. They are the lanes of a vector: scores lie by slots, so
   softmax needs no sums across lanes, and a query has the same bits whatever stands beside it. */
typedef struct {
    const bf16 *queries[TILE];
    bf16 *seen[TILE];
    int32_t counts[TILE]; /* of slots that a query sees: the first ones of the block's */
    int lanes;
} Queries;

enum { KEYS = 32, WIDEST = 256 }; /* slots of a step; the largest head size */

/* Where `KEYS` keys or values from slot j on lie, one after the other; some are copied, and zeros stand for what is not there. */
INLINE const bf16 *some_slots(const bf16 *from, const int64_t *slots, int64_t j, int64_t count, int64_t size, bf16 *copied) {
    if (!slots && j + KEYS <= count) return from + j * size;
    for (int64_t i = 0; i < KEYS; i++) {
        if (j + i < count)
            memcpy(copied + i * size, from + (slots ? slots[j + i] : j + i) * size, size * sizeof(bf16));
        else
            memset(copied + i * size, 0, size * sizeof(bf16));
    }
    __asm__ volatile("" ::: "memory");
    return copied;
}

/* scores [count, rounded up to KEYS][16]: of queries [size / 32][16 pairs][16 lanes][2] with the keys. */
INLINE void score(
    const bf16 *queries, const bf16 *keys, const int64_t *slots, int64_t count, int64_t size, float *scores, bf16 *copied) {
    for (int64_t j = 0; j < count; j += KEYS) {
        const bf16 *some = some_slots(keys, slots, j, count, size, copied);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t k = 0; k < size; k += 32) {
            _tile_loadd(6, queries + k * TILE, LINE);
            _tile_loadd(4, some + k, size * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, some + TILE * size + k, size * sizeof(bf16));
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, scores + j * TILE, LINE);
        _tile_stored(1, scores + (j + TILE) * TILE, LINE);
    }
}

/* Transposes sixteen vectors of sixteen numbers. */
INLINE void transpose(const int32_t *from, int32_t *to) {
    __m512i a[16], b[16];
    UNROLLED for (int i = 0; i < 16; i++) a[i] = _mm512_load_si512(from + i * 16);
    UNROLLED for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED for (int i = 0; i < 16; i += 4) UNROLLED for (int k = 0; k < 2; k++) {
        a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + 2 + k]);
        a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + 2 + k]);
    }
    /* a[4 i + k]: of vectors 4 i to 4 i + 3 the numbers k, k + 4, k + 8, k + 12 */
    UNROLLED for (int k = 0; k < 4; k++) {
        const __m512i one = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88), two = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
        const __m512i three = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
        const __m512i four = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
        _mm512_store_si512(to + k * 16, _mm512_shuffle_i32x4(one, three, 0x88));
        _mm512_store_si512(to + (4 + k) * 16, _mm512_shuffle_i32x4(two, four, 0x88));
        _mm512_store_si512(to + (8 + k) * 16, _mm512_shuffle_i32x4(one, three, 0xdd));
        _mm512_store_si512(to + (12 + k) * 16, _mm512_shuffle_i32x4(two, four, 0xdd));
    }
}

/* The softmax of scores times its divisor, in bfloat16, in their place: [16 lanes][32 slots] for each `KEYS` slots. Returns one over
   the divisors. */
INLINE __m512 weights_in_tiles(const Queries *q, float *scores, int64_t count, float scaling) {
    const __m512i counts = _mm512_loadu_si512(q->counts);
    const __m512 scale = _mm512_set1_ps(scaling);
    const int32_t least = _mm512_reduce_min_epi32(counts);
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
        const __mmask16 seen = j < least ? 0xffff : _mm512_cmpgt_epi32_mask(counts, _mm512_set1_epi32((int32_t)j));
        most = _mm512_mask_max_ps(most, seen, most, _mm512_mul_ps(_mm512_load_ps(scores + j * TILE), scale));
    }
    static const int16_t in_pairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_loadu_si512(in_pairs);
    for (int64_t j = 0; j < count; j += KEYS) {
        _Alignas(LINE) int32_t pairs[TILE * TILE];
        for (int64_t i = 0; i < KEYS; i += 2) {
            __m512 found[2];
            UNROLLED for (int k = 0; k < 2; k++) {
                const int64_t at = j + i + k;
                const __mmask16 seen = at < least ? 0xffff : _mm512_cmpgt_epi32_mask(counts, _mm512_set1_epi32((int32_t)at));
                const __m512 own = _mm512_mul_ps(_mm512_load_ps(scores + at * TILE), scale);
                found[k] = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(own, most)));
            }
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(found[1], found[0]);
            const __m512i pair = _mm512_permutexvar_epi16(order, both);
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
            sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(0xffff0000))));
            _mm512_store_si512(pairs + i / 2 * TILE, pair);
        }
        transpose(pairs, (int32_t *)(scores + j * TILE));
    }
    __asm__ volatile("" ::: "memory");
    return _mm512_maskz_div_ps(_mm512_cmpgt_epi32_mask(counts, _mm512_setzero_si512()), _mm512_set1_ps(1), sum);
}

/* 32 * parts numbers of each query's mean of values from number `at` on. Values of two slots are interleaved, see `mean`. */
INLINE void mean_in_tiles(
    const Queries *q, const float *weights, const float *shares, const bf16 *values, const int64_t *slots, int64_t count,
    int64_t size, int64_t at, int parts, bf16 *copied) {
    _Alignas(LINE) bf16 pairs[2 * 2][TILE][32];
    _Alignas(LINE) float sums[2 * 2][TILE][TILE];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < count; j += KEYS) {
        const bf16 *some = some_slots(values, slots, j, count, size, copied) + at;
        for (int64_t i = 0; i < KEYS / 2; i++) UNROLLED for (int k = 0; k < parts; k++) {
            const __m512i a = _mm512_loadu_si512(some + 2 * i * size + 32 * k);
            const __m512i b = _mm512_loadu_si512(some + (2 * i + 1) * size + 32 * k);
            _mm512_store_si512(pairs[2 * k][i], _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(pairs[2 * k + 1][i], _mm512_unpackhi_epi16(a, b));
        }
        __asm__ volatile("" ::: "memory");
        _tile_loadd(4, weights + j * TILE, LINE);
        _tile_loadd(6, pairs[0], LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, pairs[1], LINE);
        _tile_dpbf16ps(1, 4, 7);
        if (parts == 1) continue;
        _tile_loadd(6, pairs[2], LINE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, pairs[3], LINE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
    for (int lane = 0; lane < q->lanes; lane++)
        for (int k = 0; k < parts; k++)
            store_in_order(q->seen[lane] + at + 32 * k, _mm512_load_ps(sums[2 * k][lane]), _mm512_load_ps(sums[2 * k + 1][lane]), shares[lane]);
}

/* Attention of queries to the first `count` slots. scratch: 16 numbers for each slot, rounded up to `KEYS`. */
static void attend_in_tiles(
    const Queries *q, const bf16 *keys, const bf16 *values, const int64_t *slots, int64_t count, int64_t size, float scaling,
    float *scratch) {
    _Alignas(LINE) int32_t queries[WIDEST / 2 * TILE];
    _Alignas(LINE) bf16 copied[KEYS * WIDEST];
    _Alignas(LINE) float shares[TILE];
    memset(queries, 0, size / 2 * TILE * sizeof(int32_t));
    for (int lane = 0; lane < q->lanes; lane++)
        for (int64_t i = 0; i < size / 2; i++) memcpy(queries + i * TILE + lane, q->queries[lane] + 2 * i, sizeof(int32_t));
    __asm__ volatile("" ::: "memory");
    score((const bf16 *)queries, keys, slots, count, size, scratch, copied);
    _mm512_store_ps(shares, weights_in_tiles(q, scratch, count, scaling));
    for (int64_t at = 0; at < size; at += 64)
        mean_in_tiles(q, scratch, shares, values, slots, count, size, at, size - at < 64 ? 1 : 2, copied);
}

/* Attention of n columns from `from` on, within a parallel region. Columns of a row that see all slots up to their own stand
   together. */
static void attend_all(
    const Layer *l, const Pass *s, const bf16 *heads, const bf16 *keys, const bf16 *values, int64_t capacity, bf16 *seen,
    int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    own += (LINE - (uintptr_t)own % LINE) % LINE / sizeof(float);
    const int64_t size = l->head_size, group = l->query_heads / l->key_heads, together = group < TILE ? TILE / group : 1;
    int64_t begin[n + 1], blocks = 0;
    for (int64_t c = 0; c < n; c++)
        if (!blocks || s->slots || c - begin[blocks - 1] == together || (from + c) % s->width == 0) begin[blocks++] = c;
    begin[blocks] = n;
    configure(TILE, 0);
#pragma omp for schedule(static, 1)
    for (int64_t i = 0; i < blocks * l->key_heads; i++) { /* in turn, because a prompt's columns see more and more slots */
        const int64_t b = i / l->key_heads, h = i % l->key_heads, at = from + begin[b], end = from + begin[b + 1];
        const int64_t of = ((at / s->width * l->key_heads + h) * capacity + s->first) * size;
        const int64_t *slots = s->slots ? s->slots + s->starts[at] : NULL;
        const int64_t count = s->slots ? s->starts[at + 1] - s->starts[at] : s->places[end - 1] - s->first + 1;
        for (int64_t first = 0; first < group; first += TILE) {
            Queries q = {.lanes = 0};
            for (int i = 0; i < TILE; i++) q.counts[i] = (int32_t)count;
            for (int64_t c = at; c < end; c++)
                for (int64_t k = first; k < group && k < first + TILE; k++) {
                    q.queries[q.lanes] = heads + (c - from) * l->heads.outputs + (h * group + k) * size;
                    q.seen[q.lanes] = seen + (c - from) * l->output.inputs + (h * group + k) * size;
                    q.counts[q.lanes++] = (int32_t)(slots ? count : s->places[c] - s->first + 1);
                }
            attend_in_tiles(&q, keys + of, values + of, slots, count, size, l->scaling, own);
        }
    }
    _tile_release();
}
#else
/* The sums of sixteen vectors, each in the same order. */
INLINE __m512 sums_of(__m512 v[16]) {
    __m512 a[8], b[4];
    UNROLLED for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLLED for (int i = 0; i < 4; i++) {
        const __m512d one = _mm512_castps_pd(a[2 * i]), two = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(one, two)), _mm512_castpd_ps(_mm512_unpackhi_pd(one, two)));
    }
    const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

/* The softmax of a query with the keys of these slots, times its divisor, in bfloat16, in the first half of weights [count, rounded
   up to sixteen]. Returns one over the divisor. */
INLINE float attention_weights(
    const bf16 *query, const bf16 *keys, const int64_t *slots, int64_t count, int64_t size, float scaling, float *weights) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < count; j += 16) {
        __m512 dots[16];
        UNROLLED for (int i = 0; i < 16; i++) {
            const int64_t at = j + i < count ? j + i : count - 1;
            const bf16 *key = keys + (slots ? slots[at] : at) * size;
            dots[i] = _mm512_setzero_ps();
            for (int64_t k = 0; k < size; k += 32)
                dots[i] = _mm512_dpbf16_ps(
                    dots[i], (__m512bh)_mm512_loadu_si512(query + k), (__m512bh)_mm512_loadu_si512(key + k));
        }
        const __m512 scores = _mm512_mul_ps(sums_of(dots), _mm512_set1_ps(scaling));
        most = _mm512_max_ps(most, scores);
        _mm512_storeu_ps(weights + j, scores);
    }
    most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j += 16) {
        const __mmask16 seen = count - j < 16 ? (__mmask16)((1 << (count - j)) - 1) : 0xffff;
        const __m512 found = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(_mm512_loadu_ps(weights + j), most)));
        sum = _mm512_add_ps(sum, rounded(found));
        store((bf16 *)weights + j, found); /* over scores that have been read */
    }
    return count ? 1.0f / _mm512_reduce_add_ps(sum) : 0.0f;
}

/* 32 * parts numbers of the mean of values, for `heads` heads with weights [heads, stride]. Two slots at a time, whose values are
   interleaved; the result is in the order of the interleaved ones, and put in order at the end. */
INLINE void mean(
    const bf16 *weights, int64_t stride, const float *shares, const bf16 *values, const int64_t *slots, int64_t count, int64_t size,
    bf16 *y, int heads, int parts) {
    __m512 low[4][2], high[4][2];
    UNROLLED for (int h = 0; h < heads; h++)
        UNROLLED for (int i = 0; i < parts; i++) low[h][i] = high[h][i] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j += 2) {
        const int64_t next = j + 1 < count ? j + 1 : j; /* its weight is 0 if there is none */
        const bf16 *one = values + (slots ? slots[j] : j) * size, *two = values + (slots ? slots[next] : next) * size;
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

/* seen [query heads of the key head, head size]: attention of a column's queries to the slots that it sees. */
static void attend(
    const Layer *l, const bf16 *queries, const bf16 *keys, const bf16 *values, const int64_t *slots, int64_t count, float *weights,
    bf16 *seen) {
    const int64_t size = l->head_size, group = l->query_heads / l->key_heads, stride = (count + 15) / 16 * 16;
    for (int64_t h = 0; h < group; h += 4) {
        const int heads = group - h < 4 ? (int)(group - h) : 4;
        float shares[4];
        for (int i = 0; i < heads; i++)
            shares[i] = attention_weights(
                queries + (h + i) * size, keys, slots, count, size, l->scaling, weights + i * stride);
        for (int64_t at = 0; at < size;) {
            const int parts = size - at < 64 ? 1 : 2;
#define MEAN(heads, parts)                                                                                                  \
    case 8 * heads + parts:                                                                                                 \
        mean((bf16 *)weights, 2 * stride, shares, values + at, slots, count, size, seen + h * size + at, heads, parts);     \
        break;
            switch (8 * heads + parts) {
                MEAN(1, 1) MEAN(2, 1) MEAN(3, 1) MEAN(4, 1) MEAN(1, 2) MEAN(2, 2) MEAN(3, 2) MEAN(4, 2)
            }
            at += 32 * parts;
        }
    }
}

/* Attention of n columns from `from` on, within a parallel region. */
static void attend_all(
    const Layer *l, const Pass *s, const bf16 *heads, const bf16 *keys, const bf16 *values, int64_t capacity, bf16 *seen,
    int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    const int64_t group = l->query_heads / l->key_heads, size = l->head_size;
#pragma omp for schedule(static, 1)
    for (int64_t i = 0; i < n * l->key_heads; i++) { /* in turn, because a prompt's columns see more and more slots */
        const int64_t c = i / l->key_heads, h = i % l->key_heads, at = from + c;
        const int64_t of = ((at / s->width * l->key_heads + h) * capacity + s->first) * size;
        attend(
            l, heads + c * l->heads.outputs + h * group * size, keys + of, values + of, s->slots ? s->slots + s->starts[at] : NULL,
            s->slots ? s->starts[at + 1] - s->starts[at] : s->places[at] - s->first + 1, own,
            seen + c * l->output.inputs + h * group * size);
    }
}
#endif

INLINE __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1), small = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    /* x / (1 + exp(-x)), with an exponent that is never positive */
    const __m512 above = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), one, small);
    return _mm512_div_ps(_mm512_mul_ps(x, above), _mm512_add_ps(one, small));
}

/* Norms and turns a column's queries and keys, and writes its keys and values to its slot, [rows, key heads, capacity, size]. */
static void finish_heads(const Layer *l, const Pass *s, int64_t c, bf16 *heads, bf16 *keys, bf16 *values, int64_t capacity) {
    const int64_t size = l->head_size, at = (s->angles == 1 ? c % s->width : c) * size, turned = l->query_heads + l->key_heads;
    for (int64_t h = 0; h < turned; h++) {
        const bf16 *weight = h < l->query_heads ? l->query_norm : l->key_norm;
        if (weight) norm(heads + h * size, weight, size, l->epsilon, heads + h * size);
        turn(heads + h * size, s->cos + at, s->sin + at, size);
    }
    for (int64_t h = 0; h < l->key_heads; h++) {
        const int64_t to = ((c / s->width * l->key_heads + h) * capacity + s->places[c]) * size;
        memcpy(keys + to, heads + (l->query_heads + h) * size, size * sizeof(bf16));
        memcpy(values + to, heads + (turned + h) * size, size * sizeof(bf16));
    }
}

/* The columns [from, from + n) of a layer's output [columns, hidden] for hidden [columns, hidden], within a parallel region.
   beside: what queries, keys and values are computed from; NULL for the norm of hidden. keys, values [rows, key heads, capacity,
   head size]. out: NULL if only keys and values are needed. */
static void layer(
    const Layer *l, const Pass *s, const bf16 *hidden, const bf16 *beside, bf16 *keys, bf16 *values, int64_t capacity, bf16 *out,
    int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    bf16 *normed = s->buffer, *heads = normed + n * l->hidden, *seen = heads + n * l->heads.outputs;
    bf16 *middle = seen + n * l->output.inputs, *again = middle + n * l->hidden;
    bf16 *wide = again + n * l->hidden, *narrow = wide + n * 2 * l->inner;
    hidden += from * l->hidden;
    if (!beside) {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++)
            norm(hidden + c * l->hidden, l->before_attention, l->hidden, l->epsilon, normed + c * l->hidden);
    }
    product(&l->heads, beside ? beside + from * l->heads.inputs : normed, n, NULL, heads, s->scratch, own);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) finish_heads(l, s, from + c, heads + c * l->heads.outputs, keys, values, capacity);
    if (!out) return;
    attend_all(l, s, heads, keys, values, capacity, seen, from, n);
    product(&l->output, seen, n, hidden, middle, s->scratch, own);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++)
        norm(middle + c * l->hidden, l->before_mlp, l->hidden, l->epsilon, again + c * l->hidden);
    product(&l->gate_up, again, n, NULL, wide, s->scratch, own);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n * l->inner / 16; i++) {
        const int64_t c = 16 * i / l->inner, at = 16 * i % l->inner;
        const bf16 *gate = wide + c * 2 * l->inner + at;
        store(narrow + c * l->inner + at, _mm512_mul_ps(rounded(silu(load(gate))), load(gate + l->inner)));
    }
    product(&l->down, narrow, n, middle, out + from * l->hidden, s->scratch, own);
}

/* The layers of a model, one after the other, each over some columns at a time, whose numbers stay in the cache. slots: each layer's
   keys and values. out [count, columns, hidden]: the output of each; NULL, of a single layer, if only keys and values are needed. */
void layers(
    const Layer *const *each, int64_t count, const Pass *s, const bf16 *hidden, const bf16 *beside, bf16 *const *slots,
    int64_t capacity, bf16 *out) {
    const int64_t columns = s->rows * s->width;
#pragma omp parallel num_threads(s->threads)
    for (int64_t i = 0; i < count; i++) {
        bf16 *to = out ? out + i * columns * each[i]->hidden : NULL;
        for (int64_t from = 0; from < columns; from += s->at_once) {
            const int64_t n = columns - from < s->at_once ? columns - from : s->at_once;
            layer(
                each[i], s, i ? to - columns * each[i]->hidden : hidden, i ? NULL : beside, slots[2 * i], slots[2 * i + 1],
                capacity, to, from, n);
        }
    }
}
