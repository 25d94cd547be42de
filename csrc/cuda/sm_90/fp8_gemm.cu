// A product of float8 matrices with scales of 1 x 128 of a and 128 x 128 of b: out [m, n] = a [m, k] . b [n, k]T.
//
// As many blocks as the GPU runs take tiles in turn. One warp loads 128 columns of a tile at a time by TMA, with the
// scales of its rows. GROUPS warpgroups multiply WAVES x 64 rows each by all BN = 128 columns of the tile. The tensor
// cores add in 14 bits, so what 128 columns give is moved to float32 by its scales (DeepSeek-V3, section 3.3), while
// another warpgroup multiplies.
//
// Two blocks may be a cluster, whose tiles are neighbours in a row: their part of a is loaded half by each, into both. A
// place in shared memory is loaded again once the warps of both blocks have read it.
//
// Rows and columns that do not exist are read as zero, and not stored.
//
// Defined by the host: GROUPS, WAVES, STAGES; SHARED (whether two blocks are a cluster); EARLY (whether a step waits for
// the next one's operands while its products are under way); HAS_BIAS.
#include "cluster.h"
#include "warpgroup.h"

constexpr int HEIGHT = 64 * WAVES;  // rows of a warpgroup
constexpr int BM = GROUPS * HEIGHT, BN = 128, STEP = 128;
constexpr int BLOCKS = SHARED ? 2 : 1;
constexpr int PART = 64 * 128;  // bytes of 64 rows of operands, or of 64 x 64 results
constexpr int A_BYTES = BM * STEP, B_BYTES = BN * STEP, SCALES_BYTES = BM * 4;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
// Addresses in shared memory.
constexpr int OUT = STAGES * STAGE_BYTES, SCALES = OUT + 2 * GROUPS * WAVES * PART;
constexpr int BARS = SCALES + STAGES * SCALES_BYTES, FULL = 0, EMPTY = STAGES;
constexpr int SHARED_BYTES = BARS + 16 * STAGES;

static_assert(SHARED_BYTES == ASKED_BYTES, "the adapter asks for so much");
static_assert(SHARED_BYTES <= 232448, "a block has no more");

constexpr float LARGEST = 3.4028234663852886e38f, LOW = 8.673617379884035e-19f;  // 2^-60
constexpr float PIECE = 9.5367431640625e-07f, LEFT_OF_BOTH = 1048576.0f;         // 2^-20, 2^20

INLINE u32 bar_of(u32 base, int at) { return base + BARS + 8 * at; }

// --- tiles

struct Tiles {
  int units, high, wide, together;  // of units: one tile, or the two of a cluster
};
struct Tile {
  int row, column;
};

INLINE Tiles tiles_of(int m, int n, int together) {
  int high = (m + BM - 1) / BM, wide = (n + BLOCKS * BN - 1) / (BLOCKS * BN);
  return {high * wide, high, wide, together};
}

// `together` rows of units are gone over together, so that they share b in L2.
INLINE Tile tile_of(const Tiles& all, int unit, int rank) {
  int of_group = all.together * all.wide, first = unit / of_group * all.together, within = unit % of_group;
  int tall = min(all.high - first, all.together), row = first + within % tall, column = within / tall;
  return {row * BM, (BLOCKS * column + rank) * BN};
}

// A place among the stages, and in which round of them it is.
struct Place {
  int stage;
  u32 phase;

  INLINE_METHOD void next() {
    stage++;
    if (stage == STAGES) stage = 0, phase ^= 1;
  }
};

// --- loads, by one thread

INLINE void load_tiles(u32 base, const TensorMap* a_map, const TensorMap* b_map, const TensorMap* scale_map,
                       const Tiles& all, int steps, int first, int apart, int rank) {
  Place at = {0, 0};
  for (int unit = first; unit < all.units; unit += apart) {
    Tile tile = tile_of(all, unit, rank);
    for (int step = 0; step < steps; step++) {
      u32 full = bar_of(base, FULL + at.stage), a = base + at.stage * STAGE_BYTES, b = a + A_BYTES;
      barrier_wait(bar_of(base, EMPTY + at.stage), at.phase ^ 1);
      barrier_expect(full, STAGE_BYTES + SCALES_BYTES);
      tma_load(base + SCALES + at.stage * SCALES_BYTES, scale_map, tile.row, step, full);
      if (SHARED) tma_load_all(a + rank * (A_BYTES / 2), a_map, step * STEP, tile.row + rank * (BM / 2), full, 3);
      else tma_load(a, a_map, step * STEP, tile.row, full);
      tma_load(b, b_map, step * STEP, tile.column, full);
      at.next();
    }
  }
}

// --- scales

// Those of b in two factors: the product of two scales may be no number of float32 where the result is one, so 2^20 are
// left for the end.
struct Factor {
  float first, last;
};
INLINE Factor factor_of(float b) {
  bool small = fabsf(b) < LOW;
  return {small ? PIECE : 1.0f, small ? b : b * PIECE};
}
INLINE float of_both(float a, const Factor& b) { return within(a * b.first * b.last, LARGEST); }

// Of a thread's two rows, in shared memory.
struct Rows {
  float upper, lower;
};
INLINE Rows factors_of_rows(u32 scales, const Factor& b) {
  Rows of = {load_shared(scales), load_shared(scales + 32)};
  of = {of_both(of.upper, b), of_both(of.lower, b)};
  keep(of.upper), keep(of.lower);  // before the place is released
  return of;
}

// --- sums

// The products of 64 rows with 128 columns, under way.
INLINE void issue(float (&made)[64], u32 a, u32 b) {
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; i++) multiply_fp8(made, a + 2 * i, b + 2 * i, i > 0);
  products_end();
}

INLINE void add_scaled(float (&sums)[64], const float (&made)[64], const Rows& factors) {
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    sums[i] += made[i] * factors.upper;
    sums[i + 1] += made[i + 1] * factors.upper;
    sums[i + 2] += made[i + 2] * factors.lower;
    sums[i + 3] += made[i + 3] * factors.lower;
  }
}

// An arrival of this warp, in all blocks that load the place.
INLINE void release(u32 base, int stage) {
  u32 empty = bar_of(base, EMPTY + stage), lane = threadIdx.x % WARP;
  __syncwarp();
  if (BLOCKS == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < BLOCKS) {
    barrier_arrive_in(empty, lane);
  }
}

// The scales of b of a tile, read one step ahead.
struct OfColumns {
  const float* next;
  i64 stride;
  int left;
  float value;

  INLINE_METHOD Factor step() {
    Factor of = factor_of(value);
    if (left > 1) next += stride, left--;
    value = __ldg(next);
    return of;
  }
};

INLINE void sum_products(float (&sums)[WAVES][64], u32 base, int group, u32 scales, OfColumns of_b, int steps, Place& at) {
  float made[64];
  if (EARLY) barrier_wait(bar_of(base, FULL + at.stage), at.phase);
  for (int step = 0; step < steps; step++) {
    if (!EARLY) barrier_wait(bar_of(base, FULL + at.stage), at.phase);
    u32 tile = (afresh(base) + at.stage * STAGE_BYTES) / 16, a = tile + group * (WAVES * PART / 16);
    int stage = at.stage;
    Factor b = of_b.step();
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++) {
      Rows factors = factors_of_rows(scales + stage * SCALES_BYTES + wave * 256, b);
      issue(made, a + wave * (PART / 16), tile + A_BYTES / 16);
      if (EARLY && wave == WAVES - 1) {
        at.next();
        if (step + 1 < steps) barrier_wait(bar_of(base, FULL + at.stage), at.phase);
      }
      products_wait<0>(made);
      if (wave == WAVES - 1) release(base, stage);
      add_scaled(sums[wave], made, factors);
    }
    if (!EARLY) at.next();
  }
}

// --- results: row `row` and 8 below of 64, and of each the columns 8 j + 2 (lane % 4) + {0, 1}

INLINE void finish(float (&sums)[64], const bf16* bias, i64 stride_bias, int column, int n) {
#pragma unroll
  for (int i = 0; i < 64; i++) sums[i] *= LEFT_OF_BOTH;
#if HAS_BIAS
  int first = column + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    int at = first + 2 * i;
    float left = at < n ? widened(bias[at * stride_bias]) : 0.0f;
    float right = at + 1 < n ? widened(bias[(at + 1) * stride_bias]) : 0.0f;
    sums[i] += left;
    sums[i + 1] += right;
    sums[i + 2] += left;
    sums[i + 3] += right;
  }
#endif
}

INLINE void stage_results(const float (&sums)[64], u32 to, int warp) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 pairs[4];
#pragma unroll
    for (int of = 0; of < 4; of++) pairs[of] = narrow_pair(sums[8 * i + 2 * of], sums[8 * i + 2 * of + 1], bf16());
    store_operand(pairs, to + i / 4 * PART, 16 * warp, i % 4);
  }
}

struct Parameters {
  const float* b_scale;
  const bf16* bias;
  int n, steps;
  i64 stride_bn, stride_bk, stride_bias;
};

INLINE void multiply_tiles(u32 base, const TensorMap* out_map, const Parameters& p, const Tiles& all, int group, int first,
                           int apart, int rank) {
  int thread = threadIdx.x % 128, lane = thread % WARP, warp = thread / WARP;
  int row = group * HEIGHT + 16 * warp + lane / 4;  // of the tile
  u32 scales = base + SCALES + row * 4;
  Place at = {0, 0};
  float sums[WAVES][64];
  for (int unit = first; unit < all.units; unit += apart) {
    Tile tile = tile_of(all, unit, rank);
    const float* of_columns = p.b_scale + min(tile.column, p.n - 1) / 128 * p.stride_bn;
    OfColumns of_b = {of_columns, p.stride_bk, p.steps, __ldg(of_columns)};
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++)
#pragma unroll
      for (int i = 0; i < 64; i++) sums[wave][i] = 0.0f;
    sum_products(sums, base, group, scales, of_b, p.steps, at);
    u32 to = base + OUT + group * (WAVES * 2 * PART);
    if (thread == 0) tma_stores_read();
    sync_threads_of<128>(1 + group);
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++) {
      finish(sums[wave], p.bias, p.stride_bias, tile.column, p.n);
      stage_results(sums[wave], to + wave * 2 * PART, warp);
    }
    fence_async();
    sync_threads_of<128>(1 + group);
    if (thread == 0) {
#pragma unroll
      for (int i = 0; i < 2 * WAVES; i++)
        tma_store(to + i * PART, out_map, tile.column + i % 2 * 64, tile.row + group * HEIGHT + i / 2 * 64);
      tma_stores_end();
    }
  }
  if (thread == 0) tma_stores_done();
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    fp8_gemm(TENSOR_MAP(a_map), TENSOR_MAP(b_map), TENSOR_MAP(scale_map), TENSOR_MAP(out_map), const float* b_scale,
             const bf16* bias, int m, int n, int steps, int together, i64 stride_bn, i64 stride_bk, i64 stride_bias) {
  follow_launches();
  extern __shared__ __align__(1024) char memory[];
  u32 base = shared_address(memory);
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), rank = BLOCKS == 1 ? 0 : rank_in_cluster();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_begin(bar_of(base, FULL + i), 1);
      barrier_begin(bar_of(base, EMPTY + i), 4 * GROUPS * BLOCKS);
    }
    fence_barriers();
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&b_map);
    tma_prefetch_map(&scale_map);
    tma_prefetch_map(&out_map);
  }
  if (BLOCKS == 1) __syncthreads();
  else sync_cluster();
  Tiles all = tiles_of(m, n, together);
  int first = blockIdx.x / BLOCKS, apart = gridDim.x / BLOCKS;
  if (group == GROUPS) {
    give_registers<40>();
    if (threadIdx.x == 128 * GROUPS) load_tiles(base, &a_map, &b_map, &scale_map, all, steps, first, apart, rank);
    __syncwarp();
  } else {
    take_registers<GROUPS == 3 ? 152 : 232>();
    Parameters p = {b_scale, bias, n, steps, stride_bn, stride_bk, stride_bias};
    multiply_tiles(base, &out_map, p, all, group, first, apart, rank);
  }
  __syncwarp();
  if (BLOCKS > 1) sync_cluster();  // until the other one neither loads into this block nor arrives at its barriers
}
