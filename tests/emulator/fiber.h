// A stack of its own to run a function on, and the way there and back.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <new>
#include <string>

#if defined(__x86_64__) && !defined(EMULATOR_PORTABLE)
#define EMULATOR_SWITCHES_STACKS 1
#else
#include <ucontext.h>
#endif

namespace emulated {

constexpr size_t STACK_NBYTES = 256 * 1024;  // of address space; only what is touched counts

struct Stack {
    unsigned char *base;
    size_t nbytes;  // up to the top

    Stack() {
        void *mapped = mmap(nullptr, STACK_NBYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        base = static_cast<unsigned char *>(mapped);
        // Tops at one offset of their pages would all fall into the same few lines of the cache.
        static size_t num_made = 0;
        nbytes = STACK_NBYTES - num_made++ % 32 * 192;
    }
    Stack(const Stack &) = delete;
    Stack &operator=(const Stack &) = delete;
    ~Stack() { munmap(base, STACK_NBYTES); }
};

#if defined(EMULATOR_SWITCHES_STACKS)

struct Fiber {
    std::unique_ptr<Stack> stack;
    void *stack_pointer = nullptr;
};

// Save the registers that a call preserves, change stacks, restore them.
asm(R"(
.text
.local emulated_switch
.type emulated_switch, @function
emulated_switch:
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
)");
extern "C" void emulated_switch(void **saved, void *next);

inline void *scheduler_stack_pointer;

inline void prepare_fiber(Fiber &fiber, void (*entry)()) {
    auto *top = reinterpret_cast<uint64_t *>(fiber.stack->base + fiber.stack->nbytes);
    *--top = 0;  // as a call leaves it: the entry sees a stack that is 8 off 16
    *--top = reinterpret_cast<uint64_t>(entry);
    for (int i = 0; i < 6; ++i) *--top = 0;
    fiber.stack_pointer = top;
}
inline void enter_fiber(Fiber &fiber) {
    emulated_switch(&scheduler_stack_pointer, fiber.stack_pointer);
}
inline void leave_fiber(Fiber &fiber) {
    emulated_switch(&fiber.stack_pointer, scheduler_stack_pointer);
}

#else  // slower, and everywhere

struct Fiber {
    std::unique_ptr<Stack> stack;
    std::unique_ptr<ucontext_t> context;
};

inline ucontext_t scheduler_context;

inline void prepare_fiber(Fiber &fiber, void (*entry)()) {
    fiber.context = std::make_unique<ucontext_t>();
    getcontext(fiber.context.get());
    fiber.context->uc_stack.ss_sp = fiber.stack->base;
    fiber.context->uc_stack.ss_size = fiber.stack->nbytes;
    fiber.context->uc_link = nullptr;
    makecontext(fiber.context.get(), entry, 0);
}
inline void enter_fiber(Fiber &fiber) { swapcontext(&scheduler_context, fiber.context.get()); }
inline void leave_fiber(Fiber &fiber) { swapcontext(fiber.context.get(), &scheduler_context); }

#endif

}  // namespace emulated
