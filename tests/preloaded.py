"""What the server imports from which the processes of tests are forked: all that a run needs, its CPU kernels compiled.

A run compiles them each time it starts, for nothing built is kept on disk. Here they are compiled once, for the model
and the block sizes of the tests, and inherited.
"""

from contextlib import suppress

import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import rollover.run.session
import rollover.swarm.coordinator.open
import rollover.swarm.worker.joining
import rollover.trainer.attention
import rollover.trainer.rank
import rollover.trainer.sft  # noqa: F401
from rollover.engine import sampling_check
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.native import compiled
from rollover.errors import EngineError
from rollover.run.building import restore

restore({"model": {"path": "model"}}, "a run like any other")  # what pydantic finds out of the settings is kept
sampling_check.MAX_DRAWS = 1  # as in the fixture ``experiment``
with suppress(EngineError):  # there is no compiler: a run falls back as well
    for block_size in (4, EmbeddedConfig().block_size_tokens):
        compiled(8, block_size, 2)
