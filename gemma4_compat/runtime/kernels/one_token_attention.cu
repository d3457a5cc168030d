// Attention of one query per head: softmax(query * keys * scale + mask) * values.
//
// The query heads of one key head are computed together, so that keys and values are read once.  A
// block computes a range of keys ("split"); the second kernel combines the ranges.  Scores, weights
// and sums are float32.  The order of all sums depends on the shapes alone.
//
// Constants from the compiler's command line: INPUT, the dtype; SIZE of a head, a power of two from 32
// to 512; HEADS that a block computes, at most 8; MASK: 0 none, 1 bool, 2 the dtype.

#include "values.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
#define NONE __int_as_float(0xff800000)  // -inf

// Neighboring values of a row that one lane reads at once.
template <int COUNT>
struct alignas(COUNT * sizeof(Input)) Pack { Input values[COUNT]; };

#if MASK == 1
typedef unsigned char Mask;
#else
typedef Input Mask;
#endif

// What the mask adds to a score; NONE if it leaves the key out.
__device__ __forceinline__ float bias_of(const Mask* mask, long long at) {
#if MASK == 0
    return 0.0f;
#elif MASK == 1
    return mask[at] ? 0.0f : NONE;
#else
    return mask[at].get();
#endif
}

constexpr int POWER = HEADS > 4 ? 8 : HEADS > 2 ? 4 : HEADS;  // HEADS, or the next power of two
constexpr int KEYS = 4;  // that a warp reads at once
constexpr bool AHEAD = HEADS <= 4;  // whether registers hold the next keys, too
constexpr int OWN = SIZE / 32, VECTOR = OWN < 8 ? OWN : 8, PARTS = OWN / VECTOR;

// The keys that a warp reads at once, and what the mask adds to the lane's own score.
struct Keys {
    Pack<VECTOR> packs[KEYS][PARTS];
    float bias;
    bool seen;
};

// Grid: batch * groups * splits, where a group is HEADS query heads.
extern "C" __global__ void __launch_bounds__(THREADS, SIZE > 256 ? 1 : 2) one_token_attention(
    Input* out, float* sums, const Input* queries, const Input* keys, const Input* values,
    const Mask* mask, float scale, int splits, int length, int range, int groups, int groups_of_key, int query_batch, int query_head, int key_batch, int key_head, int key_row,
    int value_batch, int value_head, int value_row, int mask_batch, int mask_head, int mask_row
) {
    wait_for_previous();
    extern __shared__ float weights[];  // [range][POWER]
    __shared__ float maxima[WARPS][POWER], totals[WARPS][POWER];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int split = blockIdx.x % splits, batch = blockIdx.x / splits / groups;
    const int group = blockIdx.x / splits % groups, head = group * HEADS;
    const int first = split * range, count = min(range, length - first);
    queries += (long long)batch * query_batch + (long long)head * query_head;
    keys += (long long)batch * key_batch + (long long)(group / groups_of_key) * key_head;
    values += (long long)batch * value_batch + (long long)(group / groups_of_key) * value_head;
    const long long mask_at = (long long)batch * mask_batch + (long long)head * mask_head;

    // Scores.  A lane gets the score of one key and head, or several lanes the same.
    constexpr int SAME = 32 / (KEYS * POWER), KEY_STEP = POWER * SAME;
    const int my_head = lane / SAME % POWER, my_key = lane / KEY_STEP;
    const auto fetch = [&](Keys& to, int start) {
        to.bias = NONE;
        if (start + my_key < count && my_head < HEADS) {
            to.bias = bias_of(
                mask, mask_at + (long long)my_head * mask_head
                    + (long long)(first + start + my_key) * mask_row
            );
        }
        to.seen = __any_sync(0xffffffff, to.bias != NONE);
        if (!to.seen) return;
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const Input* row = keys + (long long)min(first + start + key, length - 1) * key_row;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                to.packs[key][part] = ((const Pack<VECTOR>*)row)[part * 32 + lane];
            }
        }
    };
    float query[HEADS][OWN];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Input* row = queries + (long long)h * query_head;
            const Pack<VECTOR> pack = ((const Pack<VECTOR>*)row)[part * 32 + lane];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) query[h][part * VECTOR + i] = pack.values[i].get();
        }
    }
    Keys now, next;
    fetch(now, warp * KEYS);
    float maximum = NONE;
    for (int start = warp * KEYS; start < count; start += WARPS * KEYS) {
        if (AHEAD) fetch(next, start + WARPS * KEYS);
        float score = NONE;
        if (now.seen) {
            float scores[KEYS * POWER] = {};
#pragma unroll
            for (int key = 0; key < KEYS; ++key) {
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float value = now.packs[key][i / VECTOR].values[i % VECTOR].get();
#pragma unroll
                    for (int h = 0; h < HEADS; ++h) {
                        float& sum = scores[key * POWER + h];
                        sum = fmaf(query[h][i], value, sum);
                    }
                }
            }
            add_lanes<KEYS * POWER, 16, 1>(scores, lane);
            if (now.bias != NONE) score = scores[0] * scale + now.bias;
        }
        if (start + my_key < count) weights[(start + my_key) * POWER + my_head] = score;
        maximum = fmaxf(maximum, score);
        if (AHEAD) {
            now = next;
        } else {
            fetch(now, start + WARPS * KEYS);
        }
    }
    for (int step = 16; step >= KEY_STEP; step >>= 1) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, step));
    }
    if (lane < KEY_STEP) maxima[warp][my_head] = maximum;

    // The sums' first values.  A warp sums a slice of the head; its lanes read ROWS at a time.
    constexpr int SLICE = SIZE / WARPS, MINE = SLICE < 8 ? SLICE : 8;
    constexpr int LANES = SLICE / MINE, ROWS = 32 / LANES;
    const int row = lane / LANES, column = warp * SLICE + lane % LANES * MINE;
    struct Values { Pack<MINE> packs[KEYS]; } these, those;
    const auto read = [&](Values& to, int start) {
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const int at = min(first + start + i * ROWS, length - 1);
            to.packs[i] = *(const Pack<MINE>*)(values + (long long)at * value_row + column);
        }
    };
    const bool early = __any_sync(0xffffffff, maximum != NONE);
    if (early) read(these, row);
    __syncthreads();

    // Weights.  A thread computes weights of one head.
    const int head_of_weights = lane % POWER;
    maximum = NONE;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        maximum = fmaxf(maximum, maxima[other][head_of_weights]);
    }
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
    float all = 0.0f;  // 0 if the mask leaves out all keys
#pragma unroll
    for (int other = 0; other < WARPS; ++other) total += totals[other][head_of_weights];
#pragma unroll
    for (int h = 0; h < POWER; ++h) all += __shfl_sync(0xffffffff, total, h);

    // Sums.
    float sum[HEADS * MINE] = {};
    if (all != 0.0f) {
        if (!early) read(these, row);
        for (int start = row; start < count; start += ROWS * KEYS) {
            read(those, start + ROWS * KEYS);
#pragma unroll
            for (int k = 0; k < KEYS; ++k) {
                if (start + k * ROWS < count) {
                    const float* weight = weights + (start + k * ROWS) * POWER;
#pragma unroll
                    for (int h = 0; h < HEADS; ++h) {
                        const float factor = weight[h];
#pragma unroll
                        for (int i = 0; i < MINE; ++i) {
                            float& to = sum[h * MINE + i];
                            to = fmaf(factor, these.packs[k].values[i].get(), to);
                        }
                    }
                }
            }
            these = those;
        }
    }
    // Over the rows of the warp; a lane ends with the columns of MINE that its row selects.
    constexpr int LEFT = MINE * LANES / 32 > 0 ? MINE * LANES / 32 : 1;  // per head
    constexpr int COPIES = 32 / LANES * LEFT / MINE;  // lanes with the same columns
#pragma unroll
    for (int h = 0; h < HEADS; ++h) add_lanes<MINE, 16, LANES>(sum + h * MINE, lane);
    const int place = column + row / COPIES * LEFT;
    const long long first_head = (long long)batch * groups * HEADS + head;
    const bool writes = row % COPIES == 0;
    if (splits == 1) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            const float divisor = __shfl_sync(0xffffffff, total, h);
#pragma unroll
            for (int i = 0; i < LEFT; ++i) {
                const float value = divisor == 0.0f ? 0.0f : sum[h * MINE + i] / divisor;
                if (writes) out[(first_head + h) * SIZE + place + i].set(value);
            }
        }
        return;
    }
    // Partial results: [batch * heads][splits][SIZE], then the base and total of each.
    float2* scales = (float2*)(sums + (long long)gridDim.x * HEADS * SIZE);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
        const long long at = (first_head + h) * splits + split;
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            if (writes) sums[at * SIZE + place + i] = sum[h * MINE + i];
        }
        if (warp == 0 && lane == h) scales[at] = make_float2(base, total);
    }
}

constexpr int MOST = 4096;  // splits
constexpr int COLUMNS = SIZE < 64 ? SIZE : 64, PARTS_OF_HEAD = SIZE / COLUMNS, FOURS = COLUMNS / 4, SHARES = THREADS / FOURS;

// Grid: batch * heads * SIZE / COLUMNS.
extern "C" __global__ void __launch_bounds__(THREADS) combined(
    Input* out, const float* sums, int splits, int heads
) {
    wait_for_previous();
    const int head = blockIdx.x / PARTS_OF_HEAD, part = blockIdx.x % PARTS_OF_HEAD;
    const float2* scales = (const float2*)(sums + (long long)heads * splits * SIZE)
        + (long long)head * splits;
    __shared__ float factors[MOST];
    __shared__ float4 shares[SHARES][FOURS];
    __shared__ float reduced[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
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
    const float4* from = (const float4*)(sums + (long long)head * splits * SIZE)
        + part * FOURS + four;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int i = share; i < splits; i += SHARES) {
        const float factor = factors[i];
        const float4 other = from[(long long)i * (SIZE / 4)];
        if (factor != 0.0f) {
            sum.x = fmaf(factor, other.x, sum.x);
            sum.y = fmaf(factor, other.y, sum.y);
            sum.z = fmaf(factor, other.z, sum.z);
            sum.w = fmaf(factor, other.w, sum.w);
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
        Input* to = out + (long long)head * SIZE + part * COLUMNS + four * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i].set(total == 0.0f ? 0.0f : values[i] / total);
    }
}
