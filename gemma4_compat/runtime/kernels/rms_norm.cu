// out = in * rsqrt(mean(in * in) + eps) * weight, for each row.  blockDim.x threads compute a row.
//
// The sum has the order of PyTorch's ``mean`` over contiguous rows of a multiple of 4 values
// (input_vectorized_thread_reduce_impl and block_x_reduce in ATen/native/cuda/Reduce.cuh), and each
// step is rounded as in a kernel of its own.  So the output equals PyTorch's bit for bit.
//
// Constants from the compiler's command line: INPUT, OUTPUT and WEIGHT, the dtypes (0: no weight);
// THREADS, the most in a block; HALVING, if a warp adds its halves first, as newer releases of PyTorch do, and
// not its neighbors.

#include "values.cuh"

// The sum of one value of each thread of a row.
__device__ __forceinline__ float sum_of(float value) {
    __shared__ float sums[THREADS];
    const int thread = threadIdx.x;
    if (blockDim.x > 32) {
        __syncthreads();  // all have read the sum before
        sums[thread] = value;
        for (int half = blockDim.x / 2; half >= 32; half /= 2) {
            __syncthreads();
            if (thread < half) sums[thread] = value = __fadd_rn(value, sums[thread + half]);
        }
    }
    if (thread < 32) {
#pragma unroll
        for (int i = 1; i < 32; i *= 2)
            value = __fadd_rn(value, __shfl_down_sync(0xffffffff, value, HALVING ? 16 / i : i));
    }
    if (blockDim.x == 32) return __shfl_sync(0xffffffff, value, 0);
    if (thread == 0) sums[0] = value;
    __syncthreads();
    return sums[0];
}

__device__ __forceinline__ float sum_of_four(const float* values) {
    float sum = values[0];
#pragma unroll
    for (int j = 1; j < 4; j++) sum = __fadd_rn(sum, values[j]);
    return sum_of(sum);
}

__device__ __forceinline__ float scale_of(const float* squares, float factor, float eps) {
    return rsqrtf(__fadd_rn(__fmul_rn(sum_of_four(squares), factor), eps));
}

template <int DTYPE>
__device__ __forceinline__ Four<OUTPUT> norm_of(
    const Four<DTYPE>& in, const Four<WEIGHT>* weight, float scale
) {
    Four<OUTPUT> result;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float value = __fmul_rn(in.values[j].get(), scale);
#if WEIGHT
        value = __fmul_rn(value, weight->values[j].get());
#endif
        result.values[j].set(value);
    }
    return result;
}

// With a residual, out = (residual + norm) * scalar, rounded after each step; with a next weight, next is
// the norm of that.  Both are what follows attention and MLP in a decoder layer.
//
// A block has several rows only if each has one warp.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(
    Four<OUTPUT>* __restrict__ out, const Four<INPUT>* in, const Four<WEIGHT>* weight,
    const Four<OUTPUT>* residual, const Value<OUTPUT>* scalar, Four<OUTPUT>* next,
    const Four<WEIGHT>* next_weight, long long rows, int fours, float factor, float eps
) {
    wait_for_previous();
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    in += row * fours;
    out += row * fours;
    float squares[4] = {};
#pragma unroll 4
    for (int i = threadIdx.x; i < fours; i += blockDim.x) {
        const Four<INPUT> four = in[i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float value = four.values[j].get();
            squares[j] = __fadd_rn(squares[j], __fmul_rn(value, value));
        }
    }
    const float scale = scale_of(squares, factor, eps);
    if (!residual) {
#pragma unroll 4
        for (int i = threadIdx.x; i < fours; i += blockDim.x) out[i] = norm_of(in[i], weight + i, scale);
        return;
    }
    float others[4] = {};
    for (int i = threadIdx.x; i < fours; i += blockDim.x) {
        const Four<OUTPUT> old = residual[row * fours + i];
        Four<OUTPUT> four = norm_of(in[i], weight + i, scale);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            Value<OUTPUT>& value = four.values[j];
            value.set(__fadd_rn(old.values[j].get(), value.get()));
            if (scalar) value.set(__fmul_rn(value.get(), scalar->get()));
            others[j] = __fadd_rn(others[j], __fmul_rn(value.get(), value.get()));
        }
        out[i] = four;
    }
    if (!next) return;
    const float next_scale = scale_of(others, factor, eps);
    for (int i = threadIdx.x; i < fours; i += blockDim.x)
        next[row * fours + i] = norm_of(out[i], next_weight + i, next_scale);
}

// The gradient of the input, from that of the output.  With s = mean(in * in) + eps, autograd adds
//   grad * weight * s^-0.5  and  sum(grad * weight * in) * (-0.5 * s^-1.5) / size * (2 * in).
// The rows of grad are in the order batch, head, token, and those of the others batch, token, head.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_gradient(
    Four<INPUT>* __restrict__ out, const Four<INPUT>* in, const Four<OUTPUT>* grad,
    const Four<WEIGHT>* weight, long long heads, long long tokens, long long rows, int fours,
    float factor, float eps
) {
    wait_for_previous();
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    in += row * fours;
    out += row * fours;
    const size_t sequence = row / (heads * tokens), token = row / heads % tokens;
    grad += ((sequence * heads + row % heads) * tokens + token) * fours;
    float squares[4] = {}, products[4] = {};
#pragma unroll 2
    for (int i = threadIdx.x; i < fours; i += blockDim.x) {
        const Four<INPUT> four = in[i];
        const Four<OUTPUT> gradients = grad[i];
#if WEIGHT
        const Four<WEIGHT> weights = weight[i];
#endif
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float value = four.values[j].get();
            float gradient = gradients.values[j].get();
#if WEIGHT
            gradient = __fmul_rn(gradient, weights.values[j].get());
#endif
            squares[j] = __fadd_rn(squares[j], __fmul_rn(value, value));
            products[j] = __fadd_rn(products[j], __fmul_rn(gradient, value));
        }
    }
    const float mean = __fadd_rn(__fmul_rn(sum_of_four(squares), factor), eps);
    const float scale = rsqrtf(mean);
    const float slope = __fmul_rn(sum_of_four(products), __fmul_rn(-0.5f, powf(mean, -1.5f)));
    const float each = __fmul_rn(slope, factor);
#pragma unroll 2
    for (int i = threadIdx.x; i < fours; i += blockDim.x) {
        Four<INPUT> four = in[i];
        const Four<OUTPUT> gradients = grad[i];
#if WEIGHT
        const Four<WEIGHT> weights = weight[i];
#endif
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float gradient = gradients.values[j].get();
#if WEIGHT
            gradient = __fmul_rn(gradient, weights.values[j].get());
#endif
            const float twice = __fmul_rn(2.f, four.values[j].get());
            four.values[j].set(__fadd_rn(__fmul_rn(gradient, scale), __fmul_rn(each, twice)));
        }
        out[i] = four;
    }
}
