"""transformers' continuous batching: requests with lengths of their own, admitted as others finish."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from workload import Load, read_load


def decode(model: Any, load: Load, num_new_tokens: list[int]) -> None:
    config = transformers.GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        for prompt, length in zip(load.prompts, num_new_tokens, strict=False):
            manager.add_request(prompt, max_new_tokens=length)
        done = 0
        while done < len(num_new_tokens):
            result = manager.get_result(timeout=600)
            assert result is not None and not result.error, result
            done += result.is_finished()
    finally:
        manager.stop(block=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    load = read_load(args.load)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        load.model, dtype=getattr(torch, load.dtype), attn_implementation="paged|sdpa"
    ).eval()
    decode(model, load, [2] * min(4, len(load.prompts)))
    seconds = []
    for _ in range(args.repeats):
        start_s = time.perf_counter()
        decode(model, load, load.num_new_tokens)
        seconds.append(time.perf_counter() - start_s)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"seconds": seconds, "versions": versions}))
