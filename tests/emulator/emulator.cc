#include "emulator.h"

#include <ucontext.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "engine/cuda/device.h"

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace emulator {

int multiprocessors = 8;

namespace {

constexpr size_t kStack = 128 << 10;
constexpr int kMostThreads = 768;  // of a block
constexpr int kMostBlocks = 16;    // of a cluster
constexpr unsigned kWords = 64;    // that a lane may be ahead of another in shuffles

// Where something goes on. The compiler's own jumps take a tenth of the time of a context, which has a signal mask, and
// half that of the library's.
using Place = void* [5];

struct Fiber {
  ucontext_t beginning;
  Place place;  // once it has begun
  bool begun = false, returned = false;
  unsigned shuffles = 0;
  uint32_t passed[kWords];  // in shuffle i, at i % kWords
};

struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};

struct Block {
  Cluster& cluster;
  int rank;
  const std::function<void()>& kernel;
  Fiber* fibers;
  int threads, current = 0, running = threads;
  Barrier barriers[16] = {};
  Barrier warps[kMostThreads / 32] = {};
  Place launcher;
  int64_t idle_turns = 0;
};

alignas(128) thread_local char dynamic[kDynamicShared];
thread_local char anchor;
thread_local Block* block;

// Kept for the thread's next block: to begin one takes system calls. The stacks are not initialised, as most of them is
// never touched.
thread_local std::unique_ptr<Fiber[]> fibers;
thread_local std::unique_ptr<char[]> stacks;

void fail(const char* why) {
  std::fprintf(stderr, "emulator: %s, block %u, thread %u\n", why, blockIdx.x, threadIdx.x);
  std::abort();
}

// Makes the next fiber that has not returned the current one.
Fiber& next_fiber() {
  do block->current = (block->current + 1) % block->threads;
  while (block->fibers[block->current].returned);
  threadIdx = {block->current % blockDim.x, block->current / blockDim.x, 0};
  return block->fibers[block->current];
}

// Not in the function that sets the place, where this jump is not defined.
[[noreturn, gnu::noinline]] void jump(Place& place) { __builtin_longjmp(place, 1); }

[[noreturn]] void go_on(Fiber& fiber) {
  if (fiber.begun) jump(fiber.place);
  fiber.begun = true;
  setcontext(&fiber.beginning);
  std::abort();
}

void release(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
  block->idle_turns = 0;
}

// Of one block after the other.
void run_fiber() {
  for (;;) {
    block->kernel();
    Fiber& own = block->fibers[block->current];
    own.returned = true;
    if (__builtin_setjmp(own.place)) continue;
    if (--block->running == 0) jump(block->launcher);
    if (Barrier& all = block->barriers[0]; all.arrived == block->running) release(all);
    go_on(next_fiber());
  }
}

void make_fibers() {
  fibers.reset(new Fiber[kMostThreads]);
  stacks.reset(new char[kMostThreads * kStack]);
  for (int i = 0; i < kMostThreads; ++i) {
    ucontext_t& context = fibers[i].beginning;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.get() + i * kStack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, run_fiber, 0);
  }
}

void run_block(Cluster& cluster, int rank, const std::function<void()>& kernel) {
  cluster.anchors[rank] = &anchor;
  ++cluster.started;
  while (cluster.started < cluster.blocks) std::this_thread::yield();
  if (!fibers) make_fibers();
  if (cluster.threads > cluster.blocks * kMostThreads) fail("a block of too many threads");
  Block own{cluster, rank, kernel, fibers.get(), cluster.threads / cluster.blocks};
  for (int i = 0; i < own.threads; ++i) fibers[i].returned = false, fibers[i].shuffles = 0;
  block = &own;
  threadIdx = {0, 0, 0};
  if (__builtin_setjmp(own.launcher) == 0) go_on(fibers[0]);
}

// A thread for a cluster's block of one rank, kept for the next cluster as its fibers are.
class Helper {
 public:
  Helper() { std::thread(&Helper::run, this).detach(); }

  void start(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    job_ = std::move(job);
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !job_; });
  }

 private:
  [[noreturn]] void run() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [&] { return bool(job_); });
      lock.unlock();
      job_();
      lock.lock();
      job_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
};

// Never destroyed: its thread waits until the process ends.
Helper& helper(int rank) {
  static Helper* const helpers = new Helper[kMostBlocks];
  return helpers[rank];
}

}  // namespace

Cluster& cluster() { return block->cluster; }
int rank() { return block->rank; }
char* dynamic_shared() { return dynamic; }

void* remote(void* own, int other) { return block->cluster.anchors[other] + (static_cast<char*>(own) - &anchor); }

void yield() {
  Fiber& own = block->fibers[block->current];
  Fiber& next = next_fiber();
  if (block->current == 0) {
    if (block->cluster.blocks > 1 && block->idle_turns > 0) std::this_thread::yield();
    if (++block->idle_turns > 1'000'000) fail("nobody goes on");
  }
  if (&own != &next && __builtin_setjmp(own.place) == 0) go_on(next);
}

void barrier(int id, int threads) {
  Barrier& barrier = block->barriers[id];
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == (threads ? threads : block->running)) return release(barrier);
  wait_until([&] { return barrier.generation != generation; });
}

void sync_warp() {
  const int first = block->current / 32 * 32, end = std::min(first + 32, block->threads);
  const auto running = [&] {
    int count = 0;
    for (int i = first; i < end; ++i) count += !block->fibers[i].returned;
    return count;
  };
  Barrier& warp = block->warps[first / 32];
  const unsigned generation = warp.generation;
  ++warp.arrived;
  wait_until([&] {
    if (warp.generation == generation && warp.arrived == running()) release(warp);
    return warp.generation != generation;
  });
}

uint32_t shuffle(uint32_t value, int thread) {
  Fiber &own = block->fibers[block->current], &other = block->fibers[thread];
  const unsigned turn = own.shuffles++;
  own.passed[turn % kWords] = value;
  block->idle_turns = 0;
  wait_until([&] { return other.shuffles > turn; });
  if (other.shuffles > turn + kWords) fail("lanes out of step");
  return other.passed[turn % kWords];
}

void launch(const cudaLaunchConfig_t& config, const std::function<void()>& kernel) {
  const int blocks = config.numAttrs ? static_cast<int>(config.attrs[0].val.clusterDim.x) : 1;
  const int threads = static_cast<int>(config.blockDim.x * config.blockDim.y) * blocks;
  for (unsigned y = 0; y < config.gridDim.y; ++y)
    for (unsigned x = 0; x < config.gridDim.x; x += blocks) {
      Cluster cluster{blocks, threads, std::vector<char*>(blocks)};
      const auto run = [&](int rank) {
        blockIdx = {x + rank, y, 0};
        blockDim = config.blockDim;
        gridDim = config.gridDim;
        std::memset(dynamic, 0xff, config.dynamicSmemBytes);  // not a number
        run_block(cluster, rank, kernel);
      };
      for (int rank = 1; rank < blocks; ++rank) helper(rank).start([&run, rank] { run(rank); });
      run(0);
      for (int rank = 1; rank < blocks; ++rank) helper(rank).wait();
    }
}

}  // namespace emulator

extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}

extern "C" cudaError_t cudaMemsetAsync(void* to, int byte, size_t count, cudaStream_t) {
  std::memset(to, byte, count);
  return cudaSuccess;
}

extern "C" cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

extern "C" cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                         size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row)
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return cudaSuccess;
}

extern "C" const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

namespace jaxnorm::cuda {

// A small GPU with an H200's shared memory and clusters: a block has several rows in turn.
const Device& current_device() {
  static Device device{0, emulator::kDynamicShared, {5, 3, 2, 2, 2}};
  device.multiprocessors = emulator::multiprocessors;
  return device;
}

}  // namespace jaxnorm::cuda
