// Rows of activations by rows of weights that are read as codes, once: out[m, n] = sum over groups g of
// (sum over k in g of a[m, k] b[n, k]) * a_scale[m, g] * b_scale[n / row_block, g], + bias[n].
//
// Few rows: each row of b is decoded in registers and multiplied by all rows of a. More: 64 rows of b at a time are
// decoded into a panel in the order in which the instructions want them, and tiles of 6 x 64 results are kept in
// registers, or of 16 x 64 with AMX. Without AMX the codes of the next panel are asked for meanwhile. With AVX-512 BF16
// pairs of bfloat16, which hold every e4m3 number, are multiplied and added in float32; elsewhere float32 is. A group's sum
// is scaled in float32 before it joins the others. Codes of fp4 are multiplied by the scale of their 16 or 32 as they are
// decoded: what comes of it has six bits, and bfloat16 holds it.
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

// Of a product of scales: whether it is a number of float32 that lost no bits.
inline bool is_normal(float product) {
    const float size = std::fabs(product);
    return size >= FLT_MIN && size <= FLT_MAX;
}

// A sum times two scales whose product is no such number: first the larger and then the smaller, which loses no bits that
// the result has. 2^127 x 2^127 x 0 is 0, and what is times 0 is not made infinite before.
struct InTurn {
    float first, second;

    InTurn(float s, float t) {
        const bool in_order = std::fabs(s) > std::fabs(t);
        first = in_order ? s : t, second = in_order ? t : s;
        if (second == 0.0f) first = 1.0f, second = s * t;  // NaN with a scale that is none, or infinite
    }
};

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
    int64_t together = 0;         // rows that one task takes, as `divide` says
    const Call *after = nullptr;  // the product that the same threads do next, if it is known

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
                        const InTurn factors(scale, other);
                        const __m512 scaled = _mm512_mul_ps(sum[i][j], _mm512_set1_ps(factors.first));
                        total[i][j] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(factors.second), total[i][j]);
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

// 64 bytes of each of 16 rows; 0 where there are fewer rows or bytes.
inline void load_rows(const uint8_t *from, int64_t stride, int64_t rows, int64_t bytes, __m512i into[16]) {
    if (rows >= 16 && bytes >= 64) {
        for (int i = 0; i < 16; i++) into[i] = _mm512_loadu_si512(from + i * stride);
        return;
    }
    const __mmask64 kept = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
    for (int i = 0; i < 16; i++)
        into[i] = i < rows ? _mm512_maskz_loadu_epi8(kept, from + i * stride) : _mm512_setzero_si512();
}

inline __m512 of_e8m0(__m512i bytes) {
    const __m512i least = _mm512_set1_epi32(0x00400000), nan = _mm512_set1_epi32(0x7fc00000);
    const __m512i power = _mm512_mask_mov_epi32(_mm512_slli_epi32(bytes, 23), _mm512_testn_epi32_mask(bytes, bytes), least);
    const __mmask16 missing = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(255));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(power, missing, nan));
}

inline __m512 of_e4m3(__m512i bytes) {
    const __m512i size = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7f)), normal = _mm512_slli_epi32(size, 20);
    const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
    __m512i value = _mm512_add_epi32(normal, _mm512_set1_epi32(120 << 23));
    value = _mm512_mask_mov_epi32(value, _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8)), _mm512_castps_si512(small));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7f));
    value = _mm512_mask_mov_epi32(value, nan, _mm512_set1_epi32(0x7fc00000));
    const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(bytes, 7), 31);
    return _mm512_castsi512_ps(_mm512_or_si512(value, sign));
}

// load(i, g, kept) gives the numbers of row i from g on, as many as `kept` has bits. into[g * step + i], for whole sixteens.
template <class Load>
void transposed(int64_t rows, int64_t count, const Load &load, float *into, int64_t step) {
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t g = 0; g < count; g += 16) {
            const __mmask16 kept = count - g >= 16 ? 0xffff : (1u << (count - g)) - 1;
            __m512i of[16];
            for (int i = 0; i < 16; i++) of[i] = _mm512_castps_si512(load(r + i, g, kept));
            transpose(of);
            for (int i = 0; i < 16; i++) _mm512_storeu_ps(into + (g + i) * step + r, _mm512_castsi512_ps(of[i]));
        }
}

inline __m512i load_bytes(const uint8_t *bytes, __mmask16 kept) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(kept, bytes));
}

// Of `count` groups from g on and rows from `first` on the scales, transposed; 1 for those of `rows` that there are not.
void scales_of(const Scale &scale, int64_t first, int64_t there, int64_t rows, int64_t g, int64_t count, float *into,
               int64_t step) {
    const int64_t place = first * scale.row + g * scale.column;
    if (count == 1 || scale.column != 1) {
        for (int64_t other = 0; other < count; other++)
            for (int64_t i = 0; i < rows; i++) into[other * step + i] = i < there ? scale.at(first + i, g + other) : 1.0f;
    } else if (scale.e8m0) {
        const uint8_t *bytes = static_cast<const uint8_t *>(scale.values) + place;
        const auto load = [&](int64_t i, int64_t from, __mmask16 kept) {
            return i < there ? of_e8m0(load_bytes(bytes + i * scale.row + from, kept)) : _mm512_set1_ps(1.0f);
        };
        transposed(rows, count, load, into, step);
    } else {
        const float *values = static_cast<const float *>(scale.values) + place;
        const auto load = [&](int64_t i, int64_t from, __mmask16 kept) {
            return i < there ? _mm512_maskz_loadu_ps(kept, values + i * scale.row + from) : _mm512_set1_ps(1.0f);
        };
        transposed(rows, count, load, into, step);
    }
}

// Columns from..to of 64 rows of b, pair by pair: [pairs][64] pairs. Rows and columns that b lacks are 0. Codes change
// places before they are decoded, when they are fewer bytes. Of a line of the cache at a time; a panel has room for it.
template <Codes CODES>
void make_panel(const Call &c, int64_t first, int64_t from, int64_t to, uint32_t *panel) {
    constexpr int64_t EACH = CODES == MXFP4 ? 32 : 16;
    thread_local Buffer of_scales;
    float *scales = of_scales.take<float>(DEPTH / EACH * PANEL);
    const int64_t count = ((to < c.k ? to : c.k) - from) / EACH;
    const uint8_t *bytes = c.code_scale + first * c.stride_code_scale + from / EACH;
    const auto load = [&](int64_t i, int64_t g, __mmask16 kept) {
        if (first + i >= c.n) return _mm512_setzero_ps();
        const __m512i some = load_bytes(bytes + i * c.stride_code_scale + g, kept);
        return CODES == MXFP4 ? _mm512_mul_ps(of_e8m0(some), _mm512_set1_ps(0.125f)) : of_e4m3(some);
    };
    transposed(PANEL, count, load, scales, PANEL);
    const __m512 values = _mm512_set_ps(-6.0f, -4.0f, -3.0f, -2.0f, -1.5f, -1.0f, -0.5f, -0.0f, 6.0f, 4.0f, 3.0f, 2.0f, 1.5f,
                                        1.0f, 0.5f, 0.0f);
    for (int64_t r = 0; r < PANEL; r += 16)
        for (int64_t k = from; k < to; k += 128) {
            ask_for_next<CODES>(c, first, r, k, from, to);
            __m512i rows[16];
            load_rows(c.b + (first + r) * c.stride_bn + k / 2, c.stride_bn, c.n - first - r, (c.k - k) / 2, rows);
            transpose(rows);
            uint32_t *into = panel + (k - from) / 2 * PANEL + r;
            for (int i = 0; i < 16; i++) {
                const __m512 factor = _mm512_load_ps(scales + (k - from + 8 * i) / EACH * PANEL + r);
                for (int j = 0; j < 4; j++, into += PANEL) {
                    const __m512i even = _mm512_srli_epi32(rows[i], 8 * j), odd = _mm512_srli_epi32(rows[i], 8 * j + 4);
                    const __m512 low = _mm512_mul_ps(_mm512_permutexvar_ps(even, values), factor);
                    const __m512 high = _mm512_mul_ps(_mm512_permutexvar_ps(odd, values), factor);
                    const __m512i first_of_pair = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
                    _mm512_store_si512(into, _mm512_mask_mov_epi16(first_of_pair, 0xaaaaaaaa, _mm512_castps_si512(high)));
                }
            }
        }
}

template <>
void make_panel<E4M3>(const Call &c, int64_t first, int64_t from, int64_t to, uint32_t *panel) {
    for (int64_t r = 0; r < PANEL; r += 16)
        for (int64_t k = from; k < to; k += 64) {
            ask_for_next<E4M3>(c, first, r, k, from, to);
            __m512i rows[16];
            load_rows(c.b + (first + r) * c.stride_bn + k, c.stride_bn, c.n - first - r, c.k - k, rows);
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

// Of a group of columns the scale of each row of a panel, and the least and the largest of their sizes.
struct alignas(64) Factors {
    float of[PANEL];
    float low, high;

    void find_bounds() {
        __m512i least = _mm512_castps_si512(_mm512_abs_ps(_mm512_load_ps(of))), most = least;
        for (int j = 16; j < PANEL; j += 16) {
            const __m512i size = _mm512_castps_si512(_mm512_abs_ps(_mm512_load_ps(of + j)));
            least = _mm512_min_epu32(least, size), most = _mm512_max_epu32(most, size);  // NaN is the largest
        }
        low = float_of(_mm512_reduce_min_epu32(least)), high = float_of(_mm512_reduce_max_epu32(most));
    }

    // Whether a number times every factor is normal: a bit for each of 16 numbers.
    __mmask16 normal(const float *numbers) const {
        const __m512 one = _mm512_loadu_ps(numbers);
        return are_normal(_mm512_mul_ps(one, _mm512_set1_ps(low))) & are_normal(_mm512_mul_ps(one, _mm512_set1_ps(high)));
    }
};

// Those of so many groups from g on; there is room for a multiple of 16.
void find_factors(const Call &c, int64_t first, int64_t g, int64_t count, Factors *factors) {
    constexpr int64_t STEP = sizeof(Factors) / sizeof(float);
    if (c.row_block == 1) {
        scales_of(c.b_scale, first, c.n - first, PANEL, g, count, factors[0].of, STEP);
    } else {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < PANEL;) {
                const int64_t n = first + j < c.n ? first + j : c.n - 1, left = c.row_block - n % c.row_block;
                const float scale = c.b_scale.at(n / c.row_block, g + i);
                for (const int64_t end = j + left < PANEL ? j + left : PANEL; j < end; j++) factors[i].of[j] = scale;
            }
    }
    for (int64_t i = 0; i < count; i++) factors[i].find_bounds();
}

// sums[16] += sum * a_scale * factors, as InTurn has it
inline void add_any(__m512 sum, float a_scale, const float *factors, float *sums) {
    const __m512 other = _mm512_set1_ps(a_scale), scale = _mm512_load_ps(factors);
    __m512 factor = _mm512_mul_ps(other, scale);
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 at_once =
        are_normal(factor) | _mm512_cmp_ps_mask(other, zero, _CMP_EQ_OQ) | _mm512_cmp_ps_mask(scale, zero, _CMP_EQ_OQ);
    const __mmask16 in_order = _mm512_cmp_ps_mask(_mm512_abs_ps(scale), _mm512_abs_ps(other), _CMP_GT_OQ);
    const __m512 larger = _mm512_mask_mov_ps(other, in_order, scale);
    sum = _mm512_mask_mul_ps(sum, static_cast<__mmask16>(~at_once), sum, larger);
    factor = _mm512_mask_mov_ps(_mm512_mask_mov_ps(scale, in_order, other), at_once, factor);
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

// Columns of a panel of this product. Panels are as wide as each other, so that while one is multiplied there is time to
// read the next. With AMX, whose sums end with a panel, they are DEPTH wide but for the last.
inline int64_t depth_of(const Call &c) {
#if defined(KERNELHUB_AMX)
    if (has_amx()) return DEPTH;
#endif
    const int64_t panels = c.k ? (c.k + DEPTH - 1) / DEPTH : 1;
    return ((c.k + panels - 1) / panels + 127) / 128 * 128;
}

// What a thread reads next from memory, line by line of so many rows. It is asked for while this panel is multiplied: in
// turn, the reading and the multiplication of 16 rows took as long as each other.
struct Next {
    const char *at = nullptr, *end = nullptr;  // of a row
    int64_t width = 0, stride = 0, left = 0;   // bytes, bytes, lines
    bool twice = false;                        // two lines with each pair of columns

    template <Codes CODES>
    static Next of_panel(const Call &c, int64_t first, int64_t from) {
        Next next;
        const int64_t depth = depth_of(c), to = from + depth < c.k ? from + depth : c.k;
        const int64_t rows = c.n - first < PANEL ? c.n - first : PANEL;
        if (CODES != E4M3)
            ask_for_bytes(c.code_scale + first * c.stride_code_scale, c.stride_code_scale, rows, from, to,
                          CODES == MXFP4 ? 32 : 16);
        else if (c.b_scale.e8m0 && c.row_block == 1)
            ask_for_bytes(static_cast<const uint8_t *>(c.b_scale.values) + first * c.b_scale.row, c.b_scale.row, rows, from,
                          to, c.group);
        next.at = reinterpret_cast<const char *>(c.b + first * c.stride_bn + from * 64 / LINE<CODES>);
        next.width = (to - from + LINE<CODES> - 1) / LINE<CODES> * 64, next.stride = c.stride_bn;
        next.end = next.at + next.width, next.left = next.width / 64 * rows;
        return next;
    }

    // Of the task that the thread likely takes next.
    template <Codes CODES>
    static Next of_task(const Call &c, int64_t first) {
        first += PANEL * c.threads;
        if (first < c.n) return of_panel<CODES>(c, first, 0);
        first -= (c.n + PANEL - 1) / PANEL * PANEL;
        return c.after && first < c.after->n ? of_panel<CODES>(*c.after, first, 0) : Next();
    }

    // A byte of each row for so many columns. Few, but each row's wait for memory is as long as that of its codes.
    static void ask_for_bytes(const uint8_t *bytes, int64_t stride, int64_t rows, int64_t from, int64_t to, int64_t each) {
        for (int64_t i = 0; i < rows; i++) {
            _mm_prefetch(reinterpret_cast<const char *>(bytes + i * stride + from / each), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char *>(bytes + i * stride + (to - 1) / each), _MM_HINT_T0);
        }
    }

    void ask() {
        for (int i = 0; left && i <= twice; i++, left--) {
            _mm_prefetch(at, _MM_HINT_T1);
            at += 64;
            if (at == end) at += stride - width, end += stride;
        }
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
    if (ASK) next = asked;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
        add_scaled(sum[i][0], sum[i][1], sum[i][2], sum[i][3], left.scale[i], factors, left.normal >> i & 1,
                   sums + i * PANEL);
}

template <int ROWS>
inline void tile(const Left &left, const uint32_t *panel, int64_t pairs, const float *factors, float *sums, Next &next) {
    if (next.left) tile<ROWS, true>(left, panel, pairs, factors, sums, next);
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

// The same of several small groups, whose products are all normal: sums of a group and sums of all are both in registers, of
// 32 rows of the panel at a time. a_scale[groups][step]
template <int ROWS, bool ASK>
__attribute__((noinline)) void tile_of_groups(const Element *const *rows, const uint32_t *panel, int64_t groups,
                                              int64_t pairs, const float *a_scale, int64_t step, const Factors *factors,
                                              int64_t column, float *sums, Next &next) {
    const Element *a[ROWS];
    __m512 total[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        a[i] = rows[i];
        total[i][0] = _mm512_load_ps(sums + i * PANEL);
        total[i][1] = _mm512_load_ps(sums + i * PANEL + 16);
    }
    Next asked = next;
    for (int64_t g = 0, p = 0; g < groups; g++) {
        __m512 sum[ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        for (const int64_t end = p + pairs; p < end; p++) {
            if (ASK) asked.ask();
            const __m512i first = _mm512_load_si512(panel + p * PANEL), second = _mm512_load_si512(panel + p * PANEL + 16);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
                int32_t pair;
                memcpy(&pair, a[i] + 2 * p, 4);
                const __m512i one = _mm512_set1_epi32(pair);
                sum[i][0] = add_products(sum[i][0], one, first);
                sum[i][1] = add_products(sum[i][1], one, second);
            }
        }
        const float *of_group = factors[g].of + column;
        const __m512 first = _mm512_load_ps(of_group), second = _mm512_load_ps(of_group + 16);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            const __m512 other = _mm512_set1_ps(a_scale[g * step + i]);
            total[i][0] = _mm512_fmadd_ps(sum[i][0], _mm512_mul_ps(other, first), total[i][0]);
            total[i][1] = _mm512_fmadd_ps(sum[i][1], _mm512_mul_ps(other, second), total[i][1]);
        }
    }
    if (ASK) next = asked;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
        _mm512_store_ps(sums + i * PANEL, total[i][0]);
        _mm512_store_ps(sums + i * PANEL + 16, total[i][1]);
    }
}

template <int ROWS>
inline void tile_of_groups(const Element *const *rows, const uint32_t *panel, int64_t groups, int64_t pairs,
                           const float *a_scale, int64_t step, const Factors *factors, float *sums, Next &next) {
    if (next.left) tile_of_groups<ROWS, true>(rows, panel, groups, pairs, a_scale, step, factors, 0, sums, next);
    else tile_of_groups<ROWS, false>(rows, panel, groups, pairs, a_scale, step, factors, 0, sums, next);
    tile_of_groups<ROWS, false>(rows, panel + 32, groups, pairs, a_scale, step, factors, 32, sums + 32, next);
}

void some_rows_of_groups(int64_t count, const Element *const *rows, const uint32_t *panel, int64_t groups, int64_t pairs,
                         const float *a_scale, int64_t step, const Factors *factors, float *sums, Next &next) {
    switch (count) {
        case 6: tile_of_groups<6>(rows, panel, groups, pairs, a_scale, step, factors, sums, next); break;
        case 5: tile_of_groups<5>(rows, panel, groups, pairs, a_scale, step, factors, sums, next); break;
        case 4: tile_of_groups<4>(rows, panel, groups, pairs, a_scale, step, factors, sums, next); break;
        case 3: tile_of_groups<3>(rows, panel, groups, pairs, a_scale, step, factors, sums, next); break;
        case 2: tile_of_groups<2>(rows, panel, groups, pairs, a_scale, step, factors, sums, next); break;
        default: tile_of_groups<1>(rows, panel, groups, pairs, a_scale, step, factors, sums, next);
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
constexpr int64_t MOST_AT_ONCE = 16, REGISTERS_HOLD = 6, MOST_GROUPS = 32;

template <Codes CODES>
void many_rows(const Call &c, const Element *a, int64_t first, int64_t begin, int64_t end) {
    thread_local Buffer of_panel, of_sums, of_factors, of_scales;
    uint32_t *panel = of_panel.take<uint32_t>(DEPTH / 2 * PANEL);
    float *sums = of_sums.take<float>((end - begin) * PANEL);
    memset(sums, 0, (end - begin) * PANEL * sizeof(float));
    const int64_t padded = c.padded(), width = c.terms * padded;
    const bool one_group = c.group >= c.k;
#if defined(KERNELHUB_AMX)
    const bool amx = end - begin > 1 && has_amx();
    const Tiles of_thread(amx);
#else
    constexpr bool amx = false;
#endif
    // MOST_GROUPS groups of 32 columns at a time, but by AMX.
    const int64_t step = one_group ? DEPTH : !amx && c.group == 32 ? MOST_GROUPS * c.group : c.group;
    const int64_t tall = (end - begin + REGISTERS_HOLD - 1) / REGISTERS_HOLD;
    const int64_t at_once = (end - begin + tall - 1) / tall;  // 7 rows are 4 and 3: products of one row wait for each other
    const int64_t every = (end - begin + 15) / 16 * 16;
    const int64_t depth = depth_of(c);
    for (int64_t from = 0; from < c.k; from += depth) {
        const int64_t to = from + depth < padded ? from + depth : padded;
        make_panel<CODES>(c, first, from, to, panel);
        const int64_t first_group = one_group ? 0 : from / c.group;
        const int64_t in_panel = one_group ? 1 : (to - from + c.group - 1) / c.group;
        Factors *of_groups = of_factors.take<Factors>((in_panel + 15) / 16 * 16);
        find_factors(c, first, first_group, in_panel, of_groups);
        float *of_rows = of_scales.take<float>((in_panel + 15) / 16 * 16 * every + MOST_AT_ONCE);
        scales_of(c.a_scale, begin, end - begin, every, first_group, in_panel, of_rows, every);
        Next next;
        if (!amx) next = to < c.k ? Next::of_panel<CODES>(c, first, to) : Next::of_task<CODES>(c, first);
        next.twice = tall * c.terms == 1;
        for (int64_t k = from; k < to; k += step) {
            const int64_t stop = k + step < to ? k + step : to, pairs = (stop - k) / 2, g = one_group ? 0 : k / c.group;
            const int64_t groups = one_group ? 1 : (stop - k + c.group - 1) / c.group;
            const Factors *factors = of_groups + (g - first_group);
            const uint32_t *part = panel + (k - from) / 2 * PANEL;
            // AMX adds up 16 pairs at a time; groups that end within such are for AVX-512.
            const bool tiles = amx && pairs % 16 == 0;
            const int64_t most = tiles ? MOST_AT_ONCE : at_once;
            for (int64_t i = begin; i < end; i += most) {
                const int64_t rows = end - i < most ? end - i : most;
                float *into = sums + (i - begin) * PANEL;
                const float *of_a = of_rows + (g - first_group) * every + i - begin;
                __mmask16 normal[MOST_GROUPS], always = 0xffff;
                for (int64_t other = 0; other < groups; other++)
                    always &= normal[other] = factors[other].normal(of_a + other * every);
                const bool all_normal = (~always & ((1u << rows) - 1)) == 0;
                for (int64_t term = 0; term < c.terms; term++) {
                    const Element *row[MOST_AT_ONCE];
                    for (int64_t r = 0; r < rows; r++)
                        row[r] = a + (c.rows ? c.rows[i + r] : c.first_row + i + r) * width + term * padded + k;
#if defined(KERNELHUB_AMX)
                    if (tiles && rows > 1) {
                        rows_of_tile(rows, {row, of_a, normal[0]}, part, pairs, factors[0].of, into);
                        continue;
                    }
#endif
                    if (groups > 1 && all_normal) {
                        some_rows_of_groups(rows, row, part, groups, pairs / groups, of_a, every, factors, into, next);
                        continue;
                    }
                    for (int64_t other = 0, p = 0; other < groups; other++, p += pairs / groups) {
                        const uint32_t *of_group = part + p * PANEL;
                        some_rows(rows, {row, of_a + other * every, normal[other]}, of_group, pairs / groups,
                                  factors[other].of, into, next);
                        for (int64_t r = 0; r < rows; r++) row[r] += 2 * (pairs / groups);
                    }
                }
            }
        }
    }
    const int64_t columns = c.n - first < PANEL ? c.n - first : PANEL;
    for (int64_t i = begin; i < end; i++) finish_row(c, i, first, columns, sums + (i - begin) * PANEL);
}

// Rows up to which panels do not pay. One core of Zen 4, ms without and with them: 2 rows of 7168 x 2304 scaled by blocks of
// 128 columns 1.85 and 2.29, 3 rows 2.15 and 1.97; 2 rows scaled by 32 columns 3.3 and 2.3; 2 and 3 rows of 5120 x 2048
// scaled by row 1.20 and 1.51, 1.40 and 1.20; 2 rows of 128 products of 512 x 128 1.45 and 1.09; 2 and 4 rows of 5760 x 2880
// in MXFP4 1.72 and 2.35, 2.34 and 2.26. With AMX it is 6 throughout, measured on Zen 5 with other panels: 6 and 7 rows by 8
// experts of 7168 x 256 took 3.5 and 7.3 ms without, since the registers for sums do not suffice; 4.9 and 5.4 with them.
int64_t few(const Call &c) {
#if defined(KERNELHUB_AMX)
    if (has_amx()) return 6;
#endif
    if (c.codes != E4M3) return 4;
    return c.group <= 32 || c.k <= 128 ? 1 : 2;
}

// How many tasks a product is, one of so many at the same time; they may run at once.
int64_t divide(Call &c, int64_t products) {
    if (!c.m) return 0;  // `few_rows` takes one row at least
    if (c.m * c.terms <= few(c)) return (c.n + CHUNK - 1) / CHUNK;
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
                if (is_normal(both)) {
                    totals[(i + r) * TALL + j] += sum[r][j] * both;
                } else {
                    const InTurn factors(scale, other);
                    totals[(i + r) * TALL + j] += sum[r][j] * factors.first * factors.second;
                }
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
