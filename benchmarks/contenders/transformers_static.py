"""transformers' ``generate`` on static batches: each decodes until its longest request is done. Requests are sorted by
length first, which is the best that can be done with lengths known beforehand; only tokens asked for count."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers
from workload import Load, read_load


@torch.inference_mode()
def decode(model: Any, load: Load) -> None:
    order = sorted(range(len(load.prompts)), key=load.num_new_tokens.__getitem__)
    for start in range(0, len(order), load.max_running):
        batch = order[start : start + load.max_running]
        ids = torch.tensor([load.prompts[i] for i in batch])
        longest = max(load.num_new_tokens[i] for i in batch)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    load = read_load(args.load)
    model = transformers.AutoModelForCausalLM.from_pretrained(load.model, dtype=getattr(torch, load.dtype)).eval()
    model.generation_config.pad_token_id = 0
    ids = torch.tensor(load.prompts[: load.max_running])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=True)
    seconds = []
    for _ in range(args.repeats):
        start_s = time.perf_counter()
        decode(model, load)
        seconds.append(time.perf_counter() - start_s)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"seconds": seconds, "versions": versions}))
