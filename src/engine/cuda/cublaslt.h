// The part of cuBLASLt's C API that jaxnorm calls, in a library that is opened by name while the program runs: the
// module builds without its header and loads where there is none.
//
// Names and values are those of cublasLt.h and cublas_api.h, the same in CUDA 12.9 and 13. They are part of its binary
// interface. Enumerators are int there, and so here.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jaxnorm::cuda::cublaslt {

using Status = int;  // cublasStatus_t
constexpr Status kSuccess = 0;

constexpr int kCompute32f = 68;       // CUBLAS_COMPUTE_32F
constexpr int kTranspose = 1;         // CUBLAS_OP_T
constexpr int kScaleOuterVec32f = 3;  // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
constexpr int kEpilogueBias = 4;      // CUBLASLT_EPILOGUE_BIAS

// cublasLtMatmulDescAttributes_t
enum DescAttribute : int {
  kDescTransA = 3,
  kDescEpilogue = 7,
  kDescBiasPointer = 8,
  kDescAScalePointer = 17,
  kDescBScalePointer = 18,
  kDescFastAccum = 25,
  kDescAScaleMode = 31,
  kDescBScaleMode = 32,
};

// cublasLtMatmulPreferenceAttributes_t
enum PreferenceAttribute : int {
  kPreferenceMaxWorkspaceBytes = 1,
  kPreferenceMinAlignmentABytes = 5,
  kPreferenceMinAlignmentBBytes = 6,
  kPreferenceMinAlignmentCBytes = 7,
  kPreferenceMinAlignmentDBytes = 8,
};

struct Context;     // cublasLtHandle_t points to it, and so on
struct Desc;        // cublasLtMatmulDesc_t
struct Layout;      // cublasLtMatrixLayout_t
struct Preference;  // cublasLtMatmulPreference_t

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96);

struct Library {
  size_t (*version)();  // 130802 for 13.8.2
  const char* (*status_name)(Status);
  Status (*create)(Context**);
  Status (*desc_create)(Desc**, int compute_type, cudaDataType scale_type);
  Status (*desc_set)(Desc*, int attribute, const void* value, size_t bytes);
  Status (*desc_destroy)(Desc*);
  Status (*layout_create)(Layout**, cudaDataType type, uint64_t rows, uint64_t cols, int64_t stride);
  Status (*layout_destroy)(Layout*);
  Status (*preference_create)(Preference**);
  Status (*preference_set)(Preference*, int attribute, const void* value, size_t bytes);
  Status (*preference_destroy)(Preference*);
  Status (*heuristic)(Context*, Desc*, Layout* a, Layout* b, Layout* c, Layout* d, Preference*, int wanted, Heuristic*,
                      int* found);
  Status (*matmul)(Context*, Desc*, const void* alpha, const void* a, Layout*, const void* b, Layout*, const void* beta,
                   const void* c, Layout*, void* d, Layout*, const Algorithm*, void* workspace, size_t bytes,
                   cudaStream_t);
};

// The library, opened by the first call that finds one; null where there is none that will do, and why. It is looked
// for among those that the process has loaded, then where the loader looks, then at these paths.
const Library* open(const std::vector<std::string>& paths, std::string& why);

// The handle of the current device, made by the first call for it; null where it could not be made, and why.
Context* handle_of_device(const Library& library, std::string& why);

// 13.8.2
std::string version_of(const Library& library);

// While it lives, this thread may make calls that the capture of a stream otherwise forbids, such as allocations:
// cuBLASLt may make some when it is first used.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace jaxnorm::cuda::cublaslt
