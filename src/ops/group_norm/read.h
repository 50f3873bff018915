// The readers of GroupNorm. x has the shape (examples..., positions..., groups, channels of a group); a weight has x's
// rank, and is 1 long along all axes of positions and along those of examples along which it does not differ.
#pragma once

#include "ffi/table.h"
#include "ops/group_norm/call.h"
#include "ops/shared/read.h"

namespace jaxnorm {

struct GroupShapes {
  Shape x, statistics;
  int64_t leading = 0;  // axes of examples
};

// Which row of a weight of this shape goes with which example. Nothing where it has no such shape.
inline std::optional<ExampleMap> example_map_of(const GroupShapes& shapes, const Shape& weight) {
  if (weight.size() != shapes.x.size()) return std::nullopt;
  ExampleMap map;
  int64_t rows = 1;
  int64_t extents[ExampleMap::kMost], strides[ExampleMap::kMost];  // of runs of axes, the last first
  for (int64_t axis = shapes.leading - 1; axis >= 0; --axis) {
    const int64_t of_x = shapes.x[axis];
    const bool differs = weight[axis] != 1;
    if (differs && weight[axis] != of_x) return std::nullopt;
    if (of_x == 1) continue;
    const bool continues = map.axes > 0 && differs == (strides[map.axes - 1] != 0);
    if (continues) {
      extents[map.axes - 1] *= of_x;
    } else {
      if (map.axes == ExampleMap::kMost) return std::nullopt;
      extents[map.axes] = of_x;
      strides[map.axes++] = differs ? rows : 0;
    }
    if (differs) rows *= of_x;
  }
  if (rows == 1) return ExampleMap{};
  for (int axis = 0; axis < map.axes; ++axis) {
    // Of an array without examples nothing is read.
    map.extent[axis] = std::max<int64_t>(1, extents[map.axes - 1 - axis]);
    map.stride[axis] = strides[map.axes - 1 - axis];
  }
  return map;
}

template <class Op>
GroupShapes read_groups(Reader& in, Op& p, size_t index) {
  const int64_t axes = in.attribute<int64_t>("axes");
  GroupShapes shapes;
  shapes.x = shapes.statistics = in.operand_shape("x", index);
  const int64_t rank = shapes.x.size();
  if (axes < 1 || axes >= rank) {
    in.fail("axes is " + std::to_string(axes) + ", expected from 1 to the rank of x less 1");
    return {};
  }
  shapes.leading = rank - 1 - axes;
  p.examples = p.positions = 1;
  p.groups = shapes.x[rank - 2];
  p.group_size = shapes.x[rank - 1];
  bool overflow = false;
  for (int64_t axis = 0; axis < rank; ++axis) {
    const bool is_position = axis >= shapes.leading && axis < rank - 2;
    int64_t unused = 1;
    int64_t& extent = axis < shapes.leading ? p.examples : is_position ? p.positions : unused;
    overflow |= __builtin_mul_overflow(extent, shapes.x[axis], &extent);
    if (is_position || axis == rank - 1) shapes.statistics[axis] = 1;
  }
  if (overflow || p.positions < 1 || p.group_size < 1 || p.groups < 1) in.fail("no group can be normalised in x");
  p.scale_offset = in.attribute<float>("scale_offset");
  p.activation = read_activation(in, {Activation::none, Activation::silu, Activation::relu, Activation::gelu});
  return shapes;
}

// The shape that a weight has if it is one, and else what it cannot have.
inline Shape weight_shape(const GroupShapes& shapes, const Shape& came, ExampleMap* map) {
  Shape shape = shapes.x;
  const auto found = example_map_of(shapes, came);
  if (found) *map = *found;
  for (size_t axis = 0; axis + 2 < shape.size(); ++axis)
    if (!found || static_cast<int64_t>(axis) >= shapes.leading || came[axis] == 1) shape[axis] = 1;
  return shape;
}

inline GroupWeight read_group_weight(Reader& in, const char* name, const GroupShapes& shapes) {
  GroupWeight weight;
  const Shape shape = weight_shape(shapes, in.next_operand_shape(), &weight.map);
  static_cast<Input&>(weight) = in.operand(name, shape);
  return weight;
}

inline GroupNormForward read_group_norm(Reader& in) {
  GroupNormForward p{};
  const GroupShapes shapes = read_groups(in, p, 0);
  p.epsilon = in.attribute<float>("epsilon");
  p.x = in.operand("x", shapes.x);
  if (in.flag("has_scale")) p.scale = read_group_weight(in, "scale", shapes);
  if (in.flag("has_bias")) p.bias = read_group_weight(in, "bias", shapes);
  p.y = in.result("y", shapes.x);
  in.require(is_supported(p.x.dtype, p.y.dtype), "x and y have different dtypes and neither is F32");
  if (in.has_result(shapes.statistics)) {
    p.mean = in.f32_result("mean", shapes.statistics);
    p.rstd = in.f32_result("rstd", shapes.statistics);
  }
  p.workspace = in.workspace();
  return p;
}

inline GroupNormBackward read_group_norm_grad(Reader& in) {
  GroupNormBackward p{};
  const GroupShapes shapes = read_groups(in, p, 1);
  p.dy = in.operand("dy", shapes.x);
  p.x = in.operand("x", shapes.x);
  in.require(is_supported(p.x.dtype, p.dy.dtype), "x and dy have different dtypes and neither is F32");
  p.mean = in.f32_operand("mean", shapes.statistics);
  p.rstd = in.f32_operand("rstd", shapes.statistics);
  const auto weight = [&](const char* name, const char* has, const char* gradient, const char* wants, GroupWeight& w) {
    Shape shape = shapes.x;
    const bool is_there = in.flag(has), is_wanted = in.flag(wants);
    if (is_there) {
      shape = in.next_operand_shape();
      w = read_group_weight(in, name, shapes);
    }
    in.require(is_there || !is_wanted, "the gradient of a weight is wanted that is not there");
    return [=, &in] { return is_wanted ? in.result(gradient, shape) : Output{}; };
  };
  const auto read_dscale = weight("scale", "has_scale", "dscale", "with_dscale", p.scale);
  const auto read_dbias = weight("bias", "has_bias", "dbias", "with_dbias", p.bias);
  if (in.flag("with_dx")) p.dx = in.result("dx", shapes.x, p.x.dtype);
  p.dscale = read_dscale();
  p.dbias = read_dbias();
  p.workspace = in.workspace();
  return p;
}

namespace ops::group_norm {

template <class Platform>
inline constexpr std::tuple kTable{
    Row{"jaxnorm_group_norm_fwd", read_group_norm, Platform::workspace(cuda::group_norm_workspace)},
    Row{"jaxnorm_group_norm_bwd", read_group_norm_grad, Platform::workspace(cuda::group_norm_workspace)},
};

}  // namespace ops::group_norm

}  // namespace jaxnorm
