// Fill the shared memory of every multiprocessor with one bit pattern.
//
// A block takes all the shared memory a block may have, so a multiprocessor holds one block at a time, and a grid of as
// many blocks as there are multiprocessors puts one on each.  What a kernel finds in shared memory that it did not write
// is then this pattern, not zeros or a lucky remainder of its own last launch.
extern "C" __global__ void poison_smem(unsigned pattern, unsigned words, unsigned* multiprocessor_of_block /* or null */) {
  extern __shared__ volatile unsigned smem[];
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) smem[i] = pattern;
  if (multiprocessor_of_block != nullptr && threadIdx.x == 0) {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    multiprocessor_of_block[blockIdx.x] = id;
  }
}
