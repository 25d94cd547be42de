// Rows of activations by rows of weights that are read as codes, once: out[m, n] = sum over groups g of
// (sum over k in g of a[m, k] b[n, k]) * a_scale[m, g] * b_scale[n / row_block, g], + bias[n].
//
// Few rows: each row of b is decoded in registers and multiplied by all rows of a. More: 64 rows of b at a time are
// decoded into a panel in the order in which the instructions want them, and tiles of 6 x 64 results are kept in
// registers, or of 16 x 64 with AMX. With AVX-512 BF16 pairs of bfloat16, which hold every e4m3 number, are multiplied and
// added in float32; elsewhere float32 is. A group's sum is scaled in float32 before it joins the others. Codes of fp4 are
// multiplied by the scale of their 16 or 32 as they are decoded: what comes of it has six bits, and bfloat16 holds it.
#pragma once

#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "amx.h"
#include "numbers.h"
#include "pairs.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct Scale {
    const void *values;
    int64_t row, column;  // strides
    int64_t e8m0;         // one byte each

    float at(int64_t i, int64_t g) const {
        const int64_t place = i * row + g * column;
        if (!e8m0) return static_cast<const float *>(values)[place];
        return MEANING.e8m0[static_cast<const uint8_t *>(values)[place]];
    }
};

// Of a product of scales: whether it is a number of float32 that lost no bits. Else a sum is multiplied by the larger and
// then by the smaller, which loses none that the result has: 2^127 x 2^127 x 0 is 0.
inline bool is_normal(float product) {
    const float size = std::fabs(product);
    return size >= FLT_MIN && size <= FLT_MAX;
}

inline float larger_of(float s, float t) { return std::fabs(s) > std::fabs(t) ? s : t; }
inline float smaller_of(float s, float t) { return std::fabs(s) > std::fabs(t) ? t : s; }

enum Codes : int64_t { E4M3, MXFP4, NVFP4 };

// Exact, and rounded to nearest even.
void store(void *out, int64_t place, int64_t kind, float value) {
    with(kind, [&](auto of) {
        typedef decltype(of) Of;
        static_cast<typename Of::Held *>(out)[place] = Of::held(value);
    });
}

struct Call {
    const uint8_t *a, *b;
    Scale a_scale, b_scale;
    const float *bias;  // or null
    void *out;
    void *work;  // of a: rows x terms x padded in the type that is multiplied
    int64_t m, n, k, group, row_block;
    int64_t stride_am, stride_bn, stride_om, kind;
    int threads;
    int64_t codes = E4M3;
    const uint8_t *code_scale = nullptr;  // of fp4, one for each 32 (e8m0) or 16 (e4m3) codes
    int64_t stride_code_scale = 0;
    int64_t terms = 1;              // whose sum a row of a is
    const int32_t *rows = nullptr;  // of `work`, those that are multiplied; else those from `first_row` on
    int64_t first_row = 0;
    int64_t together = 0;  // rows that one task takes, as `divide` says

    int64_t groups() const { return (k + group - 1) / group; }
    int64_t padded() const { return (k + 31) / 32 * 32; }
    int64_t place(int64_t i) const { return (rows ? rows[i] : first_row + i) * terms * padded(); }
    void finish(int64_t i, int64_t j, float sum) const { store(out, i * stride_om + j, kind, bias ? sum + bias[j] : sum); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

typedef uint16_t Element;
constexpr int64_t PANEL = 64;        // rows of b
constexpr int64_t DEPTH = 1024;      // columns of a panel: 128 KB, which stay in L2
constexpr int64_t MOST_ROWS = 2048;  // of a that share a panel: their float32 sums are 512 KB
// Rows up to which panels do not pay: 6, 7 and 8 rows by 8 experts of 7168 x 256 on a Zen 5 core take 3.5, 7.3 and 8.5 ms
// without, since the registers for sums do not suffice; 4.9, 5.4 and 5.5 with them.
constexpr int64_t FEW = 6;

// 32 codes of fp4 times two scales, of 16 codes each, as bfloat16.
inline __m512i decode(const uint8_t *codes, bool all, float first, float second) {
    const __m512 values = _mm512_set_ps(-6.0f, -4.0f, -3.0f, -2.0f, -1.5f, -1.0f, -0.5f, -0.0f, 6.0f, 4.0f, 3.0f, 2.0f, 1.5f,
                                        1.0f, 0.5f, 0.0f);
    const __m128i packed = all ? _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes))
                               : _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes));
    const __m512i pairs = _mm512_cvtepu8_epi32(packed);
    const __m512 scale = _mm512_mask_mov_ps(_mm512_set1_ps(first), 0xff00, _mm512_set1_ps(second));
    const __m512 even = _mm512_mul_ps(_mm512_permutexvar_ps(pairs, values), scale);  // by the low four bits
    const __m512 odd = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values), scale);
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                           _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

inline __mmask16 are_normal(__m512 products) {
    const __m512 size = _mm512_abs_ps(products);
    const __mmask16 large = _mm512_cmp_ps_mask(size, _mm512_set1_ps(FLT_MIN), _CMP_GE_OQ);
    return _mm512_mask_cmp_ps_mask(large, size, _mm512_set1_ps(FLT_MAX), _CMP_LE_OQ);
}

// Columns of a line of the cache.
template <Codes CODES>
constexpr int64_t LINE = CODES == E4M3 ? 64 : 128;

// A row of b.
template <Codes CODES>
struct Row {
    const uint8_t *codes, *scale;

    Row(const Call &c, int64_t n)
        : codes(c.b + n * c.stride_bn), scale(CODES == E4M3 ? nullptr : c.code_scale + n * c.stride_code_scale) {}

    // Columns k..k + 32, all of which there are.
    __m512i whole(int64_t k) const {
        if (CODES == E4M3) return decode(codes + k, ~0u);
        if (CODES == MXFP4) return decode(codes + k / 2, true, MEANING.eighth[scale[k / 32]], MEANING.eighth[scale[k / 32]]);
        return decode(codes + k / 2, true, MEANING.e4m3[scale[k / 16]], MEANING.e4m3[scale[k / 16 + 1]]);
    }

    // Into the cache, where there is memory at all.
    void ask_for(int64_t k) const {
        _mm_prefetch(reinterpret_cast<const char *>(codes + k * 64 / LINE<CODES>), _MM_HINT_T0);
    }

    // Those of them that are below `to`, and zeros.
    __m512i some(int64_t k, int64_t to) const {
        if (to - k >= 32) return whole(k);
        if (CODES == E4M3) return decode(codes + k, up_to(to - k));
        return decode(codes + k / 2, false, MEANING.e4m3[scale[k / 16]], 0.0f);  // only NVFP4 ends in half of 32
    }
};

inline __m512 add_products(__m512 sum, __m512i x, __m512i y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }

inline void decode_row(const uint8_t *codes, int64_t count, Element *into) {
    for (int64_t k = 0; k < count; k += 32) _mm512_storeu_si512(into + k, decode(codes + k, up_to(count - k)));
}

// Sums into a row of the result, as `finish` does with one. One by one, the 2^20 of 128 products of
// 16 x 512 x 128 took 9 of 11 ms.
void finish_row(const Call &c, int64_t i, int64_t first, int64_t columns, const float *sums) {
    for (int64_t j = 0; j < columns; j += 16) {
        const __mmask16 kept = columns - j >= 16 ? 0xffff : (1u << (columns - j)) - 1;
        __m512 value = _mm512_loadu_ps(sums + j);
        if (c.bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(kept, c.bias + first + j));
        const int64_t place = i * c.stride_om + first + j;
        if (c.kind == FLOAT32) {
            _mm512_mask_storeu_ps(static_cast<float *>(c.out) + place, kept, value);
            continue;
        }
        __m256i half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        if (c.kind == BFLOAT16) {
            const __m512i bits = _mm512_castps_si512(value), one = _mm512_set1_epi32(1);
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
            const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
            const __m512i high = _mm512_srli_epi32(up, 16);
            half = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(high, nan, _mm512_set1_epi32(0x7fc0)));
        }
        _mm256_mask_storeu_epi16(static_cast<uint16_t *>(c.out) + place, kept, half);
    }
}

// Columns between what is read and what is asked for: the machine foresees one stream, not several. One and four rows by
// 8 experts of 7168 x 256 on a Zen 5 core: 2.8 and 4.3 ms without, 1.8 and 3.0 with 1024, 1.6 and 2.5 with 2048.
constexpr int64_t AHEAD = 2048;
constexpr int64_t CHUNK = 16;  // rows of b that a task of few rows takes

template <Codes CODES, class Which, int... J>
std::array<Row<CODES>, sizeof...(J)> rows_of(const Call &c, const Which &which, std::integer_sequence<int, J...>) {
    return {Row<CODES>(c, which(J))...};
}

// LINES are rows of a, or, where those are sums of several terms, these; SIDE rows of b are taken side by side, so that
// what is loaded of a serves them all.
template <Codes CODES, int LINES, int SIDE>
void few_rows(const Call &c, const Element *a, int64_t begin, int64_t end) {
    const int64_t groups = c.groups();
    const Element *left[LINES];
    for (int i = 0; i < LINES; i++) left[i] = a + c.place(i / c.terms) + i % c.terms * c.padded();
    __m512 totals[LINES][CHUNK];
    const int64_t jump = SIDE * c.stride_bn * LINE<CODES> / 64;
    for (int64_t first = begin; first < begin + CHUNK; first += SIDE) {
        const auto row = [&](int j) { return first + j < end ? first + j : end - 1; };
        const auto rows = rows_of<CODES>(c, row, std::make_integer_sequence<int, SIDE>());
        __m512 total[LINES][SIDE];
        for (int i = 0; i < LINES; i++)
            for (int j = 0; j < SIDE; j++) total[i][j] = _mm512_setzero_ps();
        for (int64_t g = 0; g < groups && first < end; g++) {
            const int64_t from = g * c.group, to = from + c.group < c.k ? from + c.group : c.k;
            __m512 sum[LINES][SIDE];
            for (int i = 0; i < LINES; i++)
                for (int j = 0; j < SIDE; j++) sum[i][j] = _mm512_setzero_ps();
            const auto add = [&](int64_t k, const __m512i *right) {
                for (int i = 0; i < LINES; i++) {
                    const __m512i one = _mm512_loadu_si512(left[i] + k);
                    for (int j = 0; j < SIDE; j++) sum[i][j] = add_products(sum[i][j], right[j], one);
                }
            };
            int64_t k = from;
            __m512i right[SIDE];
            for (; k + 32 <= to; k += 32) {
                if (k % LINE<CODES> == 0) {
                    const int64_t ahead = k + AHEAD < c.k ? k + AHEAD : k + AHEAD - c.k + jump;
                    for (int j = 0; j < SIDE; j++) rows[j].ask_for(ahead);
                }
                for (int j = 0; j < SIDE; j++) right[j] = rows[j].whole(k);
                add(k, right);
            }
            if (k < to) {
                for (int j = 0; j < SIDE; j++) right[j] = rows[j].some(k, to);
                add(k, right);
            }
            for (int j = 0; j < SIDE; j++) {
                const float scale = c.b_scale.at(row(j) / c.row_block, g);
                for (int i = 0; i < LINES; i++) {
                    const float other = c.a_scale.at(i / c.terms, g), both = scale * other;
                    if (is_normal(both)) {
                        total[i][j] = _mm512_fmadd_ps(sum[i][j], _mm512_set1_ps(both), total[i][j]);
                    } else {
                        const __m512 scaled = _mm512_mul_ps(sum[i][j], _mm512_set1_ps(larger_of(scale, other)));
                        total[i][j] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(smaller_of(scale, other)), total[i][j]);
                    }
                }
            }
        }
        for (int i = 0; i < LINES; i++)
            for (int j = 0; j < SIDE; j++) totals[i][first - begin + j] = total[i][j];
    }
    for (int i = 0; i < LINES; i += c.terms) {
        __m512i r[CHUNK];
        for (int j = 0; j < CHUNK; j++) {
            __m512 total = totals[i][j];
            for (int64_t term = 1; term < c.terms; term++) total = _mm512_add_ps(total, totals[i + term][j]);
            r[j] = _mm512_castps_si512(total);
        }
        transpose(r);
        __m512 sums = _mm512_setzero_ps();
        for (int j = 0; j < CHUNK; j++) sums = _mm512_add_ps(sums, _mm512_castsi512_ps(r[j]));
        float kept[CHUNK];
        _mm512_storeu_ps(kept, sums);
        finish_row(c, i / c.terms, begin, end - begin, kept);
    }
}

template <Codes CODES>
void few_rows(const Call &c, const Element *a, int64_t begin, int64_t end) {
    switch (c.m * c.terms) {
        case 1: few_rows<CODES, 1, 4>(c, a, begin, end); break;
        case 2: few_rows<CODES, 2, 4>(c, a, begin, end); break;
        case 3: few_rows<CODES, 3, 2>(c, a, begin, end); break;
        case 4: few_rows<CODES, 4, 2>(c, a, begin, end); break;
        case 5: few_rows<CODES, 5, 2>(c, a, begin, end); break;
        default: few_rows<CODES, 6, 2>(c, a, begin, end);
    }
}

// As AHEAD, of 16 rows at once: 16 rows by 8 experts of 7168 x 256 take 12.2 ms without, 7.8 with 256 and with 512.
constexpr int64_t PANEL_AHEAD = 512;

// Into the cache, of 16 rows from `first + r` on at column k of a panel of columns from..to: what comes next, of these rows;
// of the next 16; of the next panel, which is to the right, or the next task's.
template <Codes CODES>
inline void ask_for_next(const Call &c, int64_t first, int64_t r, int64_t k, int64_t from, int64_t to) {
    const int64_t ahead = PANEL_AHEAD < to - from ? PANEL_AHEAD : to - from;
    int64_t n = first + r, wanted = k + ahead;
    if (wanted >= to) {
        n += 16, wanted -= to - from;
        if (r + 16 == PANEL) {
            if (to < c.k) n = first, wanted += to - from;
            else n = first + PANEL * c.threads, wanted -= from;
        }
    }
    for (int i = 0; i < 16; i++) Row<CODES>(c, n + i).ask_for(wanted);
}

// Columns from..to of 64 rows of b, pair by pair: [pairs][64] pairs. Rows and columns that b lacks are 0.
template <Codes CODES>
void make_panel(const Call &c, int64_t first, int64_t from, int64_t to, uint32_t *panel) {
    for (int64_t r = 0; r < PANEL; r += 16)
        for (int64_t k = from; k < to; k += 32) {
            if ((k - from) % LINE<CODES> == 0) ask_for_next<CODES>(c, first, r, k, from, to);
            __m512i rows[16];
            for (int i = 0; i < 16; i++) {
                const bool there = first + r + i < c.n;
                rows[i] = there ? Row<CODES>(c, first + r + i).some(k, c.k) : _mm512_setzero_si512();
            }
            transpose(rows);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + ((k - from) / 2 + i) * PANEL + r, rows[i]);
        }
}

// The same: codes change places before they are decoded, when they are half as many bytes. Of 64 columns at a time; a panel
// has room for them.
template <>
void make_panel<E4M3>(const Call &c, int64_t first, int64_t from, int64_t to, uint32_t *panel) {
    for (int64_t r = 0; r < PANEL; r += 16)
        for (int64_t k = from; k < to; k += 64) {
            ask_for_next<E4M3>(c, first, r, k, from, to);
            const uint8_t *codes = c.b + (first + r) * c.stride_bn + k;
            __m512i rows[16];
            if (k + 64 <= c.k && first + r + 16 <= c.n) {
                for (int i = 0; i < 16; i++) rows[i] = _mm512_loadu_si512(codes + i * c.stride_bn);
            } else {
                const __mmask64 kept = c.k - k >= 64 ? ~0ull : (1ull << (c.k - k)) - 1;
                for (int i = 0; i < 16; i++)
                    rows[i] = first + r + i < c.n ? _mm512_maskz_loadu_epi8(kept, codes + i * c.stride_bn)
                                                  : _mm512_setzero_si512();
            }
            transpose_codes(rows);
            uint32_t *into = panel + (k - from) / 2 * PANEL + r;
            for (int i = 0; i < 16; i++, into += 2 * PANEL) {
                __m512i pairs, next;
                decode_halves(rows[i], pairs, next);
                _mm512_store_si512(into, pairs);
                _mm512_store_si512(into + PANEL, next);
            }
        }
}

// The scale of each row of a panel, for a group of columns.
void factors_of(const Call &c, int64_t first, int64_t g, float *factors) {
    if (c.row_block % PANEL == 0) {
        const __m512 all = _mm512_set1_ps(c.b_scale.at(first / c.row_block, g));
        for (int j = 0; j < PANEL; j += 16) _mm512_store_ps(factors + j, all);
        return;
    }
    int64_t block = first / c.row_block, left = c.row_block - first % c.row_block;
    for (int64_t j = 0; j < PANEL; j++) {
        factors[j] = first + j < c.n ? c.b_scale.at(block, g) : 1.0f;
        if (--left == 0) block++, left = c.row_block;
    }
}

// Whether every product of one of 16 numbers and one of the 64 factors is normal: a bit for each of the numbers.
inline __mmask16 normal_products(const float *numbers, const float *factors) {
    __m512i least = _mm512_castps_si512(_mm512_abs_ps(_mm512_load_ps(factors))), most = least;
    for (int j = 16; j < PANEL; j += 16) {
        const __m512i size = _mm512_castps_si512(_mm512_abs_ps(_mm512_load_ps(factors + j)));
        least = _mm512_min_epu32(least, size), most = _mm512_max_epu32(most, size);  // NaN is the largest
    }
    const __m512 of = _mm512_load_ps(numbers);
    const float low = float_of(_mm512_reduce_min_epu32(least)), high = float_of(_mm512_reduce_max_epu32(most));
    return are_normal(_mm512_mul_ps(of, _mm512_set1_ps(low))) & are_normal(_mm512_mul_ps(of, _mm512_set1_ps(high)));
}

// sums[16] += sum * a_scale * factors
inline void add_any(__m512 sum, float a_scale, const float *factors, float *sums) {
    const __m512 other = _mm512_set1_ps(a_scale), scale = _mm512_load_ps(factors);
    __m512 factor = _mm512_mul_ps(other, scale);
    const __mmask16 normal = are_normal(factor);
    const __mmask16 in_order = _mm512_cmp_ps_mask(_mm512_abs_ps(scale), _mm512_abs_ps(other), _CMP_GT_OQ);
    const __m512 larger = _mm512_mask_mov_ps(other, in_order, scale);
    sum = _mm512_mask_mul_ps(sum, static_cast<__mmask16>(~normal), sum, larger);
    factor = _mm512_mask_mov_ps(_mm512_mask_mov_ps(scale, in_order, other), normal, factor);
    _mm512_store_ps(sums, _mm512_fmadd_ps(sum, factor, _mm512_load_ps(sums)));
}

// The same of products that are normal.
inline void add_normal(__m512 sum, float a_scale, const float *factors, float *sums) {
    const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(a_scale), _mm512_load_ps(factors));
    _mm512_store_ps(sums, _mm512_fmadd_ps(sum, factor, _mm512_load_ps(sums)));
}

// sums[64] += sum[64] * a_scale * factors. Vectors by value: g++ 12 kept an array of them in memory, too, and wrote each
// after each product, which took twice as long as the products.
inline void add_scaled(__m512 a, __m512 b, __m512 c, __m512 d, float a_scale, const float *factors, bool normal,
                       float *sums) {
    if (normal) {
        add_normal(a, a_scale, factors, sums);
        add_normal(b, a_scale, factors + 16, sums + 16);
        add_normal(c, a_scale, factors + 32, sums + 32);
        add_normal(d, a_scale, factors + 48, sums + 48);
    } else {
        add_any(a, a_scale, factors, sums);
        add_any(b, a_scale, factors + 16, sums + 16);
        add_any(c, a_scale, factors + 32, sums + 32);
        add_any(d, a_scale, factors + 48, sums + 48);
    }
}

// Rows of a tile and their scales for a group of columns, and which of these make normal products with all factors.
struct Left {
    const Element *const *rows;
    const float *scale;
    __mmask16 normal;
};

// What a thread reads next from memory, line by line of so many rows. It is asked for while this panel is multiplied: in
// turn, the reading and the multiplication of 16 rows took as long as each other.
struct Next {
    const char *at = nullptr, *end = nullptr;  // of a row
    int64_t width = 0, stride = 0, left = 0;   // bytes, bytes, lines

    template <Codes CODES>
    static Next of_panel(const Call &c, int64_t first, int64_t from) {
        Next next;
        if (first >= c.n) return next;
        const int64_t to = from + DEPTH < c.k ? from + DEPTH : c.k, rows = c.n - first < PANEL ? c.n - first : PANEL;
        next.at = reinterpret_cast<const char *>(c.b + first * c.stride_bn + from * 64 / LINE<CODES>);
        next.width = (to - from + LINE<CODES> - 1) / LINE<CODES> * 64, next.stride = c.stride_bn;
        next.end = next.at + next.width, next.left = next.width / 64 * rows;
        return next;
    }

    void ask() {
        _mm_prefetch(at, _MM_HINT_T1);
        at += 64;
        if (at == end) at += stride - width, end += stride;
    }
};

// sums[ROWS][64] += (a's rows . pairs of the panel) * a_scale * factors
template <int ROWS, bool ASK>
__attribute__((noinline)) void tile(const Left &left, const uint32_t *panel, int64_t pairs, const float *factors,
                                    float *sums, Next &next) {
    const Element *a[ROWS];
    __m512 sum[ROWS][4];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        a[i] = left.rows[i];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) sum[i][j] = _mm512_setzero_ps();
    }
    Next asked = next;
    for (int64_t p = 0; p < pairs; p++) {
        if (ASK) asked.ask();
        __m512i right[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) right[j] = _mm512_load_si512(panel + p * PANEL + 16 * j);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            int32_t pair;
            memcpy(&pair, a[i] + 2 * p, 4);
            const __m512i one = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sum[i][j] = add_products(sum[i][j], one, right[j]);
        }
    }
    if (ASK) next = asked, next.left -= pairs;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        add_scaled(sum[i][0], sum[i][1], sum[i][2], sum[i][3], left.scale[i], factors, left.normal >> i & 1,
                   sums + i * PANEL);
}

template <int ROWS>
inline void tile(const Left &left, const uint32_t *panel, int64_t pairs, const float *factors, float *sums, Next &next) {
    if (next.left >= pairs) tile<ROWS, true>(left, panel, pairs, factors, sums, next);
    else tile<ROWS, false>(left, panel, pairs, factors, sums, next);
}

void some_rows(int64_t count, const Left &left, const uint32_t *panel, int64_t pairs, const float *factors, float *sums,
               Next &next) {
    switch (count) {
        case 6: tile<6>(left, panel, pairs, factors, sums, next); break;
        case 5: tile<5>(left, panel, pairs, factors, sums, next); break;
        case 4: tile<4>(left, panel, pairs, factors, sums, next); break;
        case 3: tile<3>(left, panel, pairs, factors, sums, next); break;
        case 2: tile<2>(left, panel, pairs, factors, sums, next); break;
        default: tile<1>(left, panel, pairs, factors, sums, next);
    }
}

#if defined(KERNELHUB_AMX)

// The same of up to 16 rows; `pairs` is a multiple of 16. Rows that are not one after another, or not 16, are gathered.
void rows_of_tile(int64_t count, const Left &left, const uint32_t *panel, int64_t pairs, const float *factors, float *sums) {
    thread_local Buffer of_rows;
    const Element *const *rows = left.rows;
    alignas(64) float products[TILE_ROWS * PANEL];
    bool even = count == TILE_ROWS;
    for (int64_t i = 2; i < count; i++) even &= rows[i] - rows[i - 1] == rows[1] - rows[0];
    const Element *a = rows[0];
    int64_t apart = even ? rows[1] - rows[0] : 2 * pairs;
    if (!even) {
        Element *gathered = of_rows.take<Element>(TILE_ROWS * 2 * pairs);
        for (int64_t i = 0; i < count; i++) memcpy(gathered + i * apart, rows[i], apart * sizeof(Element));
        memset(gathered + count * apart, 0, (TILE_ROWS - count) * apart * sizeof(Element));
        a = gathered;
    }
    multiply_tiles(a, apart * sizeof(Element), panel, PANEL * sizeof(uint32_t), pairs, products);
    for (int64_t i = 0; i < count; i++) {
        const float *of = products + i * PANEL;
        add_scaled(_mm512_load_ps(of), _mm512_load_ps(of + 16), _mm512_load_ps(of + 32), _mm512_load_ps(of + 48),
                   left.scale[i], factors, left.normal >> i & 1, sums + i * PANEL);
    }
}

#endif

// Rows that `many_rows` takes at once.
constexpr int64_t MOST_AT_ONCE = 16, REGISTERS_HOLD = 6;

template <Codes CODES>
void many_rows(const Call &c, const Element *a, int64_t first, int64_t begin, int64_t end) {
    thread_local Buffer of_panel, of_sums;
    uint32_t *panel = of_panel.take<uint32_t>(DEPTH / 2 * PANEL);
    float *sums = of_sums.take<float>((end - begin) * PANEL);
    memset(sums, 0, (end - begin) * PANEL * sizeof(float));
    const int64_t padded = c.padded(), width = c.terms * padded;
    const bool one_group = c.group >= c.k;
    const int64_t step = one_group ? DEPTH : c.group, tall = (end - begin + REGISTERS_HOLD - 1) / REGISTERS_HOLD;
    const int64_t at_once = (end - begin + tall - 1) / tall;  // 7 rows are 4 and 3: products of one row wait for each other
#if defined(KERNELHUB_AMX)
    const bool amx = end - begin > 1 && has_amx();
    const Tiles of_thread(amx);
#else
    constexpr bool amx = false;
#endif
    for (int64_t from = 0; from < c.k; from += DEPTH) {
        const int64_t to = from + DEPTH < padded ? from + DEPTH : padded;
        make_panel<CODES>(c, first, from, to, panel);
        Next next;
        if (!amx) {
            if (to < c.k) next = Next::of_panel<CODES>(c, first, to);
            else next = Next::of_panel<CODES>(c, first + PANEL * c.threads, 0);
        }
        for (int64_t k = from; k < to; k += step) {
            const int64_t g = one_group ? 0 : k / c.group, pairs = ((k + step < to ? k + step : to) - k) / 2;
            alignas(64) float factors[PANEL];
            factors_of(c, first, g, factors);
            const uint32_t *part = panel + (k - from) / 2 * PANEL;
            // AMX adds up 16 pairs at a time; groups that end within such are for AVX-512.
            const bool tiles = amx && pairs % 16 == 0;
            const int64_t most = tiles ? MOST_AT_ONCE : at_once;
            for (int64_t i = begin; i < end; i += most) {
                const int64_t rows = end - i < most ? end - i : most;
                float *into = sums + (i - begin) * PANEL;
                alignas(64) float of_a[MOST_AT_ONCE] = {};
                for (int64_t r = 0; r < rows; r++) of_a[r] = c.a_scale.at(i + r, g);
                const __mmask16 normal = normal_products(of_a, factors);
                for (int64_t term = 0; term < c.terms; term++) {
                    const Element *row[MOST_AT_ONCE];
                    for (int64_t r = 0; r < rows; r++)
                        row[r] = a + (c.rows ? c.rows[i + r] : c.first_row + i + r) * width + term * padded + k;
#if defined(KERNELHUB_AMX)
                    if (tiles && rows > 1) {
                        rows_of_tile(rows, {row, of_a, normal}, part, pairs, factors, into);
                        continue;
                    }
#endif
                    some_rows(rows, {row, of_a, normal}, part, pairs, factors, into, next);
                }
            }
        }
    }
    const int64_t columns = c.n - first < PANEL ? c.n - first : PANEL;
    for (int64_t i = begin; i < end; i++) finish_row(c, i, first, columns, sums + (i - begin) * PANEL);
}

// How many tasks a product is, one of so many at the same time; they may run at once.
int64_t divide(Call &c, int64_t products) {
    if (!c.m) return 0;  // `few_rows` takes one row at least
    if (c.m * c.terms <= FEW) return (c.n + CHUNK - 1) / CHUNK;
    const int64_t panels = (c.n + PANEL - 1) / PANEL;
    int64_t rows = c.m < MOST_ROWS ? c.m : MOST_ROWS;
    while (products * panels * ((c.m + rows - 1) / rows) < 2 * c.threads && rows > 48) rows = (rows + 1) / 2;
    c.together = rows;
    return panels * ((c.m + rows - 1) / rows);
}

template <Codes CODES>
void perform(const Call &c, const Element *a, int64_t task) {
    if (!c.together) {
        const int64_t begin = task * CHUNK, end = begin + CHUNK < c.n ? begin + CHUNK : c.n;
        few_rows<CODES>(c, a, begin, end);
        return;
    }
    const int64_t chunks = (c.m + c.together - 1) / c.together, begin = task % chunks * c.together;
    many_rows<CODES>(c, a, task / chunks * PANEL, begin, begin + c.together < c.m ? begin + c.together : c.m);
}

#else

typedef float Element;
#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * WIDE)));
constexpr int TALL = 4;         // rows of b whose sums are in registers
constexpr int64_t BLOCKS = 2;   // of so many rows in a task, which all of a is read once for
constexpr int64_t DEPTH = 512;  // columns at a time: 16 KB of decoded weights, which stay in L1

// Codes as float32, exactly; the rest up to a multiple of 32 is 0.
inline void decode_row(const uint8_t *codes, int64_t count, float *into) {
    int64_t k = 0;
#if defined(__AVX2__) && defined(__F16C__)
    for (; k + 16 <= count; k += 16) {  // as the float16 that is 256 times smaller
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + k)));
        const __m256i size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
        const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7c00));
        __m256i half = _mm256_or_si256(_mm256_slli_epi16(size, 7), nan);
        half = _mm256_or_si256(half, _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
        const __m256 bigger = _mm256_set1_ps(256.0f);
        _mm256_storeu_ps(into + k, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), bigger));
        _mm256_storeu_ps(into + k + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), bigger));
    }
#endif
    for (; k < count; k++) into[k] = MEANING.e4m3[codes[k]];
    for (; k % 32; k++) into[k] = 0.0f;
}

#if defined(__AVX2__)
// Codes of fp4 times a factor: their last three bits choose a value, the first is its sign.
template <int64_t COUNT>
inline void decode_fp4(const uint8_t *codes, float factor, float *into) {
    const __m256 sizes = _mm256_set_ps(6.0f, 4.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f, 0.0f);
    const __m256 values = _mm256_mul_ps(sizes, _mm256_set1_ps(factor));
    const __m128i low_bits = _mm_set1_epi8(15);
    const auto put_8 = [&](__m128i some, float *at) {
        const __m256i index = _mm256_cvtepu8_epi32(some);
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(index, 3), 31);
        const __m256 size = _mm256_permutevar8x32_ps(values, index);
        _mm256_storeu_ps(at, _mm256_xor_ps(size, _mm256_castsi256_ps(sign)));
    };
    for (int64_t i = 0; i < COUNT; i += 16) {
        const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes + i / 2));
        const __m128i high = _mm_and_si128(_mm_srli_epi16(packed, 4), low_bits);
        const __m128i both = _mm_unpacklo_epi8(_mm_and_si128(packed, low_bits), high);
        put_8(both, into + i);
        put_8(_mm_srli_si128(both, 8), into + i + 8);
    }
}
#else
template <int64_t COUNT>
inline void decode_fp4(const uint8_t *codes, float factor, float *into) {
    constexpr float VALUES[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    float values[16];
    for (int code = 0; code < 16; code++) values[code] = VALUES[code] * factor;
    for (int64_t i = 0; i < COUNT; i += 2) {
        into[i] = values[codes[i / 2] & 15];
        into[i + 1] = values[codes[i / 2] >> 4];
    }
}
#endif

// The same of row n of b, from column k on.
template <Codes CODES>
void decode_weights(const Call &c, int64_t n, int64_t k, int64_t count, float *into) {
    if (CODES == E4M3) {
        decode_row(c.b + n * c.stride_bn + k, count, into);
        return;
    }
    constexpr int64_t EACH = CODES == MXFP4 ? 32 : 16;
    const uint8_t *codes = c.b + n * c.stride_bn + k / 2, *scale = c.code_scale + n * c.stride_code_scale + k / EACH;
    for (int64_t i = 0; i < count; i += EACH, scale++) {
        const float factor = CODES == MXFP4 ? MEANING.eighth[*scale] : MEANING.e4m3[*scale];
        decode_fp4<EACH>(codes + i / 2, factor, into + i);
    }
    for (; count % 32; count++) into[count] = 0.0f;
}

inline Vector load(const float *from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

// TALL rows of b by ROWS rows of a, columns from..to of a group; the vectors are added up by the caller.
template <int ROWS>
inline void products(const float *const *a, const float *b, int64_t count, Vector sum[ROWS][TALL]) {
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < TALL; j++) sum[i][j] = Vector{};
    for (int64_t k = 0; k < count; k += WIDE) {
        Vector right[TALL];
        for (int j = 0; j < TALL; j++) right[j] = load(b + j * DEPTH + k);
        for (int i = 0; i < ROWS; i++) {
            const Vector left = load(a[i] + k);
            for (int j = 0; j < TALL; j++) sum[i][j] += left * right[j];
        }
    }
}

template <int ROWS>
void some_rows(const Call &c, const float *a, int64_t i, int64_t first, int64_t from, int64_t to, const float *b,
               Vector *totals) {
    const int64_t step = c.group < DEPTH ? c.group : DEPTH;
    for (int64_t k = from; k < to; k += step) {
        const int64_t g = k / c.group, stop = k + step < to ? k + step : to;
        Vector sum[ROWS][TALL];
        const float *left[ROWS];
        for (int r = 0; r < ROWS; r++) left[r] = a + c.place(i + r) + k;
        products<ROWS>(left, b + k - from, (stop - k + 31) / 32 * 32, sum);
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < TALL; j++) {
                const int64_t n = first + j < c.n ? first + j : c.n - 1;
                const float scale = c.b_scale.at(n / c.row_block, g), other = c.a_scale.at(i + r, g), both = scale * other;
                if (is_normal(both)) totals[(i + r) * TALL + j] += sum[r][j] * both;
                else totals[(i + r) * TALL + j] += sum[r][j] * larger_of(scale, other) * smaller_of(scale, other);
            }
    }
}

// How many tasks a product is; they may run at once.
int64_t divide(Call &c, int64_t) { return (c.n + BLOCKS * TALL - 1) / (BLOCKS * TALL); }

template <Codes CODES>
void perform(const Call &c, const float *a, int64_t task) {
    thread_local Buffer of_totals, of_weights;
    const int64_t begin = task * BLOCKS * TALL, each = c.m * TALL;
    const int64_t blocks = (c.n - begin + TALL - 1) / TALL < BLOCKS ? (c.n - begin + TALL - 1) / TALL : BLOCKS;
    Vector *totals = of_totals.take<Vector>(BLOCKS * each);
    float *b = of_weights.take<float>(BLOCKS * TALL * DEPTH);
    for (int64_t i = 0; i < blocks * each; i++) totals[i] = Vector{};
    for (int64_t from = 0; from < c.k; from += DEPTH) {
        const int64_t to = from + DEPTH < c.k ? from + DEPTH : c.k;
        for (int64_t j = 0; j < blocks * TALL; j++) {
            const int64_t n = begin + j < c.n ? begin + j : c.n - 1;
            decode_weights<CODES>(c, n, from, to - from, b + j * DEPTH);
        }
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = begin + block * TALL;
            const float *of_block = b + block * TALL * DEPTH;
            int64_t i = 0;
            for (; i + 2 <= c.m; i += 2) some_rows<2>(c, a, i, first, from, to, of_block, totals + block * each);
            if (i < c.m) some_rows<1>(c, a, i, first, from, to, of_block, totals + block * each);
        }
    }
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t i = 0; i < c.m; i++)
            for (int64_t j = 0; j < TALL && begin + block * TALL + j < c.n; j++) {
                float sum = 0.0f;
                for (int lane = 0; lane < WIDE; lane++) sum += totals[block * each + i * TALL + j][lane];
                c.finish(i, begin + block * TALL + j, sum);
            }
}

#endif

}  // namespace
