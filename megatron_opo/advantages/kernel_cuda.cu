// Rewards -> token-level advantages in place, in CUDA C++. A plain C interface: no torch, no ABI.
//
// Ragged: one launch over equal shares of the buffer, a warp each, wherever sequences begin and
// end. A warp finds its first sequence by a search, walks on from there, and works out the baseline
// of each group it meets. Nothing outside of the buffer is written, and each byte once.
//
// Padded: three launches, since a baseline needs all rows of its group: measure the rows (reads
// rewards and mask), subtract baselines ([N] values), write the rows. A row whose mask is true up
// to some token and false from there on is written from its length alone, without its mask.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kLanes * kWarps;
constexpr int kChunk = 512;  // tokens of a warp at a time: 16 a lane, one vector of a byte mask
constexpr int kShare = 8 * kChunk;  // of the ragged buffer, a warp
constexpr unsigned kAll = 0xFFFFFFFF;

struct Float32 {
  using Word = uint32_t;
  static __device__ float load(Word word) { return __uint_as_float(word); }
  static __device__ Word round(double value) {
    return __float_as_uint(static_cast<float>(value));
  }
};

struct BFloat16 {
  using Word = uint16_t;
  static __device__ float load(Word word) {
    return __uint_as_float(static_cast<uint32_t>(word) << 16);
  }
  static __device__ Word round(double value) {
    const float narrow = static_cast<float>(value);
    const uint32_t bits = __float_as_uint(narrow);
    if (narrow != narrow) return static_cast<Word>((bits >> 16) | 0x40);
    return static_cast<Word>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to nearest, even
  }
};

struct Float16 {
  using Word = uint16_t;
  static __device__ float load(Word word) { return __half2float(__ushort_as_half(word)); }
  static __device__ Word round(double value) {
    return __half_as_ushort(__float2half_rn(static_cast<float>(value)));
  }
};

__device__ int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
__device__ int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

template <class Value>
__device__ Value warp_sum(Value value) {
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    value += __shfl_xor_sync(kAll, value, apart);
  }
  return value;
}

// How many of `count` ascending offsets are <= position; asked by a whole warp.
__device__ int64_t count_up_to(const int64_t* offsets, int64_t count, int64_t position, int lane) {
  int64_t found = 0, left = count;
  while (left > 0) {
    const int64_t step = (left + kLanes - 1) / kLanes;
    const int64_t last = (lane + 1) * step - 1;
    const bool below = last < left && offsets[found + last] <= position;
    const int64_t whole = __popc(__ballot_sync(kAll, below)) * step;
    found += whole;
    left = smaller(step - 1, left - whole);
  }
  return found;
}

// What is subtracted from the rewards of a group, whose member i is row order[i], or i without.
struct Baseline {
  double reference = 0, relative = 0, weight = 0;
  bool raw = false;

  __device__ void work_out(const double* rewards, const double* weights, const int64_t* order,
                           int64_t begin, int64_t end, bool singleton_raw, int lane) {
    reference = rewards[order == nullptr ? begin : order[begin]];
    double total = 0, weighted = 0;
    for (int64_t i = begin + lane; i < end; i += kLanes) {
      const int64_t row = order == nullptr ? i : order[i];
      total += weights[row];
      weighted += weights[row] * (rewards[row] - reference);
    }
    weight = warp_sum(total);
    weighted = warp_sum(weighted);
    relative = weight > 0 ? weighted / weight : 0;
    raw = singleton_raw && end - begin == 1;
  }

  // Relative to the first reward, so that equal ones cancel exactly.
  __device__ double advantage(double reward) const {
    if (!(weight > 0)) return 0;
    return raw ? reward : (reward - reference) - relative;
  }
};

// Which of a chunk's first `count` tokens (a multiple of 16) are on, 16 bits a lane. A vector holds
// kPer mask words; bit q * kPer + b of a lane is token (q * kLanes + lane) * kPer + b.
template <class MaskWord>
__device__ uint32_t chunk_bits(const MaskWord* mask, MaskWord keep, int64_t count, int lane) {
  constexpr int kPer = sizeof(uint4) / sizeof(MaskWord);
  union {
    uint4 vector;
    MaskWord words[kPer];
  } loaded[sizeof(MaskWord)];
#pragma unroll
  for (int q = 0; q < static_cast<int>(sizeof(MaskWord)); ++q) {
    const int first = (q * kLanes + lane) * kPer;
    loaded[q].vector = uint4{0, 0, 0, 0};
    if (first < count) loaded[q].vector = *reinterpret_cast<const uint4*>(mask + first);
  }
  uint32_t bits = 0;
#pragma unroll
  for (int q = 0; q < static_cast<int>(sizeof(MaskWord)); ++q) {
#pragma unroll
    for (int b = 0; b < kPer; ++b) {
      bits |= static_cast<uint32_t>((loaded[q].words[b] & keep) != 0) << (q * kPer + b);
    }
  }
  return bits;
}

// The bits of the kVector tokens from (step * kLanes + lane) * kVector on, out of `chunk_bits`.
template <int kVector, int kPer>
__device__ uint32_t vector_bits(uint32_t chunk, int step, int lane) {
  constexpr int kPart = kVector < kPer ? kVector : kPer;
  uint32_t bits = 0;
#pragma unroll
  for (int part = 0; part < kVector; part += kPart) {
    const int token = (step * kLanes + lane) * kVector + part;
    const int owner = token / kPer % kLanes;
    const int place = token / (kLanes * kPer) * kPer + token % kPer;
    const uint32_t theirs = __shfl_sync(kAll, chunk, owner) >> place;
    bits |= (theirs & ((1u << kPart) - 1)) << part;
  }
  return bits;
}

// `word` where a bit is set, else 0.
template <class Word>
__device__ uint4 select(Word word, uint32_t bits) {
  constexpr int kVector = sizeof(uint4) / sizeof(Word);
  union {
    uint4 vector;
    Word words[kVector];
  } chosen;
#pragma unroll
  for (int i = 0; i < kVector; ++i) chosen.words[i] = (bits >> i) & 1 ? word : Word{0};
  return chosen.vector;
}

__device__ int bytes_to_vector(const void* address) {
  return static_cast<int>(-reinterpret_cast<uintptr_t>(address) & (sizeof(uint4) - 1));
}

// Tokens begin..end: a body of vectors, and at either edge single tokens.
template <class Word, bool kMasked>
__device__ void fill(Word* buffer, const uint8_t* mask, int64_t begin, int64_t end, Word word,
                     int lane) {
  constexpr int kVector = sizeof(uint4) / sizeof(Word);
  constexpr int kBlock = kMasked ? 16 : kVector;
  int64_t body = begin + bytes_to_vector(buffer + begin) / static_cast<int>(sizeof(Word));
  if (kMasked) body = begin + bytes_to_vector(mask + begin);
  body = smaller(body, end);
  int64_t body_end = body + (end - body) / kBlock * kBlock;
  // A buffer and a mask that are never aligned at the same token have no body.
  if (bytes_to_vector(buffer + body) != 0) body_end = body;

  for (int64_t chunk = body; chunk < body_end; chunk += kChunk) {
    const int64_t count = smaller(kChunk, body_end - chunk);
    uint32_t on = kAll;
    if (kMasked) on = chunk_bits<uint8_t>(mask + chunk, 0xFF, count, lane);
#pragma unroll
    for (int step = 0; step < kChunk / kLanes / kVector; ++step) {
      const int first = (step * kLanes + lane) * kVector;
      const uint32_t bits = kMasked ? vector_bits<kVector, 16>(on, step, lane) : kAll;
      if (first < count) *reinterpret_cast<uint4*>(buffer + chunk + first) = select(word, bits);
    }
  }
  for (int64_t t = begin + lane; t < body; t += kLanes) {
    buffer[t] = kMasked && mask[t] == 0 ? Word{0} : word;
  }
  for (int64_t t = body_end + lane; t < end; t += kLanes) {
    buffer[t] = kMasked && mask[t] == 0 ? Word{0} : word;
  }
}

template <class Element, bool kMasked>
__global__ void __launch_bounds__(kThreads)
    ragged(typename Element::Word* buffer, int64_t tokens, const double* rewards,
           const double* weights, const int64_t* group_offsets, int64_t groups,
           const int64_t* cu_seqlens, int64_t sequences, const uint8_t* mask, bool singleton_raw) {
  const int lane = threadIdx.x % kLanes;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes) * kShare;
  const int64_t stop = smaller(smaller(start + kShare, tokens), cu_seqlens[sequences]);
  int64_t token = larger(start, cu_seqlens[0]);
  if (token >= stop) return;

  int64_t sequence = larger(count_up_to(cu_seqlens, sequences + 1, token, lane) - 1, 0);
  // One before the first group: the loop steps into it.
  int64_t group = larger(count_up_to(group_offsets, groups + 1, sequence, lane) - 1, 0) - 1;
  int64_t group_end = sequence;
  Baseline baseline;
  for (; token < stop && sequence < sequences; ++sequence) {
    if (sequence >= group_end) {
      while (sequence >= group_end && group + 1 < groups) {
        ++group;
        group_end = smaller(group_offsets[group + 1], sequences);
      }
      const int64_t group_begin = larger(group_offsets[group], 0);
      baseline.work_out(rewards, weights, nullptr, group_begin, group_end, singleton_raw, lane);
    }
    const auto word = Element::round(baseline.advantage(rewards[sequence]));
    const int64_t end = smaller(cu_seqlens[sequence + 1], stop);
    if (end > token) {
      fill<typename Element::Word, kMasked>(buffer, mask, token, end, word, lane);
      token = end;
    }
  }
}

// Padded rows [rows, width] of rewards, then advantages, and their mask.
template <class Word, class MaskWord>
struct Rows {
  Word* tokens;
  int64_t row_stride;
  const MaskWord* mask;
  int64_t mask_stride;
  MaskWord keep;  // bits that make a mask true: all, or all but the sign (-0.0 is false)
  int width;

  // How many tokens of a row can be read in vectors.
  __device__ int vectors(const Word* values, const MaskWord* on) const {
    return bytes_to_vector(values) == 0 && bytes_to_vector(on) == 0 ? width / 16 * 16 : 0;
  }
};

// Of a row: the sum of what the mask keeps, how much that is, and where the last of it ends.
template <class Element, class MaskWord>
__global__ void __launch_bounds__(kThreads)
    measure(Rows<typename Element::Word, MaskWord> rows, double* sums, double* lengths,
            double* ends) {
  using Word = typename Element::Word;
  constexpr int kVector = sizeof(uint4) / sizeof(Word);
  constexpr int kPer = sizeof(uint4) / sizeof(MaskWord);
  constexpr int kSteps = kChunk / kLanes / kVector;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const Word* values = rows.tokens + blockIdx.x * rows.row_stride;
  const MaskWord* on = rows.mask + blockIdx.x * rows.mask_stride;
  const int vectors = rows.vectors(values, on);
  double sum = 0;
  int length = 0, last = 0;
  for (int chunk = warp * kChunk; chunk < vectors; chunk += kWarps * kChunk) {
    const int count = static_cast<int>(smaller(kChunk, vectors - chunk));
    union {
      uint4 vector;
      Word words[kVector];
    } loaded[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int first = (step * kLanes + lane) * kVector;
      loaded[step].vector = uint4{0, 0, 0, 0};
      if (first < count) {
        loaded[step].vector = *reinterpret_cast<const uint4*>(values + chunk + first);
      }
    }
    const uint32_t bits = chunk_bits<MaskWord>(on + chunk, rows.keep, count, lane);
    length += __popc(bits);
    if (bits != 0) {
      const int highest = 31 - __clz(bits);
      const int token = (highest / kPer * kLanes + lane) * kPer + highest % kPer;
      last = static_cast<int>(larger(last, chunk + token + 1));
    }
    float part = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t these = vector_bits<kVector, kPer>(bits, step, lane);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        part += (these >> i) & 1 ? Element::load(loaded[step].words[i]) : 0.0f;
      }
    }
    sum += part;
  }
  for (int t = vectors + threadIdx.x; t < rows.width; t += kThreads) {
    if ((on[t] & rows.keep) == 0) continue;
    sum += Element::load(values[t]);
    ++length;
    last = t + 1;
  }

  __shared__ double warp_sums[kWarps];
  __shared__ int warp_lengths[kWarps], warp_lasts[kWarps];
  sum = warp_sum(sum);
  length = warp_sum(length);
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    last = static_cast<int>(larger(last, __shfl_xor_sync(kAll, last, apart)));
  }
  if (lane == 0) {
    warp_sums[warp] = sum;
    warp_lengths[warp] = length;
    warp_lasts[warp] = last;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < kWarps; ++other) {
    sum += warp_sums[other];
    length += warp_lengths[other];
    last = static_cast<int>(larger(last, warp_lasts[other]));
  }
  sums[blockIdx.x] = sum;
  lengths[blockIdx.x] = length;
  ends[blockIdx.x] = last;
}

// A warp for every place in `order`; those where a group begins replace its sums by advantages.
__global__ void __launch_bounds__(kThreads)
    subtract_baselines(double* sums, const double* lengths, const int64_t* order,
                       const int64_t* group_start, const int64_t* group_end, int64_t rows,
                       bool singleton_raw) {
  const int lane = threadIdx.x % kLanes;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (place >= rows || group_start[place] != place) return;
  const int64_t end = group_end[place];
  Baseline baseline;
  baseline.work_out(sums, lengths, order, place, end, singleton_raw, lane);
  for (int64_t i = place + lane; i < end; i += kLanes) {
    sums[order[i]] = baseline.advantage(sums[order[i]]);
  }
}

template <class Element, class MaskWord>
__global__ void __launch_bounds__(kThreads)
    write(Rows<typename Element::Word, MaskWord> rows, const double* advantages,
          const double* lengths, const double* ends) {
  using Word = typename Element::Word;
  constexpr int kVector = sizeof(uint4) / sizeof(Word);
  constexpr int kPer = sizeof(uint4) / sizeof(MaskWord);
  const int lane = threadIdx.x % kLanes;
  const int chunk = (blockIdx.y * kWarps + threadIdx.x / kLanes) * kChunk;
  Word* values = rows.tokens + blockIdx.x * rows.row_stride;
  const MaskWord* on = rows.mask + blockIdx.x * rows.mask_stride;
  const Word word = Element::round(advantages[blockIdx.x]);
  const int length = static_cast<int>(lengths[blockIdx.x]);
  const bool prefix = length == static_cast<int>(ends[blockIdx.x]);
  const int stop = static_cast<int>(smaller(chunk + kChunk, rows.width));
  const int vectors = static_cast<int>(smaller(stop, rows.vectors(values, on)));

  if (chunk < vectors) {
    uint32_t bits = 0;
    if (!prefix) bits = chunk_bits<MaskWord>(on + chunk, rows.keep, vectors - chunk, lane);
#pragma unroll
    for (int step = 0; step < kChunk / kLanes / kVector; ++step) {
      const int first = chunk + (step * kLanes + lane) * kVector;
      uint32_t these = vector_bits<kVector, kPer>(bits, step, lane);
      if (prefix) {
        const int left = static_cast<int>(smaller(larger(length - first, 0), kVector));
        these = (1u << left) - 1;
      }
      if (first < vectors) *reinterpret_cast<uint4*>(values + first) = select(word, these);
    }
  }
  for (int t = static_cast<int>(larger(chunk, vectors)) + lane; t < stop; t += kLanes) {
    values[t] = (on[t] & rows.keep) != 0 ? word : Word{0};
  }
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, void* stream,
                   Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

unsigned blocks(int64_t count, int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

}  // namespace

// Element types of token buffers: 0 float32, 1 bfloat16, 2 float16. All return a cudaError_t; the
// work is queued on `stream`, and nothing waits for it.

extern "C" const char* opo_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

extern "C" int opo_ragged(int device, int element, void* buffer, int64_t tokens, const double* rewards,
                          const double* weights, const int64_t* group_offsets, int64_t groups,
                          const int64_t* cu_seqlens, int64_t sequences, const uint8_t* mask,
                          int singleton_raw, void* stream) {
  // This library's copy of the runtime knows nothing of the caller's choice.
  const cudaError_t chosen = cudaSetDevice(device);
  if (chosen != cudaSuccess) return chosen;
  const auto call = [&](auto type) {
    using Element = decltype(type);
    const auto kernel = mask == nullptr ? ragged<Element, false> : ragged<Element, true>;
    return launch(kernel, dim3(blocks(tokens, kShare * kWarps)), stream,
                  static_cast<typename Element::Word*>(buffer), tokens, rewards, weights,
                  group_offsets, groups, cu_seqlens, sequences, mask, singleton_raw != 0);
  };
  if (element == 0) return call(Float32{});
  if (element == 1) return call(BFloat16{});
  if (element == 2) return call(Float16{});
  return cudaErrorInvalidValue;
}

extern "C" int opo_padded(int device, int element, void* tokens, int64_t row_stride, int mask_bytes,
                          uint64_t mask_keep, const void* mask, int64_t mask_stride, int64_t rows,
                          int64_t width, const int64_t* order, const int64_t* group_start,
                          const int64_t* group_end, double* workspace, int singleton_raw,
                          void* stream) {
  const cudaError_t chosen = cudaSetDevice(device);
  if (chosen != cudaSuccess) return chosen;
  double *sums = workspace, *lengths = workspace + rows, *ends = workspace + 2 * rows;
  const auto call = [&](auto type, auto mask_word) {
    using Element = decltype(type);
    using MaskWord = decltype(mask_word);
    const Rows<typename Element::Word, MaskWord> padded = {
        static_cast<typename Element::Word*>(tokens),
        row_stride,
        static_cast<const MaskWord*>(mask),
        mask_stride,
        static_cast<MaskWord>(mask_keep),
        static_cast<int>(width)};
    const dim3 each_row(static_cast<unsigned>(rows));
    cudaError_t status =
        launch(measure<Element, MaskWord>, each_row, stream, padded, sums, lengths, ends);
    if (status != cudaSuccess) return status;
    status = launch(subtract_baselines, dim3(blocks(rows, kWarps)), stream, sums, lengths, order,
                    group_start, group_end, rows, singleton_raw != 0);
    if (status != cudaSuccess) return status;
    return launch(write<Element, MaskWord>, dim3(each_row.x, blocks(width, kChunk * kWarps)),
                  stream, padded, sums, lengths, ends);
  };
  const auto with_mask = [&](auto type) {
    if (mask_bytes == 1) return call(type, uint8_t{});
    if (mask_bytes == 2) return call(type, uint16_t{});
    if (mask_bytes == 4) return call(type, uint32_t{});
    if (mask_bytes == 8) return call(type, uint64_t{});
    return cudaErrorInvalidValue;
  };
  if (element == 0) return with_mask(Float32{});
  if (element == 1) return with_mask(BFloat16{});
  if (element == 2) return with_mask(Float16{});
  return cudaErrorInvalidValue;
}
