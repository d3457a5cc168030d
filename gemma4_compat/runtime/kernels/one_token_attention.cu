// Attention of one query per head: softmax(query * keys * scale + mask) * values.
//
// The query heads of one key head are computed together, so that keys and values are read once.  A
// block computes a range of keys ("split"); the second kernel combines the ranges.  Scores, weights
// and sums are float32.  The order of all sums depends on the shapes alone.
//
// Keys and values come through shared memory: a thread copies what it will read itself, STAGES steps
// ahead, so that its registers are free and no other thread waits for it.
//
// Constants from the compiler's command line: INPUT, the dtype; SIZE of a head, a power of two from 32
// to 512; HEADS that a block computes, at most 8; MASK: 0 none, 1 bool, 2 the dtype; STAGES of copies.

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
constexpr int OWN = SIZE / 32, VECTOR = OWN < 8 ? OWN : 8, PARTS = OWN / VECTOR;
constexpr int SLOTS = STAGES * KEYS * PARTS;  // of 16 bytes, that a thread copies to

// Copies a pack to shared memory, if the GPU can without waiting.
template <class Pack>
__device__ __forceinline__ void copy(Pack* to, const Pack* from) {
#if __CUDA_ARCH__ >= 800
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    if constexpr (sizeof(Pack) == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
        return;
    } else if constexpr (sizeof(Pack) >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
            :: "r"(address), "l"(from), "n"(sizeof(Pack)) : "memory");
        return;
    }
#endif
    *to = *from;
}

// Ends a stage of copies, and waits for the stage that was ended LATER stages ago.
template <int LATER>
__device__ __forceinline__ void wait_for_stage() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
#endif
}

__device__ __forceinline__ void end_stage() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Grid: batch * groups * splits, where a group is HEADS query heads.
extern "C" __global__ void __launch_bounds__(THREADS, SIZE > 256 ? 1 : 2) one_token_attention(
    Input* out, float* sums, const Input* queries, const Input* keys, const Input* values,
    const Mask* mask, float scale, int splits, int length, int range, int groups, int groups_of_key, int query_batch, int query_head, int key_batch, int key_head, int key_row,
    int value_batch, int value_head, int value_row, int mask_batch, int mask_head, int mask_row
) {
    wait_for_previous();
    extern __shared__ float4 shared[];  // a column for each thread's copies, then the weights
    float4* const slots = shared + threadIdx.x;  // [STAGES * KEYS * PARTS, or more]
    float* const weights = (float*)(shared + SLOTS * THREADS);  // [range][POWER]
    __shared__ float maxima[WARPS][POWER], totals[WARPS][POWER];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int split = blockIdx.x % splits, batch = blockIdx.x / splits / groups;
    const int group = blockIdx.x / splits % groups, head = group * HEADS;
    const int first = split * range, count = min(range, length - first);
    queries += (long long)batch * query_batch + (long long)head * query_head;
    keys += (long long)batch * key_batch + (long long)(group / groups_of_key) * key_head;
    values += (long long)batch * value_batch + (long long)(group / groups_of_key) * value_head;
    const long long mask_at = (long long)batch * mask_batch + (long long)head * mask_head;

    // What the mask adds to the scores, and to those of no head.
    for (int i = threadIdx.x; i < count * POWER; i += THREADS) {
        const int h = i % POWER;
        weights[i] = h >= HEADS ? NONE : bias_of(
            mask, mask_at + (long long)h * mask_head + (long long)(first + i / POWER) * mask_row
        );
    }
    __syncthreads();

    // Scores.  A lane gets the score of one key and head, or several lanes the same.
    constexpr int SAME = 32 / (KEYS * POWER), KEY_STEP = POWER * SAME;
    const int my_head = lane / SAME % POWER, my_key = lane / KEY_STEP;
    const auto bias_at = [&](int start) {
        return start + my_key < count ? weights[(start + my_key) * POWER + my_head] : NONE;
    };
    const auto copy_keys = [&](int start, int stage) {
        if (__any_sync(0xffffffff, bias_at(start) != NONE)) {
#pragma unroll
            for (int key = 0; key < KEYS; ++key) {
                const Input* row = keys + (long long)min(first + start + key, length - 1) * key_row;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    float4* const slot = slots + ((stage * KEYS + key) * PARTS + part) * THREADS;
                    copy((Pack<VECTOR>*)slot, (const Pack<VECTOR>*)row + part * 32 + lane);
                }
            }
        }
        end_stage();
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
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_keys((i * WARPS + warp) * KEYS, i);
    float maximum = NONE;
    int stage = 0;
    for (int start = warp * KEYS; start < count; start += WARPS * KEYS) {
        copy_keys(start + (STAGES - 1) * WARPS * KEYS, stage == 0 ? STAGES - 1 : stage - 1);
        wait_for_stage<STAGES - 1>();
        const float bias = bias_at(start);
        float score = NONE;
        if (__any_sync(0xffffffff, bias != NONE)) {
            float scores[KEYS * POWER] = {};
#pragma unroll
            for (int key = 0; key < KEYS; ++key) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const float4* slot = slots + ((stage * KEYS + key) * PARTS + part) * THREADS;
                    const Pack<VECTOR> pack = *(const Pack<VECTOR>*)slot;
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        const float value = pack.values[i].get();
#pragma unroll
                        for (int h = 0; h < HEADS; ++h) {
                            float& sum = scores[key * POWER + h];
                            sum = fmaf(query[h][part * VECTOR + i], value, sum);
                        }
                    }
                }
            }
            add_lanes<KEYS * POWER, 16, 1>(scores, lane);
            if (bias != NONE) score = scores[0] * scale + bias;
        }
        __syncwarp();  // another lane may have read what the mask adds
        if (start + my_key < count) weights[(start + my_key) * POWER + my_head] = score;
        maximum = fmaxf(maximum, score);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    for (int step = 16; step >= KEY_STEP; step >>= 1) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, step));
    }
    if (lane < KEY_STEP) maxima[warp][my_head] = maximum;

    // The sums' first values.  A warp sums a slice of the head; its lanes read ROWS at a time.
    constexpr int SLICE = SIZE / WARPS, MINE = SLICE < 8 ? SLICE : 8;
    constexpr int LANES = SLICE / MINE, ROWS = 32 / LANES;
    const int row = lane / LANES, column = warp * SLICE + lane % LANES * MINE;
    constexpr int MORE = SLOTS / KEYS;  // stages
    const auto copy_values = [&](int start, int stage) {
#pragma unroll
        for (int i = 0; i < KEYS; ++i) {
            const int at = start + i * ROWS;
            if (at >= count) break;
            const Input* from = values + (long long)(first + at) * value_row + column;
            copy((Pack<MINE>*)(slots + (stage * KEYS + i) * THREADS), (const Pack<MINE>*)from);
        }
        end_stage();
    };
    const auto begin = [&] {
#pragma unroll
        for (int i = 0; i < MORE - 1; ++i) copy_values(row + i * ROWS * KEYS, i);
    };
    const bool early = __any_sync(0xffffffff, maximum != NONE);
    __syncwarp();
    if (early) begin();
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
        if (!early) begin();
        stage = 0;
        for (int start = row; start < count; start += ROWS * KEYS) {
            copy_values(start + (MORE - 1) * ROWS * KEYS, stage == 0 ? MORE - 1 : stage - 1);
            wait_for_stage<MORE - 1>();
#pragma unroll
            for (int k = 0; k < KEYS; ++k) {
                if (start + k * ROWS < count) {
                    const Pack<MINE> pack = *(const Pack<MINE>*)(slots + (stage * KEYS + k) * THREADS);
                    const float* weight = weights + (start + k * ROWS) * POWER;
#pragma unroll
                    for (int h = 0; h < HEADS; ++h) {
                        const float factor = weight[h];
#pragma unroll
                        for (int i = 0; i < MINE; ++i) {
                            float& to = sum[h * MINE + i];
                            to = fmaf(factor, pack.values[i].get(), to);
                        }
                    }
                }
            }
            stage = stage == MORE - 1 ? 0 : stage + 1;
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
