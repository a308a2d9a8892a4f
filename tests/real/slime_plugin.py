"""The slime integration as slime's own contract tests call it: without arguments, which are filled in here.

The tests give a rollout function ``None`` for its arguments and a data source whose samples are finished already. A rollout
needs servers and prompts, so this stands between: it serves scripted workers behind a router, makes the arguments of a
run with them, and takes the prompts alone from the data source. All else is slime's and ours: the rollout function,
slime's records, its tokenizer, its reward function's path, and, for evaluations, slime's own code over the same router.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import transformers  # noqa: F401  # slime's tests put a stub in its place unless it is there

from rollover.integrations import slime as integration
from tests.engine.servers.scripted_server import Answer
from tests.integrations.slime import kit
from tests.integrations.slime.farm import Farm, OldSGLang, Router, farm

TOKENIZER = Path(__file__).parent.parent / "run/recorded/model"
_open = ExitStack()
atexit.register(_open.close)


async def reward(args: Namespace, sample: Any, **known: Any) -> float:
    return float(len(sample.response) % 3)


class ForwardingRouter(Router):
    """A router that also hands calls on, as slime's own rollout function wants it."""

    worker: OldSGLang

    async def _post_generate(self, query: dict[str, str], body: Any) -> Answer:
        whole = {"rid": f"g{len(self.log)}.0#", "stream": False, **body}
        whole["sampling_params"]["ignore_eos"] = False
        for name in ("stop", "stop_token_ids"):
            whole["sampling_params"][name] = whole["sampling_params"].get(name) or []
        return await self.worker._post_generate(query, whole)


class PromptsOnly:
    """Groups of a data source without the responses that they have."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.num_groups = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = []
        for given in self.source.get_samples(num_samples):
            kind = type(given[0])
            group = [kind(index=sample.index, group_index=self.num_groups, prompt=given[0].prompt) for sample in given]
            self.num_groups += 1
            groups.append(group)
        return groups


def arguments(servers: Farm, folder: Path) -> Namespace:
    """Those that slime's parser would make, as far as a rollout or an evaluation reads them."""
    from slime.utils.eval_config import EvalDatasetConfig

    model = shutil.copytree(TOKENIZER, folder / "tokenizer")
    config = json.loads((model / "config.json").read_text())
    config |= {"vocab_size": 64, "max_position_embeddings": 256}
    (model / "config.json").write_text(json.dumps(config))
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"text": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(3)))
    return kit.arguments(
        folder,
        servers.port,
        hf_checkpoint=str(model),
        rollout_batch_size=2,
        over_sampling_batch_size=4,
        n_samples_per_prompt=2,
        rollout_max_response_len=16,
        rollout_num_engines=2,
        sglang_server_concurrency=16,
        sglang_dp_size=1,
        custom_rm_path="tests.real.slime_plugin.reward",
        custom_generate_function_path=None,
        eval_reward_key=None,
        eval_max_prompt_len=None,
        eval_datasets=[EvalDatasetConfig(name="held out", path=str(held_out), input_key="text", label_key="label")],
        multimodal_keys=None,
        apply_chat_template=False,
        apply_chat_template_kwargs=None,
        use_rollout_routing_replay=False,
        use_distributed_post=False,
        ci_test=False,
        save=None,
        load=None,
    )


def _servers() -> Farm:
    servers = _open.enter_context(farm(ForwardingRouter))
    assert isinstance(servers.router, ForwardingRouter)
    servers.router.worker = servers.workers[0]
    servers.update_weights()
    return servers


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    servers = _servers()
    filled = arguments(servers, Path(_open.enter_context(tempfile.TemporaryDirectory())))
    if evaluation:
        from slime.utils.http_utils import init_http_client

        init_http_client(filled)
        for dataset in filled.eval_datasets:
            dataset.temperature, dataset.top_p, dataset.top_k, dataset.max_response_len = 1.0, 1.0, -1, 16
            dataset.n_samples_per_eval_prompt = 1
        return integration.generate_rollout(filled, rollout_id, data_source, evaluation=True)
    return integration.generate_rollout(filled, rollout_id, PromptsOnly(data_source), evaluation=False)
