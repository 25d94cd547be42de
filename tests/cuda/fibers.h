// Fibers: stacks between which a thread switches without a system call; each `swapcontext` makes one.
#pragma once
#undef _FORTIFY_SOURCE  // whose `longjmp` stays on one stack
#include <setjmp.h>
#include <ucontext.h>

struct Stack {
  ucontext_t context;  // where it begins
  jmp_buf stopped;     // where it goes on
  bool has_begun;
};

inline void begin_on(Stack& stack, char* memory, unsigned bytes, void (*enter)()) {
  getcontext(&stack.context);
  stack.context.uc_stack.ss_sp = memory;
  stack.context.uc_stack.ss_size = bytes;
  makecontext(&stack.context, enter, 0);
  stack.has_begun = false;
}

// Stops on one stack and goes on with another; returns when something goes on with the first.
inline __attribute__((noinline)) void go_on(Stack& from, Stack& with) {
#ifdef __SANITIZE_ADDRESS__  // it follows `swapcontext` alone
  swapcontext(&from.context, &with.context);
#else
  from.has_begun = true;
  if (_setjmp(from.stopped)) return;
  if (with.has_begun) _longjmp(with.stopped, 1);
  setcontext(&with.context);
#endif
}
