// The routed experts of a few tokens, whose weights are in 4 bits (bitsandbytes' layout).
//
// gated: inner[token][k] = gelu(gate) * up, for the k-th expert of each token
// down:  out[token] = the sum of weight[k] * down[k] over the experts
//
// A unit is 64 values of a row: 32 bytes.  One warp multiplies 16 rows with two units at a time on
// the tensor cores.  The four lanes of a group hold 16 bytes each of their row: two lanes have the
// first unit, two the second.  The vector is the other operand.  Its column n has the values of
// one unit only, and zeros elsewhere, so column n of the product is the sum over that unit, which
// still has to be scaled.  Four pairs of units fill the eight columns.
//
// Constants from the compiler's command line: BFLOAT16 or not; NESTED or not; ROWS, UNITS (of a
// row) of the fused tensor; EXPERTS; TOP_K; BLOCK, the units that share a maximum; GATED, if the
// kernel is the first of the two.

typedef unsigned int u32;

constexpr int WARPS = 8;
constexpr int GROUP = 4;   // pairs of units: the columns of a product
constexpr int AHEAD = 2;   // groups whose weights are loaded at once

struct Weights {
    const uint4* packed;
#if NESTED
    const unsigned char* maxima;
    const float* code2;
    const float* maxima2;
    const float* offset;
#else
    const float* maxima;
#endif
};

// Two values in the compute dtype, the first in the lower half.
__device__ __forceinline__ u32 pair(float first, float second) {
    u32 both;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
    return both;
}

__device__ __forceinline__ float rounded(float value) {
    u32 both = pair(value, 0.f);
#if BFLOAT16
    return __uint_as_float(both << 16);
#else
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"((unsigned short)both));
    return result;
#endif
}

__device__ __forceinline__ void multiply(
    float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1
) {
#if BFLOAT16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The table has the two values of each byte, once for each lane: no two lanes read one bank.
__device__ __forceinline__ void fill(u32* table, const float* code) {
    for (int i = threadIdx.x; i < 256 * 32; i += WARPS * 32) {
        int byte = i >> 5;
        table[i] = pair(code[byte >> 4], code[byte & 15]);
    }
}

template <int BYTE>
__device__ __forceinline__ u32 values(const u32* table, u32 word, u32 lane) {
    constexpr int shift = 8 * BYTE - 7;
    u32 offset = (shift < 0 ? word << -shift : word >> (shift < 0 ? 0 : shift)) & 0x7f80;
    return *reinterpret_cast<const u32*>(reinterpret_cast<const char*>(table) + (offset | lane * 4));
}

__device__ __forceinline__ u32 word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

__device__ __forceinline__ float scale(const Weights& weights, size_t unit) {
    size_t block = unit / BLOCK;
#if NESTED
    // Rounded as bitsandbytes rounds it.
    return __fadd_rn(
        __fmul_rn(weights.code2[weights.maxima[block]], weights.maxima2[block >> 8]),
        *weights.offset);
#else
    return weights.maxima[block];
#endif
}

// The products of two rows with the pairs of units from first to last.  Units continue from the
// row of one expert to that of the next.  While the first weights are on their way, the block fills
// its shared memory.
template <typename Fill>
__device__ __forceinline__ void products(
    float& sum0, float& sum1, const Weights& weights, const u32* table, const uint4* vector,
    const long long* experts, const float* routing, int units, int first, int last,
    int row0, int row1, Fill fill
) {
    const int lane = threadIdx.x & 31, column = lane >> 2, t = lane & 3;
    int begin = first;
    do {
        uint4 packed0[GROUP * AHEAD], packed1[GROUP * AHEAD];
        float scale0[AHEAD][2], scale1[AHEAD][2];
#pragma unroll
        for (int j = 0; j < GROUP * AHEAD; j++) {
            const int unit = 2 * (begin + j) + (t >> 1), slot = unit / UNITS;
            packed0[j] = packed1[j] = make_uint4(0, 0, 0, 0);
            if (begin + j < last && unit < units) {
                const size_t expert = experts[slot];
                if (expert < EXPERTS) {
                    const int inside = unit - slot * UNITS;
                    const size_t at0 = (expert * ROWS + row0) * UNITS + inside;
                    const size_t at1 = (expert * ROWS + row1) * UNITS + inside;
                    packed0[j] = __ldg(weights.packed + at0 * 2 + (t & 1));
                    packed1[j] = __ldg(weights.packed + at1 * 2 + (t & 1));
                }
            }
        }
#pragma unroll
        for (int group = 0; group < AHEAD; group++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int at = begin + group * GROUP + t, unit = 2 * at + half;
                const int slot = unit / UNITS;
                scale0[group][half] = scale1[group][half] = 0.f;
                if (at < last && unit < units) {
                    const size_t expert = experts[slot];
                    if (expert < EXPERTS) {
                        const int inside = unit - slot * UNITS;
                        const float by = routing == nullptr ? 1.f : routing[slot];
                        scale0[group][half] =
                            scale(weights, (expert * ROWS + row0) * UNITS + inside) * by;
                        scale1[group][half] =
                            scale(weights, (expert * ROWS + row1) * UNITS + inside) * by;
                    }
                }
            }
        }
        if (begin == first) {
            fill();
            __syncthreads();
        }
#pragma unroll
        for (int group = 0; group < AHEAD; group++) {
            if (begin + group * GROUP >= last) break;
            float even[4] = {}, odd[4] = {};
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                const int at = begin + group * GROUP + j, unit = 2 * at + (t >> 1);
                if (at >= last) break;
                u32 x[16] = {};
                if (column == 2 * j + (t >> 1) && unit < units) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint4 four = vector[unit * 8 + (t & 1) * 4 + i];
                        x[4 * i] = four.x, x[4 * i + 1] = four.y;
                        x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
                    }
                }
                const uint4 &four0 = packed0[group * GROUP + j], &four1 = packed1[group * GROUP + j];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 word0 = word_of(four0, i), word1 = word_of(four1, i);
                    multiply(j & 1 ? odd : even, values<0>(table, word0, lane),
                             values<0>(table, word1, lane), values<1>(table, word0, lane),
                             values<1>(table, word1, lane), x[4 * i], x[4 * i + 1]);
                    multiply(j & 1 ? odd : even, values<2>(table, word0, lane),
                             values<2>(table, word1, lane), values<3>(table, word0, lane),
                             values<3>(table, word1, lane), x[4 * i + 2], x[4 * i + 3]);
                }
            }
            sum0 += (even[0] + odd[0]) * scale0[group][0] + (even[1] + odd[1]) * scale0[group][1];
            sum1 += (even[2] + odd[2]) * scale1[group][0] + (even[3] + odd[3]) * scale1[group][1];
        }
        begin += GROUP * AHEAD;
    } while (begin < last);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        sum0 += __shfl_xor_sync(0xffffffff, sum0, distance);
        sum1 += __shfl_xor_sync(0xffffffff, sum1, distance);
    }
}

#if GATED

__device__ __forceinline__ float gelu(float x) {  // as torch computes approximate="tanh"
    const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.f + tanhf(inner));
}

// grid: (TOP_K * inner / 8 / TILES, tokens).  ROWS = 2 * inner, gates before ups.
extern "C" __global__ void __launch_bounds__(WARPS * 32) gated(
    unsigned short* inner, const uint4* hidden, const long long* experts, const float* code,
    Weights weights
) {
    constexpr int SPLITS = 4, TILES = WARPS / SPLITS;
    constexpr int HALF = ROWS / 2, TILES_OF_AN_EXPERT = HALF / 8;
    constexpr int PAIRS = (UNITS + 1) / 2, SHARE = (PAIRS + SPLITS - 1) / SPLITS;
    __shared__ u32 table[256 * 32];
    __shared__ uint4 vector[UNITS * 8];
    __shared__ float sums[WARPS][16];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.y;
    const int tile = blockIdx.x * TILES + warp / SPLITS, slot = tile / TILES_OF_AN_EXPERT;
    const bool exists = slot < TOP_K;
    const int first = (warp % SPLITS) * SHARE, last = exists ? min(first + SHARE, PAIRS) : 0;
    const int row = (tile - slot * TILES_OF_AN_EXPERT) * 8 + (lane >> 2);
    float gate = 0.f, up = 0.f;
    products(gate, up, weights, table, vector, experts + token * TOP_K + slot, nullptr,
             UNITS, first, last, row, HALF + row, [&] {
                 fill(table, code);
                 for (int i = threadIdx.x; i < UNITS * 8; i += WARPS * 32)
                     vector[i] = hidden[(size_t)token * UNITS * 8 + i];
             });
    if ((lane & 3) == 0) sums[warp][lane >> 2] = gate, sums[warp][8 + (lane >> 2)] = up;
    __syncthreads();
    if (warp % SPLITS == 0 && lane < 8 && exists) {
        gate = up = 0.f;
        for (int i = 0; i < SPLITS; i++) gate += sums[warp + i][lane], up += sums[warp + i][8 + lane];
        const float value = rounded(gelu(rounded(gate))) * rounded(up);
        const int at = (tile - slot * TILES_OF_AN_EXPERT) * 8 + lane;
        inner[((size_t)token * TOP_K + slot) * HALF + at] = pair(value, 0.f);
    }
}

#else

// grid: (ROWS / 16, tokens)
extern "C" __global__ void __launch_bounds__(WARPS * 32) down(
    unsigned short* out, const uint4* inner, const long long* experts, const float* routing,
    const float* code, Weights weights
) {
    constexpr int ALL = TOP_K * UNITS, PAIRS = (ALL + 1) / 2, SHARE = (PAIRS + WARPS - 1) / WARPS;
    __shared__ u32 table[256 * 32];
    __shared__ uint4 vector[ALL * 8];
    __shared__ float sums[WARPS][16];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.y;
    const int first = warp * SHARE, row = blockIdx.x * 16 + (lane >> 2);
    float sum0 = 0.f, sum1 = 0.f;
    products(sum0, sum1, weights, table, vector, experts + token * TOP_K, routing + token * TOP_K,
             ALL, first, min(first + SHARE, PAIRS), row, row + 8, [&] {
                 fill(table, code);
                 for (int i = threadIdx.x; i < ALL * 8; i += WARPS * 32)
                     vector[i] = inner[(size_t)token * ALL * 8 + i];
             });
    if ((lane & 3) == 0) sums[warp][lane >> 2] = sum0, sums[warp][8 + (lane >> 2)] = sum1;
    __syncthreads();
    if (threadIdx.x < 16) {
        float sum = 0.f;
        for (int i = 0; i < WARPS; i++) sum += sums[i][threadIdx.x];
        out[(size_t)token * ROWS + blockIdx.x * 16 + threadIdx.x] = pair(sum, 0.f);
    }
}

#endif
