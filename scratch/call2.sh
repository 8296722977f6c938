export TRITON_CACHE_DIR=/tmp/robust_cache
(TRITON_DIST_NVIDIA_HEAP=nvshmem timeout 60 python3 -m pytest -q --no-header -p no:cacheprovider python/triton_dist/test/ascend > $OUT/nvshmem.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/nvshmem.txt) &
timeout 46 python3 benchmarks/sanitize.py --seconds 35 --log $OUT/memcheck.log > $OUT/memcheck.txt 2>&1; tail -26 $OUT/memcheck.txt; echo "== memcheck $SECONDS s"
timeout 25 python3 -m pytest -q --no-header -p no:cacheprovider -k "flags or busy" python/triton_dist/test/shmem/test_kernel_waits_two_gpus.py > $OUT/waits.txt 2>&1; tail -25 $OUT/waits.txt | cut -c1-300; echo "== waits $SECONDS s"
timeout 40 python3 -m pytest -q --no-header -p no:cacheprovider -k "two_streams or fit_together" python/triton_dist/test/kernels/test_cuda_graphs.py > $OUT/streams.txt 2>&1; tail -25 $OUT/streams.txt | cut -c1-300; echo "== streams $SECONDS s"
tail -8 $OUT/nvshmem.txt
