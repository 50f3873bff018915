// What exported programs and messages call an addend and its sum: users know them as those of a residual connection.
#pragma once

namespace jaxnorm::called {

inline constexpr const char* kAddend = "residual";
inline constexpr const char* kHasAddend = "has_residual";
inline constexpr const char* kUnlikeX = "x and residual have different dtypes and neither is F32";

// Of the sandwich norm, whose sum and gradients have names of their own.
inline constexpr const char* kSum = "new_residual";
inline constexpr const char* kDsum = "dnew_residual";
inline constexpr const char* kHasDsum = "has_dnew_residual";
inline constexpr const char* kDaddend = "dresidual";
inline constexpr const char* kWithDaddend = "with_dresidual";
inline constexpr const char* kUnlikeNormed = "x and the residual have different dtypes and neither is F32";

}  // namespace jaxnorm::called
