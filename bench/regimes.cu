// Kernels in other regimes than theirs, in turns, so that the clock and the memory are the same for all: how
// docs/experiments came to what they say of regimes. Another trial is another line.
//
//   nvcc -std=c++17 -O3 --fmad=false -arch=native -Isrc bench/regimes.cu src/cuda/engine/*.cu src/cuda/engine/*.cc
//     -o regimes                            # on one line
//   ./regimes                               # every group
//   ./regimes short gated                   # some of: copies short whole gated gated_backward quantized
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "ops/norm/cuda/add_norm.cuh"
#include "ops/norm/cuda/gated_norm.cuh"
#include "ops/norm/cuda/gated_norm_grad.cuh"
#include "ops/norm/cuda/quantized_norm.cuh"

using namespace jaxnorm::cuda;
using namespace jaxnorm;

namespace {

using Half = __nv_bfloat16;
constexpr size_t kBytes = 256 << 20;  // of an array

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

__global__ void fill(uint32_t* array, size_t words, bool half) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t bits = static_cast<uint32_t>(i) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    bits = (bits ^ bits >> 13) * 3266489917u;
    const float low = (bits & 0xffff) / 16384.0f - 2, high = (bits >> 16) / 16384.0f - 2;
    array[i] = half ? pack_pair(low, high, Half{}) : __float_as_uint(low);
  }
}

// The i-th array, filled anew with numbers of a type.
void* array(int i, bool half) {
  static void* arrays[7];
  if (!arrays[i]) check(cudaMalloc(&arrays[i], kBytes));
  fill<<<1024, 256>>>(static_cast<uint32_t*>(arrays[i]), kBytes / 4, half);
  check(cudaDeviceSynchronize());
  return arrays[i];
}

// Kernels that are to be compared.
class Turns {
 public:
  template <typename F>
  void add(std::string name, F launch) {
    launch();
    check(cudaGetLastError());
    ways_.push_back({std::move(name), launch, {}});
  }

  // The median and the least of nine turns, each of five calls between events.
  void run() {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    for (int turn = 0; turn < 9; ++turn)
      for (Way& way : ways_) {
        way.launch();
        cudaEventRecord(begin);
        for (int call = 0; call < 5; ++call) way.launch();
        cudaEventRecord(end);
        check(cudaEventSynchronize(end));
        float ms = 0;
        cudaEventElapsedTime(&ms, begin, end);
        way.us.push_back(ms * 200);
      }
    for (Way& way : ways_) {
      std::sort(way.us.begin(), way.us.end());
      std::printf("%8.2f %8.2f us  %s\n", way.us[4], way.us[0], way.name.c_str());
    }
    std::printf("\n");
    ways_.clear();
  }

 private:
  struct Way {
    std::string name;
    std::function<void()> launch;
    std::vector<float> us;
  };
  std::vector<Way> ways_;
} turns;

// One 16-byte vector of each array a thread.
template <int READ, int WRITTEN>
__global__ void copy_kernel(const uint4* a, const uint4* b, const uint4* c, uint4* x, uint4* y) {
  const size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x;
  uint4 v = a[i];
  if (READ > 1) v.x ^= b[i].x, v.y ^= b[i].y, v.z ^= b[i].z, v.w ^= b[i].w;
  if (READ > 2) v.x ^= c[i].x, v.y ^= c[i].y, v.z ^= c[i].z, v.w ^= c[i].w;
  if (WRITTEN == 0) reinterpret_cast<uint2*>(x)[i] = make_uint2(v.x ^ v.y, v.z ^ v.w);  // half of an array
  if (WRITTEN > 0) x[i] = v;
  if (WRITTEN > 1) y[i] = v;
}

template <int READ, int WRITTEN>
void copy() {
  const auto of = [](int i) { return static_cast<uint4*>(array(i, true)); };
  turns.add(std::to_string(READ) + " read, " + (WRITTEN ? std::to_string(WRITTEN) : "half of one") + " written",
            [a = of(0), b = of(1), c = of(2), x = of(3), y = of(4)] {
              copy_kernel<READ, WRITTEN><<<kBytes / 16 / 256, 256>>>(a, b, c, x, y);
            });
}

// For rows of `row` vectors. Blocks of `most` threads have as many as there is room for, or one.
Plan plan_of(int threads, int vectors, int most, int64_t row, bool share) {
  if (threads <= 0) threads = static_cast<int>((row + vectors - 1) / vectors + kWarp - 1) / kWarp * kWarp;
  return {threads, vectors, share ? most / threads : 1, 1};
}

// A regime beside those of the tables. REGISTERS: of a thread, as the number of blocks bounds them.
template <int THREADS, int VECTORS, int MOST, int ROWS, int REGISTERS>
struct Trial {
  static constexpr int kThreads = THREADS, kVectors = VECTORS, kCluster = 1, kMost = MOST;
  static constexpr Registers kRegisters = Registers::all(REGISTERS);
  template <int ARRAYS = 1>
  static constexpr int kRows = ROWS;

  static std::string name(const char* what, int64_t cols) {
    char text[120];
    std::snprintf(text, sizeof text, "%-16s %7lld columns: %d threads, %d vectors, %d rows, blocks of %d, %d registers",
                  what, static_cast<long long>(cols), THREADS, VECTORS, ROWS, MOST, REGISTERS);
    return text;
  }
};

template <typename X, typename P>
P call_of_rows(int64_t cols) {
  constexpr bool half = sizeof(X) == 2;
  P p{};
  p.cols = cols, p.rows = kBytes / sizeof(X) / cols, p.epsilon = 1e-6f, p.weight_rows = {};
  p.x = {array(0, half), kDtype<X>}, p.scale = {array(1, half), kDtype<X>};
  return p;
}

// Operands of the forward without quantisation.
template <typename X, typename P>
P call_with_y(int64_t cols, bool centred) {
  P p = call_of_rows<X, P>(cols);
  p.y = {array(2, sizeof(X) == 2), kDtype<X>}, p.y_stride = cols, p.multiply_before_cast = true;
  if (centred) p.bias = p.scale;
  return p;
}

template <typename Op, typename R>
void add_forward(const char* what, const typename Op::Params& p) {
  using X = typename Op::Stream;
  const Plan plan = plan_of(R::kThreads, R::kVectors, R::kMost, p.cols / kVector<X>, R::kThreads > 0);
  turns.add(R::name(what, p.cols), [=] {
    typename Op::Launch launch(plan, p.cols, kVector<X>, p.weight_rows);
    check(RowLauncher<Op, R>{p, plan, launch, nullptr}.template direct<Access::vectors>());
  });
}

template <typename STATS, typename X, typename R>
void plain_and_added(int64_t cols) {
  constexpr bool kCentred = STATS::kCentred, half = sizeof(X) == 2;
  using W = Weights<X, kCentred, false>;
  add_forward<NormOp<STATS, X, X, W, false>, R>(kCentred ? "layer" : "rms",
                                                call_with_y<X, NormForward>(cols, kCentred));
  auto p = call_with_y<X, AddNormForward>(cols, kCentred);
  p.addend = {array(3, half), kDtype<X>}, p.sum = {array(4, half), kDtype<X>};
  add_forward<NormOp<STATS, X, X, W, true>, R>(kCentred ? "add layer" : "add rms", p);
}

template <typename X, bool FIRST, typename R>
void gated(int64_t cols) {
  auto p = call_of_rows<X, GatedNormForward>(cols);
  p.y = {array(2, sizeof(X) == 2), kDtype<X>};
  p.gate = {{array(3, sizeof(X) == 2), kDtype<X>}, Activation::silu, FIRST};
  add_forward<GatedNormOp<X, FIRST>, R>(FIRST ? "gate first" : "gate last", p);
}

template <typename STATS, typename X, bool HOLDS_SCALE>
struct QuantizedTrial : QuantizedOp<STATS, X, false> {
  template <typename R, typename Tile>
  using Epilogue = QuantizeEpilogue<QuantizedTrial, Tile, HOLDS_SCALE>;
};

template <typename STATS, typename X, typename R, bool HOLDS_SCALE = false>
void quantized(int64_t cols) {
  auto p = call_of_rows<X, QuantizedNormForward>(cols);
  if (STATS::kCentred) p.bias = p.scale;
  p.quantized.values = {array(2, true), Dtype::f8e4m3fn}, p.quantized.group = cols;
  p.quantized.scales = static_cast<float*>(array(3, false)), p.quantized.max_scale = INFINITY;
  add_forward<QuantizedTrial<STATS, X, HOLDS_SCALE>, R>(STATS::kCentred ? "layer to fp8" : "rms to fp8", p);
}

// Without the kernel that adds up partial sums.
template <typename X, int THREADS, int VECTORS, int MOST>
void gated_backward(int64_t cols) {
  constexpr bool half = sizeof(X) == 2;
  const auto of = [](int i) { return Input{array(i, half), kDtype<X>}; };
  const auto result = [](int i) { return Output{array(i, half), kDtype<X>}; };
  const GatedState state{static_cast<float*>(array(5, false)), Activation::silu, true, result(4).data};
  const int64_t rows = kBytes / sizeof(X) / cols;
  const GradCall<GatedState> p{rows, cols, of(1), of(0), of(0), of(2), state, result(3), 0.0f, 0};
  const Plan plan = plan_of(THREADS, VECTORS, MOST, cols / kVector<X>, true);
  GradRoom room;
  const Workspace workspace{static_cast<float*>(array(6, false)), kBytes / sizeof(float)};
  check(make_room(workspace, {true, false, 0}, plan, kDtype<X>, rows, cols, {}, room));
  turns.add("gated backward " + std::to_string(cols) + " columns: " + std::to_string(VECTORS) + " vectors, blocks of " +
                std::to_string(MOST),
            [=] {
              GradLaunch<GatedWays<X, Order::first>, GatedState> launch(p, plan, {}, room, true, nullptr);
              check(launch.run(Regime<THREADS, VECTORS, 1, MOST>{}));
            });
}

template <typename STATS>
void short_rows() {
  plain_and_added<STATS, Half, Trial<8, 4, 128, 1, 80>>(256);
  plain_and_added<STATS, Half, Trial<8, 4, 64, 1, 80>>(256);
  plain_and_added<STATS, Half, Trial<16, 2, 128, 1, 64>>(256);
  turns.run();
  plain_and_added<STATS, Half, Trial<kWarp, 4, 128, 1, 80>>(1024);
  plain_and_added<STATS, Half, Trial<kWarp, 4, 64, 1, 80>>(1024);
  turns.run();
  plain_and_added<STATS, float, Trial<kWarp, 2, 64, 2, 80>>(256);
  plain_and_added<STATS, float, Trial<kWarp, 2, 64, 1, 64>>(256);
  turns.run();
}

template <typename STATS>
void whole_rows() {
  plain_and_added<STATS, Half, Trial<kWholeBlock, 4, 256, 1, 64>>(4096);
  plain_and_added<STATS, Half, Trial<kWholeBlock, 2, 256, 1, 64>>(4096);
  turns.run();
}

template <bool FIRST>
void gates() {
  gated<Half, FIRST, Trial<8, 4, 128, 1, 96>>(256);
  gated<Half, FIRST, Trial<8, 4, 64, 1, 80>>(256);
  turns.run();
  for (const int64_t cols : {4096, 8192}) {
    gated<Half, FIRST, Trial<kWholeBlock, 4, 256, 1, 80>>(cols);
    gated<Half, FIRST, Trial<kWholeBlock, 4, 256, 1, 64>>(cols);
    turns.run();
  }
  gated<Half, FIRST, Trial<kWholeBlock, 8, 256, 1, 128>>(12288);
  gated<Half, FIRST, Trial<kWholeBlock, 4, 512, 1, 64>>(12288);
  gated<Half, FIRST, Trial<kWholeBlock, 4, 384, 1, 80>>(12288);
  turns.run();
}

void gated_backwards() {
  gated_backward<Half, 8, 2, 512>(128);
  gated_backward<Half, 16, 1, 768>(128);
  gated_backward<Half, 16, 1, 640>(128);
  turns.run();
  for (const int64_t cols : {1024, 2048, 4096}) {
    gated_backward<Half, kWholeWarps, 2, 512>(cols);
    gated_backward<Half, kWholeWarps, 1, 512>(cols);
    gated_backward<Half, kWholeWarps, 1, 640>(cols);
    gated_backward<Half, kWholeWarps, 1, 768>(cols);
    turns.run();
  }
}

template <typename STATS>
void quantized_rows_of_half_types() {
  for (const int64_t cols : {4096, 8192}) {
    quantized<STATS, Half, Trial<kWholeBlock, 4, 256, 1, 48>>(cols);
    quantized<STATS, Half, Trial<kWholeBlock, 4, 256, 1, 64>>(cols);
    quantized<STATS, Half, Trial<kWholeBlock, 4, 256, 1, 64>, true>(cols);
    turns.run();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto asked = [&](const char* group) {
    return argc == 1 || std::any_of(argv + 1, argv + argc, [&](char* name) { return std::strcmp(name, group) == 0; });
  };
  if (asked("copies")) copy<1, 1>(), copy<2, 1>(), copy<2, 2>(), copy<3, 2>(), copy<1, 0>(), turns.run();
  if (asked("short")) short_rows<MeanSquare>(), short_rows<MeanVariance>();
  if (asked("whole")) whole_rows<MeanSquare>(), whole_rows<MeanVariance>();
  if (asked("gated")) gates<true>(), gates<false>();
  if (asked("gated_backward")) gated_backwards();
  if (asked("quantized")) quantized_rows_of_half_types<MeanSquare>(), quantized_rows_of_half_types<MeanVariance>();
}
