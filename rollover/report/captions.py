"""Captions of the figures: what to look for in each."""

from __future__ import annotations

LEARNING = (
    "Left over training steps, right over wall-clock, evaluations included: a method that learns the same per"
    " step but steps faster is ahead on the right only. Bars on the accuracy are standard errors."
)
TIMELINE = (
    "Each bar is a sample, coloured by the policy version that sampled it; a thin line is a sample parked"
    " until a later step. A row that changes colour without ending was rolled over to newer weights. A cross:"
    " never trained. Shaded: training and publishing; a dashed line is a restart. Below, the samples decoding"
    " at each moment: the area missing under a falling curve is idle engine. Drag to zoom, double-click to go"
    " back."
)
MEMBERS = (
    "A lane for each member of the swarm, or each server: every thin bar is a sample that it decoded, coloured by the"
    " policy version. An upright mark is a change to newer weights; an empty stretch is a member that was away, or had"
    " no call. Members of different colours at one moment are what the staleness of the batches comes from."
)
ALIGNED = (
    "The same training steps of every run on axes of equal length: the shorter picture is the faster run."
    " Bars are samples coloured by the policy version that sampled them, thin lines parked samples, shaded is"
    " training and publishing; below, the samples decoding at each moment."
)
LAG = (
    "How many versions older than the weights they trained the tokens were; 0 is on-policy. Head lag is the"
    " lag of a sample's oldest token: a line that keeps rising means that some samples are passed over again"
    " and again. All tokens of the batches count here, those that had no gradient too."
)
TOKENS = (
    "Every decoded token is trained (it had a gradient), wasted with a cause, or still alive. If the trained"
    " lengths fall short of the generated ones, the schedule favours short answers. Mean trained over mean"
    " generated here: {drift}."
)
TIME = (
    "What a training step waits for. A high first part says that rollout is the bottleneck; the gap between"
    " the two throughputs is what training, publishing and idling cost."
)
HEALTH = "Signals to glance at when learning stalls."
COMPARED = (
    "Ratios are to the first run. Throughput counts tokens that had a gradient, and never stands alone: read lag,"
    " waste and re-prefilled tokens with it."
)
SPENT = "Seconds of the whole run by phase, and the trained lengths: faster must not mean shorter answers."
