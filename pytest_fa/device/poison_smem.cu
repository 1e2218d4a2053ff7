// Fills the shared memory of every multiprocessor with one bit pattern.
//
// It is launched with the largest shared memory per block and with one block per multiprocessor, so every
// multiprocessor runs exactly one block.  A kernel that reads shared memory before writing it then reads this pattern,
// not zeros and not the values that its own previous launch left there.
extern "C" __global__ void poison_smem(unsigned pattern, unsigned words, unsigned* multiprocessor_of_block /* may be null */) {
  extern __shared__ volatile unsigned smem[];
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) smem[i] = pattern;
  if (multiprocessor_of_block != nullptr && threadIdx.x == 0) {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    multiprocessor_of_block[blockIdx.x] = id;
  }
}
