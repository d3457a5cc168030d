// out = in @ weight.T, for a few rows of inputs and a weight in 4 bits (bitsandbytes' layout).
//
// A vector is 32 values of a row of the weight: 16 bytes.  16 threads, times `splits`, share the
// vectors of ROWS rows.  Each thread loads all of its vectors at once, because the latency of the
// memory matters most.  While they are on their way, the block fills its shared memory.
//
// All products are in float32, with the values of the code.  A block's maximum multiplies the sum of
// 32 products.  The order of the additions depends on the shape of the weight only: a row has the same
// outputs beside other rows.
//
// Constants from the compiler's command line: INPUT, the dtype of inputs and outputs;
// NESTED or not; TOKENS, the rows of inputs; ROWS and VECTORS of a thread; THREADS, the most in a block.

#include "values.cuh"

typedef unsigned int u32;

struct Arguments {
    Input* out;
    const uint4* in;
    const uint4* packed;
    const void* maxima;
    const float* code;
    const float* code2;
    const float* maxima2;
    const float* offset;
    u32 outputs, vectors;  // of the weight, of a row
    u32 splits;            // groups of threads that share a row
    u32 shift;             // blocks have 2 ** shift vectors
    u32 tokens, none;      // at most TOKENS
};

constexpr int LANES = 16, CHUNKS = 2 * sizeof(Input);  // of 16 bytes, in the inputs of a vector
constexpr int COUNT = ROWS * TOKENS, SAME = LANES / COUNT;  // lanes that end with the same sum

// The products are this much smaller, so that the sum of 32 large ones is finite before the maximum
// multiplies it.
constexpr float SCALE = 0.015625f;

__device__ __forceinline__ uint4 load(const uint4* from) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(from));
    return four;
}

__device__ __forceinline__ u32 word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Each entry of the code, once for each lane of a warp: no two lanes read one bank.  The offset of
// an entry has the entry's number in its second byte, so that one permutation of bytes makes it.
constexpr int STRIDE = 64;  // words

template <int BYTE>
__device__ __forceinline__ float value(const float* table, u32 word, u32 column) {
    return *reinterpret_cast<const float*>(
        reinterpret_cast<const char*>(table) + __byte_perm(word, column, 0x5504 + (BYTE << 4)));
}

// Two values of the inputs: those with the numbers 2 * i and 2 * i + 1 of eight.
__device__ __forceinline__ void inputs(
    float& first, float& second, const uint4* chunks, u32 stride, int i
) {
#if INPUT == 1
    const uint4& four = chunks[i / 2 * stride];
    first = __uint_as_float(word_of(four, i % 2 * 2));
    second = __uint_as_float(word_of(four, i % 2 * 2 + 1));
#else
    const u32 word = word_of(*chunks, i);
#if INPUT == 2
    first = __uint_as_float(word << 16);
    second = __uint_as_float(word & 0xffff0000);
#else
    first = of_half(word & 0xffff);
    second = of_half(word >> 16);
#endif
#endif
}

struct Shared {
    float table[16 * STRIDE];
#if NESTED
    float code2[256];
#endif
    float sums[2][THREADS / LANES * COUNT];  // of the splits
    uint4 chunks[1];                        // of the inputs, and more
};

// The vectors of a thread.
struct Loaded {
    uint4 packed[ROWS][VECTORS];
#if NESTED
    u32 bytes[ROWS][VECTORS];
    float by[ROWS][VECTORS];
#else
    float maxima[ROWS][VECTORS];
#endif

    template <bool AHEAD = false>  // of the previous kernel's end: only into the L2 cache
    __device__ __forceinline__ void load(const Arguments& all, u32 row, u32 first, u32 step) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                const u32 vector = first + i * step;
                const bool exists = vector < all.vectors && row + r < all.outputs;
                const u32 at = exists ? (row + r) * all.vectors + vector : 0;
                const u32 block = at >> all.shift;
                if (AHEAD) {
                    asm volatile("prefetch.global.L2 [%0];" :: "l"(all.packed + at));
                    continue;
                }
                packed[r][i] = ::load(all.packed + at);
#if NESTED
                bytes[r][i] = ((const unsigned char*)all.maxima)[block];
                by[r][i] = all.maxima2[block >> 8];
#else
                maxima[r][i] = ((const float*)all.maxima)[block];
#endif
            }
        }
    }

    __device__ __forceinline__ float maximum(
        const Shared& shared, float offset, int r, int i
    ) const {
#if NESTED  // rounded as bitsandbytes rounds it
        return __fadd_rn(__fmul_rn(shared.code2[bytes[r][i]], by[r][i]), offset);
#else
        return maxima[r][i];
#endif
    }
};

extern __shared__ uint4 memory[];

extern "C" __global__ void __launch_bounds__(THREADS) one_row_4bit(const Arguments all) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const u32 stride = (all.vectors + 5) / 8 * 8 + 2;  // of chunks: no two that are written on a bank
    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const u32 split = group % all.splits, part = group / all.splits;
    const u32 parts = blockDim.x / LANES / all.splits, next = gridDim.x * parts * ROWS;
    const u32 vector = split * LANES + lane, step = all.splits * LANES;
    u32 row = (blockIdx.x * parts + part) * ROWS;

    Loaded loaded;
    loaded.load<true>(all, row, vector, step);
    wait_for_previous();
    loaded.load(all, row, vector, step);
    for (u32 i = threadIdx.x; i < 16 * 32; i += blockDim.x)
        shared.table[i / 32 * STRIDE + i % 32] = all.code[i / 32] * SCALE;
#if NESTED
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) shared.code2[i] = all.code2[i];
    const float offset = *all.offset;
#else
    const float offset = 0.f;
#endif
    const u32 size = CHUNKS * all.vectors;
#pragma unroll
    for (u32 t = 0; t < TOKENS; t++)
        for (u32 i = threadIdx.x; i < size; i += blockDim.x)
            shared.chunks[(t * CHUNKS + i % CHUNKS) * stride + i / CHUNKS] =
                all.in[min(t, all.tokens - 1) * size + i];
    __syncthreads();

    u32 column = threadIdx.x % 32 * 4;
    asm("" : "+r"(column));  // keeps the compiler from computing it for each value
    for (u32 buffer = 0;; buffer ^= 1) {
        float sum[COUNT] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (vector + i * step >= all.vectors) break;
            const uint4* own = shared.chunks + vector + i * step;
            float even[COUNT] = {}, odd[COUNT] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float w[ROWS][8];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const u32 word = word_of(loaded.packed[r][i], j);
                    const u32 high = word >> 4 & 0x0f0f0f0f, low = word & 0x0f0f0f0f;
                    w[r][0] = value<0>(shared.table, high, column);
                    w[r][1] = value<0>(shared.table, low, column);
                    w[r][2] = value<1>(shared.table, high, column);
                    w[r][3] = value<1>(shared.table, low, column);
                    w[r][4] = value<2>(shared.table, high, column);
                    w[r][5] = value<2>(shared.table, low, column);
                    w[r][6] = value<3>(shared.table, high, column);
                    w[r][7] = value<3>(shared.table, low, column);
                }
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const uint4* chunks = own + (t * CHUNKS + j * (CHUNKS / 4)) * stride;
                    float x[8];
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        inputs(x[2 * k], x[2 * k + 1], chunks, stride, k);
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
#pragma unroll
                        for (int k = 0; k < 8; k += 2) {
                            float &first = even[r * TOKENS + t], &second = odd[r * TOKENS + t];
                            first = fmaf(w[r][k], x[k], first);
                            second = fmaf(w[r][k + 1], x[k + 1], second);
                        }
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float maximum = loaded.maximum(shared, offset, r, i);
#pragma unroll
                for (int t = r * TOKENS; t < (r + 1) * TOKENS; t++)
                    sum[t] = fmaf(maximum, even[t] + odd[t], sum[t]);
            }
        }
        add_lanes<COUNT, LANES / 2, 1>(sum, lane);
        const auto write = [&](u32 at, float total) {
            const u32 output = row + at / TOKENS, token = at % TOKENS;
            if (output < all.outputs && token < all.tokens)
                all.out[token * all.outputs + output] = store(total / SCALE);
        };
        if (all.splits == 1) {
            if (lane % SAME == 0) write(lane / SAME, sum[0]);
        } else {
            float* sums = shared.sums[buffer] + part * all.splits * COUNT;
            if (lane % SAME == 0) sums[split * COUNT + lane / SAME] = sum[0];
            __syncthreads();  // the other buffer's sums were read
            if (split == 0 && lane < COUNT) {
                float total = 0.f;
                for (u32 i = 0; i < all.splits; i++) total += sums[i * COUNT + lane];
                write(lane, total);
            }
        }
        row += next;
        if (row - part * ROWS >= all.outputs) return;
        loaded.load(all, row, vector, step);
    }
}
