"""`python -m kimi_bridge`, and `torchrun -m kimi_bridge` for the jobs that run on several processes."""

from kimi_bridge.cli import main

# Megatron's checkpoint writer starts processes, which import this module again.
if __name__ == "__main__":
    main()
