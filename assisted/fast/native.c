/* Forward passes over few columns: products with weights of 32, 16, 8 or 4 bits, and the layers made of them.

   Every column is computed by the same operations in the same order, however many columns come along, wherever it stands among
   them, and whatever the slots hold that it does not see. So a pass over a draft has the bits of passes over single columns.
   Weights are read once for several columns, two tiles of sixteen outputs at a time, in the order of memory: then the
   processor fetches ahead by itself. Numbers are bfloat16, or float32 with -DFLOAT32, and sums are float32; results are rounded
   where transformers rounds them.

   Most of it is written for vectors of any width. Rounded inputs are multiplied as integers, by VNNI where there is such, with the
   same bits on all processors. Other products of bfloat16 use AVX512-BF16 (DOTS) or expand all to float32. */

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

/* Activations, in the order of `native.ACTIVATIONS`. */
enum { SILU, GELU_TANH, GELU, RELU2 };

INLINE vec activated(vec x, int64_t kind) {
    const vec positive = greater(x, all(0));
    switch (kind) {
        case SILU: return silu(x);
        case GELU_TANH: return gated_by(x, all(1.59576912f) * plus_product(x, all(0.044715f) * x * x, x));
        case GELU: return all(0.5f) * x * (all(1) + error_of(x * all(0.707106781f)));
        default: return positive * positive;
    }
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

/* ---- Products ---- */

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

typedef struct {
    Product heads, output, gate_up, down; /* without outputs of the last one, the layer ends after attention */
    Norm before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
    int64_t hidden, inner, query_heads, key_heads, head_size;
    int64_t turned, turning, norms_turned, is_eager, beside; /* the rest is as in `native.Shape` */
    int64_t activation, is_gated;
    float scaling, cap;
} Layer;

typedef struct {
    int64_t rows, width;   /* a pass runs over rows * width columns */
    const number *cos, *sin; /* [angles, width, head size]; of float32 for layers that turn IN_FLOATS */
    int64_t angles;        /* rows, or 1 */
    const int64_t *places; /* [rows * width]: the slot that each column is written to */
    int64_t first;         /* the first slot that columns may see; the next numbers count from it */
    const int64_t *slots;  /* the slots that the first column sees, in order, then those of the second, ... */
    const int64_t *starts; /* [rows * width + 1]: where a column's slots begin; both are NULL if columns see all up to their own */
    int64_t threads;
    int64_t at_once;   /* columns that are computed together */
    number *buffer;      /* at_once * (4 * hidden + outputs of heads + query heads * head size + 3 * inner) numbers */
    float *scratch;    /* for each thread, what products need of these columns' inputs, or sixteen times the slots of a column */
    int64_t of_thread; /* numbers of that for one thread */
} Pass;

enum { WIDEST = 256 }; /* the largest head size */

/* Scores of products of queries and keys. */
INLINE vec scored(const Layer *l, vec dots) {
    if (!l->is_eager) return dots * all(l->scaling);
    const vec scores = rounded(rounded(dots) * all(l->scaling)), cap = all(l->cap);
    return l->cap > 0 ? rounded(rounded(hyperbolic(rounded(scores / cap))) * cap) : scores;
}

/* ---- Inputs for rows of weights where the model has them ---- */

/* STREAMS: of rows that a thread reads at a time, each in the order of memory; ROWS: of each of them for one thread. SOME: columns
   whose sums fit in the registers, a lot. LOTS: for which the same DEPTH weights of each row are read from the first cache; half as
   many of a prompt with more than FAR inputs, which stay in the second cache. With wide vectors, such inputs stay in the first one,
   DEEP of each column. */
enum { STREAMS = 4, ROWS = WIDE == 8 ? 8 : TILE, SOME = WIDE == 16 ? 6 : WIDE == 8 ? 3 : 2 };
enum { LOTS = WIDE == 16 ? 2 : WIDE == 8 ? 4 : 1, DEPTH = WIDE == 8 ? 256 : 1 << 30, FAR = 4096, DEEP = 1024 };

/* NUMBERS: of a vector. NEAR: bytes of inputs that stay in the first cache while rows pass through it. NARROW: the
   most of their vectors for which rows are read one after the other. */
enum { SIDE_BY_SIDE = WIDE == 16 }; /* inputs of a lot's columns lie so, group for group */
#ifdef DOTS
typedef bf16 input;
enum { NUMBERS = 2 * WIDE, NEAR = 20 << 10, NARROW = 8 };
#else
typedef float input;
enum { NUMBERS = WIDE, NEAR = 16 << 10, NARROW = 4 };
#endif

/* Rows are read one after the other, which memory answers best, if the inputs of a few columns stay in the first cache meanwhile.
   Otherwise each vector of inputs is used for a row of each stream: of two, if there is a single column, for which the processor
   fetches by itself. The sums are the same. */
INLINE int is_alone(const Product *p, int64_t n) {
    enum { VECTORS = sizeof(input) / sizeof(number) };
    return WIDE == 16 && n > 1 && n * VECTORS <= NARROW && n * p->inputs * (int64_t)sizeof(input) <= NEAR;
}

/* How columns are divided into lots, which are computed together: the first `larger` ones have one more than the others. */
typedef struct {
    int64_t count, each, larger;
} Lots;

typedef struct {
    int64_t first, columns;
} Lot;

INLINE Lots lots_of(const Product *p, int64_t n) {
    const int64_t count = is_alone(p, n) ? 1 : (n + SOME - 1) / SOME;
    return (Lots){count, n / count, n % count};
}

INLINE int streams_of(const Lots *all) { return WIDE == 16 && all->count == 1 && all->each == 1 ? 2 : STREAMS; }

INLINE Lot lot_at(const Lots *all, int64_t i) {
    return (Lot){i * all->each + (i < all->larger ? i : all->larger), all->each + (i < all->larger)};
}

INLINE Lot lot_with(const Lots *all, int64_t column) {
    const int64_t of_larger = all->larger * (all->each + 1);
    return lot_at(all, column < of_larger ? column / (all->each + 1) : all->larger + (column - of_larger) / all->each);
}

/* Copies groups [from, to) of the inputs x [n, inputs]. Of bfloat16 that is expanded, numbers at even places come before those at odd
   ones, of each two vectors. */
static void arrange(const Product *p, const number *x, int64_t n, int64_t from, int64_t to, float *scratch) {
    const int64_t groups = p->inputs / GROUP;
    const Lots lots = lots_of(p, n);
    for (int64_t f = from, c = from / groups; f < to; c++) {
        const Lot lot = lot_with(&lots, c);
        for (const int64_t end = to < (c + 1) * groups ? to : (c + 1) * groups; f < end; f++) {
            const int64_t place = SIDE_BY_SIDE ? lot.first * groups + (f - c * groups) * lot.columns + c - lot.first : f;
            input *own = (input *)scratch + place * GROUP;
            if (sizeof(input) == sizeof(number)) {
                memcpy(own, x + f * GROUP, GROUP * sizeof(number));
            } else {
                UNROLLED for (int i = 0; i < GROUP; i += 2 * WIDE) {
                    const words pair = words_of(x + f * GROUP + i), both[2] = {pair << 16, pair & 0xffff0000};
                    memcpy(own + i, both, sizeof both);
                }
            }
        }
    }
}

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

/* ---- Products of integers: four levels, from 0 on, times four steps for each output. ---- */

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

/* The outputs of a column from `at` on, as many as a vector has. residual: added to the rounded result, or NULL. */
INLINE void finish(const Product *p, vec sum, int64_t at, const number *residual, number *y) {
    if (p->bits == 8) sum *= wide(p->scales + at);
    if (p->bias) sum += wide(p->bias + at);
    if (residual) {
        sum = rounded(sum);
        if (p->multiplier != 1) sum = rounded(sum * all(p->multiplier));
        sum += load(residual);
    }
    store(y, sum);
}

INLINE const uint8_t *weights_of(const Product *p, int64_t first) {
    const int64_t bytes = p->bits == 4 ? p->inputs / GROUP * BYTES4 : p->inputs * TILES * TILE * p->bits / 8;
    return p->weights + first / (TILES * TILE) * bytes;
}

/* ---- Products with rows of weights where the model has them ---- */

/* What `weights_at` finds at number i of a row fits the inputs there. */
#ifdef DOTS

INLINE vec weights_at(const bf16 *row, int64_t i) { return wide((const float *)(row + i)); }

INLINE vec plus_products(vec sum, vec one, vec two) { return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)two); }

#else

INLINE vec weights_at(const number *row, int64_t i) {
#ifdef FLOAT32
    return wide(row + i);
#else
    const words pair = words_of(row + i / (2 * WIDE) * (2 * WIDE));
    return (vec)(i / WIDE % 2 ? pair & 0xffff0000 : pair << 16);
#endif
}

INLINE vec plus_products(vec sum, vec one, vec two) {
#if WIDE == 8 && !defined(__clang__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(one), "xm"(two)); /* otherwise GCC copies sums from register to register */
    return sum;
#else
    return plus_product(sum, one, two);
#endif
}

#endif

/* Whether products with weights in place take about as long as those with packed ones, for a draft's columns. */
#if defined(DOTS) && !defined(TILED)
const int64_t rows_suffice = 2; /* on some processors, see `native.py` */
#else
const int64_t rows_suffice = WIDE == 8;
#endif


/* Sums of a row of each stream with `depth` inputs of a lot's columns, for sums[column][stream]; those of far streams go on from there.
   of_column, of_stream: vectors from one to the next. soon: bytes from a weight to the one that is asked for, or 0. */
INLINE void add_rows(
    vec *sums, int of_column, int of_stream, const number *const *rows, const input *x, int64_t inputs, int64_t depth, int soon, int streams,
    int columns) {
    vec own[STREAMS][MOST];
    UNROLLED for (int s = 0; s < streams; s++) UNROLLED for (int c = 0; c < columns; c++) {
        own[s][c] = of_stream > 1 ? sums[c * of_column + s * of_stream] : all(0);
    }
    for (int64_t k = 0; k < depth; k += GROUP) {
        if (soon) UNROLLED for (int s = 0; s < streams; s++) UNROLLED for (int i = 0; i < GROUP; i += LINE / (int)sizeof(number))
            __builtin_prefetch((const char *)(rows[s] + k + i) + soon);
        UNROLLED for (int i = 0; i < GROUP; i += NUMBERS) {
            vec one[MOST];
            UNROLLED for (int c = 0; c < columns; c++) {
                const int64_t place = SIDE_BY_SIDE ? k * columns + c * GROUP : c * inputs + k;
                one[c] = wide((const float *)(x + place + i));
            }
            UNROLLED for (int s = 0; s < streams; s++) {
                const vec weight = weights_at(rows[s] + k, i);
                UNROLLED for (int c = 0; c < columns; c++) own[s][c] = plus_products(own[s][c], weight, one[c]);
            }
        }
    }
    UNROLLED for (int s = 0; s < streams; s++) UNROLLED for (int c = 0; c < columns; c++) {
        sums[c * of_column + s * of_stream] = own[s][c];
    }
}

#define ROWS_OF(streams, columns)                                                           \
    case columns:                                                                           \
        add_rows(sums, OF_COLUMN, OF_STREAM, rows, x, inputs, depth, SOON, streams, columns); \
        break;

/* The outputs from `at` on that `sums` have, ROWS of each column. residual: added to the rounded result, or NULL. */
static void finish_rows(
    const Product *p, const vec *sums, int of_column, int64_t at, const number *residual, number *y, int64_t columns) {
    for (int64_t c = 0; c < columns; c++) UNROLLED for (int i = 0; i < ROWS; i += WIDE) {
        const int64_t to = c * p->outputs + at + i;
        finish(p, sums_of(sums + c * of_column + i), at + i, residual ? residual + to : NULL, y + to);
    }
}

/* A line keeps the sums of several columns in other places of the cache. */
enum { OF_STREAMS = STREAMS * ROWS + 1, OF_ALONE = ROWS + 1 };

INLINE void add_streams(
    vec *sums, const number *const *rows, const input *x, int64_t inputs, int64_t depth, int streams, int columns) {
    enum { OF_COLUMN = OF_STREAMS, OF_STREAM = ROWS, SOON = WIDE == 8 ? 512 : WIDE == 16 ? 2048 : 0 };
    if (WIDE == 16 && streams < STREAMS) {
        add_rows(sums, OF_COLUMN, OF_STREAM, rows, x, inputs, depth, 0, 2, 1);
        return;
    }
    switch (columns) {
        ROWS_OF(STREAMS, 1) ROWS_OF(STREAMS, 2)
#if WIDE > 4
        ROWS_OF(STREAMS, 3)
#endif
#if WIDE > 8
        ROWS_OF(STREAMS, 4) ROWS_OF(STREAMS, 5) ROWS_OF(STREAMS, 6)
#endif
    }
}

/* ROWS outputs of each stream from output `first` of the first one on, of lots [begin, end). */
static void some_of_streams(
    const Product *p, int64_t first, const input *x, const number *residual, number *y, const Lots *lots, int64_t begin, int64_t end) {
    const int streams = streams_of(lots);
    const int64_t before = lot_at(lots, begin).first, columns = lot_at(lots, end).first - before;
    const int64_t apart = p->outputs / streams, at = before * p->outputs;
    vec sums[LOTS * SOME * OF_STREAMS];
    memset(sums, 0, columns * OF_STREAMS * sizeof *sums);
    const int64_t deep = WIDE == 16 && columns > MOST && p->inputs > FAR ? DEEP : p->inputs;
    for (int64_t top = 0; top < p->inputs; top += deep) for (int i = 0; i < ROWS; i++) {
        const int64_t bottom = p->inputs - top < deep ? p->inputs : top + deep;
        for (int64_t from = top; from < bottom; from += DEPTH) {
            const number *rows[STREAMS];
            for (int s = 0; s < streams; s++) rows[s] = p->rows[first + i + s * apart] + from;
            const int64_t depth = bottom - from < DEPTH ? bottom - from : DEPTH;
            for (int64_t j = begin; j < end; j++) {
                const Lot lot = lot_at(lots, j);
                vec *of_lot = sums + (lot.first - before) * OF_STREAMS + i;
                const input *own = x + lot.first * p->inputs + (SIDE_BY_SIDE ? from * lot.columns : from);
                add_streams(of_lot, rows, own, p->inputs, depth, streams, (int)lot.columns);
            }
        }
    }
    for (int s = 0; s < streams; s++)
        finish_rows(p, sums + s * ROWS, OF_STREAMS, first + s * apart, residual ? residual + at : NULL, y + at, columns);
}

#if WIDE == 16

/* One row; of many columns two, for which each vector of inputs is used. Returns how many. */
static int add_alone(vec *sums, const number *const *rows, const input *x, int64_t inputs, int64_t columns) {
    enum { OF_COLUMN = OF_ALONE, OF_STREAM = 1, SOON = 8192 };
    const int64_t depth = inputs;
    switch (columns) {
        ROWS_OF(1, 2) ROWS_OF(1, 3) ROWS_OF(1, 4) ROWS_OF(1, 5) ROWS_OF(1, 6) ROWS_OF(1, 7) ROWS_OF(2, 8)
    }
    return columns < 8 ? 1 : 2;
}

/* As many outputs, of rows that follow one another. */
static void some_alone(const Product *p, int64_t first, const input *x, const number *residual, number *y, int64_t n) {
    for (int64_t at = first; at < first + STREAMS * ROWS; at += ROWS) {
        vec sums[MOST * OF_ALONE];
        for (int i = 0; i < ROWS;) i += add_alone(sums + i, p->rows + at + i, x, p->inputs, n);
        finish_rows(p, sums, OF_ALONE, at, residual, y, n);
    }
}

#endif

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
#include "tiles.h"
#endif

/* y [n, outputs] = x [n, inputs] times the weights, within a parallel region. scratch: n * inputs / 32 * most_of_group numbers,
   shared by all threads; own: a thread's own, as many, or NULL if `scratch` has been filled. For few columns, computing the same in
   each thread takes less time than waiting. */
static void product(const Product *p, const number *x, int64_t n, const number *residual, number *y, float *scratch, float *own) {
    const int64_t groups = p->inputs / GROUP, numbers = of_group(p);
    if (own && n > FEW && numbers) {
#pragma omp for schedule(static)
        for (int64_t c = 0; c < n; c++) groups_of(p, x, n, c * groups, (c + 1) * groups, scratch);
    } else if (own) {
        groups_of(p, x, n, 0, n * groups, scratch = own);
    }
#ifdef TILED
    if (!p->rows && (p->input_bits == 16 || (p->bits == 4 && n > ALONE))) {
        for (int64_t c = 0; c < n; c += BLOCKS * TILE) {
            const int64_t to = c * p->outputs, columns = n - c < BLOCKS * TILE ? n - c : BLOCKS * TILE;
            configure(columns < TILE ? (int)columns : TILE, p->input_bits == 8);
#pragma omp for schedule(static)
            for (int64_t t = 0; t < p->outputs / (TILE * TILES); t++)
                blocks_of(
                    p, t * TILE * TILES, x + c * p->inputs, scratch + c * groups * numbers, residual ? residual + to : NULL, y + to,
                    columns);
            _tile_release();
        }
        return;
    }
#endif
    if (p->rows) {
        const Lots lots = lots_of(p, n);
        const int64_t rows = streams_of(&lots) * ROWS;
        const int64_t at_once = WIDE == 8 && lots.count > LOTS && p->inputs > FAR ? LOTS / 2 : LOTS;
        const input *given = numbers ? (const input *)scratch : (const input *)x;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < p->outputs / rows; t++) {
#if WIDE == 16
            if (is_alone(p, n)) {
                some_alone(p, t * STREAMS * ROWS, given, residual, y, n);
                continue;
            }
#endif
            for (int64_t i = 0; i < lots.count; i += at_once) {
                const int64_t end = lots.count - i < at_once ? lots.count : i + at_once;
                some_of_streams(p, t * ROWS, given, residual, y, &lots, i, end);
            }
        }
        return;
    }
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p->outputs / (TILES * TILE); t++)
        for (int64_t c = 0, left = (n + MOST - 1) / MOST; left; left--) {
            const int64_t to = c * p->outputs, columns = (n - c + left - 1) / left; /* about as many each time */
            two_tiles(
                p, t * TILE * TILES, x + c * p->inputs, scratch + c * groups * numbers, residual ? residual + to : NULL, y + to,
                (int)columns);
            c += columns;
        }
}

/* The same on its own. scratch: as many for each thread. */
void multiply(const Product *p, const number *x, int64_t n, number *y, float *scratch, int threads) {
    const int64_t of_thread = n * (p->inputs / GROUP) * most_of_group;
#pragma omp parallel num_threads(threads)
    product(p, x, n, NULL, y, scratch, scratch + omp_get_thread_num() * of_thread);
}

/* ---- Layers ---- */

/* The norm of a vector. kind: of the norm. */
INLINE void norm_of_kind(const Norm *m, const number *x, const number *weight, number *y, int64_t kind) {
    const int64_t size = m->size;
    vec mean = all(0), squares = all(0);
    if (kind & CENTERS) {
        for (int64_t i = 0; i < size; i += WIDE) mean += load(x + i);
        mean = all(sum_of(mean) / (float)size);
    }
    for (int64_t i = 0; i < size; i += WIDE) {
        const vec v = kind & CENTERS ? load(x + i) - mean : load(x + i);
        squares = plus_product(squares, v, v);
    }
    const vec scale = all(1.0f / sqrtf(sum_of(squares) / (float)size + m->epsilon));
    for (int64_t i = 0; i < size; i += WIDE) {
        vec v = (kind & CENTERS ? load(x + i) - mean : load(x + i)) * scale;
        if (kind & ROUNDS) v = rounded(v);
        if (weight) {
            vec by = load(weight + i);
            if (kind & ADDS_ONE) by += all(1);
            v *= kind & ROUNDS_WEIGHT ? rounded(by) : by;
        }
        if (m->bias) v += load(m->bias + i);
        store(y + i, v);
    }
}

/* The same of head h. */
static void norm_head(const Norm *m, const number *x, int64_t h, number *y) {
    const number *weight = m->weight ? m->weight + h * m->apart : NULL;
    if (m->kind == (NORMS | ROUNDS) && !m->bias && weight)
        norm_of_kind(&(Norm){.size = m->size, .epsilon = m->epsilon}, x, weight, y, NORMS | ROUNDS);
    else
        norm_of_kind(m, x, weight, y, m->kind);
}

/* Llama's. */
static void norm(const number *x, const number *weight, int64_t size, float epsilon, number *y) {
    norm_head(&(Norm){.weight = weight, .size = size, .kind = NORMS | ROUNDS, .epsilon = epsilon}, x, 0, y);
}

/* The norms of n vectors. */
void norms(const Norm *m, const number *x, int64_t n, number *y) {
    for (int64_t c = 0; c < n; c++) norm_head(m, x + c * m->size, 0, y + c * m->size);
}

/* Turns a head by the angles of its position. sin is negative in the first half, or first in each pair. */
INLINE void turn(const Layer *l, number *head, const number *cos, const number *sin) {
    const int64_t turned = l->turned, half = turned / 2, end = (turned + WIDE - 1) / WIDE * WIDE;
    number beside[WIDEST] = {0}; /* where numbers do not turn, cos is 1 and sin 0 */
    if (l->turning & PAIRS) {
        for (int64_t i = 0; i < turned; i += 2) beside[i] = head[i + 1], beside[i + 1] = head[i];
    } else {
        memcpy(beside, head + half, half * sizeof(number));
        memcpy(beside + half, head, half * sizeof(number));
    }
    for (int64_t i = 0; i < end; i += WIDE) {
        const vec one = load(head + i), two = load(beside + i);
        if (l->turning & IN_FLOATS)
            store(head + i, one * wide((const float *)cos + i) + two * wide((const float *)sin + i));
        else
            store(head + i, rounded(one * load(cos + i)) + rounded(two * load(sin + i)));
    }
}

#ifndef TILED

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
   up to sixteen]. Returns one over the divisor. */
INLINE float attention_weights(
    const Layer *l, const number *query, const number *keys, const int64_t *slots, int64_t count, float *weights) {
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
    vec sum = all(0);
    for (int64_t j = 0; j < count; j += WIDE) {
        const int32_t left = count - j < WIDE ? (int32_t)(count - j) : WIDE;
        const vec found = chosen(lanes < left, exponential(wide(weights + j) - most), all(0));
        sum += rounded(found);
        store_weight((weight *)weights + j, found); /* over scores that have been read */
    }
    return count ? 1.0f / sum_of(sum) : 0.0f;
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

/* seen [query heads of the key head, head size]: attention of a column's queries to the slots that it sees. */
static void attend(
    const Layer *l, const number *queries, const number *keys, const number *values, const int64_t *slots, int64_t count, float *weights,
    number *seen) {
    const int64_t size = l->head_size, group = l->query_heads / l->key_heads, stride = (count + 15) / 16 * 16;
    for (int64_t h = 0; h < group; h += 4) {
        const int heads = group - h < 4 ? (int)(group - h) : 4;
        float shares[4];
        for (int i = 0; i < heads; i++)
            shares[i] = attention_weights(l, queries + (h + i) * size, keys, slots, count, weights + i * stride);
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
            s->slots ? s->starts[at + 1] - s->starts[at] : s->places[at] - s->first + 1, own,
            seen + c * l->output.inputs + h * group * size);
    }
}

#endif

/* 0 if all columns are written to slots that are there; else minus one less the first column that is not. */
static int64_t without_slot(const Pass *s, int64_t capacity) {
    for (int64_t c = 0; c < s->rows * s->width; c++)
        if (s->places[c] < s->first || s->places[c] >= capacity) return -c - 1;
    return 0;
}

/* Norms a column's queries and keys, each head by itself or all at once. */
static void norm_heads(const Layer *l, number *heads) {
    for (int of_keys = 0; of_keys < 2; of_keys++) {
        const Norm *m = of_keys ? &l->key_norm : &l->query_norm;
        const int64_t count = of_keys ? l->key_heads : l->query_heads;
        if (m->kind)
            for (int64_t h = 0; h * m->size < count * l->head_size; h++) norm_head(m, heads + h * m->size, h, heads + h * m->size);
        heads += count * l->head_size;
    }
}

/* Norms and turns a column's queries and keys, and writes its keys and values to its slot, [rows, key heads, capacity, size]. */
static void finish_heads(const Layer *l, const Pass *s, int64_t c, number *heads, number *keys, number *values, int64_t capacity) {
    const int64_t size = l->head_size, turned = l->query_heads + l->key_heads;
    const int64_t at = (s->angles == 1 ? c % s->width : c) * size * (l->turning & IN_FLOATS ? sizeof(float) / sizeof(number) : 1);
    if (!l->norms_turned) norm_heads(l, heads);
    for (int64_t h = 0; l->turned && h < turned; h++) turn(l, heads + h * size, s->cos + at, s->sin + at);
    if (l->norms_turned) norm_heads(l, heads);
    for (int64_t h = 0; h < l->key_heads; h++) {
        const int64_t to = ((c / s->width * l->key_heads + h) * capacity + s->places[c]) * size;
        memcpy(keys + to, heads + (l->query_heads + h) * size, size * sizeof(number));
        memcpy(values + to, heads + (turned + h) * size, size * sizeof(number));
    }
}

/* What a product reads: x [n, size], normed into `normed` if there is a norm. Fills `scratch`. Within a parallel region. */
static const number *read_normed(const Norm *m, const Product *p, const number *x, int64_t n, number *normed, float *scratch) {
    const number *given = m->kind ? normed : x;
    const int64_t groups = p->inputs / GROUP;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) {
        if (m->kind) norm_head(m, x + c * p->inputs, 0, normed + c * p->inputs);
        groups_of(p, given, n, c * groups, (c + 1) * groups, scratch);
    }
    return given;
}

/* y [n, size] = residual plus the product, which may be normed before. Otherwise as `product`. */
static void add_product(
    const Product *p, const Norm *after, const number *x, int64_t n, const number *residual, number *y, float *scratch, float *own) {
    product(p, x, n, after->kind ? NULL : residual, y, scratch, own);
    if (!after->kind) return;
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) {
        number *to = y + c * after->size;
        norm_head(after, to, 0, to);
        for (int64_t i = 0; i < after->size; i += WIDE) store(to + i, load(residual + c * after->size + i) + load(to + i));
    }
}

/* The columns [from, from + n) of a layer's output [columns, hidden] for hidden [columns, hidden], within a parallel region.
   beside: what queries, keys and values are computed from; NULL for the norm of hidden. keys, values [rows, key heads, capacity,
   head size]. out: NULL if only keys and values are needed. */
static void layer(
    const Layer *l, const Pass *s, const number *hidden, const number *beside, number *keys, number *values, int64_t capacity, number *out,
    int64_t from, int64_t n) {
    float *own = s->scratch + omp_get_thread_num() * s->of_thread;
    number *normed = s->buffer, *heads = normed + n * l->hidden, *seen = heads + n * l->heads.outputs;
    number *middle = seen + n * l->output.inputs, *again = middle + n * l->hidden;
    number *wide = again + n * l->hidden, *narrow = wide + n * 2 * l->inner;
    hidden += from * l->hidden;
    const number *read = beside ? beside + from * l->heads.inputs : NULL;
    if (!beside) read = read_normed(&l->before_attention, &l->heads, hidden, n, normed, s->scratch);
    product(&l->heads, read, n, NULL, heads, s->scratch, beside ? own : NULL);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < n; c++) finish_heads(l, s, from + c, heads + c * l->heads.outputs, keys, values, capacity);
    if (!out) return;
    out += from * l->hidden;
    attend_all(l, s, heads, keys, values, capacity, seen, from, n);
    if (!l->down.outputs) middle = out;
    add_product(&l->output, &l->after_attention, seen, n, hidden, middle, s->scratch, own);
    if (!l->down.outputs) return;
    read = read_normed(&l->before_mlp, &l->gate_up, l->beside ? read : middle, n, again, s->scratch);
    product(&l->gate_up, read, n, NULL, wide, s->scratch, NULL);
#pragma omp for schedule(static)
    for (int64_t g = 0; g < n * l->inner / GROUP; g++) {
        const int64_t c = GROUP * g / l->inner, at = GROUP * g % l->inner;
        const number *gate = wide + c * l->gate_up.outputs + at;
        UNROLLED for (int i = 0; i < GROUP; i += WIDE) {
            vec made = activated(load(gate + i), l->activation);
            if (l->is_gated) made = rounded(made) * load(gate + l->inner + i);
            store(narrow + g * GROUP + i, made);
        }
        groups_of(&l->down, narrow, n, g, g + 1, s->scratch);
    }
    add_product(&l->down, &l->after_mlp, narrow, n, middle, out, s->scratch, NULL);
}

/* What follows the layers of a model: a norm, and a product from which logits result. */
typedef struct {
    Product output;
    Norm norm;
} End;

/* The layers of a model, one after the other, each over some columns at a time, whose numbers stay in the cache. passes: the same one
   for each layer, which differ in angles and in the slots that columns see. slots: each layer's keys and values. out [count, columns, hidden]: the output of each; NULL, of a single layer, if only keys and values are needed.
   end: NULL if there are no logits [columns, outputs]. Returns what `without_slot` does, and computes nothing unless that is 0. */
int64_t layers(
    const Layer *const *each, int64_t count, const Pass *const *passes, const number *hidden, const number *beside,
    number *const *slots, int64_t capacity, number *out, const End *end, number *logits) {
    const Pass *s = passes[0];
    const int64_t columns = s->rows * s->width, size = each[0]->hidden, wrong = without_slot(s, capacity);
    if (wrong) return wrong;
#pragma omp parallel num_threads(s->threads)
    {
        for (int64_t i = 0; i < count; i++) {
            number *to = out ? out + i * columns * size : NULL;
            for (int64_t from = 0; from < columns; from += s->at_once) {
                const int64_t n = columns - from < s->at_once ? columns - from : s->at_once;
                layer(
                    each[i], passes[i], i ? to - columns * size : hidden, i ? NULL : beside, slots[2 * i], slots[2 * i + 1],
                    capacity, to, from, n);
            }
        }
        for (int64_t from = 0; end && from < columns; from += s->at_once) {
            const int64_t n = columns - from < s->at_once ? columns - from : s->at_once;
            const number *last = out + (count - 1) * columns * size + from * size;
            last = read_normed(&end->norm, &end->output, last, n, s->buffer, s->scratch);
            product(&end->output, last, n, NULL, logits + from * end->output.outputs, s->scratch, NULL);
        }
    }
    return 0;
}

INLINE int any_of(ints where) {
    int found = 0;
    for (int k = 0; k < WIDE; k++) found |= where[k];
    return found;
}

/* Of each row of numbers [rows, stride], the index of the highest of the first `size`: the first of equal ones, or of those that are
   not numbers. */
void highest(const number *numbers, int64_t rows, int64_t stride, int64_t size, int64_t *found) {
    enum { PART = 16 * WIDE };
    for (int64_t r = 0; r < rows; r++) {
        const number *row = numbers + r * stride;
        const int64_t end = size / PART * PART;
        float best = -INFINITY;
        int64_t of_best = 0, at = 0; /* the part that it is in */
        for (int wrong = 0; at < end && !wrong; at += PART) {
            vec most = load(row + at);
            ints unequal = most != most;
            UNROLLED for (int i = WIDE; i < PART; i += WIDE) {
                const vec one = load(row + at + i);
                most = greater(one, most);
                unequal |= one != one;
            }
            wrong = any_of(unequal);
            const float own = most_of(most);
            if (wrong || own > best) best = wrong ? NAN : own, of_best = at;
        }
        for (at = end; at < size && best == best; at++) {
            const float own = number_of(row[at]);
            if (!(own <= best)) best = own, of_best = at;
        }
        while (of_best < size - 1 && number_of(row[of_best]) != best && (best == best || number_of(row[of_best]) == number_of(row[of_best])))
            of_best++;
        found[r] = of_best;
    }
}

/* The slots that columns see, of seen [columns, count], one column after the other, and where each column's begin, [columns + 1]. */
void list_slots(const uint8_t *seen, int64_t columns, int64_t count, int64_t *slots, int64_t *starts) {
    int64_t found = starts[0] = 0;
    for (int64_t c = 0; c < columns; c++) {
        for (int64_t slot = 0; slot < count; slot++) {
            slots[found] = slot;
            found += seen[c * count + slot];
        }
        starts[c + 1] = found;
    }
}

/* Moves columns of slots [rows, heads, capacity, size bytes] to other places, in this order. moves [3, count]: row, to and from.
   Returns 0; or minus one less the first move of what is not there, and then moves nothing. */
int64_t move(
    char *const *stores, int64_t number_of, const int64_t *moves, int64_t count, int64_t rows, int64_t heads, int64_t capacity,
    int64_t size) {
    for (int64_t m = 0; m < 3 * count; m++)
        if (moves[m] < 0 || moves[m] >= (m < count ? rows : capacity)) return -(m % count) - 1;
    for (int64_t i = 0; i < number_of; i++)
        for (int64_t m = 0; m < count; m++)
            for (int64_t h = 0; h < heads; h++) {
                char *slots = stores[i] + (moves[m] * heads + h) * capacity * size;
                memcpy(slots + moves[count + m] * size, slots + moves[2 * count + m] * size, size);
            }
    return 0;
}

enum { HASHES = 8, STEP = HASHES * sizeof(words) };

INLINE void hash_step(words hash[HASHES], const char *bytes) {
    UNROLLED for (int i = 0; i < HASHES; i++) {
        words next;
        memcpy(&next, bytes + i * sizeof next, sizeof next);
        hash[i] = (hash[i] ^ next) * 0x9e3779b1u;
        hash[i] ^= hash[i] >> 15;
    }
}

/* A number for each `part` of some bytes, which depends on all of them and on their order: every step is reversible. */
void hash_parts(const char *bytes, int64_t size, int64_t part, uint64_t *found, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < (size + part - 1) / part; p++) {
        const int64_t end = size < (p + 1) * part ? size : (p + 1) * part;
        int64_t at = p * part;
        words hash[HASHES];
        UNROLLED for (int i = 0; i < HASHES; i++) hash[i] = (words)all(0);
        for (; at + STEP <= end; at += STEP) hash_step(hash, bytes + at);
        char rest[STEP] = {0};
        memcpy(rest, bytes + at, end - at);
        hash_step(hash, rest);
        uint32_t each[STEP / 4];
        memcpy(each, hash, STEP);
        uint64_t whole = end;
        for (int i = 0; i < STEP / 4; i++) {
            whole = (whole ^ each[i]) * 0x9e3779b97f4a7c15u;
            whole ^= whole >> 29;
        }
        found[p] = whole;
    }
}

#include "heads.h"

/* Sizes and offsets of the structs, which `structs.py` mirrors in this order. */
#define AT(type, field) offsetof(type, field)
const int64_t layout[] = {
    sizeof(Product), AT(Product, weights), AT(Product, scales), AT(Product, bias), AT(Product, rows), AT(Product, outputs), AT(Product, inputs),
    AT(Product, bits), AT(Product, input_bits), AT(Product, multiplier),
    sizeof(Norm), AT(Norm, weight), AT(Norm, bias), AT(Norm, size), AT(Norm, apart), AT(Norm, kind), AT(Norm, epsilon),
    sizeof(Layer), AT(Layer, heads), AT(Layer, output), AT(Layer, gate_up), AT(Layer, down), AT(Layer, before_attention),
    AT(Layer, after_attention), AT(Layer, before_mlp), AT(Layer, after_mlp), AT(Layer, query_norm), AT(Layer, key_norm),
    AT(Layer, hidden), AT(Layer, inner), AT(Layer, query_heads), AT(Layer, key_heads), AT(Layer, head_size), AT(Layer, turned),
    AT(Layer, turning), AT(Layer, norms_turned), AT(Layer, is_eager), AT(Layer, beside), AT(Layer, activation), AT(Layer, is_gated),
    AT(Layer, scaling), AT(Layer, cap),
    sizeof(End), AT(End, output), AT(End, norm),
    sizeof(Pass), AT(Pass, rows), AT(Pass, width), AT(Pass, cos), AT(Pass, sin), AT(Pass, angles), AT(Pass, places), AT(Pass, first),
    AT(Pass, slots), AT(Pass, starts), AT(Pass, threads), AT(Pass, at_once), AT(Pass, buffer), AT(Pass, scratch), AT(Pass, of_thread),
    sizeof(Head), AT(Head, layer), AT(Head, output), AT(Head, embeddings), AT(Head, token_norm), AT(Head, state_norm),
    AT(Head, end_norm), AT(Head, tokens), AT(Head, rows), AT(Head, vocabulary), AT(Head, normed_residual), AT(Head, normed_output),
    AT(Head, token_epsilon), AT(Head, state_epsilon), AT(Head, end_epsilon), AT(Head, tap_epsilon), AT(Head, fuse),
    AT(Head, tap_norms), AT(Head, taps),
    sizeof(Tree), AT(Tree, depth), AT(Tree, beam), AT(Tree, candidates), AT(Tree, nodes), AT(Tree, room), AT(Tree, base),
    AT(Tree, slope), AT(Tree, edges), AT(Tree, ranks), AT(Tree, bins), AT(Tree, tokens), AT(Tree, parents), AT(Tree, depths),
    AT(Tree, columns), AT(Tree, children), AT(Tree, scores), AT(Tree, sure), AT(Tree, best), AT(Tree, reading), AT(Tree, found),
    AT(Tree, kept), AT(Tree, width), AT(Tree, read), AT(Tree, last), AT(Tree, known), AT(Tree, states), AT(Tree, before),
    AT(Tree, space), AT(Tree, logits), AT(Tree, angles), AT(Tree, ids), AT(Tree, places), AT(Tree, slots), AT(Tree, starts),
    AT(Tree, scratch),
};
const int64_t layout_numbers = sizeof layout / sizeof *layout;
