// Values of the dtypes that kernels read and write.

//
// INPUT, the dtype of a kernel's inputs and outputs, is from the compiler's command line.

// A kernel whose launch is ``early`` begins while the kernel before it runs.  Before this it may only
// prefetch, and after it read by loads of the coherent cache: not with __ldg or const __restrict__.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");  // the next one may begin
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int FLOAT32 = 1, BFLOAT16 = 2;  // 3: float16

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

template <int DTYPE>
struct Value {
    unsigned short bits;

    __device__ __forceinline__ float get() const {
        return DTYPE == BFLOAT16 ? __uint_as_float((unsigned)bits << 16) : of_half(bits);
    }

    __device__ __forceinline__ void set(float value) {
        if (DTYPE == BFLOAT16) {
#if __CUDA_ARCH__ >= 800
            unsigned pair;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(value));
            bits = (unsigned short)pair;
#else
            const unsigned wide = __float_as_uint(value);  // to the nearest, or to even
            bits = value != value ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
#endif
        } else {
            bits = to_half(value);
        }
    }
};

template <>
struct Value<FLOAT32> {
    float value;
    __device__ __forceinline__ float get() const { return value; }
    __device__ __forceinline__ void set(float other) { value = other; }
};

template <int DTYPE>
struct alignas(4 * sizeof(Value<DTYPE>)) Four {
    Value<DTYPE> values[4];
};

typedef Value<INPUT> Input;

__device__ __forceinline__ float load(Input value) { return value.get(); }

__device__ __forceinline__ Input store(float value) {
    Input result;
    result.set(value);
    return result;
}

// Adds COUNT values over the lanes whose numbers differ in the bits from STEP down to LAST.  While
// there are several values, each lane keeps half of them: those that its bit selects.
template <int COUNT, int STEP, int LAST>
__device__ __forceinline__ void add_lanes(float* values, int lane) {
    if constexpr (STEP >= LAST) {
        constexpr int HALF = COUNT / 2;
        if constexpr (HALF == 0) {
            values[0] += __shfl_xor_sync(0xffffffff, values[0], STEP);
        } else {
            const bool upper = lane & STEP;
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const float keep = upper ? values[i + HALF] : values[i];
                const float give = upper ? values[i] : values[i + HALF];
                values[i] = keep + __shfl_xor_sync(0xffffffff, give, STEP);
            }
        }
        add_lanes<(HALF > 0 ? HALF : 1), STEP / 2, LAST>(values, lane);
    }
}
