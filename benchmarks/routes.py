"""What routing replay changes: log-probs and gradients of a small mixture of experts (32 experts, 4 per token) whose
tokens the embedded engine samples in float32 or bfloat16 and the trainer computes in float32, without and with replayed
routes, and for bfloat16 the second over the first. Prints one JSON line.

    python benchmarks/routes.py --out benchmarks/results/routes-DATE.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rollover.engine.base import GenerateRequest
from rollover.engine.embedded import EmbeddedConfig
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.models import open_model
from rollover.trainer.packing import TrainingSample, pack
from rollover.types import SamplingParams

SHAPE: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512},
    **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    **{"initializer_range": 0.08, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
PROMPTS, TOKENS = 16, 128


async def sampled(folder: Path, dtype: Any) -> list[tuple[TrainingSample, list[float]]]:
    """Return what the engine samples, with routes and log-probs."""
    engine = EmbeddedEngine.from_folder(folder, EmbeddedConfig(dtype=dtype, cpu_kernels="torch", max_running=PROMPTS))
    params = SamplingParams(max_new_tokens=TOKENS, returns_routes=True)

    async def one(number: int) -> tuple[TrainingSample, list[float]]:
        prompt = tuple((37 * number + 11 * place) % 509 + 3 for place in range(8 + number))
        name = f"g{number}"
        request = GenerateRequest(
            request_id=name, sample_key=name, prompt_key=name, prompt_ids=prompt, params=params, seed=number
        )
        chunks = [chunk async for chunk in engine.generate(request)]
        sample = TrainingSample(
            prompt_ids=prompt,
            response_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            routes=tuple(route for chunk in chunks for route in chunk.routes),
        )
        return sample, [logprob for chunk in chunks for logprob in chunk.logprobs]

    found = await asyncio.gather(*map(one, range(PROMPTS)))
    await engine.close()
    return found


def computed(model: Any, samples: list[TrainingSample]) -> tuple[Tensor, Tensor]:
    """Return the log-probs of all tokens under the trainer and the gradient of their mean."""
    model.zero_grad()
    total = sum(len(sample.response_ids) for sample in samples)
    logprobs_T = torch.zeros(total)
    for row in pack(samples, 4096):
        of_row = response_logprobs(model, row, 1.0)
        (of_row.sum() / total).backward()
        logprobs_T[row.token_T] = of_row.detach()
    return logprobs_T, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def mismatch(logprobs_T: Tensor, engine_T: Tensor) -> dict[str, float]:
    ratio_T = logprobs_T - engine_T
    return {
        "mean_abs": float(ratio_T.abs().mean()),
        "max_abs": float(ratio_T.abs().max()),
        "k3": float((ratio_T.exp() - 1 - ratio_T).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = AutoConfig.for_model("qwen3_moe", **SHAPE)
        model: Any = AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16).save_pretrained(folder)  # both begin with the same values
        policy = open_model(folder)
        result: dict[str, Any] = {"tokens": PROMPTS * TOKENS}
        gradients = {}
        for dtype in ("float32", "bfloat16"):
            found = asyncio.run(sampled(folder, dtype))
            samples, engine_T = [s for s, _ in found], torch.tensor([p for _, own in found for p in own])
            for way in ("off", "on"):
                given = samples if way == "on" else [replace(s, routes=()) for s in samples]
                logprobs_T, gradients[way] = computed(policy, given)
                result[f"{dtype}, replay {way}"] = mismatch(logprobs_T, engine_T)
            off, on = (result[f"{dtype}, replay {way}"] for way in ("off", "on"))
            if dtype == "bfloat16":
                result[f"{dtype}, on / off"] = {key: on[key] / off[key] for key in off}
            distance = (gradients["on"] - gradients["off"]).norm() / gradients["off"].norm()
            result[f"{dtype}, gradient: distance on to off over off"] = float(distance)
    line = json.dumps(result)
    print(line)
    if options.out:
        options.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
