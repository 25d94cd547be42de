// Experts with quantised weights on a CPU, in four steps that Python calls in turn:
//
//   sort      the choices of experts that are here, expert by expert, in their order
//   prepare   rows of activations as products take them: quantised to e4m3, or as sums of terms
//   multiply  the rows of each expert that was hit by its weights, all of them in one loop
//   gather    each token's choices, weighed and added up in their order, and the residual
//
// Products are those of product.h: weights are read as codes, once, however many rows an expert has.

#include <algorithm>
#include <vector>

#include "product.h"

namespace {

constexpr float SMALLEST_AMAX = 1e-10f, E4M3_MAX = 448.0f;

inline void put(float value, float *into) { *into = value; }
inline void put(float value, uint16_t *into) { *into = static_cast<uint16_t>(bits_of(value) >> 16); }  // the rest is 0

// The nearest number of e4m3, ties to even; what is larger becomes 448, NaN stays.
inline float rounded(float value) {
    const uint32_t bits = bits_of(value), sign = bits & 0x80000000;
    const uint32_t given = bits & 0x7fffffff, largest = bits_of(E4M3_MAX);
    const uint32_t size = given > largest && given <= 0x7f800000 ? largest : given;
    const uint32_t normal = (size + 0x7ffff + ((size >> 20) & 1)) & 0xfff00000;
    const uint32_t small = bits_of((float_of(size) + 24576.0f) - 24576.0f);  // whose last bit is 2^-9
    const uint32_t nearest = size < 0x3c800000 ? small : normal;
    return float_of((size > 0x7f800000 ? 0x7fc00000 : nearest) | sign);
}

// A row quantised with a scale for each so many columns; the rest up to a multiple of 32 is 0.
template <class Of>
void quantize(const typename Of::Held *row, int64_t k, int64_t group, const float *known, Element *into, float *scales) {
    for (int64_t from = 0, g = 0; from < k; from += group, g++) {
        const int64_t to = from + group < k ? from + group : k;
        float scale;
        if (known) {
            scale = *known;
        } else {
            uint32_t largest = bits_of(SMALLEST_AMAX);  // NaN is larger than every number
            for (int64_t i = from; i < to; i++) {
                const uint32_t size = bits_of(Of::value(row[i])) & 0x7fffffff;
                largest = size > largest ? size : largest;
            }
            scale = float_of(largest) / E4M3_MAX;
        }
        for (int64_t i = from; i < to; i++) put(rounded(Of::value(row[i]) / scale), into + i);
        scales[g] = scale;
    }
    for (int64_t i = k; i % 32; i++) into[i] = 0;
}

// The leading bits of a number, so many that an element holds them; what is left is exact.
inline float take(float &value, const uint16_t *) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
    const float leading = float_of(size > 0x7f800000 ? 0x7fc00000 : bits & 0xffff0000);
    value = size >= 0x7f800000 ? 0.0f : value - leading;
    return leading;
}
inline float take(float &value, const float *) {
    const float all = value;
    value = 0.0f;
    return all;
}

template <class Of>
void split(const typename Of::Held *row, int64_t k, int64_t terms, Element *into) {
    const int64_t padded = (k + 31) / 32 * 32;
    if (terms == 1) {
        for (int64_t i = 0; i < k; i++) {
            float value = Of::value(row[i]);
            put(take(value, into), into + i);
        }
    } else {
        for (int64_t i = 0; i < k; i++) {
            float value = Of::value(row[i]);
            for (int64_t term = 0; term < terms; term++) put(take(value, into), into + term * padded + i);
        }
    }
    for (int64_t term = 0; term < terms; term++)
        for (int64_t i = k; i < padded; i++) into[term * padded + i] = 0;
}

// As `store` does with one, but of a whole row, where there are vectors for it.
void store_row(void *out, int64_t place, int64_t step, int64_t kind, const float *values, int64_t count) {
    if (kind == BFLOAT16 && step == 1) {
        uint16_t *into = static_cast<uint16_t *>(out) + place;
        for (int64_t j = 0; j < count; j++) into[j] = rounded_to_bfloat16(values[j]);
    } else {
        for (int64_t j = 0; j < count; j++) store(out, place + j * step, kind, values[j]);
    }
}

struct Share {
    Call call;
    int64_t end;  // of its tasks
};

template <Codes CODES>
void multiply(const std::vector<Share> &shares, const Element *a, int threads) {
    const int64_t tasks = shares.empty() ? 0 : shares.back().end;
    parallel_for(tasks, threads, [&](int64_t task) {
        const auto later = [](int64_t wanted, const Share &share) { return wanted < share.end; };
        const auto share = std::upper_bound(shares.begin(), shares.end(), task, later);
        perform<CODES>(share->call, a, share == shares.begin() ? task : task - (share - 1)->end);
    });
}

}  // namespace

extern "C" {

int64_t kernelhub_experts_element_bytes() { return sizeof(Element); }

// tokens[R], pairs -> place[P] (its row, -1 if it is left out), starts[experts + 1]. Gives R.
// sizes: tokens, top_k, experts, strides of ids (row, column), entries of the map, its stride
int64_t kernelhub_experts_sort(const int32_t *ids, const int32_t *map, int32_t *tokens, int32_t *place, int64_t *starts,
                               const int64_t *s) {
    const int64_t rows = s[0], top_k = s[1], experts = s[2];
    memset(starts, 0, (experts + 1) * sizeof(int64_t));
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = 0; i < top_k; i++) {
            int64_t id = ids[t * s[3] + i * s[4]];
            if (map) id = id >= 0 && id < s[5] ? map[id * s[6]] : -1;
            if (id < 0 || id >= experts) id = -1;
            place[t * top_k + i] = static_cast<int32_t>(id);
            if (id >= 0) starts[id + 1]++;
        }
    for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts, starts + experts);
    for (int64_t pair = 0; pair < rows * top_k; pair++) {
        if (place[pair] < 0) continue;
        place[pair] = static_cast<int32_t>(next[place[pair]]++);
        tokens[place[pair]] = static_cast<int32_t>(pair / top_k);
    }
    return starts[experts];
}

// rows [rows, k] -> into [rows, terms, padded], scales [rows, groups] if they are quantised.
// sizes: rows, k, stride, kind, terms (0: quantised), group
void kernelhub_experts_prepare(const void *from, const float *known, void *into, float *scales, const int64_t *s,
                               int64_t threads) {
    const int64_t rows = s[0], k = s[1], stride = s[2], terms = s[4], group = s[5];
    const int64_t padded = (k + 31) / 32 * 32, groups = terms ? 1 : (k + group - 1) / group;
    Element *elements = static_cast<Element *>(into);
    with(s[3], [&](auto of) {
        typedef decltype(of) Of;
        const auto *given = static_cast<const typename Of::Held *>(from);
        parallel_for(rows, static_cast<int>(threads), [&](int64_t i) {
            if (terms) split<Of>(given + i * stride, k, terms, elements + i * terms * padded);
            else quantize<Of>(given + i * stride, k, group, known, elements + i * padded, scales + i * groups);
        });
    });
}

// out[R, n], float32: row r is row tokens[r] (or r) of a, by the weights of the expert that it belongs to.
// sizes: 0 experts, 1 n, 2 k, 3 terms, 4 codes, 5 bytes from expert to expert, 6 from row to row, scales of blocks or
// groups: 7 from expert to expert, 8 from row to row, 9 e8m0, 10 row_block, 11 group; of channels: 12 from expert to expert,
// 13 from row to row; bias: 14 from expert to expert, 15 from row to row, 16 kind; 17 groups of a_scale, 18 rows of a, 19
// whether router weights come before the bias, 20 and 21 their strides, 22 top_k
void kernelhub_experts_multiply(const void *a, const float *a_scale, const int32_t *tokens, const int64_t *starts,
                                const uint8_t *weight, const void *scale, const float *channel, const void *bias,
                                const float *router, const int32_t *place, float *out, const int64_t *s, int64_t threads) {
    const int64_t experts = s[0], n = s[1], k = s[2], groups = s[17], total = starts[experts];
    static const float ONE = 1.0f, EIGHT = 8.0f;
    std::vector<float> factors;  // of row r and group g, what sums are multiplied by
    Scale left{&ONE, 0, 0, 0};
    if (a_scale || router) {
        factors.resize(total * groups);
        for (int64_t r = 0; r < total; r++) {
            const int64_t row = tokens ? tokens[r] : r;
            for (int64_t g = 0; g < groups; g++) factors[r * groups + g] = a_scale ? a_scale[row * groups + g] : 1.0f;
        }
        if (router)
            for (int64_t pair = 0; pair < s[18] * s[22]; pair++)
                for (int64_t g = 0; g < groups && place[pair] >= 0; g++)
                    factors[place[pair] * groups + g] *= router[pair / s[22] * s[20] + pair % s[22] * s[21]];
        left = {factors.data(), groups, groups > 1, 0};
    }
    int64_t hit = 0;
    for (int64_t e = 0; e < experts; e++) hit += starts[e + 1] > starts[e];
    std::vector<float> added(bias ? hit * n : 0);
    std::vector<Share> shares;
    shares.reserve(hit);
    for (int64_t e = 0; e < experts; e++) {
        const int64_t start = starts[e], count = starts[e + 1] - start;
        if (!count) continue;
        const int64_t place_of = static_cast<int64_t>(shares.size());
        Call c{};
        c.m = count, c.n = n, c.k = k, c.threads = static_cast<int>(threads);
        c.b = weight + e * s[5], c.stride_bn = s[6], c.codes = s[4], c.terms = s[3];
        c.a_scale = left;
        if (left.row) c.a_scale.values = factors.data() + start * groups;
        if (s[4] == E4M3 && scale) {
            const int64_t width = s[9] ? 1 : 4;
            c.b_scale = {static_cast<const char *>(scale) + e * s[7] * width, s[8], 1, s[9]};
            c.row_block = s[10], c.group = s[11];
        } else {
            c.b_scale = channel ? Scale{channel + e * s[12], s[13], 0, 0} : Scale{s[4] == MXFP4 ? &EIGHT : &ONE, 0, 0, 0};
            c.row_block = 1, c.group = k;
            c.code_scale = static_cast<const uint8_t *>(scale) + (scale ? e * s[7] : 0), c.stride_code_scale = s[8];
        }
        c.out = out + start * n, c.stride_om = n, c.kind = FLOAT32;
        c.rows = tokens ? tokens + start : nullptr, c.first_row = start;
        c.bias = bias ? added.data() + place_of * n : nullptr;
        if (bias)
            with(s[16], [&](auto of) {
                typedef decltype(of) Of;
                const auto *given = static_cast<const typename Of::Held *>(bias) + e * s[14];
                for (int64_t i = 0; i < n; i++) added[place_of * n + i] = Of::value(given[i * s[15]]);
            });
        shares.push_back({c, 0});
    }
    int64_t end = 0;
    for (size_t i = 0; i < shares.size(); i++) {
        end = shares[i].end = end + divide(shares[i].call, hit);
        if (i) shares[i - 1].call.after = &shares[i].call;
    }
    const Element *elements = static_cast<const Element *>(a);
    if (s[4] == E4M3) multiply<E4M3>(shares, elements, static_cast<int>(threads));
    else if (s[4] == MXFP4) multiply<MXFP4>(shares, elements, static_cast<int>(threads));
    else multiply<NVFP4>(shares, elements, static_cast<int>(threads));
}

// out[t] = sum over choices of weight * rows[place] (+ residual).
// sizes: tokens, top_k, columns, kind, strides of out, of the residual (row, column each), of weights (row, column)
void kernelhub_experts_gather(const float *rows, const int32_t *place, const float *weight, const void *residual, void *out,
                              const int64_t *s, int64_t threads) {
    const int64_t tokens = s[0], top_k = s[1], columns = s[2], kind = s[3];
    constexpr int64_t CHUNK = 512;
    const int64_t chunks = (columns + CHUNK - 1) / CHUNK;
    parallel_for(tokens * chunks, static_cast<int>(threads), [&](int64_t task) {
        const int64_t t = task / chunks, from = task % chunks * CHUNK;
        const int64_t count = columns - from < CHUNK ? columns - from : CHUNK;
        float sum[CHUNK] = {};
        for (int64_t i = 0; i < top_k; i++) {
            const int64_t row = place[t * top_k + i];
            if (row < 0) continue;
            const float factor = weight ? weight[t * s[8] + i * s[9]] : 1.0f;
            const float *added = rows + row * columns + from;
            for (int64_t j = 0; j < count; j++) sum[j] += factor * added[j];
        }
        if (residual)
            with(kind, [&](auto of) {
                typedef decltype(of) Of;
                const auto *given = static_cast<const typename Of::Held *>(residual) + t * s[6] + from * s[7];
                for (int64_t j = 0; j < count; j++) sum[j] += Of::value(given[j * s[7]]);
            });
        store_row(out, t * s[4] + from * s[5], s[5], kind, sum, count);
    });
}
}
