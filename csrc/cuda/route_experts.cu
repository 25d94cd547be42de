// Routing of tokens to experts: a warp has a token, each lane EACH neighbouring experts of one group in registers.
//
//   key = what an expert is ranked by, as an unsigned integer of the same order; 0 is below -inf: no expert, or taken
//   a group is chosen if fewer than TOPK_GROUPS are ranked before it; keys of others become 0
//   TOP_K times: the largest key of the warp, of equals the lowest expert; its lane takes it out
//
// Groups are padded to a power of two, and lanes shared among them, so that lanes of one group are neighbours.
//
// Defined by the host: ELEMENT (bf16, f16, float), SIZE of one, EXPERTS, TOP_K, GROUPS, TOPK_GROUPS, LANES of a group, EACH,
// SCORING (0 softmax, 1 sigmoid, 2 softmax of the chosen), HAS_BIAS, RENORMALIZE.
#include "reduce.h"

typedef ELEMENT T;

struct Parameters {
  const T* logits;
  const float* bias;
  float* weights;
  int* ids;
  i64 tokens;
  i64 l_row, l_column, b_step, w_row, w_column, i_row, i_column;
  float factor;
};

constexpr int OF_GROUP = EXPERTS / GROUPS;
constexpr int HELD = (TOP_K + WARP - 1) / WARP;  // experts of the result that a lane writes
// The share of a chosen expert among the chosen, whose sum among all may be next to nothing.
constexpr bool OVER_CHOSEN = SCORING == 2 || (SCORING == 0 && RENORMALIZE);
constexpr bool SOFTMAX_OVER_ALL = SCORING == 0 && (HAS_BIAS || !RENORMALIZE);

INLINE float lowest() { return float_of(0xFF800000); }  // -inf

INLINE float number_of(float x) {
  constexpr float most = Largest<float>::value;
  return x != x ? lowest() : x > most ? most : x;
}

INLINE float share_of(float x, float top) { return __expf(x - (top == lowest() ? 0.0f : top)); }

INLINE float score_of(float number, float top, float total) {
  if (SCORING == 0) return SOFTMAX_OVER_ALL ? share_of(number, top) / total : number;
  return SCORING == 1 ? __fdividef(1.0f, 1.0f + __expf(-number)) : number;
}

// The largest key of a lane, and which of its experts has it: of equals the first.
INLINE void find(const u32 (&keys)[EACH], u32& most, int& at) {
  most = keys[0];
  at = 0;
#pragma unroll
  for (int i = 1; i < EACH; i++)
    if (keys[i] > most) most = keys[i], at = i;
}

// The best value of a group, with a bias plus the next one; known to its lanes.
INLINE float best_of_group(const float (&ranked)[EACH]) {
  float first = lowest(), second = lowest();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    second = larger(second, fminf(first, ranked[i]));
    first = larger(first, ranked[i]);
  }
#pragma unroll
  for (int step = LANES / 2; step; step /= 2) {
    float other = __shfl_xor_sync(~0u, first, step), next = __shfl_xor_sync(~0u, second, step);
    second = larger(fminf(first, other), larger(second, next));
    first = larger(first, other);
  }
  if (!HAS_BIAS || OF_GROUP == 1) return first;
  float both = first + second;
  return both == both ? both : lowest();
}

INLINE bool is_chosen(int group, float best) {
  u32 mine = ordered(best);
  int before = 0;
#pragma unroll
  for (int other = 0; other < GROUPS; other++) {
    u32 key = ordered(__shfl_sync(~0u, best, other * LANES));
    before += key > mine || (key == mine && other < group);
  }
  return before < TOPK_GROUPS;
}

// VECTORS: a lane's experts are read in vectors. Each group then has LANES * EACH experts.
template <bool VECTORS> INLINE void route(const Parameters& p) {
  follow_launches();
  constexpr int N = !VECTORS ? 1 : EACH * SIZE % 16 == 0 ? 16 / SIZE : EACH * SIZE % 8 == 0 ? 8 / SIZE : 4 / SIZE;
  i64 token = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
  if (token >= p.tokens) return;  // all lanes of a warp have the same
  int lane = threadIdx.x % WARP, group = lane / LANES, in_group = lane % LANES * EACH, first = group * OF_GROUP + in_group;
  const T* logits = p.logits + token * p.l_row;

  float numbers[EACH], ranked[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) numbers[i] = lowest();
  if (VECTORS && group < GROUPS) {
#pragma unroll
    for (int i = 0; i < EACH; i += N) {
      Vector<T, N> some = *(const Vector<T, N>*)(logits + first + i);
#pragma unroll
      for (int j = 0; j < N; j++) numbers[i + j] = number_of(widened(some.at[j]));
    }
  } else if (group < GROUPS) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (in_group + i < OF_GROUP) numbers[i] = number_of(widened(logits[(first + i) * p.l_column]));
  }

  float top = 0.0f, total = 1.0f;
  if (SOFTMAX_OVER_ALL) {
    top = numbers[0];
#pragma unroll
    for (int i = 1; i < EACH; i++) top = larger(top, numbers[i]);
    top = value_of_ordered(most_of_warp(ordered(top)));
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) total += share_of(numbers[i], top);
    total = sum_of_lanes<WARP>(total);
    if (total == 0.0f) total = 1.0f;
  }

  u32 keys[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    bool is_expert = group < GROUPS && in_group + i < OF_GROUP;
    ranked[i] = numbers[i];
    if (HAS_BIAS && is_expert) {
      float biased = score_of(numbers[i], top, total) + p.bias[(first + i) * p.b_step];
      ranked[i] = biased == biased ? biased : lowest();
    }
    keys[i] = is_expert ? ordered(ranked[i]) : 0;
  }
  if (GROUPS > 1) {
    bool chosen = is_chosen(group, best_of_group(ranked));
#pragma unroll
    for (int i = 0; i < EACH; i++) keys[i] = chosen ? keys[i] : 0;
  }

  int ids[HELD] = {};
  float found[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) found[i] = lowest();
  u32 most;
  int at;
  find(keys, most, at);
#pragma unroll 1
  for (int place = 0; place < TOP_K; place++) {
    u32 key = most_of_warp(most);
    int expert = (int)least_of_warp(most == key ? (u32)(first + at) : ~0u);
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (place == i * WARP + lane) ids[i] = expert, found[i] = value_of_ordered(key);
    if (first + at == expert && most == key) {
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (i == at) keys[i] = 0;
      find(keys, most, at);
    }
  }

  float sum = 0.0f, largest = lowest();
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    bool is_result = i * WARP + lane < TOP_K;
    if (HAS_BIAS && is_result) found[i] = number_of(widened(logits[ids[i] * p.l_column]));
    if (OVER_CHOSEN) {
      largest = larger(largest, found[i]);
    } else {
      found[i] = is_result ? score_of(found[i], top, total) : 0.0f;
      sum += found[i];
    }
  }
  float divisor = 1.0f;
  if (OVER_CHOSEN) {
    largest = value_of_ordered(most_of_warp(ordered(largest)));
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      found[i] = share_of(found[i], largest);
      sum += found[i];
    }
    divisor = sum_of_lanes<WARP>(sum);
    if (divisor == 0.0f) divisor = 1.0f;
  } else if (RENORMALIZE) {
    divisor = sum_of_lanes<WARP>(sum) + 1e-20f;
  }
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    int place = i * WARP + lane;
    if (place < TOP_K) {
      p.weights[token * p.w_row + place * p.w_column] = found[i] / divisor * p.factor;
      p.ids[token * p.i_row + place * p.i_column] = ids[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) route_elements(const Parameters p) { route<false>(p); }
EMULATED(route_elements, Parameters)

#if LANES * EACH * GROUPS == EXPERTS && EACH * SIZE % 4 == 0
extern "C" __global__ void __launch_bounds__(128) route_vectors(const Parameters p) { route<true>(p); }
EMULATED(route_vectors, Parameters)
#endif
