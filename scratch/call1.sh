export TRITON_CACHE_DIR=/tmp/robust_cache
ls /usr/local/cuda*/bin/compute-sanitizer /opt/nvidia/*/compute-sanitizer 2>/dev/null; which compute-sanitizer; nvidia-smi -L | head -2
T="python3 -m torch.distributed.run --nproc-per-node=2"
(TRITON_DIST_NVIDIA_HEAP=nvshmem timeout 45 $T --master-port 29811 tutorials/ascend/01-ascend-allgather-gemm.py > $OUT/nvshmem.txt 2>&1; echo rc=$? >> $OUT/nvshmem.txt) &
timeout 60 python3 -m pytest -q -x --no-header -p no:cacheprovider python/triton_dist/test/shmem/test_kernel_waits_two_gpus.py > $OUT/waits.txt 2>&1; tail -60 $OUT/waits.txt; echo "== waits $SECONDS s"
wait; echo "== nvshmem"; tail -25 $OUT/nvshmem.txt
s=$SECONDS; timeout 20 $T --master-port 29812 scratch/hang_exit.py > $OUT/hang.txt 2>&1; echo "rc=$? $((SECONDS-s)) s"; tail -12 $OUT/hang.txt
TRITON_DIST_WAIT_TIMEOUT=1 timeout 40 $T --master-port 29813 scratch/two_streams.py 50 > $OUT/streams.txt 2>&1; echo "rc=$? $SECONDS s"; grep -v "^\[ERROR\|^  rank" $OUT/streams.txt | tail -30
echo "== end $SECONDS s"
