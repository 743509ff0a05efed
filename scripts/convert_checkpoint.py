#!/usr/bin/env python3
"""Import and export of checkpoints under torchrun.

torchrun --nproc_per_node 8 scripts/convert_checkpoint.py import --hf-model moonshotai/Kimi-K2.5 \
    --megatron-path /ckpt/k25 --ep 8
torchrun --nproc_per_node 8 scripts/convert_checkpoint.py export --hf-model moonshotai/Kimi-K2.5 \
    --megatron-path /ckpt/k25 --hf-path /ckpt/k25-hf --tp 4 --ep 2
"""

from kimi_bridge.cli import main

# Megatron's checkpoint writer starts processes, which import this file again.
if __name__ == "__main__":
    main()
