// Cases of kernelhub_attention beside softmax in double.
#pragma once

#include "operands.h"

using AttentionFunction = void (*)(const void *, const void *, const void *, const int32_t *, const int32_t *,
                                   const int32_t *, const int32_t *, const int32_t *, const float *, const float *,
                                   const float *, void *, float *, const double *, const int64_t *, int64_t);

enum Layout { DENSE, RAGGED, NHD, HND, LATENT };

// Whether AMX or AVX-512 BF16 can multiply, by the kinds of q and of keys. Weights are rounded to bfloat16 then.
using HasProducts = int64_t (*)(int64_t, int64_t, int64_t);

struct AttentionCase {
    const char *name;
    Layout layout;
    int64_t kind, kv_kind, heads, kv_heads, width, value_width, page_size;
    std::vector<int64_t> queries, lengths;  // of each sequence
    int64_t left = -1, right = -1;
    double softcap = 0.0;
    bool sinks = false, lse = true, scales = false;
    int64_t step = 1, offset = 0;  // between elements of q, k, v and out; of addresses, in elements
    bool expanded = false;         // the heads of keys and values are one and the same
    int64_t listed = -1;           // positions that are listed for each query, of which it sees some; -1: it sees all
};

inline std::vector<AttentionCase> attention_cases() {
    // clang-format off
    return {
        {"paged decode, the last page partly used", NHD, BFLOAT16, BFLOAT16, 8, 2, 128, 128, 16, {1, 1, 1, 1},
         {33, 1, 16, 70}},
        {"paged decode, odd sizes and addresses", NHD, FLOAT16, FLOAT16, 6, 2, 33, 7, 3, {1, 1, 1}, {0, 5, 40},
         -1, 0, 0.0, true, true, false, 1, 3},
        {"paged decode, float32, head by head", HND, FLOAT32, FLOAT32, 5, 5, 64, 64, 16, {1, 1}, {17, 31}, -1, 0,
         30.0, false, true, false, 1, 1},
        {"paged decode of e4m3 with a scale for each head", HND, BFLOAT16, FLOAT8_E4M3, 8, 4, 64, 64, 16, {1, 1,
         1}, {65, 2, 0}, -1, 0, 0.0, true, true, true, 1, 1},
        {"paged decode of e5m2, every second element", NHD, FLOAT32, FLOAT8_E5M2, 4, 2, 20, 36, 5, {1, 1}, {9,
         34}, -1, 0, 0.0, false, false, true, 2, 3},
        {"paged decode, pieces of 1024 keys, and a window", NHD, BFLOAT16, BFLOAT16, 3, 1, 32, 32, 64, {1, 1},
         {2049, 1500}, 1100, 0, 0.0, true},
        {"several queries and none, ragged, over pages", NHD, BFLOAT16, BFLOAT16, 7, 1, 64, 64, 4, {3, 0, 1, 5},
         {30, 8, 0, 5}, 6, 0},
        {"latent attention", LATENT, BFLOAT16, BFLOAT16, 16, 1, 192, 128, 64, {2, 1, 0}, {65, 3, 7}, -1, 0, 0.0,
         true},
        {"latent attention, e4m3, odd widths", LATENT, FLOAT16, FLOAT8_E4M3, 5, 1, 45, 37, 7, {1, 1}, {20, 7},
         -1, -1, 0.0, false, true, true, 1, 1},
        {"latent attention of listed keys", LATENT, BFLOAT16, BFLOAT16, 16, 1, 192, 128, 64, {1, 1, 1}, {90, 0, 3}, -1,
         0, 0.0, true, true, false, 1, 0, false, 41},
        {"latent attention of listed keys, several queries, odd widths", LATENT, FLOAT16, FLOAT8_E4M3, 5, 1, 45, 37, 7,
         {2, 0, 1}, {20, 2, 7}, -1, -1, 0.0, false, true, true, 1, 1, false, 70},
        {"dense prefill, causal", DENSE, BFLOAT16, BFLOAT16, 4, 2, 96, 96, 0, {37, 37}, {37, 37}, -1, 0},
        {"dense prefill, more queries than keys", DENSE, FLOAT32, FLOAT32, 2, 2, 40, 24, 0, {9}, {4}, -1, 0, 0.0,
         true, true, false, 3, 1},
        {"dense, no keys", DENSE, BFLOAT16, BFLOAT16, 2, 1, 32, 32, 0, {2, 2}, {0, 0}, -1, -1, 0.0, true},
        {"dense, not causal, one head of keys for all", DENSE, FLOAT16, FLOAT16, 6, 3, 64, 48, 0, {5}, {75}, -1,
         -1, 0.0, false, true, false, 1, 1, true},
        {"ragged prefill with a window to both sides", RAGGED, BFLOAT16, BFLOAT16, 4, 4, 64, 64, 0, {13, 0, 40,
         1}, {20, 5, 35, 0}, 5, 3, 20.0},
        {"latent attention, several blocks of keys and strips of rows", LATENT, BFLOAT16, BFLOAT16, 40, 1, 96, 64, 16, {1,
         3, 1}, {600, 257, 32}, -1, 0, 0.0, true},
        {"latent attention of bfloat16 and e4m3, odd widths", LATENT, BFLOAT16, FLOAT8_E4M3, 5, 1, 45, 37, 7, {1, 1},
         {20, 7}, -1, -1, 0.0, false, true, true, 1, 1},
        {"paged decode of bfloat16 and e5m2, every second element", NHD, BFLOAT16, FLOAT8_E5M2, 4, 2, 20, 36, 5, {1, 1},
         {9, 134}, -1, 0, 0.0, true, true, true, 2, 3},
        {"ragged prefill of many rows with a window and a softcap", RAGGED, BFLOAT16, BFLOAT16, 6, 2, 40, 72, 0, {150,
         300}, {150, 310}, 90, 0, 20.0, true},
        {"paged decode of nine heads, pieces of 1024 keys, and a window", NHD, BFLOAT16, BFLOAT16, 9, 1, 32, 32, 64, {1, 1},
         {2049, 1500}, 1100, 0, 0.0, true},
        {"paged decode head by head, groups of eight and a softcap", HND, BFLOAT16, BFLOAT16, 16, 2, 64, 64, 16, {1, 1, 1},
         {300, 1, 17}, -1, 0, 30.0, true},
        {"latent attention of e4m3, odd widths, many heads", LATENT, BFLOAT16, FLOAT8_E4M3, 21, 1, 45, 37, 7, {1, 1, 2}, {20,
         7, 70}, -1, 0, 0.0, true, true, true, 1, 1},
        {"single tokens beside a prompt and none, e5m2, every second element", NHD, BFLOAT16, FLOAT8_E5M2, 6, 2, 20, 36, 5,
         {1, 1, 37, 0}, {9, 1134, 137, 3}, -1, 0, 0.0, true, true, true, 2, 3},
        {"single tokens beside a prompt, groups of two, pages of three", NHD, BFLOAT16, BFLOAT16, 4, 2, 72, 40, 3, {1, 1,
         300, 1}, {1030, 5, 310, 0}, -1, 0, 0.0, true},
        {"ragged prefill of e5m2", RAGGED, FLOAT32, FLOAT8_E5M2, 2, 1, 17, 17, 0, {3, 66}, {3, 66}, -1, 0, 0.0,
         true, true, true, 1, 1},
    };
    // clang-format on
}

struct AttentionRun {
    const AttentionCase &c;
    int64_t batch, tokens = 0, keys = 0, most_pages = 0;
    bool pages, ragged;
    std::vector<int64_t> first_query{0}, first_key{0};
    std::vector<int32_t> page_of;  // sequence by sequence, most_pages each
    int64_t sizes[44] = {};
    std::vector<int32_t> lists;  // of each query token
    double of_weights = 0.0;     // relative error of their rounding

    AttentionRun(const AttentionCase &given, int64_t products)
        : c(given), batch(static_cast<int64_t>(given.queries.size())) {
        pages = c.layout >= NHD, ragged = c.layout == RAGGED;
        if (products) sizes[43] = products, of_weights = rounding(BFLOAT16);
        for (int64_t b = 0; b < batch; b++) {
            tokens += c.queries[b], keys += c.lengths[b];
            first_query.push_back(tokens), first_key.push_back(keys);
            if (pages) {
                ragged |= c.queries[b] != c.queries[0];
                most_pages = std::max(most_pages, (c.lengths[b] + c.page_size - 1) / c.page_size);
            }
        }
    }

    // Places of the keys of a sequence, in elements.
    int64_t key_place(const Tensor &t, int64_t b, int64_t key, int64_t head) const {
        if (pages) return t.place(0, page_of[b * most_pages + key / c.page_size], key % c.page_size, head);
        return ragged ? t.place(0, 0, first_key[b] + key, head) : t.place(b, 0, key, head);
    }
    int64_t query_place(const Tensor &t, int64_t b, int64_t token, int64_t head) const {
        return ragged ? t.place(0, first_query[b] + token, head) : t.place(b, token, head);
    }
    int64_t lse_place(int64_t b, int64_t token, int64_t head) const {
        return ragged ? head * (tokens + 1) + first_query[b] + token : (b * c.heads + head) * (c.queries[0] + 1) + token;
    }

    std::vector<int64_t> row_strides(int64_t heads, int64_t width) const {
        const int64_t row = width * c.step + (c.offset ? 1 : 0), token = heads * row;
        return {ragged ? 0 : c.queries[0] * token, token, row, c.step};
    }
    std::vector<int64_t> key_strides(int64_t width, int64_t longest) const {
        const int64_t row = width * c.step + (c.offset ? 3 : 0), step = c.expanded ? 0 : row;
        if (c.layout == HND) return {0, c.kv_heads * c.page_size * row, row, c.page_size * row, c.step};
        const int64_t token = c.kv_heads * row;
        if (pages) return {0, c.page_size * token, token, step, c.step};
        return {ragged ? 0 : longest * token, 0, token, step, c.step};
    }

    void run(AttentionFunction function, int64_t threads, Random random, Report &report) {
        // Pages in any order, those of a sequence that are not used named by what no page has.
        int64_t used = 0;
        for (int64_t b = 0; b < batch && pages; b++) used += (c.lengths[b] + c.page_size - 1) / c.page_size;
        page_of.assign(pages ? batch * most_pages : 0, INT32_MIN);
        for (int64_t b = batch - 1, next = 0; b >= 0 && pages; b--)
            for (int64_t p = 0; p < (c.lengths[b] + c.page_size - 1) / c.page_size; p++)
                page_of[b * most_pages + p] = next++;
        const int64_t longest = batch ? c.lengths[0] : 0;
        const bool latent = c.layout == LATENT;
        const auto of_k = key_strides(c.width, longest), of_v = latent ? of_k : key_strides(c.value_width, longest);
        const auto of_q = row_strides(c.heads, c.width), of_out = row_strides(c.heads, c.value_width);
        Tensor k(c.kv_kind, of_k, last_key(of_k, c.width), c.offset);
        Tensor separate(c.kv_kind, of_v, latent ? -1 : last_key(of_v, c.value_width), c.offset);
        Tensor &v = latent ? k : separate;
        Tensor q(c.kind, of_q, last_row(of_q, c.width), c.offset),
            out(c.kind, of_out, last_row(of_out, c.value_width), c.offset);
        for (int64_t b = 0; b < batch; b++) {
            for (int64_t key = 0; key < c.lengths[b]; key++)
                for (int64_t h = 0; h < c.kv_heads; h++) {
                    for (int64_t d = 0; d < c.width; d++) k.draw(key_place(k, b, key, h) + d * c.step, random);
                    for (int64_t d = 0; d < c.value_width && !latent; d++)
                        v.draw(key_place(v, b, key, h) + d * c.step, random);
                }
            for (int64_t t = 0; t < c.queries[b]; t++)
                for (int64_t h = 0; h < c.heads; h++)
                    for (int64_t d = 0; d < c.width; d++) q.draw(query_place(q, b, t, h) + d * c.step, random);
        }
        Memory<int32_t> table(page_of.size()), lengths(batch), starts_q(batch + 1), starts_k(batch + 1);
        for (size_t i = 0; i < page_of.size(); i++) table[i] = page_of[i];
        for (int64_t b = 0; b <= batch; b++) {
            if (b < batch) lengths[b] = static_cast<int32_t>(c.lengths[b]);
            starts_q[b] = static_cast<int32_t>(first_query[b]), starts_k[b] = static_cast<int32_t>(first_key[b]);
        }
        Memory<float> sinks(c.heads), k_scale(c.kv_heads), v_scale(c.kv_heads);
        for (int64_t h = 0; h < c.heads; h++) sinks[h] = 0.5f * h - 1.0f;
        for (int64_t h = 0; h < c.kv_heads; h++) k_scale[h] = 0.5f + h, v_scale[h] = latent ? 0.5f : 2.0f - 0.25f * h;
        int64_t last_lse = -1;
        for (int64_t b = 0; b < batch; b++)
            if (c.queries[b]) last_lse = std::max(last_lse, lse_place(b, c.queries[b] - 1, c.heads - 1));
        Memory<float> lse(last_lse + 1, c.offset);
        const double numbers[2] = {1.0 / std::sqrt(static_cast<double>(c.width)) / 2.0, c.softcap};
        fill_sizes(used, of_q, of_out, of_k, of_v);
        const int64_t of_list = std::max<int64_t>(c.listed, 0), row = of_list * c.step + c.offset;
        Memory<int32_t> listed(tokens ? (tokens - 1) * row + std::max<int64_t>(0, (of_list - 1) * c.step + 1) : 0, c.offset);
        list_positions(random);
        for (int64_t i = 0; i < static_cast<int64_t>(lists.size()); i++)
            listed[i / of_list * row + i % of_list * c.step] = lists[i];
        sizes[40] = c.listed, sizes[41] = row, sizes[42] = c.step;
        Memory<int64_t> exact(44);
        memcpy(exact.data, sizes, sizeof sizes);
        function(q.address(), k.address(), v.address(), pages ? table.data : nullptr, pages ? lengths.data : nullptr,
                 ragged ? starts_q.data : nullptr, c.layout == RAGGED ? starts_k.data : nullptr,
                 c.listed < 0 ? nullptr : listed.data, c.sinks ? sinks.data : nullptr, c.scales ? k_scale.data : nullptr,
                 c.scales ? v_scale.data : nullptr, out.address(), c.lse ? lse.data : nullptr, numbers, exact.data, threads);
        report.add(out.memory.data, out.memory.count);
        report.add(lse.data, lse.count * 4);
        if (!report.compared) return;
        std::vector<bool> used_of_out(out.memory.count / bytes_of(c.kind));
        for (int64_t b = 0; b < batch; b++)
            for (int64_t t = 0; t < c.queries[b]; t++)
                for (int64_t h = 0; h < c.heads; h++) {
                    for (int64_t d = 0; d < c.value_width; d++) used_of_out[query_place(out, b, t, h) + d * c.step] = true;
                    const int64_t g = h / (c.heads / c.kv_heads);
                    check(q, k, v, out, b, t, h, numbers[0] * (c.scales ? k_scale[g] : 1.0), c.scales ? v_scale[g] : 1.0,
                          c.sinks ? sinks[h] : -INFINITY, c.lse ? &lse[lse_place(b, t, h)] : nullptr, report);
                }
        for (size_t i = 0; i < used_of_out.size(); i++)
            if (!used_of_out[i]) report.require(std::isnan(out.at(i)), "wrote between its results");
    }

    // Positions in any order, each once, among what is of no key.
    void list_positions(Random &random) {
        for (int64_t b = 0; b < batch && c.listed >= 0; b++)
            for (int64_t t = 0; t < c.queries[b]; t++) {
                std::vector<int32_t> all(c.listed, -1);
                for (int64_t i = 0; i < c.listed; i++)
                    if (i < c.lengths[b] + 2) all[i] = static_cast<int32_t>(i);
                if (c.listed > 2) all[c.listed - 1] = INT32_MIN;
                for (int64_t i = c.listed - 1; i > 0; i--) std::swap(all[i], all[random.below(i + 1)]);
                lists.insert(lists.end(), all.begin(), all.end());
            }
    }

    bool is_listed(int64_t b, int64_t t, int64_t key) const {
        const auto from = lists.begin() + (first_query[b] + t) * std::max<int64_t>(c.listed, 0);
        return c.listed < 0 || std::find(from, from + c.listed, static_cast<int32_t>(key)) != from + c.listed;
    }

    int64_t last_row(const std::vector<int64_t> &strides, int64_t width) const {
        if (!tokens) return -1;
        const int64_t sequence = ragged ? 0 : (batch - 1) * strides[0], token = ragged ? tokens - 1 : c.queries[0] - 1;
        return sequence + token * strides[1] + (c.heads - 1) * strides[2] + (width - 1) * c.step;
    }
    int64_t last_key(const std::vector<int64_t> &strides, int64_t width) const {
        Tensor places(FLOAT32, strides, -1, 0);
        int64_t last = -1;
        for (int64_t b = 0; b < batch; b++)
            for (int64_t key = 0; key < c.lengths[b]; key++)
                last = std::max(last, key_place(places, b, key, c.kv_heads - 1) + (width - 1) * c.step);
        return last;
    }
    void fill_sizes(int64_t used, const std::vector<int64_t> &of_q, const std::vector<int64_t> &of_out,
                    const std::vector<int64_t> &of_k, const std::vector<int64_t> &of_v) {
        const int64_t first[19] = {batch,
                                   ragged ? 0 : c.queries[0],
                                   tokens,
                                   pages || ragged ? 0 : c.lengths[0],
                                   pages ? 0 : keys,
                                   c.heads,
                                   c.kv_heads,
                                   c.width,
                                   c.value_width,
                                   c.page_size,
                                   used,
                                   most_pages,
                                   most_pages,
                                   c.left,
                                   c.right,
                                   c.kind,
                                   c.kv_kind,
                                   1,
                                   1};
        memcpy(sizes, first, sizeof first);
        for (int i = 0; i < 4; i++) sizes[19 + i] = of_q[i], sizes[23 + i] = of_out[i];
        sizes[27] = ragged ? 0 : c.heads * (c.queries[0] + 1), sizes[28] = 1,
        sizes[29] = ragged ? tokens + 1 : c.queries[0] + 1;
        for (int i = 0; i < 5; i++)
            sizes[30 + i] = of_k[i] * bytes_of(c.kv_kind), sizes[35 + i] = of_v[i] * bytes_of(c.kv_kind);
    }

    void check(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out, int64_t b, int64_t t, int64_t h,
               double scale, double v_scale, double sink, const float *lse, Report &report) const {
        const int64_t length = c.lengths[b], position = length - c.queries[b] + t, g = h / (c.heads / c.kv_heads);
        std::vector<double> scores(length, -INFINITY);
        double most = -INFINITY, sum = 0.0;
        for (int64_t key = 0; key < length; key++) {
            if ((c.right >= 0 && key > position + c.right) || (c.left >= 0 && key < position - c.left) ||
                !is_listed(b, t, key))
                continue;
            double score = 0.0;
            for (int64_t d = 0; d < c.width; d++)
                score += q.at(query_place(q, b, t, h) + d * c.step) * k.at(key_place(k, b, key, g) + d * c.step);
            scores[key] = score * scale;
            if (c.softcap > 0.0) scores[key] = c.softcap * std::tanh(scores[key] / c.softcap);
            most = std::max(most, scores[key]);
        }
        const bool none = most == -INFINITY;
        most = std::max(most, sink);
        for (double &score : scores) sum += score = score == -INFINITY ? 0.0 : std::exp(score - most);
        if (sink != -INFINITY) sum += std::exp(sink - most);
        if (lse)
            report.compare(*lse, none && sink == -INFINITY ? -INFINITY : most + std::log(sum),
                           2e-5 * (1.0 + std::fabs(most)));
        for (int64_t d = 0; d < c.value_width; d++) {
            double want = 0.0, size = 0.0;
            for (int64_t key = 0; key < length && !none; key++) {
                const double part = scores[key] > 0.0 ? scores[key] / sum * v.at(key_place(v, b, key, g) + d * c.step) : 0.0;
                want += part, size += std::fabs(part);
            }
            want *= v_scale;
            const double got = out.at(query_place(out, b, t, h) + d * c.step);
            report.compare(got, want, rounding(c.kind) * std::fabs(want) + (2e-5 + of_weights * size) * v_scale);
        }
    }
};
