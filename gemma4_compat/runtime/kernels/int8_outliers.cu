// LLM.int8() for one row of inputs, without the CPU.
//
// separate: copies the row in float16 without its outliers, and lists their columns in order.
// add: adds the products of the outliers and their columns of the weight to an output.
//
// Constants from the compiler's command line: INPUT, the dtype of inputs and outputs.

#include "values.cuh"

constexpr int WARPS = 32;

// One block.
extern "C" __global__ void __launch_bounds__(WARPS * 32) separate(
    unsigned short* rest, int* columns, int* count, const Input* row, float threshold, int size
) {
    __shared__ int counts[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int share = (size + WARPS * 32 - 1) / (WARPS * 32) * 32;
    const int begin = warp * share, end = min(begin + share, size);
    int found = 0;
    for (int first = begin; first < end; first += 32) {
        const int column = first + lane;
        const unsigned short half = column < end ? to_half(load(row[column])) : 0;
        const bool is_outlier = fabsf(of_half(half)) >= threshold;
        if (column < end) rest[column] = is_outlier ? 0 : half;
        found += __popc(__ballot_sync(0xffffffff, is_outlier));
    }
    if (lane == 0) counts[warp] = found;
    __syncthreads();
    int next = 0, all = 0;
    for (int i = 0; i < WARPS; i++) {
        next += i < warp ? counts[i] : 0;
        all += counts[i];
    }
    if (threadIdx.x == 0) *count = all;
    if (found == 0) return;
    for (int first = begin; first < end; first += 32) {
        const int column = first + lane;
        const unsigned short half = column < end ? to_half(load(row[column])) : 0;
        const bool is_outlier = fabsf(of_half(half)) >= threshold;
        const unsigned int mask = __ballot_sync(0xffffffff, is_outlier);
        if (is_outlier) columns[next + __popc(mask & ((1u << lane) - 1))] = column;
        next += __popc(mask);
    }
}

// A thread for each output.  The weight is rounded as bitsandbytes rounds it.
extern "C" __global__ void __launch_bounds__(256) add(
    Input* out, const Input* row, const int* columns, const int* count, const signed char* weight,
    const float* scales, int outputs, int size
) {
    const int output = blockIdx.x * 256 + threadIdx.x, outliers = *count;
    if (outliers == 0 || output >= outputs) return;
    const float scale = scales[output];
    float sum = 0.f;
    for (int i = 0; i < outliers; i++) {
        const int column = columns[i];
        const float scaled = __fmul_rn((float)weight[(size_t)output * size + column], scale);
        sum = fmaf(load(row[column]), load(store(__fmul_rn(scaled, 7.874015748698502e-3f))), sum);
    }
    out[output] = store(load(out[output]) + sum);
}
