// Finds cuBLASLt and its functions.
#include "engine/cuda/cublaslt.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

namespace jaxnorm::cuda::cublaslt {
namespace {

constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
// The first with scales for rows and columns.
constexpr size_t kOldest = 120900;

std::string text(size_t version) {
  // CUDA 13 and 12 write MAJOR * 10000 + MINOR * 100 + PATCH.
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class Function>
bool find(void* opened, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(opened, name));
  return function != nullptr;
}

// Whether all functions are there.
bool find_all(void* opened, Library& library) {
  return find(opened, "cublasLtGetVersion", library.version) &&
         find(opened, "cublasLtGetStatusName", library.status_name) && find(opened, "cublasLtCreate", library.create) &&
         find(opened, "cublasLtMatmulDescCreate", library.desc_create) &&
         find(opened, "cublasLtMatmulDescSetAttribute", library.desc_set) &&
         find(opened, "cublasLtMatmulDescDestroy", library.desc_destroy) &&
         find(opened, "cublasLtMatrixLayoutCreate", library.layout_create) &&
         find(opened, "cublasLtMatrixLayoutDestroy", library.layout_destroy) &&
         find(opened, "cublasLtMatmulPreferenceCreate", library.preference_create) &&
         find(opened, "cublasLtMatmulPreferenceSetAttribute", library.preference_set) &&
         find(opened, "cublasLtMatmulPreferenceDestroy", library.preference_destroy) &&
         find(opened, "cublasLtMatmulAlgoGetHeuristic", library.heuristic) &&
         find(opened, "cublasLtMatmul", library.matmul);
}

// Opens a library of this name or path, if it will do.
bool open_one(const std::string& name, int flags, Library& library, std::string& why) {
  void* const opened = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL | flags);
  if (!opened) {
    why += std::string(why.empty() ? "" : "; ") + (flags & RTLD_NOLOAD ? name + " is not loaded" : dlerror());
    return false;
  }
  std::string unfit;
  if (!find_all(opened, library)) {
    unfit = "lacks functions";
  } else if (library.version() < kOldest) {
    unfit = "is version " + text(library.version()) + ", which has no scales for rows and columns: 12.9 or newer has";
  } else {
    return true;
  }
  why += (why.empty() ? "" : "; ") + name + " " + unfit;
  dlclose(opened);
  return false;
}

bool open_any(const std::vector<std::string>& paths, Library& library, std::string& why) {
  std::string unused;  // what will not do among those that are loaded is met again
  for (const char* name : kNames)
    if (open_one(name, RTLD_NOLOAD, library, unused)) return true;
  for (const char* name : kNames)
    if (open_one(name, 0, library, why)) return true;
  for (const std::string& path : paths)
    if (open_one(path, 0, library, why)) return true;
  why = "cuBLASLt was not found (" + why + ")";
  return false;
}

}  // namespace

const Library* open(const std::vector<std::string>& paths, std::string& why) {
  static std::mutex mutex;
  static std::unique_ptr<const Library> kept;
  const std::lock_guard<std::mutex> lock(mutex);
  if (kept) return kept.get();
  Library library{};
  why.clear();
  if (open_any(paths, library, why)) kept = std::make_unique<const Library>(library);
  return kept.get();
}

Context* handle_of_device(const Library& library, std::string& why) {
  static std::mutex mutex;
  // Never destroyed: when the process ends, the driver may be gone before.
  static auto* const handles = new std::map<int, Context*>;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    why = std::string("there is no current GPU: ") + cudaGetErrorString(error);
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  Context*& handle = (*handles)[device];
  if (handle) return handle;
  if (const Status status = library.create(&handle); status != kSuccess) {
    why = "cuBLASLt " + version_of(library) + " does not start: " + library.status_name(status);
    handle = nullptr;
  }
  return handle;
}

std::string version_of(const Library& library) { return text(library.version()); }

}  // namespace jaxnorm::cuda::cublaslt
