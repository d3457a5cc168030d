// out = in * cos + rotate_half(in) * sin, where rotate_half puts the negated second half of each row
// before the first.  Each product and the sum are rounded to the dtype, as in kernels of their own.
//
// Constant from the compiler's command line: INPUT, the dtype.

#include "values.cuh"

typedef Four<INPUT> Values;

__device__ __forceinline__ Input turned(Input own, Input cos, float other, Input sin) {
    const float first = load(store(__fmul_rn(own.get(), cos.get())));
    return store(__fadd_rn(first, load(store(__fmul_rn(other, sin.get())))));
}

// A thread computes four values of the first half of a row, and the same four of the second.
//
// fours: of a half.  heads: rows with the same angle.  tokens: rows of cos and sin, which repeat.
extern "C" __global__ void rotary(
    Values* out, const Values* in, const Values* cos, const Values* sin, long long count,
    long long fours, long long heads, long long tokens
) {
    wait_for_previous();
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= count) return;
    const unsigned half = fours, row = thread / half, place = thread % half;
    const unsigned first = 2 * row * half + place;
    const unsigned angle = 2 * (row / (unsigned)heads % (unsigned)tokens) * half + place;
    const Values one = in[first], two = in[first + half];
    const Values cos_one = cos[angle], cos_two = cos[angle + half];
    const Values sin_one = sin[angle], sin_two = sin[angle + half];
    Values out_one, out_two;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        out_one.values[j] =
            turned(one.values[j], cos_one.values[j], -two.values[j].get(), sin_one.values[j]);
        out_two.values[j] =
            turned(two.values[j], cos_two.values[j], one.values[j].get(), sin_two.values[j]);
    }
    out[first] = out_one;
    out[first + half] = out_two;
}
