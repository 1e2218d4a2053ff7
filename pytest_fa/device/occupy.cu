// Keeps multiprocessors busy for `cycles` clock cycles, so that the blocks of another kernel share the remaining ones.
//
// It is launched with the largest shared memory per block.  A block that uses shared memory therefore cannot run on the
// same multiprocessor at the same time.
extern "C" __global__ void occupy(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
