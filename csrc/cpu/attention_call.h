// What a call of attention is given, how it is divided into tasks, and where the keys and values of a task are.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace {

constexpr int64_t CHUNK = 32;          // keys whose scores are held at once, without tiles
constexpr int64_t KEYS_AT_ONCE = 256;  // on tiles, at most
constexpr int64_t PIECE = 1024;        // keys of one task, of calls with few rows
constexpr int64_t ROWS = 64;           // rows of a task, unless the heads of one token are more
constexpr int64_t FEW_ROWS = 512;
constexpr int64_t TILE = 1024;  // bytes of 16 rows of 32 numbers of bfloat16, or of 16 of float32
constexpr int64_t UNIT = 32;    // keys of a tile of weights
// Rows of a task that dot products multiply as tiles, of bfloat16 and of fp8. Fewer leave most of a tile empty. 8 x 1024
// keys of 8 heads of 128, one thread of a Zen 4, the time by vectors over that on tiles: 8, 12, 14 and 16 rows 0.79, 0.96,
// 1.1 and 1.2, of e4m3 6, 8 and 16 rows 1.03, 1.2 and 1.9. Of 12 rows: heads of 64 1.1, of 256 0.9, one KV head 1.07.
constexpr int64_t FEWEST = 12, FEWEST_OF_CODES = 6;
constexpr int64_t TOGETHER = 64;  // rows of all heads of a task: with their results 64 KB

// What multiplies: vectors of float32, tiles of bfloat16 by AMX, or by dot products of AVX-512 BF16.
enum Products : int64_t { BY_VECTORS, BY_AMX, BY_DOTS };

struct Rows {  // strides in elements
    int64_t batch, token, head, element;

    int64_t at(int64_t b, int64_t t, int64_t h) const { return b * batch + t * token + h * head; }
};

struct Keys {
    const char *memory;
    int64_t batch, page, token, head, element;  // strides in bytes
};

struct Call {
    const void *q;
    Keys k, v;
    const int32_t *table, *lengths, *starts_q, *starts_k;  // or null
    const int32_t *listed;                                 // positions that a query token sees, -1 for none
    const float *sinks, *k_scale, *v_scale;                // or null
    void *out;
    float *lse;  // or null
    float scale, softcap;
    Rows of_q, of_out, of_lse;
    int64_t num_seqs, tokens, num_tokens, keys, num_keys, heads, kv_heads, width, value_width, page_size, num_pages,
        max_pages;
    int64_t table_row, k_scale_step, v_scale_step, left, right, kind, kv_kind, num_listed, listed_row, listed_step, products;

    int64_t group() const { return heads / kv_heads; }
    bool sparse() const { return num_listed >= 0; }

    // Whether the beginning of a key is its value.
    bool shared() const {
        return k.memory == v.memory && k.page == v.page && k.token == v.token && k.head == v.head && k.batch == v.batch &&
               k.element == v.element && value_width <= width;
    }

    // Metadata may change after it was checked; what it says is kept within the memory that there is.
    int64_t first_query(int64_t b) const { return starts_q ? within(starts_q[b], num_tokens) : 0; }
    int64_t queries(int64_t b) const {
        return starts_q ? std::max<int64_t>(0, within(starts_q[b + 1], num_tokens) - first_query(b)) : tokens;
    }
    int64_t first_key(int64_t b) const { return starts_k ? within(starts_k[b], num_keys) : 0; }
    int64_t length(int64_t b) const {
        if (table) return num_pages ? within(lengths[b], max_pages * page_size) : 0;
        return starts_k ? std::max<int64_t>(0, within(starts_k[b + 1], num_keys) - first_key(b)) : keys;
    }
    static int64_t within(int64_t value, int64_t most) { return std::min(std::max<int64_t>(value, 0), most); }
};

// Keys that a query token sees; of listed ones their places in its list.
struct Range {
    int64_t low, high;

    Range(const Call &c, int64_t length, int64_t position) : low(0), high(c.sparse() ? c.num_listed : length) {
        if (c.sparse()) return;
        if (c.right >= 0) high = std::min(high, position + c.right + 1);
        if (c.left >= 0) low = std::max(low, position - c.left);
        low = std::max<int64_t>(0, std::min(low, length));
        high = std::max(high, low);
    }
};

// What a task does: tokens of a sequence, some KV heads, keys [low, high) of it. Of several pieces, each leaves its results
// in memory from `partial` on: the pieces of all rows, row by row.
struct Task {
    int64_t sequence, first, count, kv_head, kv_heads, low, high, pieces, piece, partial;
};

// A thread's memory, from the front.
struct Cursor {
    char *at;

    template <class T>
    T *take(int64_t count) {
        T *taken = reinterpret_cast<T *>(at);
        at += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }
};

// Where the rows of keys from `first` on are, those of the task's first head, up to `most`, before `end`.
struct Places {
    const char *k[KEYS_AT_ONCE], *v[KEYS_AT_ONCE];
    int64_t count = 0;

    void find(const Call &c, const Task &task, int64_t first, int64_t end, int64_t most) {
        count = std::min(most, end - first);
        if (c.sparse()) return find_listed(c, task, first);
        const int64_t of_k = task.kv_head * c.k.head, of_v = task.kv_head * c.v.head;
        if (c.table) {
            const int32_t *table = c.table + task.sequence * c.table_row;
            int64_t page = first / c.page_size, slot = first % c.page_size;
            int64_t number = count > 0 ? Call::within(table[page], c.num_pages - 1) : 0;
            for (int64_t j = 0; j < count; j++) {
                k[j] = c.k.memory + number * c.k.page + slot * c.k.token + of_k;
                v[j] = c.v.memory + number * c.v.page + slot * c.v.token + of_v;
                if (++slot == c.page_size && j + 1 < count) {
                    slot = 0;
                    number = Call::within(table[++page], c.num_pages - 1);
                }
            }
        } else {
            const int64_t token = c.first_key(task.sequence) + first;
            const char *k0 = c.k.memory + task.sequence * c.k.batch + token * c.k.token + of_k;
            const char *v0 = c.v.memory + task.sequence * c.v.batch + token * c.v.token + of_v;
            for (int64_t j = 0; j < count; j++) k[j] = k0 + j * c.k.token, v[j] = v0 + j * c.v.token;
        }
    }

    // Of so many entries of the list of the task's token those that it sees, which may be none.
    void find_listed(const Call &c, const Task &task, int64_t first) {
        const int64_t b = task.sequence, length = c.length(b);
        const int64_t last = c.right < 0 ? length : length - c.queries(b) + task.first;
        if (count <= 0) return;
        const int64_t row = (c.starts_q ? c.first_query(b) : b * c.tokens) + task.first, entries = count;
        const int32_t *list = c.listed + row * c.listed_row, *table = c.table + b * c.table_row;
        count = 0;
        for (int64_t j = 0; j < entries; j++) {
            const int64_t position = list[(first + j) * c.listed_step];
            if (position < 0 || position >= length || position > last) continue;
            const int64_t page = Call::within(table[position / c.page_size], c.num_pages - 1), slot = position % c.page_size;
            k[count] = c.k.memory + page * c.k.page + slot * c.k.token + task.kv_head * c.k.head;
            v[count++] = c.v.memory + page * c.v.page + slot * c.v.token + task.kv_head * c.v.head;
        }
    }
};

// Asks for the lines of a chunk's keys and values, some at a time, in the order of memory. Rows that lie one after another
// are asked for as one: to look for the next line row by row took 0.3 of the time of decode on a Zen 4.
struct Ahead {
    const Places *next;
    int64_t of_k, of_v;  // bytes of a token: all heads of the task
    int64_t each = 0;    // lines of a call of `ask`; 0 once all were asked for
    const char *at = nullptr;
    int64_t left = 0;   // lines from `at` on
    int64_t place = 0;  // the first row after them: keys, then values

    // To be called so many times. Without bytes of v no values are asked for.
    Ahead(const Places &places, int64_t k_bytes, int64_t v_bytes, int64_t calls)
        : next(&places), of_k(k_bytes), of_v(v_bytes) {
        const int64_t lines = places.count * ((of_k + 63) / 64 + (of_v + 63) / 64);
        each = (lines + calls - 1) / calls;
    }

    // No function is called: it would not keep the sums that are in registers.
    __attribute__((always_inline)) void ask() { ask(each); }

    __attribute__((always_inline)) void ask(int64_t lines) {
        while (lines > 0 && (left || begin())) {
            const int64_t some = std::min(lines, left);
            const char *line = at;
            for (at += 64 * some; line < at; line += 64) __builtin_prefetch(line, 0, 2);
            lines -= some, left -= some;
        }
    }

    // The next rows that lie one after another; false if there are none, and nothing is to be asked for any more.
    __attribute__((always_inline)) bool begin() {
        const bool value = place >= next->count;
        const char *const *rows = value ? next->v : next->k;
        const int64_t before = value ? next->count : 0, bytes = value ? of_v : of_k;
        if (place - before >= next->count || !bytes) return each = 0, false;
        const char *first = rows[place - before], *last = first + bytes;
        while (++place - before < next->count && rows[place - before] == last) last += bytes;
        at = first - reinterpret_cast<uintptr_t>(first) % 64;
        left = (last - at + 63) / 64;
        return true;
    }
};

// What is multiplied at a time: 16 or 32 rows of a head by a block of keys and values, all as tiles. Keys are tiles of 16
// keys, q and values tiles of pairs of terms; the tiles of the next 32 terms follow those of the same keys, rows, columns.
struct Strip {
    const char *k, *v, *q, *weights;
    char *scores, *o;  // of tiles of 16 keys by 16 rows, and of 16 rows by 16 columns
    int64_t k_tiles, v_tiles;
    int64_t next_weight, next_score;  // bytes from the first 16 rows to the others
    int64_t tall, rows;               // tiles of rows; rows
    int64_t from, to;                 // units of keys of the block
};

}  // namespace
