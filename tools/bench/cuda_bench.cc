#include "device/cuda/bench.h"

int main(int argc, char** argv) { return lockstep::cuda::bench_main(argc, argv); }
