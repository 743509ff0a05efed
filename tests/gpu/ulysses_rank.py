"""One rank of test_ulysses.py, started by torchrun: rank 0 prints a line of JSON for each comparison."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX

from kimi_bridge.patches import transformers_ulysses
from tests.sequence_parallel import scenarios

KINDS = [("plain", 2048), ("plain", 2037), ("packed", 2037), ("right", 1001)]


def main() -> None:
    device = f"cuda:{dist.get_node_local_rank(0) % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device(device))
    flash = FLASH_ATTENTION_COMPATIBILITY_MATRIX.items()
    installed = [f"flash_attention_{n}" for n, facts in flash if facts["general_availability_check"]()]
    for implementation in ["sdpa", *installed]:
        for kind, length in KINDS:
            arguments = {"kind": kind, "length": length, "implementation": implementation}
            found = scenarios.half_precision(None, **arguments, device=device)
            transformers_ulysses.undo()
            if dist.get_rank() == 0:
                print(json.dumps(arguments | found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
