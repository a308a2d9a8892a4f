"""The embedded engine: continuous batching over a paged key-value cache, in this process.

``config`` and the bookkeeping are torch-free: ``block_manager`` (which cache block holds what, and what is evicted),
``scheduler`` (who runs), ``sequence`` (one call). ``core`` is the synchronous engine, ``core_loop`` says when it runs
and ``engine`` is its asyncio shell. A ``model_runner`` holds weights and ``kv_cache`` and computes: in PyTorch's
operations (``model``, ``rotary``, ``sampler``), compiled for this CPU (``native``) or recorded on a GPU (``graphs``).
"""

from rollover.engine.embedded.config import EmbeddedConfig

__all__ = ["EmbeddedConfig"]
