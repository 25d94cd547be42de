// Positions of the K largest values of each row, ascending: a block has a row.
//
//   key = the value as an unsigned integer of the same order; 0 for -inf, which is never chosen, the largest for NaN
//   digits of 11, 11 and 10 bits, the highest first: count the keys that start with the digits found so far by their next
//   digit; that at which counts, summed from the largest, reach what is left of K is found
//   chosen are the keys above the one found, and of those equal to it as many as are left, the first ones
//
// Keys that start with the first digit found are kept in shared memory, if they fit; else the row is read again.
//
// Defined by the host: K.
#include "reduce.h"

struct Parameters {
  const float* logits;
  const int *starts, *ends;  // or null
  int* out;
  i64 columns;
  i64 l_row, l_column, start_step, end_step, o_row, o_column;
};

constexpr int N = 4;  // elements of a vector
constexpr int BINS = 2048, KEPT = 4096;

struct Room {
  u32 bins[BINS];
  u32 kept[KEPT];
  u32 warps[WARP];
  u32 digit, above, inside, held;
};

struct Found {
  u32 key;   // larger ones are chosen
  u32 left;  // of those equal to it the first so many
};

INLINE u32 key_of(float x) {
  if (x != x) return ~0u;
  u32 key = ordered(x);
  return key == 0x007FFFFF ? 0 : key;  // of -inf
}

// Elements of a row, of which the first `skipped` are not the row's: `at` is aligned, if it is read in vectors.
template <bool VECTORS> struct Row {
  const float* at;
  i64 step;
  u32 skipped, count;

  INLINE_METHOD u32 key(u32 i) const { return i < count && i >= skipped ? key_of(at[(i64)i * step]) : 0; }

  // N neighbours' keys, 0 for those that are not the row's.
  INLINE_METHOD void keys(u32 from, u32 (&made)[N]) const {
    if (VECTORS && from + N <= count) {
      Vector<float, N> some = *(const Vector<float, N>*)(at + from);
#pragma unroll
      for (int j = 0; j < N; j++) made[j] = from + j < skipped ? 0 : key_of(some.at[j]);
    } else {
#pragma unroll
      for (int j = 0; j < N; j++) made[j] = key(from + j);
    }
  }

  // Calls f with every key but 0. A thread reads several vectors before it uses the first.
  template <class F> INLINE_METHOD void each(F f) const {
    constexpr int AHEAD = 4;
    u32 pace = N * blockDim.x;
    for (u32 first = 0; first < count; first += AHEAD * pace) {
      u32 some[AHEAD][N];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) keys(first + i * pace + N * threadIdx.x, some[i]);
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
          if (some[i][j]) f(some[i][j]);
    }
  }
};

// Of the keys counted in `bins` the one at place `left` from the largest: its digit, how many have larger ones, and how
// many this one: 0 if there are fewer keys. Clears `bins`.
INLINE void choose_digit(Room& room, u32 left) {
  int each = BINS / (int)blockDim.x, last = BINS - 1 - (int)threadIdx.x * each;  // thread 0 has the largest digits
  if (threadIdx.x == 0) room.inside = 0;
  u32 mine = 0;
  for (int i = 0; i < each; i++) mine += room.bins[last - i];
  u32 total, before = sum_before(mine, room.warps, total);
  if (before < left && before + mine >= left) {
    int bin = last;
    while (before + room.bins[bin] < left) before += room.bins[bin--];
    room.digit = bin;
    room.above = before;
    room.inside = room.bins[bin];
  }
  for (int i = 0; i < each; i++) room.bins[last - i] = 0;
  __syncthreads();
}

template <bool VECTORS> INLINE Found find(const Row<VECTORS>& row, Room& room) {
  for (int i = threadIdx.x; i < BINS; i += blockDim.x) room.bins[i] = 0;
  if (threadIdx.x == 0) room.held = 0;
  __syncthreads();
  row.each([&](u32 key) { atomicAdd(&room.bins[key >> 21], 1u); });
  __syncthreads();
  u32 left = K;
  choose_digit(room, left);
  if (room.inside == 0) return {0, 0};
  u32 prefix = room.digit, inside = room.inside;
  left -= room.above;
  if (inside == left) return {(prefix << 21) - (prefix != 0), 0};

  bool fits = inside <= KEPT;
  row.each([&](u32 key) {
    if (key >> 21 != prefix) return;
    atomicAdd(&room.bins[key >> 10 & 2047], 1u);
    if (fits) room.kept[atomicAdd(&room.held, 1u)] = key;
  });
  __syncthreads();
  choose_digit(room, left);
  prefix = prefix << 11 | room.digit;
  left -= room.above;
  if (room.inside == left) return {(prefix << 10) - (prefix != 0), 0};

  auto count = [&](u32 key) {
    if (key >> 10 == prefix) atomicAdd(&room.bins[key & 1023], 1u);
  };
  if (fits) {
    for (u32 i = threadIdx.x; i < inside; i += blockDim.x) count(room.kept[i]);
  } else {
    row.each(count);
  }
  __syncthreads();
  choose_digit(room, left);
  return {prefix << 10 | room.digit, left - room.above};
}

template <bool VECTORS> INLINE void select(const Parameters& p) {
  __shared__ Room room;
  i64 which = blockIdx.x;
  i64 start = p.starts ? p.starts[which * p.start_step] : 0, end = p.ends ? p.ends[which * p.end_step] : p.columns;
  start = start < 0 ? 0 : start;
  end = end > p.columns ? p.columns : end;
  u32 skipped = VECTORS ? (u32)(start % N) : 0, count = end > start ? (u32)(end - start) + skipped : 0;
  Row<VECTORS> row = {p.logits + which * p.l_row + (start - skipped) * p.l_column, p.l_column, skipped, count};
  Found found = {0, 0};
  if (end - start > K) found = find(row, room);

  int* out = p.out + which * p.o_row;
  u32 above = 0, equal = 0;
  for (u32 first = 0; first < count; first += N * blockDim.x) {
    u32 from = first + N * threadIdx.x;
    u32 keys[N];
    row.keys(from, keys);
    u32 mine = 0;  // those above in the low half, equal ones in the high half
#pragma unroll
    for (int j = 0; j < N; j++) mine += keys[j] > found.key ? 1 : keys[j] == found.key ? 1 << 16 : 0;
    u32 total, before = sum_before(mine, room.warps, total);
    u32 above_me = above + (before & 0xFFFF), equal_to_me = equal + (before >> 16);
#pragma unroll
    for (int j = 0; j < N; j++) {
      u32 place = above_me + (equal_to_me < found.left ? equal_to_me : found.left);
      bool is_above = keys[j] > found.key, is_equal = keys[j] == found.key;
      if (is_above || (is_equal && equal_to_me < found.left)) out[place * p.o_column] = (int)(from + j - skipped);
      above_me += is_above;
      equal_to_me += is_equal;
    }
    above += total & 0xFFFF;
    equal += total >> 16;
  }
  u32 written = above + (equal < found.left ? equal : found.left);
  for (i64 i = (i64)written + threadIdx.x; i < K; i += blockDim.x) out[i * p.o_column] = -1;
}

extern "C" __global__ void __launch_bounds__(1024) select_elements(const Parameters p) { select<false>(p); }
extern "C" __global__ void __launch_bounds__(1024) select_vectors(const Parameters p) { select<true>(p); }
EMULATED(select_elements, Parameters)
EMULATED(select_vectors, Parameters)
