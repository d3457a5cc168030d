// out = weight @ in, for one row of inputs and a weight in 4 bits (bitsandbytes' layout).
//
// A vector is 32 values of a row of the weight: 16 bytes.  Each group of 16 threads has 16 vectors of
// ROWS rows; `splits` groups have all vectors of these rows.  A thread keeps its inputs, and loads
// its next vectors before it multiplies, because the latency of the memory matters most.
//
// All products are in float32, with the values of the code.  A block's maximum multiplies the sum of
// 32 products.  The order of the additions depends on the shape of the weight only.
//
// Constants from the compiler's command line: BITS and EXPONENT of the dtype of inputs and outputs;
// NESTED or not; ROWS; THREADS, the most in a block.

typedef unsigned int u32;
#if BITS == 32
typedef unsigned int Bits;
#else
typedef unsigned short Bits;
#endif

struct Arguments {
    Bits* out;
    const uint4* in;
    const uint4* packed;
    const void* maxima;
    const float* code;
    const float* code2;
    const float* maxima2;
    const float* offset;
    u32 outputs, vectors;  // of the weight, of a row
    u32 splits;            // groups that share a row
    u32 shift;             // blocks have 2 ** shift vectors
};

constexpr int LANES = 16;

// The products are this much smaller, so that the sum of 32 large ones is finite before the maximum
// multiplies it.
constexpr float SCALE = 0.015625f;

__device__ __forceinline__ uint4 load(const uint4* from) {
    uint4 four;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w) : "l"(from));
    return four;
}

__device__ __forceinline__ float of_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ Bits store(float value) {
    const u32 bits = __float_as_uint(value);
#if BITS == 32
    return bits;
#elif EXPONENT == 8
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, or to even
#else
    return to_half(value);
#endif
}

__device__ __forceinline__ u32 word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// The 32 values of the inputs that belong to a vector.
__device__ __forceinline__ void inputs(float (&x)[32], const uint4* in, u32 vector, u32 vectors) {
#pragma unroll
    for (int i = 0; i < BITS / 4; i++) {
        uint4 four = make_uint4(0, 0, 0, 0);
        if (vector < vectors) four = in[vector * (BITS / 4) + i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 word = word_of(four, j);
#if BITS == 32
            x[4 * i + j] = __uint_as_float(word);
#elif EXPONENT == 8
            x[8 * i + 2 * j] = __uint_as_float(word << 16);
            x[8 * i + 2 * j + 1] = __uint_as_float(word & 0xffff0000);
#else
            x[8 * i + 2 * j] = of_half(word & 0xffff);
            x[8 * i + 2 * j + 1] = of_half(word >> 16);
#endif
        }
    }
}

// Each entry of the code, once for each lane of a warp: no two lanes read one bank.  The offset of
// an entry has the entry's number in its second byte, so that one permutation of bytes makes it.
constexpr int STRIDE = 64;  // words

template <int BYTE>
__device__ __forceinline__ float value(const float* table, u32 word, u32 column) {
    return *reinterpret_cast<const float*>(
        reinterpret_cast<const char*>(table) + __byte_perm(word, column, 0x5504 + (BYTE << 4)));
}

struct Shared {
    float table[16 * STRIDE];
#if NESTED
    float code2[256];
#endif
    float sums[2][THREADS / LANES * ROWS];
};

// The vectors of a thread in ROWS rows.
struct Loaded {
    uint4 packed[ROWS];
#if NESTED
    u32 bytes[ROWS];
    float by[ROWS];
#else
    float maxima[ROWS];
#endif

    __device__ __forceinline__ void load(const Arguments& all, u32 row, u32 vector) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const bool exists = vector < all.vectors && row + r < all.outputs;
            const u32 at = exists ? (row + r) * all.vectors + vector : 0, block = at >> all.shift;
            packed[r] = ::load(all.packed + at);
#if NESTED
            bytes[r] = __ldg((const unsigned char*)all.maxima + block);
            by[r] = __ldg(all.maxima2 + (block >> 8));
#else
            maxima[r] = __ldg((const float*)all.maxima + block);
#endif
        }
    }

    __device__ __forceinline__ float maximum(const Shared& shared, float offset, int r) const {
#if NESTED  // rounded as bitsandbytes rounds it
        return __fadd_rn(__fmul_rn(shared.code2[bytes[r]], by[r]), offset);
#else
        return maxima[r];
#endif
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) one_row_4bit(const Arguments all) {
    __shared__ Shared shared;
    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const u32 split = group % all.splits, part = group / all.splits;
    const u32 parts = blockDim.x / LANES / all.splits, step = gridDim.x * parts * ROWS;
    const u32 vector = split * LANES + lane;
    u32 first = blockIdx.x * parts * ROWS;  // row of the block

    Loaded loaded;
    loaded.load(all, first + part * ROWS, vector);
    float x[32];
    inputs(x, all.in, vector, all.vectors);
    for (u32 i = threadIdx.x; i < 16 * 32; i += blockDim.x)
        shared.table[i / 32 * STRIDE + i % 32] = __ldg(all.code + i / 32) * SCALE;
#if NESTED
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) shared.code2[i] = __ldg(all.code2 + i);
    const float offset = __ldg(all.offset);
#else
    const float offset = 0.f;
#endif
    __syncthreads();

    u32 column = threadIdx.x % 32 * 4;
    asm("" : "+r"(column));  // keeps the compiler from computing it for each value
    for (u32 buffer = 0; first < all.outputs; first += step, buffer ^= 1) {
        const u32 row = first + part * ROWS;
        Loaded next;
        if (first + step < all.outputs) next.load(all, row + step, vector);
        float sum[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float even = 0.f, odd = 0.f;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 word = word_of(loaded.packed[r], i);
                const u32 high = word >> 4 & 0x0f0f0f0f, low = word & 0x0f0f0f0f;
                even = fmaf(value<0>(shared.table, high, column), x[8 * i], even);
                odd = fmaf(value<0>(shared.table, low, column), x[8 * i + 1], odd);
                even = fmaf(value<1>(shared.table, high, column), x[8 * i + 2], even);
                odd = fmaf(value<1>(shared.table, low, column), x[8 * i + 3], odd);
                even = fmaf(value<2>(shared.table, high, column), x[8 * i + 4], even);
                odd = fmaf(value<2>(shared.table, low, column), x[8 * i + 5], odd);
                even = fmaf(value<3>(shared.table, high, column), x[8 * i + 6], even);
                odd = fmaf(value<3>(shared.table, low, column), x[8 * i + 7], odd);
            }
            const bool exists = vector < all.vectors;  // else its maximum may be infinite
            sum[r] = exists ? loaded.maximum(shared, offset, r) * (even + odd) : 0.f;
        }
        // Each step halves the rows of a lane, or adds what two lanes have of the same row.
#pragma unroll
        for (int rows = ROWS, distance = LANES / 2; distance > 0; rows /= 2, distance /= 2) {
            if (rows > 1) {
                const bool upper = lane & distance;
#pragma unroll
                for (int r = 0; r < rows / 2; r++) {
                    const float own = upper ? sum[r + rows / 2] : sum[r];
                    const float others = upper ? sum[r] : sum[r + rows / 2];
                    sum[r] = own + __shfl_xor_sync(0xffffffff, others, distance);
                }
            } else {
                sum[0] += __shfl_xor_sync(0xffffffff, sum[0], distance);
            }
        }
        constexpr int SAME = LANES / ROWS;  // lanes that have the same row now
        if (all.splits == 1) {
            const u32 own = row + lane / SAME;
            if (lane % SAME == 0 && own < all.outputs) all.out[own] = store(sum[0] / SCALE);
        } else {
            float* sums = shared.sums[buffer] + part * all.splits * ROWS;
            if (lane % SAME == 0) sums[lane / SAME * all.splits + split] = sum[0];
            __syncthreads();  // the other buffer's sums were read
            for (u32 r = split; r < ROWS; r += all.splits) {
                float total = 0.f;
                for (u32 i = lane; i < all.splits; i += LANES) total += sums[r * all.splits + i];
                const u32 half = 0xffffu << group % 2 * LANES;
#pragma unroll
                for (int distance = LANES / 2; distance > 0; distance /= 2)
                    total += __shfl_xor_sync(half, total, distance);
                if (lane == 0 && row + r < all.outputs) all.out[row + r] = store(total / SCALE);
            }
        }
        loaded = next;
    }
}
