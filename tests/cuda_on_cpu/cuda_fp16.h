// Half precision as CUDA's header names it, for kernels that run on the CPU in tests.

#pragma once

#include <cstring>

using __half = _Float16;

inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }

inline unsigned short __half_as_ushort(__half value) {
  unsigned short bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
