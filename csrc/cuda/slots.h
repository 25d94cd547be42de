// Values between ranks through slots in memory that all ranks map, as kernelhub/backends/triton/comm/slots.py and
// turns.py say: an element that has not come is all ones, a NaN that no rank sends, so that no flag says that one has.
//
// Three sets of slots take turns, each with a slot for each other rank. A counter holds the set of this call, and above
// its two lowest bits how many units of 16 bytes of each slot the call before has used, which this call empties; or -1,
// once a rank was waited for in vain: then nothing is sent and nothing is waited for. Calls leave equal counters.
//
// Defined by the host: ELEMENT (bf16, f16, float), SIZE of one, WORLD.
#pragma once
#include "cluster.h"

typedef ELEMENT T;

constexpr int N = 16 / SIZE, OTHERS = WORLD - 1;
constexpr int SETS = 3, COUNTERS = 512;
constexpr u32 ONES = 0xFFFFFFFF;

typedef Held<T, N> Unit;

// What a kernel needs of the ranks.
struct Ranks {
  i64 rank;
  u64 to[OTHERS];  // the slot of this rank on each other rank, in the first set
  u64 own;         // the slots of the others here, likewise
  i64 capacity;    // of a slot, in units of 16 bytes
  i64 limit_us;    // longest wait
};

#ifdef KERNELHUB_EMULATED
INLINE u64 nanoseconds() { return emulated_nanoseconds(); }
INLINE void send(u64 to, const Unit& unit) { emulated_send(to, unit.words); }
INLINE void look(u64 at, Unit& unit) { emulated_look(at, unit.words); }
INLINE void pause(u32) {}
constexpr u32 BETWEEN_CLOCKS = 4;
INLINE bool any_of_block(bool mine) { return emulated_any_of_block(mine); }
#else
constexpr u32 BETWEEN_CLOCKS = 1024;  // looks, about half a millisecond
INLINE bool any_of_block(bool mine) { return __syncthreads_or(mine); }
INLINE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// Each element says by itself that it has come, so that stores and looks need no order.
INLINE void send(u64 to, const Unit& unit) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(unit.words[0]), "r"(unit.words[1]), "r"(unit.words[2]), "r"(unit.words[3])
               : "memory");
}
INLINE void look(u64 at, Unit& unit) {
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.words[0]), "=r"(unit.words[1]), "=r"(unit.words[2]), "=r"(unit.words[3])
               : "l"(at)
               : "memory");
}
// So many cycles, about.
INLINE void pause(u32 cycles) {
  u32 begun, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(begun));
  do asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  while (now - begun < cycles);
}
#endif

// A bit of 0x80008000 for each half that is all ones, or, for elements of 32 bits, all ones.
INLINE u32 empty_elements(u32 word) {
  if (SIZE == 4) return word == ONES ? 0x80000000 : 0;
  u32 holes = ~word;
  return ~(((holes & 0x7FFF7FFF) + 0x7FFF7FFF) | holes) & 0x80008000;
}

// The same values, of which none is an empty element: that NaN loses its sign.
INLINE Unit sendable(Unit unit) {
#pragma unroll
  for (int i = 0; i < 4; i++) unit.words[i] ^= empty_elements(unit.words[i]);
  return unit;
}

INLINE bool lacks(const Unit& unit) {
  u32 any = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 word = unit.words[i];
    // The usual test of the complement for a half of zeros, exact for whether there is one.
    any |= SIZE == 4 ? empty_elements(word) : (0xFFFEFFFE - word) & word & 0x80008000;
  }
  return any;
}

INLINE Unit empty_unit() {
  Unit unit;
#pragma unroll
  for (int i = 0; i < 4; i++) unit.words[i] = ONES;
  return unit;
}

// This call's set of slots, and what its calls have to do.
struct Turn {
  int state;
  u64 sender, here;  // bytes of a slot, and where this call's set begins

  INLINE_METHOD Turn(const Ranks& ranks, int state) : state(state) {
    sender = (u64)ranks.capacity * 16;
    here = (u64)(state & 3) * OTHERS * sender;
  }
  INLINE_METHOD bool live() const { return state >= 0; }
  // The counters after this call, which uses so many units of each slot.
  INLINE_METHOD int following(i64 units) const { return ((state & 3) + 1) % SETS + (int)units * 4; }

  // Share `thread` of `threads` of what the call before has used.
  INLINE_METHOD void empty_last(const Ranks& ranks, u32 thread, u32 threads) const {
    u32 used = state < 0 ? 0 : (u32)state >> 2;
    u64 there = (u64)(((state & 3) + 2) % SETS) * OTHERS * sender;
    Unit unit = empty_unit();
#pragma unroll 1
    for (u32 at = thread; at < used; at += threads)
#pragma unroll
      for (int other = 0; other < OTHERS; other++) send(ranks.own + there + other * sender + (u64)at * 16, unit);
  }
};

// Units of this thread of the other ranks, `come[i][other]` at `at[i]` bytes of a slot.
//
// Looks, 1 to 3, of each unit are under way at a time, some cycles apart: what comes is seen after the time of one, and
// after half a distance in the mean. A look that nobody waits for any more has registers of its own until the end, for
// which `keep` is: what else used them would wait for it.
template <int Each, int Looks> struct Wait {
  static constexpr u32 APART = 256 / Looks;
  Unit come[Each][OTHERS], first[Each][OTHERS], second[Each][OTHERS], third[Each][OTHERS];

  // True once all have come, false if some have not until the limit.
  INLINE_METHOD bool until(u64 from, u64 sender, const u32 (&at)[Each], u64 limit_ns) {
    ask(first, from, sender, at);
    if (Looks > 1) {
      pause(APART);
      ask(second, from, sender, at);
    }
    if (Looks > 2) {
      pause(APART);
      ask(third, from, sender, at);
    }
    for (;;) {
#pragma unroll 1
      for (u32 turn = 0; turn < BETWEEN_CLOCKS; turn++) {
        if (all(first)) return take(first);
        ask(first, from, sender, at);
        if (Looks > 1) {
          if (all(second)) return take(second);
          ask(second, from, sender, at);
        }
        if (Looks > 2) {
          if (all(third)) return take(third);
          ask(third, from, sender, at);
        }
      }
      if (nanoseconds() > limit_ns) {
        take(first);
        return all(come);
      }
    }
  }
  // The last statement of a kernel, with a condition that never holds and that the compiler does not know.
  INLINE_METHOD void keep(bool never, u64 anywhere) const {
    if (Looks > 1 && never) {
#pragma unroll
      for (int i = 0; i < Each; i++)
#pragma unroll
        for (int other = 0; other < OTHERS; other++) {
          u64 to = anywhere + (i * OTHERS + other) * 48;
          send(to, first[i][other]);
          send(to + 16, second[i][other]);
          if (Looks > 2) send(to + 32, third[i][other]);
        }
    }
  }

private:
  INLINE_METHOD static void ask(Unit (&of)[Each][OTHERS], u64 from, u64 sender, const u32 (&at)[Each]) {
#pragma unroll
    for (int i = 0; i < Each; i++)
#pragma unroll
      for (int other = 0; other < OTHERS; other++) look(from + other * sender + at[i], of[i][other]);
  }
  INLINE_METHOD static bool all(const Unit (&of)[Each][OTHERS]) {
    bool some = false;
#pragma unroll
    for (int i = 0; i < Each; i++)
#pragma unroll
      for (int other = 0; other < OTHERS; other++) some |= lacks(of[i][other]);
    return !some;
  }
  // Word by word: a copy of memory would keep all that is asked for in the stack.
  INLINE_METHOD bool take(const Unit (&of)[Each][OTHERS]) {
#pragma unroll
    for (int i = 0; i < Each; i++)
#pragma unroll
      for (int other = 0; other < OTHERS; other++)
#pragma unroll
        for (int word = 0; word < 4; word++) come[i][other].words[word] = of[i][other].words[word];
    return true;
  }
};

// Mark the ranks of which a unit lacks something; bytes in memory of the host.
template <int Each> INLINE void note_missing(u8* missing, const Ranks& ranks, const Unit (&come)[Each][OTHERS]) {
#pragma unroll
  for (int i = 0; i < Each; i++)
#pragma unroll
    for (int other = 0; other < OTHERS; other++)
      if (lacks(come[i][other])) missing[other < ranks.rank ? other : other + 1] = 1;
}

// The sum of a unit over all ranks in their order, in float32.
INLINE void add_up(const Ranks& ranks, const Unit& own, const Unit (&come)[OTHERS], float (&total)[N]) {
#pragma unroll
  for (int rank = 0; rank < WORLD; rank++) {
    Unit unit = own;
    if (WORLD == 2) {  // a sum of two has no order
      unit = rank ? come[0] : own;
    } else {
#pragma unroll
      for (int word = 0; word < 4; word++) {
        u32 below = come[rank < OTHERS ? rank : OTHERS - 1].words[word], above = come[rank ? rank - 1 : 0].words[word];
        unit.words[word] = rank == ranks.rank ? own.words[word] : rank < ranks.rank ? below : above;
      }
    }
    float values[N];
    widen_all(unit, values);
#pragma unroll
    for (int i = 0; i < N; i++) total[i] = rank ? total[i] + values[i] : values[i];
  }
}
