// Decode of latent attention over pages of 64 tokens: 64 rows of queries, two warpgroups that multiply, four warps that
// load.
//
// Rows are (query token, head) of a sequence, flattened. Pages come in pairs. Warpgroup 0 scores the even page and holds
// the left 256 columns of the sums, warpgroup 1 the odd page and the right 256. Each hands its probabilities to the other
// through shared memory, so that one softmax runs while the other warpgroup multiplies (FlashMLA's seesaw schedule,
// DeepSeek 2025):
//
//   0: m0 = max(m1, max S0), alpha = 2^(m1 - m0)          -> BEGUN
//   1: m1 = max(m0, max S1), beta  = 2^(m0 - m1)          -> SCALED;  P1 -> ODD
//   0: left  = left * alpha + P0 V0l;  P0 * beta          -> EVEN;    left = left * beta + P1 V1l
//   1: right = right * alpha * beta + P1 V1r + (P0 beta) V0r
//
// A page is loaded in two halves, each 64 columns at a time. Left halves are released by warpgroup 0 and right ones by
// warpgroup 1, the last to read them. A loading warp asks L2 for its half of the page after next before it waits for the
// place of the next. P1 takes the memory of the queries' rotary part, which is in registers by then.
//
// Which program walks which keys is worked out by every warp from the lengths: a sequence of n pairs costs SETUP + n, one
// of no keys nothing. The costs end to end are a line, which is cut into equal parts. `mla_merge` merges what several
// parts share, and writes the results of sequences without keys.
//
// What a page holds past a sequence's end may be NaN: those scores are masked, and those rows of the values are cleared.
//
// Defined by the host: HEADS, CAUSAL, HAS_LSE, HAS_SINKS, PREFETCH (whether L2 is asked for pages ahead). The sinks are
// float32 (kind 0), bfloat16 (1) or float16 (2). What may be tuned: SCORED, how many of the nine products of the next even
// page come before the odd page's left half is released; ONCE, up to how many tiles L2 is told that pages are read once.
#include "warpgroup.h"

#ifndef SCORED
#define SCORED 4
#endif
#ifndef ONCE
#define ONCE 1
#endif

constexpr int LATENT = 512, TILE = 8192, PAGE = 64;
constexpr int PAIR = 128;        // tokens
constexpr int SETUP = 2;         // pairs' worth of time to begin and end a sequence
constexpr int FEWEST = 2;        // the shortest part
constexpr float LEAST = -1e30f;  // below every score, and finite
constexpr float LN2 = 0.6931471805599453f;
#if HAS_SINKS
constexpr float LOG2E = 1.4426950408889634f;
#endif

#if HAS_SINKS
INLINE float sink_of(const void* sinks, int kind, int head) {
  float sink = kind == 0   ? ((const float*)sinks)[head]
               : kind == 1 ? widened(((const bf16*)sinks)[head])
                           : widened(((const f16*)sinks)[head]);
  return sink * LOG2E;
}
#endif

// --- the schedule

struct Part {
  int begin, end, first, last, first_at;
};

INLINE int sum_of_warp(int x) { return __reduce_add_sync(~0u, x); }

INLINE int keys_of(const int* seq_lens, int sequence, int room) {
  int keys = seq_lens[sequence];
  return min(max(keys, 0), room);
}

INLINE int pairs_of(int keys) { return (keys + PAIR - 1) / PAIR; }

INLINE int cost_of(const int* seq_lens, int sequence, int num_seqs, int room) {
  int pairs = sequence < num_seqs ? pairs_of(keys_of(seq_lens, sequence, room)) : 0;
  return pairs ? pairs + SETUP : 0;
}

// The length of a part on the line of costs.
INLINE int cost_of_part(int parts, const int* seq_lens, int num_seqs, int room) {
  int total = 0;
  for (int at = threadIdx.x % WARP; at < num_seqs; at += WARP) total += cost_of(seq_lens, at, num_seqs, room);
  total = sum_of_warp(total);
  return max((total + parts - 1) / parts, FEWEST);
}

INLINE Part part_of_program(int part, int parts, const int* seq_lens, int num_seqs, int room) {
  int each = cost_of_part(parts, seq_lens, num_seqs, room), before = 0, lane = threadIdx.x % WARP;
  Part made = {part * each, part * each + each, 0, 0, 0};
  for (int start = 0; start < num_seqs; start += WARP) {
    int cost = cost_of(seq_lens, start + lane, num_seqs, room), ends = cost;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
      int other = __shfl_up_sync(~0u, ends, step);
      if (lane >= step) ends += other;
    }
    ends += before;
    bool there = start + lane < num_seqs, passed = there && ends <= made.begin;
    made.first += __popc(__ballot_sync(~0u, passed));
    made.last += __popc(__ballot_sync(~0u, there && ends - cost < made.end));
    made.first_at += sum_of_warp(passed ? cost : 0);
    before = __shfl_sync(~0u, ends, WARP - 1);
  }
  return made;
}

// What a part walks of a sequence at place `at`, which becomes that of the next.
struct Segment {
  int keys, low, high;
};

INLINE Segment segment(const int* seq_lens, int sequence, int& at, const Part& part, int room) {
  int keys = keys_of(seq_lens, sequence, room), pairs = pairs_of(keys);
  Segment made = {keys, max(part.begin - at - SETUP, 0), min(part.end - at - SETUP, pairs)};
  at += pairs + min(pairs, 1) * SETUP;
  return made;
}

// --- shared memory

// Barriers: of each 64 columns of the four halves of pages (even left, even right, odd left, odd right; right halves
// have the rotary part, too), of the places of these, of the queries, and of what the warpgroups hand to each other.
enum { FULL = 0, EMPTY = 20, FULL_Q = 24, EMPTY_Q, BEGUN, SCALED, EVEN, ODD, BARRIERS };
enum { M0, ALPHA, BETA, M1, SUM0, SUM1, VECTORS };

struct Shared {
  char q[9][TILE];
  char k[2][9][TILE];
  char p_even[TILE];
  float vectors[VECTORS][64];
  u64 barriers[BARRIERS];
};

static_assert(sizeof(Shared) == 28 * TILE + VECTORS * 256 + BARRIERS * 8 && sizeof(Shared) == 231152,
              "the adapter asks for so much");

struct Parameters {
  bf16* out;
  float *lse, *part_out, *part_lse;
  const void* sinks;
  const int *block_table, *seq_lens;
  const char* cache;
  float scale;
  int tokens, q_rows, page_rows, num_rows, last_page, room, sinks_kind;
  i64 stride_table, row_bytes, o_batch, o_token, o_head, l_batch, l_head, l_token;
};

// Addresses in shared memory.
constexpr u32 Q = 0, K = 9 * TILE, P_EVEN = 27 * TILE, P_ODD = Q + 8 * TILE, BARS = 28 * TILE + VECTORS * 256;
INLINE u32 q_tile(u32 base, int tile) { return base + Q + tile * TILE; }
INLINE u32 k_tile(u32 base, int page, int tile) { return base + K + (page * 9 + tile) * TILE; }
INLINE u32 bar_of(u32 base, int at) { return base + BARS + 8 * at; }

// --- loads

template <int ODD_PAGE, int RIGHT>
INLINE void load_pages(u32 base, const TensorMap* q_map, const TensorMap* kv_map, const Parameters& p, const Part& part,
                       int row, bool once) {
  constexpr int HALF = ODD_PAGE * 2 + RIGHT;
  int lane = threadIdx.x % WARP, done = 0, walked = 0, at = part.first_at;
  for (int sequence = part.first; sequence < part.last; sequence++) {
    Segment of = segment(p.seq_lens, sequence, at, part, p.room);
    if (of.low >= of.high) continue;
    if (ODD_PAGE && !RIGHT) {
      barrier_wait(bar_of(base, EMPTY_Q), (walked & 1) ^ 1);
      if (lane == 0) {
        u32 full = bar_of(base, FULL_Q);
        barrier_expect(full, 9 * TILE);
#pragma unroll
        for (int i = 0; i < 9; i++) tma_load(q_tile(base, i), q_map, 64 * i, sequence * p.q_rows + row, full);
      }
    }
    const int* pages = p.block_table + sequence * p.stride_table;
    int count = (of.keys + PAGE - 1) / PAGE;
    for (int pair = of.low; pair < of.high; pair++) {
      int index = pair * 2 + ODD_PAGE, from = p.num_rows;  // an odd page past the end: TMA fills it with zeros
      if (index < count) {
        from = min(max(pages[index], 0), p.last_page) * p.page_rows;
        if (PREFETCH) {  // half of the rows
          const char* line = p.cache + (i64)(from + RIGHT * 32 + lane) * p.row_bytes;
#pragma unroll
          for (int i = 0; i < 9; i++) prefetch_line(line + i * 128);
        }
      }
      barrier_wait(bar_of(base, EMPTY + HALF), (done & 1) ^ 1);
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < 4 + RIGHT; i++) {
          u32 full = bar_of(base, FULL + HALF * 5 + i);
          barrier_expect(full, TILE);
          u32 to = k_tile(base, ODD_PAGE, RIGHT * 4 + i);
          if (once) tma_load_once(to, kv_map, RIGHT * 256 + 64 * i, from, full);
          else tma_load(to, kv_map, RIGHT * 256 + 64 * i, from, full);
        }
      }
      done++;
    }
    walked++;
  }
}

// --- scores

// Four products of 64 columns, once they have come.
template <bool FIRST> INLINE void score_tile(float (&x)[32], u32 base, int page, int tile, int barrier, u32 phase) {
  barrier_wait(bar_of(base, barrier), phase);
  products_begin();
  base = afresh(base);
  u32 q = operand_along(base) + q_tile(0, tile) / 16, k = operand_along(base) + k_tile(0, page, tile) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) multiply_64(x, q + 2 * i, k + 2 * i, !(FIRST && i == 0));
}

INLINE void score_rope(float (&x)[32], const u32 (&rope)[16], u32 base, int page, int barrier, u32 phase) {
  barrier_wait(bar_of(base, barrier), phase);
  products_begin();
  products_begin();
  u32 k = operand_along(afresh(base)) + k_tile(0, page, 8) / 16;
#pragma unroll
  for (int i = 0; i < 4; i++) multiply_64(x, rope + 4 * i, k + 2 * i);
}

// The scores of a page, not waited for; the half that is released first comes first. Of the even one products FROM to TO.
template <int FROM, int TO> INLINE void score_even(float (&x)[32], const u32 (&rope)[16], u32 base, int done) {
  u32 phase = done & 1;
#pragma unroll
  for (int i = FROM; i < TO; i++) {
    if (i == 0) score_tile<true>(x, base, 0, 0, FULL, phase);
    else if (i < 8) score_tile<false>(x, base, 0, i, FULL + i + i / 4, phase);
    else score_rope(x, rope, base, 0, FULL + 9, phase);
  }
  products_end();
}

INLINE void score_odd(float (&x)[32], const u32 (&rope)[16], u32 base, int done) {
  constexpr int LEFT = FULL + 10, RIGHT = LEFT + 5;
  u32 phase = done & 1;
  score_tile<true>(x, base, 1, 4, RIGHT, phase);
#pragma unroll
  for (int i = 1; i < 4; i++) score_tile<false>(x, base, 1, 4 + i, RIGHT + i, phase);
  score_rope(x, rope, base, 1, RIGHT + 4, phase);
#pragma unroll
  for (int i = 0; i < 4; i++) score_tile<false>(x, base, 1, i, LEFT + i, phase);
  products_end();
}

// --- softmax; a thread has two rows, `row` and 8 below, and of each the columns 8 j + 2 (lane % 4) + {0, 1}

INLINE float exp2_of(float x) {
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
  return made;
}

INLINE float largest_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
INLINE float sum_of_four(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

struct Rows {
  float upper, lower;
};

// Scores in units of log2, -inf where a row does not see a key.
INLINE void scale_and_mask(float (&x)[32], float scale, int key, int keys, int unseen, int position_upper,
                           int position_lower) {
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] *= scale;
  if (key + PAGE > unseen) {
    int column = key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      int last = CAUSAL ? (i & 2 ? position_lower : position_upper) : keys - 1;
      if (column + 8 * (i / 4) + i % 2 > last) x[i] = -__int_as_float(0x7F800000);
    }
  }
}

INLINE Rows largest(const float (&x)[32]) {
  Rows top = {x[0], x[2]};
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    top.upper = fmaxf(top.upper, fmaxf(x[i], x[i + 1]));
    top.lower = fmaxf(top.lower, fmaxf(x[i + 2], x[i + 3]));
  }
  return {largest_of_four(top.upper), largest_of_four(top.lower)};
}

// x becomes 2^(x - m); their sums of this thread.
INLINE Rows exponentials(float (&x)[32], Rows m) {
  Rows sums = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    x[i] = exp2_of(x[i] - m.upper);
    x[i + 1] = exp2_of(x[i + 1] - m.upper);
    x[i + 2] = exp2_of(x[i + 2] - m.lower);
    x[i + 3] = exp2_of(x[i + 3] - m.lower);
    sums.upper += x[i] + x[i + 1];
    sums.lower += x[i + 2] + x[i + 3];
  }
  return sums;
}

// As an operand of four products of 16 keys.
INLINE void as_operand(const float (&x)[32], u32 (&p)[16]) {
#pragma unroll
  for (int i = 0; i < 16; i++) p[i] = narrow_pair(x[2 * i], x[2 * i + 1], bf16());
}

INLINE void store_probabilities(const u32 (&p)[16], u32 tile, int warp) {
#pragma unroll
  for (int i = 0; i < 4; i++) store_operand(p + 4 * i, tile, 16 * warp, i);
  fence_async();
}

INLINE void scale_sums(float (&sums)[128], Rows factor) {
  if (__any_sync(~0u, factor.upper != 1.0f || factor.lower != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 128; i += 4) {
      sums[i] *= factor.upper;
      sums[i + 1] *= factor.upper;
      sums[i + 2] *= factor.lower;
      sums[i + 3] *= factor.lower;
    }
  }
}

INLINE void put_rows(Shared& s, int vector, int row, Rows value) {
  if (threadIdx.x % 4 == 0) {
    s.vectors[vector][row] = value.upper;
    s.vectors[vector][row + 8] = value.lower;
  }
}
INLINE Rows get_rows(const Shared& s, int vector, int row) {
  volatile const float* from = s.vectors[vector];
  return {from[row], from[row + 8]};
}

// --- values

INLINE void multiply_values(float (&sums)[128], const u32 (&p)[16], u32 base, u32 values) {
  u32 v = operand_across(afresh(base)) + values / 16;
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; i++) multiply_256(sums, p + 4 * i, v + 128 * i);
  products_end();
}

INLINE void multiply_values(float (&sums)[128], u32 p, u32 base, u32 values) {
  base = afresh(base);
  u32 v = operand_across(base) + values / 16, left = operand_along(base) + p / 16;
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; i++) multiply_256(sums, left + 2 * i, v + 128 * i);
  products_end();
}

// Zeros in the place of values past a sequence's end, `tail` tokens from the pair's first. Both warpgroups have scored.
INLINE void clear_after(Shared& s, int tail) {
  sync_threads_of<256>(1);
  int thread = threadIdx.x % 256;
#pragma unroll
  for (int page = 0; page < 2; page++) {
    int first = tail - page * PAGE;
    if (first > 0 && first < PAGE) {
      // 16 bytes at a time: of 8 tiles, rows from `first` on
      for (int at = thread; at < (PAGE - first) * 64; at += 256) {
        int row = first + at / 64;
        *(uint4*)(&s.k[page][at % 64 / 8][row * 128 + at % 8 * 16]) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  fence_async();
  sync_threads_of<256>(1);
}

// --- results

template <int RIGHT>
INLINE void store_rows(const float (&sums)[128], Rows m, Rows total, const Parameters& p, int sequence, int first_row,
                       int row, bool whole, i64 place) {
  int lane = threadIdx.x % WARP;
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    int in_tile = row + 8 * lower, at = first_row + in_tile;
    if (at >= p.tokens * HEADS) continue;
    float top = lower ? m.lower : m.upper, sum = lower ? total.lower : total.upper, kept = 1.0f;
    int token = at / HEADS, head = at % HEADS;
    if (whole) {
#if HAS_SINKS
      float sink = sink_of(p.sinks, p.sinks_kind, head), above = fmaxf(top, sink);
      kept = exp2_of(top - above);
      sum = sum * kept + exp2_of(sink - above);
      top = above;
#endif
    }
    bool some = sum > 0.0f;
    sum = some ? sum : 1.0f;
    float share = kept / sum;
    if (whole) {
      bf16* out = p.out + sequence * p.o_batch + token * p.o_token + head * p.o_head + RIGHT * 256 + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 32; i++)
        *(u32*)(out + 8 * i) = narrow_pair(sums[4 * i + 2 * lower] * share, sums[4 * i + 2 * lower + 1] * share, bf16());
      if (HAS_LSE && !RIGHT && lane % 4 == 0)
        p.lse[sequence * p.l_batch + head * p.l_head + token * p.l_token] =
            some ? (top + log2f(sum)) * LN2 : -__int_as_float(0x7F800000);
    } else {
      float* part = p.part_out + (place + in_tile) * LATENT + RIGHT * 256 + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 32; i++)
        *(float2*)(part + 8 * i) = make_float2(sums[4 * i + 2 * lower] * share, sums[4 * i + 2 * lower + 1] * share);
      if (!RIGHT && lane % 4 == 0) p.part_lse[place + in_tile] = some ? top + log2f(sum) : -__int_as_float(0x7F800000);
    }
  }
}

// --- the warpgroups that multiply

// Warpgroup 0: a pair of pages, whose scores x are done; the last product is not waited for.
INLINE void step_even(float (&sums)[128], float (&x)[32], Rows& m, Rows& total, Shared& s, u32 base, int row, int warp,
                      int done, int tail) {
  u32 phase = done & 1;
  Rows top = largest(x), m0 = {fmaxf(m.upper, top.upper), fmaxf(m.lower, top.lower)};
  Rows alpha = {exp2_of(m.upper - m0.upper), exp2_of(m.lower - m0.lower)};
  put_rows(s, M0, row, m0);
  put_rows(s, ALPHA, row, alpha);
  barrier_arrive_warp(bar_of(base, BEGUN));
  Rows own = exponentials(x, m0);
  total = {total.upper * alpha.upper + own.upper, total.lower * alpha.lower + own.lower};
  u32 p[16];
  as_operand(x, p);
  if (tail < PAIR) clear_after(s, tail);
  scale_sums(sums, alpha);
  multiply_values(sums, p, base, k_tile(0, 0, 0));
  barrier_wait(bar_of(base, SCALED), phase);
  Rows beta = get_rows(s, BETA, row);
  m = get_rows(s, M1, row);
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] *= i & 2 ? beta.lower : beta.upper;
  u32 handed[16];
  as_operand(x, handed);
  store_probabilities(handed, base + P_EVEN, warp);
  barrier_arrive_warp(bar_of(base, EVEN));
  products_wait<0>(sums);
  keep(p);
  barrier_arrive_warp(bar_of(base, EMPTY + 0));
  scale_sums(sums, beta);
  total = {total.upper * beta.upper, total.lower * beta.lower};
  barrier_wait(bar_of(base, ODD), phase);
  multiply_values(sums, P_ODD, base, k_tile(0, 1, 0));
}

// The same for warpgroup 1; all its products are done.
INLINE void step_odd(float (&sums)[128], float (&x)[32], Rows& m, Rows& total, Shared& s, u32 base, int row, int warp,
                     int done, int tail) {
  u32 phase = done & 1;
  Rows top = largest(x);
  barrier_wait(bar_of(base, BEGUN), phase);
  Rows m0 = get_rows(s, M0, row), alpha = get_rows(s, ALPHA, row);
  m = {fmaxf(m0.upper, top.upper), fmaxf(m0.lower, top.lower)};
  Rows beta = {exp2_of(m0.upper - m.upper), exp2_of(m0.lower - m.lower)};
  put_rows(s, BETA, row, beta);
  put_rows(s, M1, row, m);
  barrier_arrive_warp(bar_of(base, SCALED));
  Rows own = exponentials(x, m), factor = {alpha.upper * beta.upper, alpha.lower * beta.lower};
  total = {total.upper * factor.upper + own.upper, total.lower * factor.lower + own.lower};
  u32 p[16];
  as_operand(x, p);
  store_probabilities(p, base + P_ODD, warp);
  barrier_arrive_warp(bar_of(base, ODD));
  if (tail < PAIR) clear_after(s, tail);
  scale_sums(sums, factor);
  multiply_values(sums, p, base, k_tile(0, 1, 4));
  barrier_wait(bar_of(base, EVEN), phase);
  multiply_values(sums, P_EVEN, base, k_tile(0, 0, 4));
  products_wait<1>(sums);
  keep(p);
  barrier_arrive_warp(bar_of(base, EMPTY + 3));
  products_wait<0>(sums);
  barrier_arrive_warp(bar_of(base, EMPTY + 1));
}

template <int GROUP>
INLINE void attend(Shared& s, u32 base, const Parameters& p, const Part& part, int first_row, i64 place, int slot_rows) {
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP % 4, row = 16 * warp + lane / 4;
  int done = 0, walked = 0, at = part.first_at;
  float sums[128], x[32];
  for (int sequence = part.first; sequence < part.last; sequence++) {
    Segment of = segment(p.seq_lens, sequence, at, part, p.room);
    if (of.low >= of.high) continue;
    int position_upper = of.keys - p.tokens + (first_row + row) / HEADS;
    int position_lower = of.keys - p.tokens + (first_row + row + 8) / HEADS;
    int unseen = CAUSAL ? of.keys - p.tokens + first_row / HEADS + 1 : of.keys;
    barrier_wait(bar_of(base, FULL_Q), walked & 1);
    u32 rope[16];
#pragma unroll
    for (int i = 0; i < 4; i++) load_operand(*(u32(*)[4])(rope + 4 * i), base + P_ODD, 16 * warp, i);
#pragma unroll
    for (int i = 0; i < 128; i++) sums[i] = 0.0f;
    Rows m = {LEAST, LEAST}, total = {0.0f, 0.0f};
    if (GROUP == 0) score_even<0, 9>(x, rope, base, done);
    else score_odd(x, rope, base, done);
    products_wait<0>(x);
    auto masked = [&](int pair) {
      scale_and_mask(x, p.scale, pair * PAIR + GROUP * PAGE, of.keys, unseen, position_upper, position_lower);
    };
    for (int pair = of.low; pair < of.high - 1; pair++) {
      masked(pair);
      if (GROUP == 0) {
        step_even(sums, x, m, total, s, base, row, warp, done, PAIR);
        done++;
        score_even<0, SCORED>(x, rope, base, done);
        products_wait<1>(sums);
        barrier_arrive_warp(bar_of(base, EMPTY + 2));
        if (SCORED < 9) score_even<SCORED, 9>(x, rope, base, done);
      } else {
        step_odd(sums, x, m, total, s, base, row, warp, done, PAIR);
        done++;
        score_odd(x, rope, base, done);
      }
      products_wait<0>(x);
    }
    masked(of.high - 1);
    int tail = of.keys - (of.high - 1) * PAIR;
    if (GROUP == 0) {
      step_even(sums, x, m, total, s, base, row, warp, done, tail);
      products_wait<0>(sums);
      barrier_arrive_warp(bar_of(base, EMPTY + 2));
    } else {
      step_odd(sums, x, m, total, s, base, row, warp, done, tail);
    }
    done++;
    barrier_arrive_warp(bar_of(base, EMPTY_Q));
    Rows own = {sum_of_four(total.upper), sum_of_four(total.lower)};
    put_rows(s, SUM0 + GROUP, row, own);
    sync_threads_of<256>(1);
    Rows other = get_rows(s, SUM1 - GROUP, row);
    total = {own.upper + other.upper, own.lower + other.lower};
    bool whole = of.low == 0 && of.high * PAIR >= of.keys;
    store_rows<GROUP>(sums, m, total, p, sequence, first_row, row, whole, place + (of.low == 0) * slot_rows);
    walked++;
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    mla_decode(TENSOR_MAP(q_map), TENSOR_MAP(kv_map), bf16* out, float* lse, float* part_out, float* part_lse,
               const void* sinks, const int* block_table, const int* seq_lens, const char* cache, float scale, int num_seqs,
               int tokens, int q_rows, int page_rows, int num_rows, int last_page, int room, int tiles, int sinks_kind,
               i64 stride_table, i64 row_bytes, i64 o_batch, i64 o_token, i64 o_head, i64 l_batch, i64 l_head, i64 l_token) {
  follow_launches();
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *(Shared*)memory;
  u32 base = shared_address(memory);
  Parameters p = {out,          lse,       part_out, part_lse,  sinks,    block_table, seq_lens, cache,
                  scale,        tokens,    q_rows,   page_rows, num_rows, last_page,   room,     sinks_kind,
                  stride_table, row_bytes, o_batch,  o_token,   o_head,   l_batch,     l_head,   l_token};
  int tile = blockIdx.x % tiles, program = blockIdx.x / tiles, parts = gridDim.x / tiles;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 20; i++) barrier_begin(bar_of(base, FULL + i), 1);
    for (int i = 0; i < 4; i++) barrier_begin(bar_of(base, EMPTY + i), 4);
    barrier_begin(bar_of(base, FULL_Q), 1);
    barrier_begin(bar_of(base, EMPTY_Q), 8);
    for (int i = BEGUN; i < BARRIERS; i++) barrier_begin(bar_of(base, i), 4);
    fence_barriers();
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&kv_map);
  }
  Part part = part_of_program(program, parts, seq_lens, num_seqs, room);
  __syncthreads();
  int slot_rows = tiles * 64, first_row = tile * 64;
  i64 place = (i64)program * 2 * slot_rows + first_row;
  if (group == 2) {
    give_registers<24>();
    int warp = __shfl_sync(~0u, threadIdx.x / WARP % 4, 0);
    if (warp == 0) load_pages<0, 0>(base, &q_map, &kv_map, p, part, first_row, tiles <= ONCE);
    else if (warp == 1) load_pages<0, 1>(base, &q_map, &kv_map, p, part, first_row, tiles <= ONCE);
    else if (warp == 2) load_pages<1, 0>(base, &q_map, &kv_map, p, part, first_row, tiles <= ONCE);
    else load_pages<1, 1>(base, &q_map, &kv_map, p, part, first_row, tiles <= ONCE);
  } else if (group == 0) {
    take_registers<240>();
    attend<0>(s, base, p, part, first_row, place, slot_rows);
  } else {
    take_registers<240>();
    attend<1>(s, base, p, part, first_row, place, slot_rows);
  }
}

// A row of a sequence from its parts, weighed by 2^(lse - max), with the sink: a warp does 512 / SLICES of its columns.
template <int SLICES>
INLINE void merge_row(bf16* out, float* lse, const float* part_out, const float* part_lse, const void* sinks, int sinks_kind,
                      int head, int first, int last, i64 apart, int row, int slice) {
  constexpr int N = 4 / SLICES;
  int lane = threadIdx.x % WARP;
  float sums[4 * N], m = LEAST, total = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * N; i++) sums[i] = 0.0f;
  // A sequence that begins in a part and goes on is in its second slot.
  for (int part = first + lane; part <= last; part += WARP)
    m = fmaxf(m, part_lse[(part * 2 + (part == first)) * apart + row]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
#pragma unroll 4
  for (int part = first; part <= last; part++) {
    i64 place = (part * 2 + (part == first)) * apart + row;
    float weight = exp2_of(part_lse[place] - m);
    const float4* from = (const float4*)(part_out + place * LATENT) + slice * N * WARP;
#pragma unroll
    for (int i = 0; i < N; i++) {
      float4 value = from[i * WARP + lane];
      sums[4 * i] += value.x * weight;
      sums[4 * i + 1] += value.y * weight;
      sums[4 * i + 2] += value.z * weight;
      sums[4 * i + 3] += value.w * weight;
    }
    total += weight;
  }
  float kept = 1.0f;
#if HAS_SINKS
  float sink = sink_of(sinks, sinks_kind, head), above = fmaxf(m, sink);
  kept = exp2_of(m - above);
  total = total * kept + exp2_of(sink - above);
  m = above;
#endif
  bool some = total > 0.0f;
  float safe = some ? total : 1.0f, share = kept / safe;
#pragma unroll
  for (int i = 0; i < N; i++) {
    uint2 made = {narrow_pair(sums[4 * i] * share, sums[4 * i + 1] * share, bf16()),
                  narrow_pair(sums[4 * i + 2] * share, sums[4 * i + 3] * share, bf16())};
    *(uint2*)(out + ((slice * N + i) * WARP + lane) * 4) = made;
  }
  if (HAS_LSE && lane == 0 && slice == 0) *lse = some ? (m + log2f(safe)) * LN2 : -__int_as_float(0x7F800000);
}

// Merges the parts of `each_block` rows of a sequence: a warp one row after the other, or all four a single row.
extern "C" __global__ void __launch_bounds__(128)
    mla_merge(bf16* out, float* lse, const float* part_out, const float* part_lse, const void* sinks, const int* seq_lens,
              int num_seqs, int rows, int parts, int tiles, int room, int each_block, int sinks_kind, i64 o_batch,
              i64 o_token, i64 o_head, i64 l_batch, i64 l_head, i64 l_token) {
  follow_launches();
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  int blocks = (rows + each_block - 1) / each_block;  // of a sequence
  int sequence = blockIdx.x / blocks, begin = blockIdx.x % blocks * each_block, end = min(begin + each_block, rows);
  int keys = keys_of(seq_lens, sequence, room), pairs = pairs_of(keys);
  int each = cost_of_part(parts, seq_lens, num_seqs, room), at = 0;
  for (int one = lane; one < sequence; one += WARP) at += cost_of(seq_lens, one, num_seqs, room);
  at = sum_of_warp(at) + SETUP;
  int first = at / each, last = (at + pairs - 1) / each;
  if (keys > 0 && first == last) return;  // `mla_decode` wrote the result
  if (keys <= 0) last = first - 1;
  i64 apart = (i64)tiles * 64;
  bool alone = each_block == 1;
  for (int row = begin + (alone ? 0 : warp); row < end; row += 4) {
    int token = row / HEADS, head = row % HEADS;
    bf16* to = out + sequence * o_batch + token * o_token + head * o_head;
    float* of_lse = lse + sequence * l_batch + head * l_head + token * l_token;
    if (alone) merge_row<4>(to, of_lse, part_out, part_lse, sinks, sinks_kind, head, first, last, apart, row, warp);
    else merge_row<1>(to, of_lse, part_out, part_lse, sinks, sinks_kind, head, first, last, apart, row, 0);
  }
}
