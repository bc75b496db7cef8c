// Causal attention over a cache of keys and values, on the CPU. A plain C interface: no torch, no
// ABI. Each query is computed by itself, over the keys that it sees in the order of their places,
// so that no bit of it depends on what else is computed, or on how its context came to the cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "cpu_kernel.h"

namespace {

constexpr int kLanes = 16;
using Vector = float __attribute__((vector_size(4 * kLanes)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
  uint16_t bits;
};

float load_one(const float* from) { return *from; }
float load_one(const BFloat16* from) { return from_bfloat16(from->bits); }
void store_one(float* to, float value) { *to = value; }
void store_one(BFloat16* to, float value) { to->bits = to_bfloat16(value); }

Vector load(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}
Vector load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return bits_as<Vector>(__builtin_convertvector(halves, Integers) << 16);
}
void store(float* to, Vector value) { std::memcpy(to, &value, sizeof(value)); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif

// [a0 + a1, a2 + a3, ..., b0 + b1, b2 + b3, ...]
Vector pair_sums(Vector a, Vector b) {
  return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Lane i of the result is the sum of the lanes of parts[i].
Vector sums(Vector (&parts)[kLanes]) {
  for (int count = kLanes; count > 1; count /= 2)
    for (int i = 0; i < count / 2; ++i) parts[i] = pair_sums(parts[2 * i], parts[2 * i + 1]);
  return parts[0];
}

// e^x for x <= 0, by the polynomial of Cephes' expf; 0 where it would be below 1e-37.
Vector exponential(Vector x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Integers in_range = x > -85.0f, not_a_number = x != x;
  const Vector shifted = x * 1.44269504088896341f + kRound;
  const Vector n = shifted - kRound;
  const Vector r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers exponent = (bits_as<Integers>(shifted) - bits_as<int32_t>(kRound)) << 23;
  const Integers power = (bits_as<Integers>(p) + exponent) & in_range;
  return bits_as<Vector>(power | (not_a_number & bits_as<int32_t>(NAN)));
}

struct Shape {
  int64_t heads, kv_heads, channels, value_channels;
  float scale;
};

// Scores of the keys `slots`, of one query head: [count], filled up to whole vectors.
template <class Element>
void score(const float* query, const Element* keys, int64_t stride, const int32_t* slots,
           int64_t count, const Shape& shape, float* scores) {
  const int64_t whole = shape.channels / kLanes * kLanes;
  for (int64_t first = 0; first < count; first += kLanes) {
    Vector parts[kLanes] = {};
    const int here = static_cast<int>(std::min<int64_t>(kLanes, count - first));
    for (int i = 0; i < here; ++i) {
      const Element* key = keys + slots[first + i] * stride;
      if (first + i + kLanes < count)
        prefetch(keys + slots[first + i + kLanes] * stride, shape.channels);
      for (int64_t c = 0; c < whole; c += kLanes) parts[i] += load(query + c) * load(key + c);
      for (int64_t c = whole; c < shape.channels; ++c)
        parts[i][c - whole] += query[c] * load_one(key + c);
    }
    Vector found = sums(parts) * shape.scale;
    for (int i = here; i < kLanes; ++i) found[i] = -std::numeric_limits<float>::infinity();
    store(scores + first, found);
  }
}

// Scores -> weights, not yet divided by their sum, which is returned.
float weigh(float* scores, int64_t count) {
  Vector highest_of = load(scores), total = {};
  for (int64_t i = kLanes; i < count; i += kLanes) {
    const Vector found = load(scores + i);
    highest_of = found > highest_of ? found : highest_of;
  }
  float highest = highest_of[0];
  for (int i = 1; i < kLanes; ++i) highest = std::max(highest, highest_of[i]);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector weights = exponential(load(scores + i) - highest);
    store(scores + i, weights);
    total += weights;
  }
  Vector parts[kLanes] = {total};
  return sums(parts)[0];
}

// The weighted sum of kBlocks * kLanes channels of the values.
template <int kBlocks, class Element>
void add_up(const float* weights, const Element* values, int64_t stride, const int32_t* slots,
            int64_t count, float total, float* out) {
  Vector sum[kBlocks] = {};
  for (int64_t i = 0; i < count; ++i) {
    const Element* value = values + slots[i] * stride;
    if (i + kLanes < count) prefetch(values + slots[i + kLanes] * stride, kBlocks * kLanes);
    for (int b = 0; b < kBlocks; ++b) sum[b] += weights[i] * load(value + b * kLanes);
  }
  for (int b = 0; b < kBlocks; ++b) store(out + b * kLanes, sum[b] / total);
}

template <class Element>
void attend_one(const Element* query, Element* out, const Element* keys, const Element* values,
                const int32_t* slots, int64_t count, const Shape& shape, float* scores,
                float* row) {
  for (int64_t c = 0; c < shape.channels; ++c) row[c] = load_one(query + c);
  const int64_t stride = shape.kv_heads * shape.channels;
  score(row, keys, stride, slots, count, shape, scores);
  const float total = weigh(scores, count);
  const int64_t value_stride = shape.kv_heads * shape.value_channels;
  int64_t c = 0;
  const auto blocks = [&](auto width) {
    constexpr int kBlocks = decltype(width)::value;
    for (; c + kBlocks * kLanes <= shape.value_channels; c += kBlocks * kLanes)
      add_up<kBlocks>(scores, values + c, value_stride, slots, count, total, row + c);
  };
  blocks(std::integral_constant<int, 4>());
  blocks(std::integral_constant<int, 1>());
  for (; c < shape.value_channels; ++c) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i)
      sum += scores[i] * load_one(values + slots[i] * value_stride + c);
    row[c] = sum / total;
  }
  for (c = 0; c < shape.value_channels; ++c) store_one(out + c, row[c]);
}

template <class Element>
int attend(const Element* query, Element* out, const Element* keys, const Element* values,
           const int32_t* table, int64_t table_stride, const int64_t* requests,
           const int64_t* positions, int64_t rows, const Shape& shape, int64_t window,
           int threads) {
  int status = 0;
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t longest = rows ? *std::max_element(positions, positions + rows) + 1 : 0;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores, row;
    try {
      scores.resize(longest + kLanes);
      row.resize(std::max(shape.channels, shape.value_channels));
    } catch (const std::bad_alloc&) {
#pragma omp atomic write
      status = 1;
    }
#pragma omp barrier
    if (status == 0) {
#pragma omp for schedule(dynamic, 8)
      for (int64_t item = 0; item < rows * shape.kv_heads; ++item) {
        const int64_t i = item / shape.kv_heads, kv_head = item % shape.kv_heads;
        const int64_t first = window < 0 ? 0 : std::max<int64_t>(0, positions[i] - window);
        const int32_t* slots = table + requests[i] * table_stride + first;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          attend_one(query + (i * shape.heads + head) * shape.channels,
                     out + (i * shape.heads + head) * shape.value_channels,
                     keys + kv_head * shape.channels, values + kv_head * shape.value_channels,
                     slots, positions[i] - first + 1, shape, scores.data(), row.data());
        }
      }
    }
  }
  return status;
}

}  // namespace

// 0, or 1 where there is no memory for the scores of a row.
extern "C" int opo_attend(int is_bfloat16, const void* query, void* out, const void* keys,
                          const void* values, const int32_t* table, int64_t table_stride,
                          const int64_t* requests, const int64_t* positions, int64_t rows,
                          int64_t heads, int64_t kv_heads, int64_t channels,
                          int64_t value_channels, float scale, int64_t window, int threads) {
  const Shape shape = {heads, kv_heads, channels, value_channels, scale};
  const auto run = [&](auto element) {
    using Element = decltype(element);
    return attend(static_cast<const Element*>(query), static_cast<Element*>(out),
                  static_cast<const Element*>(keys), static_cast<const Element*>(values), table,
                  table_stride, requests, positions, rows, shape, window, threads);
  };
  return is_bfloat16 ? run(BFloat16()) : run(0.0f);
}
