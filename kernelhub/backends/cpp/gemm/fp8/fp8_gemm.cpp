// A product of float8 matrices on a CPU: out[m, n] = sum over groups g of (sum over k in g of a[m, k] b[n, k])
// * a_scale[m, g] * b_scale[n / row_block, g], + bias[n].
//
// Weights are read as bytes, once. Few rows: each row of b is decoded in registers and multiplied by all rows of a.
// More: 64 rows of b at a time are decoded into a panel in the order in which the instructions want them, and tiles of
// 6 x 64 results are kept in registers. With AVX-512 BF16 pairs of bfloat16, which hold every e4m3 number, are
// multiplied and added in float32; elsewhere float32 is. A group's sum is scaled in float32 before it joins the others.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct Scale {
    const void *values;
    int64_t row, column;  // strides
    int64_t e8m0;         // one byte each: 2^(byte - 127), 255 is NaN

    float at(int64_t i, int64_t g) const {
        const int64_t place = i * row + g * column;
        if (!e8m0) return static_cast<const float *>(values)[place];
        const uint32_t raw = static_cast<const uint8_t *>(values)[place];
        const uint32_t bits = raw == 0 ? 0x00400000u : raw == 255 ? 0x7fc00000u : raw << 23;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
};

enum Kind : int64_t { BFLOAT16, FLOAT16, FLOAT32 };

// Exact, and rounded to nearest even.
void store(void *out, int64_t place, int64_t kind, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (kind == FLOAT32) {
        static_cast<float *>(out)[place] = value;
    } else if (kind == BFLOAT16) {
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
        static_cast<uint16_t *>(out)[place] = nan ? 0x7fc0 : static_cast<uint16_t>(rounded >> 16);
    } else {
        const uint32_t sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
        uint32_t half;
        if (size > 0x7f800000) {
            half = 0x7e00;
        } else if (size >= 0x477ff000) {  // 65520 and more round to infinity
            half = 0x7c00;
        } else if (size < 0x38800000) {  // below 2^-14 the step is 2^-24: adding 1/2 leaves those bits at the end
            float small;
            memcpy(&small, &size, 4);
            small += 0.5f;
            memcpy(&half, &small, 4);
            half -= 0x3f000000;
        } else {
            half = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
        }
        static_cast<uint16_t *>(out)[place] = static_cast<uint16_t>(sign | half);
    }
}

struct Call {
    const uint8_t *a, *b;
    Scale a_scale, b_scale;
    const float *bias;  // or null
    void *out;
    void *work;  // of a: rows x padded in the type that is multiplied
    int64_t m, n, k, group, row_block;
    int64_t stride_am, stride_bn, stride_om, kind;
    int threads;

    int64_t groups() const { return (k + group - 1) / group; }
    int64_t padded() const { return (k + 31) / 32 * 32; }
    void finish(int64_t i, int64_t j, float sum) const { store(out, i * stride_om + j, kind, bias ? sum + bias[j] : sum); }
};

// Memory of a thread, kept from call to call.
struct Buffer {
    void *memory = nullptr;
    size_t size = 0;

    ~Buffer() { free(memory); }
    template <class T>
    T *take(size_t count) {
        const size_t wanted = (count * sizeof(T) + 63) / 64 * 64;
        if (wanted > size) {
            free(memory);
            memory = aligned_alloc(64, wanted);
            size = memory ? wanted : 0;
        }
        return static_cast<T *>(memory);
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)

typedef uint16_t Element;
constexpr int64_t PANEL = 64;        // rows of b
constexpr int64_t DEPTH = 1024;      // columns of a panel: 128 KB, which stay in L2
constexpr int64_t MOST_ROWS = 2048;  // of a that share a panel: their float32 sums are 512 KB
// Rows up to which panels do not pay: of 4096 x 4096 weights in blocks on one Zen 5 core, 2, 4 and 6 rows take 0.9, 2.1
// and 3.3 ms without, 1.7, 2.1 and 2.1 ms with them.
constexpr int64_t FEW = 4;

// 32 codes as bfloat16, exactly: exponents are biased by 120 more; the 8 smallest come from a table.
inline __m512i decode(const uint8_t *codes, __mmask32 kept) {
    const __m512i subnormal = _mm512_castsi128_si512(
        _mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
    // A masked load where none is needed took seven times as long from memory that other programs use too.
    const __m256i *const all = reinterpret_cast<const __m256i *>(codes);
    const __m512i wide = _mm512_cvtepu8_epi16(kept == ~0u ? _mm256_loadu_si256(all) : _mm256_maskz_loadu_epi8(kept, codes));
    const __m512i size = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    const __mmask32 tiny = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    value = _mm512_mask_permutexvar_epi16(value, tiny, size, subnormal);
    const __mmask32 nan = _mm512_cmpeq_epu16_mask(size, _mm512_set1_epi16(0x7f));
    value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(value, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8));
}

inline __mmask32 up_to(int64_t left) { return left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0; }

inline __m512 add_products(__m512 sum, __m512i x, __m512i y) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

void decode_row(const uint8_t *codes, int64_t count, Element *into) {
    for (int64_t k = 0; k < count; k += 32) _mm512_storeu_si512(into + k, decode(codes + k, up_to(count - k)));
}

template <int ROWS>
void few_rows(const Call &c, const Element *a, int64_t first_row, int64_t begin, int64_t end) {
    const int64_t padded = c.padded(), groups = c.groups();
    for (int64_t n = begin; n < end; n++) {
        const uint8_t *codes = c.b + n * c.stride_bn;
        __m512 total[ROWS];
        for (int i = 0; i < ROWS; i++) total[i] = _mm512_setzero_ps();
        for (int64_t g = 0; g < groups; g++) {
            const int64_t from = g * c.group, to = from + c.group < c.k ? from + c.group : c.k;
            __m512 sum[ROWS];
            for (int i = 0; i < ROWS; i++) sum[i] = _mm512_setzero_ps();
            for (int64_t k = from; k < to; k += 32) {
                const __m512i right = decode(codes + k, up_to(to - k));
                for (int i = 0; i < ROWS; i++)
                    sum[i] = add_products(sum[i], right, _mm512_loadu_si512(a + (first_row + i) * padded + k));
            }
            const float scale = c.b_scale.at(n / c.row_block, g);
            for (int i = 0; i < ROWS; i++)
                total[i] = _mm512_fmadd_ps(sum[i], _mm512_set1_ps(scale * c.a_scale.at(first_row + i, g)), total[i]);
        }
        for (int i = 0; i < ROWS; i++) c.finish(first_row + i, n, _mm512_reduce_add_ps(total[i]));
    }
}

// 16 rows of 16 pairs become 16 pairs of 16 rows.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i even_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i even_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i odd_low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i odd_high = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// Columns from..to of 64 rows of b, pair by pair: [pairs][64] pairs. Rows and columns that b lacks are 0.
void make_panel(const Call &c, int64_t first, int64_t from, int64_t to, uint32_t *panel) {
    for (int64_t r = 0; r < PANEL; r += 16)
        for (int64_t k = from; k < to; k += 32) {
            __m512i rows[16];
            const __mmask32 kept = up_to(c.k - k);
            for (int i = 0; i < 16; i++) {
                const bool there = first + r + i < c.n;
                rows[i] = there ? decode(c.b + (first + r + i) * c.stride_bn + k, kept) : _mm512_setzero_si512();
            }
            transpose(rows);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + ((k - from) / 2 + i) * PANEL + r, rows[i]);
        }
}

// sums[ROWS][64] += (a's rows . pairs of the panel) * a_scale * factors
template <int ROWS>
void tile(const Element *a, int64_t padded, const uint32_t *panel, int64_t pairs, const float *a_scale,
          const float *factors, float *sums) {
    __m512 sum[ROWS][4];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        __m512i right[4];
        for (int j = 0; j < 4; j++) right[j] = _mm512_load_si512(panel + p * PANEL + 16 * j);
        for (int i = 0; i < ROWS; i++) {
            int32_t pair;
            memcpy(&pair, a + i * padded + 2 * p, 4);
            const __m512i left = _mm512_set1_epi32(pair);
            for (int j = 0; j < 4; j++) sum[i][j] = add_products(sum[i][j], left, right[j]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 4; j++) {
            const __m512 factor = _mm512_mul_ps(_mm512_set1_ps(a_scale[i]), _mm512_loadu_ps(factors + 16 * j));
            float *at = sums + i * PANEL + 16 * j;
            _mm512_store_ps(at, _mm512_fmadd_ps(sum[i][j], factor, _mm512_load_ps(at)));
        }
}

// 64 sums into a row of the result, as `finish` does with one. One by one, the 2^20 of 128 products of
// 16 x 512 x 128 took 9 of 11 ms.
void finish_row(const Call &c, int64_t i, int64_t first, const float *sums) {
    const int64_t columns = c.n - first < PANEL ? c.n - first : PANEL;
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

void many_rows(const Call &c, const Element *a, int64_t first, int64_t begin, int64_t end) {
    thread_local Buffer of_panel, of_sums;
    uint32_t *panel = of_panel.take<uint32_t>(DEPTH / 2 * PANEL);
    float *sums = of_sums.take<float>((end - begin) * PANEL);
    memset(sums, 0, (end - begin) * PANEL * sizeof(float));
    const int64_t padded = c.padded();
    const bool one_group = c.group >= c.k;
    const int64_t step = one_group ? DEPTH : c.group;
    for (int64_t from = 0; from < c.k; from += DEPTH) {
        const int64_t to = from + DEPTH < padded ? from + DEPTH : padded;
        make_panel(c, first, from, to, panel);
        for (int64_t k = from; k < to; k += step) {
            const int64_t g = one_group ? 0 : k / c.group, pairs = ((k + step < to ? k + step : to) - k) / 2;
            float factors[PANEL];
            for (int64_t j = 0; j < PANEL; j++)
                factors[j] = first + j < c.n ? c.b_scale.at((first + j) / c.row_block, g) : 0.0f;
            const uint32_t *part = panel + (k - from) / 2 * PANEL;
            for (int64_t i = begin; i < end; i += 6) {
                const int64_t rows = end - i < 6 ? end - i : 6;
                const Element *left = a + i * padded + k;
                float *into = sums + (i - begin) * PANEL, of_a[6];
                for (int64_t r = 0; r < rows; r++) of_a[r] = c.a_scale.at(i + r, g);
                switch (rows) {
                    case 6: tile<6>(left, padded, part, pairs, of_a, factors, into); break;
                    case 5: tile<5>(left, padded, part, pairs, of_a, factors, into); break;
                    case 4: tile<4>(left, padded, part, pairs, of_a, factors, into); break;
                    case 3: tile<3>(left, padded, part, pairs, of_a, factors, into); break;
                    case 2: tile<2>(left, padded, part, pairs, of_a, factors, into); break;
                    default: tile<1>(left, padded, part, pairs, of_a, factors, into);
                }
            }
        }
    }
    for (int64_t i = begin; i < end; i++) finish_row(c, i, first, sums + (i - begin) * PANEL);
}

void multiply(const Call &c, const Element *a) {
    if (c.m <= FEW) {
        constexpr int64_t CHUNK = 16;
        parallel_for((c.n + CHUNK - 1) / CHUNK, c.threads, [&](int64_t chunk) {
            const int64_t begin = chunk * CHUNK, end = begin + CHUNK < c.n ? begin + CHUNK : c.n;
            switch (c.m) {
                case 1: few_rows<1>(c, a, 0, begin, end); break;
                case 2: few_rows<2>(c, a, 0, begin, end); break;
                case 3: few_rows<3>(c, a, 0, begin, end); break;
                default: few_rows<4>(c, a, 0, begin, end);
            }
        });
        return;
    }
    const int64_t panels = (c.n + PANEL - 1) / PANEL;
    int64_t rows = c.m < MOST_ROWS ? c.m : MOST_ROWS;
    while (panels * ((c.m + rows - 1) / rows) < 2 * c.threads && rows > 48) rows = (rows + 1) / 2;
    const int64_t chunks = (c.m + rows - 1) / rows;
    parallel_for(panels * chunks, c.threads, [&](int64_t task) {
        const int64_t begin = task % chunks * rows, end = begin + rows < c.m ? begin + rows : c.m;
        many_rows(c, a, task / chunks * PANEL, begin, end);
    });
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
constexpr int TALL = 4;         // rows of b at a time
constexpr int64_t DEPTH = 512;  // columns at a time: 8 KB of decoded weights, which stay in L1

float value_of(uint8_t code) {
    const uint32_t size = code & 0x7f;
    float value = size < 8 ? static_cast<float>(size) * 0.001953125f : 0.0f;  // 2^-9
    if (size >= 8) {
        const uint32_t bits = size == 0x7f ? 0x7fc00000u : (size << 20) + (120u << 23);
        memcpy(&value, &bits, 4);
    }
    return code & 0x80 ? -value : value;
}

struct Table {
    float values[256];
    Table() {
        for (int code = 0; code < 256; code++) values[code] = value_of(static_cast<uint8_t>(code));
    }
};

// Codes as float32, exactly; the rest up to a multiple of 32 is 0.
void decode_row(const uint8_t *codes, int64_t count, float *into) {
    static const Table table;
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
    for (; k < count; k++) into[k] = table.values[codes[k]];
    for (; k % 32; k++) into[k] = 0.0f;
}

inline Vector load(const float *from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

// TALL rows of b by ROWS rows of a, columns from..to of a group; the vectors are added up by the caller.
template <int ROWS>
inline void products(const float *a, int64_t padded, const float *b, int64_t count, Vector sum[ROWS][TALL]) {
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < TALL; j++) sum[i][j] = Vector{};
    for (int64_t k = 0; k < count; k += WIDE) {
        Vector right[TALL];
        for (int j = 0; j < TALL; j++) right[j] = load(b + j * DEPTH + k);
        for (int i = 0; i < ROWS; i++) {
            const Vector left = load(a + i * padded + k);
            for (int j = 0; j < TALL; j++) sum[i][j] += left * right[j];
        }
    }
}

template <int ROWS>
void some_rows(const Call &c, const float *a, int64_t i, int64_t first, int64_t from, int64_t to, const float *b,
               Vector *totals) {
    const int64_t padded = c.padded(), step = c.group < DEPTH ? c.group : DEPTH;
    for (int64_t k = from; k < to; k += step) {
        const int64_t g = k / c.group, stop = k + step < to ? k + step : to;
        Vector sum[ROWS][TALL];
        products<ROWS>(a + i * padded + k, padded, b + k - from, (stop - k + 31) / 32 * 32, sum);
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < TALL; j++) {
                const int64_t n = first + j < c.n ? first + j : c.n - 1;
                totals[(i + r) * TALL + j] += sum[r][j] * (c.a_scale.at(i + r, g) * c.b_scale.at(n / c.row_block, g));
            }
    }
}

void multiply(const Call &c, const float *a) {
    parallel_for((c.n + TALL - 1) / TALL, c.threads, [&](int64_t chunk) {
        thread_local Buffer of_totals, of_weights;
        Vector *totals = of_totals.take<Vector>(c.m * TALL);
        float *b = of_weights.take<float>(TALL * DEPTH);
        const int64_t first = chunk * TALL;
        for (int64_t i = 0; i < c.m * TALL; i++) totals[i] = Vector{};
        for (int64_t from = 0; from < c.k; from += DEPTH) {
            const int64_t to = from + DEPTH < c.k ? from + DEPTH : c.k;
            for (int64_t j = 0; j < TALL; j++) {
                const int64_t n = first + j < c.n ? first + j : c.n - 1;
                decode_row(c.b + n * c.stride_bn + from, to - from, b + j * DEPTH);
            }
            int64_t i = 0;
            for (; i + 2 <= c.m; i += 2) some_rows<2>(c, a, i, first, from, to, b, totals);
            if (i < c.m) some_rows<1>(c, a, i, first, from, to, b, totals);
        }
        for (int64_t i = 0; i < c.m; i++)
            for (int64_t j = 0; j < TALL && first + j < c.n; j++) {
                float sum = 0.0f;
                for (int lane = 0; lane < WIDE; lane++) sum += totals[i * TALL + j][lane];
                c.finish(i, first + j, sum);
            }
    });
}

#endif

void run(const Call &call) {
    Element *left = static_cast<Element *>(call.work);
    const int64_t padded = call.padded();
    constexpr int64_t ROWS = 8;
    parallel_for((call.m + ROWS - 1) / ROWS, call.threads, [&](int64_t chunk) {
        for (int64_t i = chunk * ROWS; i < (chunk + 1) * ROWS && i < call.m; i++)
            decode_row(call.a + i * call.stride_am, call.k, left + i * padded);
    });
    multiply(call, left);
}

}  // namespace

extern "C" {

// Bytes of an element of the memory that a call works in, which is rows x (columns, made a multiple of 32) of them.
int64_t kernelhub_fp8_gemm_element_bytes() { return sizeof(Element); }

// Bytes that a code stands for, decoded as the kernel does: for tests.
void kernelhub_fp8_decode(const uint8_t *codes, int64_t count, void *into) {
    decode_row(codes, count, static_cast<Element *>(into));
}

void kernelhub_fp8_gemm(const uint8_t *a, const uint8_t *b, const void *a_scale, const void *b_scale, const float *bias,
                        void *out, void *work, const int64_t *sizes, int64_t threads) {
    const int64_t *s = sizes;
    const Call call{a, b, {a_scale, s[5], s[6], s[7]}, {b_scale, s[8], s[9], s[10]}, bias, out, work,
                    s[0], s[1], s[2], s[3], s[4], s[11], s[12], s[13], s[14], static_cast<int>(threads)};
    run(call);
}

// The same for each of s[0] matrices; s[1], s[2] and s[3] are the strides between those of a, b and out, s[4] and s[5]
// between scales. Each is the work of one thread, unless there are fewer of them than threads.
void kernelhub_bmm_fp8(const uint8_t *a, const uint8_t *b, const float *a_scale, const float *b_scale, void *out,
                       void *work, const int64_t *sizes, int64_t threads) {
    const int64_t *s = sizes;
    const int64_t batch = s[0], m = s[6], n = s[7], k = s[8], kind = s[12], width = kind == FLOAT32 ? 4 : 2;
    const bool each = batch >= threads;
    const int64_t padded = (k + 31) / 32 * 32;
    const auto one = [&](int64_t i) {
        const Call call{a + i * s[1], b + i * s[2], {a_scale + i * s[4], 0, 0, 0}, {b_scale + i * s[5], 0, 0, 0}, nullptr,
                        static_cast<char *>(out) + i * s[3] * width, static_cast<Element *>(work) + i * m * padded,
                        m, n, k, k, 1, s[9], s[10], s[11], kind, each ? 1 : static_cast<int>(threads)};
        run(call);
    };
    if (each) {
        parallel_for(batch, static_cast<int>(threads), one);
    } else {
        for (int64_t i = 0; i < batch; i++) one(i);
    }
}
}
