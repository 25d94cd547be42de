// Attention of few queries over dense or paged keys on a CPU, in float32, each key and value read once. With AVX-512 BF16
// q in bfloat16 is multiplied as it is: products are exact then, too, and added in float32.
//
//   for each sequence, block of queries, some KV heads and piece of keys, all at once:
//     for each chunk of 32 keys, of float32 16, KV head, tile of 1, 2 or 4 rows (row = a query token and a head of the
//     group):
//         scores = rows . keys                        sums over lanes of several (row, key) at once
//         largest, weights, sum, as softmax needs them so far
//         results = results * rescaling + weights . values
//   merge the pieces of a row, add the sink, divide
//
// The heads of a token lie side by side in most caches: several are taken together, so that memory is read in its order,
// and the next chunk is asked for while this one is multiplied. One at a time, 8 x 2048 keys took twice the time.
// Of keys that are listed for each query, a row's list is what is divided into pieces and chunks.
// A piece has PIECE keys, whatever the batch and the number of threads are, so neither changes a bit of the result. Keys
// and values stay as they are in memory until they are in registers. bfloat16 is widened by halves of 32-bit words: even
// elements by a shift, odd ones by a mask; rows of q and of the results are held in that order. Rows of other strides or
// widths are first copied to rows that end in zeros. Formats that take long to widen are widened once for all tiles of a
// task that has 16 rows or more. On an EPYC of Zen 3 prefill in float16 takes 0.8 of the time without. With tasks of 64 rows
// and sums of whole chunks as well, latent attention of an e4m3 cache takes 0.7 of it with 16 heads and 0.6 with 128.

#include <algorithm>

#include "attention_amx.h"
#include "attention_call.h"
#include "attention_dots.h"
#include "attention_tiles.h"
#include "numbers.h"
#include "threads.h"
#include "vectors.h"

namespace {

inline int64_t padded(int64_t width) { return (width + 2 * WIDE - 1) / (2 * WIDE) * (2 * WIDE); }

// Rows of keys or values as vectors take them: in place, or copied.
template <class Of>
struct Source {
    Keys where;
    int64_t width;
    char *copies;  // null: in place

    Source(const Keys &keys, int64_t columns, Cursor &cursor) : where(keys), width(columns), copies(nullptr) {
        const bool in_place = keys.element == Of::BYTES && columns == padded(columns);
        if (!in_place) {
            copies = cursor.take<char>(CHUNK * padded(columns) * Of::BYTES);
            memset(copies, 0, CHUNK * padded(columns) * Of::BYTES);
        }
    }

    static int64_t bytes(const Keys &keys, int64_t columns) {
        return keys.element == Of::BYTES && columns == padded(columns) ? 0 : CHUNK * padded(columns) * Of::BYTES + 64;
    }

    const char *row(const char *given, int64_t place) const {
        if (!copies) return given;
        char *into = copies + place * padded(width) * Of::BYTES;
        if (where.element == Of::BYTES) {
            memcpy(into, given, width * Of::BYTES);
        } else {
            for (int64_t d = 0; d < width; d++) memcpy(into + d * Of::BYTES, given + d * where.element, Of::BYTES);
        }
        return into;
    }
};

// The keys and values of a chunk in float32, where tiles of many rows read them: codes are decoded once for all tiles.
template <class Of>
struct Widened {
    float *k, *v;  // null: tiles decode them
    int64_t k_width, v_width;

    static bool pays(int64_t rows) { return Of::SLOW && rows >= 16; }
    Widened(int64_t rows, int64_t of_k, int64_t of_v, Cursor &cursor)
        : k(nullptr), v(nullptr), k_width(of_k), v_width(of_v) {
        if (pays(rows)) k = cursor.take<float>(CHUNK * of_k), v = cursor.take<float>(CHUNK * of_v);
    }
    static int64_t bytes(int64_t rows, int64_t of_k, int64_t of_v) {
        return pays(rows) ? CHUNK * (of_k + of_v) * static_cast<int64_t>(sizeof(float)) + 128 : 0;
    }

    // Rows become those of float32.
    void decode(const char **k_rows, const char **v_rows, int64_t count) const {
        for (int64_t j = 0; j < count; j++) {
            k_rows[j] = row(k_rows[j], k + j * k_width, k_width);
            v_rows[j] = row(v_rows[j], v + j * v_width, v_width);
        }
    }
    static const char *row(const char *from, float *into, int64_t width) {
        for (int64_t d = 0; d < width; d += 2 * WIDE) {
            Vector low, high;
            Of::widen(from + d * Of::BYTES, low, high);
            put(into + d, low), put(into + d + WIDE, high);
        }
        return reinterpret_cast<const char *>(into);
    }
};

// The rows of a task: queries, and what softmax knows of them.
struct State {
    float *q;
    uint16_t *pairs;  // q in bfloat16; null: q in float32, times `factor`
    float *o, *largest, *sum;
    int64_t *low, *high;
    int64_t q_width, o_width;
    float factor;
};

// Of so many lines what is asked for at each of some steps.
inline int64_t share(int64_t lines, int64_t steps) { return (lines + steps - 1) / steps; }

// Lines are asked for between products, but where sums, keys and rows take all 16 registers of AVX2: there many at a time,
// before some products. A Zen 4 takes 1.1 to 1.3 times as long if they are asked for between them, and 1.2 times if many are
// at a time where there is one row to a head.
template <int TALL>
constexpr bool many_asked() {
    return WIDE < 16 && TALL > 1;
}

// scores[key][row] of TALL rows of q and the keys of a chunk, times nothing: q was scaled before.
template <class Of, int TALL>
__attribute__((noinline)) void score(const float *q, int64_t q_width, const char *const *keys, int64_t count, float *scores,
                                     Ahead &ahead) {
    constexpr int KEYS = SUMS / TALL;
    const int64_t steps = many_asked<TALL>() ? 1 : q_width / (2 * WIDE), lines = share(ahead.each * KEYS, steps);
    for (int64_t j = 0; j < count; j += KEYS) {
        const char *row[KEYS];
        for (int i = 0; i < KEYS; i++) row[i] = keys[std::min<int64_t>(j + i, count - 1)];
        if (many_asked<TALL>()) ahead.ask(lines);
        Vector sum[SUMS];
        for (int i = 0; i < SUMS; i++) sum[i] = Vector{};
        for (int64_t d = 0; d < q_width; d += 2 * WIDE) {
            if (!many_asked<TALL>()) ahead.ask(lines);
            Vector low[KEYS], high[KEYS];
            for (int i = 0; i < KEYS; i++) Of::widen(row[i] + d * Of::BYTES, low[i], high[i]);
            for (int r = 0; r < TALL; r++) {
                const Vector left = load_once(q + r * q_width + d), right = load_once(q + r * q_width + d + WIDE);
                for (int i = 0; i < KEYS; i++) sum[i * TALL + r] += left * low[i];
                for (int i = 0; i < KEYS; i++) sum[i * TALL + r] += right * high[i];
            }
        }
        add_lanes(sum, scores + j * TALL);
    }
}

// Whether keys are multiplied by rows of q as pairs of bfloat16, which AVX-512 BF16 adds in float32: q in bfloat16, by keys
// that are bfloat16 or become that exactly. 8 x 2048 keys take a Zen 4 0.87 of the time in float32, of e4m3 0.8.
template <class Of>
constexpr bool pairs() {
#if defined(KERNELHUB_ATTENTION_TILES)
    return Bfloat16s<Of>::EXACT;
#else
    return false;
#endif
}

#if defined(KERNELHUB_ATTENTION_TILES)
// The same of q as it is: scores are multiplied by `factor`. Of more than four keys at once each is a stream of its own.
template <class Of, int TALL>
__attribute__((noinline)) void score_pairs(const uint16_t *q, int64_t q_width, float factor, const char *const *keys,
                                           int64_t count, float *scores, Ahead &ahead) {
    constexpr int KEYS = SUMS / TALL, FOUR = std::min(KEYS, 4);
    const int64_t lines = share(ahead.each * KEYS, KEYS / FOUR * (q_width / 32));
    for (int64_t j = 0; j < count; j += KEYS) {
        __m512 sum[SUMS];
        for (int i = 0; i < SUMS; i++) sum[i] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int from = 0; from < KEYS; from += FOUR) {
            const char *row[FOUR];
            for (int i = 0; i < FOUR; i++) row[i] = keys[std::min<int64_t>(j + from + i, count - 1)];
            for (int64_t d = 0; d < q_width; d += 32) {
                ahead.ask(lines);
                __m512bh key[FOUR];
                for (int i = 0; i < FOUR; i++) key[i] = (__m512bh)Bfloat16s<Of>::load(row[i] + d * Of::BYTES);
                for (int r = 0; r < TALL; r++) {
                    const __m512bh of_row = (__m512bh)load_once(reinterpret_cast<const float *>(q + r * q_width + d));
                    for (int i = 0; i < FOUR; i++) {
                        __m512 &into = sum[(from + i) * TALL + r];
                        into = _mm512_dpbf16_ps(into, of_row, key[i]);
                    }
                }
            }
        }
        add_lanes(reinterpret_cast<const Vector *>(sum), scores + j * TALL);
    }
    for (int64_t i = 0; i < count * TALL; i += WIDE) put(scores + i, factor * load(scores + i));
}
#endif

// o[row] = o[row] * factor[row] + weights[key][row] . values, COLUMNS vectors of each row in registers at a time.
template <class Of, int TALL, int COLUMNS>
__attribute__((noinline)) void add_values(float *o, int64_t o_width, int64_t from, int64_t to, const char *const *values,
                                          int64_t count, const float *weights, const float *factor, Ahead &ahead) {
    const int64_t lines = share(ahead.each * (many_asked<TALL>() ? count : 1) * COLUMNS, o_width / WIDE);
    for (int64_t d = from; d + COLUMNS * WIDE <= to; d += COLUMNS * WIDE) {
        if (many_asked<TALL>()) ahead.ask(lines);
        Vector sum[TALL][COLUMNS];
        for (int r = 0; r < TALL; r++)
            for (int i = 0; i < COLUMNS; i++) {
                sum[r][i] = load(o + r * o_width + d + i * WIDE);
                if (factor) sum[r][i] *= factor[r];
            }
        for (int64_t j = 0; j < count; j++) {
            if (!many_asked<TALL>()) ahead.ask(lines);
            Vector value[COLUMNS];
            for (int i = 0; i < COLUMNS; i += 2) Of::widen(values[j] + (d + i * WIDE) * Of::BYTES, value[i], value[i + 1]);
            for (int r = 0; r < TALL; r++) {
                const Vector weight = spread(weights[j * TALL + r]);
                for (int i = 0; i < COLUMNS; i++) sum[r][i] += weight * value[i];
            }
        }
        for (int r = 0; r < TALL; r++)
            for (int i = 0; i < COLUMNS; i++) put(o + r * o_width + d + i * WIDE, sum[r][i]);
    }
}

template <class Of, int TALL, bool PAIRED>
__attribute__((noinline)) void tile(const Call &c, const State &state, int64_t row, int64_t first, int64_t count,
                                    const char *const *k, const char *const *v, Ahead &ahead) {
    const int64_t end = first + count;
    int64_t low = end, high = first;
    bool partly = false;
    for (int r = 0; r < TALL; r++) {
        low = std::min(low, state.low[row + r]), high = std::max(high, state.high[row + r]);
        partly |= state.low[row + r] > first || state.high[row + r] < end;
    }
    if (low >= end || high <= first) return;
    constexpr int64_t SPACE = CHUNK * TALL + SUMS;
    alignas(64) float weights[SPACE];
#if defined(KERNELHUB_ATTENTION_TILES)
    if constexpr (PAIRED) {
        const uint16_t *q = state.pairs + row * state.q_width;
        score_pairs<Of, TALL>(q, state.q_width, state.factor, k, count, weights, ahead);
    } else
#endif
        score<Of, TALL>(state.q + row * state.q_width, state.q_width, k, count, weights, ahead);
    const int64_t held = (count * TALL + WIDE - 1) / WIDE * WIDE;
    if (c.softcap > 0.0f)
        for (int64_t i = 0; i < held; i += WIDE)
            put(weights + i, c.softcap * hyperbolic_tangent(load(weights + i) / c.softcap));
    for (int64_t i = count * TALL; i < held; i++) weights[i] = -INFINITY;
    if (partly)
        for (int r = 0; r < TALL; r++)
            for (int64_t j = 0; j < count; j++)
                if (first + j < state.low[row + r] || first + j >= state.high[row + r]) weights[j * TALL + r] = -INFINITY;
    Vector most = load(weights);
    for (int64_t i = WIDE; i < held; i += WIDE) most = larger(most, load(weights + i));
    alignas(64) float lanes[WIDE], minus[WIDE];
    put(lanes, most);
    float factor[TALL];
    bool rescaled = false;
    for (int r = 0; r < TALL; r++) {
        float largest = state.largest[row + r];
        for (int lane = r; lane < WIDE; lane += TALL) largest = lanes[lane] > largest ? lanes[lane] : largest;
        const float base = largest == -INFINITY ? 0.0f : largest;
        factor[r] = exponential(state.largest[row + r] - base);
        rescaled |= factor[r] != 1.0f;
        state.largest[row + r] = largest;
        for (int lane = r; lane < WIDE; lane += TALL) minus[lane] = base;
    }
    const Vector base = load(minus);
    Vector total = Vector{};
    for (int64_t i = 0; i < held; i += WIDE) {
        const Vector weight = exponential(load(weights + i) - base);
        put(weights + i, weight);
        total += weight;
    }
    put(lanes, total);
    for (int r = 0; r < TALL; r++) {
        float sum = state.sum[row + r] * factor[r];
        for (int lane = r; lane < WIDE; lane += TALL) sum += lanes[lane];
        state.sum[row + r] = sum;
    }
    constexpr int MANY = std::max(2, std::min(BUSY / TALL, 8));
    float *o = state.o + row * state.o_width;
    const int64_t whole = state.o_width / (MANY * WIDE) * (MANY * WIDE);
    const float *scaled = rescaled ? factor : nullptr;
    add_values<Of, TALL, MANY>(o, state.o_width, 0, whole, v, count, weights, scaled, ahead);
    if (whole < state.o_width)
        add_values<Of, TALL, 2>(o, state.o_width, whole, state.o_width, v, count, weights, scaled, ahead);
}

// A result: its sum, largest score and sink make the divisor. `places` are those of columns, null: in order.
__attribute__((noinline)) void finish(const Call &c, int64_t b, int64_t token, int64_t head, const float *o, float largest,
                                      float sum, const int64_t *places) {
    const int64_t t = c.first_query(b) + token, batch = c.starts_q ? 0 : b;
    const float v_scale = c.v_scale ? c.v_scale[head / c.group() * c.v_scale_step] : 1.0f;
    float factor = sum == 0.0f ? 0.0f : v_scale / sum, lse = sum == 0.0f ? -INFINITY : largest + std::log(sum);
    if (c.sinks) {
        const float sink = c.sinks[head];
        const float top = lse > sink ? lse : sink;
        const float both = top == -INFINITY ? top : top + std::log(std::exp(lse - top) + std::exp(sink - top));
        if (sum != 0.0f) factor *= std::exp(lse - both);
        lse = both;
    }
    const int64_t place = c.of_out.at(batch, t, head);
    with(c.kind, [&](auto of) {
        typedef decltype(of) Of;
        auto *into = static_cast<typename Of::Held *>(c.out) + place;
        const int64_t step = c.of_out.element;
        if (sum == 0.0f)
            for (int64_t d = 0; d < c.value_width; d++) into[d * step] = Of::held(0.0f);
        else if (step == 1 && !places)
            for (int64_t d = 0; d < c.value_width; d++) into[d] = Of::held(o[d] * factor);
        else if (!places)
            for (int64_t d = 0; d < c.value_width; d++) into[d * step] = Of::held(o[d] * factor);
        else
            for (int64_t d = 0; d < c.value_width; d++) into[d * step] = Of::held(o[places[d]] * factor);
    });
    if (c.lse) c.lse[c.of_lse.at(batch, t, head)] = lse;
}

// Whether this CPU and this library have them.
inline bool has_products(int64_t products) {
#if defined(KERNELHUB_ATTENTION_AMX)
    if (products == BY_AMX) return has_amx();
#endif
#if defined(KERNELHUB_ATTENTION_DOTS)
    if (products == BY_DOTS) return true;
#endif
    return (void)products, false;
}

template <class Of>
struct Attention {
    const Call &c;
    int64_t group, q_width, o_width, together = 1;
    List<Task> tasks;
    List<int64_t> places;     // where an element of a row is, of q and of results
    int64_t partial = 0;      // rows of partial results
    int64_t most_lines = 0;   // of a task
    bool tiles_some = false;  // whether tasks of enough rows are multiplied as tiles
    int64_t kept_width;       // of a row of partial results

    Attention(const Call &call, int threads)
        : c(call), group(call.group()), q_width(padded(call.width)), o_width(padded(call.value_width)), kept_width(o_width) {
#if defined(KERNELHUB_ATTENTION_TILES)
        tiles_some = Bfloat16s<Of>::EXACT && c.kind == BFLOAT16 && has_products(c.products);
        if (tiles_some) kept_width = 16 * OnTiles<Of, ByDots>::v_tiles_of(c);
#endif
        const int64_t wider = std::max(q_width, o_width);
        for (int64_t d = 0; d < wider; d++) places.add(Of::place(d));
        for (together = heads_at_once();; together = (together + 1) / 2) {
            tasks.count = partial = most_lines = 0;
            for (int64_t b = 0; b < c.num_seqs; b++) divide(b, std::min(together, heads_at_once(b)));
            if (together == 1 || even(threads)) break;
        }
    }

    // Whether the threads, each of which takes the next task when it is done, are done at about the same time.
    // Few tasks of all heads are better than many that each skip most of a token's row: 1 x 2048 keys of 8 heads in
    // bfloat16 take two threads of a Xeon 0.35 ms in two tasks, 0.47 in eight.
    bool even(int threads) const {
        if (tasks.count >= 3 * threads) return true;
        if (tasks.count < threads) return false;
        List<int64_t> busy;
        for (int t = 0; t < threads; t++) busy.add(0);
        int64_t total = 0, most = 0;
        for (int64_t i = 0; i < tasks.count; i++) {
            int64_t free = 0;
            for (int64_t t = 1; t < threads; t++) free = busy[t] < busy[free] ? t : free;
            const int64_t keys = (tasks[i].high - tasks[i].low) * tasks[i].kv_heads;
            busy[free] += keys, total += keys;
            most = std::max(most, busy[free]);
        }
        return 8 * most * threads <= 9 * total;
    }

    void divide(int64_t b, int64_t heads) {
        const int64_t queries = c.queries(b), length = c.length(b), each = tokens_at_once(queries);
        for (int64_t first = 0; first < queries; first += each) {
            const int64_t count = std::min(each, queries - first), position = length - queries + first;
            const Range begin(c, length, position), last(c, length, position + count - 1);
            const int64_t low = begin.low, high = std::max(begin.high, last.high);
            const int64_t pieces = pieces_of(queries, high - low);
            for (int64_t h = 0; h < c.kv_heads; h += heads) {
                const int64_t some = std::min(heads, c.kv_heads - h);
                most_lines = std::max(most_lines, count * group * some);
                for (int64_t p = 0; p < pieces; p++) {
                    const int64_t from = low + p * PIECE, to = p + 1 < pieces ? from + PIECE : high;
                    tasks.add({b, first, count, h, some, from, to, pieces, p, partial});
                }
                if (pieces > 1) partial += pieces * count * group * some;
            }
        }
    }

    int64_t tokens_at_once(int64_t queries) const {
        const int64_t rows = !tiles_some ? ROWS : queries * group > FEW_ROWS ? 4 * ROWS : 2 * ROWS;
        return c.sparse() ? 1 : std::max<int64_t>(1, rows / group);
    }

    int64_t pieces_of(int64_t queries, int64_t seen) const {
        return queries * group <= FEW_ROWS ? std::max<int64_t>(1, (seen + PIECE - 1) / PIECE) : 1;
    }

    // KV heads of a task at most: those that lie side by side. Of the single tokens in a batch of prompts, too: 63 tokens of
    // 512 keys and 64 of a prompt, 32 heads to 8, took one thread of a Zen 4 1.09 times as long head by head.
    int64_t heads_at_once(int64_t b) const {
        if (c.k.head > c.k.token || c.v.head > c.v.token) return 1;
        const int64_t queries = c.queries(b),
                      most = std::max<int64_t>(1, std::min(queries, tokens_at_once(queries)) * group);
        return std::max<int64_t>(1, std::min(c.kv_heads, TOGETHER / most));
    }

    int64_t heads_at_once() const {
        int64_t most = 1;
        for (int64_t b = 0; b < c.num_seqs; b++) most = std::max(most, heads_at_once(b));
        return most;
    }

    // Bytes of a thread's memory; of a task's rows at most.
    int64_t bytes() const {
        const int64_t rows = std::max(ROWS, group), lines = most_lines, ends = 64 * 8;
        int64_t of_tiles = 0;
#if defined(KERNELHUB_ATTENTION_TILES)
        if (tiles_some) of_tiles = OnTiles<Of, ByDots>::bytes(c, most_lines, together) + kept_width * 4 + 64;
        if (c.products == BY_AMX && tiles_some) return of_tiles;
#endif
        return std::max(of_tiles, lines * (q_width + o_width + 2) * 4 + rows * 2 * 8 + ends +
                                      Source<Of>::bytes(c.k, c.width) + Source<Of>::bytes(c.v, c.value_width) +
                                      Widened<Of>::bytes(rows, q_width, o_width));
    }

    // Whether the rows of a task are multiplied as tiles: by AMX all, by dot products those that fill half a tile.
    bool on_tiles(const Task &task) const {
        return tiles_some && (c.products == BY_AMX || task.count * group >= (Of::BYTES == 1 ? FEWEST_OF_CODES : FEWEST));
    }

    void run(int threads) {
        Buffer kept;
        float *pieces = partial ? kept.take<float>(partial * (kept_width + 2)) : nullptr;
        parallel_for(tasks.count, threads, [&](int64_t i) {
#if defined(KERNELHUB_ATTENTION_TILES)
            if constexpr (Bfloat16s<Of>::EXACT)
                if (on_tiles(tasks[i])) {
#if defined(KERNELHUB_ATTENTION_AMX)
                    if (c.products == BY_AMX) return attend_on_tiles<ByAmx>(tasks[i], pieces);
#endif
                    return attend_on_tiles<ByDots>(tasks[i], pieces);
                }
#endif
            attend(tasks[i], pieces);
        });
        if (!partial) return;
        List<int64_t> several;
        for (int64_t i = 0; i < tasks.count; i++)
            if (tasks[i].pieces > 1 && tasks[i].piece == 0) several.add(i);
        parallel_for(several.count, threads, [&](int64_t i) { merge(tasks[several[i]], pieces); });
    }

    void attend(const Task &task, float *pieces) const {
        constexpr int64_t chunk = Of::BYTES == 4 ? CHUNK / 2 : CHUNK;  // of float32 as many bytes
        thread_local Buffer memory;
        Cursor cursor{memory.take<char>(bytes())};
        const int64_t rows = task.count * group, lines = rows * task.kv_heads;
        State all{};
        const Widened<Of> widened(rows, q_width, o_width, cursor);
        all.q_width = q_width, all.o_width = o_width;
        if (pairs<Of>() && c.kind == BFLOAT16 && !widened.k) all.pairs = cursor.take<uint16_t>(lines * q_width);
        else all.q = cursor.take<float>(lines * q_width);
        all.o = cursor.take<float>(lines * o_width);
        all.largest = cursor.take<float>(lines), all.sum = cursor.take<float>(lines);
        all.low = cursor.take<int64_t>(rows), all.high = cursor.take<int64_t>(rows);
        const Source<Of> k_rows(c.k, c.width, cursor), v_rows(c.v, c.value_width, cursor);
        for (int64_t h = 0; h < task.kv_heads; h++) prepare(task, h, of_head(all, task, h));
        Places both[2];
        both[0].find(c, task, task.low, task.high, chunk);
        const int64_t of_k = (task.kv_heads - 1) * c.k.head + c.width * c.k.element;
        const int64_t of_v = c.shared() ? 0 : (task.kv_heads - 1) * c.v.head + c.value_width * c.v.element;
        int now = 0;
        for (int64_t first = task.low; first < task.high; first += chunk, now = 1 - now) {
            const Places &here = both[now];
            both[1 - now].find(c, task, first + chunk, task.high, chunk);
            if (!here.count) continue;  // nothing of a list is seen
            Ahead ahead(both[1 - now], of_k, of_v, 2 * here.count * task.kv_heads * tiles_of(rows));
            for (int64_t h = 0; h < task.kv_heads; h++) {
                const char *k[CHUNK], *v[CHUNK];
                for (int64_t j = 0; j < here.count; j++) {
                    k[j] = k_rows.row(here.k[j] + h * c.k.head, j);
                    v[j] = v_rows.row(here.v[j] + h * c.v.head, j);
                }
                const State state = of_head(all, task, h);
                if (widened.k) {
                    widened.decode(k, v, here.count);
                    tiles<OfFloat32, false>(state, rows, first, here.count, k, v, ahead);
                } else if (pairs<Of>() && state.pairs) {
                    tiles<Of, pairs<Of>()>(state, rows, first, here.count, k, v, ahead);
                } else {
                    tiles<Of, false>(state, rows, first, here.count, k, v, ahead);
                }
            }
        }
        for (int64_t line = 0; line < lines; line++) {
            if (task.pieces == 1) {
                result(task, line, all.o + line * o_width, all.largest[line], all.sum[line]);
            } else {
                float *into = of_piece(task, line, pieces);
                into[0] = all.largest[line], into[1] = all.sum[line];
                memcpy(into + 2, all.o + line * o_width, o_width * sizeof(float));
            }
        }
    }

    // Where a piece of a row's results is kept: its largest score, its sum, its results.
    float *of_piece(const Task &task, int64_t line, float *pieces) const {
        return pieces + (task.partial + line * task.pieces + task.piece) * (kept_width + 2);
    }

#if defined(KERNELHUB_ATTENTION_TILES)
    template <class Product>
    void attend_on_tiles(const Task &task, float *pieces) const {
        thread_local Buffer memory;
        Cursor cursor{memory.take<char>(bytes())};
        float *row = cursor.take<float>(kept_width);
        OnTiles<Of, Product> tiles(c, task, cursor);
        [[maybe_unused]] const typename Product::Registers of_thread;
        tiles.begin();
        Places both[2];
        both[0].find(c, task, task.low, task.high, tiles.block);
        const int64_t of_k = (task.kv_heads - 1) * c.k.head + c.width * c.k.element;
        const int64_t of_v = tiles.shared() ? 0 : (task.kv_heads - 1) * c.v.head + c.value_width * c.v.element;
        int now = 0;
        for (int64_t first = task.low; first < task.high; first += tiles.block, now = 1 - now) {
            both[1 - now].find(c, task, first + tiles.block, task.high, tiles.block);
            if (!both[now].count) continue;  // nothing of a list is seen
            Ahead ahead(both[1 - now], of_k, of_v, tiles.asks(both[now].count));
            tiles.pack(both[now], ahead);
            for (int64_t h = 0; h < task.kv_heads; h++) tiles.attend(both[now], first - task.low, h, ahead);
        }
        for (int64_t line = 0; line < task.count * group * task.kv_heads; line++) {
            if (task.pieces == 1) {
                tiles.results(line, row);
                result(task, line, row, tiles.largest_of(line), tiles.sum_of(line));
            } else {
                float *into = of_piece(task, line, pieces);
                into[0] = tiles.largest_of(line), into[1] = tiles.sum_of(line);
                tiles.results(line, into + 2);
            }
        }
    }
#endif

    template <class Held, bool PAIRED>
    void tiles(const State &state, int64_t rows, int64_t first, int64_t count, const char *const *k, const char *const *v,
               Ahead &ahead) const {
        for (int64_t row = 0; row < rows;) {
            if (rows - row >= 4) tile<Held, 4, PAIRED>(c, state, row, first, count, k, v, ahead), row += 4;
            else if (rows - row >= 2) tile<Held, 2, PAIRED>(c, state, row, first, count, k, v, ahead), row += 2;
            else tile<Held, 1, PAIRED>(c, state, row, first, count, k, v, ahead), row += 1;
        }
    }

    static int64_t tiles_of(int64_t rows) { return rows / 4 + rows % 4 / 2 + rows % 2; }

    State of_head(const State &all, const Task &task, int64_t h) const {
        State one = all;
        const int64_t rows = task.count * group, kv_head = task.kv_head + h;
        if (all.pairs) one.pairs += h * rows * all.q_width;
        else one.q += h * rows * all.q_width;
        one.o += h * rows * all.o_width, one.largest += h * rows, one.sum += h * rows;
        one.factor = c.scale * (c.k_scale ? c.k_scale[kv_head * c.k_scale_step] : 1.0f);
        return one;
    }

    void result(const Task &task, int64_t line, const float *o, float largest, float sum) const {
        const int64_t rows = task.count * group, row = line % rows,
                      head = (task.kv_head + line / rows) * group + row % group;
        finish(c, task.sequence, task.first + row / group, head, o, largest, sum, on_tiles(task) ? nullptr : places.begin());
    }

    // Queries as they are, or in float32, times what scores are multiplied by.
    void prepare(const Task &task, int64_t h, const State &state) const {
        const int64_t b = task.sequence, queries = c.queries(b), length = c.length(b), batch = c.starts_q ? 0 : b;
        const int64_t rows = task.count * group;
        if (state.pairs) memset(state.pairs, 0, rows * q_width * sizeof(uint16_t));
        else memset(state.q, 0, rows * q_width * sizeof(float));
        memset(state.o, 0, rows * o_width * sizeof(float));
        for (int64_t t = 0; t < task.count; t++) {
            const Range range(c, length, length - queries + task.first + t);
            for (int64_t g = 0; g < group; g++) {
                const int64_t row = t * group + g;
                state.low[row] = range.low, state.high[row] = range.high;
                state.largest[row] = -INFINITY, state.sum[row] = 0.0f;
                const int64_t place = c.of_q.at(batch, c.first_query(b) + task.first + t, (task.kv_head + h) * group + g);
                with(c.kind, [&](auto of) {
                    typedef decltype(of) Given;
                    const auto *given = static_cast<const typename Given::Held *>(c.q) + place;
                    if (state.pairs) {
                        uint16_t *into = state.pairs + row * q_width;
                        for (int64_t d = 0; d < c.width; d++) memcpy(into + d, given + d * c.of_q.element, sizeof *into);
                    } else {
                        float *into = state.q + row * q_width;
                        for (int64_t d = 0; d < c.width; d++)
                            into[places[d]] = Given::value(given[d * c.of_q.element]) * state.factor;
                    }
                });
            }
        }
    }

    void merge(const Task &task, const float *pieces) const {
        thread_local Buffer memory;
        const int64_t width = on_tiles(task) ? kept_width : o_width, next = kept_width + 2;
        float *o = memory.take<float>(width);
        for (int64_t line = 0; line < task.count * group * task.kv_heads; line++) {
            const float *of_row = pieces + (task.partial + line * task.pieces) * next;
            float largest = -INFINITY, sum = 0.0f;
            for (int64_t p = 0; p < task.pieces; p++) {
                const float of_piece = of_row[p * next];
                largest = of_piece > largest ? of_piece : largest;
            }
            memset(o, 0, width * sizeof(float));
            const float base = largest == -INFINITY ? 0.0f : largest;
            for (int64_t p = 0; p < task.pieces; p++) {
                const float *piece = of_row + p * next, factor = std::exp(piece[0] - base);
                if (piece[1] == 0.0f) continue;
                sum += piece[1] * factor;
                for (int64_t d = 0; d < width; d++) o[d] += piece[2 + d] * factor;
            }
            result(task, line, o, largest, sum);
        }
    }
};

}  // namespace

extern "C" {

// Whether products of bfloat16, BY_AMX or BY_DOTS, are computed here of such q and such keys and values; weights are
// rounded to bfloat16 then.
int64_t KERNELHUB(attention_has)(int64_t products, int64_t kind, int64_t kv_kind) {
    return kind == BFLOAT16 && kv_kind != FLOAT16 && kv_kind != FLOAT32 && has_products(products);
}

// sizes: 0 num_seqs, 1 tokens of a sequence, 2 tokens of all, 3 keys of a sequence, 4 keys of all, 5 heads, 6 kv_heads, 7
// width, 8 value width, 9 page size, 10 pages, 11 pages of a row of the table, 12 stride of the table, 13 window left, 14
// right, 15 kind of q and out, 16 kind of k and v, 17 and 18 strides of scales; in elements: 19 q (batch, token, head,
// element), 23 out (the same), 27 lse (batch, token, head); in bytes: 30 k (batch, page, token, head, element), 35 v; 40
// positions listed for each token of q, over pages, -1 if all are seen; in elements: 41 strides of the lists; 43 what
// multiplies (`Products`): AMX or AVX-512 BF16 only q in bfloat16 by k and v in bfloat16 or fp8, where there is such
void KERNELHUB(attention)(const void *q, const void *k, const void *v, const int32_t *table, const int32_t *lengths,
                          const int32_t *starts_q, const int32_t *starts_k, const int32_t *listed, const float *sinks,
                          const float *k_scale, const float *v_scale, void *out, float *lse, const double *numbers,
                          const int64_t *s, int64_t threads) {
    Call c{};
    c.q = q, c.table = table, c.lengths = lengths, c.starts_q = starts_q, c.starts_k = starts_k, c.listed = listed;
    c.sinks = sinks, c.k_scale = k_scale, c.v_scale = v_scale, c.out = out, c.lse = lse;
    c.scale = static_cast<float>(numbers[0]), c.softcap = static_cast<float>(numbers[1]);
    c.num_seqs = s[0], c.tokens = s[1], c.num_tokens = s[2], c.keys = s[3], c.num_keys = s[4], c.heads = s[5];
    c.kv_heads = s[6], c.width = s[7], c.value_width = s[8], c.page_size = s[9], c.num_pages = s[10], c.max_pages = s[11];
    c.table_row = s[12], c.left = s[13], c.right = s[14], c.kind = s[15], c.kv_kind = s[16];
    c.k_scale_step = s[17], c.v_scale_step = s[18];
    c.of_q = {s[19], s[20], s[21], s[22]}, c.of_out = {s[23], s[24], s[25], s[26]}, c.of_lse = {s[27], s[28], s[29], 1};
    c.k = {static_cast<const char *>(k), s[30], s[31], s[32], s[33], s[34]};
    c.v = {static_cast<const char *>(v), s[35], s[36], s[37], s[38], s[39]};
    c.num_listed = s[40], c.listed_row = s[41], c.listed_step = s[42], c.products = s[43];
    const int count = static_cast<int>(threads);
    switch (c.kv_kind) {
        case BFLOAT16: Attention<OfBfloat16>(c, count).run(count); break;
        case FLOAT16: Attention<OfFloat16>(c, count).run(count); break;
        case FLOAT32: Attention<OfFloat32>(c, count).run(count); break;
        case FLOAT8_E4M3: Attention<OfE4m3>(c, count).run(count); break;
        default: Attention<OfE5m2>(c, count).run(count);
    }
}
}
