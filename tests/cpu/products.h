// Cases of kernelhub_fp8_gemm, kernelhub_bmm_fp8 and the four steps of experts beside sums in double.
#pragma once

#include "operands.h"

using ElementBytes = int64_t (*)();
using Fp8Gemm = void (*)(const uint8_t *, const uint8_t *, const void *, const void *, const float *, void *, void *,
                         const int64_t *, int64_t);
using BmmFp8 = void (*)(const uint8_t *, const uint8_t *, const float *, const float *, void *, void *, const int64_t *,
                        int64_t);
using Sort = int64_t (*)(const int32_t *, const int32_t *, int32_t *, int32_t *, int64_t *, const int64_t *);
using Prepare = void (*)(const void *, const float *, void *, float *, const int64_t *, int64_t);
using Multiply = void (*)(const void *, const float *, const int32_t *, const int64_t *, const uint8_t *, const void *,
                          const float *, const void *, const float *, const int32_t *, float *, const int64_t *, int64_t);
using Gather = void (*)(const float *, const int32_t *, const float *, const void *, void *, const int64_t *, int64_t);

constexpr double SUM_ERROR = 1e-5;  // of float32 sums, of the sum of their terms' sizes

inline int64_t up_to(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

inline void draw_codes(Tensor &codes, int64_t rows, int64_t columns, Random &random) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < columns; k++) codes.draw(codes.place(i, k), random);
}

struct GemmCase {
    const char *name;
    int64_t m, n, k, group, row_block, kind;  // group 0: one for all columns
    bool e8m0, bias;
    int64_t more;  // elements between rows, and of offsets
};

inline std::vector<GemmCase> gemm_cases() {
    return {
        {"fp8 1 x 1 x 1", 1, 1, 1, 0, 1, FLOAT32, false, false, 0},
        {"fp8 no rows", 0, 5, 40, 0, 1, FLOAT32, false, false, 0},
        {"fp8 3 x 17 x 33, row scales", 3, 17, 33, 0, 1, BFLOAT16, false, true, 3},
        {"fp8 7 x 65 x 100, row scales", 7, 65, 100, 0, 1, FLOAT16, false, true, 1},
        {"fp8 6 x 67 x 1111, row scales", 6, 67, 1111, 0, 1, FLOAT32, false, false, 1},
        {"fp8 5 x 130 x 384, blocks", 5, 130, 384, 128, 128, BFLOAT16, false, true, 1},
        {"fp8 9 x 66 x 1152, blocks", 9, 66, 1152, 128, 128, BFLOAT16, false, false, 5},
        {"fp8 9 x 33 x 296, blocks that end early", 9, 33, 296, 128, 128, FLOAT32, false, false, 1},
        {"fp8 2 x 9 x 96, e8m0", 2, 9, 96, 32, 1, BFLOAT16, true, false, 1},
        {"fp8 55 x 66 x 64, e8m0", 55, 66, 64, 32, 1, BFLOAT16, true, true, 1},
    };
}

inline void run_gemm(const GemmCase &c, Fp8Gemm function, ElementBytes element_bytes, int64_t threads, Random random,
                     Report &report) {
    const int64_t group = c.group ? c.group : c.k, groups = (c.k + group - 1) / group;
    const int64_t row = c.k + c.more, of_out = c.n + c.more, blocks = (c.n + c.row_block - 1) / c.row_block;
    Tensor a(FLOAT8_E4M3, {row, 1}, c.m ? (c.m - 1) * row + c.k - 1 : -1, c.more);
    Tensor b(FLOAT8_E4M3, {row, 1}, (c.n - 1) * row + c.k - 1, c.more);
    draw_codes(a, c.m, c.k, random), draw_codes(b, c.n, c.k, random);
    // Scales of a column by column, of b row by row.
    Memory<uint8_t> a_bytes(c.m * groups, c.more), b_bytes(blocks * groups, c.more);
    Memory<float> a_scale(c.m * groups, c.more), b_scale(blocks * groups, c.more);
    for (int64_t i = 0; i < a_scale.count; i++)
        a_bytes[i] = 124 + random.below(6), a_scale[i] = 0.25f + random.below(8) * 0.375f;
    for (int64_t i = 0; i < b_scale.count; i++)
        b_bytes[i] = 124 + random.below(6), b_scale[i] = 0.25f + random.below(8) * 0.375f;
    Memory<float> bias(c.n, c.more);
    for (int64_t j = 0; j < c.n; j++) bias[j] = static_cast<float>(random.below(9)) - 4.0f;
    Tensor out(c.kind, {of_out, 1}, c.m ? (c.m - 1) * of_out + c.n - 1 : -1, c.more);
    Memory<char> work(c.m * up_to(c.k, 32) * element_bytes());
    Memory<int64_t> sizes(15);
    const int64_t all[15] = {c.m, c.n, c.k, group, c.row_block, 1, c.m, c.e8m0, groups, 1, c.e8m0, row, row, of_out, c.kind};
    memcpy(sizes.data, all, sizeof all);
    function(reinterpret_cast<uint8_t *>(a.address()), reinterpret_cast<uint8_t *>(b.address()),
             c.e8m0 ? static_cast<void *>(a_bytes.data) : a_scale.data,
             c.e8m0 ? static_cast<void *>(b_bytes.data) : b_scale.data, c.bias ? bias.data : nullptr, out.address(),
             work.data, sizes.data, threads);
    report.add(out.memory.data, out.memory.count);
    if (!report.compared) return;
    for (int64_t i = 0; i < c.m; i++)
        for (int64_t j = 0; j < c.n; j++) {
            double sum = c.bias ? bias[j] : 0.0, size = std::fabs(sum);
            for (int64_t k = 0; k < c.k; k++) {
                const int64_t of_a = k / group * c.m + i, of_b = j / c.row_block * groups + k / group;
                const double scale =
                    c.e8m0 ? e8m0(a_bytes[of_a]) * e8m0(b_bytes[of_b]) : double(a_scale[of_a]) * b_scale[of_b];
                const double term = a.at(a.place(i, k)) * b.at(b.place(j, k)) * scale;
                sum += term, size += std::fabs(term);
            }
            report.compare(out.at(out.place(i, j)), sum, rounding(c.kind) * std::fabs(sum) + SUM_ERROR * size + 1e-30);
        }
    for (int64_t i = 0; i + 1 < c.m; i++)
        for (int64_t j = c.n; j < of_out; j++) report.require(std::isnan(out.at(out.place(i, j))), "wrote between rows");
}

inline void run_batched(BmmFp8 function, ElementBytes element_bytes, int64_t threads, Random random, Report &report) {
    const int64_t batch = 3, m = 5, n = 19, k = 41, a_step = m * (k + 1) + 2, b_step = n * (k + 2), out_step = m * n + 1;
    Tensor a(FLOAT8_E4M3, {a_step, k + 1, 1}, 2 * a_step + (m - 1) * (k + 1) + k - 1, 1);
    Tensor b(FLOAT8_E4M3, {b_step, k + 2, 1}, 2 * b_step + (n - 1) * (k + 2) + k - 1, 1);
    Tensor out(BFLOAT16, {out_step, n, 1}, 2 * out_step + m * n - 1, 1);
    for (int64_t i = 0; i < batch; i++)
        for (int64_t d = 0; d < k; d++) {
            for (int64_t r = 0; r < m; r++) a.draw(a.place(i, r, d), random);
            for (int64_t r = 0; r < n; r++) b.draw(b.place(i, r, d), random);
        }
    Memory<float> a_scale(1), b_scale(batch);
    a_scale[0] = 0.75f, b_scale[0] = 1.0f, b_scale[1] = 0.3f, b_scale[2] = 2.0f;
    Memory<char> work(batch * m * up_to(k, 32) * element_bytes());
    Memory<int64_t> sizes(13);
    const int64_t all[13] = {batch, a_step, b_step, out_step, 0, 1, m, n, k, k + 1, k + 2, n, BFLOAT16};
    memcpy(sizes.data, all, sizeof all);
    function(reinterpret_cast<uint8_t *>(a.address()), reinterpret_cast<uint8_t *>(b.address()), a_scale.data, b_scale.data,
             out.address(), work.data, sizes.data, threads);
    report.add(out.memory.data, out.memory.count);
    if (!report.compared) return;
    for (int64_t i = 0; i < batch; i++)
        for (int64_t r = 0; r < m; r++)
            for (int64_t j = 0; j < n; j++) {
                double sum = 0.0, size = 0.0;
                for (int64_t d = 0; d < k; d++) {
                    const double term = a.at(a.place(i, r, d)) * b.at(b.place(i, j, d)) * a_scale[0] * b_scale[i];
                    sum += term, size += std::fabs(term);
                }
                report.compare(out.at(out.place(i, r, j)), sum, rounding(BFLOAT16) * std::fabs(sum) + SUM_ERROR * size);
            }
}

enum Codes : int64_t { E4M3, MXFP4, NVFP4 };  // as in csrc/cpu/product.h

struct ExpertsCase {
    const char *name;
    Codes codes;
    int64_t tokens, experts, top_k, n, k, kind;
    bool quantised, blocks, router, bias, map, residual;
    int64_t more = 1;
};

inline std::vector<ExpertsCase> experts_cases() {
    return {
        {"experts, e4m3 by channel, bfloat16", E4M3, 3, 5, 2, 37, 33, BFLOAT16, false, false, false, true, false, true},
        {"experts, e4m3 by block, quantised", E4M3, 9, 3, 2, 130, 320, BFLOAT16, true, true, false, false, false, false},
        {"experts, e4m3 by block, many rows of few experts", E4M3, 23, 4, 1, 66, 1056, BFLOAT16, false, true, true, true,
         true, true},
        {"experts, e4m3 by channel, quantised, float32", E4M3, 2, 9, 3, 5, 100, FLOAT32, true, false, true, true, true,
         true},
        {"experts, mxfp4, float16", MXFP4, 4, 6, 2, 41, 1056, FLOAT16, false, false, false, true, true, false},
        {"experts, mxfp4, many rows", MXFP4, 33, 2, 1, 67, 96, BFLOAT16, false, false, true, false, false, true, 3},
        {"experts, nvfp4, half of 32 columns", NVFP4, 3, 4, 2, 19, 48, BFLOAT16, false, false, false, true, false, true},
        {"experts, nvfp4, many rows, float32", NVFP4, 8, 3, 2, 19, 1040, FLOAT32, false, false, false, false, false, false},
        {"experts, nobody is routed here", MXFP4, 3, 2, 1, 8, 32, BFLOAT16, false, false, false, false, true, true},
    };
}

struct ExpertsFunctions {
    ElementBytes element_bytes;
    Sort sort;
    Prepare prepare;
    Multiply multiply;
    Gather gather;
};

struct ExpertsRun {
    const ExpertsCase &c;
    const ExpertsFunctions &f;
    int64_t threads, element = 0, terms = 0, padded = 0, group = 0, groups = 0, code_row = 0, scale_row = 0, each = 0;
    Random random;

    ExpertsRun(const ExpertsCase &given, const ExpertsFunctions &functions, int64_t many, Random seed)
        : c(given), f(functions), threads(many), random(seed) {
        element = f.element_bytes();
        const int64_t of_kind = c.kind == BFLOAT16 ? 1 : c.kind == FLOAT16 ? 2 : 3;
        terms = c.quantised ? 0 : element == 2 ? of_kind : 1;
        padded = up_to(c.k, 32), group = c.blocks ? 128 : c.k, groups = (c.k + group - 1) / group;
        each = c.codes == MXFP4 ? 32 : 16;
        code_row = (c.codes == E4M3 ? c.k : c.k / 2) + c.more;
        scale_row = c.codes == E4M3 ? groups : c.k / each + c.more;
    }

    void run(Report &report) {
        const int64_t pairs = c.tokens * c.top_k, ids_row = c.top_k + c.more, x_row = c.k + c.more;
        Memory<int32_t> ids((c.tokens - 1) * ids_row + c.top_k, c.more), tokens(pairs), place(pairs);
        Memory<int32_t> map(c.experts * 2 - 1, c.more);  // of every second entry
        Memory<int64_t> starts(c.experts + 1);
        const bool nobody = strstr(c.name, "nobody") != nullptr;
        for (int64_t e = 0; e < c.experts; e++) map[2 * e] = e == 1 || nobody ? -1 : static_cast<int32_t>(c.experts - 1 - e);
        for (int64_t t = 0; t < c.tokens; t++)
            for (int64_t i = 0; i < c.top_k; i++) {
                const int64_t id = random.below(c.experts + 1);
                ids[t * ids_row + i] = id == c.experts ? (t % 2 ? -1 : INT32_MAX) : static_cast<int32_t>(id);
            }
        const int64_t of_sort[7] = {c.tokens, c.top_k, c.experts, ids_row, 1, c.map ? c.experts : 0, c.map ? 2 : 0};
        const int64_t count = f.sort(ids.data, c.map ? map.data : nullptr, tokens.data, place.data, starts.data, of_sort);
        std::vector<int64_t> expert_of(pairs);
        for (int64_t t = 0, next = 0; t < c.tokens; t++)
            for (int64_t i = 0; i < c.top_k; i++) {
                int64_t id = ids[t * ids_row + i];
                if (c.map) id = id >= 0 && id < c.experts ? map[2 * id] : -1;
                if (id < 0 || id >= c.experts) id = -1;
                expert_of[next] = id;
                const int64_t row = place[next++];
                const bool right = id < 0 ? row < 0 : row >= starts[id] && row < starts[id + 1] && tokens[row] == t;
                report.require(right, "sorted wrongly");
            }
        Tensor x(c.kind, {x_row, 1}, (c.tokens - 1) * x_row + c.k - 1, c.more);
        draw_codes(x, c.tokens, c.k, random);
        Memory<char> prepared(c.tokens * std::max<int64_t>(1, terms) * padded * element);
        Memory<float> of_x(c.quantised ? c.tokens * groups : 0);
        const int64_t of_prepare[6] = {c.tokens, c.k, x_row, c.kind, terms, group};
        f.prepare(x.address(), nullptr, prepared.data, c.quantised ? of_x.data : nullptr, of_prepare, threads);
        multiply(x, prepared, of_x, count, expert_of, tokens, place, starts, report);
    }

    // What a prepared row means.
    double value(const Memory<char> &prepared, const Memory<float> &scales, int64_t t, int64_t k) const {
        double sum = 0.0;
        for (int64_t term = 0; term < std::max<int64_t>(1, terms); term++)
            sum += value_of(element == 2 ? BFLOAT16 : FLOAT32,
                            prepared.data + ((t * std::max<int64_t>(1, terms) + term) * padded + k) * element);
        return c.quantised ? sum * scales[t * groups + k / group] : sum;
    }

    void multiply(const Tensor &x, const Memory<char> &prepared, const Memory<float> &of_x, int64_t count,
                  const std::vector<int64_t> &expert_of, const Memory<int32_t> &tokens, const Memory<int32_t> &place,
                  const Memory<int64_t> &starts, Report &report) {
        for (int64_t t = 0; t < c.tokens && report.compared; t++)
            for (int64_t k = 0; k < c.k; k++) {
                const double given = x.at(x.place(t, k)), got = value(prepared, of_x, t, k);
                report.compare(got, given, c.quantised ? std::fabs(given) / 16 + 4.0 / 448 : 1e-30);
            }
        const int64_t rows_of_scales = c.blocks ? (c.n + 127) / 128 : c.n;
        const int64_t of_codes = c.n * code_row + 5, of_scales = rows_of_scales * scale_row + 3;  // from expert to expert
        const int64_t last_code = (c.experts - 1) * of_codes + (c.n - 1) * code_row + code_row - c.more;
        Memory<uint8_t> codes(last_code, c.more);
        for (int64_t i = 0; i < last_code; i++)
            codes[i] =
                c.codes == E4M3 ? static_cast<uint8_t>(random.below(2) << 7 | (40 + random.below(40))) : random.bits() & 255;
        const int64_t used = c.codes == E4M3 ? groups : c.k / each;
        const int64_t last_scale = (c.experts - 1) * of_scales + (rows_of_scales - 1) * scale_row + used;
        Memory<uint8_t> code_scale(last_scale, c.more);
        Memory<float> block_scale(last_scale, c.more), channel(c.experts * c.n, c.more),
            router(c.tokens * c.top_k * 2, c.more);
        for (int64_t i = 0; i < last_scale; i++) {
            code_scale[i] = static_cast<uint8_t>(c.codes == MXFP4 ? 122 + random.below(8) : 40 + random.below(40));
            block_scale[i] = 0.25f + 0.5f * random.below(4);
        }
        for (int64_t i = 0; i < channel.count; i++) channel[i] = 0.5f + 0.25f * random.below(5);
        for (int64_t i = 0; i < router.count; i++) router[i] = 0.125f + 0.25f * random.below(4);
        Tensor bias(c.kind, {c.n + c.more, 1}, (c.experts - 1) * (c.n + c.more) + c.n - 1, c.more);
        draw_codes(bias, c.experts, c.n, random);
        const bool by_channel = !c.blocks && c.codes != MXFP4, scaled = c.blocks || c.codes != E4M3;
        Memory<float> rows(count * c.n);
        const int64_t sizes[23] = {c.experts,
                                   c.n,
                                   c.k,
                                   std::max<int64_t>(1, terms),
                                   c.codes,
                                   of_codes,
                                   code_row,
                                   scaled ? of_scales : 0,
                                   scaled ? scale_row : 0,
                                   0,
                                   c.blocks ? 128 : 1,
                                   group,
                                   by_channel ? c.n : 0,
                                   by_channel ? 1 : 0,
                                   c.n + c.more,
                                   1,
                                   c.kind,
                                   c.quantised ? groups : 1,
                                   c.tokens,
                                   c.router,
                                   c.top_k * 2,
                                   2,
                                   c.top_k};
        const void *scale = !scaled ? nullptr : c.codes == E4M3 ? static_cast<void *>(block_scale.data) : code_scale.data;
        f.multiply(prepared.data, c.quantised ? of_x.data : nullptr, tokens.data, starts.data, codes.data, scale,
                   by_channel ? channel.data : nullptr, c.bias ? bias.address() : nullptr, c.router ? router.data : nullptr,
                   c.router ? place.data : nullptr, rows.data, sizes, threads);
        report.add(rows.data, count * c.n * 4);
        for (int64_t pair = 0; pair < c.tokens * c.top_k && report.compared; pair++) {
            if (place[pair] < 0) continue;
            const int64_t t = pair / c.top_k, e = expert_of[pair];
            for (int64_t j = 0; j < c.n; j++) {
                double sum = c.bias ? bias.at(bias.place(e, j)) : 0.0, size = std::fabs(sum);
                const double factor = (by_channel ? channel[e * c.n + j] : 1.0) * (c.router ? router[pair * 2] : 1.0);
                for (int64_t k = 0; k < c.k; k++) {
                    const uint8_t *row = codes.data + e * of_codes + j * code_row;
                    const int64_t at = e * of_scales + (c.blocks ? j / 128 * scale_row + k / 128 : j * scale_row + k / each);
                    double weight;
                    if (c.codes == E4M3) weight = value_of(FLOAT8_E4M3, row + k) * (c.blocks ? block_scale[at] : 1.0);
                    else
                        weight = e2m1(row[k / 2] >> (k % 2 * 4) & 15) *
                                 (c.codes == MXFP4 ? e8m0(code_scale[at]) : value_of(FLOAT8_E4M3, &code_scale[at]));
                    const double term = value(prepared, of_x, t, k) * weight * factor;
                    sum += term, size += std::fabs(term);
                }
                report.compare(rows[place[pair] * c.n + j], sum, SUM_ERROR * size + 1e-30);
            }
        }
        gather(rows, place, router, report);
    }

    void gather(const Memory<float> &rows, const Memory<int32_t> &place, const Memory<float> &router, Report &report) {
        const int64_t step = c.more == 1 ? 1 : 2, row = c.n * step + c.more;
        Tensor out(c.kind, {row, step}, (c.tokens - 1) * row + (c.n - 1) * step, c.more);
        Tensor residual(c.kind, {row, step}, (c.tokens - 1) * row + (c.n - 1) * step, c.more);
        draw_codes(residual, c.tokens, c.n, random);
        const int64_t sizes[10] = {c.tokens, c.top_k, c.n, c.kind, row, step, row, step, c.top_k * 2, 2};
        f.gather(rows.data, place.data, c.router ? nullptr : router.data, c.residual ? residual.address() : nullptr,
                 out.address(), sizes, threads);
        report.add(out.memory.data, out.memory.count);
        for (int64_t t = 0; t < c.tokens && report.compared; t++)
            for (int64_t j = 0; j < c.n; j++) {
                double sum = c.residual ? residual.at(residual.place(t, j)) : 0.0, size = std::fabs(sum);
                for (int64_t i = 0; i < c.top_k; i++) {
                    const int64_t pair = t * c.top_k + i;
                    if (place[pair] < 0) continue;
                    const double term = rows[place[pair] * c.n + j] * (c.router ? 1.0 : router[pair * 2]);
                    sum += term, size += std::fabs(term);
                }
                report.compare(out.at(out.place(t, j)), sum, rounding(c.kind) * std::fabs(sum) + 1e-6 * size + 1e-30);
            }
    }
};
