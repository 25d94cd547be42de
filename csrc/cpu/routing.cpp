// Routing of tokens to experts on a CPU: what experts are ranked by, then the largest of it, one after another.
//
//   key = (what an expert is ranked by, as an integer of the same order) << 32 | (the more, the lower its id)
//   of each block of 32 experts: the largest key
//   top_k times: the largest of these is the next expert; take it out and search its block again
//
// Groups are ranked in the same way, and the keys of groups that are not chosen become the lowest integer. One thread does
// all of a token, in steps that no other token changes, so batch and threads do not change a bit of the result.

#include <cfloat>

#include "numbers.h"
#include "threads.h"
#include "vectors.h"

namespace {

enum Scoring : int64_t { SOFTMAX, SIGMOID, SOFTMAX_AFTER_TOPK };

constexpr int64_t LOWEST = INT64_MIN;  // below the key of -inf
constexpr int64_t BLOCK = 32;
constexpr int64_t TASK = 16384;  // experts of the tokens that a thread takes at a time: 10 to 80 us

typedef int32_t Integers __attribute__((vector_size(4 * WIDE)));

inline int64_t up_to_vectors(int64_t count) { return (count + WIDE - 1) / WIDE * WIDE; }
inline int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }
inline Vector smaller(Vector x, Vector y) { return x < y ? x : y; }
inline Vector number_or_lowest(Vector x) { return x == x ? x : spread(-INFINITY); }

// Integers in the order of float32 values without NaN.
inline Integers ordered(Vector values) {
    const Vector zeros_alike = values + 0.0f;  // -0 becomes 0
    Integers bits;
    memcpy(&bits, &zeros_alike, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Values of which the largest are taken one after another, of equals the first.
struct Ranking {
    int64_t *keys, *largest;  // keys of whole blocks, the largest of each block
    int64_t count;

    static int64_t words(int64_t count) { return blocks_of(count) * (BLOCK + 1); }
    Ranking(int64_t *memory, int64_t values) : keys(memory), largest(memory + blocks_of(values) * BLOCK), count(values) {}

    void set(int64_t from, int64_t to, const int32_t *order) {
        for (int64_t i = from; i < to; i++)
            keys[i] = static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(order[i])) << 32) | (count - 1 - i);
    }
    void leave_out(int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) keys[i] = LOWEST;
    }
    void start() {
        leave_out(count, blocks_of(count) * BLOCK);
        for (int64_t block = 0; block < blocks_of(count); block++) search(block);
    }
    int64_t take() {
        int64_t most = largest[0];
        for (int64_t block = 1; block < blocks_of(count); block++) most = largest[block] > most ? largest[block] : most;
        const int64_t place = count - 1 - (most & 0xffffffff);
        keys[place] = LOWEST;
        search(place / BLOCK);
        return place;
    }

  private:
    void search(int64_t block) {
        const int64_t *from = keys + block * BLOCK;
        int64_t most = LOWEST;
        for (int64_t i = 0; i < BLOCK; i++) most = from[i] > most ? from[i] : most;
        largest[block] = most;
    }
};

// Softmax of so many values, a multiple of WIDE, of which those beyond the last are -inf; zeros if all are.
void softmax(const float *values, int64_t held, float *into) {
    alignas(64) float lanes[WIDE];
    Vector most = load(values);
    for (int64_t i = WIDE; i < held; i += WIDE) most = larger(most, load(values + i));
    put(lanes, most);
    float top = lanes[0], sum = 0.0f;
    for (float lane : lanes) top = lane > top ? lane : top;
    const Vector base = spread(top == -INFINITY ? 0.0f : top);
    Vector total = Vector{};
    for (int64_t i = 0; i < held; i += WIDE) {
        const Vector part = exponential(load(values + i) - base);
        put(into + i, part);
        total += part;
    }
    put(lanes, total);
    for (float lane : lanes) sum += lane;
    const Vector divisor = spread(sum == 0.0f ? 1.0f : sum);
    for (int64_t i = 0; i < held; i += WIDE) put(into + i, load(into + i) / divisor);
}

void sigmoid(const float *values, int64_t held, float *into) {
    for (int64_t i = 0; i < held; i += WIDE) {
        const Vector x = load(values + i);
        const Vector part = exponential(as_vector(as_bits(x) | 0x80000000u));  // of -|x|
        put(into + i, (x < 0.0f ? part : spread(1.0f)) / (1.0f + part));
    }
}

struct Routing {
    const void *logits;
    const float *bias;  // or null
    float *weights;
    int32_t *ids;
    float factor;
    int64_t tokens, experts, top_k, groups, topk_groups, scoring, renormalize, kind;
    int64_t logit_row, logit_step, bias_step, weight_row, weight_step, id_row, id_step;

    bool over_chosen() const { return scoring == SOFTMAX_AFTER_TOPK || (scoring == SOFTMAX && renormalize); }

    void run(int threads) const {
        const int64_t each = experts < TASK ? TASK / experts : 1;
        parallel_for((tokens + each - 1) / each, threads, [&](int64_t task) {
            const int64_t end = (task + 1) * each < tokens ? (task + 1) * each : tokens;
            with(kind, [&](auto of) { some<decltype(of)>(task * each, end); });
        });
    }

  private:
    struct Memory {  // of a thread
        float *numbers, *scores, *ranked, *bias, *found, *shares;
        int32_t *order;
        int64_t *of_experts, *of_groups;
    };

    template <class Of>
    void some(int64_t from, int64_t to) const {
        thread_local Buffer buffer;
        const int64_t width = up_to_vectors(experts), chosen = up_to_vectors(top_k);
        const int64_t floats = (5 * width + 2 * chosen + 15) / 16 * 16;
        float *at = buffer.take<float>(floats + 2 * (Ranking::words(experts) + Ranking::words(groups)));
        Memory m{};
        m.numbers = at, m.scores = at + width, m.ranked = at + 2 * width, m.bias = at + 3 * width;
        m.order = reinterpret_cast<int32_t *>(at + 4 * width);
        m.found = at + 5 * width, m.shares = m.found + chosen;
        m.of_experts = reinterpret_cast<int64_t *>(at + floats), m.of_groups = m.of_experts + Ranking::words(experts);
        for (int64_t i = 0; bias && i < experts; i++) m.bias[i] = bias[i * bias_step];
        for (int64_t i = experts; i < width; i++) m.bias[i] = 0.0f;
        for (int64_t token = from; token < to; token++) {
            read(static_cast<const typename Of::Held *>(logits) + token * logit_row, Of(), m.numbers);
            route(token, m);
        }
    }

    // Logits of a token without NaN and +inf; -inf beyond the last.
    template <class Of>
    void read(const typename Of::Held *row, Of, float *numbers) const {
        if (logit_step == 1) {
            for (int64_t i = 0; i < experts; i++) numbers[i] = Of::value(row[i]);
        } else {
            for (int64_t i = 0; i < experts; i++) numbers[i] = Of::value(row[i * logit_step]);
        }
        for (int64_t i = experts; i < up_to_vectors(experts); i++) numbers[i] = -INFINITY;
        for (int64_t i = 0; i < experts; i += WIDE)
            put(numbers + i, smaller(number_or_lowest(load(numbers + i)), spread(FLT_MAX)));
    }

    void route(int64_t token, const Memory &m) const {
        const int64_t width = up_to_vectors(experts);
        const float *scores = m.numbers, *ranked = m.numbers;
        if (scoring == SOFTMAX && (bias || !renormalize)) softmax(m.numbers, width, m.scores), scores = m.scores;
        if (scoring == SIGMOID) sigmoid(m.numbers, width, m.scores), scores = m.scores;
        if (bias) {
            for (int64_t i = 0; i < width; i += WIDE)
                put(m.ranked + i, number_or_lowest(load(scores + i) + load(m.bias + i)));
            ranked = m.ranked;
        }
        Ranking ranking(m.of_experts, experts);
        order(ranked, experts, m.order);
        ranking.set(0, experts, m.order);
        if (groups > 1) leave_out_groups(ranked, m, ranking);
        ranking.start();
        int32_t *id = ids + token * id_row;
        float *weight = weights + token * weight_row;
        const float *values = over_chosen() ? m.numbers : scores;
        float sum = 0.0f;
        for (int64_t i = 0; i < top_k; i++) {
            const int64_t expert = ranking.take();
            id[i * id_step] = static_cast<int32_t>(expert);
            m.found[i] = values[expert];
            sum += m.found[i];
        }
        if (over_chosen()) {
            for (int64_t i = top_k; i < up_to_vectors(top_k); i++) m.found[i] = -INFINITY;
            softmax(m.found, up_to_vectors(top_k), m.shares);
            for (int64_t i = 0; i < top_k; i++) weight[i * weight_step] = m.shares[i] * factor;
        } else {
            const float divisor = renormalize ? sum + 1e-20f : 1.0f;
            for (int64_t i = 0; i < top_k; i++) weight[i * weight_step] = m.found[i] / divisor * factor;
        }
    }

    static void order(const float *values, int64_t count, int32_t *into) {
        for (int64_t i = 0; i < count; i += WIDE) {
            const Integers some = ordered(load(values + i));
            memcpy(into + i, &some, sizeof some);
        }
    }

    void leave_out_groups(const float *ranked, const Memory &m, Ranking &ranking) const {
        const int64_t size = experts / groups;
        int32_t *orders = m.order;  // those of experts were read
        alignas(64) float best[WIDE] = {};
        for (int64_t first = 0; first < groups; first += WIDE) {
            const int64_t count = groups - first < WIDE ? groups - first : WIDE;
            for (int64_t i = 0; i < count; i++) best[i] = best_of(ranked + (first + i) * size, size);
            order(best, count, orders + first);
        }
        Ranking of_groups(m.of_groups, groups);
        of_groups.set(0, groups, orders);
        of_groups.start();
        for (int64_t i = 0; i < topk_groups; i++) of_groups.take();
        for (int64_t group = 0; group < groups; group++)
            if (of_groups.keys[group] != LOWEST) ranking.leave_out(group * size, (group + 1) * size);
    }

    // The largest of a group, with a bias plus the next one.
    float best_of(const float *values, int64_t size) const {
        alignas(64) float lanes[2 * WIDE];
        float first = -INFINITY, second = -INFINITY;
        const auto add = [&](float value) {
            const float less = value < first ? value : first;
            second = less > second ? less : second;
            first = value > first ? value : first;
        };
        const int64_t whole = size / WIDE * WIDE;
        if (whole) {
            Vector largest = spread(-INFINITY), next = largest;
            for (int64_t i = 0; i < whole; i += WIDE) {
                const Vector value = load(values + i);
                next = larger(next, smaller(largest, value));
                largest = larger(largest, value);
            }
            put(lanes, largest), put(lanes + WIDE, next);
            for (float lane : lanes) add(lane);
        }
        for (int64_t i = whole; i < size; i++) add(values[i]);
        if (!bias || size == 1) return first;
        const float both = first + second;
        return both == both ? both : -INFINITY;
    }
};

}  // namespace

extern "C" {

// logits [tokens, experts] -> weights and ids [tokens, top_k]. sizes: 0 experts, 1 top_k, 2 groups, 3 groups of a token, 4
// scoring, 5 whether weights are divided by their sum, 6 kind of logits; strides: 7 logits (row, element), 9 bias, 10
// weights (row, element), 12 ids
void kernelhub_route(const void *logits, const float *bias, float *weights, int32_t *ids, const int64_t *s, int64_t tokens,
                     float factor, int64_t threads) {
    const Routing routing{logits, bias, weights, ids,  factor, tokens, s[0],  s[1],  s[2],  s[3],
                          s[4],   s[5], s[6],    s[7], s[8],   s[9],   s[10], s[11], s[12], s[13]};
    routing.run(static_cast<int>(threads));
}
}
