export TRITON_CACHE_DIR=/tmp/robust_cache PYTHONUNBUFFERED=1
P="python3 -u -m pytest -v --no-header -p no:cacheprovider --durations=5 --tb=short"
T="python3 -m torch.distributed.run --nproc-per-node=2"
timeout 48 $P python/triton_dist/test/shmem/test_kernel_waits_two_gpus.py > $OUT/waits.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/waits.txt; tail -50 $OUT/waits.txt | cut -c1-240
timeout 45 $P -k "two_streams or fit_together" python/triton_dist/test/kernels/test_cuda_graphs.py > $OUT/streams.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/streams.txt; tail -30 $OUT/streams.txt | cut -c1-240
( mkdir -p $OUT/mem; TRITON_CACHE_DIR=/tmp/robust_cache_s timeout 88 python3 -u benchmarks/sanitize.py --seconds 62 --folder $OUT/mem > $OUT/memcheck.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/memcheck.txt ) & A=$!
export TRITON_DIST_NVIDIA_HEAP=nvshmem
( NVSHMEM_DEBUG=INFO timeout 30 python3 scratch/nvshmem_probe.py > $OUT/nv1.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/nv1.txt
  timeout 30 $T --master-port 29831 scratch/nvshmem_probe.py > $OUT/nv2.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/nv2.txt
  timeout 70 $P python/triton_dist/test/ascend/test_put_get.py > $OUT/nv3.txt 2>&1; echo "rc=$? $SECONDS s" >> $OUT/nv3.txt
) & B=$!
while [ $SECONDS -lt 176 ] && ( kill -0 $A || kill -0 $B ) 2>/dev/null; do sleep 1; done
for f in memcheck nv1 nv2 nv3; do echo "=== $f"; tail -40 $OUT/$f.txt | cut -c1-260; done; echo "== end $SECONDS s"
