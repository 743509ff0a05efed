"""A worker process: `python -m kimi_bridge.conversion.worker`, pieces in on stdin, replies out on stdout.

A process of its own program and not of multiprocessing: it does not import the caller's script again, and
it ends by itself when the caller is gone.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import NoReturn

from kimi_bridge.conversion.execute import answer

READY = b"r"


def main() -> NoReturn:
    """Answers pieces until stdin ends."""
    # Whatever else is printed goes to stderr: stdout is for replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    replies.write(READY)
    replies.flush()
    while True:
        try:
            piece = pickle.load(sys.stdin.buffer)
        except EOFError:
            # Taking Python and torch down in order takes a third of a second, for nothing.
            os._exit(0)
        pickle.dump(answer(piece), replies)
        replies.flush()


if __name__ == "__main__":
    main()
