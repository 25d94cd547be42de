// Cases of kernelhub_route beside scores in double.
#pragma once

#include <algorithm>

#include "operands.h"

using Route = void (*)(const void *, const float *, float *, int32_t *, const int64_t *, int64_t, float, int64_t);

enum Scoring : int64_t { SOFTMAX, SIGMOID, SOFTMAX_AFTER_TOPK };  // as in csrc/cpu/routing.cpp

struct RouteCase {
    const char *name;
    int64_t tokens, experts, top_k, groups, topk_groups, kind;
    Scoring scoring;
    bool renormalize, bias;
    bool special = false;          // NaN, infinities and many equal logits
    int64_t step = 1, offset = 0;  // between elements; of addresses, in elements
};

inline std::vector<RouteCase> route_cases() {
    return {
        {"routing, 8 of 256 in groups, biased", 150, 256, 8, 8, 4, FLOAT32, SIGMOID, true, true},
        {"routing, 5 of 33, NaN and infinities", 9, 33, 5, 1, 1, FLOAT32, SOFTMAX, true, false, true, 1, 1},
        {"routing, all 9 in groups of 3", 7, 9, 9, 3, 3, FLOAT16, SOFTMAX_AFTER_TOPK, false, false, true, 3, 1},
        {"routing, 3 of 60 in groups, biased softmax", 5, 60, 3, 3, 1, BFLOAT16, SOFTMAX, false, true, false, 2, 3},
        {"routing, 6 of 20 in groups of 1", 4, 20, 6, 20, 11, BFLOAT16, SIGMOID, false, true, false, 1, 1},
        {"routing, one expert", 2, 1, 1, 1, 1, FLOAT32, SOFTMAX, false, false, false, 1, 1},
    };
}

struct RouteRun {
    const RouteCase &c;
    int64_t row, chosen_row;

    explicit RouteRun(const RouteCase &given)
        : c(given), row(given.experts * given.step + given.offset), chosen_row(given.top_k * given.step + given.offset) {}

    void run(Route function, int64_t threads, Random random, Report &report) const {
        Tensor logits(c.kind, {row, c.step}, (c.tokens - 1) * row + (c.experts - 1) * c.step, c.offset);
        for (int64_t t = 0; t < c.tokens; t++)
            for (int64_t e = 0; e < c.experts; e++) draw(logits, logits.place(t, e), random);
        Memory<float> bias((c.experts - 1) * c.step + 1, c.offset);
        for (int64_t e = 0; e < c.experts; e++) bias[e * c.step] = random.below(1 << 20) * 0x1p-21f;
        const int64_t last = (c.tokens - 1) * chosen_row + (c.top_k - 1) * c.step;
        Memory<float> weights(last + 1, c.offset);
        Memory<int32_t> ids(last + 1, c.offset);
        Memory<int64_t> sizes(14);
        const int64_t all[14] = {c.experts, c.top_k, c.groups, c.topk_groups, c.scoring,  c.renormalize, c.kind,
                                 row,       c.step,  c.step,   chosen_row,    c.step,     chosen_row,    c.step};
        memcpy(sizes.data, all, sizeof all);
        function(logits.address(), c.bias ? bias.data : nullptr, weights.data, ids.data, sizes.data, c.tokens, 1.5f, threads);
        report.add(weights.data, weights.count * 4), report.add(ids.data, ids.count * 4);
        for (int64_t t = 0; t < c.tokens && report.compared; t++)
            check(logits, bias, t, weights.data + t * chosen_row, ids.data + t * chosen_row, report);
        for (int64_t i = 0; i < ids.count; i++)
            if (i % chosen_row >= c.top_k * c.step || i % chosen_row % c.step)
                report.require(ids[i] == -1 && std::isnan(weights[i]), "wrote between elements");
    }

   private:
    void draw(Tensor &logits, int64_t place, Random &random) const {
        static const float values[8] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1.0f, 1.0f, -2.0f};
        static const uint16_t halves[8] = {0x7e00, 0x7c00, 0xfc00, 0, 0x8000, 0x3c00, 0x3c00, 0xc000};
        const int64_t which = random.below(8);
        const void *none = c.kind == FLOAT32 ? static_cast<const void *>(&values[0]) : &halves[0];
        if (c.special && place < row) memcpy(logits.memory.data + place * bytes_of(c.kind), none, bytes_of(c.kind));
        else if (!c.special || random.below(3) == 0) logits.draw(place, random);
        else if (c.kind == FLOAT32) memcpy(logits.memory.data + place * 4, &values[which], 4);
        else memcpy(logits.memory.data + place * 2, &halves[which], 2);  // of float16
    }

    void check(const Tensor &logits, const Memory<float> &bias, int64_t t, const float *weights, const int32_t *ids,
               Report &report) const {
        std::vector<double> numbers(c.experts), scores, ranked;
        for (int64_t e = 0; e < c.experts; e++) {
            const double number = logits.at(logits.place(t, e));
            numbers[e] = std::isnan(number) ? -INFINITY : std::min(number, 0x1.fffffep127);
        }
        scores = c.scoring == SOFTMAX ? softmax(numbers) : numbers;
        if (c.scoring == SIGMOID)
            for (double &score : scores) score = 1.0 / (1.0 + std::exp(-score));
        ranked = c.bias ? scores : numbers;
        for (int64_t e = 0; e < c.experts && c.bias; e++) ranked[e] += bias[e * c.step];
        const int64_t size = c.experts / c.groups;
        std::vector<double> best(c.groups);
        for (int64_t g = 0; g < c.groups; g++) {
            std::vector<double> group(ranked.begin() + g * size, ranked.begin() + (g + 1) * size);
            std::sort(group.rbegin(), group.rend());
            best[g] = group[0] + (c.bias && size > 1 ? group[1] : 0.0);
        }
        std::vector<int64_t> groups = first(best, c.topk_groups), experts;
        std::sort(groups.begin(), groups.end());
        std::vector<double> of_groups;
        for (int64_t g : groups)
            for (int64_t e = g * size; e < (g + 1) * size; e++) experts.push_back(e), of_groups.push_back(ranked[e]);
        std::vector<double> want;
        const bool over_chosen = c.scoring == SOFTMAX_AFTER_TOPK || (c.scoring == SOFTMAX && c.renormalize);
        const std::vector<int64_t> chosen = first(of_groups, c.top_k);
        for (int64_t i = 0; i < c.top_k; i++) {
            const int64_t expert = experts[chosen[i]];
            report.require(ids[i * c.step] == expert, "chose another expert");
            want.push_back((over_chosen ? numbers : scores)[expert]);
        }
        if (over_chosen) want = softmax(want);
        double sum = 1.0;
        if (!over_chosen && c.renormalize) {
            sum = 0.0;
            for (double weight : want) sum += weight;
        }
        for (int64_t i = 0; i < c.top_k; i++)
            report.compare(weights[i * c.step], want[i] / sum * 1.5, 0x1p-15 * want[i] / sum + 0x1p-124);
    }

    static std::vector<double> softmax(std::vector<double> values) {
        const double most = *std::max_element(values.begin(), values.end());
        double sum = 0.0;
        for (double &value : values) sum += value = most == -INFINITY ? 0.0 : std::exp(value - most);
        for (double &value : values) value /= sum == 0.0 ? 1.0 : sum;
        return values;
    }

    // Places of the largest, of equals the first.
    static std::vector<int64_t> first(const std::vector<double> &values, int64_t count) {
        std::vector<int64_t> places(values.size());
        for (size_t i = 0; i < places.size(); i++) places[i] = static_cast<int64_t>(i);
        std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
        places.resize(count);
        return places;
    }
};
