/// The routed experts of a layer in two launches of the exact product, each with a tail.
///
/// Of the blocks of threads that share a unit's outputs of W13, the one that comes last turns them
/// into W2's operand; of those that share a token's columns of W2, the last one combines the slots,
/// in their order. Which one comes last changes no bit: it reads what all have written. The second
/// launch starts beside the first and has its weights on their way when that ends.
#include "kernels/exact/moe_w4a4_cuda.h"
#include "kernels/exact/w4a4_kernel_cuda.h"
#include "numerics/exp.h"
#include "numerics/scale.h"

namespace lockstep::kernels {
namespace {

using namespace w4a4_device;

/// All threads' writes are seen by whoever brings the counter to `target`. True for that one, in
/// all threads; the counter is zero again.
__device__ bool is_last(std::int32_t* counter, std::int32_t done, std::int32_t target,
                        std::int32_t* shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicAdd(counter, done) + done == target;
    if (last) {
      *counter = 0;
      __threadfence();
    }
    *shared = last;
  }
  __syncthreads();
  return *shared != 0;
}

/// W2's operand of a unit: SwiGLU, then quantization under one power of two a slot.
struct SwigluTail {
  static constexpr bool kStartsEarly = false;
  static constexpr bool kRuns = true;

  std::int32_t* counters;  // one a unit
  std::int32_t* bad;
  std::uint8_t* codes;
  std::uint8_t* scales;
  float* global;
  std::int64_t code_stride;
  std::int64_t scale_stride;
  std::int64_t global_stride;
  std::int32_t width;
  std::int32_t slots;

  template <typename Kernel>
  __device__ void operator()(const Params& p, Kernel& s, const Unit& unit, int index, int first,
                             int end) const {
    std::int32_t* const amax = s.tail;
    if (!is_last(counters + index, end - first, p.groups, &s.last)) return;
    const int count = unit.count();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kItems) amax[thread] = 0;
    __syncthreads();
    // The values stay in the rows that held the activations.
    const int total = count * width;
    for (int i = thread; i < total; i += kThreads) {
      const int row = i / width;
      const int column = i % width;
      const float* const from = p.out + s.to[row] * p.out_stride + column;
      const Bf16 value = swiglu_exact(__ldcg(from), __ldcg(from + width));
      reinterpret_cast<Bf16*>(s.a[0][row])[column] = value;
      const int magnitude = static_cast<int>(value) & 0x7FFF;
      const unsigned here = __activemask();
      // Rows are whole warps wide where width is a multiple of 32; elsewhere each adds its own.
      if (width % 32 == 0) {
        const int most = __reduce_max_sync(here, magnitude);
        if (thread % 32 == 0) atomicMax(amax + row, most);
      } else {
        atomicMax(amax + row, magnitude);
      }
    }
    __syncthreads();
    const int words = width / 4;
    const int work = count * words;
    for (int i = thread; i - thread < work; i += kThreads) {
      quantize_word(s.a[0], s.to, amax, i / words, i % words, i < work);
    }
    if (thread < count) {
      const std::int32_t slot = s.to[thread];
      const bool finite = amax[thread] < 0x7F80;
      global[slot * global_stride] = power_of_two(
          finite ? global_exponent(float_of(static_cast<std::uint32_t>(amax[thread]) << 16)) : 0);
      if (!finite && bad != nullptr) atomicMin(bad, slot / slots);
    }
  }

  /// Four elements; the four lanes of a block agree on its scale. All lanes of a warp call it.
  __device__ void quantize_word(const std::uint8_t (&rows)[kItems][kRowBytes],
                                const std::int32_t* to, const std::int32_t* amax, int row, int word,
                                bool exists) const {
    uint2 bits{0, 0};
    std::int32_t n = 0;
    bool finite = false;
    if (exists) {
      bits = *reinterpret_cast<const uint2*>(rows[row] + word * 8);
      finite = amax[row] < 0x7F80;
      if (finite) n = global_exponent(float_of(static_cast<std::uint32_t>(amax[row]) << 16));
    }
    const float x[4] = {float_of(bits.x << 16), float_of(bits.x & 0xFFFF0000u),
                        float_of(bits.y << 16), float_of(bits.y & 0xFFFF0000u)};
    float most =
        fmaxf(fmaxf(magnitude(x[0]), magnitude(x[1])), fmaxf(magnitude(x[2]), magnitude(x[3])));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
    if (!exists) return;
    std::uint32_t packed = 0;
    std::uint8_t s8 = 0;
    if (finite) {
      const E4m3 scale = block_scale(most, n);
      s8 = bits_of(scale);
      const float value = scale_value(scale, n);
      for (int i = 0; i < 4; ++i) {
        packed |= static_cast<std::uint32_t>(bits_of(to_e2m1_scaled(x[i], value))) << 4 * i;
      }
    }
    const std::int64_t slot = to[row];
    *reinterpret_cast<std::uint16_t*>(codes + slot * code_stride + word * 2) =
        static_cast<std::uint16_t>(packed);
    if (word % 4 == 0) scales[slot * scale_stride + word / 4] = s8;
  }
};

/// The sum over a token's slots, once all of them have their columns.
struct CombineTail {
  static constexpr bool kStartsEarly = true;  // offsets are older than the launch of W13
  static constexpr bool kRuns = true;

  std::int32_t* counters;  // [rows, groups]
  const float* gates;
  Bf16* out;
  std::int64_t gate_stride;
  std::int64_t out_stride;
  std::int32_t slots;

  template <typename Kernel>
  __device__ void operator()(const Params& p, Kernel& s, const Unit& unit, int, int first,
                             int end) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int groups = end - first;
    const int pairs = unit.count() * groups;
    __syncthreads();
    for (int i = thread; i - thread < pairs; i += kThreads) {
      // A warp looks at 32 pairs of an item and a group, then combines those that are complete.
      bool last = false;
      if (i < pairs) {
        __threadfence();
        std::int32_t* const counter =
            counters + s.to[i / groups] / slots * p.groups + first + i % groups;
        last = atomicAdd(counter, 1) == slots - 1;
        if (last) *counter = 0;
        __threadfence();
      }
      for (unsigned left = __ballot_sync(0xFFFFFFFFu, last); left != 0; left &= left - 1) {
        const int pair = i - thread % 32 + __ffs(static_cast<int>(left)) - 1;
        combine(p, s.to[pair / groups] / slots, (first + pair % groups) * kGroup + thread % 32);
      }
    }
  }

  __device__ void combine(const Params& p, std::int64_t token, int column) const {
    static_assert(kGroup == 32);
    if (column >= p.out_rows) return;
    const float* y = p.out + token * slots * p.out_stride + column;
    float sum = 0.0f;
#pragma unroll 8
    for (int slot = 0; slot < slots; ++slot, y += p.out_stride) {
      sum = __fadd_rn(sum, __fmul_rn(gates[token * gate_stride + slot], __ldcg(y)));
    }
    out[token * out_stride + column] = to_bf16(sum);
  }
};

}  // namespace

void moe_w4a4_cuda(const MoeW4a4Args& args, Stream stream) {
  const cuda::OnDevice scope(args.a.codes.device.index);
  const auto slots = static_cast<std::int32_t>(args.gates.shape[1]);
  const std::int64_t items = args.gates.shape[0] * slots;
  const Params first = params_of({.a = args.a,
                                  .w = args.gate_up,
                                  .offsets = args.offsets,
                                  .from = args.rows_of,
                                  .to = args.slots_of,
                                  .out = args.up},
                                 items);
  SwigluTail swiglu{};
  swiglu.counters = args.counters;
  swiglu.bad = args.bad;
  swiglu.codes = args.w2_in.codes.data;
  swiglu.scales = args.w2_in.scales.data;
  swiglu.global = args.w2_in.global.data;
  swiglu.code_stride = args.w2_in.codes.stride[0];
  swiglu.scale_stride = args.w2_in.scales.stride[0];
  swiglu.global_stride = args.w2_in.global.stride[0];
  swiglu.width = args.down.cols;
  swiglu.slots = slots;
  launch<1>(first, swiglu, args.a.codes.device.index, stream);

  const Params second = params_of({.a = args.w2_in,
                                   .w = args.down,
                                   .offsets = args.offsets,
                                   .from = args.slots_of,
                                   .to = args.slots_of,
                                   .out = args.y},
                                  items);
  CombineTail combine{};
  combine.counters = args.counters + items / kItems + args.gate_up.experts + 1;
  combine.gates = args.gates.data;
  combine.out = args.out.data;
  combine.gate_stride = args.gates.stride[0];
  combine.out_stride = args.out.stride[0];
  combine.slots = slots;
  launch<1>(second, combine, args.a.codes.device.index, stream);
}

}  // namespace lockstep::kernels
