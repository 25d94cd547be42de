// Decode over pages: the few query rows of a KV head against all keys of their sequence, a warp for keys of its own.
//
// Rows are (query token, head of the group) of a sequence and KV head, flattened, ROWS of them in a block. A block walks
// units of WARPS x KEYS keys; each warp copies its KEYS keys and values of a unit into a ring of its own, STAGES deep, so
// that nothing waits for another warp between the first and the last unit of a sequence. Keys are the 16 rows of a product
// and heads its 8 columns:
//
//   S^T = K Q^T        a row of K is read as it lies, 16 bytes by a lane; Q has its columns in the same order
//   P   = 2^(S - m)    m follows the largest score, and is raised only once a score is 2^LATE times above it
//   O^T = V^T P        ldmatrix transposes V, of float8 pairs of columns; movmatrix makes an operand of P
//
// float8 becomes float16, which holds it exactly. Queries of bfloat16 do too, each row divided by the power of two of its
// largest element. In float16 P is 2^BIAS times as large, for its range.
//
// Which block walks which units is worked out by every warp from the lengths: a sequence of n units costs SETUP + n, one
// of no keys nothing. The costs end to end are a line, which is cut into equal parts; the blocks of a part, one for each KV
// head and tile of rows, are neighbours, as their keys are in memory. `paged_merge` merges what several parts share, and
// writes the results of sequences without keys. `paged_decode_merging` does so itself: of the blocks that share a
// sequence the last one merges, in the order of parts. It counts them, and leaves the counters zero.
//
// Keys that no row sees are not read, their places in the ring are zeros: what a page holds there may be NaN.
//
// If RAGGED, `cu_seqlens_q` says where the queries of each sequence begin and end, `tokens` at most of them. What is walked
// are then the tiles of rows of all sequences, each like a sequence of its own: one without rows costs nothing, and keys of
// sequences without queries are not read.
//
// Defined by the host: ELEMENT (of q and out), FORMAT (of keys: 0 ELEMENT, 1 e4m3, 2 e5m2), D, GROUP, KV_HEADS, PAGE (a
// multiple of 16), ROWS (8 or 16), KEYS, STAGES, BLOCKS (on a multiprocessor), SCALES (of float8: 0 in value_scale and
// scale, 1 one number, 2 one for each KV head), FEW (whether a sequence may have more than one query), RAGGED, CAUSAL,
// HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, HAS_LSE. The sinks are float32 (kind 0), bfloat16 (1) or float16 (2). `scale` has
// log2(e) in it, unless scores are capped.
#include "warp_products.h"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int UNIT = WARPS * KEYS;
constexpr int SETUP = 1;                                  // units' worth of time to begin and end a sequence
constexpr int MERGERS = 4;                                // warps of a block of `paged_merge`
constexpr int EARLY = 4;                                  // parts that one reads together with the scores
constexpr int VECTORS = (D + 4 * WARP - 1) / (4 * WARP);  // of four columns, of a row that a warp merges
constexpr int AT_ONCE = 16 / VECTORS;                     // parts that the last block reads at once
constexpr int HELD = 16;                                  // keys that lie in one page, whatever its size
constexpr float LEAST = -1e30f, LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

INLINE float none() { return float_of(0xFF800000); }  // -inf

template <bool FLOAT8> struct Multiplied {
  typedef ELEMENT type;
};
template <> struct Multiplied<true> {
  typedef f16 type;
};
typedef Multiplied<FORMAT != 0>::type Made;
constexpr bool HALF = SAME<Made, f16>;
constexpr float BIAS = HALF ? 11.0f : 0.0f;  // of the exponents of P
constexpr float LATE = HALF ? 15.0f : 8.0f;  // P is at most 2^LATE

constexpr int SIZE = FORMAT ? 1 : 2, ROW_BYTES = D * SIZE, CHUNKS = ROW_BYTES / 16, EACH = 16 / SIZE;
constexpr int READS = CHUNKS / 4, STEPS = EACH / 4;  // chunks of a row that a lane reads; products over the columns of each
constexpr int TILE = KEYS * ROW_BYTES, RING = STAGES * 2 * TILE;
constexpr int HEADS8 = ROWS / 8, KEYS16 = KEYS / 16, COLUMNS16 = D / 16;
constexpr int APART = D + 4;  // floats between rows of a result in shared memory, so that lanes meet no bank twice
static_assert(CHUNKS % 4 == 0 && KEYS % HELD == 0 && PAGE % HELD == 0 && HELD * CHUNKS % WARP == 0, "whole vectors");

struct Shared {
  char ring[WARPS][RING];
  float sums[2 * ROWS * D > ROWS* APART ? 2 * ROWS * D : ROWS * APART];
  float tops[WARPS][ROWS], totals[WARPS][ROWS];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the adapter asks for so much");

struct Parameters {
  const ELEMENT* q;
  const char *k, *v;
  ELEMENT* out;
  float *lse, *part_out, *part_lse;
  const void* sinks;
  const float *k_scale, *v_scale;
  const int *block_table, *seq_lens;
  float scale, value_scale, softcap;
  int num_seqs, tokens, tiles, room, last_page, left, sinks_kind;
  // If RAGGED, strides of batches are those of tokens.
  i64 stride_table, q_batch, q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head;
  i64 o_batch, o_token, o_head, l_batch, l_head, l_token;
#if RAGGED
  const int* cu_seqlens_q;
  i64 all_tokens;  // that there are rows for
#endif
};

// --- the schedule

struct Part {
  int begin, end, first, last, first_at;
};

// What is walked: a sequence, or a tile of rows of one if RAGGED.
struct Span {
  int keys, low, start,
      units;  // of a sequence: its keys, the first that is seen, that rounded down, and units from there on
#if RAGGED
  int sequence, first_token, tokens;  // its queries among those of all
#endif
};

INLINE int sum_of_warp(int x) { return __reduce_add_sync(~0u, x); }

#if RAGGED
INLINE int all_of(const Parameters& p) { return p.num_seqs * p.tiles; }
INLINE int tiles_of_block(const Parameters&) { return 1; }
INLINE int sequence_of(const Span& of, int) { return of.sequence; }
INLINE int tokens_of(const Parameters&, const Span& of) { return of.tokens; }
INLINE int begin_of(const Span& of, int) { return of.first_token; }
INLINE int first_row_of(const Parameters& p, int one, int) { return one % p.tiles * ROWS; }

// None of the queries that are beyond the rows that there are, whatever the offsets say.
INLINE void find_tokens(const Parameters& p, Span& of) {
  int rows = (int)p.all_tokens;
  of.first_token = min(max(p.cu_seqlens_q[of.sequence], 0), rows);
  of.tokens = min(max(min(p.cu_seqlens_q[of.sequence + 1], rows) - of.first_token, 0), p.tokens);
}
#else
INLINE int all_of(const Parameters& p) { return p.num_seqs; }
INLINE int tiles_of_block(const Parameters& p) { return p.tiles; }
INLINE int sequence_of(const Span&, int one) { return one; }
INLINE int tokens_of(const Parameters& p, const Span&) { return p.tokens; }
INLINE int begin_of(const Span&, int one) { return one; }
INLINE int first_row_of(const Parameters&, int, int of_block) { return of_block; }
#endif

INLINE Span span_of(const Parameters& p, int one) {
  Span made;
#if RAGGED
  made.sequence = one / p.tiles;
  find_tokens(p, made);
#endif
  made.keys = min(max(p.seq_lens[sequence_of(made, one)], 0), p.room);
#if RAGGED
  if (one % p.tiles * ROWS >= made.tokens * GROUP) made.keys = 0;
#endif
  made.low = HAS_WINDOW ? max(made.keys - tokens_of(p, made) - p.left, 0) : 0;
  made.start = made.low / HELD * HELD;
  made.units = (made.keys - made.start + UNIT - 1) / UNIT;
  return made;
}

INLINE int cost_of(const Parameters& p, int one) {
  int units = one < all_of(p) ? span_of(p, one).units : 0;
  return units ? units + SETUP : 0;
}

// The length of a part on the line of costs.
INLINE int cost_of_part(const Parameters& p, int parts) {
  int total = 0;
  for (int at = threadIdx.x % WARP; at < all_of(p); at += WARP) total += cost_of(p, at);
  total = sum_of_warp(total);
  return max((total + parts - 1) / parts, 1);
}

INLINE Part part_of_program(const Parameters& p, int part, int parts) {
  int each = cost_of_part(p, parts), before = 0, lane = threadIdx.x % WARP;
  Part made = {part * each, part * each + each, 0, 0, 0};
  for (int start = 0; start < all_of(p); start += WARP) {
    int cost = cost_of(p, start + lane), ends = cost;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
      int other = __shfl_up_sync(~0u, ends, step);
      if (lane >= step) ends += other;
    }
    ends += before;
    bool there = start + lane < all_of(p), passed = there && ends <= made.begin;
    made.first += __popc(__ballot_sync(~0u, passed));
    made.last += __popc(__ballot_sync(~0u, there && ends - cost < made.end));
    made.first_at += sum_of_warp(passed ? cost : 0);
    before = __shfl_sync(~0u, ends, WARP - 1);
  }
  return made;
}

// What a part walks of one at place `at`, which becomes that of the next.
struct Segment {
  Span of;
  int low, high;
};

INLINE Segment segment(const Parameters& p, int one, int& at, const Part& part) {
  Segment made;
  made.of = span_of(p, one);
  made.low = max(part.begin - at - SETUP, 0);
  made.high = min(part.end - at - SETUP, made.of.units);
  at += made.of.units + min(made.of.units, 1) * SETUP;
  return made;
}

// --- copies

// Where a chunk of a row is in a tile: so that neither lanes that read rows nor those that read columns meet a bank twice.
INLINE int place(int row, int chunk) {
  if (CHUNKS == 4) return row / 2 * 128 + ((row % 2 * 4 + chunk) ^ (row / 2 % 8)) * 16;
  return row * ROW_BYTES + (chunk ^ (row % 8)) * 16;
}

// A tile of a warp; keys below `low` and from `keys` on are zeros where not all are there.
INLINE void copy_tile(u32 to, const char* const (&from)[KEYS16], i64 token, bool all, int key, int low, int keys) {
  constexpr int AT_ONCE = CHUNKS < WARP ? WARP / CHUNKS : 1;  // rows
  int lane = threadIdx.x % WARP, own_row = lane / CHUNKS, chunk = lane % CHUNKS;
  i64 own = own_row * token + chunk * 16;
#pragma unroll
  for (int i = 0; i < KEYS * CHUNKS / WARP; i++) {
    int row = i * AT_ONCE;
    const char* at = from[row / HELD] + own + row % HELD * token;
    // As `place(row + own_row, chunk)`: no bit is in both rows.
    u32 there = to + (place(own_row, chunk) ^ place(row, 0));
    if (all) copy_16(there, at);
    else copy_16(there, at, key + row + own_row >= low && key + row + own_row < keys);
  }
}

// The steps of a warp in their order, ahead of those that it works on.
struct Ahead {
  Segment now;
  const int* table;
  int one, at, unit;
  u32 pages[KEYS16];

  INLINE_METHOD int key() const { return now.of.start + (unit * WARPS + (int)threadIdx.x / WARP) * KEYS; }
  INLINE_METHOD void ask() {
#pragma unroll
    for (int i = 0; i < KEYS16; i++) pages[i] = table[min(key() + i * HELD, now.of.keys - 1) / PAGE];
  }
  INLINE_METHOD void find(const Parameters& p, const Part& part) {
    for (; one < part.last; one++) {
      now = segment(p, one, at, part);
      if (now.low < now.high) {
        unit = now.low;
        table = p.block_table + sequence_of(now.of, one) * p.stride_table;
        ask();
        return;
      }
    }
  }
  INLINE_METHOD void begin(const Parameters& p, const Part& part) {
    one = part.first;
    at = part.first_at;
    find(p, part);
  }
  // Ask for the keys and values of a step, and for the pages of the next.
  INLINE_METHOD void copy(const Parameters& p, const Part& part, const char* k, const char* v, u32 to) {
    if (one >= part.last) return;
    int from = key();
    bool all = from >= now.of.low && from + KEYS <= now.of.keys;
    const char *of_k[KEYS16], *of_v[KEYS16];
#pragma unroll
    for (int i = 0; i < KEYS16; i++) {
      i64 page = min(pages[i], (u32)p.last_page);
      int token = (from + i * HELD) % PAGE;
      of_k[i] = k + page * p.k_page + token * p.k_token;
      of_v[i] = v + page * p.v_page + token * p.v_token;
    }
    if (all) {
      copy_tile(to, of_k, p.k_token, true, 0, 0, 0);
      copy_tile(to + TILE, of_v, p.v_token, true, 0, 0, 0);
    } else {
      copy_tile(to, of_k, p.k_token, false, from, now.of.low, now.of.keys);
      copy_tile(to + TILE, of_v, p.v_token, false, from, now.of.low, now.of.keys);
    }
    if (++unit < now.high) {
      ask();
    } else {
      one++;
      find(p, part);
    }
  }
};

// --- queries

struct Queries {
  u32 at[READS][STEPS][HEADS8][2];
  float factor[HEADS8][2];  // of the scores of rows 8 n + 2 (lane % 4) + {0, 1}
};

INLINE int chunk_of(int read) {
  int t = threadIdx.x % 4;
  return CHUNKS == 4 ? t : read / 2 * 8 + 2 * t + read % 2;
}

INLINE float power_of(u32 pair_of_bf16, float most) {
  return fmaxf(most, fmaxf(fabsf(float_of(pair_of_bf16 << 16)), fabsf(float_of(pair_of_bf16 & 0xFFFF0000))));
}

INLINE void load_queries(Queries& made, const Parameters& p, const Span& of, int begin, int kv_head, int first_row) {
  int lane = threadIdx.x % WARP;
  float scale = p.scale;
#if SCALES
  scale *= p.k_scale[SCALES == 2 ? kv_head : 0];
#endif
#pragma unroll
  for (int n = 0; n < HEADS8; n++) {
    int row = first_row + 8 * n + lane / 4, token = row / GROUP;
    Words words[READS][EACH / 8];
    const ELEMENT* from = p.q + begin * p.q_batch + token * p.q_token + (kv_head * GROUP + row % GROUP) * p.q_head;
#pragma unroll
    for (int l = 0; l < READS; l++)
#pragma unroll
      for (int i = 0; i < EACH / 8; i++)
        words[l][i] = row < tokens_of(p, of) * GROUP ? *(const Words*)(from + chunk_of(l) * EACH + 8 * i) : Words{};
    float power = 1.0f;
    if (FORMAT && SAME<ELEMENT, bf16>) {
      float most = 0.0f;
#pragma unroll
      for (int l = 0; l < READS; l++)
#pragma unroll
        for (int i = 0; i < EACH / 2; i++) most = power_of(words[l][i / 4].at[i % 4], most);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      u32 bits = bits_of(most) & 0x7F800000;
      power = bits ? float_of(bits) : 1.0f;
      float share = 1.0f / power;
#pragma unroll
      for (int l = 0; l < READS; l++)
#pragma unroll
        for (int i = 0; i < EACH / 2; i++) {
          u32& pair = words[l][i / 4].at[i % 4];
          pair = narrow_pair(float_of(pair << 16) * share, float_of(pair & 0xFFFF0000) * share, f16());
        }
    }
#pragma unroll
    for (int l = 0; l < READS; l++)
#pragma unroll
      for (int i = 0; i < EACH / 2; i++) made.at[l][i / 2][n][i % 2] = words[l][i / 4].at[i % 4];
#pragma unroll
    for (int j = 0; j < 2; j++) made.factor[n][j] = scale * __shfl_sync(~0u, power, 8 * (lane % 4) + 4 * j);
  }
}

// --- scores; a lane has keys 16 m + lane / 4 (+ 8) and rows 8 n + 2 (lane % 4) + {0, 1}

INLINE void widen(u32 codes, u32& low, u32& high) {
  if (FORMAT == 2) widen_e5m2(codes, low, high);
  else widen_e4m3(codes, low, high);
}

INLINE void score(float (&x)[HEADS8][KEYS16][4], const Queries& q, u32 tile) {
  int g = threadIdx.x % WARP / 4;
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int m = 0; m < KEYS16; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) x[n][m][i] = 0.0f;
#pragma unroll
  for (int l = 0; l < READS; l++) {
    Words upper[KEYS16], lower[KEYS16];
#pragma unroll
    for (int m = 0; m < KEYS16; m++) {
      upper[m] = read_words(tile + place(16 * m + g, chunk_of(l)));
      lower[m] = read_words(tile + place(16 * m + 8 + g, chunk_of(l)));
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int m = 0; m < KEYS16; m++) {
        u32 a[4];
        if (FORMAT) {
          widen(upper[m].at[s], a[0], a[2]);
          widen(lower[m].at[s], a[1], a[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            a[2 * i] = upper[m].at[(2 * s + i) % 4];
            a[2 * i + 1] = lower[m].at[(2 * s + i) % 4];
          }
        }
#pragma unroll
        for (int n = 0; n < HEADS8; n++) multiply(x[n][m], a, q.at[l][s][n], Made());
      }
  }
}

INLINE float reciprocal(float x) {
#ifdef KERNELHUB_EMULATED
  return 1.0f / x;
#else
  float made;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
#endif
}

// tanh that is exact at both ends.
INLINE float tanh_of(float x) {
  float t = 1.0f - 2.0f * reciprocal(exp2_of(fabsf(x) * (2.0f * LOG2E)) + 1.0f);
  return x < 0.0f ? -t : t;
}

struct Seen {
  int last[HEADS8][2], first[HEADS8][2];  // keys that a row sees
  int all_from, all_to;                   // keys that every row sees
};

INLINE Seen seen_of(const Parameters& p, const Span& of, int first_row) {
  Seen made;
  int before = of.keys - tokens_of(p, of);
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int position = FEW ? before + (first_row + 8 * n + 2 * (int)(threadIdx.x % 4) + j) / GROUP : of.keys - 1;
      made.last[n][j] = FEW && CAUSAL ? position : of.keys - 1;
      made.first[n][j] = HAS_WINDOW ? position - p.left : 0;
    }
  made.all_to = FEW && CAUSAL ? before + first_row / GROUP + 1 : of.keys;
  made.all_from = HAS_WINDOW ? of.keys - 1 - p.left : 0;
  return made;
}

INLINE void scale_and_mask(float (&x)[HEADS8][KEYS16][4], const Queries& q, const Seen& seen, float softcap, int key) {
  float capped = HAS_SOFTCAP ? 1.0f / softcap : 1.0f;
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int m = 0; m < KEYS16; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[n][m][i] *= q.factor[n][i % 2];
        if (HAS_SOFTCAP) x[n][m][i] = softcap * LOG2E * tanh_of(x[n][m][i] * capped);
      }
  if (key < seen.all_from || key + KEYS > seen.all_to) {
    int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int n = 0; n < HEADS8; n++)
#pragma unroll
      for (int m = 0; m < KEYS16; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int at = key + 16 * m + g + i / 2 * 8;
          if (at > seen.last[n][i % 2] || (HAS_WINDOW && at < seen.first[n][i % 2])) x[n][m][i] = none();
        }
  }
}

// --- what a warp has of its rows

struct Sums {
  float at[COLUMNS16][HEADS8][4];          // values: rows 8 n + 2 (lane % 4) + i % 2, columns by `column_of`
  float top[HEADS8][2], total[HEADS8][2];  // the largest score less BIAS, and the sum of this lane's P
};

INLINE int column_of(int tile, int lower) {
  int g = threadIdx.x % WARP / 4;
  return 16 * tile + (FORMAT ? 2 * g + lower : g + 8 * lower);
}

INLINE float biased(float top) { return fabsf(top) < 1048576.0f ? top - BIAS : top; }

// Raise the largest scores where P would be too large, and scale what there is.
INLINE void raise(Sums& sums, const float (&x)[HEADS8][KEYS16][4]) {
  float most[HEADS8][2];
  bool above = false;
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      most[n][j] = fmaxf(x[n][0][j], x[n][0][j + 2]);
#pragma unroll
      for (int m = 1; m < KEYS16; m++) most[n][j] = fmaxf(most[n][j], fmaxf(x[n][m][j], x[n][m][j + 2]));
      above |= most[n][j] - sums.top[n][j] > LATE;
    }
  if (!any_of_warp(above)) return;
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int step = 4; step < WARP; step *= 2) most[n][j] = fmaxf(most[n][j], __shfl_xor_sync(~0u, most[n][j], step));
      float top = fmaxf(sums.top[n][j], biased(most[n][j])), kept = exp2_of(sums.top[n][j] - top);
      sums.top[n][j] = top;
      sums.total[n][j] *= kept;
#pragma unroll
      for (int tile = 0; tile < COLUMNS16; tile++) {
        sums.at[tile][n][j] *= kept;
        sums.at[tile][n][j + 2] *= kept;
      }
    }
}

INLINE void exponentials(u32 (&made)[KEYS16][HEADS8][2], Sums& sums, float (&x)[HEADS8][KEYS16][4]) {
#pragma unroll
  for (int m = 0; m < KEYS16; m++)
#pragma unroll
    for (int n = 0; n < HEADS8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[n][m][i] = exp2_of(x[n][m][i] - sums.top[n][i % 2]);
        sums.total[n][i % 2] += x[n][m][i];
      }
      made[m][n][0] = transposed(narrow_pair(x[n][m][0], x[n][m][1], Made()));
      made[m][n][1] = transposed(narrow_pair(x[n][m][2], x[n][m][3], Made()));
    }
}

INLINE void add_values(Sums& sums, const u32 (&p)[KEYS16][HEADS8][2], u32 tile) {
  int lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < KEYS16; m++) {
    if (FORMAT) {
#pragma unroll
      for (int two = 0; two < COLUMNS16 / 2; two++) {
        Words raw = read_transposed(tile + place(16 * m + lane / 8 % 2 * 8 + lane % 8, 2 * two + lane / 16));
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 a[4];  // bytes of a word are of two keys, each of an even and an odd column
          widen(permuted(raw.at[2 * half], 0x3120), a[0], a[1]);
          widen(permuted(raw.at[2 * half + 1], 0x3120), a[2], a[3]);
#pragma unroll
          for (int n = 0; n < HEADS8; n++) multiply(sums.at[2 * two + half][n], a, p[m][n], Made());
        }
      }
    } else {
#pragma unroll
      for (int one = 0; one < COLUMNS16; one++) {
        Words a = read_transposed(tile + place(16 * m + lane / 16 * 8 + lane % 8, 2 * one + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < HEADS8; n++) multiply(sums.at[one][n], a.at, p[m][n], Made());
      }
    }
  }
}

// --- results

#if HAS_SINKS
INLINE float sink_of(const void* sinks, int kind, int head) {
  float sink = kind == 0   ? ((const float*)sinks)[head]
               : kind == 1 ? widened(((const bf16*)sinks)[head])
                           : widened(((const f16*)sinks)[head]);
  return sink * LOG2E;
}
#endif

// What a row is multiplied by, from its largest score and its sum; these become those with the sink.
INLINE float share_of(float& top, float& total, const void* sinks, int kind, int head, bool whole) {
  float kept = 1.0f;
#if HAS_SINKS
  if (whole) {
    float sink = sink_of(sinks, kind, head), above = fmaxf(top, sink);
    kept = exp2_of(top - above);
    total = total * kept + exp2_of(sink - above);
    top = above;
  }
#endif
  return total > 0.0f ? kept / total : 0.0f;
}

// All sums of the block, which are those of warp 0 then; it stores them.
INLINE void finish(Sums& sums, Shared& s, const Parameters& p, const Span& of, int begin, int kv_head, int first_row,
                   bool whole, i64 slot) {
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float& total = sums.total[n][j];
#pragma unroll
      for (int step = 4; step < WARP; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      if (lane < 4) {
        s.tops[warp][8 * n + 2 * lane + j] = sums.top[n][j];
        s.totals[warp][8 * n + 2 * lane + j] = total;
      }
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int row = 8 * n + 2 * (lane % 4) + j;
      float top = s.tops[0][row], total = 0.0f;
#pragma unroll
      for (int other = 1; other < WARPS; other++) top = fmaxf(top, s.tops[other][row]);
#pragma unroll
      for (int each = 0; each < WARPS; each++) total += s.totals[each][row] * exp2_of(s.tops[each][row] - top);
      float kept = exp2_of(sums.top[n][j] - top);
#pragma unroll
      for (int tile = 0; tile < COLUMNS16; tile++) {
        sums.at[tile][n][j] *= kept;
        sums.at[tile][n][j + 2] *= kept;
      }
      sums.top[n][j] = top;
      sums.total[n][j] = total;
    }
  float4(*handed)[COLUMNS16 * HEADS8][WARP] = (float4(*)[COLUMNS16 * HEADS8][WARP]) s.sums;
  float4* mine = &handed[warp % 2][0][lane];
  auto give = [&]() {
#pragma unroll
    for (int i = 0; i < COLUMNS16 * HEADS8; i++) {
      const float (&x)[4] = sums.at[i / HEADS8][i % HEADS8];
      mine[i * WARP] = make_float4(x[0], x[1], x[2], x[3]);
    }
  };
  auto take = [&](const float4* from) {
#pragma unroll
    for (int i = 0; i < COLUMNS16 * HEADS8; i++) {
      float (&x)[4] = sums.at[i / HEADS8][i % HEADS8];
      float4 other = from[i * WARP];
      x[0] += other.x, x[1] += other.y, x[2] += other.z, x[3] += other.w;
    }
  };
  if (warp >= 2) give();
  __syncthreads();
  if (warp < 2) take(mine);
  if (warp == 1) give();
  __syncthreads();
  if (warp) return;
  take(&handed[1][0][lane]);
  float value_scale = p.value_scale;
#if SCALES
  value_scale *= p.v_scale[SCALES == 2 ? kv_head : 0];
#endif
  __syncwarp();
#pragma unroll
  for (int n = 0; n < HEADS8; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      int in_tile = 8 * n + 2 * (lane % 4) + j, row = first_row + in_tile, head = kv_head * GROUP + row % GROUP;
      float top = sums.top[n][j], total = sums.total[n][j];
      bool there = row < tokens_of(p, of) * GROUP;
      float share = share_of(top, total, p.sinks, p.sinks_kind, there ? head : 0, whole) * value_scale;
#pragma unroll
      for (int tile = 0; tile < COLUMNS16; tile++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++)
          s.sums[in_tile * APART + column_of(tile, lower)] = sums.at[tile][n][2 * lower + j] * share;
      if (there && lane < 4) {
        float lse = total > 0.0f ? top + log2_of(total) : none();
        if (!whole) p.part_lse[slot + in_tile] = lse;
        else if (HAS_LSE) p.lse[begin * p.l_batch + head * p.l_head + row / GROUP * p.l_token] = lse * LN2;
      }
    }
  __syncwarp();
  for (int in_tile = 0; in_tile < ROWS; in_tile++) {
    int row = first_row + in_tile;
    if (row >= tokens_of(p, of) * GROUP) break;
#pragma unroll
    for (int column = 4 * lane; column < D; column += 4 * WARP) {
      float4 value = *(const float4*)&s.sums[in_tile * APART + column];
      if (whole) {
        ELEMENT* to = p.out + begin * p.o_batch + row / GROUP * p.o_token + (kv_head * GROUP + row % GROUP) * p.o_head;
        uint2 made = {narrow_pair(value.x, value.y, ELEMENT()), narrow_pair(value.z, value.w, ELEMENT())};
        *(uint2*)(to + column) = made;
      } else {
        *(float4*)(p.part_out + (slot + in_tile) * D + column) = value;
      }
    }
  }
}

// A row from the sums of its parts, with the sink, by a warp.
INLINE void store_row(const Parameters& p, const float (&x)[VECTORS][4], float top, float total, int begin, int kv_head,
                      int in_head) {
  int lane = threadIdx.x % WARP;
  int head = kv_head * GROUP + in_head % GROUP, token = in_head / GROUP;
  float share = share_of(top, total, p.sinks, p.sinks_kind, head, true);
  ELEMENT* to = p.out + begin * p.o_batch + token * p.o_token + head * p.o_head;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    int column = 4 * (i * WARP + lane);
    if (column >= D) continue;
    uint2 made = {narrow_pair(x[i][0] * share, x[i][1] * share, ELEMENT()),
                  narrow_pair(x[i][2] * share, x[i][3] * share, ELEMENT())};
    *(uint2*)(to + column) = made;
  }
  if (HAS_LSE && lane == 0)
    p.lse[begin * p.l_batch + head * p.l_head + token * p.l_token] = total > 0.0f ? (top + log2_of(total)) * LN2 : none();
}

// The rows of a tile that a sequence has, from their parts `first` to `last` in this order; the warps share the rows.
INLINE void merge_rows(const Parameters& p, const Span& of, int begin, int kv_head, int first_row, int inner, int first,
                       int last) {
  int lane = threadIdx.x % WARP;
  for (int in_tile = threadIdx.x / WARP; in_tile < ROWS; in_tile += WARPS) {
    if (first_row + in_tile >= tokens_of(p, of) * GROUP) break;
    float top = LEAST, total = 0.0f, x[VECTORS][4];
#pragma unroll
    for (int i = 0; i < 4 * VECTORS; i++) x[i / 4][i % 4] = 0.0f;
    for (int from = first; from <= last; from += AT_ONCE) {
      float lse[AT_ONCE];
      float4 values[AT_ONCE][VECTORS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        bool there = from + i <= last;
        i64 slot = ((i64)((from + i) * 2 + (from + i == first)) * inner + blockIdx.x % inner) * ROWS + in_tile;
        lse[i] = there ? p.part_lse[slot] : none();
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
          int column = 4 * (j * WARP + lane);
          values[i][j] = there && column < D ? *(const float4*)(p.part_out + slot * D + column) : make_float4(0, 0, 0, 0);
        }
      }
      float above = top;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) above = fmaxf(above, lse[i]);
      float kept = exp2_of(top - above);
      top = above;
      total *= kept;
#pragma unroll
      for (int j = 0; j < 4 * VECTORS; j++) x[j / 4][j % 4] *= kept;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        float weight = exp2_of(lse[i] - top);
        total += weight;
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
          x[j][0] += values[i][j].x * weight;
          x[j][1] += values[i][j].y * weight;
          x[j][2] += values[i][j].z * weight;
          x[j][3] += values[i][j].w * weight;
        }
      }
    }
    store_row(p, x, top, total, begin, kv_head, first_row + in_tile);
  }
}

// Whether this block is the last of so many that have come here with the counter. What warp 0 of each wrote is seen by all
// threads of the last one.
INLINE bool is_last_of(int others, u32* counter) {
  __shared__ bool is_last;
  if (threadIdx.x < WARP) {
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) {
      bool last = atomicAdd(counter, 1u) == (u32)others;
      if (last) *counter = 0;
      __threadfence();
      is_last = last;
    }
  }
  __syncthreads();
  bool last = is_last;
  if (last) __threadfence();
  return last;
}

// Results of sequences without keys, each by the blocks of one part.
INLINE void store_empty(const Parameters& p, int kv_head, int of_block, int inner, int program, int parts) {
  for (int from = program; from < all_of(p); from += parts * WARP) {
    int mine = from + threadIdx.x % WARP * parts;
    u32 empty = __ballot_sync(~0u, mine < all_of(p) && span_of(p, mine).units == 0);
    for (; empty; empty &= empty - 1) {
      int one = from + __popc((empty & (0 - empty)) - 1) * parts;
      Span of = span_of(p, one);
      merge_rows(p, of, begin_of(of, one), kv_head, first_row_of(p, one, of_block), inner, 0, -1);
    }
  }
}

// --- the walk

template <bool MERGES> INLINE void decode(const Parameters& p, u32* counters) {
  wait_for_launches();  // so that `paged_merge`, which begins next, may read lengths before it waits
  begin_next_launch();
  DYNAMIC_SHARED(memory, SHARED_BYTES);
  Shared& s = *(Shared*)memory;
  int inner = KV_HEADS * tiles_of_block(p), parts = gridDim.x / inner, program = blockIdx.x / inner;
  int kv_head = blockIdx.x % inner / tiles_of_block(p), first_row = blockIdx.x % p.tiles * ROWS, warp = threadIdx.x / WARP;
  u32 ring = address_in_shared(s.ring[warp]);
  Part part = part_of_program(p, program, parts);
  const char *k = p.k + kv_head * p.k_head, *v = p.v + kv_head * p.v_head;
  Ahead ahead;
  ahead.begin(p, part);
  int ready = 0, free = 0;  // places in the ring
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    ahead.copy(p, part, k, v, ring + free * 2 * TILE);
    copies_end();
    free++;
  }
  int at = part.first_at;
  for (int one = part.first; one < part.last; one++) {
    Segment of = segment(p, one, at, part);
    if (of.low >= of.high) continue;
#if RAGGED
    int begin = of.of.first_token, first_row = one % p.tiles * ROWS;
#else
    int begin = one;
#endif
    Queries q;
    load_queries(q, p, of.of, begin, kv_head, first_row);
    Seen seen = seen_of(p, of.of, first_row);
    Sums sums;
#pragma unroll
    for (int n = 0; n < HEADS8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums.top[n][i % 2] = LEAST;
        sums.total[n][i % 2] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < COLUMNS16; tile++) sums.at[tile][n][i] = 0.0f;
      }
    for (int unit = of.low; unit < of.high; unit++) {
      copies_wait<STAGES - 2>();
      __syncwarp();
      ahead.copy(p, part, k, v, ring + free * 2 * TILE);
      copies_end();
      free = free == STAGES - 1 ? 0 : free + 1;
      u32 tile = ring + ready * 2 * TILE;
      ready = ready == STAGES - 1 ? 0 : ready + 1;
      float x[HEADS8][KEYS16][4];
      score(x, q, tile);
      scale_and_mask(x, q, seen, p.softcap, of.of.start + (unit * WARPS + warp) * KEYS);
      raise(sums, x);
      u32 made[KEYS16][HEADS8][2];
      exponentials(made, sums, x);
      add_values(sums, made, tile + TILE);
    }
    bool whole = of.low == 0 && of.high == of.of.units;
    i64 slot = ((i64)(program * 2 + (of.low == 0)) * inner + blockIdx.x % inner) * ROWS;
    finish(sums, s, p, of.of, begin, kv_head, first_row, whole, slot);
    if (MERGES && !whole) {
      // `at` is the end of its keys on the line, and parts are equal.
      int each = part.end - part.begin, first = (at - of.of.units) / each, last = (at - 1) / each;
      if (is_last_of(last - first, counters + (i64)one * inner + blockIdx.x % inner))
        merge_rows(p, of.of, begin, kv_head, first_row, inner, first, last);
    }
  }
  copies_wait<0>();
  if (MERGES) store_empty(p, kv_head, first_row, inner, program, parts);
}

#if RAGGED
// Which row a number means: heads of a token are neighbours.
struct Row {
  int one, kv_head, in_head;  // in_head: among the rows of a KV head of its sequence
  bool there;
};

INLINE Row row_of(const Parameters& p, int number) {
  int token = number / (GROUP * KV_HEADS), head = number % (GROUP * KV_HEADS), sequence = 0;
  for (int at = threadIdx.x % WARP; at < p.num_seqs; at += WARP) sequence += p.cu_seqlens_q[at + 1] <= token;
  Span of;
  of.sequence = min(sum_of_warp(sequence), p.num_seqs - 1);
  find_tokens(p, of);
  int in_sequence = token - of.first_token;
  bool there = in_sequence >= 0 && in_sequence < of.tokens;
  int in_head = there ? in_sequence * GROUP + head % GROUP : 0;
  return {of.sequence * p.tiles + in_head / ROWS, head / GROUP, in_head, there};
}
#endif

// A row of a sequence from its parts, weighed by 2^(lse - top), with the sink. `each` warps share them.
INLINE void merge(const Parameters& p, int parts, int each) {
  __shared__ float sums[MERGERS][D], totals[MERGERS];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, rows = p.tokens * GROUP * KV_HEADS;
#if RAGGED
  Row row = row_of(p, blockIdx.x * (MERGERS / each) + warp / each);
  int merged = row.one;
  bool there = row.there;
#else
  int number = blockIdx.x * (MERGERS / each) + warp / each, merged = number / rows;
  bool there = merged < p.num_seqs;
  if (!there) merged = 0;
#endif
  Span of = span_of(p, merged);
  int cost = cost_of_part(p, parts), at = 0;
  for (int one = lane; one < merged; one += WARP) at += cost_of(p, one);
  at = sum_of_warp(at) + SETUP;
  int first = at / cost, last = (at + of.units - 1) / cost;
  if (of.keys > 0 && first == last) there = false;  // `paged_decode` wrote the result
  if (of.keys <= 0) last = first - 1;
  begin_next_launch();
  wait_for_launches();
#if RAGGED
  int kv_head = row.kv_head, in_head = row.in_head;
  i64 inner = KV_HEADS, place = kv_head * ROWS + in_head % ROWS;
#else
  // Rows of a KV head are neighbours: (KV head, query token, head of the group).
  int row = number % rows, kv_head = row / (p.tokens * GROUP), in_head = row % (p.tokens * GROUP);
  i64 inner = KV_HEADS * p.tiles, place = (kv_head * p.tiles + in_head / ROWS) * ROWS + in_head % ROWS;
#endif
  auto slot = [&](int of_part) { return (of_part * 2 + (of_part == first)) * inner * ROWS + place; };
  float top = LEAST, total = 0.0f, x[VECTORS][4];
#pragma unroll
  for (int i = 0; i < 4 * VECTORS; i++) x[i / 4][i % 4] = 0.0f;
  if (there) {
    float early_lse[EARLY];
    float4 early[EARLY][VECTORS];
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      int one = first + warp % each + i * each;
      early_lse[i] = one <= last ? p.part_lse[slot(one)] : none();
#pragma unroll
      for (int j = 0; j < VECTORS; j++) {
        int column = 4 * (j * WARP + lane);
        bool here = one <= last && column < D;
        early[i][j] = here ? *(const float4*)(p.part_out + slot(one) * D + column) : make_float4(0, 0, 0, 0);
      }
    }
    // A sequence that begins in a part and goes on is in its second slot.
    for (int one = first + lane; one <= last; one += WARP) top = fmaxf(top, p.part_lse[slot(one)]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      float weight = exp2_of(early_lse[i] - top);
      total += weight;
#pragma unroll
      for (int j = 0; j < VECTORS; j++) {
        x[j][0] += early[i][j].x * weight;
        x[j][1] += early[i][j].y * weight;
        x[j][2] += early[i][j].z * weight;
        x[j][3] += early[i][j].w * weight;
      }
    }
#pragma unroll 4
    for (int one = first + warp % each + EARLY * each; one <= last; one += each) {
      float weight = exp2_of(p.part_lse[slot(one)] - top);
      total += weight;
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        if (4 * (i * WARP + lane) >= D) continue;
        float4 value = *(const float4*)(p.part_out + slot(one) * D + 4 * (i * WARP + lane));
        x[i][0] += value.x * weight;
        x[i][1] += value.y * weight;
        x[i][2] += value.z * weight;
        x[i][3] += value.w * weight;
      }
    }
  }
  if (each > 1) {
    if (lane == 0) totals[warp] = total;
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (4 * (i * WARP + lane) < D) sums[warp][4 * (i * WARP + lane) + j] = x[i][j];
    __syncthreads();
    if (warp) return;
    for (int other = 1; other < MERGERS; other++) {
      total += totals[other];
#pragma unroll
      for (int i = 0; i < VECTORS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (4 * (i * WARP + lane) < D) x[i][j] += sums[other][4 * (i * WARP + lane) + j];
    }
  }
  if (!there) return;
  store_row(p, x, top, total, begin_of(of, merged), kv_head, in_head);
}

struct MergeParameters : Parameters {
  int parts, each;
};
struct MergingParameters : Parameters {
  u32* counters;  // zeros, for each sequence (or tile of rows) those of the blocks of a part
};

#ifdef KERNELHUB_EMULATED
INLINE void paged_decode(const Parameters& p) { decode<false>(p, nullptr); }
INLINE void paged_decode_merging(const MergingParameters& p) { decode<true>(p, p.counters); }
INLINE void paged_merge(const MergeParameters& p) { merge(p, p.parts, p.each); }
EMULATED(paged_decode, Parameters)
EMULATED(paged_decode_merging, MergingParameters)
EMULATED(paged_merge, MergeParameters)
#else
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) paged_decode(const __grid_constant__ Parameters p) {
  decode<false>(p, nullptr);
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_decode_merging(const __grid_constant__ MergingParameters p) {
  decode<true>(p, p.counters);
}
extern "C" __global__ void __launch_bounds__(MERGERS* WARP) paged_merge(const __grid_constant__ MergeParameters p) {
  merge(p, p.parts, p.each);
}
#endif
