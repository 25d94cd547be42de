// Kernels that pass values between ranks, on a CPU: the launches of several ranks at once, in place of `emulation.cpp`.
//
// A rank runs its launches one after the other; of a launch some blocks are resident, and the next begin in order as
// others end. What comes next is drawn by lot: a warp runs to its next stop, or a store arrives. Stores in slots are under
// way until then, element by element; a launch ends when all of its own have arrived. A look lets others run. Time passes
// with each draw.
#include "fibers.h"
#include <stdlib.h>
#include <string.h>

#include <vector>

struct Dim {
  unsigned x;
};
extern "C" {
Dim threadIdx, blockIdx, blockDim, gridDim;
unsigned emulated_rank, emulated_cluster;
}

namespace {
constexpr unsigned WARP = 32, STACK = 1 << 16, PLACES = 16, NOBODY = 0x7FC0DEAD;
enum State { READY, AT_SHUFFLE, AT_BARRIER, DONE };
enum Fault { NONE = 0, DIVERGED = 1, TOO_MANY = 2, NO_MEMORY = 3, STUCK = 4 };

struct Fiber {
  Stack stack;
  char* memory;
  State state;
  unsigned box, from;
};
struct Launch {  // as `ranks.py` packs it
  const void* parameters;
  unsigned rank, blocks, threads;
};
struct Store {
  char* to;
  unsigned long long value;
  unsigned bytes;
};
struct Block {  // a resident one
  bool used;
  unsigned rank, index, slow;  // a warp that seldom runs
  const Launch* of;
  std::vector<Fiber> fibers;
};
struct Rank {
  std::vector<const Launch*> launches;
  unsigned at = 0, begun = 0, running = 0;  // launch, its blocks
  std::vector<Store> under_way;
};

std::vector<Rank> ranks;
Block blocks[PLACES];
Stack scheduler;
Fiber* current;
unsigned current_rank, current_place, element;
unsigned long long now, seed, quiet;
void (*body)(const void*);

unsigned lot(unsigned below) {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(seed >> 33) % below;
}

void enter() {
  Fiber* me = current;
  body(blocks[current_place].of->parameters);
  me->state = DONE;
  go_on(me->stack, scheduler);
}

void stop(State at) {
  Fiber* me = current;
  me->state = at;
  go_on(me->stack, scheduler);
}

void resume(unsigned place, unsigned fiber) {
  Block& in = blocks[place];
  current = &in.fibers[fiber];
  current_rank = in.rank;
  current_place = place;
  blockDim.x = in.of->threads;
  gridDim.x = in.of->blocks;
  emulated_cluster = 1;
  threadIdx.x = fiber;
  blockIdx.x = in.index;
  current->state = READY;
  go_on(scheduler, current->stack);
}

unsigned count(const Block& in, unsigned begin, unsigned end, State state) {
  unsigned found = 0;
  for (unsigned i = begin; i < end; i++) found += in.fibers[i].state == state;
  return found;
}

// Lets the warp of lanes [begin, end) run: those that may go on, or all at once that wait for a shuffle.
Fault run_warp(unsigned place, unsigned begin, unsigned end) {
  Block& in = blocks[place];
  unsigned ready = count(in, begin, end, READY), waiting = count(in, begin, end, AT_SHUFFLE);
  if (ready) {
    unsigned turn = lot(end - begin);
    for (unsigned i = 0; i < end - begin; i++) {
      unsigned fiber = begin + (i + turn) % (end - begin);
      if (in.fibers[fiber].state == READY) resume(place, fiber);
    }
  } else if (waiting) {
    if (waiting + count(in, begin, end, DONE) != end - begin) return DIVERGED;
    unsigned boxes[WARP];
    for (unsigned i = 0; i < WARP; i++)
      boxes[i] = begin + i < end && in.fibers[begin + i].state == AT_SHUFFLE ? in.fibers[begin + i].box : NOBODY;
    for (unsigned i = begin; i < end; i++) {
      if (in.fibers[i].state != AT_SHUFFLE) continue;
      in.fibers[i].box = boxes[in.fibers[i].from];
      in.fibers[i].state = READY;
    }
  }
  return NONE;
}

Fault begin_block(unsigned rank) {
  Rank& of = ranks[rank];
  unsigned place = 0;
  while (place < PLACES && blocks[place].used) place++;
  if (place == PLACES) return NONE;  // later
  Block& in = blocks[place];
  in.used = true;
  in.rank = rank;
  in.of = of.launches[of.at];
  in.index = of.begun++;
  of.running++;
  in.slow = lot(in.of->threads / WARP);
  in.fibers.resize(in.of->threads);
  for (Fiber& fiber : in.fibers) {
    fiber.memory = (char*)malloc(STACK);
    if (!fiber.memory) return NO_MEMORY;
    begin_on(fiber.stack, fiber.memory, STACK, enter);
    fiber.state = READY;
  }
  return NONE;
}

// A barrier that all have reached, and whether the block has ended.
Fault open_barrier(unsigned place) {
  Block& in = blocks[place];
  unsigned all = (unsigned)in.fibers.size(), there = count(in, 0, all, AT_BARRIER);
  if (there && there == all)
    for (Fiber& fiber : in.fibers) fiber.state = READY;
  else if (there && there + count(in, 0, all, DONE) == all) return DIVERGED;
  if (count(in, 0, all, DONE) == all) {
    for (Fiber& fiber : in.fibers) free(fiber.memory);
    in.used = false;
    ranks[in.rank].running--;
  }
  return NONE;
}

void arrive(Rank& of, unsigned which) {
  Store store = of.under_way[which];
  memcpy(store.to, &store.value, store.bytes);
  of.under_way[which] = of.under_way.back();
  of.under_way.pop_back();
  quiet = 0;
}
}  // namespace

extern "C" void __syncthreads() { stop(AT_BARRIER); }
extern "C" unsigned emulated_exchange(unsigned value, unsigned lane) {
  Fiber* me = current;
  me->box = value;
  me->from = lane;
  stop(AT_SHUFFLE);
  return me->box;
}
extern "C" int emulated_any_of_block(int mine) {
  static int any[PLACES];
  unsigned place = current_place;
  any[place] |= mine;
  stop(AT_BARRIER);
  int found = any[place];
  stop(AT_BARRIER);
  any[place] = 0;
  return found;
}
extern "C" unsigned long long emulated_nanoseconds() { return now; }
extern "C" void emulated_send(unsigned long long to, const unsigned* words) {
  for (unsigned at = 0; at < 16; at += element) {
    Store store = {(char*)to + at, 0, element};
    memcpy(&store.value, (const char*)words + at, element);
    ranks[current_rank].under_way.push_back(store);
  }
}
extern "C" void emulated_look(unsigned long long at, unsigned* words) {
  stop(READY);
  memcpy(words, (const void*)at, 16);
}
extern "C" int emulated_launch(void (*)(const void*), const void*, unsigned, unsigned, unsigned, int) { return TOO_MANY; }

// All launches of all ranks, each rank's in order, with so many blocks of a rank resident; elements of so many bytes.
extern "C" int run_ranks(
    void (*kernel)(const void*), const Launch* launches, unsigned number, unsigned world, unsigned resident, unsigned bytes,
    unsigned long long lots, unsigned long long patience) {
  body = kernel;
  element = bytes;
  seed = lots;
  now = quiet = 0;
  ranks.assign(world, Rank());
  for (unsigned i = 0; i < number; i++) ranks[launches[i].rank].launches.push_back(&launches[i]);
  for (;;) {
    bool ended = true;
    for (unsigned rank = 0; rank < world; rank++) {
      Rank& of = ranks[rank];
      if (of.at < of.launches.size() && of.begun == of.launches[of.at]->blocks && !of.running) {
        while (!of.under_way.empty()) arrive(of, 0);
        of.at++;
        of.begun = 0;
      }
      ended &= of.at == of.launches.size();
    }
    if (ended) return NONE;
    now += 100;
    if (++quiet > patience) return STUCK;
    unsigned rank = lot(world), action = lot(8);
    Rank& of = ranks[rank];
    if (of.at == of.launches.size()) continue;
    if (action == 0 && of.running < resident && of.begun < of.launches[of.at]->blocks) {
      if (Fault fault = begin_block(rank)) return fault;
    } else if (action < 4 && !of.under_way.empty()) {
      for (unsigned i = lot(64) + 1; i && !of.under_way.empty(); i--) arrive(of, lot((unsigned)of.under_way.size()));
    } else {
      unsigned place = lot(PLACES);
      for (unsigned i = 0; i < PLACES && !(blocks[place].used && blocks[place].rank == rank); i++) place = (place + 1) % PLACES;
      Block& in = blocks[place];
      if (!in.used || in.rank != rank) continue;
      unsigned threads = in.of->threads, warps = (unsigned)in.fibers.size() / WARP, warp = lot(warps);
      if (threads % WARP) return TOO_MANY;
      if (warp == in.slow && lot(64)) continue;
      unsigned done = count(in, warp * WARP, warp * WARP + WARP, DONE);
      if (Fault fault = run_warp(place, warp * WARP, warp * WARP + WARP)) return fault;
      if (count(in, warp * WARP, warp * WARP + WARP, DONE) != done) quiet = 0;
      if (Fault fault = open_barrier(place)) return fault;
    }
  }
}
