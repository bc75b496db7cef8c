# shellcheck shell=bash
# Your cluster's settings, the one place for them; sourced on the first node, passed on to all.
#
# export CONTAINER_IMAGE=/images/megatron_opo.sqsh
# export CONTAINER_MOUNTS=/data:/data,/models:/models
# module load cuda/13.0

# Network. What NCCL finds by itself is right on most clusters; set only what it gets wrong.
# export NCCL_SOCKET_IFNAME=ib0        # which interface, where a node has several
# export GLOO_SOCKET_IFNAME=ib0        # the same for host-memory traffic
# export NCCL_IB_HCA=mlx5              # which InfiniBand adapters
# export NCCL_DEBUG=WARN
# export UCX_NET_DEVICES=mlx5_0:1

# A collective that fails ends the rank with an error, instead of hanging.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
