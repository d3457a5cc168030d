// out = gelu(in) * other, elementwise, with the tanh approximation of gelu.
//
// gelu is rounded to the dtype first, as by a kernel of its own.  Its operations are those of PyTorch's
// kernel (GeluCUDAKernelImpl in ATen/native/cuda/ActivationGeluKernel.cu).
//
// Constant from the compiler's command line: INPUT, the dtype.

#include "values.cuh"

extern "C" __global__ void gated(
    Four<INPUT>* out, const Four<INPUT>* in, const Four<INPUT>* other, long long fours
) {
    wait_for_previous();
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= fours) return;
    Four<INPUT> result = in[at];
    const Four<INPUT> by = other[at];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Input& value = result.values[j];
        const float x = value.get(), inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
        value.set(0.5f * x * (1.0f + tanhf(inner)));
        value.set(__fmul_rn(value.get(), by.values[j].get()));
    }
    out[at] = result;
}
