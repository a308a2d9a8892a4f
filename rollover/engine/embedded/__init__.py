"""The embedded engine: continuous batching over a paged key-value cache, in this process, in PyTorch.

``config`` and the bookkeeping (``cache``, ``scheduler``) are torch-free; ``model``, ``rotary``, ``prefill``, ``decode``
and ``sampler`` compute over ``pages``, with the arithmetic of ``ops`` or, on a CPU, of ``native``; ``core`` is the
synchronous engine and ``engine`` its asyncio shell.
"""

from rollover.engine.embedded.config import EmbeddedConfig

__all__ = ["EmbeddedConfig"]
