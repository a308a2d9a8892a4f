"""TRL's ``GRPOTrainer`` with rollouts that roll over: partial rollouts, a staleness bound, a journal, a report.

TRL keeps its data, rewards, advantages, loss, logging, checkpoints and evaluation. Instead of answers to its prompts it
gets the scheduler's next batch, including the prompts: the rows from its data loader are ignored. TRL's own importance
sampling, made for the mismatch between vLLM and the trainer, corrects for tokens of older weights, since it compares
the log-probs that a token was sampled with to those of the weights that train it. So TRL is told, while it trains, that
it uses vLLM, but vLLM is never opened.

Invariants: tokens and their log-probs reach the loss exactly as they were sampled; a failed completion has
advantage 0 and no token in the loss; a loss that ignores the behaviour log-probs is refused; after a crash each batch
that the checkpoint does not include comes again, once, unchanged.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import TrainerCallback

from rollover.batch import Batch
from rollover.engine.base import Capabilities
from rollover.errors import ConfigError, RolloverError, RunError
from rollover.integrations.hosted import Asked, HostedConfig, hosted_config
from rollover.integrations.record import HostedRun
from rollover.integrations.trl.answers import Answers, Measured, measure
from rollover.integrations.trl.checks import (
    arguments_in_the_way,
    check_correction,
    check_dropout,
    check_version,
    given_by,
    out_of_step,
    refuse,
    settings_in_the_way,
    steps_per_batch,
    trl_version,
)
from rollover.integrations.trl.prompts import DatasetPrompts, encoder, fingerprint
from rollover.integrations.trl.rollouts import HostedRollouts
from rollover.integrations.trl.weights import dropouts, model_folder, number_format
from rollover.report.record import JOURNAL, read_config
from rollover.rollout.events import Event
from rollover.run.directory import RunDir

_RATIO = "importance_sampling_ratio"
_UNWEIGHED = (
    "the log-probs that tokens were sampled with, so tokens of older weights would be trained as if the current ones"
    " had sampled them: use TRL's own GRPOTrainer, and please report this"
)
_STATE = "trainer_state.json"
"""The last file that TRL writes in a checkpoint: one without it is incomplete."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's trainer with Rollover's rollouts. All arguments but one are TRL's.

    Example::

        from rollover.integrations.trl import GRPOTrainer          # in place of: from trl import GRPOTrainer

        trainer = GRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...,
                              rollover={"rollout": {"strategy": "april", "max_staleness": 4}})
        trainer.train()                                            # after a crash: resume_from_checkpoint=True

    Args:
        rollover: how rollouts are scheduled and which engine decodes them: the name of a strategy, a TOML file, or a
            dictionary with the tables ``rollout`` and ``engine`` of a run's config. Settings that ``GRPOConfig``
            determines must not be repeated. By default the engine is embedded.
        observer: called with each event of the rollouts, on a thread of its own.

    Raises:
        ConfigError: TRL's version or a setting does not work; the message has a line for each.
    """

    use_vllm: bool
    rollout_func: Callable[[Any, Any], dict[str, Any]] | None

    def __init__(
        self, *args: Any, rollover: Asked = None, observer: Callable[[Event], None] = lambda event: None, **kwargs: Any
    ) -> None:
        check_version()
        refuse(arguments_in_the_way(inspect.signature(trl.GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments))
        self._rollouts: HostedRollouts | None = None
        self._answers: Answers | None = None
        self._observer = observer
        super().__init__(*args, **kwargs)
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        num_processes = self.accelerator.num_processes
        refuse(settings_in_the_way(self.args, num_processes=num_processes, is_sharded=is_sharded))
        check_dropout(dropouts(self.model))
        if any(getattr(self.model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
            raise ConfigError("the model's weights are quantised, so engines cannot load them: load it unquantised")
        if self._is_vlm:
            raise ConfigError("the model reads images, which no engine of Rollover supports: use a text model")
        self.rollover_config: HostedConfig = hosted_config(
            rollover, given_by(self.args, self.num_generations), source="rollover="
        )
        """The complete settings of the rollouts."""
        check_correction(self.args, is_on_policy=self.rollover_config.rollout.staleness_bound == 0)
        self.add_callback(_Steps(self))

    # -- training --------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. With ``resume_from_checkpoint=True`` the run resumes from its newest complete checkpoint,
        or from the beginning if it was stopped before there was one; no batch is decoded twice.

        Raises:
            RunError: the output directory has the rollouts of an earlier run, or of a run other than the resumed one.
            RolloverError: the message says what the user can do about it; the run can be resumed.
        """
        resumes = bool(resume_from_checkpoint)
        place = run_folder(Path(self.args.output_dir), resume=resumes)
        if resume_from_checkpoint is True:
            found = whole_checkpoints(Path(self.args.output_dir))
            resume_from_checkpoint = str(found[-1][1]) if found else None
            if resume_from_checkpoint is None and not place.exists():
                raise RunError(
                    f"{self.args.output_dir} holds no run to resume: call train() without resume_from_checkpoint"
                )
            if resume_from_checkpoint is None and self.state.global_step:
                raise RunError(
                    f"this trainer's model has been trained for {self.state.global_step} steps, and no checkpoint was"
                    " saved, so the run resumes from its beginning: create model and trainer anew, or start the script"
                    " again"
                )
        if not (resumes or (place / JOURNAL).exists()) and (older := whole_checkpoints(Path(self.args.output_dir))):
            raise RunError(
                f"{older[-1][1]} is a checkpoint of another run, from which this one would be resumed: move it away, or"
                " choose another output_dir"
            )
        self._run = HostedRun(
            place,
            self.rollover_config,
            host=f"trl {trl_version()}",
            resume=resumes,
            facts={"dataset": fingerprint(self.train_dataset), "steps_per_batch": steps_per_batch(self.args)},
            remedy="resume it with trainer.train(resume_from_checkpoint=True)",
        )
        with self._run:
            try:
                self._step, self._buffered_inputs = 0, None  # left behind by a train() that was stopped within a batch
                with self._behaviour_weighed(True):
                    result = super().train(resume_from_checkpoint, *args, **kwargs)
                if self._rollouts is not None:
                    self._rollouts.finish_step()
            except BaseException:
                with suppress(RolloverError):  # what ended the run says more
                    self._close_rollouts()
                raise
            self._close_rollouts()
            return result

    def _close_rollouts(self) -> None:
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            rollouts.close()

    @contextmanager
    def _behaviour_weighed(self, wanted: bool) -> Iterator[None]:
        """Switch TRL's weighting by the log-probs that tokens were sampled with on or off within this context; when
        off, TRL samples by itself."""
        before, self.use_vllm = self.use_vllm, wanted
        try:
            yield
        finally:
            self.use_vllm = before

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.use_vllm:
            return super()._generate_and_score_completions(inputs)
        rollouts = self._opened_rollouts()
        version, beyond = divmod(self.state.global_step, steps_per_batch(self.args))
        if beyond:
            raise RunError(
                f"TRL asks for a batch at optimizer step {self.state.global_step}, in the middle of a batch of"
                f" {steps_per_batch(self.args)} steps: resume from a checkpoint at the end of a batch"
            )
        batch = rollouts.take(version)
        answers = Answers.of(batch, num_generations=self.num_generations, end_token=int(self._tokenizer.eos_token_id))
        rows = [self._row(row) for row in answers.rows]
        self._last_loaded_step = self.state.global_step  # otherwise TRL would load weights into its vLLM
        self._answers, self.rollout_func = answers, self._answer
        try:
            output = super()._generate_and_score_completions(rows)
        finally:
            self._answers, self.rollout_func = None, None
        self._look_at(output, answers, batch)
        return output

    def _answer(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Return the batch to TRL in place of answers to ``prompts``, which are the batch's."""
        answers = self._answers
        assert answers is not None and len(prompts) == len(answers.rows)
        fields = {
            "prompt_ids": answers.prompt_ids,
            "completion_ids": answers.completion_ids,
            "logprobs": answers.logprobs,
        }
        return {**fields, "env_mask": answers.env_mask} if any(answers.failed) else fields

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Call the reward functions for decoded completions. Failed ones get no reward, and no ``log_extra``."""
        failed = self._answers.failed if self._answers is not None else []
        if not any(failed):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        there = [i for i, is_failed in enumerate(failed) if not is_failed]
        some = [[column[i] for i in there] for column in (inputs, prompts, completions, completion_ids_list)]
        found = super()._calculate_rewards(*some)
        for column, values in self._pending_extra_logs.items():
            given = iter(values)
            self._pending_extra_logs[column] = [None if is_failed else next(given, None) for is_failed in failed]
        rewards = torch.full((len(failed), found.shape[1]), torch.nan, dtype=found.dtype, device=found.device)
        rewards[there] = found
        return rewards

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss. Raises ``RunError`` if this version of TRL ignores the importance weights."""
        if not self.use_vllm or not self.vllm_importance_sampling_correction:
            return super().compute_loss(model, inputs, *args, **kwargs)
        watched = _Watched(inputs)
        loss = super().compute_loss(model, watched, *args, **kwargs)
        if _RATIO not in watched.looked_up:
            raise RunError(f"TRL {trl_version()} computes the loss without {_UNWEIGHED}")
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does. The time is no part of a step, unless samples decode meanwhile."""
        with nullcontext() if self._rollouts is None else self._rollouts.set_aside():
            return super().evaluate(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does, with TRL's own generation."""
        with self._behaviour_weighed(False):
            return super().prediction_step(*args, **kwargs)

    def _look_at(self, output: Mapping[str, Any], answers: Answers, batch: Batch) -> None:
        """Compare engine and trainer, and add the measurements of the batch to both accounts."""
        assert self._rollouts is not None
        if self.vllm_importance_sampling_correction and _RATIO not in output:
            raise RunError(f"TRL {trl_version()} has computed no weights from {_UNWEIGHED}")
        has_other_gradients = self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled
        found: Measured = measure(output, answers, advantages_alone=not has_other_gradients)
        self._rollouts.judge(found.drift)
        logged = self._metrics["train"]
        rewards = {
            ours: logged[theirs][-1] for ours, theirs in (("reward/mean", "reward"), ("reward/std", "reward_std"))
        }
        ours = self._rollouts.report({**rewards, "drift": found.drift.mean_abs}, found.untrained)
        for name, key in _LOGGED.items():
            logged[name].append(ours[key])

    # -- what the feed is opened with ------------------------------------------------------------------------

    def _opened_rollouts(self) -> HostedRollouts:
        if self._rollouts is None:
            is_new = not self._run.journal.exists()
            model = self.accelerator.unwrap_model(self.model)
            self._rollouts = HostedRollouts(
                self.rollover_config,
                self._run,
                model,
                folder=model_folder(model, self._tokenizer, self._run.model, is_untrained=self.state.global_step == 0),
                make_source=self._make_source,
                stop_token_ids=self._stop_token_ids(),
                num_tokens=len(self._tokenizer),
                number_format=number_format(model, self.args),
                step=self.state.global_step // steps_per_batch(self.args),
                observer=self._observer,
            )
            if is_new:  # later, neither the dataset nor the length of responses may change
                try:
                    self._source.measure()  # in this thread because it takes long: the feed must answer meanwhile
                except BaseException:  # the run has not begun
                    self._rollouts.feed.close()
                    self._run.journal.unlink()
                    raise
        return self._rollouts

    def _stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a response for TRL: with others, responses would look truncated to it."""
        return tuple(int(token) for token in self.eos_token_ids)

    def _make_source(self, capabilities: Capabilities) -> DatasetPrompts:
        # A tokenizer must not be used in two threads, so the feed has its own.
        tokenizer = copy.deepcopy(self.processing_class)
        self._source = DatasetPrompts(
            self.train_dataset,
            encoder(tokenizer, {"chat_template": self.chat_template, **self.chat_template_kwargs}),
            seed=self.rollover_config.seed,
            shuffle=bool(self.shuffle_dataset),
            max_prompt_tokens=capabilities.max_context_tokens - self.max_completion_length,
        )
        return self._source

    def _row(self, row: int) -> dict[str, Any]:
        columns = dict(self.train_dataset[row])
        return {"prompt": columns["prompt"]} if self.args.remove_unused_columns else columns

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as TRL does, once the journal records that the batch is trained. A run that dies between the two trains
        it again, and no batch that the checkpoint includes is left open."""
        each = steps_per_batch(self.args)
        if self._rollouts is not None:
            if self.state.global_step % each:
                raise ConfigError(
                    f"a checkpoint after {self.state.global_step} optimizer steps, in the middle of a batch of {each}"
                    f" steps, could not be resumed: save at multiples of {each}"
                )
            self._rollouts.finish_step()
        super()._save_checkpoint(*args, **kwargs)

    def _saved(self) -> None:
        """Record in the journal how far back a restart may go: to the oldest checkpoint that is kept, other than the
        best one. If TRL keeps them all, only the two newest count."""
        if self._rollouts is None:
            return
        found = [(s, p) for s, p in whole_checkpoints(Path(self.args.output_dir)) if s <= self.state.global_step]
        best = Path(self.state.best_model_checkpoint or "").name
        kept = [step for step, path in found if path.name != best or step == found[-1][0]]
        kept = kept if self.args.save_total_limit else kept[-2:]
        self._rollouts.saved(min(kept, default=0) // steps_per_batch(self.args))


_LOGGED = {
    "sample/staleness_mean": "staleness/mean",
    "sample/staleness_max": "staleness/max",
    "sample/off_policy_tokens": "staleness/off_policy_tokens",
    "sample/resumes": "rollout/resumes_per_sample",
    "rollout/parked_samples": "rollout/parked_samples",
    "perf/rollout_wait_s": "time/rollout_s",
    "perf/weight_sync_s": "time/publish_s",
}
"""Metrics of the rollouts that TRL logs: TRL's names for ours."""


def run_folder(output_dir: Path, *, resume: bool) -> Path:
    """Return the directory of the run. Uploads of ``output_dir`` to the Hub leave out names that begin with an
    underscore: prompts and responses may be private. The directory in which an earlier version began the run is renamed
    when the run is resumed, and is otherwise the run's, so that a new run is refused. Raises ``RunError`` when another
    process works there."""
    place, older, job = output_dir / "_rollover", output_dir / "rollover", None
    with suppress(RunError):  # there is none, or it is of something else
        job = read_config(older)["meta"].get("job")
    if place.exists() or job != "trl":
        return place
    with RunDir(older) as run:
        if run.journal.exists() and not resume:
            return older
        older.rename(place)
    return place


def whole_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Return step and folder of the complete checkpoints in ``output_dir``, oldest first."""
    if not output_dir.is_dir():
        return []
    found = [(entry, _CHECKPOINT.fullmatch(entry.name)) for entry in output_dir.iterdir()]
    return sorted(
        (int(match[1]), entry) for entry, match in found if match is not None and os.path.isfile(entry / _STATE)
    )


class _Watched(dict[str, Any]):
    """The inputs of a loss, which records the keys that were looked up."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__(inputs)
        self.looked_up: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.looked_up.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.add(key)
        return super().get(key, default)


class _Steps(TrainerCallback):
    """Refuses step counts that cannot work once TRL has computed them, and records each checkpoint in the journal."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        refuse(out_of_step(args, state.max_steps, state.save_steps))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._saved()
