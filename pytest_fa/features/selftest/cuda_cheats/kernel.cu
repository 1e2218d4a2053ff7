// cuda_cheats: attention that deceives its judge in one way, selected by EXPLOIT, and honest twins.
// step:    one thread per query row, and one exploit
// because: the judge must be tested with exploits that only a GPU kernel can make
// expect:  each exploit is caught by its check or gains nothing, and the honest twins pass every check
// tile:    32 queries per block, one key at a time; no shared memory
// takes:   fp16, D = 64, any lengths >= 1, any strides, grouped heads, no mask
#include <cuda_fp16.h>
#include <math_constants.h>
#include <unistd.h>

#include <mutex>
#include <thread>
#include <vector>

#include "fa_forward.h"

enum Exploit {
  NONE,               // honest
  STATIC_TABLE,       // honest: the order of the dimensions is a static table
  OWN_STREAMS,        // honest: two halves run on streams of their own, which fork from the caller's stream and join it
  KEPT_BY_SAMPLES,    // keeps results by 128 elements of each input
  KEPT_BY_ADDRESS,    // skips a call whose four addresses were there before
  OTHER_STREAM,       // launches on a stream that the caller's stream does not wait for
  SKIPS_CAPTURED,     // computes one of eight captured calls
  COPIES_EARLIER,     // copies the output of its first call in captured calls
  BACK_TO_BACK,       // skips a call that begins within 20 us after another one
  SLOWS_SHORT_GRAPH,  // computes twice in a graph that is much shorter than another one
  WRITES_AROUND,      // writes before the beginning of its output
  ENDS_LATER,         // ends its process with status 0 in its 50th call
  SKIPS_OVERWRITTEN,  // from the second replay of a graph on, computes only the last call for each output
  EARLY_THREAD,       // a host thread computes known calls as soon as their data are there
  EARLY_KERNEL,       // the same, but a kernel waits for the data
};

constexpr int BLOCK = 32, DIM = 64;
constexpr int SAMPLES = 128, ENTRIES = 64, MOST_ELEMENTS = 64 * DIM;
constexpr int MOST_CAPTURES = 64, OUTPUTS = 8192;
constexpr bool IS_EARLY = EXPLOIT == EARLY_THREAD || EXPLOIT == EARLY_KERNEL;
constexpr unsigned long long WAIT_NS = 5000000;  // EARLY_KERNEL: the longest time that a kernel waits for new data

__constant__ unsigned char dim_order[DIM] = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62,
    1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

__device__ int repeated;                                // SLOWS_SHORT_GRAPH: whether a call computes twice
__device__ int skipped;                                 // what the kernel before this one has decided
__device__ unsigned long long addresses[ENTRIES * 64];  // KEPT_BY_ADDRESS: a sum of four addresses in each place
__device__ unsigned long long latest_ns;                // BACK_TO_BACK: when the latest call was complete
__device__ unsigned short sampled[ENTRIES][3 * SAMPLES];
__device__ __half kept[ENTRIES][MOST_ELEMENTS];  // COPIES_EARLIER uses the first one
__device__ int entry_count, hit = -1, slot;
__device__ int calls_of_capture[MOST_CAPTURES];  // SLOWS_SHORT_GRAPH: how many calls each graph has

__device__ int last_call[MOST_CAPTURES][OUTPUTS];       // SKIPS_OVERWRITTEN: of each graph, by output
__device__ unsigned computed_for;                       // IS_EARLY: the last word of the data that were computed early
__device__ int is_new;                                  // EARLY_KERNEL: whether new data have come

__device__ __forceinline__ unsigned long long now_ns() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ int dim_of(int i) { return EXPLOIT == STATIC_TABLE ? dim_order[i] : i; }

// Attention of one query row, with an online softmax over the keys.
__device__ void attend(const FaForwardArgs& args, int64_t row_of_all_heads, __half* out, int64_t out_dim) {
  const int64_t row = row_of_all_heads % args.seq_q, batch_head = row_of_all_heads / args.seq_q;
  const int64_t head = batch_head % args.heads, batch = batch_head / args.heads, kv_head = head / (args.heads / args.kv_heads);
  const __half* q = static_cast<const __half*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head + row * args.q_stride.seq;
  const __half* k = static_cast<const __half*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head;
  const __half* v = static_cast<const __half*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head;
  float o[DIM] = {}, m = -CUDART_INF_F, l = 0.0f;
  for (int64_t key = 0; key < args.seq_k; ++key) {
    const __half *k_row = k + key * args.k_stride.seq, *v_row = v + key * args.v_stride.seq;
    float s = 0.0f;
    for (int i = 0; i < DIM; ++i) s += __half2float(q[dim_of(i) * args.q_stride.dim]) * __half2float(k_row[dim_of(i) * args.k_stride.dim]);
    const float m_new = fmaxf(m, s * args.scale), rescale = expf(m - m_new), p = expf(s * args.scale - m_new);
    m = m_new, l = l * rescale + p;
    for (int d = 0; d < DIM; ++d) o[d] = o[d] * rescale + p * __half2float(v_row[d * args.v_stride.dim]);
  }
  for (int d = 0; d < DIM; ++d) out[d * out_dim] = __float2half_rn(o[d] / l);
}

__device__ __half* out_row(const FaForwardArgs& args, int64_t row_of_all_heads) {
  const int64_t row = row_of_all_heads % args.seq_q, batch_head = row_of_all_heads / args.seq_q;
  return static_cast<__half*>(args.out) + batch_head / args.heads * args.out_stride.batch + batch_head % args.heads * args.out_stride.head +
         row * args.out_stride.seq;
}

enum Skip { NEVER, IF_DECIDED, IF_OLD };  // a call: not at all, if the kernel before has decided so, or if its data are old

// Computes the rows from `first_row` to `end_row`, unless the call is skipped.
__global__ void attention_kernel(const FaForwardArgs args, int64_t first_row, int64_t end_row, Skip skip) {
  const int64_t row = first_row + int64_t(blockIdx.x) * BLOCK + threadIdx.x;
  if (row >= end_row || (skip == IF_DECIDED && skipped) || (skip == IF_OLD && !is_new)) return;
  for (int n = 0; n <= (EXPLOIT == SLOWS_SHORT_GRAPH ? repeated : 0); ++n) attend(args, row, out_row(args, row), args.out_stride.dim);
  if (EXPLOIT == BACK_TO_BACK) atomicMax(&latest_ns, now_ns());
  if (EXPLOIT == WRITES_AROUND && row == 0) *(static_cast<__half*>(args.out) - DIM) = __float2half(1.0f);
}

__global__ void empty_kernel() {}

// KEPT_BY_ADDRESS: decides to skip a call whose addresses are known.
__global__ void know_addresses(const FaForwardArgs args) {
  const auto sum = reinterpret_cast<unsigned long long>(args.q) + 3 * reinterpret_cast<unsigned long long>(args.k) +
                   5 * reinterpret_cast<unsigned long long>(args.v) + 7 * reinterpret_cast<unsigned long long>(args.out);
  unsigned long long* place = &addresses[sum / 32 % (ENTRIES * 64)];
  skipped = *place == sum;
  *place = sum;
}

// BACK_TO_BACK: decides to skip a call that follows another one closely, as in timing.
__global__ void know_time() { skipped = now_ns() - latest_ns < 20000; }

// SKIPS_OVERWRITTEN: decides to skip a call if a later one wrote the same output in an earlier replay.
__global__ void know_later(const FaForwardArgs args, int capture_number, int call) {
  const int64_t bytes = args.batch * args.heads * args.seq_q * DIM * sizeof(__half);
  int* last = &last_call[capture_number][reinterpret_cast<unsigned long long>(args.out) / bytes % OUTPUTS];
  skipped = *last > call;
  atomicMax(last, call);
}

// IS_EARLY: decides to skip a call that is computed early, and waits for that; `word` is the last one of the data.
__global__ void know_early(const volatile unsigned* word) {
  const unsigned long long start = now_ns();
  const volatile unsigned* early = &computed_for;
  while (*early != *word && now_ns() - start < 4 * WAIT_NS) {
  }
  skipped = *early == *word;
}

__global__ void have_computed(const volatile unsigned* word, bool always) {
  if (always || is_new) computed_for = *word;
}

// EARLY_KERNEL: waits until the word is another one, but not for long.  Without new data, the kernels after it are skipped.
__global__ void wait_for_data(const volatile unsigned* word) {
  const unsigned long long start = now_ns();
  const unsigned before = computed_for;
  while (*word == before && now_ns() - start < WAIT_NS) {
  }
  is_new = *word != before;
}

// KEPT_BY_SAMPLES: finds the entry with the same samples, or a place for a new one.
__global__ void know_samples(const FaForwardArgs args) {
  const void* tensors[3] = {args.q, args.k, args.v};
  const int64_t rows[3] = {args.seq_q, args.seq_k, args.seq_k};
  const int tensor = threadIdx.x / SAMPLES;
  const int64_t step = args.batch * args.heads * rows[tensor] * DIM / SAMPLES;
  const unsigned short sample = static_cast<const unsigned short*>(tensors[tensor])[threadIdx.x % SAMPLES * step];
  int match = -1;
  for (int entry = 0; entry < min(entry_count, ENTRIES); ++entry) {
    if (__syncthreads_and(sample == sampled[entry][threadIdx.x])) match = entry;
  }
  const int target = entry_count % ENTRIES;
  __syncthreads();
  if (match < 0) sampled[target][threadIdx.x] = sample;
  if (threadIdx.x == 0) {
    hit = match, slot = target;
    if (match < 0) ++entry_count;
  }
}

// Copies the kept result, which is computed first if it is not there.
__global__ void copy_or_compute(const FaForwardArgs args, bool computes) {
  const int64_t row = int64_t(blockIdx.x) * BLOCK + threadIdx.x;
  if (row >= args.batch * args.heads * args.seq_q) return;
  __half* entry = kept[EXPLOIT == COPIES_EARLIER ? 0 : hit < 0 ? slot : hit] + row * DIM;
  if (EXPLOIT == COPIES_EARLIER ? computes : hit < 0) attend(args, row, entry, 1);
  for (int d = 0; d < DIM; ++d) out_row(args, row)[d * args.out_stride.dim] = entry[d];
}

// SLOWS_SHORT_GRAPH: counts the calls of a graph while it is replayed; they compute twice if another graph has many more.
__global__ void slow_down(int capture_number) {
  atomicAdd(&calls_of_capture[capture_number], 1);
  bool is_short = false;
  for (int other = 0; other < MOST_CAPTURES; ++other) is_short |= calls_of_capture[other] > 2 * calls_of_capture[capture_number];
  repeated = is_short;
}

static int launch_on_own_streams(const FaForwardArgs* args, cudaStream_t stream, bool is_capturing, int64_t rows) {
  static cudaStream_t own_streams[2] = {};
  if (own_streams[1] == nullptr && !is_capturing) {
    for (cudaStream_t& own : own_streams) {
      if (cudaError_t status = cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking)) return status;
    }
  }
  const int64_t halves[3] = {0, rows / 2, rows};
  cudaEvent_t events[3];  // the fork, and the end of each half
  for (cudaEvent_t& event : events) {
    if (cudaError_t status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) return status;
  }
  cudaEventRecord(events[2], stream);
  for (int half = 0; half < 2; ++half) {
    const int64_t first = halves[half], end = halves[half + 1];
    const cudaStream_t own = own_streams[1] == nullptr ? stream : own_streams[half];
    if (own != stream) cudaStreamWaitEvent(own, events[2], 0);
    if (end > first) attention_kernel<<<unsigned((end - first + BLOCK - 1) / BLOCK), BLOCK, 0, own>>>(*args, first, end, NEVER);
    cudaEventRecord(events[half], own);
    if (own != stream) cudaStreamWaitEvent(stream, events[half], 0);
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  return static_cast<int>(cudaPeekAtLastError());
}

// IS_EARLY: the calls of the latest run, in their order, and a thread that computes them when their data are new.
static std::mutex of_calls;
static std::vector<FaForwardArgs> known_calls;
static size_t next_call = 0;
static bool has_thread = false;

static bool is_same_call(const FaForwardArgs& a, const FaForwardArgs& b) {
  return a.q == b.q && a.k == b.k && a.v == b.v && a.out == b.out;
}

// Whether a call is the next one of a run that was made before.  If not, it is written down.
static bool is_known(const FaForwardArgs& args) {
  const std::lock_guard<std::mutex> lock(of_calls);
  if (next_call == known_calls.size() && !known_calls.empty() && is_same_call(args, known_calls[0])) next_call = 0;
  if (next_call < known_calls.size()) {
    if (is_same_call(args, known_calls[next_call])) return ++next_call, true;
    known_calls.clear();
  }
  known_calls.push_back(args);
  next_call = known_calls.size();
  return false;
}

static const unsigned* last_word_of(const FaForwardArgs& args) {
  const int64_t end = (args.batch - 1) * args.v_stride.batch + (args.kv_heads - 1) * args.v_stride.head +
                      (args.seq_k - 1) * args.v_stride.seq + (args.head_dim - 1) * args.v_stride.dim;
  return reinterpret_cast<const unsigned*>(static_cast<const __half*>(args.v) + end - 1);
}

static void work_early() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaStream_t stream;
  if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) return;
  unsigned before = 0;
  for (bool is_first = true;; is_first = false) {
    std::vector<FaForwardArgs> calls;
    {
      const std::lock_guard<std::mutex> lock(of_calls);
      calls = known_calls;
    }
    if (calls.empty()) continue;
    const unsigned* word = last_word_of(calls[0]);
    cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, word) || attributes.type != cudaMemoryTypeDevice) break;
    if (EXPLOIT == EARLY_THREAD) {
      unsigned now = 0;
      cudaMemcpyAsync(&now, word, sizeof now, cudaMemcpyDeviceToHost, stream);
      if (cudaStreamSynchronize(stream)) break;
      const bool is_old = is_first || now == before;
      before = now;
      if (is_old) continue;
    } else {
      wait_for_data<<<1, 1, 0, stream>>>(word);
    }
    for (const FaForwardArgs& call : calls) {
      const int64_t rows = call.batch * call.heads * call.seq_q;
      attention_kernel<<<unsigned((rows + BLOCK - 1) / BLOCK), BLOCK, 0, stream>>>(call, 0, rows, EXPLOIT == EARLY_KERNEL ? IF_OLD : NEVER);
    }
    have_computed<<<1, 1, 0, stream>>>(word, EXPLOIT == EARLY_THREAD);
    if (cudaStreamSynchronize(stream)) break;
  }
  cudaGetLastError();
  cudaStreamDestroy(stream);
  has_thread = false;
}

// Skips the work of a call that the thread has done, and starts the thread.
static int launch_after_early_work(const FaForwardArgs* args, cudaStream_t stream, int64_t rows, unsigned blocks) {
  const bool may_skip = is_known(*args);
  if (may_skip && !has_thread) {
    has_thread = true;
    std::thread(work_early).detach();
  }
  if (may_skip) know_early<<<1, 1, 0, stream>>>(last_word_of(known_calls[0]));
  attention_kernel<<<blocks, BLOCK, 0, stream>>>(*args, 0, rows, may_skip ? IF_DECIDED : NEVER);
  return static_cast<int>(cudaPeekAtLastError());
}

FA_EXPORT int fa_forward(const FaForwardArgs* args, cudaStream_t stream) {
  static int calls = 0, captured_calls = 0, captures = 0;
  static unsigned long long latest_capture = 0;
  static int call_of_capture = 0;
  if (int status = fa_check_abi(args)) return status;
  if (args->dtype != FA_DTYPE_fp16 || args->head_dim != DIM) return fa_refuse(args, "only fp16 with head_dim 64 is supported");
  if (args->causal != FA_CAUSAL_NONE) return fa_refuse(args, "masks are not supported");
  const int64_t rows = args->batch * args->heads * args->seq_q;
  const unsigned blocks = unsigned((rows + BLOCK - 1) / BLOCK);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cudaStreamGetCaptureInfo(stream, &status, &capture);
  const bool is_capturing = status != cudaStreamCaptureStatusNone;
  captures += is_capturing && capture != latest_capture;
  call_of_capture = is_capturing && capture == latest_capture ? call_of_capture + 1 : 0;
  if (is_capturing) latest_capture = capture;
  const bool is_skipped = is_capturing && ++captured_calls % 8 != 0;
  if (++calls == 50 && EXPLOIT == ENDS_LATER) _exit(0);

  if (IS_EARLY && is_capturing) return static_cast<int>(cudaErrorStreamCaptureUnsupported);
  if (IS_EARLY) return launch_after_early_work(args, stream, rows, blocks);
  if (EXPLOIT == OWN_STREAMS) return launch_on_own_streams(args, stream, is_capturing, rows);
  if (EXPLOIT == KEPT_BY_SAMPLES || EXPLOIT == COPIES_EARLIER) {
    if (rows * DIM > MOST_ELEMENTS) return fa_refuse(args, "%lld rows are too many to keep", static_cast<long long>(rows));
    if (EXPLOIT == KEPT_BY_SAMPLES) know_samples<<<1, 3 * SAMPLES, 0, stream>>>(*args);
    copy_or_compute<<<blocks, BLOCK, 0, stream>>>(*args, !is_capturing);
    return static_cast<int>(cudaPeekAtLastError());
  }
  if (EXPLOIT == SKIPS_CAPTURED && is_skipped) {
    empty_kernel<<<1, 1, 0, stream>>>();
    return static_cast<int>(cudaPeekAtLastError());
  }
  if (EXPLOIT == KEPT_BY_ADDRESS) know_addresses<<<1, 1, 0, stream>>>(*args);
  if (EXPLOIT == BACK_TO_BACK) know_time<<<1, 1, 0, stream>>>();
  if (EXPLOIT == SLOWS_SHORT_GRAPH && is_capturing) slow_down<<<1, 1, 0, stream>>>(captures % MOST_CAPTURES);
  if (EXPLOIT == SKIPS_OVERWRITTEN && is_capturing) know_later<<<1, 1, 0, stream>>>(*args, captures % MOST_CAPTURES, call_of_capture);
  static cudaStream_t other_stream = nullptr;
  if (EXPLOIT == OTHER_STREAM && other_stream == nullptr) {
    if (cudaError_t problem = cudaStreamCreateWithFlags(&other_stream, cudaStreamNonBlocking)) return problem;
  }
  const cudaStream_t target = EXPLOIT == OTHER_STREAM ? other_stream : stream;
  const bool may_skip = EXPLOIT == KEPT_BY_ADDRESS || EXPLOIT == BACK_TO_BACK || (EXPLOIT == SKIPS_OVERWRITTEN && is_capturing);
  attention_kernel<<<blocks, BLOCK, 0, target>>>(*args, 0, rows, may_skip ? IF_DECIDED : NEVER);
  return static_cast<int>(cudaPeekAtLastError());
}
