#!/usr/bin/env python3
"""All that this library promises, on one GPU or several, from a checkpoint with the real widths.

    python scripts/gpu_check.py --markdown check.md --json check.json
    python scripts/gpu_check.py --checkpoint TRUNCATED --nproc 2

Run it with the trainer's Python (Megatron); vLLM runs in a process of its own, by `--engine-python`. The
first start of vLLM on a machine compiles kernels for minutes, meanwhile the trainer works.
"""

import sys
from pathlib import Path

# Behind the installed package: kimi_bridge.patches is no folder inside of kimi_bridge here.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.gpu.check.command import main

if __name__ == "__main__":
    sys.exit(main())
