// cuda_faults: attention with one mistake, chosen by FAULT, and twins without.
// step:    one thread per query row, K and V tiles in shared memory, and one mistake
// because: a judge must be judged on what only a GPU can do wrong
// expect:  each mistake is found by its check, and no twin is blamed
// tile:    BLOCK queries x TILE keys; 16 KB of shared memory per block
// takes:   fp16, D = 64, any lengths >= 1, any strides, grouped heads, causal from the top left
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_forward.h"

enum Fault {
  NONE,
  WORKSPACE,         // none: a twin that passes its sums through a workspace
  WRONG_STREAM,      // the first stream it ever saw, unless that is being captured
  SHARED_SCRATCH,    // results pass through one buffer for all calls
  WAITS_LATER,       // waits for the device from its second call on
  SETS_UP_LATE,      // allocates in its first call
  SHORT_OFFSETS,     // 31 bits of an offset
  READS_SMEM,        // reads shared memory that it did not write
  READS_WORKSPACE,   // reads a workspace that it did not write
  RACE_IN_TILE,      // one warp writes a tile, both read it, and nobody waits
  RACE_IN_SUM,       // adds in whatever order the blocks come
  WRITES_PAST_END,   // one row more than there is
  READS_PAST_END,    // one key more than there is, with next to no weight
  ILLEGAL_ADDRESS,
  TRAPS,
  FAILS_SILENTLY,    // a launch that the driver rejects, and a status of success
  DOES_NOT_LAUNCH,   // the same, reported
  ENDLESS,
  SET_UP_ONCE,       // a device symbol set up once per process, not once per device
  SHORT_HEADS,       // 16 bits of a head's number
  SLOWER,            // right, and 3 % slower: one key in 33 is computed twice
  NO_WAIT,           // a stream of its own, which does not wait for the caller's
};

constexpr int BLOCK = 64, TILE = 32, DIM = 64;

__device__ float ready[1];       // SET_UP_ONCE: 1 where it was set up
__device__ float scratch[1 << 20];  // SHARED_SCRATCH

__device__ __forceinline__ int64_t offset(int64_t value) { return FAULT == SHORT_OFFSETS ? value & 0x7fffffff : value; }

// Where results pass through: the call's workspace, or one buffer for all calls.
__device__ __forceinline__ float* passage(float* workspace) { return FAULT == SHARED_SCRATCH ? scratch : workspace; }

__global__ void __launch_bounds__(BLOCK) fault_kernel(const FaForwardArgs args, float* workspace) {
  float* through = passage(workspace);
  __shared__ float k_smem[TILE][DIM], v_smem[TILE][DIM];
  __shared__ float left[1];  // READS_SMEM: nobody writes it
  const int64_t blocks_per_head = (args.seq_q + BLOCK - 1) / BLOCK;
  const int64_t row = blockIdx.x % blocks_per_head * BLOCK + threadIdx.x;
  const int64_t number = blockIdx.x / blocks_per_head, head_of_all = FAULT == SHORT_HEADS ? number & 0xffff : number;
  const int64_t head = head_of_all % args.heads, batch = head_of_all / args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const bool has_row = row < args.seq_q;
  const __half* q = static_cast<const __half*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + row * args.q_stride.seq;
  const __half* k = static_cast<const __half*>(args.k) + offset(batch * args.k_stride.batch) + kv_head * args.k_stride.head;
  const __half* v = static_cast<const __half*>(args.v) + offset(batch * args.v_stride.batch) + kv_head * args.v_stride.head;
  __half* out = static_cast<__half*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head + row * args.out_stride.seq;

  if (FAULT == ENDLESS) while (*reinterpret_cast<volatile const unsigned short*>(args.q) != 0x1234) {
    }
  if (FAULT == TRAPS) asm volatile("trap;");
  if (FAULT == ILLEGAL_ADDRESS) *reinterpret_cast<volatile int*>(16) = 1;

  float o[DIM] = {}, m = -CUDART_INF_F, l = 0.0f;
  const int64_t visible = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, row + 1) : args.seq_k;
  for (int64_t first = 0; first < args.seq_k; first += TILE) {
    // All copy, but where the barrier is missing: there one warp copies for both, the last key first, and the other
    // reads ahead of it.
    const int copier = FAULT == RACE_IN_TILE ? int(threadIdx.x) - 32 : threadIdx.x;
    for (int n = copier; n >= 0 && n < TILE * DIM; n += FAULT == RACE_IN_TILE ? 32 : BLOCK) {
      const int i = FAULT == RACE_IN_TILE ? TILE * DIM - 1 - n : n;
      const int64_t key = min(first + i / DIM, args.seq_k - 1);
      k_smem[i / DIM][i % DIM] = __half2float(k[key * args.k_stride.seq + i % DIM * args.k_stride.dim]);
      v_smem[i / DIM][i % DIM] = __half2float(v[key * args.v_stride.seq + i % DIM * args.v_stride.dim]);
    }
    if (FAULT != RACE_IN_TILE) __syncthreads();
    for (int64_t key = first, again = 0; key < min(first + TILE, visible) && has_row; ++key) {
      const float once = again ? 0.0f : 1.0f;  // what is computed again counts for nothing
      float s = 0.0f;
      for (int d = 0; d < DIM; ++d) s += __half2float(q[d * args.q_stride.dim]) * k_smem[key - first][d];
      s *= args.scale;
      const float m_new = fmaxf(m, s), rescale = expf(m - m_new), p = expf(s - m_new);
      m = m_new;
      l = l * rescale + p * once;
      for (int d = 0; d < DIM; ++d) o[d] = o[d] * rescale + p * once * v_smem[key - first][d];
      again = FAULT == SLOWER && key % 33 == 0 && !again;
      key -= again;
    }
    __syncthreads();
  }
  float extra = 0.0f;
  if (FAULT == READS_SMEM) extra = *static_cast<volatile float*>(left) * 0.0f;
  if (FAULT == READS_WORKSPACE) extra = *static_cast<volatile float*>(through) * 0.0f;
  if (FAULT == READS_PAST_END && head_of_all == args.batch * args.heads - 1) {
    extra = __half2float(v[args.seq_k * args.v_stride.seq]) * 1e-6f;
  }
  if (FAULT == SET_UP_ONCE) extra = ready[0] == 1.0f ? 0.0f : CUDART_NAN_F;
  if (FAULT == RACE_IN_SUM) through[0] = 0.0f;
  if (!has_row) return;
  for (int d = 0; d < DIM; ++d) {
    const float result = o[d] / l + extra;
    if (FAULT == WORKSPACE || FAULT == SHARED_SCRATCH) {
      through[(head_of_all * args.seq_q + row) * DIM + d] = result;
    } else {
      out[d * args.out_stride.dim] = __float2half(result);
    }
  }
  if (FAULT == WRITES_PAST_END && args.heads == 2 && head_of_all == args.batch * args.heads - 1 && row == args.seq_q - 1) {
    out[args.out_stride.seq] = __float2half(0.0f);
  }
}

// Copies what passed through a buffer, from the other end, so that a call which came between shows.
__global__ void copy_kernel(const FaForwardArgs args, float* workspace) {
  const float* through = passage(workspace);
  const int64_t rows = args.batch * args.heads * args.seq_q;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * DIM; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row_of_all = i / DIM, row = row_of_all % args.seq_q, head_of_all = row_of_all / args.seq_q;
    __half* out = static_cast<__half*>(args.out) + head_of_all / args.heads * args.out_stride.batch +
                  head_of_all % args.heads * args.out_stride.head + row * args.out_stride.seq;
    out[i % DIM * args.out_stride.dim] = __float2half(through[i]);
  }
}

// Adds the blocks' numbers in whatever order they come, and lets the last bit of that sum into the output.
__global__ void order_kernel(const FaForwardArgs args, float* sum) {
  if (threadIdx.x == 0) atomicExch(sum, 1.0f / (1.0f + blockIdx.x) + atomicAdd(sum, 0.0f) * 1.0000001f);
  if (blockIdx.x == 0 && threadIdx.x == 0 && args.heads == 2) {  // two: where no property looks
    unsigned short* bits = static_cast<unsigned short*>(args.out);
    bits[0] ^= __float_as_uint(*static_cast<volatile float*>(sum)) & 1u;
  }
}

#if NEEDS_WORKSPACE
FA_EXPORT size_t fa_workspace_bytes(const FaForwardArgs* args) {
  return FAULT == WORKSPACE ? sizeof(float) * args->batch * args->heads * args->seq_q * DIM : 256;
}
#endif

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  static cudaStream_t first_stream = stream;
  static int calls = 0;
  if (int status = fa_check_abi(args)) return status;
  if (args->dtype != FA_DTYPE_fp16 || args->head_dim != DIM) return fa_refuse(args, "fp16 with head_dim 64 only");
  ++calls;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &capturing);
  if (FAULT == WRONG_STREAM && capturing == cudaStreamCaptureStatusNone) stream = first_stream;
  if (FAULT == WAITS_LATER && calls > 1) cudaStreamSynchronize(stream);
  if (FAULT == SETS_UP_LATE && calls == 1) {
    void* buffer = nullptr;
    if (cudaError_t status = cudaMalloc(&buffer, 1024)) return status;
    if (cudaError_t status = cudaStreamSynchronize(stream)) return status;
  }
  if (FAULT == SET_UP_ONCE && calls == 1) {
    const float one = 1.0f;
    if (cudaError_t status = cudaMemcpyToSymbol(ready, &one, sizeof(one))) return status;
  }
  const unsigned blocks = args->batch * args->heads * ((args->seq_q + BLOCK - 1) / BLOCK);
  const unsigned threads = FAULT == FAILS_SILENTLY || FAULT == DOES_NOT_LAUNCH ? 2048 : BLOCK;
  float* workspace = static_cast<float*>(args->workspace);
  if (FAULT == SHARED_SCRATCH && args->batch * args->heads * args->seq_q * DIM > (1 << 20)) {
    return fa_refuse(args, "more rows than the scratch holds");
  }
  static cudaStream_t own_stream = nullptr;
  if (FAULT == NO_WAIT && own_stream == nullptr && capturing == cudaStreamCaptureStatusNone) {
    if (cudaError_t status = cudaStreamCreateWithFlags(&own_stream, cudaStreamNonBlocking)) return status;
  }
  const bool leaves = FAULT == NO_WAIT && capturing == cudaStreamCaptureStatusNone;
  fault_kernel<<<blocks, threads, 0, leaves ? own_stream : stream>>>(*args, workspace);
  if (leaves) {  // the caller's stream waits for it, but it does not wait for the caller's stream
    cudaEvent_t done;
    if (cudaError_t status = cudaEventCreateWithFlags(&done, cudaEventDisableTiming)) return status;
    cudaEventRecord(done, own_stream);
    cudaStreamWaitEvent(stream, done, 0);
    cudaEventDestroy(done);
  }
  if (FAULT == FAILS_SILENTLY) {
    (void)cudaGetLastError();
    return FA_OK;
  }
  if (FAULT == WORKSPACE || FAULT == SHARED_SCRATCH) copy_kernel<<<64, 256, 0, stream>>>(*args, workspace);
  if (FAULT == RACE_IN_SUM) order_kernel<<<512, 32, 0, stream>>>(*args, workspace);
  return static_cast<int>(cudaPeekAtLastError());
}
