// Rewards -> token-level advantages in place, on the CPU. A plain C interface: no torch, no ABI.
// Values of tokens are written as bit patterns: a sequence has one advantage, rounded once.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "../cpu_kernel.h"

namespace {

struct Float32 {
  using Word = uint32_t;
  static float load(Word word) { return bits_as<float>(word); }
  static Word round(double value) { return bits_as<Word>(static_cast<float>(value)); }
};

struct BFloat16 {
  using Word = uint16_t;
  static float load(Word word) { return from_bfloat16(word); }
  static Word round(double value) { return to_bfloat16(static_cast<float>(value)); }
};

struct Float16 {
  using Word = uint16_t;
  static float load(Word word) { return static_cast<float>(bits_as<_Float16>(word)); }
  static Word round(double value) {
    return bits_as<Word>(static_cast<_Float16>(static_cast<float>(value)));
  }
};

// Calls work(item) for every item, on up to so many threads. Nobody waits for a thread that the
// system is slow to start: it finds the items taken, and nothing but the counters is touched.
template <class Work>
void in_parallel(int threads, int64_t items, const Work& work) {
  struct Counters {
    std::atomic<int64_t> taken{0}, done{0};
  };
  const auto counters = std::make_shared<Counters>();
  const auto take = [counters, items, &work] {
    for (int64_t item; (item = counters->taken.fetch_add(1)) < items;) {
      work(item);
      counters->done.fetch_add(1);
    }
  };
  try {
    for (int thread = 1; thread < threads; ++thread) std::thread(take).detach();
  } catch (const std::system_error&) {
    // No more threads to be had: those that run do the work.
  }
  take();
  while (counters->done.load() < items) std::this_thread::yield();
}

// Advantages of a group's members: relative to the first reward, so that equal ones cancel exactly.
// `member` maps 0 .. size-1 to an index of rewards and weights.
template <class Member, class Write>
void group_advantages(const double* rewards, const double* weights, int64_t size,
                      bool singleton_raw, const Member& member, const Write& write) {
  if (size == 0) return;
  const double reference = rewards[member(0)];
  double total = 0, weighted = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t m = member(i);
    total += weights[m];
    weighted += weights[m] * (rewards[m] - reference);
  }
  const bool raw = singleton_raw && size == 1;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t m = member(i);
    const double advantage = raw ? rewards[m] : (rewards[m] - reference) - weighted / total;
    write(m, total > 0 ? advantage : 0.0);
  }
}

template <class Element>
void ragged(typename Element::Word* buffer, const double* rewards, const double* weights,
            const int64_t* group_offsets, int64_t groups, const int64_t* cu_seqlens,
            int64_t sequences, const uint8_t* mask, bool singleton_raw, int threads) {
  using Word = typename Element::Word;
  std::vector<Word> words(sequences);
  for (int64_t k = 0; k < groups; ++k) {
    const int64_t first = group_offsets[k];
    group_advantages(
        rewards, weights, group_offsets[k + 1] - first, singleton_raw,
        [=](int64_t i) { return first + i; },
        [&](int64_t i, double advantage) { words[i] = Element::round(advantage); });
  }
  constexpr int64_t kShare = 1 << 18;  // tokens
  const int64_t begin = cu_seqlens[0], tokens = cu_seqlens[sequences] - begin;
  in_parallel(threads, (tokens + kShare - 1) / kShare, [&](int64_t share) {
    int64_t token = begin + share * kShare;
    const int64_t stop = begin + std::min(tokens, (share + 1) * kShare);
    int64_t i = std::upper_bound(cu_seqlens, cu_seqlens + sequences + 1, token) - cu_seqlens - 1;
    for (; token < stop; ++i) {
      const int64_t end = std::min(stop, cu_seqlens[i + 1]);
      const Word word = words[i];
      if (mask == nullptr) {
        std::fill(buffer + token, buffer + end, word);
      } else {
        for (int64_t t = token; t < end; ++t) buffer[t] = mask[t] ? word : Word{0};
      }
      token = end;
    }
  });
}

template <class Element, class MaskWord>
struct Padded {
  using Word = typename Element::Word;
  Word* tokens;  // [rows, width]: rewards, then advantages
  int64_t row_stride;
  const MaskWord* mask;
  int64_t mask_stride;
  MaskWord mask_keep;  // bits that make a mask true: all, or all but the sign (-0.0 is false)
  int64_t rows, width;
  const int64_t *order, *group_start, *group_end;
  double *sums, *lengths;
  bool singleton_raw;

  void measure(int64_t row) const {
    constexpr int64_t kBlock = 512;  // added up in float32 lanes, blocks in float64
    const Word* values = tokens + row * row_stride;
    const MaskWord* on = mask + row * mask_stride;
    double sum = 0;
    int64_t length = 0;
    for (int64_t first = 0; first < width; first += kBlock) {
      const int64_t stop = std::min(first + kBlock, width);
      prefetch(values + stop, kBlock);
      prefetch(on + stop, kBlock);
      float block_sum = 0;
      int32_t block_length = 0;
#pragma omp simd reduction(+ : block_sum, block_length)
      for (int64_t t = first; t < stop; ++t) {
        const bool counts = (on[t] & mask_keep) != 0;
        const float value = Element::load(values[t]);
        block_sum += counts ? value : 0.0f;
        block_length += counts;
      }
      sum += block_sum;
      length += block_length;
    }
    sums[row] = sum;
    lengths[row] = static_cast<double>(length);
  }

  // Of the group whose members are order[first:group_end[first]]; advantages replace sums.
  void subtract_baseline(int64_t first) const {
    group_advantages(
        sums, lengths, group_end[first] - first, singleton_raw,
        [&](int64_t i) { return order[first + i]; },
        [&](int64_t row, double advantage) { sums[row] = advantage; });
  }

  void write(int64_t row) const {
    Word* values = tokens + row * row_stride;
    const MaskWord* on = mask + row * mask_stride;
    const Word word = Element::round(sums[row]);
#pragma omp simd
    for (int64_t t = 0; t < width; ++t) values[t] = (on[t] & mask_keep) != 0 ? word : Word{0};
  }

  void run(int threads) const {
    std::vector<int64_t> firsts;
    for (int64_t p = 0; p < rows; ++p) {
      if (group_start[p] == p) firsts.push_back(p);
    }
    const int64_t groups = static_cast<int64_t>(firsts.size());
    if (groups < 4 * threads) return run_by_rows(threads, firsts);
    // Group by group, its rows are still in the cache when they are written.
    in_parallel(threads, groups, [&](int64_t group) {
      const int64_t first = firsts[group], end = group_end[first];
      for (int64_t p = first; p < end; ++p) measure(order[p]);
      subtract_baseline(first);
      for (int64_t p = first; p < end; ++p) write(order[p]);
    });
  }

  void run_by_rows(int threads, const std::vector<int64_t>& firsts) const {
    in_parallel(threads, rows, [&](int64_t row) { measure(row); });
    for (const int64_t first : firsts) subtract_baseline(first);
    in_parallel(threads, rows, [&](int64_t row) { write(row); });
  }
};

template <class Element, class MaskWord>
void padded(void* tokens, int64_t row_stride, const void* mask, int64_t mask_stride,
            uint64_t mask_keep, int64_t rows, int64_t width, const int64_t* order,
            const int64_t* group_start, const int64_t* group_end, double* workspace,
            bool singleton_raw, int threads) {
  Padded<Element, MaskWord>{static_cast<typename Element::Word*>(tokens),
                            row_stride,
                            static_cast<const MaskWord*>(mask),
                            mask_stride,
                            static_cast<MaskWord>(mask_keep),
                            rows,
                            width,
                            order,
                            group_start,
                            group_end,
                            workspace,
                            workspace + rows,
                            singleton_raw}
      .run(threads);
}

}  // namespace

// Element types of token buffers: 0 float32, 1 bfloat16, 2 float16. Both return 0, or 1 when the
// system has no memory left.

extern "C" int opo_ragged(int element, void* buffer, const double* rewards, const double* weights,
                          const int64_t* group_offsets, int64_t groups, const int64_t* cu_seqlens,
                          int64_t sequences, const uint8_t* mask, int singleton_raw, int threads) {
  const auto call = [&](auto type) {
    using Element = decltype(type);
    ragged<Element>(static_cast<typename Element::Word*>(buffer), rewards, weights, group_offsets,
                    groups, cu_seqlens, sequences, mask, singleton_raw != 0, threads);
  };
  try {
    if (element == 0) call(Float32{});
    if (element == 1) call(BFloat16{});
    if (element == 2) call(Float16{});
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

extern "C" int opo_padded(int element, void* tokens, int64_t row_stride, int mask_bytes,
                          uint64_t mask_keep, const void* mask, int64_t mask_stride, int64_t rows,
                          int64_t width, const int64_t* order, const int64_t* group_start,
                          const int64_t* group_end, double* workspace, int singleton_raw,
                          int threads) {
  const auto call = [&](auto type, auto mask_word) {
    padded<decltype(type), decltype(mask_word)>(tokens, row_stride, mask, mask_stride, mask_keep,
                                                rows, width, order, group_start, group_end,
                                                workspace, singleton_raw != 0, threads);
  };
  const auto with_mask = [&](auto type) {
    if (mask_bytes == 1) call(type, uint8_t{});
    if (mask_bytes == 2) call(type, uint16_t{});
    if (mask_bytes == 4) call(type, uint32_t{});
    if (mask_bytes == 8) call(type, uint64_t{});
  };
  try {
    if (element == 0) with_mask(Float32{});
    if (element == 1) with_mask(BFloat16{});
    if (element == 2) with_mask(Float16{});
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
