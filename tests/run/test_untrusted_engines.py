"""Engines that sample from something else than they say: servers among servers that do not lie, with real sockets and
real weights, and the embedded engine where it reads a model folder otherwise than the trainer does."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollover import cli
from rollover.batch import WasteCause
from rollover.hf import architecture
from rollover.hf.rope import Rope
from tests import runs
from tests.engine.servers.model_server import ModelServer, serving
from tests.runs import Say

CONTEXT = 80
SAMPLES = 32
"""In a batch: 8 prompts, 4 samples each."""


class Liar(ModelServer):
    """``how`` it computes, for the tokens whose place in its output ``lies_at`` names; honestly elsewhere.

    ``reloaded`` is under weights that somebody else has loaded, ``bfloat16`` and ``int8`` are coarser formats,
    ``greedy`` reports true log-probs of the most probable tokens.
    """

    def __init__(self, folder: Path, how: str, *, first: bool, every: int = 1) -> None:
        super().__init__(folder, context=CONTEXT)
        self.how, self.first, self.every = how, first, every
        self.lies = True
        self._wrong: dict[str, Any] = {}
        """What it computes with where it lies, by the weights that it was given last."""

    def lies_at(self, decoded: int) -> bool:
        return self.lies and (self.first or decoded > 0) and decoded % self.every == self.every - 1

    def logits(self, ids: list[int], decoded: int) -> torch.Tensor:
        honest = self._model
        if self.lies_at(decoded) and self.how != "greedy":
            if self.weights not in self._wrong:
                self._wrong = {self.weights: self._coarse()}
            self._model = self._wrong[self.weights]
        try:
            return super().logits(ids, decoded)
        finally:
            self._model = honest

    def _coarse(self) -> Any:
        model = copy.deepcopy(self._model)
        if self.how == "bfloat16":
            return model.bfloat16()
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if self.how == "reloaded":
                parameter.data += 0.03 * torch.randn(parameter.shape, generator=generator)
            elif parameter.dim() == 2:
                scale = parameter.data.abs().amax(1, keepdim=True) / 127
                parameter.data = (parameter.data / scale).round() * scale
        return model

    def draw(self, logits: torch.Tensor, *, temperature: float, seed: int) -> tuple[int, float]:
        token, logprob = super().draw(logits, temperature=temperature, seed=seed)
        if self.how == "greedy":
            token = int(logits.argmax())
            logprob = float(torch.log_softmax(logits / temperature, -1)[token])
        return token, logprob


@contextmanager
def serving_all(*servers: ModelServer) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(server)) for server in servers]


def honest(experiment: Path) -> ModelServer:
    return ModelServer(experiment / "model", context=CONTEXT)


def train(urls: list[str], *args: str) -> int:
    """Two steps; a batch has all samples that were sent out, so each of three servers has its share in it."""
    engine = ["--engine.kind", "vllm", "--engine.urls", json.dumps(urls), "--engine.max_running", "24"]
    rollout = ["--rollout.strategy", "sync", "--rollout.rollout_batch_size", "8", "--rollout.group_size", "4"]
    rollout += ["--rollout.max_new_tokens", "30"]
    return cli.main(["train", "run.toml", "--run-dir", "out", "--steps", "2", *engine, *rollout, *args])


def engines_of(batch: Any) -> set[str]:
    return {s.engine for t in batch.trajectories for s in t.segments if s.token_ids}


@pytest.mark.parametrize(
    ("how", "remedy"),
    [("bfloat16", "--dtype float32, without quantisation"), ("greedy", "this looks like greedy decoding")],
)
def test_the_third_of_three_servers_is_looked_at_before_the_first_batch(
    how: str, remedy: str, experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = honest(experiment), honest(experiment), Liar(experiment / "model", how, first=True)
    with serving_all(*servers) as urls:
        assert train(urls) == 2
    error = capsys.readouterr().err
    assert urls[2] in error and remedy in error
    assert urls[0] not in error and urls[1] not in error


@pytest.mark.parametrize(("how", "every"), [("reloaded", 5), ("int8", 1)])
def test_a_liar_that_its_proof_does_not_show_is_found_within_a_batch(
    how: str, every: int, experiment: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A proof looks at the first token of a call; these lie later, a reload by somebody else in 20 % of the tokens."""
    liar = Liar(experiment / "model", how, first=False, every=every)
    with serving_all(honest(experiment), honest(experiment), liar) as urls, caplog.at_level(logging.WARNING):
        assert train(urls) == 0
    out = Path("out")
    batches = runs.batches(out)
    assert sum(len(g.trajectories) for g in batches[0].groups) == SAMPLES
    assert engines_of(batches[0]) == {*urls}
    assert all(engines_of(batch) <= {*urls[:2]} for batch in batches[1:]), "found after one batch"
    warnings = [r.getMessage() for r in caplog.records if "taken out" in r.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith(f"{urls[2]} is taken out: the log-probs it reported of")
    assert "nats from the trainer's" in warnings[0] and "--dtype float32" in warnings[0]
    first = runs.rows(out)[0]
    assert first[f"drift/{urls[2]}"] > 0.002
    assert max(row[f"drift/{url}"] for row in runs.rows(out) for url in urls[:2] if f"drift/{url}" in row) < 1e-4


def test_a_single_liar_ends_the_run_until_it_is_mended(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    liar = Liar(experiment / "model", "bfloat16", first=False)
    with serving(liar) as url:
        assert train([url], "--rollout.strategy", "april", "--rollout.strategy.over_sampling_batch_size", "12") == 2
        error = capsys.readouterr().err
        assert "no engine is left whose log-probs can be trusted" in error and "--dtype float32" in error
        ledger = runs.ledger(Path("out"))
        assert ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE] > 0
        assert not any(s.num_tokens for g in ledger.unconsumed() for s in g.samples), "none of it waits to be trained"
        liar.lies = False
        assert cli.main(["train", "--resume", "out"]) == 0
    assert runs.ledger(Path("out")).next_step == 2


def test_a_wrong_embedded_engine_ends_the_run(experiment: Path, refused: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "read_rope", lambda keys, head_dim, **_: Rope((1.0,) * (head_dim // 2), 1.0))
    error = refused("train", "run.toml", "--run-dir", "out")
    assert "the embedded engine does not sample from the trainer's policy" in error
    assert "engine.kind 'vllm'" in error
    assert not runs.batches(Path("out"))


def test_a_folder_whose_config_ties_two_matrices_is_trained_as_one_policy(experiment: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(experiment / "model", tmp_path / "two")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    args = ["--model.path", str(folder), "--deterministic", "true", "--steps", "2"]
    assert cli.main(["train", "run.toml", "--run-dir", "out", *args]) == 0
    assert max(row["drift"] for row in runs.rows(Path("out")) if "drift" in row) < 1e-4
    written = load_file(Path("out/checkpoints/step_2/model.safetensors"))
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])


def test_a_proof_leaves_no_trace_in_a_deterministic_run(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = AsyncMock(return_value=None)
    args = ["--deterministic", "true", "--steps", "2"]
    assert cli.main(["train", "run.toml", "--run-dir", "proved", *args]) == 0
    monkeypatch.setattr("rollover.run.engine_trust.check_logprobs", skipped)
    monkeypatch.setattr("rollover.run.engine_trust.check_sampling", skipped)
    assert cli.main(["train", "run.toml", "--run-dir", "unproved", *args]) == 0
    assert runs.weights(Path("proved"), 2) == runs.weights(Path("unproved"), 2)
