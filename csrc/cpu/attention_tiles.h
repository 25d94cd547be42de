// The same attention by products of bfloat16, of bfloat16 queries: of tiles of 16 rows, 16 keys and 32 numbers.
//
//   for each block of keys:
//     keys as tiles of 16 keys; values as tiles of 16 pairs of keys
//     for each KV head of the task, strip of 16 or 32 rows:
//       scores^T = keys . q^T          rows lie in lanes, so softmax needs no sums over lanes
//       weights = as softmax needs them so far, in bfloat16
//       results = results * rescaling + weights . values
//
// attention_amx.h and attention_dots.h multiply tiles. q stays as it is: scores are exact products of bfloat16, added in
// float32, and are scaled then. Codes of fp8 become bfloat16 once for all rows, exactly. Weights are rounded to bfloat16,
// their sums are not. Neither the rows beside a row nor, as blocks start where pieces do, other sequences change a bit of
// its result. Blocks are what the L2 cache holds with all else: of one KV head 256 keys; of several that lie side by side
// 64, which are read in the order of memory while the next are asked for. One head after another, 8 x 2048 keys took 1.15
// times as long by AMX.
#pragma once

#include "attention_call.h"
#include "pairs.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KERNELHUB_ATTENTION_TILES 1

namespace {

// 32 numbers of a row of keys or values, as bfloat16.
template <class Of>
struct Bfloat16s {
    static constexpr bool EXACT = false;
};
template <>
struct Bfloat16s<OfBfloat16> {
    static constexpr bool EXACT = true;
    static __m512i load(const char *from) { return _mm512_loadu_si512(from); }
    static __m512i load(const char *from, __mmask32 kept) { return _mm512_maskz_loadu_epi16(kept, from); }
};
template <>
struct Bfloat16s<OfE4m3> {
    static constexpr bool EXACT = true;
    static __m512i load(const char *from, __mmask32 kept = ~0u) {
        return decode(reinterpret_cast<const uint8_t *>(from), kept);
    }
};
template <>
struct Bfloat16s<OfE5m2> {
    static constexpr bool EXACT = true;
    static __m512i load(const char *from, __mmask32 kept = ~0u) {
        const __m256i codes = load_codes(reinterpret_cast<const uint8_t *>(from), kept);
        Vector low, high;
        widen_half(halves_of_e5m2(_mm512_cvtepu8_epi16(codes)), low, high);
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    }
};

// 2^x for x <= 0, to 2^-18 of itself; below 2^-125 it is 0. Results that are no normal numbers take the CPU 100 cycles.
inline __m512 power_of_two(__m512 x) {
    const __m512 least = _mm512_set1_ps(-125.0f);
    const __mmask16 some = _mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ);  // NaN, too
    const __m512 kept = _mm512_max_ps(least, x);                       // NaN stays
    const __m512 whole = _mm512_roundscale_ps(kept, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(kept, whole);
    __m512 result = _mm512_fmadd_ps(rest, _mm512_set1_ps(0.009582853f), _mm512_set1_ps(0.055906426f));
    result = _mm512_fmadd_ps(result, rest, _mm512_set1_ps(0.24024099f));
    result = _mm512_fmadd_ps(result, rest, _mm512_set1_ps(0.6931242f));
    result = _mm512_fmadd_ps(result, rest, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(some, result, whole);
}

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// A task's rows by a block of keys at a time. Tiles of results: for each head, 16 rows and 16 columns, by rows first.
template <class Of, class Product>
struct OnTiles {
    typedef Bfloat16s<Of> From;

    const Call &c;
    const Task &task;
    const int64_t group, rows, row_tiles, k_tiles, v_tiles, block;
    char *q, *o, *k, *v, *weights, *staged, *zeros;
    float *scores, *largest, *sum;
    int32_t *low, *high;  // of a row, from the first key of the task on

    static constexpr int64_t ROOM = 2 * UNIT;  // what a block has more: units are taken by two

    static int64_t k_tiles_of(const Call &c) { return (c.width + 31) / 32; }
    static int64_t v_tiles_of(const Call &c) { return (c.value_width + 63) / 64 * 4; }

    // Keys of a block: what is taken of each head before the next one, where the heads of a token lie side by side.
    static int64_t block_of(const Call &c, int64_t queries) {
        const bool apart = c.kv_heads == 1 || c.k.head > c.k.token || c.v.head > c.v.token;
        return apart || queries * c.group() > 16 ? KEYS_AT_ONCE : 64;
    }

    static int64_t bytes(const Call &c, int64_t lines, int64_t heads) {
        const int64_t tiles = lines / 16 + heads, widths = k_tiles_of(c) + v_tiles_of(c);
        const int64_t of_keys = (KEYS_AT_ONCE + ROOM) / 16 * k_tiles_of(c) + (KEYS_AT_ONCE + ROOM) / 32 * v_tiles_of(c);
        const int64_t of_weights = 2 * (KEYS_AT_ONCE + ROOM) / 16 + 2 * (KEYS_AT_ONCE + ROOM) / 32;
        return (tiles * widths + heads * of_keys + of_weights) * TILE + tiles * 4 * 64 + staged_bytes(c) + line_of(c) +
               64 * 16;
    }
    static int64_t staged_bytes(const Call &c) { return 16 * 2 * (std::max(c.width, c.value_width) + 64); }
    static int64_t line_of(const Call &c) { return (std::max(c.width, c.value_width) * Of::BYTES + 127) / 64 * 64; }

    OnTiles(const Call &call, const Task &of, Cursor &cursor)
        : c(call),
          task(of),
          group(call.group()),
          rows(of.count * group),
          row_tiles((rows + 15) / 16),
          k_tiles(k_tiles_of(call)),
          v_tiles(v_tiles_of(call)),
          block(block_of(call, call.queries(of.sequence))) {
        const int64_t tiles = row_tiles * task.kv_heads;
        q = cursor.take<char>(tiles * k_tiles * TILE), o = cursor.take<char>(tiles * v_tiles * TILE);
        k = cursor.take<char>(task.kv_heads * (block + ROOM) / 16 * k_tiles * TILE);
        v = cursor.take<char>(task.kv_heads * (block + ROOM) / 32 * v_tiles * TILE);
        scores = cursor.take<float>(2 * 16 * (block + ROOM)), weights = cursor.take<char>(2 * 32 * (block + ROOM));
        largest = cursor.take<float>(16 * tiles), sum = cursor.take<float>(16 * tiles);
        low = cursor.take<int32_t>(16 * row_tiles), high = cursor.take<int32_t>(16 * row_tiles);
        staged = cursor.take<char>(staged_bytes(c)), zeros = cursor.take<char>(line_of(c));
        memset(zeros, 0, line_of(c));
    }

    // Numbers of a row, one after another: where they are, or copied.
    static const char *in_line(const char *from, int64_t step, int64_t width, int64_t bytes, char *into) {
        if (step == bytes) return from;
        for (int64_t d = 0; d < width; d++) memcpy(into + d * bytes, from + d * step, bytes);
        return into;
    }

    static int32_t place_of(int64_t position, int64_t first) {
        return static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(position - first, INT32_MIN), INT32_MAX));
    }

    // Queries as pairs of 16 rows, and what each row sees.
    void begin() {
        const int64_t b = task.sequence, queries = c.queries(b), length = c.length(b), batch = c.starts_q ? 0 : b;
        for (int64_t r = 0; r < 16 * row_tiles; r++) low[r] = 0, high[r] = r < rows ? 0 : INT32_MAX;
        for (int64_t t = 0; t < task.count; t++) {
            const Range range(c, length, length - queries + task.first + t);
            for (int64_t r = t * group; r < (t + 1) * group; r++)
                low[r] = place_of(range.low, task.low), high[r] = place_of(range.high, task.low);
        }
        for (int64_t h = 0; h < task.kv_heads; h++)
            for (int64_t tile = 0; tile < row_tiles; tile++) {
                const char *from[16];
                const int64_t some = std::min<int64_t>(16, rows - 16 * tile), step = 2 * c.of_q.element;
                for (int64_t r = 0; r < some; r++) {
                    const int64_t row = 16 * tile + r, token = c.first_query(b) + task.first + row / group;
                    const int64_t place = c.of_q.at(batch, token, (task.kv_head + h) * group + row % group);
                    from[r] = in_line(static_cast<const char *>(c.q) + 2 * place, step, c.width, 2,
                                      staged + r * 2 * (c.width + 32));
                }
                char *into = q + (h * row_tiles + tile) * k_tiles * TILE;
                for (int64_t d = 0; d < k_tiles; d++) {
                    const __mmask32 kept = up_to(c.width - 32 * d);
                    __m512i words[16];
                    for (int64_t r = 0; r < 16; r++)
                        words[r] = r < some ? _mm512_maskz_loadu_epi16(kept, from[r] + 64 * d) : _mm512_setzero_si512();
                    transpose(words);
                    for (int64_t p = 0; p < 16; p++) _mm512_store_si512(into + d * TILE + 64 * p, words[p]);
                }
            }
        for (int64_t i = 0; i < 16 * row_tiles * task.kv_heads; i++) largest[i] = -INFINITY, sum[i] = 0.0f;
        memset(o, 0, row_tiles * task.kv_heads * v_tiles * TILE);
    }

    char *k_of(int64_t h) const { return k + h * (block + ROOM) / 16 * k_tiles * TILE; }
    char *v_of(int64_t h) const { return v + h * (block + ROOM) / 32 * v_tiles * TILE; }

    // Rows of a pair of keys to tiles of keys, and of a pair of values to tiles of pairs. WHOLE rows end where a vector
    // does.
    template <bool WHOLE>
    static void put_keys(char *into, const char *one, const char *other, int64_t width) {
        for (int64_t d = 0; d < width; d += 32, into += TILE) {
            _mm512_store_si512(into, some<WHOLE>(one, d, width));
            _mm512_store_si512(into + 64, some<WHOLE>(other, d, width));
        }
    }
    template <bool WHOLE>
    static void put_values(char *into, const char *one, const char *other, int64_t width) {
        for (int64_t d = 0; d < width; d += 32, into += 2 * TILE) {
            const __m512i even = some<WHOLE>(one, d, width), odd = some<WHOLE>(other, d, width);
            _mm512_store_si512(into, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(into + TILE, _mm512_unpackhi_epi16(even, odd));
        }
    }
    // Of latents, whose beginning is their value: `of_values` columns, or some more.
    template <bool WHOLE>
    static void put_both(char *keys, char *values, const char *one, const char *other, int64_t width, int64_t of_values) {
        for (int64_t d = 0; d < width; d += 32, keys += TILE) {
            const __m512i even = some<WHOLE>(one, d, width), odd = some<WHOLE>(other, d, width);
            _mm512_store_si512(keys, even);
            _mm512_store_si512(keys + 64, odd);
            if (d >= of_values) continue;
            _mm512_store_si512(values, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(values + TILE, _mm512_unpackhi_epi16(even, odd));
            values += 2 * TILE;
        }
    }
    template <bool WHOLE>
    static __m512i some(const char *row, int64_t d, int64_t width) {
        return WHOLE ? From::load(row + d * Of::BYTES) : From::load(row + d * Of::BYTES, up_to(width - d));
    }

    bool shared() const { return c.shared(); }

    // How often some lines of the next block are asked for: while keys are packed and, if there is much to multiply, then.
    int64_t asks(int64_t count) const {
        const int64_t units = (count + UNIT - 1) / UNIT, packing = UNIT / 2 * units * (shared() ? 1 : 2);
        if (!much()) return packing;
        const int64_t of_two = Product::asks(2, k_tiles, v_tiles, units), of_one = Product::asks(1, k_tiles, v_tiles, units);
        return packing + task.kv_heads * (row_tiles / 2 * of_two + row_tiles % 2 * of_one);
    }
    bool much() const { return Product::LONG || row_tiles > 1; }

    // Keys and values of all heads of a block as tiles. Memory is read in the order of the keys.
    void pack(const Places &here, Ahead &ahead) const {
        if (c.width % 32 || c.value_width % 32) pack<false>(here, ahead);
        else pack<true>(here, ahead);
    }
    template <bool WHOLE>
    void pack(const Places &here, Ahead &ahead) const {
        const bool both = shared();
        const int64_t whole = (here.count + UNIT - 1) / UNIT * UNIT;
        for (int64_t j = 0; j < whole; j += 2) {
            const int64_t place = j / 16 * k_tiles * TILE + j % 16 * 64, of_values = j / 32 * v_tiles * TILE + j % 32 * 32;
            for (int64_t h = 0; h < task.kv_heads; h++) {
                const char *one = row(here.k, here.count, j, c.k, h, c.width, 0);
                const char *other = row(here.k, here.count, j + 1, c.k, h, c.width, 1);
                if (both) put_both<WHOLE>(k_of(h) + place, v_of(h) + of_values, one, other, c.width, c.value_width);
                else put_keys<WHOLE>(k_of(h) + place, one, other, c.width);
            }
            ahead.ask();
        }
        for (int64_t j = 0; j < whole && !both; j += 2) {
            const int64_t place = j / 32 * v_tiles * TILE + j % 32 * 32;
            for (int64_t h = 0; h < task.kv_heads; h++) {
                const char *one = row(here.v, here.count, j, c.v, h, c.value_width, 0);
                const char *other = row(here.v, here.count, j + 1, c.v, h, c.value_width, 1);
                put_values<WHOLE>(v_of(h) + place, one, other, c.value_width);
            }
            ahead.ask();
        }
    }
    // A row of a head, of zeros where a block has ended.
    const char *row(const char *const *places, int64_t count, int64_t j, const Keys &keys, int64_t h, int64_t width,
                    int64_t which) const {
        if (j >= count) return zeros;
        const char *at = places[j] + h * keys.head;
        return keys.element == Of::BYTES ? at : in_line(at, keys.element, width, Of::BYTES, staged + which * line_of(c));
    }

    void attend(const Places &here, int64_t first, int64_t h, Ahead &given) const {
        Ahead *const ahead = much() ? &given : nullptr;
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
            const int64_t tall = std::min<int64_t>(2, row_tiles - tile), end = first + here.count;
            int64_t from = end, to = first;  // keys that the strip sees
            for (int64_t r = 16 * tile; r < std::min(rows, 16 * (tile + tall)); r++)
                from = std::min<int64_t>(from, low[r]), to = std::max<int64_t>(to, high[r]);
            from = std::max(from, first), to = std::min(to, end);
            if (from >= to) continue;
            from = (from - first) / UNIT, to = (to - first + UNIT - 1) / UNIT;
            const int64_t place = h * row_tiles + tile;
            const Strip strip{k_of(h),
                              v_of(h),
                              q + place * k_tiles * TILE,
                              weights,
                              reinterpret_cast<char *>(scores),
                              o + place * v_tiles * TILE,
                              k_tiles,
                              v_tiles,
                              (block + ROOM) / UNIT * TILE,
                              (block + ROOM) * 64,
                              tall,
                              std::min(rows - 16 * tile, 16 * tall),
                              from,
                              to};
            Product::multiply_keys(strip, ahead);
            for (int64_t t = 0; t < tall; t++) weigh(h, tile + t, t, first, from * UNIT, std::min(to * UNIT, here.count));
            Product::add_values(strip, ahead);
        }
    }

    // Weights of keys [from, to) of the block for 16 rows, as tiles of rows by pairs of keys.
    void weigh(int64_t h, int64_t tile, int64_t of_strip, int64_t first, int64_t from, int64_t to) const {
        float *s = scores + of_strip * (block + ROOM) * 16;
        char *into = weights + of_strip * (block + ROOM) / UNIT * TILE;
        const float k_scale = c.k_scale ? c.k_scale[(task.kv_head + h) * c.k_scale_step] : 1.0f;
        const float scale = c.scale * k_scale;
        bool partly = false;
        for (int64_t r = 16 * tile; r < 16 * (tile + 1); r++) partly |= low[r] > first + from || high[r] < first + to;
        float factor = scale * LOG2_E;
        if (partly || c.softcap > 0.0f || !(scale > 0.0f)) {
            const __m512i lows = _mm512_loadu_si512(low + 16 * tile), highs = _mm512_loadu_si512(high + 16 * tile);
            for (int64_t j = from; j < to; j++) {
                Vector score = scale * load(s + 16 * j);
                if (c.softcap > 0.0f) score = c.softcap * hyperbolic_tangent(score / c.softcap);
                const __m512i key = _mm512_set1_epi32(static_cast<int32_t>(first + j));
                const __mmask16 seen = _mm512_cmp_epi32_mask(lows, key, _MM_CMPINT_LE);
                const __mmask16 kept = _mm512_mask_cmp_epi32_mask(seen, key, highs, _MM_CMPINT_LT);
                _mm512_store_ps(s + 16 * j, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), kept, (__m512)score));
            }
            factor = LOG2_E;
        }
        const int64_t whole = (to + UNIT - 1) / UNIT * UNIT;
        const __m512 none = _mm512_set1_ps(-INFINITY);
        __m512 times = _mm512_set1_ps(factor);
        for (int64_t j = to; j < whole; j++) _mm512_store_ps(s + 16 * j, none);
        __m512 most[4] = {none, none, none, none};
        for (int64_t j = from; j < whole; j += 4)
            for (int64_t i = 0; i < 4; i++) most[i] = _mm512_max_ps(_mm512_load_ps(s + 16 * (j + i)), most[i]);
        float *of_largest = largest + 16 * (h * row_tiles + tile), *of_sum = sum + 16 * (h * row_tiles + tile);
        const __m512 before = _mm512_load_ps(of_largest);
        const __m512 of_block = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        const __m512 top = _mm512_max_ps(_mm512_mul_ps(of_block, times), before);
        _mm512_store_ps(of_largest, top);
        const __m512 base = _mm512_mask_mov_ps(top, _mm512_cmp_ps_mask(top, none, _CMP_EQ_OQ), _mm512_setzero_ps());
        const __m512 rescaling = power_of_two(_mm512_sub_ps(before, base));
        // `base` is rounded, and the products below are not: from 2^31 on one may be so far above it that 2^x overflows.
        if (_mm512_cmp_ps_mask(_mm512_abs_ps(base), _mm512_set1_ps(1073741824.0f), _CMP_GT_OQ) != 0) {
            for (int64_t j = from; j < whole; j++)
                _mm512_store_ps(s + 16 * j, _mm512_mul_ps(_mm512_load_ps(s + 16 * j), times));
            times = _mm512_set1_ps(1.0f);
        }
        const __m512i interleaved = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                     6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t unit = from; unit < whole; unit += UNIT) {
            __m512i pairs[16];
            for (int64_t p = 0; p < 16; p++) {
                __m512 weight[2];
                for (int64_t i = 0; i < 2; i++) {
                    weight[i] = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(s + 16 * (unit + 2 * p + i)), times, base));
                    total[i] = _mm512_add_ps(total[i], weight[i]);
                }
                pairs[p] = _mm512_permutexvar_epi16(interleaved, (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));
            }
            transpose(pairs);
            for (int64_t r = 0; r < 16; r++) _mm512_store_si512(into + unit / UNIT * TILE + 64 * r, pairs[r]);
        }
        const __m512 all = _mm512_add_ps(total[0], total[1]);
        _mm512_store_ps(of_sum, _mm512_fmadd_ps(_mm512_load_ps(of_sum), rescaling, all));
        if (_mm512_cmp_ps_mask(rescaling, _mm512_set1_ps(1.0f), _CMP_EQ_OQ) != 0xffff) rescale(h, tile, rescaling);
    }

    void rescale(int64_t h, int64_t tile, __m512 rescaling) const {
        alignas(64) float factors[16];
        _mm512_store_ps(factors, rescaling);
        float *of_tiles = reinterpret_cast<float *>(o + (h * row_tiles + tile) * v_tiles * TILE);
        for (int64_t r = 0; r < 16; r++) {
            if (factors[r] == 1.0f) continue;
            const __m512 factor = _mm512_set1_ps(factors[r]);
            for (float *at = of_tiles + 16 * r; at < of_tiles + v_tiles * 256; at += 256)
                _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
        }
    }

    // A row's results in the order of columns; of v_tiles * 16.
    void results(int64_t line, float *into) const {
        const __m512i low_half = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i high_half = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
        const float *from = reinterpret_cast<const float *>(o) + tile_of(line) * v_tiles * 256 + line % rows % 16 * 16;
        for (int64_t d = 0; d < v_tiles; d += 2) {
            const __m512 even = _mm512_load_ps(from + d * 256), odd = _mm512_load_ps(from + (d + 1) * 256);
            _mm512_storeu_ps(into + 16 * d, _mm512_permutex2var_ps(even, low_half, odd));
            _mm512_storeu_ps(into + 16 * d + 16, _mm512_permutex2var_ps(even, high_half, odd));
        }
    }
    float largest_of(int64_t line) const { return largest[place(line)] * LN_2; }
    float sum_of(int64_t line) const { return sum[place(line)]; }

    int64_t tile_of(int64_t line) const { return line / rows * row_tiles + line % rows / 16; }
    int64_t place(int64_t line) const { return 16 * tile_of(line) + line % rows % 16; }
};

}  // namespace
#endif
