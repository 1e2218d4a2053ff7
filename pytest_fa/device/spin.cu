// Waits for `cycles` clock cycles.  It can be launched with any grid, block, cluster and shared memory size.
//
// With 0 cycles it is an empty kernel, whose time is the launch overhead of every kernel with the same launch
// configuration.
extern "C" __global__ void spin(long long cycles) {
  if (cycles <= 0) return;
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
