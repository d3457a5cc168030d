// Values of one dtype as their bits.
//
// Constants from the compiler's command line: BITS and EXPONENT of the dtype.

#if BITS == 32
typedef unsigned int Bits;
#else
typedef unsigned short Bits;
#endif

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

__device__ __forceinline__ float load(Bits bits) {
#if BITS == 32
    return __uint_as_float(bits);
#elif EXPONENT == 8
    return __uint_as_float((unsigned int)bits << 16);
#else
    return of_half(bits);
#endif
}

__device__ __forceinline__ Bits store(float value) {
    const unsigned int bits = __float_as_uint(value);
#if BITS == 32
    return bits;
#elif EXPONENT == 8
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, or to even
#else
    return to_half(value);
#endif
}
