// Fibers: functions with a stack of their own that hand the processor to each other. Part of machine.cpp.
//
// On x86-64 a switch is a dozen instructions (ucontext's makes a system call); elsewhere it is ucontext's.
// AddressSanitizer is told of every switch.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define HW_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
#define HW_FAST_SWITCH 1
// Saves the registers that a callee keeps and the stack pointer to *from, then takes up what `to` saved.
extern "C" void hw_switch_stack(void **from, void *to);
asm(R"(
.text
.type hw_switch_stack, @function
hw_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hw_switch_stack, .-hw_switch_stack
)");
#endif

namespace hw::emulation {

// A stack with an unmapped page below it, so that overflow ends the process instead of changing a neighbour.
class Stack {
 public:
  static constexpr size_t GUARD = 4096, BYTES = size_t{256} << 10;

  Stack() {
    void *memory =
        mmap(nullptr, GUARD + BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char *>(memory);
    mprotect(base_, GUARD, PROT_NONE);
  }
  ~Stack() { munmap(base_, GUARD + BYTES); }
  Stack(const Stack &) = delete;
  Stack &operator=(const Stack &) = delete;

  char *bottom() const { return base_ + GUARD; }
  char *top() const { return base_ + GUARD + BYTES; }

 private:
  char *base_;
};

class Fiber {
 public:
  // The fiber of the caller itself: it has a stack already.
  Fiber() = default;

  // Makes `entry` run on `stack` at the first switch; it must not return.
  void prepare(Stack &stack, void (*entry)()) {
    bottom_ = stack.bottom();
    bytes_ = Stack::BYTES;
#ifdef HW_ASAN
    __asan_unpoison_memory_region(bottom_, bytes_);
#endif
#ifdef HW_FAST_SWITCH
    void **top = reinterpret_cast<void **>(stack.top());
    *--top = nullptr;  // where a return address would be: keeps the stack aligned as after a call
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    saved_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom_;
    context_.uc_stack.ss_size = bytes_;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // Suspends this fiber, which must be the running one. `ends`: it will not run again.
  void switch_to(Fiber &next, [[maybe_unused]] bool ends = false) {
#ifdef HW_ASAN
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack_, next.bottom_, next.bytes_);
#endif
#ifdef HW_FAST_SWITCH
    hw_switch_stack(&saved_, next.saved_);
#else
    swapcontext(&context_, &next.context_);
#endif
#ifdef HW_ASAN
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // The first thing a fiber's entry does. `first`: the fiber that was not prepared and switched to the first of all.
  void entered([[maybe_unused]] Fiber &first) {
#ifdef HW_ASAN
    const void *bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (first.bottom_ == nullptr) first.bottom_ = bottom, first.bytes_ = bytes;
#endif
  }

 private:
  const void *bottom_ = nullptr;
  size_t bytes_ = 0;
#ifdef HW_FAST_SWITCH
  void *saved_ = nullptr;
#else
  ucontext_t context_;
#endif
#ifdef HW_ASAN
  void *fake_stack_ = nullptr;
#endif
};

}  // namespace hw::emulation
