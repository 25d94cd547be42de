// Products of tiles of bfloat16 by AMX, for attention_tiles.h. A product of 16 rows, 16 columns and 32 terms takes 16
// cycles.
#pragma once

#include "amx.h"
#include "attention_call.h"

#if defined(KERNELHUB_AMX) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KERNELHUB_ATTENTION_AMX 1

namespace {

// Sums in tiles 0 to 3, from memory or from zero, and to memory; `apart` is from tile to tile.
KERNELHUB_WITH_AMX inline void sums_from(const char *from, int64_t next_row, int64_t next_column) {
    written(from);
    _tile_loadd(0, from, 64);
    _tile_loadd(1, from + next_column, 64);
    _tile_loadd(2, from + next_row, 64);
    _tile_loadd(3, from + next_row + next_column, 64);
}
KERNELHUB_WITH_AMX inline void sums_from_zero() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
KERNELHUB_WITH_AMX inline void sums_to(char *into, int64_t next_row, int64_t next_column) {
    _tile_stored(0, into, 64);
    _tile_stored(1, into + next_column, 64);
    _tile_stored(2, into + next_row, 64);
    _tile_stored(3, into + next_row + next_column, 64);
}

// Two tiles of `a` by two of `b`, each followed by the tiles of the next 32 terms at its step.
KERNELHUB_WITH_AMX inline void two_by_two(const char *a, int64_t next_a, int64_t a_step, const char *b, int64_t next_b,
                                          int64_t b_step, int64_t steps, Ahead *ahead) {
    written(a), written(b);
    for (int64_t i = 0; i < steps; i++, a += a_step, b += b_step) {
        _tile_loadd(4, a, 64);
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b + next_b, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, a + next_a, 64);
        _tile_dpbf16ps(2, 7, 5);
        _tile_dpbf16ps(3, 7, 6);
        if (ahead) ahead->ask();
    }
}

// Four tiles of `a` by one of `b`, and one of `a` by four of `b`. Sums 0, 1, 2 and 3 are those of the four.
KERNELHUB_WITH_AMX inline void four_by_one(const char *a, int64_t next_a, int64_t a_step, const char *b, int64_t b_step,
                                           int64_t steps, Ahead *ahead) {
    written(a), written(b);
    for (int64_t i = 0; i < steps; i++, a += a_step, b += b_step) {
        _tile_loadd(4, b, 64);
        _tile_loadd(5, a, 64);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, a + next_a, 64);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, a + 2 * next_a, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, a + 3 * next_a, 64);
        _tile_dpbf16ps(3, 5, 4);
        if (ahead) ahead->ask();
    }
}
KERNELHUB_WITH_AMX inline void one_by_four(const char *a, int64_t a_step, const char *b, int64_t next_b, int64_t b_step,
                                           int64_t steps, Ahead *ahead) {
    written(a), written(b);
    for (int64_t i = 0; i < steps; i++, a += a_step, b += b_step) {
        _tile_loadd(4, a, 64);
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b + next_b, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, b + 2 * next_b, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, b + 3 * next_b, 64);
        _tile_dpbf16ps(3, 4, 5);
        if (ahead) ahead->ask();
    }
}

struct ByAmx {
    static constexpr bool LONG = false;
    struct Registers {
        const Tiles of_thread;
        Registers() : of_thread(true) {}
    };

    // Products of one strip of a head by a block, in which more keys and values are asked for.
    static int64_t asks(int64_t tall, int64_t k_tiles, int64_t v_tiles, int64_t units) {
        return tall == 2 ? k_tiles * units + v_tiles / 2 * units : k_tiles * ((units + 1) / 2) + v_tiles / 4 * units;
    }

    KERNELHUB_WITH_AMX static void multiply_keys(const Strip &strip, Ahead *ahead) {
        const int64_t next = strip.k_tiles * TILE;
        if (strip.tall == 2) {
            for (int64_t u = strip.from; u < strip.to; u++) {
                sums_from_zero();
                two_by_two(strip.k + 2 * u * next, next, TILE, strip.q, next, TILE, strip.k_tiles, ahead);
                sums_to(strip.scores + 2 * u * TILE, TILE, strip.next_score);
            }
        } else {
            for (int64_t u = strip.from; u < strip.to; u += 2) {
                sums_from_zero();
                four_by_one(strip.k + 2 * u * next, next, TILE, strip.q, TILE, strip.k_tiles, ahead);
                sums_to(strip.scores + 2 * u * TILE, 2 * TILE, TILE);
            }
        }
    }

    KERNELHUB_WITH_AMX static void add_values(const Strip &strip, Ahead *ahead) {
        const int64_t next = strip.v_tiles * TILE, units = strip.to - strip.from;
        const char *right = strip.v + strip.from * next, *left = strip.weights + strip.from * TILE;
        if (strip.tall == 2) {
            for (int64_t d = 0; d < strip.v_tiles; d += 2) {
                sums_from(strip.o + d * TILE, next, TILE);
                two_by_two(left, strip.next_weight, TILE, right + d * TILE, TILE, next, units, ahead);
                sums_to(strip.o + d * TILE, next, TILE);
            }
        } else {
            for (int64_t d = 0; d < strip.v_tiles; d += 4) {
                sums_from(strip.o + d * TILE, 2 * TILE, TILE);
                one_by_four(left, TILE, right + d * TILE, TILE, next, units, ahead);
                sums_to(strip.o + d * TILE, 2 * TILE, TILE);
            }
        }
    }
};

}  // namespace
#endif
