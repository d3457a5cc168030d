// out = result + scaling * B @ (A @ in), for a few rows of inputs: what a LoRA adapter adds.  A row of
// blocks computes each of them.
//
// All products and sums are in float32.  The order of the additions depends on the shapes only.
//
// Constants from the compiler's command line: INPUT, the dtype of in, result and out; ADAPTER, the
// dtype of A and B; RANK; THREADS of a block; PART: what a launch computes.

#include "values.cuh"

constexpr int BOTH = 0, FIRST = 1;  // 2: the outputs
constexpr int WARPS = THREADS / 32, BATCH = 8;
constexpr int VALUES = RANK % 4 ? 1 : 4, COUNT = RANK / VALUES;  // of a load, loads of a row of B

// Threads that share a row of B.
constexpr int LANES = COUNT > 16 ? 32 : COUNT > 8 ? 16 : COUNT > 4 ? 8 : COUNT > 2 ? 4 : COUNT;
constexpr int EACH = (COUNT + LANES - 1) / LANES, ROWS = THREADS / LANES;
constexpr int OWN = PART == BOTH ? RANK : 1;  // rows of A of a block
constexpr int PARTS = OWN < WARPS ? WARPS / OWN : 1;  // warps that share such a row

__device__ __forceinline__ float added(float value, int threads) {
    for (int distance = threads / 2; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffff, value, distance);
    return value;
}

// All loads of a batch are on their way at once: the compiler does not move them.
template <typename Values>
__device__ __forceinline__ Values load(const Values* from) {
    union {
        unsigned words[sizeof(Values) / 4];
        Values values;
    } four;
    if constexpr (sizeof(Values) == 16)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(four.words[0]), "=r"(four.words[1]), "=r"(four.words[2]), "=r"(four.words[3])
            : "l"(from));
    else
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
            : "=r"(four.words[0]), "=r"(four.words[1]) : "l"(from));
    return four.values;
}

// The sum of the products that this thread computes, and those of its warp.
__device__ __forceinline__ float product(
    const Four<ADAPTER>* row, const Four<INPUT>* in, unsigned fours, unsigned first
) {
    float sums[4] = {};
    for (unsigned start = first; start - first % 32 < fours; start += BATCH * PARTS * 32) {
        Four<ADAPTER> a[BATCH];
        Four<INPUT> x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const unsigned at = start + i * PARTS * 32, inside = at < fours ? at : 0;
            a[i] = load(row + inside), x[i] = load(in + inside);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (start + i * PARTS * 32 >= fours) break;
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[j] = fmaf(a[i].values[j].get(), x[i].values[j].get(), sums[j]);
        }
    }
    return added(sums[0] + sums[1] + (sums[2] + sums[3]), 32);
}

struct alignas(VALUES * sizeof(Value<ADAPTER>)) Load {
    Value<ADAPTER> values[VALUES];
};

// A row of B, in LANES threads, and the result to add to.
struct Row {
    Load loads[EACH];
    Value<INPUT> result;

    __device__ __forceinline__ Row(
        const Load* b, const Value<INPUT>* result, unsigned row, unsigned outputs, unsigned lane
    ) : loads(), result() {
        if (row >= outputs) return;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + i * LANES < COUNT) loads[i] = b[row * COUNT + lane + i * LANES];
        this->result = result[row];
    }

    __device__ __forceinline__ float sum(const float* s, unsigned lane) const {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + i * LANES < COUNT)
#pragma unroll
                for (int j = 0; j < VALUES; j++)
                    sum = fmaf(loads[i].values[j].get(), s[(lane + i * LANES) * VALUES + j], sum);
        return added(sum, LANES);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) one_row_lora(
    Value<INPUT>* out, const Value<INPUT>* result,
    const Four<INPUT>* in, const Four<ADAPTER>* a,
    const Load* b, float* middle, const int inputs, const int outputs,
    const float scaling
) {
    wait_for_previous();
    __shared__ float sums[OWN * PARTS], s[RANK];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % LANES, fours = inputs / 4;
    in += blockIdx.y * fours, middle += blockIdx.y * RANK;
    result += (long long)blockIdx.y * outputs, out += (long long)blockIdx.y * outputs;
    unsigned first = blockIdx.x * ROWS;  // of the rows of the block
    Row row(b, result, first + threadIdx.x / LANES, PART == FIRST ? 0 : outputs, lane);
    if (PART <= FIRST) {
        const Four<ADAPTER>* own = PART == BOTH ? a : a + blockIdx.x * fours;
        for (unsigned i = warp; i < OWN * PARTS; i += WARPS) {
            const unsigned start = i % PARTS * 32 + threadIdx.x % 32;
            const float sum = product(own + i / PARTS * fours, in, fours, start);
            if (threadIdx.x % 32 == 0) sums[i] = sum;
        }
        __syncthreads();
    }
    for (unsigned i = threadIdx.x; i < (PART == FIRST ? 1 : RANK); i += THREADS) {
        float sum = 0.f;
        for (unsigned j = 0; j < PARTS && PART <= FIRST; j++) sum += sums[i * PARTS + j];
        if (PART == FIRST) middle[blockIdx.x] = sum;
        else s[i] = PART == BOTH ? sum : middle[i];
    }
    if (PART == FIRST) return;
    __syncthreads();
    while (true) {
        const unsigned at = first + threadIdx.x / LANES;
        const float sum = row.sum(s, lane);
        if (lane == 0 && at < outputs) out[at].set(fmaf(scaling, sum, row.result.get()));
        first += gridDim.x * ROWS;
        if (first >= outputs) return;
        row = Row(b, result, first + threadIdx.x / LANES, outputs, lane);
    }
}
