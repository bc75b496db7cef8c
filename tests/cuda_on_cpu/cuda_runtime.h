// As much of CUDA as the kernels use, on one thread of the CPU, so that their source is compiled by
// a plain C++ compiler and run in tests without a GPU.
//
// Blocks run one after the other. The threads of a block are fibers that take turns; each runs up
// to the next instruction that needs others (a shuffle, a ballot, a barrier). When its turn comes
// again, all lanes of its warp must have arrived at that instruction, as on a GPU where the mask
// names all lanes; if one has not, the process ends and says which.

#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }

namespace cuda_on_cpu {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool done;
  long meetings;
  // Of the last two meetings, so that a lane that runs on takes nothing from the others.
  long number[2];
  int line[2];
  uint64_t offered[2];
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned current;
inline unsigned arrived;
inline long barriers;
inline std::function<void()> body;

inline void let_others_run() { swapcontext(&fibers[current].context, &scheduler); }

// Offers a value and lets all others run up to their offer; then `lane(i)` is what lane i offered.
struct Meeting {
  const unsigned first = current / 32 * 32;
  int parity;

  Meeting(uint64_t offer, int line) {
    Fiber& self = fibers[current];
    const long number = ++self.meetings;
    parity = static_cast<int>(number & 1);
    self.number[parity] = number;
    self.line[parity] = line;
    self.offered[parity] = offer;
    let_others_run();
    for (unsigned i = first; i < first + 32; ++i) {
      const Fiber& other = fibers[i];
      if (other.number[parity] != number || other.line[parity] != line) {
        std::fprintf(stderr, "line %d: thread %u waits for thread %u, which is elsewhere\n", line,
                     current, i);
        std::abort();
      }
    }
  }

  uint64_t lane(unsigned i) const { return fibers[first + i].offered[parity]; }
};

template <class Value>
Value shuffle(Value value, unsigned from, int line) {
  static_assert(sizeof(Value) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(Value));
  bits = Meeting(bits, line).lane(from);
  std::memcpy(&value, &bits, sizeof(Value));
  return value;
}

inline unsigned ballot(bool vote, int line) {
  const Meeting meeting(vote, line);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i) votes |= static_cast<unsigned>(meeting.lane(i)) << i;
  return votes;
}

inline void barrier() {
  const long mine = barriers;
  if (++arrived == fibers.size()) {
    arrived = 0;
    ++barriers;
  }
  while (barriers == mine) let_others_run();
}

inline void enter() {
  body();
  fibers[current].done = true;
  let_others_run();
}

inline void run_block() {
  for (Fiber& fiber : fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, enter, 0);
    fiber.done = false;
    fiber.meetings = fiber.number[0] = fiber.number[1] = 0;
  }
  arrived = 0;
  for (bool running = true; running;) {
    running = false;
    for (current = 0; current < fibers.size(); ++current) {
      if (fibers[current].done) continue;
      swapcontext(&scheduler, &fibers[current].context);
      running = true;
    }
  }
}

}  // namespace cuda_on_cpu

struct ThreadIndex {
  struct {
    operator unsigned() const { return cuda_on_cpu::current; }
  } x;
};
inline ThreadIndex threadIdx;
inline dim3 blockIdx;

#define __shfl_sync(mask, value, from) cuda_on_cpu::shuffle(value, from, __LINE__)
#define __shfl_xor_sync(mask, value, apart) \
  cuda_on_cpu::shuffle(value, threadIdx.x % 32 ^ (apart), __LINE__)
#define __ballot_sync(mask, vote) cuda_on_cpu::ballot(vote, __LINE__)
#define __syncthreads() cuda_on_cpu::barrier()

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  cuda_on_cpu::body = [&] { kernel(arguments...); };
  cuda_on_cpu::fibers.resize(config->blockDim.x);
  for (blockIdx.y = 0; blockIdx.y < config->gridDim.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < config->gridDim.x; ++blockIdx.x) cuda_on_cpu::run_block();
  }
  return cudaSuccess;
}
