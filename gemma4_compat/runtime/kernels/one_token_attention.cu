// Attention of one query per head: softmax(query * keys * scale + mask) * values.
//
// The query heads of one key head are computed together, so that keys and values are read once.  A
// block computes a range of keys ("split"); the second kernel combines the ranges.  Scores, weights
// and sums are float32.  The order of all sums depends on the shapes alone.
//
// Constants from the compiler's command line: BITS and EXPONENT of the dtype; SIZE of a head, a power
// of two from 32 to 512; HEADS that a block computes, at most 8; MASK: 0 none, 1 bool, else the bits
// of the mask's dtype, whose exponent is MASK_EXPONENT.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
#define NONE __int_as_float(0xff800000)  // -inf
constexpr int POWER = HEADS > 4 ? 8 : HEADS > 2 ? 4 : HEADS;  // HEADS, or the next power of two
constexpr int KEYS = 32 / POWER;  // keys whose scores fit in the lanes of a warp

template <int BITS_>
struct Bits { typedef unsigned short Type; };
template <>
struct Bits<32> { typedef unsigned int Type; };
template <>
struct Bits<1> { typedef unsigned char Type; };
typedef Bits<BITS>::Type Value;
typedef Bits<MASK>::Type Mask;

template <int BITS_, int EXPONENT_>
__device__ __forceinline__ float load(unsigned int bits) {
    if (BITS_ == 32) return __uint_as_float(bits);
    if (EXPONENT_ == 8) return __uint_as_float(bits << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ __forceinline__ Value store(float value) {
#if BITS == 32
    return __float_as_uint(value);
#elif EXPONENT == 8
    const unsigned int bits = __float_as_uint(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, or to even
#else
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

// Neighbouring values of a row that one lane reads.
template <int COUNT>
struct Pack {
    static constexpr int PER_LOAD = COUNT * sizeof(Value) > 16 ? 16 / sizeof(Value) : COUNT;
    struct alignas(PER_LOAD * sizeof(Value)) Load { Value values[PER_LOAD]; };
    Load loads[COUNT / PER_LOAD];

    __device__ __forceinline__ void read(const Value* from) {
#pragma unroll
        for (int i = 0; i < COUNT / PER_LOAD; ++i) loads[i] = ((const Load*)from)[i];
    }
    __device__ __forceinline__ float get(int i) const {
        return load<BITS, EXPONENT>(loads[i / PER_LOAD].values[i % PER_LOAD]);
    }
};

// Adds COUNT values over the lanes whose numbers differ in the bits from STEP down to LAST.  A lane
// ends with the values that its bits select, COUNT / (2 * STEP / LAST) of them.
template <int COUNT, int STEP, int LAST>
__device__ __forceinline__ void scatter_sum(float* values, int lane) {
    if constexpr (STEP >= LAST) {
        constexpr int HALF = COUNT / 2;
        const bool upper = lane & STEP;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float keep = upper ? values[i + HALF] : values[i];
            const float give = upper ? values[i] : values[i + HALF];
            values[i] = keep + __shfl_xor_sync(0xffffffff, give, STEP);
        }
        scatter_sum<HALF, STEP / 2, LAST>(values, lane);
    }
}

struct Strides { int batch, head, row; };

// What a mask adds to a score; NONE if the key is left out.
__device__ __forceinline__ float masked(const Mask* mask, long long at) {
#if MASK == 0
    return 0.0f;
#elif MASK == 1
    return mask[at] ? 0.0f : NONE;
#else
    return load<MASK, MASK_EXPONENT>(mask[at]);
#endif
}

// Grid: splits, then batch * groups, where a group is HEADS query heads.
extern "C" __global__ void __launch_bounds__(THREADS, SIZE > 256 ? 1 : 2) one_token_attention(
    Value* out, float* sums, float2* scales, const Value* queries, const Value* keys,
    const Value* values, const Mask* mask, float scale, int length, int range, int groups,
    int groups_of_key, int query_batch, int query_head, int key_batch, int key_head, int key_row,
    int value_batch, int value_head, int value_row, int mask_batch, int mask_head, int mask_row
) {
    extern __shared__ float weights[];  // [range][POWER]
    __shared__ float maxima[WARPS][POWER], totals[WARPS][POWER];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int batch = blockIdx.y / groups, group = blockIdx.y % groups, head = group * HEADS;
    const int first = blockIdx.x * range, count = min(range, length - first);
    queries += (long long)batch * query_batch + (long long)head * query_head;
    keys += (long long)batch * key_batch + (long long)(group / groups_of_key) * key_head;
    values += (long long)batch * value_batch + (long long)(group / groups_of_key) * value_head;
    const long long mask_at = (long long)batch * mask_batch + (long long)head * mask_head;

    // Scores.  A warp computes KEYS keys at a time; lane key * POWER + head gets one score.
    constexpr int OWN = SIZE / 32, VECTOR = OWN < 8 ? OWN : 8, PARTS = OWN / VECTOR;
    const int my_head = lane % POWER, my_key = lane / POWER;
    float query[HEADS][OWN];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            Pack<VECTOR> pack;
            pack.read(queries + (long long)h * query_head + (part * 32 + lane) * VECTOR);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) query[h][part * VECTOR + i] = pack.get(i);
        }
    }
    float maximum = NONE;
    for (int start = warp * KEYS; start < count; start += WARPS * KEYS) {
        const int key = start + my_key;
        const bool inside = key < count && my_head < HEADS;
        float bias = NONE;
        if (inside) {
            bias = masked(mask, mask_at + (long long)my_head * mask_head
                + (long long)(first + key) * mask_row);
        }
        float score = NONE;
        if (__any_sync(0xffffffff, bias != NONE)) {
            float scores[32] = {};
            constexpr int AT_ONCE = KEYS < 4 ? KEYS : 4;
#pragma unroll
            for (int k = 0; k < KEYS; k += AT_ONCE) {
                Pack<VECTOR> packs[AT_ONCE][PARTS];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
                    const int row = min(first + start + k + j, length - 1);
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
                        packs[j][part].read(
                            keys + (long long)row * key_row + (part * 32 + lane) * VECTOR
                        );
                    }
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
#pragma unroll
                    for (int i = 0; i < OWN; ++i) {
                        const float value = packs[j][i / VECTOR].get(i % VECTOR);
#pragma unroll
                        for (int h = 0; h < HEADS; ++h) {
                            float& sum = scores[(k + j) * POWER + h];
                            sum = fmaf(query[h][i], value, sum);
                        }
                    }
                }
            }
            scatter_sum<32, 16, 1>(scores, lane);
            if (bias != NONE) score = scores[0] * scale + bias;
        }
        if (key < count) weights[key * POWER + my_head] = score;
        maximum = fmaxf(maximum, score);
    }
    for (int step = 16; step >= POWER; step >>= 1) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, step));
    }
    if (lane < POWER) maxima[warp][lane] = maximum;
    __syncthreads();

    // Weights.
#pragma unroll
    for (int other = 0; other < WARPS; ++other) maximum = fmaxf(maximum, maxima[other][my_head]);
    const float base = maximum == NONE ? 0.0f : maximum;
    float total = 0.0f;
    for (int i = threadIdx.x; i < count * POWER; i += THREADS) {
        const float weight = expf(weights[i] - base);
        weights[i] = weight;
        total += weight;
    }
    for (int step = 16; step >= POWER; step >>= 1) {
        total += __shfl_xor_sync(0xffffffff, total, step);
    }
    if (lane < POWER) totals[warp][lane] = total;
    __syncthreads();
    total = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) total += totals[other][my_head];

    // Sums.  A warp computes a slice of the head; its lanes read ROWS values' slices at a time.
    constexpr int SLICE = SIZE / WARPS, MINE = SLICE < 8 ? SLICE : 8;
    constexpr int LANES = SLICE / MINE, ROWS = 32 / LANES;
    const int row = lane / LANES;
    const int column = warp * SLICE + lane % LANES * MINE;
    float sum[HEADS * MINE] = {};
    // All weights are 0 if all scores are NONE.
    float largest = maximum, all = total;
    for (int step = 1; step < POWER; step <<= 1) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        all += __shfl_xor_sync(0xffffffff, all, step);
    }
    if (largest != NONE || all != 0.0f) {
        constexpr int AT_ONCE = 4;
        for (int start = row; start < count; start += ROWS * AT_ONCE) {
            Pack<MINE> packs[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int at = min(first + start + j * ROWS, length - 1);
                packs[j].read(values + (long long)at * value_row + column);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                if (start + j * ROWS < count) {
                    const float* weight = weights + (start + j * ROWS) * POWER;
#pragma unroll
                    for (int h = 0; h < HEADS; ++h) {
                        const float factor = weight[h];
#pragma unroll
                        for (int i = 0; i < MINE; ++i) {
                            sum[h * MINE + i] = fmaf(factor, packs[j].get(i), sum[h * MINE + i]);
                        }
                    }
                }
            }
        }
    }
    // Over the rows of the warp.
#pragma unroll
    for (int i = 0; i < HEADS * MINE; ++i) {
        for (int step = LANES; step < 32; step <<= 1) {
            sum[i] += __shfl_xor_sync(0xffffffff, sum[i], step);
        }
    }
    const long long first_head = (long long)batch * groups * HEADS + head;
    if (gridDim.x == 1) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float divisor = __shfl_sync(0xffffffff, total, h);
            if (row == 0) {
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    const float value = sum[h * MINE + i];
                    out[(first_head + h) * SIZE + column + i] =
                        store(divisor == 0.0f ? 0.0f : value / divisor);
                }
            }
        }
        return;
    }
    // Partial results: [batch * heads][splits][SIZE].
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const long long at = (first_head + h) * gridDim.x + blockIdx.x;
        if (row == 0) {
#pragma unroll
            for (int i = 0; i < MINE; ++i) sums[at * SIZE + column + i] = sum[h * MINE + i];
        }
        if (warp == 0 && lane == h) scales[at] = make_float2(base, total);
    }
}

constexpr int COLUMNS = SIZE < 64 ? SIZE : 64, FOURS = COLUMNS / 4, SHARES = THREADS / FOURS;

// Grid: SIZE / COLUMNS, then batch * heads.
extern "C" __global__ void __launch_bounds__(THREADS) combined(
    Value* out, const float* sums, const float2* scales, int splits
) {
    __shared__ float factors[1024];
    __shared__ float4 shares[SHARES][FOURS];
    __shared__ float reduced[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    scales += (long long)blockIdx.y * splits;
    float maximum = NONE;
    for (int i = threadIdx.x; i < splits; i += THREADS) {
        if (scales[i].y != 0.0f) maximum = fmaxf(maximum, scales[i].x);
    }
    for (int step = 16; step > 0; step >>= 1) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, step));
    }
    if (lane == 0) reduced[warp] = maximum;
    __syncthreads();
    for (int other = 0; other < WARPS; ++other) maximum = fmaxf(maximum, reduced[other]);
    __syncthreads();
    float total = 0.0f;
    for (int i = threadIdx.x; i < splits; i += THREADS) {
        const float2 split = scales[i];
        const float factor = split.y == 0.0f ? 0.0f : expf(split.x - maximum);
        factors[i] = factor;
        total += factor * split.y;
    }
    for (int step = 16; step > 0; step >>= 1) {
        total += __shfl_xor_sync(0xffffffff, total, step);
    }
    if (lane == 0) reduced[warp] = total;
    __syncthreads();
    total = 0.0f;
    for (int other = 0; other < WARPS; ++other) total += reduced[other];

    const int four = threadIdx.x % FOURS, share = threadIdx.x / FOURS;
    const float4* from = (const float4*)(sums + (long long)blockIdx.y * splits * SIZE)
        + blockIdx.x * FOURS + four;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = share; i < splits; i += SHARES) {
        const float factor = factors[i];
        const float4 part = from[(long long)i * (SIZE / 4)];
        if (factor != 0.0f) {
            sum.x = fmaf(factor, part.x, sum.x);
            sum.y = fmaf(factor, part.y, sum.y);
            sum.z = fmaf(factor, part.z, sum.z);
            sum.w = fmaf(factor, part.w, sum.w);
        }
    }
    shares[share][four] = sum;
    __syncthreads();
    for (int half = SHARES / 2; half > 0; half >>= 1) {
        if (share < half) {
            const float4 other = shares[share + half][four];
            sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
            shares[share][four] = sum;
        }
        __syncthreads();
    }
    if (share == 0) {
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
        Value* to = out + (long long)blockIdx.y * SIZE + blockIdx.x * COLUMNS + four * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = store(total == 0.0f ? 0.0f : values[i] / total);
    }
}
