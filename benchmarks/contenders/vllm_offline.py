"""vLLM's own ``LLM.generate``, in its own environment. It imports nothing of ours."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--in-process", action="store_true", help="the engine in this process, not one of its own")
    args = parser.parse_args()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not args.in_process)),
    }
    if args.in_process:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

    import torch
    import vllm

    load = json.loads(Path(args.load).read_text())
    engine = vllm.LLM(
        load["model"],
        dtype=load["dtype"],
        max_model_len=load["max_context_tokens"],
        max_num_seqs=load["max_running"],
        enforce_eager=args.eager,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # no two prompts are alike, and every repeat must prefill
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": ids} for ids in load["prompts"]]
    params = [
        vllm.SamplingParams(max_tokens=n, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
        for n in load["num_new_tokens"]
    ]
    running = load["max_running"]
    engine.generate(prompts[:running], params[:running], use_tqdm=False)
    seconds = []
    for _ in range(args.repeats):
        start_s = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start_s)
        assert [len(o.outputs[0].token_ids) for o in outputs] == load["num_new_tokens"]
    print(json.dumps({"seconds": seconds, "versions": {"vllm": vllm.__version__, "torch": torch.__version__}}))


if __name__ == "__main__":
    main()
