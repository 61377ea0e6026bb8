"""One folder an op. Beside them is what several ops take: matrices of 4 and 8 bits (`quantized`), and formats of K and
V in 8 bits (`kv_format`)."""
