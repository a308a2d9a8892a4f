"""The embedded engine: continuous batching over a paged key-value cache, in this process.

``config``, the bookkeeping (``cache``, ``scheduler``) and the guesses at next tokens (``drafts``) are torch-free.
``core`` is the synchronous engine and ``engine`` its asyncio shell; what is to be computed they ask of a ``compute``:
in PyTorch's operations (``model``, ``rotary``, ``prefill``, ``decode``, ``sampler`` over ``pages``), compiled for this
CPU (``native``) or recorded on a GPU (``graphs``).
"""

from rollover.engine.embedded.config import EmbeddedConfig

__all__ = ["EmbeddedConfig"]
