// The routed experts of a few tokens, whose weights are in 4 bits (bitsandbytes' layout).
//
// gated: inner[token][k] = gelu(gate) * up, for the k-th expert of each token
// down:  out[token] = the sum of routing[k] * down[k] over the experts
//
// A unit is 64 values of a row: 32 bytes.  One warp multiplies 16 rows with pairs of units on the
// tensor cores.  The four lanes of a row hold 16 bytes each: two lanes have the first unit, two the
// second.  The vector is the other operand: its columns have the values of one unit each, for four
// pairs of units, and zeros for the other unit of the pair.  So two columns of the product are the
// sums over the two units, which still have to be scaled.
//
// Each warp loads all of its weights at once, because the latency of the memory matters most.  While
// they are on their way, the block fills its shared memory.
//
// Constants from the compiler's command line: BFLOAT16 or not; NESTED or not; ROWS, UNITS (of a
// row) of the fused tensor; EXPERTS; TOP_K; BLOCK, the units that share a maximum; OUTPUTS of a
// block; GATED, if the kernel is the first of the two.

typedef unsigned int u32;

constexpr u32 NONE = 0xffffffff;
constexpr int GROUP = 4;  // pairs of units: they fill the columns of a product
constexpr int PAIRS = (UNITS + 1) / 2;

#if GATED
constexpr int SPLITS = 4, TILE = 8;  // four warps share the units of eight gates and eight ups
constexpr int SHARE = (PAIRS + SPLITS - 1) / SPLITS, VECTORS = 1;
#else
constexpr int SPLITS = TOP_K, TILE = 16;  // each warp has another expert
constexpr int SHARE = PAIRS, VECTORS = TOP_K;
#endif
constexpr int TILES = (OUTPUTS + TILE - 1) / TILE, WARPS = TILES * SPLITS;

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

// The two values of each byte, once for each lane: no two lanes read one bank.  The offset of an
// entry has the byte in its second byte, so that one permutation of bytes makes it.
constexpr int STRIDE = 64;  // words

__device__ __forceinline__ void fill(u32* table, const float* code) {
    const int lane = threadIdx.x & 31;
    for (int at = threadIdx.x; at < 4 * 256; at += WARPS * 32) {
        const int byte = at & 255, first = (at >> 8) * 8;
        const u32 both = pair(__ldg(code + (byte >> 4)), __ldg(code + (byte & 15)));
#pragma unroll
        for (int i = 0; i < 8; i++) table[byte * STRIDE + ((lane + first + i) & 31)] = both;
    }
}

template <int BYTE>
__device__ __forceinline__ u32 values(const u32* table, u32 word, u32 column) {
    return *reinterpret_cast<const u32*>(
        reinterpret_cast<const char*>(table) + __byte_perm(word, column, 0x5504 + (BYTE << 4)));
}

__device__ __forceinline__ u32 word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

struct Shared {
    u32 table[256 * STRIDE];
    uint4 vectors[VECTORS * UNITS * 8];
    float sums[WARPS][16];
};

// The maxima of two neighboring units of a row.
struct Maxima {
#if NESTED
    u32 bytes[2] = {};
    float by[2] = {};

    __device__ __forceinline__ void load(const Weights& weights, u32 unit, bool second) {
        const u32 block0 = unit / BLOCK, block1 = (unit + second) / BLOCK;
        bytes[0] = __ldg(weights.maxima + block0);
        bytes[1] = __ldg(weights.maxima + block1);
        by[0] = __ldg(weights.maxima2 + (block0 >> 8));
        by[1] = block1 >> 8 == block0 >> 8 ? by[0] : __ldg(weights.maxima2 + (block1 >> 8));
    }

    // Rounded as bitsandbytes rounds it.
    __device__ __forceinline__ float value(const Weights& weights, int i) const {
        return __fadd_rn(__fmul_rn(__ldg(weights.code2 + bytes[i]), by[i]), __ldg(weights.offset));
    }
#else
    float values[2] = {};

    __device__ __forceinline__ void load(const Weights& weights, u32 unit, bool second) {
        values[0] = __ldg(weights.maxima + unit / BLOCK);
        values[1] = __ldg(weights.maxima + (unit + second) / BLOCK);
    }

    __device__ __forceinline__ float value(const Weights&, int i) const { return values[i]; }
#endif
};

// The products of a vector with the rows that this warp has, from the pair of units `first` on.
// Lanes 0 to 15 know the unit where their row starts.  `fill` fills the block's shared memory.
template <typename Fill>
__device__ __forceinline__ void products(
    float& sum0, float& sum1, const Weights& weights, Shared& shared, const uint4* vector,
    u32 start, int first, Fill fill
) {
    constexpr int GROUPS = (SHARE + GROUP - 1) / GROUP;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, t = lane & 3;
    const int valid = min(UNITS - 2 * first, 2 * SHARE);  // units
    if (start != NONE) start += 2 * first;
    const u32 start0 = __shfl_sync(0xffffffff, start, row);
    const u32 start1 = __shfl_sync(0xffffffff, start, row + 8);
    const uint4 *from0 = weights.packed + (size_t)start0 * 2 + t;
    const uint4 *from1 = weights.packed + (size_t)start1 * 2 + t;
    uint4 packed0[SHARE], packed1[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        const bool exists = 2 * i + (t >> 1) < valid;
        packed0[i] = packed1[i] = make_uint4(0, 0, 0, 0);
        if (exists && start0 != NONE) packed0[i] = __ldg(from0 + i * 4);
        if (exists && start1 != NONE) packed1[i] = __ldg(from1 + i * 4);
    }
    Maxima maxima0[GROUPS], maxima1[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int unit = 2 * (group * GROUP + t);
        if (unit < valid && start0 != NONE)
            maxima0[group].load(weights, start0 + unit, unit + 1 < valid);
        if (unit < valid && start1 != NONE)
            maxima1[group].load(weights, start1 + unit, unit + 1 < valid);
    }
    fill();
    __syncthreads();

    // A lane has the values of one pair in each group: those of its column.
    const bool mine = (row & 1) == t >> 1;
    vector += 2 * first * 8 + (row >> 1) * 16 + t * 4;
    u32 column = lane * 4;
    asm("" : "+r"(column));  // keeps the compiler from computing it for each value
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        uint4 x[4] = {};
        if (mine && 2 * (group * GROUP + (row >> 1)) + (row & 1) < valid) {
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = vector[group * GROUP * 16 + i];
        }
        // Two columns of a pair's product are those of its own values: the ones that lane t has.
        float own[4] = {};
#pragma unroll
        for (int j = 0; j < GROUP && group * GROUP + j < SHARE; j++) {
            const uint4 &four0 = packed0[group * GROUP + j], &four1 = packed1[group * GROUP + j];
            float product[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 word0 = word_of(four0, i), word1 = word_of(four1, i);
                multiply(product, values<0>(shared.table, word0, column),
                         values<0>(shared.table, word1, column),
                         values<1>(shared.table, word0, column),
                         values<1>(shared.table, word1, column), x[i].x, x[i].y);
                multiply(product, values<2>(shared.table, word0, column),
                         values<2>(shared.table, word1, column),
                         values<3>(shared.table, word0, column),
                         values<3>(shared.table, word1, column), x[i].z, x[i].w);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) own[i] = t == j ? product[i] : own[i];
        }
        sum0 += own[0] * maxima0[group].value(weights, 0)
              + own[1] * maxima0[group].value(weights, 1);
        sum1 += own[2] * maxima1[group].value(weights, 0)
              + own[3] * maxima1[group].value(weights, 1);
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        sum0 += __shfl_xor_sync(0xffffffff, sum0, distance);
        sum1 += __shfl_xor_sync(0xffffffff, sum1, distance);
    }
    if (t == 0) {
        shared.sums[warp][row] = start0 == NONE ? 0.f : sum0;
        shared.sums[warp][row + 8] = start1 == NONE ? 0.f : sum1;
    }
    __syncthreads();
}

__device__ __forceinline__ u32 start_of(u32 expert, int row) {
    return expert < EXPERTS ? (expert * ROWS + row) * UNITS : NONE;
}

extern __shared__ uint4 memory[];

#if GATED

__device__ __forceinline__ float gelu(float x) {  // as torch computes approximate="tanh"
    const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.f + tanhf(inner));
}

// grid: (TOP_K * HALF / OUTPUTS, tokens).  Gates come before ups.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) gated(
    unsigned short* inner, const uint4* hidden, const long long* experts, const float* code,
    Weights weights
) {
    constexpr int HALF = ROWS / 2;
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.y;
    const int begin = blockIdx.x * OUTPUTS, end = min(begin + OUTPUTS, TOP_K * HALF);
    const int output = begin + warp / SPLITS * TILE + (lane & 7);
    u32 start = NONE;
    if (output < end && lane < 16) {
        const u32 expert = experts[token * TOP_K + output / HALF];
        start = start_of(expert, output % HALF + (lane < 8 ? 0 : HALF));
    }
    float gate = 0.f, up = 0.f;
    products(gate, up, weights, shared, shared.vectors, start, warp % SPLITS * SHARE, [&] {
        fill(shared.table, code);
        for (int i = threadIdx.x; i < UNITS * 8; i += WARPS * 32)
            shared.vectors[i] = hidden[(size_t)token * UNITS * 8 + i];
    });
    if (warp % SPLITS == 0 && lane < TILE && output < end) {
        gate = up = 0.f;
        for (int i = 0; i < SPLITS; i++)
            gate += shared.sums[warp + i][lane], up += shared.sums[warp + i][lane + 8];
        const float value = rounded(gelu(rounded(gate))) * rounded(up);
        inner[(size_t)token * TOP_K * HALF + output] = pair(value, 0.f);
    }
}

#else

// grid: (ROWS / OUTPUTS, tokens)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) down(
    unsigned short* out, const uint4* inner, const long long* experts, const float* routing,
    const float* code, Weights weights
) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.y;
    const int slot = warp % SPLITS, begin = blockIdx.x * OUTPUTS, end = min(begin + OUTPUTS, ROWS);
    const int output = begin + warp / SPLITS * TILE + (lane & 15);
    u32 start = NONE;
    if (output < end && lane < 16) start = start_of(experts[token * TOP_K + slot], output);
    float sum0 = 0.f, sum1 = 0.f;
    products(sum0, sum1, weights, shared, shared.vectors + slot * UNITS * 8, start, 0, [&] {
        fill(shared.table, code);
        for (int i = threadIdx.x; i < TOP_K * UNITS * 8; i += WARPS * 32)
            shared.vectors[i] = inner[(size_t)token * TOP_K * UNITS * 8 + i];
    });
    if (slot == 0 && lane < TILE && output < end) {
        float sum = 0.f;
        for (int i = 0; i < SPLITS; i++)
            sum += routing[token * TOP_K + i] * shared.sums[warp + i][lane];
        out[(size_t)token * ROWS + output] = pair(sum, 0.f);
    }
}

#endif
