"""Proves that rows of several samples give a model's own log-probs, before anything is trained.

A decoder may look along the whole row in a way that packing does not reproduce: a recurrent state, a convolution, a
bias by position. So a model of a family that the tests do not cover computes the log-probs of a few samples twice:
packed into one row, and each alone with the attention of transformers. If these differ, the samples are tried as lines
of their own, padded on the right, where a causal model does not look. A small model with the same settings and a layer
of each kind does, because windows are then short enough to matter.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rollover.errors import ModelError
from rollover.hf.config import MODEL_CLASSES
from rollover.trainer.attention import PACKED_ATTENTION
from rollover.trainer.experts import RowRoutes, prepare_experts
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.packing import PackedRow, TrainingSample, pack

BOUND = 1e-3
"""Largest difference in nats. Rounding gives up to 3e-4, and the mildest fault that is known 0.04."""
_WINDOW = 8
_VOCABULARY = 512
_LENGTHS = ((5, 22), (5, 9), (7, 13), (1, 1))
"""Tokens of prompt and response of the samples. The first two share their prompt; the longest exceeds the window."""


Layout = Literal["packed", "padded"]
"""Samples share a row, or each is a line of its own."""


def attention_of(layout: Layout) -> str | None:
    """Return the attention of transformers with which a model runs rows; ``None`` for the model's own."""
    return PACKED_ATTENTION if layout == "packed" else None


def prove(config: Any) -> Layout:
    """Prove that a model of this config can be trained, and return how.

    Args:
        config: of transformers.

    Raises:
        ModelError: packed rows and padded ones differ from separate samples, or the model takes neither.
    """
    values = config.to_dict()
    has_windows = values.get("use_sliding_window") or {*(values.get("layer_types") or ())} - {"full_attention"}
    if config.model_type in MODEL_CLASSES and not has_windows:
        return "packed"
    found = []
    for layout in get_args(Layout):
        try:
            difference, token = largest_difference(_small(config), layout)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            found.append(f"it does not take {layout} rows ({reason})")
            continue
        if difference <= BOUND:
            return layout
        found.append(
            f"log-probs of {layout} rows differ from log-probs of separate samples by {difference:.2g} nats at token"
            f" {token} of a response"
        )
    reasons = ", and ".join(found)
    raise ModelError(f"model_type {config.model_type!r} cannot be trained: {reasons}; {BOUND:g} nats are allowed")


@torch.no_grad()
def prove_routes(config: Mapping[str, Any]) -> None:
    """Prove that a model of this ``config.json`` can be given the routes that it took, which changes nothing. Raises
    ``ModelError``."""
    from transformers import AutoConfig

    shape = AutoConfig.for_model(**config)
    model = _model(_small(shape), prove(shape))
    row, _ = _row()
    taken: dict[int, Tensor] = {}
    model.routes.taken = taken
    own = response_logprobs(model, row, 1.0)
    model.routes.taken = None
    ids_NS = torch.cat([taken[number] for number in sorted(taken)], dim=1)
    known_N = torch.ones(len(ids_NS), dtype=torch.bool)
    again = response_logprobs(model, replace(row, routes=RowRoutes(bytes_NB=ids_NS.byte(), is_known_N=known_N)), 1.0)
    if not torch.equal(own, again):
        raise ModelError(
            f"routes of model_type {config['model_type']!r} cannot be replayed: set trainer.replay_routes = false"
        )


@torch.no_grad()
def largest_difference(config: Any, layout: Layout) -> tuple[float, int]:
    """Return the largest difference between the log-probs of samples together and alone, in nats, and the place of its
    token in its response."""
    model = _model(config, layout)
    row, samples = _row()
    packed = torch.empty(len(row.token_T)).index_copy_(0, row.token_T, response_logprobs(model, row, 1.0))
    if layout == "packed":
        model.set_attn_implementation("eager")
    alone = torch.cat([_alone(model, sample) for sample in samples])
    place = int((packed - alone).abs().nan_to_num(torch.inf).argmax())
    places = [place for sample in samples for place in range(len(sample.response_ids))]
    return float((packed - alone).abs()[place]), places[place]


def _model(config: Any, layout: Layout) -> Any:
    """Return a model with peaked attention."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention_of(layout), dtype=torch.float32
        )
    model.eval()
    model.is_padded = layout == "padded"
    prepare_experts(model)
    for key, weight in model.named_parameters():
        if any(part in key for part in ("q_proj", "k_proj", "qkv", "query_key_value")):
            weight.data.mul_(3)
    return model


def _row() -> tuple[PackedRow, list[TrainingSample]]:
    """Return all samples in one row, and one by one."""
    draw = random.Random(0)
    prompts: dict[int, tuple[int, ...]] = {}
    samples = []
    for num_prompt, num_response in _LENGTHS:
        prompt = prompts.setdefault(num_prompt, tuple(draw.randrange(3, _VOCABULARY) for _ in range(num_prompt)))
        response = tuple(draw.randrange(3, _VOCABULARY) for _ in range(num_response))
        samples.append(TrainingSample(prompt_ids=prompt, response_ids=response))
    (row,) = pack(samples, 1000)
    return row, samples


def _alone(model: Any, sample: TrainingSample) -> Tensor:
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    first = len(sample.prompt_ids)
    found: Tensor = logprobs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
    return found


def _small(config: Any) -> Any:
    """Return the config of a small model with a layer of each kind and short windows."""
    small = copy.deepcopy(config)
    kinds = list(getattr(config, "layer_types", None) or ())
    layers = [kinds.index(kind) for kind in dict.fromkeys(kinds)] or [0]
    layers = sorted({*layers, *range(min(2, config.num_hidden_layers))})
    small.num_hidden_layers = len(layers)
    if kinds:
        small.layer_types = [kinds[layer] for layer in layers]
    for key in ("sliding_window", "attention_chunk_size"):
        if getattr(small, key, None):
            setattr(small, key, _WINDOW)
    _shrink_experts(small)
    small.vocab_size = _VOCABULARY
    small.initializer_range = 0.1
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, key, None)
    return small


def _shrink_experts(small: Any) -> None:
    """Leave few and narrow experts, of which tokens choose as many as before, in all layers but the first at most."""
    fewest = max(16, 2 * (getattr(small, "n_group", None) or 0), 2 * (getattr(small, "num_experts_per_tok", None) or 0))
    most = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), fewest),
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    }
    for key, value in most.items():
        if isinstance(getattr(small, key, None), int):
            setattr(small, key, min(value, getattr(small, key)))
