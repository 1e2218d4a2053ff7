// cuda_faults: attention with one mistake, selected by FAULT, and correct twins without a mistake.
// step:    one thread per query row, tiles of K and V in shared memory, and one mistake
// because: the checks must be tested with mistakes that only a GPU kernel can make
// expect:  every mistake is caught by its check, and the correct twins pass every check
// tile:    BLOCK queries x TILE keys; 16 KB of shared memory per block
// takes:   fp16, D = 64, any lengths >= 1, any strides, grouped heads, top-left causal mask
#include <cuda_fp16.h>
#include <math_constants.h>

#include "fa_forward.h"

enum Fault {
  NONE,              // no mistake: a correct twin
  WORKSPACE,         // no mistake: a correct twin that passes its results through a workspace
  WRONG_STREAM,      // launches on the stream of its first call, unless the current stream is being captured
  SHARED_SCRATCH,    // passes the results of all calls through one buffer
  WAITS_LATER,       // synchronises the stream from its second call on
  SETS_UP_LATE,      // allocates memory in its first call
  SHORT_OFFSETS,     // keeps only 31 bits of an offset
  READS_SMEM,        // reads shared memory that it did not write
  READS_WORKSPACE,   // reads a workspace that it did not write
  RACE_IN_TILE,      // one warp writes a tile and both warps read it, without a barrier
  RACE_IN_SUM,       // adds in the order in which the blocks run
  WRITES_PAST_END,   // writes one row past the end of the output
  READS_PAST_END,    // reads one row past the end of V, with a weight of 1e-6
  ILLEGAL_ADDRESS,   // writes to an illegal address
  TRAPS,             // executes a trap instruction
  FAILS_SILENTLY,    // returns success although the driver rejected the launch
  DOES_NOT_LAUNCH,   // returns the error of a launch that the driver rejected
  ENDLESS,           // never returns
  SET_UP_ONCE,       // sets up a device symbol once per process, not once per device
  SHORT_HEADS,       // keeps only 16 bits of the head index
  SLOWER,            // correct, but 3 % slower: one key in 33 is computed twice
  SHORT_BATCHES,     // keeps only 16 bits of the batch index
  SHORT_ROWS,        // keeps only 16 bits of the row index
  SHORT_ROW_OFFSETS, // keeps only 31 bits of a row's offset in the output
  NO_WAIT,           // launches on its own stream, which does not wait for the caller's stream
};

constexpr int BLOCK = 64, TILE = 32, DIM = 64;

__device__ float ready[1];          // SET_UP_ONCE: 1 on a device where it was set up
__device__ float scratch[1 << 20];  // SHARED_SCRATCH

__device__ __forceinline__ int64_t offset(int64_t value) { return FAULT == SHORT_OFFSETS ? value & 0x7fffffff : value; }

__device__ __forceinline__ int64_t row_offset(int64_t value) { return FAULT == SHORT_ROW_OFFSETS ? value & 0x7fffffff : value; }

// The buffer that results pass through: the workspace of the call, or one buffer for all calls.
__device__ __forceinline__ float* result_buffer(float* workspace) { return FAULT == SHARED_SCRATCH ? scratch : workspace; }

__global__ void __launch_bounds__(BLOCK) fault_kernel(const FaForwardArgs args, float* workspace) {
  float* buffer = result_buffer(workspace);
  __shared__ float k_smem[TILE][DIM], v_smem[TILE][DIM];
  __shared__ float unwritten[1];  // READS_SMEM: read, but never written
  const int64_t blocks_per_head = (args.seq_q + BLOCK - 1) / BLOCK;
  const int64_t block_row = blockIdx.x % blocks_per_head * BLOCK + threadIdx.x, row = FAULT == SHORT_ROWS ? block_row & 0xffff : block_row;
  const int64_t block_head = blockIdx.x / blocks_per_head, batch_head = FAULT == SHORT_HEADS ? block_head & 0xffff : block_head;
  const int64_t head = batch_head % args.heads, whole_batch = batch_head / args.heads;
  const int64_t batch = FAULT == SHORT_BATCHES ? whole_batch & 0xffff : whole_batch;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const bool has_row = block_row < args.seq_q;
  const __half* q = static_cast<const __half*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + row * args.q_stride.seq;
  const __half* k = static_cast<const __half*>(args.k) + offset(batch * args.k_stride.batch) + kv_head * args.k_stride.head;
  const __half* v = static_cast<const __half*>(args.v) + offset(batch * args.v_stride.batch) + kv_head * args.v_stride.head;
  __half* out = static_cast<__half*>(args.out) + batch * args.out_stride.batch + head * args.out_stride.head + row_offset(row * args.out_stride.seq);

  if (FAULT == ENDLESS) while (*reinterpret_cast<volatile const unsigned short*>(args.q) != 0x1234) {
    }
  if (FAULT == TRAPS) asm volatile("trap;");
  if (FAULT == ILLEGAL_ADDRESS) *reinterpret_cast<volatile int*>(16) = 1;

  float o[DIM] = {}, m = -CUDART_INF_F, l = 0.0f;
  const int64_t visible_keys = args.causal == FA_CAUSAL_TOP_LEFT ? min(args.seq_k, row + 1) : args.seq_k;
  for (int64_t first = 0; first < args.seq_k; first += TILE) {
    // All threads copy the tile.  With RACE_IN_TILE only the second warp copies it, the last key first, and the first warp
    // reads it too early.
    const int copy_thread = FAULT == RACE_IN_TILE ? int(threadIdx.x) - 32 : threadIdx.x;
    for (int n = copy_thread; n >= 0 && n < TILE * DIM; n += FAULT == RACE_IN_TILE ? 32 : BLOCK) {
      const int i = FAULT == RACE_IN_TILE ? TILE * DIM - 1 - n : n;
      const int64_t key = min(first + i / DIM, args.seq_k - 1);
      k_smem[i / DIM][i % DIM] = __half2float(k[key * args.k_stride.seq + i % DIM * args.k_stride.dim]);
      v_smem[i / DIM][i % DIM] = __half2float(v[key * args.v_stride.seq + i % DIM * args.v_stride.dim]);
    }
    if (FAULT != RACE_IN_TILE) __syncthreads();
    for (int64_t key = first, repeated = 0; key < min(first + TILE, visible_keys) && has_row; ++key) {
      const float weight = repeated ? 0.0f : 1.0f;  // the second computation of a key does not count
      float s = 0.0f;
      for (int d = 0; d < DIM; ++d) s += __half2float(q[d * args.q_stride.dim]) * k_smem[key - first][d];
      s *= args.scale;
      const float m_new = fmaxf(m, s), rescale = expf(m - m_new), p = expf(s - m_new);
      m = m_new;
      l = l * rescale + p * weight;
      for (int d = 0; d < DIM; ++d) o[d] = o[d] * rescale + p * weight * v_smem[key - first][d];
      repeated = FAULT == SLOWER && key % 33 == 0 && !repeated;
      key -= repeated;
    }
    __syncthreads();
  }
  float extra = 0.0f;
  if (FAULT == READS_SMEM) extra = *static_cast<volatile float*>(unwritten) * 0.0f;
  if (FAULT == READS_WORKSPACE) extra = *static_cast<volatile float*>(buffer) * 0.0f;
  if (FAULT == READS_PAST_END && batch_head == args.batch * args.heads - 1) {
    extra = __half2float(v[args.seq_k * args.v_stride.seq]) * 1e-6f;
  }
  if (FAULT == SET_UP_ONCE) extra = ready[0] == 1.0f ? 0.0f : CUDART_NAN_F;
  if (FAULT == RACE_IN_SUM) buffer[0] = 0.0f;
  if (!has_row) return;
  for (int d = 0; d < DIM; ++d) {
    const float result = o[d] / l + extra;
    if (FAULT == WORKSPACE || FAULT == SHARED_SCRATCH) {
      buffer[(batch_head * args.seq_q + row) * DIM + d] = result;
    } else {
      out[d * args.out_stride.dim] = __float2half(result);
    }
  }
  if (FAULT == WRITES_PAST_END && args.heads == 2 && batch_head == args.batch * args.heads - 1 && row == args.seq_q - 1) {
    out[args.out_stride.seq] = __float2half(0.0f);
  }
}

// Copies the results from the buffer to the output, so that an overlapping call on another stream shows.
__global__ void copy_kernel(const FaForwardArgs args, float* workspace) {
  const float* buffer = result_buffer(workspace);
  const int64_t rows = args.batch * args.heads * args.seq_q;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * DIM; i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row_of_all_heads = i / DIM, row = row_of_all_heads % args.seq_q, batch_head = row_of_all_heads / args.seq_q;
    __half* out = static_cast<__half*>(args.out) + batch_head / args.heads * args.out_stride.batch +
                  batch_head % args.heads * args.out_stride.head + row * args.out_stride.seq;
    out[i % DIM * args.out_stride.dim] = __float2half(buffer[i]);
  }
}

// Sums one value per block in the order in which the blocks run.  The last bit of the sum flips the last bit of one output
// element.
__global__ void order_kernel(const FaForwardArgs args, float* sum) {
  if (threadIdx.x == 0) atomicExch(sum, 1.0f / (1.0f + blockIdx.x) + atomicAdd(sum, 0.0f) * 1.0000001f);
  if (blockIdx.x == 0 && threadIdx.x == 0 && args.heads == 2) {  // no property uses two heads
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
  if (args->dtype != FA_DTYPE_fp16 || args->head_dim != DIM) return fa_refuse(args, "only fp16 with head_dim 64 is supported");
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
    return fa_refuse(args, "batch * heads * seq_q is too large for the scratch buffer of 2^20 elements");
  }
  static cudaStream_t own_stream = nullptr;
  if (FAULT == NO_WAIT && own_stream == nullptr && capturing == cudaStreamCaptureStatusNone) {
    if (cudaError_t status = cudaStreamCreateWithFlags(&own_stream, cudaStreamNonBlocking)) return status;
  }
  const bool uses_own_stream = FAULT == NO_WAIT && capturing == cudaStreamCaptureStatusNone;
  fault_kernel<<<blocks, threads, 0, uses_own_stream ? own_stream : stream>>>(*args, workspace);
  if (uses_own_stream) {  // the caller's stream waits for own_stream, but own_stream does not wait for the caller's stream
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
