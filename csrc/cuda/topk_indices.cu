// Positions of the K largest values of each row, ascending: a row belongs to a block, or to the blocks of a cluster, each
// of which has a slice of it.
//
//   key = the value as an unsigned integer of the same order; 0 for -inf, which is never chosen, the largest for NaN
//   digits of 11, 11 and 10 bits, the highest first: count the keys that start with the digits found so far by their next
//   digit; that at which counts, summed from the largest, reach what is left of K is found
//   chosen are the keys above the one found, and of those equal to it as many as are left, the first ones
//
// A block counts its slice in its own shared memory. Where blocks are a cluster each then adds up the counts of all, so
// that all find the same digit. Keys that start with the first digit are kept in shared memory, if they fit; else the
// slice is read again, from L1 if it is short. For the positions a warp has a stretch of the slice: it counts what
// is chosen there, and once it knows what is chosen before it, writes.
//
// Defined by the host: K.
#include "cluster.h"
#include "reduce.h"

struct Parameters {
  const float* logits;
  const int *starts, *ends;  // or null
  int* out;
  i64 columns;
  i64 l_row, l_column, start_step, end_step, o_row, o_column;
};

constexpr int N = 4;  // elements of a vector
constexpr int BINS = 2048, DIGITS = 3, MOST_BLOCKS = 8;
constexpr int AHEAD = 2;  // vectors that a thread asks for at once; 4 take 64 registers, and are no faster

struct Chosen {
  u32 above, equal;
};

template <bool CLUSTER> struct Room {
  static constexpr u32 KEPT = CLUSTER ? 2048 : 4096;
  // Other blocks read what was counted for one digit while this one counts the next.
  u32 bins[CLUSTER ? DIGITS : 1][BINS];
  u32 sums[CLUSTER ? BINS : 1];
  u32 kept[KEPT];
  u32 warps[WARP];
  Chosen of_warp[WARP], of_block[MOST_BLOCKS];
  u32 digit, above, inside, held;
};

struct Found {
  u32 key;   // larger ones are chosen
  u32 left;  // of those equal to it the first so many
};

INLINE u32 up_to(u32 size, u32 multiple) { return (size + multiple - 1) / multiple * multiple; }

INLINE u32 key_of(float x) {
  if (x != x) return ~0u;
  u32 key = ordered(x);
  return key == 0x007FFFFF ? 0 : key;  // of -inf
}

// A row's blocks, if they are a cluster, or its only one.
template <bool CLUSTER> struct Team;
template <> struct Team<false> {
  static constexpr u32 rank = 0, blocks = 1;
  INLINE_METHOD void sync() const { __syncthreads(); }
  template <typename T> INLINE_METHOD T& in(T& mine, u32) const { return mine; }
};
#if HAS_CLUSTERS
template <> struct Team<true> {
  u32 rank, blocks;
  INLINE_METHOD Team() : rank(rank_in_cluster()), blocks(blocks_of_cluster()) {}
  INLINE_METHOD void sync() const { sync_cluster(); }
  template <typename T> INLINE_METHOD T& in(T& mine, u32 of) const { return in_block(mine, of); }
};
#endif

INLINE float lowest() { return float_of(0xFF800000); }

// A slice of a row, of which the first `skipped` elements are not the row's: `at` is aligned, if it is read in vectors.
template <bool VECTORS> struct Slice {
  const float* at;
  i64 step;
  u32 skipped, count;

  // Calls f(place, keys) with neighbours' keys, 0 for those that are not the row's, from `begin` on to `end`, `pace`
  // elements further at a time; this thread's are `offset` further. It asks for several vectors before it uses one.
  template <class F> INLINE_METHOD void walk(u32 begin, u32 end, u32 offset, u32 pace, F f) const {
    for (u32 first = begin; first < end; first += AHEAD * pace) {
      float some[AHEAD][N];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) load(first + i * pace + offset, some[i]);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (first + i * pace >= end) break;
        u32 from = first + i * pace + offset, keys[N];
        complete(from, some[i]);
#pragma unroll
        for (int j = 0; j < N; j++) keys[j] = key_of(some[i][j]);
        f(from, keys);
      }
    }
  }

  // Calls f with every key but 0.
  template <class F> INLINE_METHOD void each(F f) const {
    walk(0, count, N * threadIdx.x, N * blockDim.x, [&](u32, const u32(&keys)[N]) {
#pragma unroll
      for (int j = 0; j < N; j++)
        if (keys[j]) f(keys[j]);
    });
  }

private:
  INLINE_METHOD void load(u32 from, float (&to)[N]) const {
    if (VECTORS) {
      Vector<float, N> got = {lowest(), lowest(), lowest(), lowest()};
      if (from + N <= count) got = *(const Vector<float, N>*)(at + from);
#pragma unroll
      for (int j = 0; j < N; j++) to[j] = got.at[j];
    } else {
#pragma unroll
      for (int j = 0; j < N; j++) to[j] = from + j < count ? at[(i64)(from + j) * step] : lowest();
    }
  }

  // The slice's last elements, and its first. These branches come after all loads: a branch between would wait for them.
  INLINE_METHOD void complete(u32 from, float (&of)[N]) const {
    if (VECTORS && from < count && from + N > count) {
#pragma unroll
      for (int j = 0; j < N; j++)
        if (from + j < count) of[j] = at[from + j];
    }
    if (from < skipped) {
#pragma unroll
      for (int j = 0; j < N; j++)
        if (from + j < skipped) of[j] = lowest();
    }
  }
};

// Adds up the counts of all blocks, and returns where they are: a block adds up a part of the bins for all.
INLINE const u32* add_up(const Team<false>&, Room<false>& room, int) {
  __syncthreads();
  return room.bins[0];
}
#if HAS_CLUSTERS
INLINE const u32* add_up(const Team<true>& team, Room<true>& room, int digit) {
  team.sync();
  u32 part = BINS / team.blocks, first = team.rank * part;
  for (u32 i = first + threadIdx.x; i < first + part; i += blockDim.x) {
    u32 counts[MOST_BLOCKS];
#pragma unroll
    for (u32 block = 0; block < MOST_BLOCKS; block++)
      counts[block] = block < team.blocks ? team.in(room, block).bins[digit][i] : 0;
    u32 sum = 0;
#pragma unroll
    for (u32 block = 0; block < MOST_BLOCKS; block++) sum += counts[block];
    for (u32 block = 0; block < team.blocks; block++) team.in(room, block).sums[i] = sum;
  }
  team.sync();
  return room.sums;
}
#endif

// Of the keys counted in `bins` the one at place `left` from the largest: its digit, how many have larger ones, and how
// many this one: 0 if there are fewer keys.
template <bool CLUSTER> INLINE void choose_digit(const Team<CLUSTER>& team, Room<CLUSTER>& room, int digit, u32 left) {
  const u32* bins = add_up(team, room, digit);
  int each = BINS / (int)blockDim.x, last = BINS - 1 - (int)threadIdx.x * each;  // thread 0 has the largest digits
  if (threadIdx.x == 0) room.inside = 0;
  u32 mine = 0;
  for (int i = 0; i < each; i++) mine += bins[last - i];
  u32 total, before = sum_before(mine, room.warps, total);
  if (before < left && before + mine >= left) {
    int bin = last;
    while (before + bins[bin] < left) before += bins[bin--];
    room.digit = bin;
    room.above = before;
    room.inside = bins[bin];
  }
  if (!CLUSTER)
    for (int i = 0; i < each; i++) room.bins[0][last - i] = 0;
  __syncthreads();
}

template <bool VECTORS, bool CLUSTER>
INLINE Found find(const Team<CLUSTER>& team, const Slice<VECTORS>& slice, Room<CLUSTER>& room) {
  constexpr int SECOND = CLUSTER ? 1 : 0, THIRD = CLUSTER ? 2 : 0;
  for (int i = threadIdx.x; i < (CLUSTER ? DIGITS : 1) * BINS; i += blockDim.x) room.bins[i / BINS][i % BINS] = 0;
  if (threadIdx.x == 0) room.held = 0;
  __syncthreads();
  slice.each([&](u32 key) { atomicAdd(&room.bins[0][key >> 21], 1u); });
  u32 left = K;
  choose_digit(team, room, 0, left);
  if (room.inside == 0) return {0, 0};
  u32 prefix = room.digit, inside = room.inside;
  left -= room.above;
  if (inside == left) return {(prefix << 21) - (prefix != 0), 0};

  if (CLUSTER) inside = room.bins[0][prefix];  // of this slice
  bool fits = inside <= room.KEPT;
  slice.each([&](u32 key) {
    if (key >> 21 != prefix) return;
    atomicAdd(&room.bins[SECOND][key >> 10 & 2047], 1u);
    if (fits) room.kept[atomicAdd(&room.held, 1u)] = key;
  });
  choose_digit(team, room, 1, left);
  prefix = prefix << 11 | room.digit;
  left -= room.above;
  if (room.inside == left) return {(prefix << 10) - (prefix != 0), 0};

  auto count = [&](u32 key) {
    if (key >> 10 == prefix) atomicAdd(&room.bins[THIRD][key & 1023], 1u);
  };
  if (fits) {
    for (u32 i = threadIdx.x; i < inside; i += blockDim.x) count(room.kept[i]);
  } else {
    slice.each(count);
  }
  choose_digit(team, room, 2, left);
  return {prefix << 10 | room.digit, left - room.above};
}

// What is chosen among a slice's elements from `begin` to `end`, or what would be, were not only the first equal ones.
template <bool VECTORS> INLINE Chosen chosen_in(const Slice<VECTORS>& slice, u32 begin, u32 end, u32 key) {
  u32 above = 0, equal = 0;
  slice.walk(begin, end, N * (threadIdx.x % WARP), N * WARP, [&](u32, const u32(&keys)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      above += keys[j] > key;
      equal += keys[j] == key;
    }
  });
  return {__reduce_add_sync(~0u, above), __reduce_add_sync(~0u, equal)};
}

template <bool VECTORS, bool CLUSTER> INLINE void select(const Parameters& p) {
  follow_launches();
  SHARED_BY_CLUSTER(Room<CLUSTER>, room);
  Team<CLUSTER> team;
  i64 which = blockIdx.x / team.blocks;
  i64 start = p.starts ? p.starts[which * p.start_step] : 0, end = p.ends ? p.ends[which * p.end_step] : p.columns;
  start = start < 0 ? 0 : start;
  end = end > p.columns ? p.columns : end;
  u32 skipped = VECTORS ? (u32)(start % N) : 0, of_row = end > start ? (u32)(end - start) + skipped : 0;
  u32 size = up_to(up_to(of_row, team.blocks) / team.blocks, N * WARP), first = team.rank * size;
  if (first > of_row) first = of_row;
  const float* at = p.logits + which * p.l_row + (start - skipped + first) * p.l_column;
  Slice<VECTORS> slice = {at, p.l_column, first ? 0 : skipped, of_row - first < size ? of_row - first : size};
  Found found = {0, 0};
  if (end - start > K) found = find(team, slice, room);

  u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
  u32 stretch = up_to(up_to(slice.count, warps) / warps, N * WARP), begin = warp * stretch;
  begin = begin < slice.count ? begin : slice.count;
  u32 stop = slice.count - begin < stretch ? slice.count : begin + stretch;
  Chosen mine = chosen_in(slice, begin, stop, found.key);
  if (lane == 0) room.of_warp[warp] = mine;
  __syncthreads();
  Chosen there = lane < warps ? room.of_warp[lane] : Chosen{0, 0};
  u32 above_until = sum_until(there.above), equal_until = sum_until(there.equal);
  u32 above = __shfl_sync(~0u, above_until, warp) - mine.above, equal = __shfl_sync(~0u, equal_until, warp) - mine.equal;
  Chosen all = {__shfl_sync(~0u, above_until, WARP - 1), __shfl_sync(~0u, equal_until, WARP - 1)};
  if (CLUSTER) {
    if (threadIdx.x < team.blocks) team.in(room, threadIdx.x).of_block[team.rank] = all;
    team.sync();
    all = {0, 0};
    for (u32 block = 0; block < team.blocks; block++) {
      Chosen other = room.of_block[block];
      if (block < team.rank) above += other.above, equal += other.equal;
      all.above += other.above;
      all.equal += other.equal;
    }
  }

  int* out = p.out + which * p.o_row;
  slice.walk(begin, stop, N * lane, N * WARP, [&](u32 from, const u32(&keys)[N]) {
    u32 here = 0;  // those above in the low half, equal ones in the high half
#pragma unroll
    for (int j = 0; j < N; j++) here += keys[j] > found.key ? 1 : keys[j] == found.key ? 1 << 16 : 0;
    u32 until = sum_until(here), before = until - here, total = __shfl_sync(~0u, until, WARP - 1);
    u32 above_me = above + (before & 0xFFFF), equal_to_me = equal + (before >> 16);
#pragma unroll
    for (int j = 0; j < N; j++) {
      i64 place = above_me + (equal_to_me < found.left ? equal_to_me : found.left);
      bool is_above = keys[j] > found.key, is_equal = keys[j] == found.key;
      if (is_above || (is_equal && equal_to_me < found.left)) out[place * p.o_column] = (int)(first + from + j - skipped);
      above_me += is_above;
      equal_to_me += is_equal;
    }
    above += total & 0xFFFF;
    equal += total >> 16;
  });
  u32 written = all.above + (all.equal < found.left ? all.equal : found.left);
  for (i64 i = (i64)written + team.rank * blockDim.x + threadIdx.x; i < K; i += team.blocks * blockDim.x)
    out[i * p.o_column] = -1;
}

extern "C" __global__ void __launch_bounds__(1024) select_elements(const Parameters p) { select<false, false>(p); }
extern "C" __global__ void __launch_bounds__(1024) select_vectors(const Parameters p) { select<true, false>(p); }
EMULATED(select_elements, Parameters)
EMULATED(select_vectors, Parameters)
#if HAS_CLUSTERS
extern "C" __global__ void __launch_bounds__(1024) share_elements(const Parameters p) { select<false, true>(p); }
extern "C" __global__ void __launch_bounds__(1024) share_vectors(const Parameters p) { select<true, true>(p); }
EMULATED(share_elements, Parameters)
EMULATED(share_vectors, Parameters)
#endif
