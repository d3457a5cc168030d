// The cross entropy of each row of logits after the soft cap; writes its gradient over the logits.
//
// Each step of the soft cap is rounded to the dtype of the logits, as PyTorch does.  The gradient is
// computed in float32 and rounded once.
//
// Constants from the compiler's command line: INPUT, the dtype; VALUES that one load
// reads.

#include "values.cuh"

struct alignas(VALUES * sizeof(Input)) Pack {
    Input values[VALUES];
};

__device__ __forceinline__ float rounded(float value) { return load(store(value)); }

// The logit after the soft cap, and its tanh.
__device__ __forceinline__ float capped(float logit, float cap, float inverse, float& tangent) {
    if (cap == 0.0f) return logit;
    tangent = rounded(tanhf(rounded(logit * inverse)));
    return rounded(tangent * cap);
}

constexpr int WARPS = 32;
#define INFINITY_ __int_as_float(0x7f800000)

// Adds two sums of exp(value - maximum), each with its maximum.
__device__ __forceinline__ void add(float& maximum, float& sum, float other, float others) {
    const float both = fmaxf(maximum, other);
    if (both == -INFINITY_) return;
    sum = sum * expf(maximum - both) + others * expf(other - both);
    maximum = both;
}

// A block for each row.
extern "C" __global__ void __launch_bounds__(WARPS * 32) token_loss(
    float* losses, Input* logits, const long long* targets, float cap, float inverse, int ignored,
    int size
) {
    Pack* row = (Pack*)(logits + (long long)blockIdx.x * size);
    const long long target = targets[blockIdx.x];
    const int packs = size / VALUES, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (target == ignored) {
        const Pack zeros = {};
        for (int i = threadIdx.x; i < packs; i += blockDim.x) row[i] = zeros;
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }
    if (target < 0 || target >= size) __trap();  // PyTorch's kernel asserts that

    float maximum = -INFINITY_, sum = 0.0f, tangent = 0.0f;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack pack = row[i];
        float values[VALUES], largest = -INFINITY_, sums = 0.0f;
#pragma unroll
        for (int k = 0; k < VALUES; ++k) {
            values[k] = capped(load(pack.values[k]), cap, inverse, tangent);
            largest = fmaxf(largest, values[k]);
        }
        if (largest > -INFINITY_) {
#pragma unroll
            for (int k = 0; k < VALUES; ++k) sums += expf(values[k] - largest);
        }
#pragma unroll
        for (int k = 0; k < VALUES; ++k) {
            if (values[k] != values[k]) sums = values[k];  // nan
        }
        if (sums != sums) { maximum = fmaxf(maximum, 0.0f); sum = sums; }
        add(maximum, sum, largest, sums);
    }
    __shared__ float maxima[WARPS], sums[WARPS];
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffff, maximum, step);
        add(maximum, sum, other, __shfl_xor_sync(0xffffffff, sum, step));
    }
    if (lane == 0) maxima[warp] = maximum, sums[warp] = sum;
    __syncthreads();
    maximum = maxima[lane], sum = sums[lane];
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffff, maximum, step);
        add(maximum, sum, other, __shfl_xor_sync(0xffffffff, sum, step));
    }
    const float logarithm = logf(sum);
    if (threadIdx.x == 0) {
        const float logit = capped(load(((Input*)row)[target]), cap, inverse, tangent);
        losses[blockIdx.x] = -(logit - maximum - logarithm);
    }
    __syncthreads();  // The logit of the target is read before it is overwritten.
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack pack = row[i];
#pragma unroll
        for (int k = 0; k < VALUES; ++k) {
            const float logit = capped(load(pack.values[k]), cap, inverse, tangent);
            float gradient = expf(logit - maximum - logarithm);
            if ((long long)i * VALUES + k == target) gradient -= 1.0f;
            if (cap != 0.0f) gradient *= 1.0f - tangent * tangent;
            pack.values[k] = store(gradient);
        }
        row[i] = pack;
    }
}
