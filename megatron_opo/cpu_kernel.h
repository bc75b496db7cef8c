// What the sources that are compiled for CPUs share.

#pragma once

#include <cstdint>
#include <cstring>

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline float from_bfloat16(uint16_t bits) {
  return bits_as<float>(static_cast<uint32_t>(bits) << 16);
}

// To the nearest, of two the even one; what is not a number stays so.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The processor's own prefetching stops at every page, and does not know where a row begins.
template <class Element>
void prefetch(const Element* address, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(Element);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(address + i);
}
