// A product of float8 matrices with scales of 1 x 128 of a and 128 x 128 of b: out [m, n] = a [m, k] . b [n, k]T.
//
// As many blocks as the GPU runs take tiles in turn. One warp loads 128 columns of a tile at a time by TMA, with the
// scales of its rows. GROUPS warpgroups multiply WAVES x 64 rows each by all COLUMNS of the tile. The tensor cores add
// in 14 bits, so what 128 columns give is moved to float32 by its scales (DeepSeek-V3, section 3.3), while another
// warpgroup multiplies.
//
// SHARING blocks of a cluster have tiles that are neighbours in a row: each loads a share of their rows of a, into all of
// them. A place in shared memory is loaded again once the warps of all these blocks have read it.
//
// Where tiles are few, PARTS times as many blocks are a cluster: each takes a part of K, of one tile only. Of its sums it
// sends every other part a share of the columns, into a place of its own there, and adds up its own share: what is added
// to what depends on nothing but the column.
//
// Rows and columns that do not exist are read as zero, and not stored.
//
// Defined by the host: GROUPS, WAVES, COLUMNS (64 or 128), STAGES, SHARING, PARTS; EARLY (whether a step waits for the
// next one's operands while its products are under way); LOADERS (threads of which one loads: a warpgroup, which gives
// registers to the others, or a warp); RESIDENT (blocks of a multiprocessor); HAS_BIAS.
#include "cluster.h"
#include "warpgroup.h"

constexpr int HEIGHT = 64 * WAVES;  // rows of a warpgroup
constexpr int BM = GROUPS * HEIGHT, BN = COLUMNS, STEP = 128;
constexpr int BLOCKS = SHARING * PARTS;
constexpr bool ALONE = PARTS > 1 && SHARING == 1;  // whether a block has nothing of others' before their sums
constexpr bool LATE = LOADERS == WARP;             // scales of rows are read while products are under way: few warps do else
constexpr int SUMS = BN / 2, SHARE = SUMS / PARTS;  // of 64 rows: registers of a thread, and those that a part adds up
constexpr int PANEL = 64 * 128;                     // bytes of 64 rows of operands, or of 64 x 64 results
constexpr int A_BYTES = BM * STEP, B_BYTES = BN * STEP, SCALES_BYTES = BM * 4;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
// Addresses in shared memory.
constexpr int SENT = GROUPS * 128 * WAVES * SHARE * 4;  // bytes of one part's sums for another
constexpr int OUT = STAGES * STAGE_BYTES;               // results, or what other parts send
constexpr int SCALES = OUT + (PARTS > 1 ? (PARTS - 1) * SENT : BN / 64 * GROUPS * WAVES * PANEL);
constexpr int BARS = SCALES + STAGES * SCALES_BYTES, FULL = 0, EMPTY = STAGES, ARRIVED = 2 * STAGES;
constexpr int SHARED_BYTES = BARS + 16 * STAGES + (PARTS > 1 ? 16 : 0);

static_assert(SHARED_BYTES == ASKED_BYTES, "the adapter asks for so much");
static_assert(SHARED_BYTES <= 232448, "a block has no more");
static_assert(SHARE % 4 == 0, "vectors are sent");

constexpr float LARGEST = 3.4028234663852886e38f, LOW = 8.673617379884035e-19f;  // 2^-60
constexpr float PIECE = 9.5367431640625e-07f, LEFT_OF_BOTH = 1048576.0f;         // 2^-20, 2^20

INLINE u32 bar_of(u32 base, int at) { return base + BARS + 8 * at; }

// --- tiles

struct Tiles {
  int units, high, wide, together;  // of units: one tile, or neighbours that share a
};
struct Tile {
  int row, column;
};

INLINE Tiles tiles_of(int m, int n, int together) {
  int high = (m + BM - 1) / BM, wide = (n + SHARING * BN - 1) / (SHARING * BN);
  return {high * wide, high, wide, together};
}

// `together` rows of units are gone over together, so that they share b in L2.
INLINE Tile tile_of(const Tiles& all, int unit, int beside) {
  int of_group = all.together * all.wide, first = unit / of_group * all.together, within = unit % of_group;
  int tall = min(all.high - first, all.together), row = first + within % tall, column = within / tall;
  return {row * BM, (SHARING * column + beside) * BN};
}

// Of a block in its cluster: which of the tiles that share a it has, and which part of K.
struct Role {
  int beside, part;
};
INLINE Role role_of(int rank) { return PARTS == 1 ? Role{rank, 0} : Role{rank % SHARING, rank / SHARING}; }
INLINE u32 rank_of(int beside, int part) { return PARTS == 1 ? beside : part * SHARING + beside; }

// The first step of a part; that of the next one is its end.
INLINE int first_of(int part, int steps) { return PARTS == 1 ? part * steps : steps * part / PARTS; }

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
                       const Tiles& all, int steps, int first, int apart, const Role& role) {
  Place at = {0, 0};
  int begin = first_of(role.part, steps), end = first_of(role.part + 1, steps);
  for (int unit = first; unit < all.units; unit += apart) {
    Tile tile = tile_of(all, unit, role.beside);
    for (int step = begin; step < end; step++) {
      u32 full = bar_of(base, FULL + at.stage), a = base + at.stage * STAGE_BYTES, b = a + A_BYTES;
      barrier_wait(bar_of(base, EMPTY + at.stage), at.phase ^ 1);
      barrier_expect(full, STAGE_BYTES + SCALES_BYTES);
      tma_load(base + SCALES + at.stage * SCALES_BYTES, scale_map, tile.row, step, full);
      if (SHARING > 1) {
        constexpr int ROWS = BM / SHARING;
        u16 blocks = (u16)(((1 << SHARING) - 1) << rank_of(0, role.part));
        tma_load_all(a + role.beside * (ROWS * STEP), a_map, step * STEP, tile.row + role.beside * ROWS, full, blocks);
      }
      if (SHARING == 1) tma_load(a, a_map, step * STEP, tile.row, full);
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

// The products of 64 rows with a tile's columns, under way.
INLINE void issue(float (&made)[SUMS], u32 a, u32 b) {
  products_begin();
#pragma unroll
  for (int i = 0; i < 4; i++) multiply_fp8(made, a + 2 * i, b + 2 * i, i > 0);
  products_end();
}

INLINE void add_scaled(float (&sums)[SUMS], const float (&made)[SUMS], const Rows& factors) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    sums[i] += made[i] * factors.upper;
    sums[i + 1] += made[i + 1] * factors.upper;
    sums[i + 2] += made[i + 2] * factors.lower;
    sums[i + 3] += made[i + 3] * factors.lower;
  }
}

// An arrival of this warp, in all blocks that load the place.
INLINE void release(u32 base, int stage, int part) {
  u32 empty = bar_of(base, EMPTY + stage), lane = threadIdx.x % WARP;
  __syncwarp();
  if (SHARING == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else if (lane < SHARING) {
    barrier_arrive_in(empty, rank_of(lane, part));
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

INLINE void sum_products(float (&sums)[WAVES][SUMS], u32 base, int group, u32 scales, OfColumns of_b, int steps, Place& at,
                         int part) {
  float made[SUMS];
  if (EARLY && (PARTS == 1 || steps > 0)) barrier_wait(bar_of(base, FULL + at.stage), at.phase);
  for (int step = 0; step < steps; step++) {
    if (!EARLY) barrier_wait(bar_of(base, FULL + at.stage), at.phase);
    u32 tile = (afresh(base) + at.stage * STAGE_BYTES) / 16, a = tile + group * (WAVES * PANEL / 16);
    int stage = at.stage;
    Factor b = of_b.step();
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++) {
      Rows factors;
      u32 of_rows = scales + stage * SCALES_BYTES + wave * 256;
      if (!LATE) factors = factors_of_rows(of_rows, b);
      issue(made, a + wave * (PANEL / 16), tile + A_BYTES / 16);
      if (LATE) factors = factors_of_rows(of_rows, b);
      if (EARLY && wave == WAVES - 1) {
        at.next();
        if (step + 1 < steps) barrier_wait(bar_of(base, FULL + at.stage), at.phase);
      }
      products_wait<0>(made);
      if (wave == WAVES - 1) release(base, stage, part);
      add_scaled(sums[wave], made, factors);
    }
    if (!EARLY) at.next();
  }
}

// --- results: row `row` and 8 below of 64, and of each the columns 8 j + 2 (lane % 4) + {0, 1}

template <int COUNT> INLINE void finish(float (&sums)[COUNT], const bf16* bias, i64 stride_bias, int column, int n) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) sums[i] *= LEFT_OF_BOTH;
#if HAS_BIAS
  int first = column + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
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

INLINE void stage_results(const float (&sums)[SUMS], u32 to, int warp) {
#pragma unroll
  for (int i = 0; i < BN / 16; i++) {
    u32 pairs[4];
#pragma unroll
    for (int of = 0; of < 4; of++) pairs[of] = narrow_pair(sums[8 * i + 2 * of], sums[8 * i + 2 * of + 1], bf16());
    store_operand(pairs, to + i / 4 * PANEL, 16 * warp, i % 4);
  }
}

struct Parameters {
  const float* b_scale;
  const bf16* bias;
  int m, n, steps;
  i64 stride_bn, stride_bk, stride_bias;
  bf16* out;
  i64 stride_om;
};

// --- parts of K

// Of these sums to every other part those of its columns.
INLINE void send_sums(const float (&sums)[WAVES][SUMS], u32 base, const Role& role) {
#pragma unroll
  for (int to = 0; to < PARTS; to++) {
    if (to == role.part) continue;
    u32 rank = rank_of(role.beside, to), bar = address_in(bar_of(base, ARRIVED), rank);
    int place = role.part - (role.part > to);
    u32 there = address_in(base + OUT + place * SENT + threadIdx.x * 16, rank);
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++)
#pragma unroll
      for (int i = 0; i < SHARE; i += 4)
        send_floats(there + (wave * SHARE + i) * (GROUPS * 512), &sums[wave][to * SHARE + i], bar);
  }
}

// The sums of this part's columns over all parts: its own, then the others' in their order.
INLINE void add_parts(float (&all)[WAVES][SHARE], const float (&sums)[WAVES][SUMS], u32 base, const Role& role) {
#pragma unroll
  for (int part = 0; part < PARTS; part++)
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++)
#pragma unroll
      for (int i = 0; i < SHARE; i++)
        if (part == role.part) all[wave][i] = sums[wave][part * SHARE + i];
  barrier_wait_for_cluster(bar_of(base, ARRIVED), 0);
#pragma unroll
  for (int place = 0; place < PARTS - 1; place++)
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++)
#pragma unroll
      for (int i = 0; i < SHARE; i += 4) {
        float x[4];
        load_shared_vector(x, base + OUT + place * SENT + threadIdx.x * 16 + (wave * SHARE + i) * (GROUPS * 512));
#pragma unroll
        for (int of = 0; of < 4; of++) all[wave][i + of] += x[of];
      }
}

INLINE void store_share(const float (&x)[SHARE], const Parameters& p, int row, int column) {
  column += 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < SHARE; i += 2) {
    int at = column + i / 4 * 8, of = row + i / 2 % 2 * 8;
    if (of >= p.m || at >= p.n) continue;
    u32 pair = narrow_pair(x[i], x[i + 1], bf16());
    bf16* to = p.out + of * p.stride_om + at;
    if (at + 1 < p.n) *(u32*)to = pair;
    else *(u16*)to = (u16)pair;
  }
}

INLINE void store_by_parts(const float (&sums)[WAVES][SUMS], u32 base, const Parameters& p, const Tile& tile, int row,
                           const Role& role) {
  if (ALONE) wait_for_cluster();  // until the others have begun their barriers
  send_sums(sums, base, role);
  float all[WAVES][SHARE];
  add_parts(all, sums, base, role);
  int column = tile.column + role.part * (2 * SHARE);
#pragma unroll
  for (int wave = 0; wave < WAVES; wave++) {
    finish(all[wave], p.bias, p.stride_bias, column, p.n);
    store_share(all[wave], p, tile.row + row + 64 * wave, column);
  }
}

// --- tiles of a warpgroup

INLINE void store_tile(float (&sums)[WAVES][SUMS], u32 base, const TensorMap* out_map, const Parameters& p, const Tile& tile,
                       int group, int thread, int warp) {
  constexpr int PANELS = BN / 64;
  u32 to = base + OUT + group * (WAVES * PANELS * PANEL);
  if (thread == 0) tma_stores_read();
  sync_threads_of<128>(1 + group);
#pragma unroll
  for (int wave = 0; wave < WAVES; wave++) {
    finish(sums[wave], p.bias, p.stride_bias, tile.column, p.n);
    stage_results(sums[wave], to + wave * PANELS * PANEL, warp);
  }
  fence_async();
  sync_threads_of<128>(1 + group);
  if (thread == 0) {
#pragma unroll
    for (int i = 0; i < PANELS * WAVES; i++)
      tma_store(to + i * PANEL, out_map, tile.column + i % PANELS * 64, tile.row + group * HEIGHT + i / PANELS * 64);
    tma_stores_end();
  }
}

INLINE void multiply_tiles(u32 base, const TensorMap* out_map, const Parameters& p, const Tiles& all, int group, int first,
                           int apart, const Role& role) {
  int thread = threadIdx.x % 128, lane = thread % WARP, warp = thread / WARP;
  int row = group * HEIGHT + 16 * warp + lane / 4;  // of the tile
  u32 scales = base + SCALES + row * 4;
  int begin = first_of(role.part, p.steps), steps = first_of(role.part + 1, p.steps) - begin;
  Place at = {0, 0};
  float sums[WAVES][SUMS];
  for (int unit = first; unit < all.units; unit += apart) {
    Tile tile = tile_of(all, unit, role.beside);
    const float* of_columns = p.b_scale + min(tile.column, p.n - 1) / 128 * p.stride_bn + begin * p.stride_bk;
    OfColumns of_b = {of_columns, p.stride_bk, steps, __ldg(of_columns)};
#pragma unroll
    for (int wave = 0; wave < WAVES; wave++)
#pragma unroll
      for (int i = 0; i < SUMS; i++) sums[wave][i] = 0.0f;
    sum_products(sums, base, group, scales, of_b, steps, at, role.part);
    if (PARTS > 1) store_by_parts(sums, base, p, tile, row, role);
    else store_tile(sums, base, out_map, p, tile, group, thread, warp);
  }
  if (PARTS == 1 && thread == 0) tma_stores_done();
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS + LOADERS, RESIDENT)
    fp8_gemm(TENSOR_MAP(a_map), TENSOR_MAP(b_map), TENSOR_MAP(scale_map), TENSOR_MAP(out_map), const float* b_scale,
             const bf16* bias, int m, int n, int steps, int together, i64 stride_bn, i64 stride_bk, i64 stride_bias,
             bf16* out, i64 stride_om) {
  follow_launches();
  extern __shared__ __align__(1024) char memory[];
  u32 base = shared_address(memory);
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  Role role = role_of(BLOCKS == 1 ? 0 : rank_in_cluster());
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_begin(bar_of(base, FULL + i), 1);
      barrier_begin(bar_of(base, EMPTY + i), 4 * GROUPS * SHARING);
    }
    if (PARTS > 1) barrier_begin(bar_of(base, ARRIVED), 1);
    fence_barriers();
    if (PARTS > 1) barrier_expect(bar_of(base, ARRIVED), (PARTS - 1) * SENT);
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&b_map);
    tma_prefetch_map(&scale_map);
    if (PARTS == 1) tma_prefetch_map(&out_map);
  }
  if (BLOCKS == 1 || ALONE) __syncthreads();
  else sync_cluster();
  if (ALONE) arrive_in_cluster();
  Tiles all = tiles_of(m, n, together);
  int first = blockIdx.x / BLOCKS, apart = PARTS > 1 ? all.units : gridDim.x / BLOCKS;
  if (group == GROUPS) {
    if (LOADERS == 128) give_registers<PARTS == 1 ? 40 : 56>();
    if (threadIdx.x == 128 * GROUPS) load_tiles(base, &a_map, &b_map, &scale_map, all, steps, first, apart, role);
    __syncwarp();
    if (ALONE) wait_for_cluster();
  } else {
    if (LOADERS == 128) take_registers<GROUPS == 3 ? 152 : PARTS == 1 ? 232 : 224>();
    Parameters p = {b_scale, bias, m, n, steps, stride_bn, stride_bk, stride_bias, out, stride_om};
    multiply_tiles(base, &out_map, p, all, group, first, apart, role);
  }
  __syncwarp();
  if (SHARING > 1) sync_cluster();  // until no other one loads into this block or arrives at its barriers
}
