"""The parts that C++ kernels share: headers, threads, their build (`library`), calls (`native`) and recorded calls
(`tape`), and the memory of packed weights (`pages`). Imports no op."""
