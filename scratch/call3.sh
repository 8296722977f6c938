export TRITON_CACHE_DIR=/tmp/robust_cache PYTHONUNBUFFERED=1
P="python3 -u -m pytest -v --no-header -p no:cacheprovider --durations=5"
( TRITON_CACHE_DIR=/tmp/robust_cache_s timeout 158 python3 -u benchmarks/sanitize.py --seconds 135 --log $OUT/memcheck.log > $OUT/memcheck.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/memcheck.txt ) & A=$!
( timeout 100 $P python/triton_dist/test/shmem/test_kernel_waits_two_gpus.py > $OUT/waits.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/waits.txt
  TRITON_DIST_NVIDIA_HEAP=nvshmem timeout 80 $P python/triton_dist/test/ascend > $OUT/nvshmem.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/nvshmem.txt ) & B=$!
( timeout 150 $P -k "two_streams or fit_together" python/triton_dist/test/kernels/test_cuda_graphs.py > $OUT/streams.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/streams.txt ) & C=$!
while [ $SECONDS -lt 160 ] && ( kill -0 $A || kill -0 $B || kill -0 $C ) 2>/dev/null; do sleep 1; done
for f in memcheck waits nvshmem streams; do echo "=== $f"; tail -60 $OUT/$f.txt | cut -c1-260; done
echo "=== memcheck.log"; head -c 3000 $OUT/memcheck.log; echo "== end $SECONDS s"
