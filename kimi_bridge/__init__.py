"""kimi-bridge: Kimi K2.5 and Kimi-VL checkpoints into Megatron and back to vLLM, bit for bit.

Importing this package costs nothing: Megatron, vLLM and Ray are imported by the subpackages
that need them (`kimi_bridge.megatron`, `kimi_bridge.inference`).
"""

__version__ = "0.1.0"
