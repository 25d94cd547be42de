// Products of tiles of bfloat16 by AVX-512 BF16, for attention_tiles.h: an instruction adds the products of 16 pairs.
//
// 8 rows by 32 columns of sums stay in registers. For each pair of terms two vectors of the right tiles are loaded, and
// one pair of each row is spread over a vector. Each sum is added in the order of its terms, whichever rows are beside it.
#pragma once

#include "attention_call.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KERNELHUB_ATTENTION_DOTS 1

#include <immintrin.h>

namespace {

template <int ROWS, int COLUMNS, bool ADDED>
__attribute__((noinline)) void dots(const char *a, int64_t a_step, const char *b, int64_t next_b, int64_t b_step,
                                    int64_t steps, char *into, int64_t next_column, Ahead *ahead) {
    __m512 sum[ROWS][COLUMNS];
    // As loops, g++ 12 would write the 16 zeros to memory, too: prefill of 512 tokens takes 0.96 of that time.
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++)
            sum[r][c] = ADDED ? _mm512_load_ps(into + c * next_column + 64 * r) : _mm512_setzero_ps();
    for (int64_t i = 0; i < steps; i++, a += a_step, b += b_step) {
        if (ahead) ahead->ask();
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) {
            __m512bh right[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) right[c] = (__m512bh)_mm512_load_si512(b + c * next_b + 64 * p);
            for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                memcpy(&pair, a + 64 * r + 4 * p, 4);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
                for (int c = 0; c < COLUMNS; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], left, right[c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) _mm512_store_ps(into + c * next_column + 64 * r, sum[r][c]);
}

struct ByDots {
    static constexpr bool LONG = true;  // enough to ask for keys and values while one tile of rows is multiplied
    struct Registers {};

    static int64_t asks(int64_t tall, int64_t k_tiles, int64_t v_tiles, int64_t units) {
        return tall == 2 ? 4 * k_tiles * units + 2 * v_tiles * units : 2 * k_tiles * units + v_tiles * units;
    }

    static void multiply_keys(const Strip &strip, Ahead *ahead) {
        const int64_t next = strip.k_tiles * TILE;
        for (int64_t tile = 2 * strip.from; tile < 2 * strip.to; tile++) {
            const char *left = strip.k + tile * next;
            char *into = strip.scores + tile * TILE;
            if (strip.tall == 2) {
                for (int64_t row = 0; row < 16; row += 8)
                    dots<8, 2, false>(left + 64 * row, TILE, strip.q, next, TILE, strip.k_tiles, into + 64 * row,
                                      strip.next_score, ahead);
            } else {
                dots<16, 1, false>(left, TILE, strip.q, next, TILE, strip.k_tiles, into, strip.next_score, ahead);
            }
        }
    }

    static void add_values(const Strip &strip, Ahead *ahead) {
        const int64_t next = strip.v_tiles * TILE, units = strip.to - strip.from;
        const char *right = strip.v + strip.from * next, *left = strip.weights + strip.from * TILE;
        for (int64_t d = 0; d < strip.v_tiles; d += 2)
            for (int64_t row = 0; row < strip.rows; row += 8)
                dots<8, 2, true>(left + row / 16 * strip.next_weight + row % 16 * 64, TILE, right + d * TILE, TILE, next,
                                 units, strip.o + d * TILE + row / 16 * next + row % 16 * 64, TILE, ahead);
    }
};

}  // namespace
#endif
