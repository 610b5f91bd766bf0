#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "fiber.h"

extern "C" unsigned char __start_emulated_shared[], __stop_emulated_shared[];

namespace emulated {

Index thread_idx, block_idx, block_dim, grid_dim;

namespace {

constexpr unsigned LANES = 32;
constexpr unsigned MAX_SHARED = 256 * 1024;
constexpr unsigned MAX_RESIDENT_THREADS = 1u << 17;
constexpr unsigned MAX_FRUITLESS_ROUNDS = 1000;

enum class State { READY, SPINNING, AT_WARP, AT_BARRIER, DONE };

struct Copy {
    void *target;
    const void *source;
    unsigned long nbytes;
};

struct Thread {
    Fiber fiber;
    std::deque<std::vector<Copy>> copies = {{}};  // by group; the last is open
    State state = State::READY;
    Index idx;
    unsigned warp_mask = 0;
};

struct Barrier {
    unsigned num_arrived = 0, sum = 0, last_sum = 0;
};

struct Warp {
    unsigned arrived = 0;
    unsigned long long words[LANES];
    alignas(16) unsigned char scratch[1024];
};

struct Block {
    Index idx;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Barrier barrier;
    unsigned num_alive = 0;
    std::vector<unsigned char> shared;  // while another block has its turn
};

// Keeps a launch's section of shared memory alive where no kernel has one of its own.
__attribute__((section("emulated_shared"), used)) unsigned char first_byte;
alignas(1024) __attribute__((section("emulated_shared"))) unsigned char dynamic[MAX_SHARED];

std::mutex one_launch;
Body body;
void **body_params;
unsigned shared_nbytes_of_launch;
std::string *failure;
Block *block;    // whose turn it is
Thread *thread;  // the running one
std::vector<std::unique_ptr<Stack>> free_stacks;

size_t thread_number() { return static_cast<size_t>(thread - block->threads.data()); }
Warp &own_warp() { return block->warps[thread_number() / LANES]; }

void suspend(State state) {
    thread->state = state;
    leave_fiber(thread->fiber);
}

void enter_body() {
    body(body_params);
    suspend(State::DONE);
}

void release_barrier() {
    Barrier &barrier = block->barrier;
    barrier.last_sum = barrier.sum;
    barrier.num_arrived = barrier.sum = 0;
    for (Thread &other : block->threads) {
        if (other.state == State::AT_BARRIER) other.state = State::READY;
    }
}

void end_thread(Thread &ended) {
    free_stacks.push_back(std::move(ended.fiber.stack));
    --block->num_alive;
    const unsigned num_arrived = block->barrier.num_arrived;
    if (num_arrived != 0 && num_arrived == block->num_alive) release_barrier();
}

void resume(Thread &next) {
    thread = &next;
    thread_idx = next.idx;
    block_idx = block->idx;
    enter_fiber(next.fiber);
    if (next.state == State::DONE) end_thread(next);
}

std::vector<unsigned> turns(size_t count, unsigned order, std::mt19937 &generator) {
    std::vector<unsigned> result(count);
    std::iota(result.begin(), result.end(), 0u);
    if (order == 1) std::reverse(result.begin(), result.end());
    if (order > 1) std::shuffle(result.begin(), result.end(), generator);
    return result;
}

class Launch {
  public:
    explicit Launch(unsigned order) : order_(order), generator_(order) {}

    void run() {
        const unsigned long long num_blocks = 1ull * grid_dim.x * grid_dim.y * grid_dim.z;
        unsigned num_fruitless = 0;
        while ((num_started_ < num_blocks || !resident_.empty()) && failure == nullptr) {
            if (num_started_ < num_blocks && has_room()) {
                start(num_started_++, num_blocks);
            } else {
                take_turn(resident_[turn_++ % resident_.size()].get());
            }
            num_fruitless = run_block() ? 0 : num_fruitless + 1;
            retire();
            if (num_fruitless > MAX_FRUITLESS_ROUNDS && failure == nullptr) {
                note_failure("every thread waits for another");
            }
        }
        resident_.clear();
        block = nullptr;
    }

    static void note_failure(const char *message) {
        static std::string text;
        char where[160] = "";
        if (thread != nullptr) {
            std::snprintf(where, sizeof where, " (block %u,%u,%u thread %u,%u,%u)", block_idx.x,
                          block_idx.y, block_idx.z, thread_idx.x, thread_idx.y, thread_idx.z);
        }
        text = std::string(message) + where;
        failure = &text;
    }

  private:
    bool has_room() const {
        const size_t num_threads = block_dim.x * block_dim.y * block_dim.z;
        return (resident_.size() + 1) * num_threads <= MAX_RESIDENT_THREADS || resident_.empty();
    }

    void take_turn(Block *next) {
        const size_t nbytes = static_cast<size_t>(__stop_emulated_shared - __start_emulated_shared);
        if (next == block) return;
        if (block != nullptr) block->shared.assign(__start_emulated_shared, __stop_emulated_shared);
        block = next;
        if (next->shared.empty()) {
            std::memset(__start_emulated_shared, 0x5a, nbytes);  // whatever was there
        } else {
            std::memcpy(__start_emulated_shared, next->shared.data(), nbytes);
        }
    }

    void start(unsigned long long number, unsigned long long num_blocks) {
        if (order_ == 1) number = num_blocks - 1 - number;
        auto fresh = std::make_unique<Block>();
        const auto x = static_cast<unsigned>(number % grid_dim.x);
        const auto y = static_cast<unsigned>(number / grid_dim.x % grid_dim.y);
        const auto z = static_cast<unsigned>(number / grid_dim.x / grid_dim.y);
        fresh->idx = {x, y, z};
        const unsigned num_threads = block_dim.x * block_dim.y * block_dim.z;
        fresh->threads = std::vector<Thread>(num_threads);
        fresh->warps.resize((num_threads + LANES - 1) / LANES);
        fresh->num_alive = num_threads;
        for (unsigned i = 0; i < num_threads; ++i) {
            Thread &made = fresh->threads[i];
            made.idx = {i % block_dim.x, i / block_dim.x % block_dim.y,
                        i / block_dim.x / block_dim.y};
            made.fiber.stack = take_stack();
            prepare_fiber(made.fiber, enter_body);
        }
        take_turn(fresh.get());
        resident_.push_back(std::move(fresh));
    }

    static std::unique_ptr<Stack> take_stack() {
        if (free_stacks.empty()) return std::make_unique<Stack>();
        auto stack = std::move(free_stacks.back());
        free_stacks.pop_back();
        return stack;
    }

    // Run the block's threads until none is ready; say whether any ran otherwise than in vain.
    bool run_block() {
        bool has_run = false;
        for (bool is_on = true; is_on && failure == nullptr;) {
            is_on = false;
            for (unsigned warp : turns(block->warps.size(), order_, generator_)) {
                is_on |= run_warp(warp);
            }
            has_run |= is_on;
        }
        for (Thread &other : block->threads) {
            if (other.state == State::SPINNING) other.state = State::READY;
        }
        return has_run;
    }

    // A thread that went on from a spin only to spin again has got nowhere.
    bool run_warp(unsigned warp) {
        bool has_run = false;
        const size_t begin = warp * LANES;
        const size_t count = std::min<size_t>(LANES, block->threads.size() - begin);
        for (bool is_on = true; is_on && failure == nullptr;) {
            is_on = false;
            for (unsigned lane : turns(count, order_, generator_)) {
                Thread &next = block->threads[begin + lane];
                if (next.state != State::READY) continue;
                resume(next);
                if (failure != nullptr) return true;
                is_on = true;
                has_run |= next.state != State::SPINNING;
            }
        }
        return has_run;
    }

    void retire() {
        if (failure != nullptr) return;
        bool is_stuck = true;
        for (const Thread &other : block->threads) is_stuck &= other.state != State::READY;
        if (block->num_alive != 0) {
            if (is_stuck) note_failure("threads wait for others that have ended or wait elsewhere");
            return;
        }
        const auto is_own = [](const std::unique_ptr<Block> &other) { return other.get() == block; };
        resident_.erase(std::find_if(resident_.begin(), resident_.end(), is_own));
        block = nullptr;
    }

    unsigned order_;
    std::mt19937 generator_;
    std::vector<std::unique_ptr<Block>> resident_;
    unsigned long long num_started_ = 0;
    size_t turn_ = 0;
};

}  // namespace

int lane_idx() { return static_cast<int>(thread_number() % LANES); }

unsigned char *dynamic_shared() {
    if (shared_nbytes_of_launch == 0) fail("the launch asked for no dynamic shared memory");
    return dynamic;
}

unsigned dynamic_shared_nbytes() { return shared_nbytes_of_launch; }

void later(void *target, const void *source, unsigned long nbytes) {
    thread->copies.back().push_back({target, source, nbytes});
}

void close_group() { thread->copies.emplace_back(); }

void finish_groups(unsigned num_open) {
    while (thread->copies.size() - 1 > num_open) {
        for (const Copy &copy : thread->copies.front()) {
            std::memcpy(copy.target, copy.source, copy.nbytes);
        }
        thread->copies.pop_front();
    }
}

void *warp_scratch() { return own_warp().scratch; }

unsigned sync_block(unsigned value) {
    Barrier &barrier = block->barrier;
    barrier.sum += value;
    if (++barrier.num_arrived == block->num_alive) {
        release_barrier();
    } else {
        suspend(State::AT_BARRIER);
    }
    return barrier.last_sum;
}

void sync_warp(unsigned mask) {
    Warp &warp = own_warp();
    const auto lane = static_cast<unsigned>(lane_idx());
    if (!(mask >> lane & 1)) fail("a lane is not in the mask it waits for");
    thread->warp_mask = mask;
    warp.arrived |= 1u << lane;
    if ((warp.arrived & mask) != mask) {
        suspend(State::AT_WARP);
        return;
    }
    warp.arrived &= ~mask;
    Thread *lanes = &block->threads[thread_number() / LANES * LANES];
    for (unsigned other = 0; other < LANES; ++other) {
        if (!(mask >> other & 1)) continue;
        if (lanes[other].warp_mask != mask) fail("lanes wait for each other with different masks");
        if (other != lane) lanes[other].state = State::READY;
    }
}

const unsigned long long *offer(unsigned mask, unsigned long long word) {
    Warp &warp = own_warp();
    warp.words[lane_idx()] = word;
    sync_warp(mask);
    return warp.words;
}

unsigned long long exchange(unsigned mask, unsigned long long word, int source_lane) {
    const unsigned long long *words = offer(mask, word);
    if (!(mask >> source_lane & 1)) fail("a lane reads from one that is not in the mask");
    const unsigned long long taken = words[source_lane];
    sync_warp(mask);
    return taken;
}

void spin() { suspend(State::SPINNING); }

void fail(const char *message) {
    Launch::note_failure(message);
    suspend(State::DONE);
    __builtin_unreachable();
}

const char *launch(Body run, void **params, Index grid, Index size, unsigned shared_nbytes,
                   unsigned order) {
    if (shared_nbytes > MAX_SHARED) return "more dynamic shared memory than a block can have";
    const std::lock_guard<std::mutex> alone(one_launch);
    body = run;
    body_params = params;
    grid_dim = grid;
    block_dim = size;
    shared_nbytes_of_launch = shared_nbytes;
    failure = nullptr;
    thread = nullptr;
    block = nullptr;
    Launch(order).run();
    if (failure == nullptr) return nullptr;
    static thread_local std::string told;
    told = *failure;  // before another thread's launch fails
    return told.c_str();
}

}  // namespace emulated
