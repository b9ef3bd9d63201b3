/* Forward passes over few columns: products with weights of 32, 16, 8 or 4 bits, and the layers made of them.

   Every column is computed by the same operations in the same order, however many columns come along, wherever it stands among
   them, and whatever the slots hold that it does not see. So a pass over a draft has the bits of passes over single columns.
   Numbers are bfloat16, or float32 with -DFLOAT32, and sums are float32; results are rounded where transformers rounds them.

   vec.h        vectors of any width, numbers
   abi.h        the structs that Python fills
   rows.h       weights where the model has them
   packed.h     packed weights: bfloat16 by AVX512-BF16 (DOTS) or in float32
   integers.h   inputs that are rounded to 8 bits, by VNNI where there is such
   tiles.h      packed weights, by the tiles of AMX (TILED)
   product.h    any of these, by some threads
   activations.h what an MLP has between its products
   attention.h  scores, softmax and means of values; attention_tiles.h with AMX
   delta.h      the gated delta rule
   layer.h      norms, rotary embedding, whole layers
   heads.h      heads of one layer, and token trees
   native.c     what Python calls beside these */

#include "heads.h"
#include "layer.h"

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

/* Sizes and offsets of the structs, which `structs.py` mirrors in this order. */
#define AT(type, field) offsetof(type, field)
const int64_t layout[] = {
    sizeof(Product), AT(Product, weights), AT(Product, scales), AT(Product, bias), AT(Product, rows), AT(Product, outputs),
    AT(Product, inputs), AT(Product, bits), AT(Product, input_bits), AT(Product, multiplier),
    sizeof(Norm), AT(Norm, weight), AT(Norm, bias), AT(Norm, size), AT(Norm, apart), AT(Norm, kind), AT(Norm, epsilon),
    sizeof(Delta), AT(Delta, conv), AT(Delta, conv_bias), AT(Delta, rates), AT(Delta, shift), AT(Delta, norm), AT(Delta, heads),
    AT(Delta, key_heads), AT(Delta, dk), AT(Delta, dv), AT(Delta, size), AT(Delta, rounds_norm), AT(Delta, queries_at),
    AT(Delta, keys_at), AT(Delta, values_at), AT(Delta, gates_at), AT(Delta, strengths_at), AT(Delta, decays_at),
    AT(Delta, keys_apart), AT(Delta, values_apart), AT(Delta, small_apart), AT(Delta, strongest), AT(Delta, epsilon),
    sizeof(Layer), AT(Layer, heads), AT(Layer, output), AT(Layer, gate_up), AT(Layer, down), AT(Layer, before_attention),
    AT(Layer, after_attention), AT(Layer, before_mlp), AT(Layer, after_mlp), AT(Layer, query_norm), AT(Layer, key_norm),
    AT(Layer, hidden), AT(Layer, inner), AT(Layer, query_heads), AT(Layer, key_heads), AT(Layer, head_size), AT(Layer, turned),
    AT(Layer, turning), AT(Layer, norms_turned), AT(Layer, is_eager), AT(Layer, beside), AT(Layer, activation), AT(Layer, is_gated),
    AT(Layer, has_gates), AT(Layer, scaling), AT(Layer, cap), AT(Layer, sinks), AT(Layer, xielu_above), AT(Layer, xielu_below),
    AT(Layer, xielu_beta), AT(Layer, xielu_epsilon), AT(Layer, delta),
    sizeof(Pass), AT(Pass, rows), AT(Pass, width), AT(Pass, parents), AT(Pass, cos), AT(Pass, sin), AT(Pass, angles),
    AT(Pass, places), AT(Pass, first), AT(Pass, slots), AT(Pass, starts), AT(Pass, threads), AT(Pass, at_once), AT(Pass, buffer),
    AT(Pass, scratch), AT(Pass, of_thread),
    sizeof(End), AT(End, output), AT(End, norm),
    sizeof(Head), AT(Head, layer), AT(Head, output), AT(Head, embeddings), AT(Head, token_norm), AT(Head, state_norm),
    AT(Head, end_norm), AT(Head, join), AT(Head, tokens), AT(Head, rows), AT(Head, vocabulary), AT(Head, normed_residual),
    AT(Head, normed_output), AT(Head, fuse), AT(Head, tap_norms), AT(Head, taps), AT(Head, tap_epsilon),
    sizeof(Tree), AT(Tree, depth), AT(Tree, beam), AT(Tree, candidates), AT(Tree, nodes), AT(Tree, room), AT(Tree, base),
    AT(Tree, slope), AT(Tree, edges), AT(Tree, ranks), AT(Tree, bins), AT(Tree, tokens), AT(Tree, parents), AT(Tree, depths),
    AT(Tree, columns), AT(Tree, children), AT(Tree, scores), AT(Tree, sure), AT(Tree, best), AT(Tree, reading), AT(Tree, found),
    AT(Tree, kept), AT(Tree, width), AT(Tree, read), AT(Tree, last), AT(Tree, known), AT(Tree, states), AT(Tree, before),
    AT(Tree, space), AT(Tree, logits), AT(Tree, angles), AT(Tree, ids), AT(Tree, places), AT(Tree, slots), AT(Tree, starts),
    AT(Tree, scratch),
};
const int64_t layout_numbers = sizeof layout / sizeof *layout;
