"""The errors this library raises on purpose: one sentence with the cause and the cure.

The command line prints their text alone and exits with 1; anything else is a bug and shows its
traceback.
"""


class KimiBridgeError(RuntimeError):
    """Base of every error that a user can act on.

    `shared` is set where every rank of a distributed job raises it, so that it is printed once.
    """

    shared = False


class CheckpointError(KimiBridgeError):
    """A checkpoint folder that is not what it claims to be. Names the tensor and the file."""


class Int4Error(KimiBridgeError, ValueError):
    """A tensor that the INT4 format cannot hold: shape, dtype, NaN or Inf."""


class MultimodalError(KimiBridgeError, ValueError):
    """An image, reference or rollout that cannot be trained on as it is. Names the sample and the image."""
