// The sum of x over all ranks in one launch and one step, as kernelhub.ops.comm.all_reduce says. A thread has a unit of 16
// bytes: it sends it to the slot of this rank on every other rank, and adds up what comes from them.
//
// A block waits only for blocks of other ranks that come no later in their grids: blocks need not all be resident.
//
// Defined by the host: ELEMENT, SIZE, WORLD (see slots.h), THREADS of a block, LOOKS that are under way.
#include "slots.h"

struct Parameters {
  const T* x;
  T* out;
  int* counters;
  u8* missing;
  Ranks ranks;
  i64 units;
};

extern "C" __global__ void __launch_bounds__(THREADS) all_reduce(const Parameters p) {
  follow_launches();
  u32 units = (u32)p.units, unit = blockIdx.x * THREADS + threadIdx.x;
  bool inside = unit < units;
  u32 at[1] = {(inside ? unit : units - 1) * 16};  // a thread past the end has the last unit, too
  Unit own = held<T, N>((const T*)((const char*)p.x + at[0]));
  Turn turn(p.ranks, p.counters[blockIdx.x]);
  if (turn.live() && inside) {
    Unit sent = sendable(own);
#pragma unroll
    for (int other = 0; other < OTHERS; other++) send(p.ranks.to[other] + turn.here + at[0], sent);
  }
  turn.empty_last(p.ranks, unit, gridDim.x * THREADS);
  u64 limit_ns = nanoseconds() + (u64)p.ranks.limit_us * 1000;
  Wait<1, LOOKS> wait;
  bool in_time = true;
  if (turn.live()) {
    in_time = wait.until(p.ranks.own + turn.here, turn.sender, at, limit_ns);
  } else {
#pragma unroll
    for (int other = 0; other < OTHERS; other++) wait.come[0][other] = empty_unit();
  }
  float total[N];
  add_up(p.ranks, own, wait.come[0], total);
  Unit made;
  narrow_all(total, made);
  if (inside) put<T, N>((T*)((char*)p.out + at[0]), made);
  if (!in_time) note_missing(p.missing, p.ranks, wait.come);
  // All threads have read the counter.
  bool late = any_of_block(!in_time);
  int following = late || !turn.live() ? -1 : turn.following(p.units);
  for (u32 counter = blockIdx.x + threadIdx.x * gridDim.x; counter < COUNTERS; counter += THREADS * gridDim.x)
    p.counters[counter] = following;
  wait.keep(p.units == 0, p.ranks.own);  // a launch has units
}
EMULATED(all_reduce, Parameters)
