// Activations of bfloat16 times a float4 weight: out^T = W a^T by wgmma, whose first operand is decoded in registers.
//
// A tile is 128 rows of the weight by TOKENS rows of activations. Two warpgroups multiply, each 64 rows of the weight. Of
// the third, one warp loads activations and codes by TMA and three warps load scales, which they widen to
// pairs of bfloat16 as the products need them. A step is 64 of K. While products of half of it are under way, the
// next half is decoded: operands have two places in registers.
//
// A lane has of 8 codes, a word, the two of byte lane % 4: those are what wgmma wants of it, so that nothing moves between
// lanes. Sign and magnitude are moved to the places of a bfloat16's, which is then the code times 2^-126, subnormal
// numbers too. A product with the scale, of NVFP4 times 2^118, is exact. For MXFP4 the code is made a number over 8 before,
// since 6 x 2^127 is not one of bfloat16. What is left, 2^8 or 2^3, multiplies the sums.
//
// `split` tiles are cut: their steps end to end are a line, which is cut into equal parts, one for each block. A part of a
// tile writes its sums to `parts`; the last of a tile adds them up in the order of the parts, or, without counters,
// `fp4_sum` does: always the same bits. Other tiles are whole, one after the other.
//
// Rows past N and elements past K have scales of zero, and TMA gives zeros for them.
//
// Defined by the host: TOKENS, STAGES; NVFP4, whether scales are float8_e4m3fn of 16 elements, else powers of
// two of 32; OUT, the dtype of the result.
#include "register_products.h"

constexpr int ROWS = 128, STEP = 64;
constexpr int GROUP = NVFP4 ? 16 : 32, EACH = 64 / GROUP;  // scales of 64 elements
constexpr int SUMS = TOKENS / 2;                           // of a thread, for 64 rows
constexpr int LOADERS = 96, OF_LOADER = (ROWS + LOADERS - 1) / LOADERS;
constexpr int CHUNK = 256 / GROUP, WORDS = CHUNK / 4, STEPS_OF_CHUNK = 4;  // scales that a loader has at once
constexpr float LEFT = NVFP4 ? 256.0f : 8.0f;
constexpr int MULTIPLIERS = 256, AT_ONCE = SUMS < 32 ? SUMS / 4 : 8;  // vectors of sums that a thread asks for

// --- the schedule

struct Sizes {
  int steps, tiles, weight_tiles, token_tiles, split, each, together;
};

struct Segment {
  int tile, low, high;
};

struct Walk {
  int at, end, tile;
};

INLINE Walk walk_of(const Sizes& of, int program) {
  int at = min(program * of.each, of.split * of.steps);
  return {at, min(at + of.each, of.split * of.steps), of.split + program};
}

INLINE bool next_segment(Segment& made, Walk& walk, const Sizes& of, int programs) {
  if (walk.at < walk.end) {
    int tile = walk.at / of.steps, low = walk.at - tile * of.steps, high = min(of.steps, low + walk.end - walk.at);
    walk.at += high - low;
    made = {tile, low, high};
    return true;
  }
  made = {walk.tile, 0, of.steps};
  walk.tile += programs;
  return made.tile < of.tiles;
}

struct Place {
  int weight, tokens;
};

// Tiles that run at once share activations and weights: groups of `together` tiles of tokens by all of the weight.
INLINE Place place_of(int tile, const Sizes& of) {
  int group = tile / (of.together * of.weight_tiles), rest = tile - group * of.together * of.weight_tiles;
  int wide = min(of.together, of.token_tiles - group * of.together);
  return {rest / wide, group * of.together + rest % wide};
}

// The parts of a tile that is cut, and where their sums are: a part that begins a tile is its block's second.
INLINE int first_part(int tile, const Sizes& of) { return tile * of.steps / of.each; }
INLINE int last_part(int tile, const Sizes& of) { return ((tile + 1) * of.steps - 1) / of.each; }
INLINE int slot_of(int part, int tile, const Sizes& of) { return 2 * part + (part * of.each <= tile * of.steps); }

// --- shared memory

constexpr u32 TOKEN_BYTES = TOKENS * 128, CODE_BYTES = ROWS * 32, SCALE_ROW = EACH * 4;
constexpr u32 SCALES_BYTES = ROWS * SCALE_ROW;
constexpr u32 A = 0, CODES = STAGES * TOKEN_BYTES, SCALES = CODES + STAGES * CODE_BYTES;
constexpr u32 STAGED = SCALES + STAGES * SCALES_BYTES, BARS = STAGED + 8 * 512, IS_LAST = BARS + STAGES * 16;
constexpr u32 SHARED_BYTES = IS_LAST + 16;
static_assert(SHARED_BYTES <= 232448, "more than a block may have");
#ifdef ASKED_BYTES
static_assert(SHARED_BYTES == ASKED_BYTES, "the adapter asks for so much");
#endif
INLINE u32 full_bar(u32 base, int stage) { return base + BARS + 16 * stage; }
INLINE u32 empty_bar(u32 base, int stage) { return base + BARS + 16 * stage + 8; }

struct Ring {
  int stage;
  u32 phase;
};
INLINE void advance(Ring& ring) {
  ring.stage++;
  if (ring.stage == STAGES) {
    ring.stage = 0;
    ring.phase ^= 1;
  }
}

struct Parameters {
  const u8* scales;
  const float* factor;
  const void* bias;
  OUT* out;
  float4* parts;
  int* counters;
  int rows, n, groups, unit, bias_kind, vectors;
  i64 scale_row, out_row, out_column;
};

// --- loads

INLINE void load_tiles(u32 base, const TensorMap* a_map, const TensorMap* w_map, const Sizes& of) {
  int programs = gridDim.x;
  bool chosen = threadIdx.x % WARP == 0;
  Walk walk = walk_of(of, blockIdx.x);
  Segment now;
  Ring ring = {0, 1};
  while (next_segment(now, walk, of, programs)) {
    Place at = place_of(now.tile, of);
    for (int step = now.low; step < now.high; step++) {
      barrier_wait(empty_bar(base, ring.stage), ring.phase);
      if (chosen) {
        u32 full = full_bar(base, ring.stage);
        barrier_expect(full, TOKEN_BYTES + CODE_BYTES);
        tma_load(base + CODES + ring.stage * CODE_BYTES, w_map, step * (STEP / 2), at.weight * ROWS, full);
        tma_load(base + A + ring.stage * TOKEN_BYTES, a_map, step * STEP, at.tokens * TOKENS, full);
      }
      __syncwarp();
      advance(ring);
    }
  }
}

// Scales of 256 elements of a row, zero past the end; `unit` bytes may be moved at once.
INLINE void load_scales(u32 (&to)[WORDS], const u8* row, int chunk, int groups, bool there, int unit) {
#pragma unroll
  for (int i = 0; i < WORDS; i++) to[i] = 0;
  int first = chunk * CHUNK;
  if (!there || first >= groups) return;
  if (unit == CHUNK) {
    Vector<u32, WORDS> got = *(const Vector<u32, WORDS>*)(row + first);
#pragma unroll
    for (int i = 0; i < WORDS; i++) to[i] = got.at[i];
  } else if (unit == 2) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) {
      if (first + i < groups) to[i / 4] |= (u32) * (const u16*)(row + first + i) << (8 * (i % 4));
    }
  } else {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      if (first + i < groups) to[i / 4] |= (u32)row[first + i] << (8 * (i % 4));
    }
  }
}

INLINE u32 pair_of(float x) { return narrow_pair(x, x, bf16()); }

// Scales of 64 elements, the first in the low byte, as pairs of bfloat16.
INLINE void widen_scales(u32 (&made)[EACH], u32 raw) {
#if NVFP4
  float x[4];
  widen_e4m3(raw, x[0], x[1]);
  widen_e4m3(raw >> 16, x[2], x[3]);
#pragma unroll
  for (int i = 0; i < 4; i++) made[i] = pair_of(x[i] * 3.3230699894622897e35f);  // 2^118
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 code = (raw >> (8 * i)) & 255, bits = code << 7;
    bits = code == 0 ? 0x40 : code == 255 ? 0x7FC0 : bits;
    made[i] = bits | bits << 16;
  }
#endif
}

INLINE void widen_all_scales(u32 base, const Parameters& p, const Sizes& of) {
  int programs = gridDim.x, loader = threadIdx.x - MULTIPLIERS - WARP;
  Walk walk = walk_of(of, blockIdx.x);
  Segment now;
  Ring ring = {0, 1};
  while (next_segment(now, walk, of, programs)) {
    int first_row = place_of(now.tile, of).weight * ROWS;
    const u8* from[OF_LOADER];
    bool there[OF_LOADER];
    u32 ahead[OF_LOADER][WORDS], raw[OF_LOADER][WORDS];
#pragma unroll
    for (int i = 0; i < OF_LOADER; i++) {
      int row = loader + LOADERS * i;
      there[i] = row < ROWS && first_row + row < p.n;
      from[i] = p.scales + (i64)(first_row + row) * p.scale_row;
      load_scales(ahead[i], from[i], now.low / STEPS_OF_CHUNK, p.groups, there[i], p.unit);
    }
    for (int step = now.low; step < now.high; step++) {
      int part = step % STEPS_OF_CHUNK;
      if (step == now.low || part == 0) {
#pragma unroll
        for (int i = 0; i < OF_LOADER; i++) {
#pragma unroll
          for (int word = 0; word < WORDS; word++) raw[i][word] = ahead[i][word];
          load_scales(ahead[i], from[i], step / STEPS_OF_CHUNK + 1, p.groups, there[i], p.unit);
        }
      }
      barrier_wait(empty_bar(base, ring.stage), ring.phase);
#pragma unroll
      for (int i = 0; i < OF_LOADER; i++) {
        int row = loader + LOADERS * i;
        if (row < ROWS) {
          u32 made[EACH], word;
          if (NVFP4) word = part < 2 ? (part ? raw[i][1] : raw[i][0]) : part == 2 ? raw[i][WORDS - 2] : raw[i][WORDS - 1];
          else word = (part < 2 ? raw[i][0] : raw[i][1]) >> (16 * (part % 2));
          widen_scales(made, word);
          store_words(base + SCALES + ring.stage * SCALES_BYTES + row * SCALE_ROW, made);
        }
      }
      barrier_arrive_warp(full_bar(base, ring.stage));
      advance(ring);
    }
  }
}

// --- what multiplies

// Two codes of a word as a pair of numbers, times their scale.
INLINE u32 decoded(u32 word, u32 pick, u32 scale) {
  u32 x = __byte_perm(word, word << 4, pick);
  u32 bits = (x & 0x80008000u) | ((x >> 6) & 0x01C001C0u);
  if (!NVFP4) bits = times_pair(bits, 0x7D007D00u);  // 2^123
  return times_pair(bits, scale);
}

// 32 codes of each of a thread's rows, of which the second is 8 rows on.
struct Codes {
  u32 of[2][4];
};
struct Scales {
  u32 of[2][EACH];
};
// As operands of two products of 16.
struct Operand {
  u32 of[8];
};

INLINE void load_codes(Codes& codes, u32 base, int stage, int half, int row) {
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    int at = row + 8 * lower;
    int chunk = half ^ ((at >> 2) & 1);  // the swizzle of 32 bytes
    load_words(codes.of[lower], base + CODES + stage * CODE_BYTES + at * 32 + chunk * 16);
  }
}

INLINE void load_pairs(Scales& scales, u32 base, int stage, int row) {
#pragma unroll
  for (int lower = 0; lower < 2; lower++) {
    int at = row + 8 * lower;
    load_words(scales.of[lower], base + SCALES + stage * SCALES_BYTES + at * SCALE_ROW);
  }
}

INLINE void decode(Operand& made, const Codes& codes, const Scales& scales, int half, u32 pick) {
#pragma unroll
  for (int i = 0; i < 8; i++) {  // product, 8 columns on, 8 rows on
    int product = i / 4, right = i / 2 % 2, lower = i % 2;
    int group = (half * 2 + product) * 16 / GROUP;
    made.of[i] = decoded(codes.of[lower][2 * product + right], pick, scales.of[lower][group]);
  }
}

INLINE void multiply(float (&d)[SUMS], const Operand& w, u32 base, int stage, int half) {
  u32 tokens = operand_along(afresh(base + A + stage * TOKEN_BYTES)) + half * 4;
  products_begin();
#pragma unroll
  for (int i = 0; i < 2; i++) multiply_made(d, w.of + 4 * i, tokens + 2 * i);
  products_end();
}

// A step whose first codes are here; the next step's are loaded unless it is the last of its segment.
template <bool LAST>
INLINE void multiply_step(float (&d)[SUMS], Operand (&w)[2], Codes& codes, Scales& scales, Ring& ring, u32 base, int row,
                          u32 pick, bool before) {
  int stage = ring.stage;
  decode(w[0], codes, scales, 0, pick);
  multiply(d, w[0], base, stage, 0);
  load_codes(codes, base, stage, 1, row);
  made_wait<1>();
  keep(w[1].of);
  if (before) barrier_arrive_warp(empty_bar(base, stage == 0 ? STAGES - 1 : stage - 1));
  decode(w[1], codes, scales, 1, pick);
  multiply(d, w[1], base, stage, 1);
  advance(ring);
  if (!LAST) {
    barrier_wait(full_bar(base, ring.stage), ring.phase);
    load_codes(codes, base, ring.stage, 0, row);
    load_pairs(scales, base, ring.stage, row);
  }
  made_wait<1>();
  keep(w[0].of);
}

// --- results

INLINE float bias_of(const Parameters& p, int row) {
  if (p.bias_kind == 0 || row >= p.n) return 0.0f;
  return p.bias_kind == 1 ? ((const float*)p.bias)[row] : widened(((const OUT*)p.bias)[row]);
}

struct Scaling {
  float factor, bias[2];  // of a thread's rows
};
INLINE float scaled(float sum, const Scaling& by, int lower) {
  float x = sum * LEFT;
  if (NVFP4) x *= by.factor;
  return x + by.bias[lower];
}

// 64 rows of the weight, of which this warp has 16 from `upper` on, by all tokens: one number at a time.
INLINE void store_rows(const float (&d)[SUMS], float* out, const Parameters& p, const Scaling& by, u32, int first, int upper,
                       int lane) {
  int token = first + 2 * (lane % 4), row = upper + lane / 4;
  float* to = out + token * p.out_row + row * p.out_column;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    if (first + 2 * i >= p.rows) break;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (token + j % 2 < p.rows && row + 8 * (j / 2) < p.n)
        to[j % 2 * p.out_row + 8 * (j / 2) * p.out_column] = scaled(d[i + j], by, j / 2);
    }
    token += 8;
    to += 8 * p.out_row;
  }
}

// The same of two bytes: 16 tokens at a time through shared memory, so that a lane has 8 rows of one.
template <typename T>
INLINE void store_rows(const float (&d)[SUMS], T* out, const Parameters& p, const Scaling& by, u32 mine, int first,
                       int upper, int lane) {
  int place = lane / 16 * 8 + lane % 8, token = lane / 2, half = lane % 2, row = upper + 8 * half;
  u32 to = mine + place * 32 + (((lane / 8 & 1) ^ (place >> 2 & 1)) << 4);
  u32 from = mine + token * 32 + ((half ^ (token >> 2 & 1)) << 4);
  T* at = out + (first + token) * p.out_row + row * p.out_column;
  bool whole = p.vectors && row + 8 <= p.n;
#pragma unroll
  for (int i = 0; i < SUMS / 8; i++) {
    if (first + 16 * i >= p.rows) break;
    u32 x[4], got[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      x[j] = narrow_pair(scaled(d[8 * i + 2 * j], by, j % 2), scaled(d[8 * i + 2 * j + 1], by, j % 2), T());
    store_transposed(to, x);
    __syncwarp();
    load_words(got, from);
    __syncwarp();
    if (first + 16 * i + token < p.rows) {
      if (whole) {
        *(uint4*)at = make_uint4(got[0], got[1], got[2], got[3]);
      } else {
        T* one = at;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          if (row + j < p.n) one->bits = (u16)(got[j / 2] >> (16 * (j % 2)));
          one += p.out_column;
        }
      }
    }
    at += 16 * p.out_row;
  }
}

// `row` is this warp's first of the tile, `thread` its number among those that multiply.
INLINE void store_tile(const float (&d)[SUMS], u32 staged, const Parameters& p, Place at, int row, int thread) {
  int lane = thread % WARP;
  float factor = NVFP4 ? *p.factor : 1.0f;
  int upper = at.weight * ROWS + row;
  Scaling by = {factor, {bias_of(p, upper + lane / 4), bias_of(p, upper + lane / 4 + 8)}};
  store_rows(d, p.out, p, by, staged + thread / WARP * 512, at.tokens * TOKENS, upper, lane);
}

INLINE float4* sums_of(const Parameters& p, int slot, int thread) {
  return p.parts + (i64)slot * (ROWS * TOKENS / 4) + thread;
}

INLINE void store_sums(float (&d)[SUMS], float4* to) {
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) to[i / 4 * MULTIPLIERS] = make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]);
}

// The sums of a part to those before it, of which the first has none.
template <bool FIRST> INLINE void add_part(float (&d)[SUMS], const float4* from) {
#pragma unroll
  for (int begin = 0; begin < SUMS; begin += 4 * AT_ONCE) {
    float4 got[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) got[i] = load_written(from + (begin / 4 + i) * MULTIPLIERS);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      float* to = d + begin + 4 * i;
      to[0] = FIRST ? got[i].x : to[0] + got[i].x;
      to[1] = FIRST ? got[i].y : to[1] + got[i].y;
      to[2] = FIRST ? got[i].z : to[2] + got[i].z;
      to[3] = FIRST ? got[i].w : to[3] + got[i].w;
    }
  }
}

// The sums of all parts of a tile, in their order; those of part `own` are in d. Of two parts the order does not matter.
INLINE void add_parts(float (&d)[SUMS], const Parameters& p, const Sizes& of, int tile, int own, int thread) {
  int first = first_part(tile, of), last = last_part(tile, of);
  if (own >= 0 && last - first == 1) {
    add_part<false>(d, sums_of(p, slot_of(first + last - own, tile, of), thread));
    return;
  }
  add_part<true>(d, sums_of(p, slot_of(first, tile, of), thread));
  for (int part = first + 1; part <= last; part++) add_part<false>(d, sums_of(p, slot_of(part, tile, of), thread));
}

INLINE void multiply_all(u32 base, int* is_last, const Parameters& p, const Sizes& of) {
  int thread = threadIdx.x, lane = thread % WARP, programs = gridDim.x;
  int row = thread / 128 * 64 + thread / WARP % 4 * 16 + lane / 4;  // of the tile, this thread's first
  u32 byte = lane % 4, pick = byte << 12 | byte << 8 | (byte + 4) << 4 | (byte + 4);
  Walk walk = walk_of(of, blockIdx.x);
  Segment now;
  Ring ring = {0, 0};
  while (next_segment(now, walk, of, programs)) {
    float d[SUMS];
    Operand w[2];
    Codes codes;
    Scales scales;
#pragma unroll
    for (int i = 0; i < SUMS; i++) d[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) w[0].of[i] = w[1].of[i] = 0;
    barrier_wait(full_bar(base, ring.stage), ring.phase);
    load_codes(codes, base, ring.stage, 0, row);
    load_pairs(scales, base, ring.stage, row);
    for (int step = now.low; step < now.high - 1; step++)
      multiply_step<false>(d, w, codes, scales, ring, base, row, pick, step > now.low);
    multiply_step<true>(d, w, codes, scales, ring, base, row, pick, now.high - 1 > now.low);
    made_wait<0>();
    keep(w[0].of);
    keep(w[1].of);
    settle(d);
    barrier_arrive_warp(empty_bar(base, ring.stage == 0 ? STAGES - 1 : ring.stage - 1));
    if (now.low > 0 || now.high < of.steps) {
      int own = blockIdx.x, others = last_part(now.tile, of) - first_part(now.tile, of);
      store_sums(d, sums_of(p, slot_of(own, now.tile, of), thread));
      if (p.counters == nullptr) continue;
      __threadfence();
      sync_threads_of<MULTIPLIERS>(1);
      if (thread == 0) {
        bool last = atomicAdd(p.counters + now.tile, 1) == others;
        if (last) p.counters[now.tile] = 0;
        __threadfence();
        *is_last = last;
      }
      sync_threads_of<MULTIPLIERS>(1);
      if (!*(volatile int*)is_last) continue;
      __threadfence();
      add_parts(d, p, of, now.tile, own, thread);
    }
    store_tile(d, base + STAGED, p, place_of(now.tile, of), row - lane / 4, thread);
  }
}

INLINE Sizes sizes_of(int rows, int n, int k, int split, int each, int together) {
  Sizes of;
  of.steps = (k + STEP - 1) / STEP;
  of.weight_tiles = (n + ROWS - 1) / ROWS;
  of.token_tiles = (rows + TOKENS - 1) / TOKENS;
  of.tiles = of.weight_tiles * of.token_tiles;
  of.split = split;
  of.each = each;
  of.together = together;
  return of;
}

extern "C" __global__ void __launch_bounds__(384, 1)
    fp4_gemm(TENSOR_MAP(a_map), TENSOR_MAP(w_map), const u8* scales, const float* factor, const void* bias, OUT* out,
             float4* parts, int* counters, int counted, int unit, int rows, int n, int k, int split, int each, int together,
             int bias_kind, int vectors, i64 scale_row, i64 out_row, i64 out_column) {
  follow_launches();
  extern __shared__ __align__(1024) char memory[];
  u32 base = shared_address(memory);
  Parameters p = {scales,    factor,  bias,      out,     parts,     counted ? counters : nullptr, rows, n, k / GROUP, unit,
                  bias_kind, vectors, scale_row, out_row, out_column};
  Sizes of = sizes_of(rows, n, k, split, each, together);
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_begin(full_bar(base, i), 1 + LOADERS / WARP);
      barrier_begin(empty_bar(base, i), MULTIPLIERS / WARP);
    }
    fence_barriers();
    tma_prefetch_map(&a_map);
    tma_prefetch_map(&w_map);
  }
  __syncthreads();
  if (group == 2) {
    give_registers<40>();
    int warp = __shfl_sync(~0u, threadIdx.x / WARP % 4, 0);
    if (warp == 0) load_tiles(base, &a_map, &w_map, of);
    else widen_all_scales(base, p, of);
  } else {
    take_registers<232>();
    multiply_all(base, (int*)(memory + IS_LAST), p, of);
  }
}

// A tile that was cut, from the sums of its parts.
extern "C" __global__ void __launch_bounds__(256)
    fp4_sum(const float* factor, const void* bias, OUT* out, float4* parts, int rows, int n, int k, int split, int each,
            int together, int bias_kind, int vectors, i64 out_row, i64 out_column) {
  follow_launches();
  __shared__ __align__(16) char staged[8 * 512];
  Parameters p = {nullptr,   factor, bias,      out,     parts, nullptr, rows,      n,
                  k / GROUP, 1,      bias_kind, vectors, 0,     out_row, out_column};
  Sizes of = sizes_of(rows, n, k, split, each, together);
  int thread = threadIdx.x, tile = blockIdx.x;
  if (first_part(tile, of) == last_part(tile, of)) return;  // `fp4_gemm` wrote it
  float d[SUMS];
  add_parts(d, p, of, tile, -1, thread);
  int row = thread / 128 * 64 + thread / WARP % 4 * 16;
  store_tile(d, shared_address(staged), p, place_of(tile, of), row, thread);
}
