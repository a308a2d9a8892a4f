"""The words between a server of the embedded engine and its clients: bodies of calls, answers, events. Torch-free.

====  =========================  ===========================  ==============================================
verb  path                       body                         answer
====  =========================  ===========================  ==============================================
GET   ``/health``                                             ``{}``
GET   ``/info``                                               ``ServerInfo``
POST  ``/generate``              ``GenerateRequest``          a stream of ``TokensEvent``
POST  ``/abort``                 ``AbortBody``                ``{}``, when the calls have ended
POST  ``/pause``, ``/resume``    ``{}``                       ``{}``
POST  ``/sleep``                 ``{}``                       ``{}``, when weights and cache are given back
POST  ``/load_weights``          ``LoadBody``                 ``{}``
POST  ``/update_weight_version`` ``LabelBody``                ``{}``
POST  ``/group/join``            ``GroupAddress``             ``{}``, when all have joined
POST  ``/group/begin``           ``{}``                       ``{}``
POST  ``/group/receive``         ``Announcement``             ``{}``, when the tensors are in their places
POST  ``/group/finish``          ``Reception``                ``{}``
POST  ``/group/leave``           ``{}``                       ``{}``
====  =========================  ===========================  ==============================================

Bodies are JSON and say so. A refusal has a status of 400 and more and ``{"error": {"message": ...}}``; a stream that
fails ends with such an event.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollover.engine.base import GenerateRequest
from rollover.engine.servers.http.answer import Answer, Count, Event, Shown, TokenId
from rollover.types import FinishReason

GENERATE_REQUEST = TypeAdapter(GenerateRequest)
"""Reads and writes the body of ``/generate``: the fields of a ``GenerateRequest`` by name."""


class ServerInfo(Answer):
    """Describes a server: what it serves, how, and which weights it has."""

    service: Literal["rollover embedded engine"]
    model_path: Shown
    vocab_size: Count
    max_context_tokens: Annotated[int, Field(ge=1, lt=1 << 53)]
    max_running: Count
    number_format: Shown
    """Number format of weights and arithmetic, by torch's name."""
    prefill_tokens_per_iteration: float
    """Same as in ``Capabilities``."""
    label: str
    """Label of the weights in force."""
    num_calls: Count = 0
    """Calls that are open."""


class TokensEvent(Event):
    """Tokens of one call that weights of one label sampled; the last event of a call has a ``finish_reason``."""

    token_ids: list[TokenId]
    logprobs: list[float]
    label: str
    """Label of the weights that sampled these tokens."""
    kv_label: str
    """Label of the oldest weights that computed the cache these tokens attended to."""
    finish_reason: FinishReason | None = None
    num_prefilled_tokens: Count = 0
    """Response tokens prefilled to start the call; in its first event only."""
    kept: str = ""
    """Kept sets of the tokens, if the request wants them: ``join_bytes`` in base64."""
    routes: str = ""
    """Routes of the tokens in the same form."""


class _Body(BaseModel):
    """A body of a call, whose fields are of exactly their type."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class EmptyBody(_Body):
    """Says nothing more than the path does."""


class AbortBody(_Body):
    """Names the calls to end."""

    request_ids: list[str] = Field(default_factory=list)
    all: bool = False
    """True to end every call, whoever has opened it."""


class LoadBody(_Body):
    """Names new weights, and says what becomes of the cache."""

    folder: str
    """A folder of a Hugging Face model or of adapters, by its path on the server's machine."""
    base: str | None = None
    """The Hugging Face folder of the model that adapters are to be merged into."""
    label: str
    keeps_kv: bool
    """Running and parked calls keep their cache."""


class GroupAddress(_Body):
    """Tells where a process group meets, and which place in it the server takes."""

    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)]
    """The server's rank; who sends is rank 0."""
    world_size: Annotated[int, Field(ge=2)]
    group_name: str
    backend: Literal["gloo", "nccl"]


class Announcement(_Body):
    """Announces tensors that rank 0 broadcasts next, in this order."""

    names: list[str]
    dtypes: list[Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")]]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    is_flat: bool = False
    """They come as one tensor of bytes, one after the other."""


class Reception(_Body):
    """Ends a reception: all tensors have come."""

    label: str
    keeps_kv: bool


class LabelBody(_Body):
    """Renames the weights in force."""

    new_version: str
