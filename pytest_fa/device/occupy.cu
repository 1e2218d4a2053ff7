// Keep some multiprocessors busy for a while, so that another kernel's blocks crowd onto the rest.
//
// A block takes all the shared memory a block may have: where one runs, nothing that needs shared memory runs beside it.
extern "C" __global__ void occupy(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}
