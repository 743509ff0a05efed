"""The INT4 number format: codes, scales and the arithmetic that training and serving share."""

from kimi_bridge.int4.codec import Int4Weight, dequantize, pack, quantize, requantize, served_values, unpack
from kimi_bridge.int4.fake_quant import fake_quantize, fake_quantize_all
from kimi_bridge.int4.scheme import KIMI_QAT, RTN, Int4Scheme

__all__ = [
    "KIMI_QAT",
    "RTN",
    "Int4Scheme",
    "Int4Weight",
    "dequantize",
    "fake_quantize",
    "fake_quantize_all",
    "pack",
    "quantize",
    "requantize",
    "served_values",
    "unpack",
]
