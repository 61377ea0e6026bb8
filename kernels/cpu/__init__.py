"""The parts that C++ kernels share: headers, threads, their build (`native`), and recorded calls (`tape`)."""
