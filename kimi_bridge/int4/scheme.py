"""How a float weight becomes INT4: the group size, the divisor of amax, and the smallest code."""

from dataclasses import dataclass

from kimi_bridge.errors import Int4Error

Q_MAX = 7
Q_MIN = -8
CODES_PER_WORD = 8


@dataclass(frozen=True)
class Int4Scheme:
    """One quantization convention: `scale = amax / scale_divisor`, codes in `q_min..7`.

    A checkpoint's quantization_config names the group size alone; the divisor and the smallest code
    are known only to whoever wrote the checkpoint.
    Raises Int4Error for a group size that is no positive multiple of 8, a divisor that is not a finite
    number of at least 1 (a smaller one could overflow the scale), or a q_min outside -8..-1.
    """

    group_size: int = 32
    scale_divisor: float = 7.0
    q_min: int = -7

    def __post_init__(self) -> None:
        if self.group_size < CODES_PER_WORD or self.group_size % CODES_PER_WORD:
            raise Int4Error(
                f"group_size is {self.group_size}: use a positive multiple of {CODES_PER_WORD}, such as 32."
            )
        if not 1.0 <= self.scale_divisor < float("inf"):
            raise Int4Error(
                f"scale_divisor is {self.scale_divisor}: use a finite number of at least 1, such as 7.0."
            )
        if not Q_MIN <= self.q_min < 0:
            raise Int4Error(
                f"q_min is {self.q_min}: a signed 4-bit code needs {Q_MIN}..-1, such as -7 or -8."
            )

    @property
    def q_max(self) -> int:
        """The largest code, 7 in every convention."""
        return Q_MAX


KIMI_QAT = Int4Scheme(32, 7.0, -7)
"""Moonshot's quantization-aware training: amax/7 and symmetric codes."""

RTN = Int4Scheme(32, 7.5, -8)
"""Round to nearest as compressed-tensors calibrates it: amax/7.5 and all 16 codes."""
