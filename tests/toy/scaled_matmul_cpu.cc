// A scaled matmul, as an op that is no norm and has a workspace: y = (a @ b) * scale, all f32. The workspace's size is
// a result too, for the test.
#include "ffi/cpu.h"
#include "ffi/table.h"

namespace toy {

using namespace jaxnorm;

struct ScaledMatmul {
  int64_t m, k, n;
  const float *a, *b;
  float *y, *floats;
  float scale;
  Workspace workspace;
};

void run(const ScaledMatmul& p, const cpu::ParallelFor& parallel_for) {
  p.floats[0] = static_cast<float>(p.workspace.floats);
  for (int64_t i = 0; i < p.workspace.floats; ++i) p.workspace.data[i] = 0;
  cpu::for_each_rows(parallel_for, p.m, p.n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        float sum = 0;
        for (int64_t l = 0; l < p.k; ++l) sum += p.a[i * p.k + l] * p.b[l * p.n + j];
        p.y[i * p.n + j] = sum * p.scale;
      }
    }
  });
}

ScaledMatmul read_scaled_matmul(Reader& in) {
  const Shape a = in.operand_shape("a", 0), b = in.operand_shape("b", 1);
  const bool are_matrices = a.size() == 2 && b.size() == 2;
  in.require(are_matrices, "a and b are not matrices");
  if (!are_matrices) return {};
  ScaledMatmul p{a[0], a[1], b[1], in.f32_operand("a", a), in.f32_operand("b", {a[1], b[1]}), {}, {}, {}, {}};
  p.scale = in.attribute<float>("scale");
  p.y = in.f32_result("y", {p.m, p.n});
  p.floats = in.f32_result("floats", {});
  p.workspace = in.workspace();
  return p;
}

WorkspaceSize workspace(const WorkspaceQuery&) { return {1, 0}; }

inline constexpr std::tuple kTable{Row{"toy_scaled_matmul", read_scaled_matmul, workspace}};

extern "C" [[gnu::visibility("default")]] XLA_FFI_Error* scaled_matmul(XLA_FFI_CallFrame* frame) {
  return handle<Cpu, kTable, 0>(frame);
}

}  // namespace toy
